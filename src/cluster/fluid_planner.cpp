// The scheduler "gpushare" for trials: several plans for what is left, the one with the earliest end taken.
//   lists     the least-area width that finishes within T, longest first, for several T; no changes on the way
//   fluids    the two algorithms of the source
//   places    each trial on devices of its own speed's worth, running ones moved or not (fluid_lists.cpp)
//   fifo      the default execution
//   wraps     for the least T that fits: each trial mixes two adjacent widths so that it ends exactly at T (the point of its convex hull at
//             the rate that it needs), and McNaughton's wrap-around rule lays the parts of unit width out over the
//             devices that are left. Trials on part of a device share blocks of p slots, which are wrapped in the same
//             way.
// A plan is replaced when trials arrive or complete and another one now ends earlier, changes and their cost included.
// Once a completion has brought another trial (ASHA, PBT without barriers), plans are compared by the mean end of the
// trials instead of the last. While many trials are left, a few that arrive are only taken into the plan that there is.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cluster/fluid_policies.hpp"
#include "cluster/never.hpp"
#include "cluster/portfolio.hpp"

namespace gpushare::cluster {
namespace {

constexpr double kTimeTolerance = 1e-9;
constexpr size_t kMostToReplan = 64;  // trials left up to which plans are compared at every completion
constexpr size_t kMostToWrap = 400;
// Ends within which places are looked for, and the trials x devices from which on there are few, since a decision may
// take milliseconds.
constexpr size_t kPlaceEnds = 8, kFewPlaceEnds = 2, kManyPlaces = 1024;
// With more trials left, few newcomers are taken into the plan that there is: a plan of all would take longer than a
// decision may.
constexpr size_t kMostToPlanAnew = 400;
constexpr size_t kFewOf = 16;  // one in so many

// From a time on a trial holds that; a width of 0: it pauses.
struct Change {
  double time_s;
  size_t trial;
  Width width;
  std::vector<int> devices;
};

class TimelinePolicy final : public TrialPolicy {
 public:
  // `changes` are sorted by time. A trial that they do not name pauses from the start.
  explicit TimelinePolicy(std::vector<Change> changes)
      : changes_(std::make_shared<const std::vector<Change>>(std::move(changes))) {}
  void arrived(TrialRun&, const std::vector<size_t>&) override {}
  void finished(TrialRun&) override {}
  double wake_s() const override { return next_ < changes_->size() ? (*changes_)[next_].time_s : kNever; }
  void woken(TrialRun& run) override {
    const size_t first = next_;
    while (wake_s() <= run.now_s()) ++next_;
    // The last change of each trial counts.
    std::vector<const Change*> last;
    std::vector<char> seen(run.trials().size(), 0);
    for (size_t i = next_; i > first; --i) {
      const Change& change = (*changes_)[i - 1];
      if (std::exchange(seen[change.trial], 1) != 0 || run.trials()[change.trial].finished) continue;
      const TrialRun::State& state = run.trials()[change.trial];
      if (state.width != change.width || state.devices != change.devices) last.push_back(&change);
    }
    if (first == 0)
      for (size_t trial : run.unfinished())
        if (seen[trial] == 0) run.pause(trial);
    for (const Change* change : last) run.pause(change->trial);  // all make room before any is placed
    for (auto at = last.rbegin(); at != last.rend(); ++at)
      if ((*at)->width != 0) run.place((*at)->trial, (*at)->width, (*at)->devices);
  }
  std::unique_ptr<TrialPolicy> clone() const override { return std::make_unique<TimelinePolicy>(*this); }

