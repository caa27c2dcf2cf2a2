// SPDX-License-Identifier: Apache-2.0
#include "cluster/fluid.hpp"

#include <algorithm>
#include <cmath>

#include "cluster/never.hpp"
#include "cluster/portfolio.hpp"

namespace gpushare::cluster {
namespace {

constexpr double kSlack = 1e-9;  // of a device, or of a duration: below it nothing is left

}  // namespace

double duration(const Trial& trial, Width width) {
  if (width == 0) return kNever;
  if (width < 0) {
    const double packed = -width;
    return trial.budget_s * (trial.alpha && width != -1 ? std::pow(*trial.alpha, packed - 1) : packed);
  }
  return trial.budget_s / width * std::pow(trial.beta, width - 1);
}

TrialRun::TrialRun(std::vector<TrialDevice> devices, TrialLimits limits)
    : devices_(std::move(devices)), limits_(limits) {
  for (size_t d = 0; d < devices_.size(); ++d) {
    free_.push_back(1);
    free_memory_.push_back(devices_[d].memory_bytes);
    by_free_.emplace(1, -devices_[d].speed, int(d));
    up_.push_back(int(d));
  }
}

std::vector<TrialDevice> TrialRun::devices_up() const {
  std::vector<TrialDevice> devices;
  for (const int device : up_) devices.push_back(devices_[size_t(device)]);
  return devices;
}

bool TrialRun::some_device_has(uint64_t memory_bytes) const {
  return std::any_of(up_.begin(), up_.end(),
                     [&](int device) { return devices_[size_t(device)].memory_bytes >= memory_bytes; });
}

void TrialRun::set_up(int device, bool up) {
  const auto d = size_t(device);
  const auto at = std::lower_bound(up_.begin(), up_.end(), device);
  if ((at != up_.end() && *at == device) == up) return;
  if (up) {
    up_.insert(at, device);
    by_free_.emplace(free_[d], -devices_[d].speed, device);
  } else {
    for (const size_t trial : unfinished_) {
      const std::vector<int>& held = trials_[trial].devices;
      if (std::find(held.begin(), held.end(), device) != held.end()) pause(trial);
    }
    up_.erase(at);
    by_free_.erase({free_[d], -devices_[d].speed, device});
  }
  std::set<size_t> all = std::exchange(unfinished_, {});
  all.merge(std::exchange(stranded_, {}));
  for (const size_t trial : all)
    (some_device_has(trials_[trial].trial.memory_bytes) ? unfinished_ : stranded_).insert(trial);
}

size_t TrialRun::add(const Trial& trial, double scale) {
  State state;
  state.trial = trial;
  state.arrival_s = state.updated_s = now_s_;
  state.scale = scale;
  state.rejected = std::none_of(devices_.begin(), devices_.end(), [&](const TrialDevice& device) {
    return device.memory_bytes >= trial.memory_bytes;
  });
  trials_.push_back(std::move(state));
  if (!trials_.back().rejected)
    (some_device_has(trial.memory_bytes) ? unfinished_ : stranded_).insert(trials_.size() - 1);
  return trials_.size() - 1;
}

void TrialRun::set_rate(State& state) const {
  double speed = kNever;
  for (int device : state.devices) speed = std::min(speed, devices_[size_t(device)].speed);
  state.rate = state.width == 0 ? 0 : speed / (duration(state.trial, state.width) * state.scale);
}

double TrialRun::remaining(size_t trial) const {
  const State& state = trials_[trial];
  const double from = std::clamp(state.stalled_until_s, state.updated_s, now_s_);
  return std::max(0.0, state.remaining - state.rate * (now_s_ - from));
}

std::vector<size_t> TrialRun::unfinished() const {
  return {unfinished_.begin(), unfinished_.end()};
}

int TrialRun::idle_devices() const {
  int idle = 0;
  for (auto entry = by_free_.rbegin(); entry != by_free_.rend() && std::get<0>(*entry) > 1 - kSlack; ++entry)
    ++idle;
  return idle;
}

std::vector<int> TrialRun::find(Width width, uint64_t memory_bytes) const {
  std::vector<int> found;
  const double part = width > 0 ? 1 : size_of(width);
  const auto wanted = size_t(std::max(width, 1));
  for (auto entry = by_free_.lower_bound({part - kSlack, -kNever, 0}); entry != by_free_.end(); ++entry) {
    const int device = std::get<2>(*entry);
    if (free_memory_[size_t(device)] < memory_bytes) continue;
    found.push_back(device);
    if (found.size() == wanted) return found;
  }
  return {};
}

bool TrialRun::has(int device, Width width, uint64_t memory_bytes) const {
  const double part = width > 0 ? 1 : size_of(width);
  return std::binary_search(up_.begin(), up_.end(), device) && free_[size_t(device)] >= part - kSlack &&
         free_memory_[size_t(device)] >= memory_bytes;
}

std::vector<int> TrialRun::find_for(size_t trial, Width width) {
  const State& state = trials_[trial];
  const double share = state.width > 0 ? 1 : size_of(state.width);
  const auto memory = int64_t(state.trial.memory_bytes);
  for (int device : state.devices) change_free(device, share, memory);
  std::vector<int> found = find(width, state.trial.memory_bytes);
  for (int device : state.devices) change_free(device, -share, -memory);
  return found;
}

TrialRun TrialRun::believed() const {
  TrialRun copy = *this;
  copy.events_ = {};
  for (size_t trial : copy.unfinished_) {
    copy.update(copy.trials_[trial]);
    copy.trials_[trial].scale = 1;
    copy.set_rate(copy.trials_[trial]);
    copy.schedule(trial);
  }
  return copy;
}

void TrialRun::update(State& state) const {
  const double from = std::clamp(state.stalled_until_s, state.updated_s, now_s_);
  state.remaining = std::max(0.0, state.remaining - state.rate * (now_s_ - from));
  state.updated_s = now_s_;
}

void TrialRun::change_free(int device, double share, int64_t memory) {
  const auto d = size_t(device);
  by_free_.erase({free_[d], -devices_[d].speed, device});
  free_[d] += share;
  if (free_[d] > 1 - kSlack) free_[d] = 1;  // no rounding is left on an idle device
  if (devices_[d].memory_bytes != UINT64_MAX) free_memory_[d] = uint64_t(int64_t(free_memory_[d]) + memory);
  by_free_.emplace(free_[d], -devices_[d].speed, device);
}

void TrialRun::release(State& state) {
  const double share = state.width > 0 ? 1 : size_of(state.width);
  for (int device : state.devices) change_free(device, share, int64_t(state.trial.memory_bytes));
  held_ -= size_of(state.width);
  state.devices.clear();
  state.width = 0;
  state.rate = 0;
}

void TrialRun::schedule(size_t trial) {
  State& state = trials_[trial];
  ++state.version;
  if (state.width == 0) return;
  const double start = std::max(state.stalled_until_s, state.updated_s);
  events_.emplace(start + state.remaining / state.rate, trial, state.version);
}

void TrialRun::place(size_t trial, Width width, std::vector<int> devices) {
  State& state = trials_[trial];
  if (state.width == width && state.devices == devices) return;
  update(state);
  if (state.width != 0) release(state);
  if (state.started) state.stalled_until_s = std::max(now_s_, state.stalled_until_s) + limits_.change_cost_s;
  if (!state.started) started_.push_back(trial);
  state.started = true;
  const double share = width > 0 ? 1 : size_of(width);
  for (int device : devices) change_free(device, -share, -int64_t(state.trial.memory_bytes));
  held_ += size_of(width);
  state.width = width;
  state.devices = std::move(devices);
  set_rate(state);
  schedule(trial);
}

void TrialRun::measured(size_t trial, double remaining) {
  State& state = trials_[trial];
  update(state);
  state.remaining = std::clamp(remaining, 0.0, 1.0);
  schedule(trial);
}

void TrialRun::pause(size_t trial) {
  State& state = trials_[trial];
  if (state.width == 0) return;
  update(state);
  release(state);
  schedule(trial);
}

void TrialRun::stop(size_t trial) {
  pause(trial);
  State& state = trials_[trial];
  state.finished = true;
  state.finish_s = now_s_;
  unfinished_.erase(trial);
  stranded_.erase(trial);
}

double TrialRun::next_completion_s() {
  while (!events_.empty() && std::get<2>(events_.top()) != trials_[std::get<1>(events_.top())].version)
    events_.pop();
  return events_.empty() ? kNever : std::get<0>(events_.top());
}

void TrialRun::advance(double time_s) {
  area_ += held_ * std::max(0.0, time_s - now_s_);
  now_s_ = std::max(now_s_, time_s);
}

std::vector<size_t> TrialRun::complete() {
  std::vector<size_t> done;
  while (next_completion_s() <= now_s_ + kSlack * std::max(1.0, now_s_)) {
    const size_t trial = std::get<1>(events_.top());
    events_.pop();
    State& state = trials_[trial];
    release(state);
    state.remaining = 0;
    state.finished = true;
    state.finish_s = now_s_;
    ++state.version;
    unfinished_.erase(trial);
    done.push_back(trial);
  }
  return done;
}

void run_trials(TrialRun& run, TrialPolicy& policy, const TrialsFinished& on_finished) {
  while (true) {
    const double completion = run.next_completion_s();
    const double wake = policy.wake_s();
    if (completion == kNever && wake == kNever) return;
    run.advance(std::min(completion, wake));
    const std::vector<size_t> done = run.complete();
    if (!done.empty()) {
      const std::vector<size_t> more = on_finished ? on_finished(run, done) : std::vector<size_t>{};
      policy.finished(run);
      if (!more.empty()) policy.arrived(run, more);
    }
    if (policy.wake_s() <= run.now_s()) policy.woken(run);
  }
}

namespace {

// The lower convex hull of (rate, width), from no width on: w(r) is the least mean width at which a trial makes r of
// itself a second.
struct RateHull {
  std::vector<std::pair<double, double>> points;  // (rate, width), ascending

