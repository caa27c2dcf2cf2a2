// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/inference.hpp"

#include <algorithm>
#include <cmath>

#include "base/saturate.hpp"

namespace gpushare::sched::slo {
namespace {

// The quantile of the standard normal distribution, within 5e-4 (a rational approximation).
double quantile_of_normal(double p) {
  p = std::clamp(p, 1e-9, 1 - 1e-9);
  const double t = std::sqrt(-2 * std::log(std::min(p, 1 - p)));
  const double x =
      t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
  return p < 0.5 ? -x : x;
}

}  // namespace

void Inference::add(const std::vector<Part>& parts, double took_ns) {
  Run run;
  run.pieces.reserve(parts.size());
  for (const Part& each : parts) {
    run.pieces.push_back({each, 0, 0});
    run.size += each.count;
  }
  run.log_size = std::log(run.size);
  run.took_ns = took_ns;
  share_alike(run);
  if (runs_.size() == kMemory) drop_oldest();
  parts_ += parts.size();
  runs_.push_back(std::move(run));
  ++fresh_;
  while (parts_ > kMostParts && runs_.size() > kLeastRuns) drop_oldest();
  for (Run& each : runs_) {
    if (parts_ <= kMostParts) break;
    parts_ -= each.pieces.size() - 1;
    each.pieces =
        std::vector<Piece>{{{kRare, 0, static_cast<uint32_t>(each.size)}, 1, 0}};  // frees the others
  }
}

void Inference::drop_oldest() {
  parts_ -= runs_.front().pieces.size();
  runs_.pop_front();
}

void Inference::share_alike(Run& run) {
  for (Piece& each : run.pieces) each.share = each.count / run.size;
}

void Inference::move(uint32_t from, uint32_t objective, uint32_t to) {
  for (Run& run : runs_) {
    bool moved = false;
    for (Piece& each : run.pieces) {
      if (each.application != from || each.objective != objective) continue;
      each.application = to;
      moved = true;
    }
    if (!moved) continue;
    share_alike(run);
    std::sort(run.pieces.begin(), run.pieces.end(),
              [](const Piece& a, const Piece& b) { return a.application < b.application; });
  }
}

bool Inference::holds(const Run& run, const Run& other) {
  auto at = run.pieces.begin();
  for (const Piece& each : other.pieces) {
    while (at != run.pieces.end() && at->application < each.application) ++at;
    if (at == run.pieces.end() || at->application != each.application) return false;
  }
  return true;
}

double Inference::change(const Run& run, size_t older) const {
  bool longer = true, shorter = true;
  double above = 0, below = 0, above_ns = 0, below_ns = 0;
  for (size_t i = older; i-- > 0 && (longer || shorter);) {
    const Run& each = runs_[i];
    if (longer && each.size >= run.size && holds(each, run)) {
      longer = run.took_ns > kAbove * each.took_ns;
      above_ns += each.took_ns;
      ++above;
    }
    if (shorter && each.size <= run.size && holds(run, each)) {
      shorter = run.took_ns < kBelow * each.took_ns;
      below_ns += each.took_ns;
      ++below;
    }
  }
  if (longer && above >= kToCompare) return run.took_ns * above / above_ns;
  return shorter && below >= kToCompare ? run.took_ns * below / below_ns : 1;
}

double Inference::follow_change() {
  if (runs_.size() < kInARow + kToCompare) return 1;
  const size_t older = runs_.size() - kInARow;
  double factor = 1;
  for (size_t i = runs_.size(); i-- > older;) {
    const double each = change(runs_[i], older);
    if (each == 1 || (each - 1) * (factor - 1) < 0) return 1;  // none, or another direction
    factor *= std::pow(each, 1.0 / kInARow);
  }
  while (runs_.size() > kInARow + kToCompare) drop_oldest();
  for (size_t i = 0; i < kToCompare; ++i) runs_[i].took_ns *= factor;
  told_c0_ns_ *= factor;
  return factor;
}

void Inference::index() {
  places_.clear();
  groups_.clear();
  events_.clear();
  order_.clear();
  for (Run& run : runs_) {
    if (run.odd) continue;
    order_.push_back(&run);
    for (const Piece& each : run.pieces) places_[each.application].events += each.count / run.size;
  }
  const bool many = places_.size() > kFew;
  // The odd ones last: a group needs a batch that is not.
  for (const bool odd : {false, true})
    for (Run& run : runs_)
      if (run.odd == odd) add_events(run, many);
}

void Inference::add_events(Run& run, bool many) {
  run.first = events_.size();
  for (Piece& each : run.pieces) {
    uint32_t application = each.application;
    if (many && places_[application].events < kLeastEvents) application = kRare;
    Place& place = places_[application];
    if (place.group == SIZE_MAX) {
      if (run.odd) continue;
      place.group = groups_.size();
      groups_.emplace_back().application = application;
    }
    Group& group = groups_[place.group];
    if (group.newest == SIZE_MAX || group.newest < run.first) {
      group.newest = events_.size();
      events_.push_back({&run, place.group, 0, 0, 0});
    }
    each.event = group.newest;
    events_[each.event].count += each.count;
    events_[each.event].share += each.share;
  }
  run.end = events_.size();
}

void Inference::set_longest(double c0_ns, double c1) {
  for (Run* run : order_)
    run->longest_ns = std::max(run->took_ns - c0_ns, kLeastPart * run->took_ns) / (c1 * run->size);
  std::sort(order_.begin(), order_.end(),
            [](const Run* a, const Run* b) { return a->longest_ns < b->longest_ns; });
}

double Inference::imbalance(double c0_ns, double c1) {
  set_longest(c0_ns, c1);
  for (Group& each : groups_) each.members = each.logs = 0;
  double sum = 0;
  for (const Run* run : order_)
    for (size_t i = run->first; i < run->end; ++i) {
      const Event& event = events_[i];
      Group& group = groups_[event.group];
      group.members += event.count;
      group.logs += event.count * run->log_size;
      sum += event.share * (run->log_size - group.logs / group.members);
    }
  return sum;
}

void Inference::add_hazards() {
  for (Group& group : groups_) {
    group.members = 0;
    for (Event* each : group.events) {
      group.members += each->count;
      each->hazard = each->share / group.members;
    }
  }
}

void Inference::share_events() {
  const double band = std::exp(kBand);
  std::vector<double> near;
  for (Group& group : groups_) {
    const std::vector<Event*>& events = group.events;
    near.assign(events.size() + 1, 0);
    for (size_t i = 0; i < events.size(); ++i) near[i + 1] = near[i] + events[i]->hazard;
    size_t low = 0, high = 0;
    for (Event* each : events) {
      const double longest_ns = each->of->longest_ns;
      while (events[low]->of->longest_ns * band < longest_ns) ++low;
      while (high < events.size() && events[high]->of->longest_ns <= longest_ns * band) ++high;
      each->share = each->count * (near[high] - near[low] + 1e-9);
    }
  }
  for (const Run* run : order_) {
    double total = 0;
    for (size_t i = run->first; i < run->end; ++i) total += events_[i].share;
    for (size_t i = run->first; i < run->end; ++i) events_[i].share /= total;
  }
}

void Inference::rescale(double factor) {
  runs_.clear();
  parts_ = 0;
  told_c0_ns_ *= factor;
}

void Inference::forget(uint32_t application) {
  std::erase_if(runs_, [&](const Run& run) {
    return std::any_of(run.pieces.begin(), run.pieces.end(),
                       [&](const Piece& each) { return each.application == application; });
  });
  parts_ = 0;
  for (const Run& each : runs_) parts_ += each.pieces.size();
}

double Inference::find_c0(double c1) {
  std::vector<double> took;
  for (const Run& each : runs_) took.push_back(each.took_ns);
  std::sort(took.begin(), took.end());
  double low = 0, high = kMostFixed * took[took.size() / 20];
  const double supposed = std::max(told_c0_ns_ > 0 ? told_c0_ns_ : kSupposed * took[took.size() / 2], 1.0);
  for (int i = 0; i < kSearches; ++i) {
    const double middle = (low + high) / 2;
    const double off = imbalance(middle, c1) + kPrior * (middle / supposed - 1);
    (off < 0 ? low : high) = middle;
  }
  return (low + high) / 2;
}

void Inference::estimate_all(double c0_ns, double c1) {
  set_longest(c0_ns, c1);
  for (Group& each : groups_) each.events.clear();
  for (Run* run : order_) {
    run->log_longest = std::log(run->longest_ns);
    for (size_t i = run->first; i < run->end; ++i) groups_[events_[i].group].events.push_back(&events_[i]);
  }
  add_hazards();
  for (int i = 0; i < kRounds && groups_.size() > 1; ++i) {
    share_events();
    add_hazards();
  }
  for (Run* run : order_)
    for (Piece& each : run->pieces)
      each.share = events_[each.event].share * each.count / events_[each.event].count;
  estimates_.clear();
  for (const Group& each : groups_) estimates_.push_back(quantiles_of(each));
}

double Inference::estimate(double c0_ns, double c1, bool fixed) {
  fresh_ = 0;
  estimates_.clear();
  if (runs_.empty() || !(c1 > 0)) return c0_ns;
  index();
  if (!fixed) c0_ns = find_c0(c1);
  estimate_all(c0_ns, c1);
  if (!leave_out_odd(c0_ns, c1)) return c0_ns;
  index();
  if (!fixed) c0_ns = find_c0(c1);
  estimate_all(c0_ns, c1);
  return c0_ns;
}

void Inference::tabulate() {
  double low = 1e300, high = 1;
  for (const Estimate& each : estimates_) {
    low = std::min(low, static_cast<double>(each.durations_ns.front()));
    high = std::max(high, static_cast<double>(each.durations_ns.back()));
  }
  for (size_t point = 0; point < kPoints; ++point)
    points_ns_[point] = low * std::pow(high / low, static_cast<double>(point) / (kPoints - 1));
  points_ns_[kPoints - 1] = high;
  for (size_t i = 0; i < estimates_.size(); ++i) {
    const std::vector<uint64_t>& all = estimates_[i].durations_ns;
    size_t count = 0;
    for (size_t point = 0; point < kPoints; ++point) {
      while (count < all.size() && static_cast<double>(all[count]) <= points_ns_[point]) ++count;
      const double below = static_cast<double>(count) / kDurations;
      groups_[i].log_below[point] = std::log(std::max(below, 1e-300));
    }
  }
}

double Inference::expected_longest_ns(const Run& run) const {
  double expected = points_ns_[kPoints - 1], above = 1;
  for (size_t point = kPoints - 1; point-- > 0 && above > 1e-9;) {
    double logarithm = 0;
    for (size_t i = run.first; i < run.end; ++i)
      logarithm += events_[i].count * groups_[events_[i].group].log_below[point];
    const double below = std::exp(logarithm);
    expected -= (points_ns_[point + 1] - points_ns_[point]) * (above + below) / 2;
    above = below;
  }
  return expected;
}

bool Inference::leave_out_odd(double c0_ns, double c1) {
  tabulate();
  size_t odd = 0;
  bool fresh = false;
  for (Run& run : runs_) {
    double least_ns = 0;
    for (size_t i = run.first; i < run.end; ++i)
      least_ns = std::max(least_ns, estimates_[events_[i].group].mean_ns);
    const bool was = run.odd;
    const auto longer_than = [&](double longest_ns) {
      return longest_ns > 0 && run.took_ns > kOdd * (c0_ns + c1 * run.size * longest_ns);
    };
    run.odd = longer_than(least_ns) && longer_than(expected_longest_ns(run));
    fresh = fresh || (run.odd && !was);
    odd += run.odd ? 1 : 0;
  }
  if (odd * kOddPart <= runs_.size()) return fresh;
  for (Run& run : runs_) run.odd = false;
  return false;
}

// The slope of the events' logarithms over the normal quantiles of their levels: a lognormal distribution's deviation.
double Inference::slope(const Group& group, const std::vector<double>& levels) {
  double n = 0, sz = 0, szz = 0, sy = 0, szy = 0;
  for (size_t i = 0; i < levels.size(); ++i) {
    const double weight = group.events[i]->share + 1e-9;
    const double z = quantile_of_normal(levels[i]), y = group.events[i]->of->log_longest;
    n += weight;
    sz += weight * z;
    szz += weight * z * z;
    sy += weight * y;
    szy += weight * z * y;
  }
  const double spread = n * szz - sz * sz;
  return spread > 1e-9 * n * szz ? std::clamp((n * szy - sz * sy) / spread, 0.0, kMostSigma) : 0;
}

Inference::Estimate Inference::quantiles_of(const Group& group) {
  Estimate out;
  out.application = group.application;
  const std::vector<Event*>& events = group.events;
  // Levels of the distribution function at the events, in the middle of their steps.
  std::vector<double> levels(events.size());
  double above = 0;
  for (size_t i = events.size(); i-- > 0;) {
    levels[i] = std::exp(-above - events[i]->hazard / 2);
    above += events[i]->hazard;
    out.members += events[i]->count;
    out.events += events[i]->share;
  }
  const double sigma = slope(group, levels), first_z = quantile_of_normal(levels.front());
  size_t at = 0;
  for (size_t i = 0; i < kDurations; ++i) {
    const double level = (static_cast<double>(i) + 0.5) / kDurations;
    while (at < levels.size() && levels[at] < level) ++at;
    double ns = events.back()->of->longest_ns;
    if (at == 0) {
      ns = events.front()->of->longest_ns * std::exp(sigma * (quantile_of_normal(level) - first_z));
    } else if (at < levels.size() && i + 1 < kDurations) {
      const double part = (level - levels[at - 1]) / std::max(levels[at] - levels[at - 1], 1e-12);
      ns = events[at - 1]->of->longest_ns +
           part * (events[at]->of->longest_ns - events[at - 1]->of->longest_ns);
    }
    out.durations_ns.push_back(std::max<uint64_t>(base::to_uint64(ns), 1));
    out.mean_ns += ns / kDurations;
  }
  return out;
}

}  // namespace gpushare::sched::slo
