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

void Inference::add(std::vector<Part> parts, double took_ns) {
  Run run;
  for (const Part& each : parts) run.size += each.count;
  run.parts = std::move(parts);
  run.took_ns = took_ns;
  group(run);
  if (runs_.size() == kMemory) runs_.pop_front();
  runs_.push_back(std::move(run));
  ++fresh_;
}

void Inference::group(Run& run) {
  run.members.clear();
  for (const Part& part : run.parts) {
    const auto is = [&](const Members& each) { return each.application == part.application; };
    auto at = std::find_if(run.members.begin(), run.members.end(), is);
    if (at == run.members.end()) at = run.members.insert(at, {part.application, 0, 0});
    at->count += part.count;
  }
  for (Members& each : run.members) each.share = each.count / run.size;
}

void Inference::move(uint32_t from, uint32_t objective, uint32_t to) {
  for (Run& run : runs_) {
    bool moved = false;
    for (Part& each : run.parts) {
      if (each.application != from || each.objective != objective) continue;
      each.application = to;
      moved = true;
    }
    if (moved) group(run);
  }
}

void Inference::index() {
  events_.clear();
  place_of_.clear();
  for (Run& run : runs_)
    for (Members& part : run.members) {
      if (run.odd) break;
      const auto [at, fresh] = place_of_.try_emplace(part.application, events_.size());
      if (fresh) events_.emplace_back(part.application, std::vector<Event>());
      Event event;
      event.of = &part;
      event.count = part.count;
      event.log_size = std::log(run.size);
      events_[at->second].second.push_back(event);
    }
}

void Inference::set_longest(double c0_ns, double c1) {
  index();
  for (Run& run : runs_)
    run.longest_ns = std::max(run.took_ns - c0_ns, kLeastPart * run.took_ns) / (c1 * run.size);
  std::vector<size_t> next(events_.size());
  for (const Run& run : runs_)
    for (const Members& part : run.members) {
      if (run.odd) break;
      const size_t at = place_of_.at(part.application);
      events_[at].second[next[at]++].longest_ns = run.longest_ns;
    }
  for (auto& [application, events] : events_)
    std::sort(events.begin(), events.end(),
              [](const Event& a, const Event& b) { return a.longest_ns < b.longest_ns; });
}

double Inference::imbalance(double c0_ns, double c1) {
  set_longest(c0_ns, c1);
  double sum = 0;
  for (const auto& [application, events] : events_) {
    double members = 0, logs = 0;
    for (const Event& each : events) {
      members += each.count;
      logs += each.count * each.log_size;
      sum += each.of->share * (each.log_size - logs / members);
    }
  }
  return sum;
}

void Inference::add_hazards() {
  for (auto& [application, events] : events_) {
    double members = 0;
    for (Event& each : events) {
      members += each.count;
      each.hazard = each.of->share / members;
    }
  }
}

void Inference::share_events() {
  std::vector<double> near;
  for (auto& [application, events] : events_) {
    near.assign(events.size() + 1, 0);
    for (size_t i = 0; i < events.size(); ++i) near[i + 1] = near[i] + events[i].hazard;
    size_t low = 0, high = 0;
    const double band = std::exp(kBand);
    for (size_t i = 0; i < events.size(); ++i) {
      while (events[low].longest_ns * band < events[i].longest_ns) ++low;
      while (high < events.size() && events[high].longest_ns <= events[i].longest_ns * band) ++high;
      events[i].of->share = events[i].count * (near[high] - near[low] + 1e-9);
    }
  }
  for (Run& run : runs_) {
    double total = 0;
    for (const Members& each : run.members) total += each.share;
    for (Members& each : run.members) each.share /= total;
  }
}

void Inference::rescale(double factor) {
  runs_.clear();
  first_c0_ns_ *= factor;
}

void Inference::forget(uint32_t application) {
  std::erase_if(runs_, [&](const Run& run) {
    return std::any_of(run.members.begin(), run.members.end(),
                       [&](const Members& each) { return each.application == application; });
  });
}

double Inference::find_c0(double c0_ns, double c1) {
  if (first_c0_ns_ == 0) first_c0_ns_ = c0_ns;
  std::vector<double> took;
  for (const Run& each : runs_) took.push_back(each.took_ns);
  const auto short_one = took.begin() + static_cast<ptrdiff_t>(took.size() / 20);
  std::nth_element(took.begin(), short_one, took.end());
  double low = 0, high = kMostFixed * *short_one;
  for (int i = 0; i < kSearches; ++i) {
    const double middle = (low + high) / 2;
    const double off = imbalance(middle, c1) + kPrior * (middle / std::max(first_c0_ns_, 1.0) - 1);
    (off < 0 ? low : high) = middle;
  }
  return (low + high) / 2;
}