 private:
  std::shared_ptr<const std::vector<Change>> changes_;
  size_t next_ = 0;
};

// The wrap-around layout for one T.
class Wrap {
 public:
  Wrap(const TrialRun& run, const std::vector<size_t>& left)
      : run_(run), left_(left), devices_(int(run.up().size())) {
    for (const TrialDevice& device : run.devices_up()) {
      speed_ = device.speed;
      memory_ = std::min(memory_, device.memory_bytes);
    }
    std::vector<uint64_t> memories;
    for (size_t trial : left) memories.push_back(run.trials()[trial].trial.memory_bytes);
    std::sort(memories.rbegin(), memories.rend());
    uint64_t sum = 0;
    for (uint64_t memory : memories) {
      if (memory > memory_ - sum) break;
      sum += memory;
      ++together_;
    }
    widest_ = std::min(run.limits().max_workers, devices_);
    for (size_t trial : left) {
      const double part = run.remaining(trial) / speed_;
      const Trial& told = run.trials()[trial].trial;
      for (Width width = -most_packed(); width <= widest_; ++width)
        takes_.push_back(width == 0 ? kNever : part * duration(told, width));
    }
  }

  // The most trials that fit a device's memory whichever they are.
  int most_packed() const { return std::min(run_.limits().max_packed, together_); }

  // Lays everything out to end by now + T with at most `packed` trials a device; false if it does not fit.
  bool fits(double T, int packed) {
    const double cost = run_.limits().change_cost_s;
    wholes_.assign(left_.size(), 0);
    pieces_.clear();
    units_.clear();
    std::vector<std::vector<size_t>> classes(size_t(packed) + 1);
    std::vector<Unit> singles;
    std::vector<Unit> extras;
    int used = 0;
    for (size_t i = 0; i < left_.size(); ++i) {
      const TrialRun::State& state = run_.trials()[left_[i]];
      const double time = T - (state.started ? cost : 0);
      const auto takes = [&](Width width) { return this->takes(i, width); };
      if (takes(1) <= time * (1 + kTimeTolerance)) {
        int best = 1;
        for (int p = 2; p <= packed; ++p) {
          if (takes(-p) > time) continue;
          if (takes(-p) / p < takes(best == 1 ? 1 : -best) / best * (1 - kTimeTolerance)) best = p;
        }
        if (best == 1)
          singles.push_back({takes(1) + T - time, {{i, 1, 0, takes(1) + T - time}}});
        else
          classes[size_t(best)].push_back(i);
        continue;
      }
      int w = 1;
      while (w < widest_ && takes(w + 1) > time * (1 + kTimeTolerance)) ++w;
      if (w == widest_) return false;
      const double mixed = time - 2 * cost;  // to the wider width and back
      const double slow = 1 / takes(w);
      const double fast = 1 / takes(w + 1);
      const double extra = mixed > 0 ? (1 - slow * mixed) / (fast - slow) + 2 * cost : kNever;
      wholes_[i] = extra < T ? w : w + 1;
      used += wholes_[i];
      if (used > devices_) return false;
      if (extra < T) extras.push_back({extra, {{i, w + 1, 0, extra}}});
    }
    for (int p = packed; p >= 2; --p) fill_blocks(std::move(classes[size_t(p)]), p, T);
    std::sort(singles.begin(), singles.end(),
              [](const Unit& a, const Unit& b) { return a.length > b.length; });
    for (auto* list : {&singles, &extras})
      for (Unit& unit : *list) units_.push_back(std::move(unit));
    return lay_out(used, T);
  }

  // The layout that fits() has made.
  std::vector<Change> changes(double T) const {
    const double tolerance = T * kTimeTolerance;
    std::vector<std::vector<const Piece*>> of(left_.size());
    for (const Piece& piece : pieces_)
      if (piece.part.to - piece.part.from >= tolerance) of[piece.part.index].push_back(&piece);
    std::vector<Change> result;
    int device = 0;
    for (size_t i = 0; i < left_.size(); ++i) {
      std::sort(of[i].begin(), of[i].end(),
                [](const Piece* a, const Piece* b) { return a->part.from < b->part.from; });
      std::vector<int> own;
      for (int w = 0; w < wholes_[i]; ++w) own.push_back(run_.up()[size_t(device++)]);
      double until = 0;  // what it holds ends then
      const auto hold_own = [&](double from) {
        result.push_back({run_.now_s() + from, left_[i], wholes_[i], own});
      };
      for (const Piece* piece : of[i]) {
        // From a piece to the next one without a pause it does not go back to what is its own.
        if (piece->part.from > until + tolerance) hold_own(until);
        Change change{run_.now_s() + (piece->part.from <= tolerance ? 0 : piece->part.from), left_[i],
                      piece->part.width, own};
        change.devices.push_back(run_.up()[size_t(piece->device)]);
        result.push_back(std::move(change));
        until = piece->part.to;
      }
      if (until < T - tolerance) hold_own(until);
    }
    std::stable_sort(result.begin(), result.end(),
                     [](const Change& a, const Change& b) { return a.time_s < b.time_s; });
    // Changes at equal times, up to rounding, get the same time, so that a trial takes a device after another has left it.
    for (size_t i = 1; i < result.size(); ++i)
      if (result[i].time_s - result[i - 1].time_s < tolerance) result[i].time_s = result[i - 1].time_s;
    return result;
  }

