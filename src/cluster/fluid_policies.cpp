// The default execution and the two algorithms of the source.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/fluid_policies.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace gpushare::cluster {
namespace {

// The width of (B.1): the trial's part of the devices by its share of the work, between 1/c and d.
Width share_of_work(double work, double all_work, int devices, const TrialLimits& limits) {
  const double part = all_work > 0 ? work / all_work * devices : 1;
  if (part * (1 + 1e-12) < 1) return limits.max_packed > 1 ? -limits.max_packed : 1;
  return std::min({int(std::floor(part * (1 + 1e-12))), limits.max_workers, devices});
}

// (seconds on one device, trial), the longest first.
std::vector<std::pair<double, size_t>> by_work_left(const TrialRun& run, const std::vector<size_t>& trials) {
  std::vector<std::pair<double, size_t>> order;
  order.reserve(trials.size());
  for (size_t trial : trials)
    order.emplace_back(run.trials()[trial].trial.budget_s * run.remaining(trial), trial);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  return order;
}

}  // namespace

void QueuePolicy::enqueue(size_t trial, Width width) {
  queues_[width].push_back({next_++, trial});
}

bool QueuePolicy::insert(TrialRun& run, size_t trial, Width width) {
  const auto takes = [&run](size_t which, Width at) {
    return run.remaining(which) * duration(run.trials()[which].trial, at);
  };
  const double own = takes(trial, width);
  double before = -std::numeric_limits<double>::infinity(), behind = std::numeric_limits<double>::infinity();
  for (const auto& [at, queue] : queues_) {
    const auto place = std::partition_point(queue.begin(), queue.end(), [&, of = at](const Entry& entry) {
      return takes(entry.trial, of) >= own;
    });
    if (place != queue.begin()) before = std::max(before, std::prev(place)->order);
    if (place != queue.end()) behind = std::min(behind, place->order);
  }
  const double order = std::isinf(behind)   ? next_++
                       : std::isinf(before) ? behind - 1
                       : before < behind    ? before + (behind - before) / 2
                                            : before;
  std::deque<Entry>& queue = queues_[width];
  queue.insert(std::upper_bound(queue.begin(), queue.end(), order,
                                [](double value, const Entry& entry) { return value < entry.order; }),
               {order, trial});
  fill(run);
  return true;
}

bool QueuePolicy::empty() const {
  return std::all_of(queues_.begin(), queues_.end(), [](const auto& queue) { return queue.second.empty(); });
}

// Places what fits, in the order of the queue. Trials of one width stand in one queue, so that those behind the first
// of a width that does not fit need not be asked; a trial whose memory does not fit does not keep others of its width
// waiting.
void QueuePolicy::fill(TrialRun& run) {
  constexpr size_t kLookAhead = 64;
  while (true) {
    std::deque<Entry>* best_queue = nullptr;
    size_t best_at = 0;
    Width best_width = 0;
    std::vector<int> best_devices;
    for (auto& [width, queue] : queues_) {
      for (size_t i = 0; i < queue.size() && i < kLookAhead; ++i) {
        if (best_queue != nullptr && queue[i].order > (*best_queue)[best_at].order) break;
        const uint64_t memory = run.trials()[queue[i].trial].trial.memory_bytes;
        std::vector<int> devices = run.find(width, memory);
        if (devices.empty()) {
          if (memory == 0 || in_order_) break;
          continue;
        }
        best_queue = &queue;
        best_at = i;
        best_width = width;
        best_devices = std::move(devices);
        break;
      }
    }
    if (best_queue == nullptr) return;
    const size_t trial = (*best_queue)[best_at].trial;
    best_queue->erase(best_queue->begin() + std::ptrdiff_t(best_at));
    run.place(trial, best_width, std::move(best_devices));
  }
}

void QueuePolicy::restart(TrialRun& run) {
  queues_.clear();
  std::vector<size_t> waiting;
  for (const size_t trial : run.unfinished())
    if (run.trials()[trial].width == 0) waiting.push_back(trial);
  if (!waiting.empty()) arrived(run, waiting);
}

void FifoPolicy::arrived(TrialRun& run, const std::vector<size_t>& trials) {
  for (size_t trial : trials) enqueue(trial, 1);
  fill(run);
}