  RateHull(const Trial& trial, const TrialLimits& limits) {
    std::vector<std::pair<double, double>> all{{0, 0}};
    for (int p = limits.max_packed; p > 1; --p) all.emplace_back(1 / duration(trial, -p), 1.0 / p);
    for (int w = 1; w <= limits.max_workers; ++w) all.emplace_back(1 / duration(trial, w), w);
    std::sort(all.begin(), all.end());
    for (const auto& point : all) {
      while (points.size() >= 2) {
        const auto& [r0, w0] = points[points.size() - 2];
        const auto& [r1, w1] = points.back();
        if ((w1 - w0) * (point.first - r0) <= (point.second - w0) * (r1 - r0)) break;
        points.pop_back();
      }
      if (points.size() > 1 && point.second <= points.back().second) {
        points.pop_back();  // faster on less
      } else if (!points.empty() && point.first == points.back().first &&
                 point.second >= points.back().second) {
        continue;
      }
      points.push_back(point);
    }
    // A wider placement that is slower than a narrower one is no use.
    while (points.size() > 1 && points.back().first <= points[points.size() - 2].first) points.pop_back();
  }

  double width_at(double rate) const {
    if (rate > points.back().first * (1 + 1e-12)) return kNever;
    const auto above = std::lower_bound(points.begin(), points.end(), std::make_pair(rate, -1.0));
    if (above == points.begin()) return 0;
    if (above == points.end()) return points.back().second;
    const auto& [r0, w0] = *(above - 1);
    return w0 + (above->second - w0) * (rate - r0) / (above->first - r0);
  }
};

}  // namespace

double trials_bound(const std::vector<TrialDevice>& devices, const TrialLimits& limits,
                    const std::vector<TrialGroup>& groups) {
  double speeds = 0;
  double fastest = 0;
  uint64_t largest = 0;
  for (const TrialDevice& device : devices) {
    speeds += device.speed;
    fastest = std::max(fastest, device.speed);
    largest = std::max(largest, device.memory_bytes);
  }
  struct Item {
    double arrival;
    RateHull hull;
  };
  TrialLimits narrowed = limits;
  narrowed.max_workers = std::min<int>(limits.max_workers, int(devices.size()));
  std::vector<Item> items;
  for (const TrialGroup& group : groups)
    for (const Trial& trial : group.trials)
      if (trial.memory_bytes <= largest) items.push_back({group.arrival_s, RateHull(trial, narrowed)});
  if (items.empty()) return 0;
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.arrival > b.arrival; });
  const double first = items.back().arrival;
  double start = 0;  // a time that suffices for each trial alone
  double work = 0;
  for (const Item& item : items) {
    const double alone = 1 / (item.hull.points.back().first * fastest);
    start = std::max(start, item.arrival + alone);
    work += item.hull.points.back().second * fastest * alone;
  }
  // Can the trials' least areas be held between each arrival and `end`?
  const auto fits = [&](double end) {
    double area = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      const double time = end - items[i].arrival;
      if (time <= 0) return false;
      area += time * fastest * items[i].hull.width_at(1 / (time * fastest));
      const bool last_of_its_time = i + 1 == items.size() || items[i + 1].arrival < items[i].arrival;
      if (last_of_its_time && area > speeds * time * (1 + 1e-12)) return false;
    }
    return true;
  };
  double low = start;
  double high = items.front().arrival + (start - first) + work / speeds + 1e-12;
  if (fits(low)) return low - first;
  while (!fits(high)) high = first + (high - first) * 2;
  for (int i = 0; i < 100 && high - low > 1e-12 * high; ++i) {
    const double middle = (low + high) / 2;
    (fits(middle) ? high : low) = middle;
  }
  return high - first;
}