 private:
  struct Part {  // of a unit: a trial holds a width from a time to a time
    size_t index;
    Width width;
    double from;
    double to;
  };
  struct Unit {  // one device wide
    double length;
    std::vector<Part> parts;
  };
  struct Piece {
    Part part;
    int device;  // among those that are up
  };

  // Blocks of p slots from trials that each run on the p-th part of a device.
  void fill_blocks(std::vector<size_t> trials, int p, double T) {
    const double cost = run_.limits().change_cost_s;
    const auto takes = [&](size_t i, int slots) {
      return this->takes(i, -slots) + (run_.trials()[left_[i]].started ? cost : 0);
    };
    std::sort(trials.begin(), trials.end(), [&](size_t a, size_t b) { return takes(a, p) > takes(b, p); });
    size_t next = 0;
    while (next < trials.size()) {
      // As many as fill p slots for T; the last block takes the number of slots with which it is shortest.
      double sum = 0;
      size_t end = next;
      while (end < trials.size() && sum + takes(trials[end], p) <= double(p) * T)
        sum += takes(trials[end++], p);
      end = std::max(end, next + 1);
      int slots = p;
      double length = std::max(sum / p, takes(trials[next], p));
      if (end == trials.size()) {
        for (int fewer = p - 1; fewer >= 1; --fewer) {
          double all = 0;
          double longest = 0;
          for (size_t i = next; i < end; ++i) {
            all += takes(trials[i], fewer);
            longest = std::max(longest, takes(trials[i], fewer));
          }
          if (std::max(all / fewer, longest) >= length) continue;
          slots = fewer;
          length = std::max(all / fewer, longest);
        }
      }
      Unit unit{length, {}};
      int slot = 0;
      double cursor = 0;
      const Width width = slots == 1 ? 1 : -slots;
      for (size_t i = next; i < end; ++i) {
        double time = takes(trials[i], slots);
        if (cursor + time <= length * (1 + kTimeTolerance)) {
          unit.parts.push_back({trials[i], width, cursor, std::min(length, cursor + time)});
          cursor += time;
        } else if (cost > 0 ||
                   slot + 1 >= slots) {  // a pause would cost a change: leave the rest of the slot idle
          end = slot + 1 < slots ? end : i;
          if (end == i) break;
          ++slot;
          unit.parts.push_back({trials[i], width, 0, std::min(length, time)});
          cursor = time;
        } else {
          unit.parts.push_back({trials[i], width, cursor, length});
          ++slot;
          cursor = time - (length - cursor);
          unit.parts.push_back({trials[i], width, 0, cursor});
        }
      }
      units_.push_back(std::move(unit));
      next = end;
    }
  }