const TrialLimits& StaticFluidPolicy::limits_of(const TrialRun& run, const std::vector<size_t>& trials) {
  if (limits_) return *limits_;
  constexpr size_t kMostMeasured = 64;    // trials: they are much alike
  constexpr double kLeastBenefit = 1e-9;  // O_th of the source, which gives no value: any benefit counts
  limits_ = run.limits();
  std::vector<double> mean_s(size_t(limits_->max_packed), 0);  // with p trials on a device, in any unit
  for (size_t i = 0; i < std::min(trials.size(), kMostMeasured); ++i)
    for (int p = 1; p <= limits_->max_packed; ++p)
      mean_s[size_t(p) - 1] += duration(run.trials()[trials[i]].trial, p == 1 ? 1 : -p);
  limits_->max_packed = packing_limit(mean_s, kLeastBenefit);
  return *limits_;
}

void StaticFluidPolicy::arrived(TrialRun& run, const std::vector<size_t>& trials) {
  const TrialLimits& limits = limits_of(run, trials);
  const std::vector<std::pair<double, size_t>> order = by_work_left(run, trials);
  double work = 0;
  for (const auto& [left, trial] : order) work += left;
  const int idle = run.idle_devices();
  const int devices = idle > 0 ? idle : int(run.up().size());
  for (const auto& [left, trial] : order) {
    const TrialRun::State& state = run.trials()[trial];
    Width width = share_of_work(left, work, devices, limits);
    if (width > 1) {  // no more devices than have the memory
      const auto enough = std::count_if(run.up().begin(), run.up().end(), [&](int device) {
        return run.devices()[size_t(device)].memory_bytes >= state.trial.memory_bytes;
      });
      width = std::min(width, int(enough));
    }
    enqueue(trial, width);
  }
  fill(run);
}

void DynamicFluidPolicy::finished(TrialRun& run) {
  fill(run);
  if (!empty()) return;
  const std::vector<size_t> trials = run.unfinished();
  if (trials.empty()) return;
  std::vector<double> lefts;  // seconds on one device
  lefts.reserve(trials.size());
  double work = 0;
  for (const size_t trial : trials) {
    lefts.push_back(run.trials()[trial].trial.budget_s * run.remaining(trial));
    work += lefts.back();
  }
  // A change that pays for itself. Few do at most completions, so only these are sorted.
  struct Pays {
    double left;
    size_t trial;
    Width then;
    bool grows;
  };
  std::vector<Pays> pays;
  const TrialLimits& limits = limits_of(run, trials);
  const double cost = limits.change_cost_s;
  for (size_t i = 0; i < trials.size(); ++i) {
    const TrialRun::State& state = run.trials()[trials[i]];
    const Width now = state.width;
    const Width then = share_of_work(lefts[i], work, int(run.up().size()), limits);
    if (then == now) continue;
    const double part = run.remaining(trials[i]);
    const double time_now = part * duration(state.trial, now);
    const double time_then = part * duration(state.trial, then);
    const bool grows = size_of(then) > size_of(now) && time_then + cost < time_now;
    const bool shrinks =
        size_of(then) < size_of(now) && size_of(then) * (time_then + cost) < size_of(now) * time_now;
    if (grows || shrinks) pays.push_back({lefts[i], trials[i], then, grows});
  }
  // Trials that shrink make room for those that grow; the longest go first among each.
  std::stable_sort(pays.begin(), pays.end(), [](const Pays& a, const Pays& b) {
    return a.grows != b.grows ? b.grows : a.left > b.left;
  });
  for (const auto& [left, trial, then, grows] : pays) {
    const TrialRun::State& state = run.trials()[trial];
    const Width now = state.width;
    if (now > 0 && then > now) {  // keeps its devices and takes further ones
      std::vector<int> devices = run.find(then - now, state.trial.memory_bytes);
      if (devices.empty()) continue;
      devices.insert(devices.begin(), state.devices.begin(), state.devices.end());
      run.place(trial, then, std::move(devices));
    } else if (now > 0) {
      std::vector<int> devices(state.devices.begin(), state.devices.begin() + std::max(then, 1));
      run.place(trial, then, std::move(devices));
    } else if (std::vector<int> devices = run.find_for(trial, then); !devices.empty()) {
      run.place(trial, then, std::move(devices));
    }
  }
}

std::unique_ptr<TrialPolicy> make_trial_policy(TrialScheduler scheduler) {
  switch (scheduler) {
    case TrialScheduler::kFifo:
      return std::make_unique<FifoPolicy>();
    case TrialScheduler::kStaticFluid:
      return std::make_unique<StaticFluidPolicy>();
    case TrialScheduler::kDynamicFluid:
      return std::make_unique<DynamicFluidPolicy>();
    case TrialScheduler::kGpushare:
      return make_trial_planner();
  }
  return nullptr;
}

}  // namespace gpushare::cluster