int packing_limit(const std::vector<double>& mean_iteration_s, double threshold) {
  int limit = 1;
  for (size_t p = 2; p <= mean_iteration_s.size(); ++p) {
    const double benefit = 1 - double(p - 1) / double(p) * mean_iteration_s[p - 1] / mean_iteration_s[p - 2];
    if (benefit > threshold) limit = int(p);
  }
  return limit;
}

TrialResult play_trials(const std::vector<TrialDevice>& devices, const TrialLimits& limits,
                        const std::vector<TrialGroup>& groups, TrialScheduler scheduler,
                        const std::vector<double>& scales, std::vector<TrialSpan>* spans,
                        const std::vector<DeviceChange>& changes) {
  std::vector<size_t> order(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) order[g] = g;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return groups[a].arrival_s < groups[b].arrival_s; });
  std::vector<size_t> first_row(groups.size() + 1, 0);
  for (size_t g = 0; g < groups.size(); ++g) first_row[g + 1] = first_row[g] + groups[g].trials.size();
  TrialRun run(devices, limits);
  const auto policy = make_trial_policy(scheduler);
  TrialResult result;
  result.trials.resize(first_row.back());
  std::vector<size_t> row_of;
  const auto note_starts = [&] {
    for (const size_t trial : run.take_started()) {
      result.trials[row_of[trial]].width = run.trials()[trial].width;
      result.trials[row_of[trial]].start_s = run.now_s();
    }
  };
  // The devices that each trial holds, and since when, for spans.
  struct Held {
    Width width = 0;
    std::vector<int> devices;
    double since_s = 0;
  };
  std::vector<Held> held;
  const auto note_spans = [&] {
    held.resize(run.trials().size());
    for (size_t trial = 0; trial < held.size(); ++trial) {
      const TrialRun::State& state = run.trials()[trial];
      Held& was = held[trial];
      if (was.width == state.width && was.devices == state.devices) continue;
      for (const int device : was.devices)
        spans->push_back({row_of[trial], was.width, device, was.since_s, run.now_s()});
      was = {state.width, state.devices, run.now_s()};
    }
  };
  const double begin = order.empty() ? 0 : groups[order[0]].arrival_s;
  run.advance(begin);
  size_t next = 0, next_change = 0;
  while (true) {
    const double arrival = next < order.size() ? groups[order[next]].arrival_s : kNever;
    const double change = next_change < changes.size() ? changes[next_change].at_s : kNever;
    const double event = std::min({arrival, run.next_completion_s(), policy->wake_s(), change});
    if (event == kNever) break;
    run.advance(event);
    if (!run.complete().empty()) policy->finished(run);
    if (change <= run.now_s()) {
      bool failed = false;
      for (; next_change < changes.size() && changes[next_change].at_s <= run.now_s(); ++next_change) {
        run.set_up(int(changes[next_change].device), changes[next_change].up);
        failed = failed || !changes[next_change].up;
      }
      policy->devices_changed(run, failed);
    }
    if (policy->wake_s() <= run.now_s()) policy->woken(run);
    std::vector<size_t> added;
    while (next < order.size() && groups[order[next]].arrival_s <= run.now_s()) {
      const size_t group = order[next++];
      for (size_t i = 0; i < groups[group].trials.size(); ++i) {
        const size_t row = first_row[group] + i;
        const size_t trial = run.add(groups[group].trials[i], row < scales.size() ? scales[row] : 1);
        row_of.push_back(row);
        result.trials[row_of.back()].rejected = run.trials()[trial].rejected;
        if (!run.trials()[trial].rejected && !run.stranded(trial)) added.push_back(trial);
      }
    }
    if (!added.empty()) policy->arrived(run, added);
    note_starts();
    if (spans != nullptr) note_spans();
  }
  double last = begin;
  for (size_t trial = 0; trial < run.trials().size(); ++trial) {
    result.trials[row_of[trial]].finish_s = run.trials()[trial].finish_s;
    result.trials[row_of[trial]].stranded = run.stranded(trial);
    last = std::max(last, run.trials()[trial].finish_s);
  }
  result.makespan_s = last - begin;
  result.utilization = result.makespan_s > 0 ? run.area() / (double(devices.size()) * result.makespan_s) : 0;
  return result;
}

TrialResult plan_trials(const std::vector<TrialDevice>& devices, const TrialLimits& limits,
                        const std::vector<TrialGroup>& groups, TrialScheduler scheduler) {
  Portfolio<TrialResult> results;
  const auto offer = [&](TrialScheduler rule) {
    TrialResult result = play_trials(devices, limits, groups, rule);
    const double makespan = result.makespan_s;
    results.offer(makespan, std::move(result));
  };
  offer(scheduler);
  if (scheduler == TrialScheduler::kGpushare)
    for (const TrialScheduler rule :
         {TrialScheduler::kFifo, TrialScheduler::kStaticFluid, TrialScheduler::kDynamicFluid})
      offer(rule);
  results.best().bound_s = trials_bound(devices, limits, groups);
  return std::move(results.best());
}

}  // namespace gpushare::cluster