  // McNaughton: one device after the other is filled up to T; what does not fit goes to the start of the next one,
  // where it is done by the time at which the first part begins.
  bool lay_out(int device, double T) {
    const double cost = run_.limits().change_cost_s;
    double cursor = 0;
    for (const Unit& unit : units_) {
      if (unit.length > T * (1 + kTimeTolerance)) return false;
      if (cursor > T * (1 - kTimeTolerance)) {
        ++device;
        cursor = 0;
      }
      if (device >= devices_) return false;
      if (cursor + unit.length <= T * (1 + kTimeTolerance)) {
        for (const Part& part : unit.parts)
          pieces_.push_back({{part.index, part.width, cursor + part.from, cursor + part.to}, device});
        cursor += unit.length;
        continue;
      }
      if (device + 1 >= devices_) return false;
      if (cost > 0) {  // whole on the next one
        ++device;
        for (const Part& part : unit.parts) pieces_.push_back({part, device});
        cursor = unit.length;
        continue;
      }
      const double split = unit.length - (T - cursor);  // of the unit's own time
      for (const Part& part : unit.parts) {
        if (part.from < split)
          pieces_.push_back({{part.index, part.width, part.from, std::min(part.to, split)}, device + 1});
        if (part.to > split) {
          const double shift = cursor - split;
          pieces_.push_back(
              {{part.index, part.width, std::max(part.from, split) + shift, part.to + shift}, device});
        }
      }
      ++device;
      cursor = split;
    }
    return true;
  }

  // The time that the rest of a trial takes at this width.
  double takes(size_t i, Width width) const {
    return takes_[i * size_t(most_packed() + 1 + widest_) + size_t(width + most_packed())];
  }

  const TrialRun& run_;
  const std::vector<size_t>& left_;
  int devices_;
  int together_ = 0;
  double speed_ = 1;
  uint64_t memory_ = UINT64_MAX;
  int widest_ = 1;
  std::vector<double> takes_;  // by trial and width
  std::vector<int> wholes_;    // devices that a trial has all the time
  std::vector<Unit> units_;
  std::vector<Piece> pieces_;
};

class TrialPlanner final : public TrialPolicy {
 public:
  TrialPlanner() = default;
  TrialPlanner(const TrialPlanner& other)
      : TrialPolicy(other),
        current_(other.current_ ? other.current_->clone() : nullptr),
        end_s_(other.end_s_),
        inserted_(other.inserted_),
        completed_s_(other.completed_s_),
        answered_(other.answered_) {}

  void arrived(TrialRun& run, const std::vector<size_t>& trials) override {
    const size_t left = run.unfinished_count();
    if (run.now_s() == completed_s_ && left > trials.size()) answered_ = true;
    if (left <= kMostToPlanAnew || trials.size() * kFewOf > left || !insert_all(run, trials))
      replan(run, true);
  }
  void finished(TrialRun& run) override {
    completed_s_ = run.now_s();
    if (current_) current_->finished(run);
    if (run.unfinished_count() == 0) return;
    const bool stuck = run.next_completion_s() == kNever && wake_s() == kNever;
    if (run.unfinished_count() <= kMostToReplan || stuck) replan(run, stuck);
  }
  void devices_changed(TrialRun& run, bool failed) override {
    if (failed || run.unfinished_count() == 0) current_.reset();  // it may count on what has failed
    if (run.unfinished_count() > 0) replan(run, !current_);
  }
  double wake_s() const override { return current_ ? current_->wake_s() : kNever; }
  void woken(TrialRun& run) override {
    current_->woken(run);
    if (run.next_completion_s() == kNever && current_->wake_s() == kNever && run.unfinished_count() > 0)
      replan(run, true);
  }
  std::unique_ptr<TrialPolicy> clone() const override { return std::make_unique<TrialPlanner>(*this); }

 private:
  // The end under a policy that goes on from a state; infinity if it leaves something. Where completions bring further
  // trials, the mean end of those that are left: the last end then matters less than soon having each result, and a
  // change that delays all for one does not pay.
  double end_under(TrialRun run, TrialPolicy& policy) const {
    const std::vector<size_t> left = run.unfinished();
    run_trials(run, policy);
    if (run.unfinished_count() > 0) return kNever;
    if (!answered_ || left.empty()) return run.now_s();
    double sum = 0;
    for (const size_t trial : left) sum += run.trials()[trial].finish_s;
    return sum / double(left.size());
  }

  // Makes a policy that decides for a run from now on.
  using Begin = std::function<std::unique_ptr<TrialPolicy>(TrialRun&)>;