void Inference::estimate_all(double c0_ns, double c1) {
  set_longest(c0_ns, c1);
  add_hazards();
  for (int i = 0; i < kRounds && events_.size() > 1; ++i) {
    share_events();
    add_hazards();
  }
  estimates_.clear();
  for (const auto& [application, events] : events_) estimates_.push_back(quantiles_of(application, events));
}

double Inference::estimate(double c0_ns, double c1, bool fixed) {
  fresh_ = 0;
  estimates_.clear();
  if (runs_.empty() || !(c1 > 0)) return c0_ns;
  if (!fixed) c0_ns = find_c0(c0_ns, c1);
  estimate_all(c0_ns, c1);
  if (!leave_out_odd(c0_ns, c1)) return c0_ns;
  if (!fixed) c0_ns = find_c0(c0_ns, c1);
  estimate_all(c0_ns, c1);
  return c0_ns;
}

double Inference::expected_longest_ns(const Run& run) const {
  constexpr int kPoints = 64;
  double high = 0;
  for (const Members& each : run.members)
    if (const auto at = place_of_.find(each.application); at != place_of_.end())
      high = std::max(high, static_cast<double>(estimates_[at->second].durations_ns.back()));
  double sum = 0;
  for (int i = 0; i < kPoints; ++i) {
    const auto point = static_cast<uint64_t>((i + 0.5) * high / kPoints);
    double below = 1;
    for (const Members& each : run.members) {
      const auto at = place_of_.find(each.application);
      if (at == place_of_.end()) continue;
      const std::vector<uint64_t>& all = estimates_[at->second].durations_ns;
      const auto count = std::upper_bound(all.begin(), all.end(), point) - all.begin();
      below *= std::pow(static_cast<double>(count) / kDurations, each.count);
    }
    sum += 1 - below;
  }
  return sum * high / kPoints;
}

bool Inference::leave_out_odd(double c0_ns, double c1) {
  size_t odd = 0;
  bool fresh = false;
  for (Run& run : runs_) {
    double least_ns = 0;
    for (const Members& each : run.members)
      if (const auto at = place_of_.find(each.application); at != place_of_.end())
        least_ns = std::max(least_ns, estimates_[at->second].mean_ns);
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
double Inference::slope(const std::vector<Event>& events, const std::vector<double>& levels) {
  double n = 0, sz = 0, szz = 0, sy = 0, szy = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    const double weight = events[i].of->share + 1e-9;
    const double z = quantile_of_normal(levels[i]), y = std::log(events[i].longest_ns);
    n += weight;
    sz += weight * z;
    szz += weight * z * z;
    sy += weight * y;
    szy += weight * z * y;
  }
  const double spread = n * szz - sz * sz;
  return spread > 1e-9 * n * szz ? std::clamp((n * szy - sz * sy) / spread, 0.0, kMostSigma) : 0;
}

Inference::Estimate Inference::quantiles_of(uint32_t application, const std::vector<Event>& events) const {
  Estimate out;
  out.application = application;
  // Levels of the distribution function at the events, in the middle of their steps.
  std::vector<double> levels(events.size());
  double above = 0;
  for (size_t i = events.size(); i-- > 0;) {
    levels[i] = std::exp(-above - events[i].hazard / 2);
    above += events[i].hazard;
    out.members += events[i].count;
  }
  const double sigma = slope(events, levels), first_z = quantile_of_normal(levels.front());
  size_t at = 0;
  for (size_t i = 0; i < kDurations; ++i) {
    const double level = (static_cast<double>(i) + 0.5) / kDurations;
    while (at < levels.size() && levels[at] < level) ++at;
    double ns = events.back().longest_ns;
    if (at == 0) {
      ns = events.front().longest_ns * std::exp(sigma * (quantile_of_normal(level) - first_z));
    } else if (at < levels.size() && i + 1 < kDurations) {
      const double part = (level - levels[at - 1]) / std::max(levels[at] - levels[at - 1], 1e-12);
      ns = events[at - 1].longest_ns + part * (events[at].longest_ns - events[at - 1].longest_ns);
    }
    out.durations_ns.push_back(std::max<uint64_t>(base::to_uint64(ns), 1));
    out.mean_ns += ns / kDurations;
  }
  return out;
}

}  // namespace gpushare::sched::slo