  void replan(TrialRun& run, bool must) {
    const TrialRun state = run.believed();
    const std::vector<size_t> left = state.unfinished();
    const double begin = state.now_s();
    Portfolio<Begin> plans(kTimeTolerance);
    if (!must && current_)  // an empty one: go on as now
      plans.offer(end_under(state, *current_->clone()) - begin, Begin{});
    std::vector<size_t> waiting;
    for (size_t trial : left)
      if (state.trials()[trial].width == 0) waiting.push_back(trial);
    const auto offer = [&](Begin candidate) {
      TrialRun copy = state;
      const std::unique_ptr<TrialPolicy> policy = candidate(copy);
      plans.offer(end_under(std::move(copy), *policy) - begin, std::move(candidate));
    };
    // The first of plans that end together stays. Longest first leaves short ones for devices that come back.
    offer([&waiting](TrialRun& at) { return with<StaticFluidPolicy>(at, waiting); });
    offer([&waiting](TrialRun& at) { return with<DynamicFluidPolicy>(at, waiting); });
    offer([&waiting](TrialRun& at) { return with<FifoPolicy>(at, waiting); });

    const double bound = bound_of(state, left);
    const int lists = left.size() <= kMostToReplan ? 10 : left.size() <= 4000 ? 5 : 2;
    std::vector<std::vector<Item>> widths;
    for (size_t trial : waiting) widths.push_back(widths_of(state, trial));
    for (int i = 0; i < lists && !waiting.empty(); ++i) {
      const double T = bound * (1 + 0.08 * i * (lists > 5 ? 1 : 2));
      offer([T, &widths](TrialRun& at) { return list_of(at, widths, T); });
    }
    if (left.size() <= kMostToReplan)
      for (const bool move : {false, true})
        for (size_t i = 0;
             i < (left.size() * state.devices().size() < kManyPlaces ? kPlaceEnds : kFewPlaceEnds); ++i) {
          const double T = bound * (1 + 0.1 * double(i));
          offer([T, move](TrialRun& at) { return make_places(at, T, move); });
        }
    if (left.size() <= kMostToWrap && equal_speeds(state)) {
      Wrap wrap(state, left);
      for (int packed = 1; packed <= wrap.most_packed(); ++packed) {
        double low = bound;
        double high = bound;
        if (!wrap.fits(bound, packed)) {
          high = std::min(plans.cost(), bound * 4);
          if (!wrap.fits(high, packed)) continue;
          while (high - low > 0.002 * bound) {
            const double middle = (low + high) / 2;
            (wrap.fits(middle, packed) ? high : low) = middle;
          }
          wrap.fits(high, packed);
        }
        const TimelinePolicy timeline(wrap.changes(high));
        offer([timeline](TrialRun& at) {
          std::unique_ptr<TrialPolicy> policy = timeline.clone();
          if (policy->wake_s() <= at.now_s()) policy->woken(at);
          return policy;
        });
      }
    }
    if (plans.empty() || !plans.best()) return;
    end_s_ = answered_ ? 0 : begin + plans.cost();  // 0: to be estimated when it is needed
    inserted_ = 0;
    current_ = plans.best()(run);
  }

  // A policy of that type that has been told of the trials that wait.
  template <class Policy>
  static std::unique_ptr<TrialPolicy> with(TrialRun& run, const std::vector<size_t>& waiting) {
    auto policy = std::make_unique<Policy>();
    policy->arrived(run, waiting);
    return policy;
  }

  static bool equal_speeds(const TrialRun& run) {
    const std::vector<TrialDevice> devices = run.devices_up();
    return std::all_of(devices.begin(), devices.end(),
                       [&](const TrialDevice& device) { return device.speed == devices[0].speed; });
  }

  static double bound_of(const TrialRun& run, const std::vector<size_t>& left) {
    TrialGroup group;
    for (size_t trial : left) {
      Trial rest = run.trials()[trial].trial;
      rest.budget_s *= std::max(1e-12, run.remaining(trial));
      group.trials.push_back(std::move(rest));
    }
    return trials_bound(run.devices_up(), run.limits(), {group});
  }

  // Takes newcomers into the plan that there is, at widths for its expected end. False: that plan has no place for them.
  bool insert_all(TrialRun& run, const std::vector<size_t>& trials) {
    if (!current_) return false;
    inserted_ += trials.size();
    if (end_s_ <= run.now_s() || inserted_ * kFewOf > run.unfinished_count()) {
      end_s_ = expected_end(run);
      inserted_ = 0;
    }
    for (size_t trial : trials) {
      const Item item = within(widths_of(run, trial), end_s_ - run.now_s());
      if (!current_->insert(run, trial, item.width)) return false;
      end_s_ = std::max(end_s_ + item.time * size_of(item.width) / double(run.up().size()),
                        run.now_s() + item.time);
    }
    return true;
  }

  // If devices never idled and each trial had its least area on a device or a part of one.
  static double expected_end(const TrialRun& run) {
    double area = 0, longest = 0, speeds = 0;
    for (const TrialDevice& device : run.devices_up()) speeds += device.speed;
    for (size_t trial : run.unfinished()) {
      const Trial& told = run.trials()[trial].trial;
      const double one = duration(told, 1), part = run.remaining(trial);
      double least = one;
      for (int p = 2; p <= run.limits().max_packed; ++p) least = std::min(least, duration(told, -p) / p);
      area += part * least;
      longest = std::max(longest, part * one);
    }
    return run.now_s() + std::max(area / speeds, longest);
  }

  struct Item {
    size_t trial;
    Width width;
    double time;
  };
  // A trial's widths: one device first, then the others from the smallest part on, each with the time that the rest of
  // the trial takes there.
  static std::vector<Item> widths_of(const TrialRun& run, size_t trial) {
    const Trial& told = run.trials()[trial].trial;
    const double part = run.remaining(trial);
    const auto enough = int(std::count_if(run.up().begin(), run.up().end(), [&](int device) {
      return run.devices()[size_t(device)].memory_bytes >= told.memory_bytes;
    }));
    const int widest = std::min(run.limits().max_workers, enough);
    std::vector<Item> items{{trial, 1, part * duration(told, 1)}};
    for (Width width = -run.limits().max_packed; width <= widest; ++width)
      if (width < -1 || width > 0) items.push_back({trial, width, part * duration(told, width)});
    return items;
  }
  // The width of least area that ends within T, or the fastest width if none does.
  static Item within(const std::vector<Item>& widths, double T) {
    Item best = widths[0];
    for (const Item& item : widths) {
      const bool fits = item.time <= T * (1 + kTimeTolerance);
      const bool best_fits = best.time <= T * (1 + kTimeTolerance);
      const double area = item.time * size_of(item.width);
      const double best_area = best.time * size_of(best.width);
      const bool better = fits != best_fits ? fits
                          : fits            ? area < best_area * (1 - kTimeTolerance)
                                            : item.time < best.time;
      if (better) best = item;
    }
    return best;
  }

  // Each waiting trial, given with its widths, as within T, longest first.
  static std::unique_ptr<TrialPolicy> list_of(TrialRun& run, const std::vector<std::vector<Item>>& waiting,
                                              double T) {
    std::vector<Item> items;
    items.reserve(waiting.size());
    for (const std::vector<Item>& widths : waiting) items.push_back(within(widths, T));
    std::stable_sort(items.begin(), items.end(),
                     [](const Item& a, const Item& b) { return a.time > b.time; });
    auto policy = std::make_unique<ListPolicy>();
    for (const Item& item : items) policy->add(item.trial, item.width);
    policy->start(run);
    return policy;
  }

  std::unique_ptr<TrialPolicy> current_;
  double end_s_ = 0;         // at which the plan is expected to end
  size_t inserted_ = 0;      // trials since that was estimated
  double completed_s_ = -1;  // the last completion
  bool answered_ =
      false;  // a trial has arrived at the moment at which another completed, and others were left
};

}  // namespace

std::unique_ptr<TrialPolicy> make_trial_planner() {
  return std::make_unique<TrialPlanner>();
}

}  // namespace gpushare::cluster
