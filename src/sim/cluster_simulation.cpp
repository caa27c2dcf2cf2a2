// SPDX-License-Identifier: Apache-2.0
#include "sim/cluster_simulation.hpp"

#include <algorithm>
#include <cmath>
#include <queue>
#include <random>

namespace gpushare::sim {
namespace {

using cluster::Action;

constexpr uint32_t kMostIdleTicks = 100'000;
constexpr double kLeastTickS = 1e-3;  // between two times that a scheduler is asked although nothing happens
constexpr double kSameTime = 1e-9;    // of the time
constexpr double kLeastSpeed = 1e-3;  // of the device's: nobody stops for ever

struct Running {
  bool on = false;
  bool opportunistic = false;
  double remaining_s = 0;
  double attained_s = 0;
  double speed = 0;        // work seconds a second
  double alone_speed = 0;  // the same without others
  double alone_s = 0;      // work that it would have done alone
  double repeated_s = 0;   // work that pauses made it do again
  double slowdown = 1;     // against alone on the same devices
  double since_s = 0;      // of remaining_s
  double placed_s = 0;
  uint32_t version = 0;  // of its entry in the heap
  double factor = 1;     // noise
  size_t config = InterferenceTable::kNone;
  double batch_factor = 1;  // how much slower it makes progress alone than at its first batch size
  uint64_t memory_bytes = 0;
  std::vector<uint32_t> devices;
};

struct End {
  double at_s;
  uint32_t job;
  uint32_t version;
  bool operator>(const End& other) const { return at_s != other.at_s ? at_s > other.at_s : job > other.job; }
};

// Nearest rank.
double rank(std::vector<double>& values, double p) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::max(1.0, std::ceil(p * static_cast<double>(values.size())))) - 1];
}

class Cluster {
 public:
  Cluster(const std::vector<cluster::JobInfo>& jobs, const std::vector<cluster::Device>& devices,
          cluster::Scheduler& scheduler, const ClusterOptions& options, bool want_spans,
          const std::function<uint64_t()>& now_ns)
      : jobs_(jobs),
        devices_(devices),
        scheduler_(scheduler),
        options_(options),
        want_spans_(want_spans),
        now_ns_(now_ns) {}

  base::Result<ClusterResult> run() {
    prepare();
    size_t next_arrival = 0;
    size_t left = jobs_.size();
    while (left > 0) {
      double at = tick_at_;
      if (next_arrival < jobs_.size()) at = std::min(at, jobs_[next_arrival].arrival_s);
      while (!ends_.empty() && ends_.top().version != running_[ends_.top().job].version) ends_.pop();
      if (!ends_.empty()) at = std::min(at, ends_.top().at_s);
      if (next_change_ < changes_.size()) at = std::min(at, changes_[next_change_].at_s);
      if (at == cluster::kNever) break;  // the scheduler leaves the rest waiting for ever
      now_s_ = std::max(now_s_, at);
      bool quiet = true;  // nothing has happened since the scheduler was asked last
      // Jobs that end at the same time but for rounding end together, as in what schedulers think.
      while (!ends_.empty() && ends_.top().at_s <= now_s_ + kSameTime * (1 + now_s_)) {
        const End end = ends_.top();
        ends_.pop();
        if (end.version != running_[end.job].version) continue;
        quiet = false;
        // Jobs that ran beside each other until now are observed before one of them leaves.
        for (const uint32_t d : running_[end.job].devices)
          if (here_[d].size() > 1)
            for (const uint32_t job : here_[d]) observe(job);
        finish(end.job);
        --left;
      }
      update_speeds();
      for (; next_change_ < changes_.size() && changes_[next_change_].at_s <= now_s_;
           ++next_change_, quiet = false)
        change(changes_[next_change_]);
      for (; next_arrival < jobs_.size() && jobs_[next_arrival].arrival_s <= now_s_;
           ++next_arrival, quiet = false)
        scheduler_.arrived(static_cast<uint32_t>(next_arrival), jobs_[next_arrival], now_s_);
      for (const uint32_t job : on_) observe(job);
      actions_.clear();
      const uint64_t begin_ns = now_ns_ ? now_ns_() : 0;
      tick_at_ = scheduler_.tick(now_s_, actions_);
      if (now_ns_) decision_ns_.push_back(now_ns_() - begin_ns);
      ++result_.decisions;
      quiet_ticks_ = quiet && actions_.empty() ? quiet_ticks_ + 1 : 0;
      const double soonest_s = soonest_tick_s();
      if (!(tick_at_ > soonest_s)) tick_at_ = soonest_s;  // also if it is no number
      // A scheduler that asks to be asked again for ever and lets nothing run.
      const bool idle =
          actions_.empty() && on_.empty() && next_arrival == jobs_.size() && next_change_ == changes_.size();
      idle_ticks_ = idle ? idle_ticks_ + 1 : 0;
      if (idle_ticks_ > kMostIdleTicks) break;
      for (const bool pauses : {true, false})
        for (const Action& action : actions_) {
          if ((action.kind == Action::Kind::kPause) != pauses) continue;
          GPUSHARE_RETURN_IF_ERROR(take(action, left));
        }
      update_speeds();
      if (options_.progress && result_.decisions % 256 == 0 &&
          !options_.progress(now_s_, jobs_.size() - left, jobs_.size()))
        return base::Status(GPUSHARE_CANCELLED, "the run was cancelled");
    }
    for (uint32_t job = 0; job < jobs_.size(); ++job)
      if (result_.jobs[job].end_s < 0 && result_.jobs[job].reason.empty())
        result_.jobs[job].reason = "the scheduler never placed it to its end";
    summarize(jobs_, devices_.size(), busy_s_, result_);
    result_.predictions = scheduler_.predictions();
    std::vector<double> decisions(decision_ns_.begin(), decision_ns_.end());
    result_.decision_ms_p99 = rank(decisions, 0.99) / 1e6;
    return std::move(result_);
  }

 private:
  // The earliest time at which the scheduler is asked again although nothing happens. A scheduler that asks again and
  // again and decides nothing must not keep the run from ending, so the pause grows with each such tick. It is never
  // too short for a double to count.
  double soonest_tick_s() const {
    return now_s_ + std::max(kLeastTickS * (1 + static_cast<double>(quiet_ticks_) / 100), now_s_ * 1e-9);
  }

  void prepare() {
    std::mt19937_64 random(options_.seed);
    std::normal_distribution<double> normal(0, 1);
    running_.resize(jobs_.size());
    result_.jobs.resize(jobs_.size());
    for (size_t j = 0; j < jobs_.size(); ++j) {
      Running& entry = running_[j];
      entry.remaining_s = jobs_[j].work_s;
      if (options_.noise > 0) entry.factor = std::clamp(1 + options_.noise * normal(random), 0.2, 5.0);
      configure(entry, jobs_[j], jobs_[j].batch);
      result_.jobs[j].arrival_s = jobs_[j].arrival_s;
      result_.jobs[j].work_s = jobs_[j].work_s;
    }
    here_.resize(devices_.size());
    used_bytes_.assign(devices_.size(), 0);
    busy_since_s_.assign(devices_.size(), 0);
    dirty_.assign(devices_.size(), false);
    nodes_ = cluster::number_nodes(devices_);
    scheduler_.restart_cost(options_.restart_s);
    up_.assign(devices_.size(), true);
    changes_ = cluster::device_changes(devices_);
    for (; next_change_ < changes_.size() && changes_[next_change_].at_s <= 0; ++next_change_)
      up_[changes_[next_change_].device] = changes_[next_change_].up;
    for (uint32_t d = 0; d < devices_.size(); ++d) tell_device(d);
  }

  // A device fails, and its jobs wait again, or comes back.
  void change(const cluster::DeviceChange& change) {
    if (!change.up) {
      const std::vector<uint32_t> lost = here_[change.device];
      for (const uint32_t job : lost) interrupt(job);
    }
    up_[change.device] = change.up;
    tell_device(change.device);
  }

  // The job leaves its devices, and repeats the work that it did since it last wrote its state.
  void interrupt(uint32_t job) {
    leave(job);
    running_[job].remaining_s += options_.restart_s;
    running_[job].repeated_s += options_.restart_s;
    ++result_.jobs[job].pauses;
  }

  // Memory, table entry and speed alone of a batch size; 0: the job has none.
  void configure(Running& entry, const cluster::JobInfo& info, double batch) {
    const cluster::JobInfo now = cluster::with_batch(info, batch);
    const InterferenceTable* table = options_.table;
    const size_t first = table == nullptr ? InterferenceTable::kNone : table->find(info.config);
    entry.config = table == nullptr ? InterferenceTable::kNone : table->find(now.config);
    entry.memory_bytes = now.memory_bytes;
    const bool measured = entry.config != InterferenceTable::kNone && first != InterferenceTable::kNone;
    entry.batch_factor = (measured ? table->alone_steps_per_s(first) / table->alone_steps_per_s(entry.config)
                                   : cluster::assumed_iteration_factor(now)) *
                         cluster::iterations_factor(now);
  }

  void tell_device(uint32_t device) {
    scheduler_.device_changed(device, {devices_[device].memory_bytes, devices_[device].speed, nodes_[device]},
                              up_[device], now_s_);
  }

  void advance(uint32_t job) {
    Running& entry = running_[job];
    const double passed = now_s_ - entry.since_s;
    entry.since_s = now_s_;
    entry.remaining_s = std::max(0.0, entry.remaining_s - passed * entry.speed);
    entry.attained_s += passed;
    entry.alone_s += passed * entry.alone_speed;
  }

  void observe(uint32_t job) {
    advance(job);
    const Running& entry = running_[job];
    scheduler_.observed(job, entry.attained_s, entry.remaining_s, entry.slowdown, now_s_);
  }

  void mark(uint32_t device) {
    if (dirty_[device]) return;
    dirty_[device] = true;
    changed_.push_back(device);
  }

  void leave(uint32_t job) {
    Running& entry = running_[job];
    advance(job);
    entry.on = false;
    ++entry.version;
    result_.jobs[job].running_s += now_s_ - entry.placed_s;
    for (const uint32_t d : entry.devices) {
      auto& here = here_[d];
      here.erase(std::find(here.begin(), here.end(), job));
      used_bytes_[d] -= entry.memory_bytes;
      if (here.empty()) busy_s_ += now_s_ - busy_since_s_[d];
      if (want_spans_) result_.spans.push_back({job, d, entry.placed_s, now_s_});
      mark(d);
    }
    entry.devices.clear();
    const auto at = std::lower_bound(on_.begin(), on_.end(), job);
    on_.erase(at);
  }

  void finish(uint32_t job) {
    leave(job);
    running_[job].remaining_s = 0;
    result_.jobs[job].end_s = now_s_;
    result_.jobs[job].company =
        running_[job].alone_s / std::max(1e-9, jobs_[job].work_s + running_[job].repeated_s);
    scheduler_.finished(job, now_s_);
  }

  base::Status take(const Action& action, size_t& left) {
    const auto wrong = [&](const char* what) {
      return base::Status(
          GPUSHARE_INTERNAL,
          base::format("the scheduler's action on job %u ('%s') is wrong: %s", action.job,
                       action.job < jobs_.size() ? jobs_[action.job].name.c_str() : "", what));
    };
    if (action.job >= jobs_.size() || result_.jobs[action.job].end_s >= 0)
      return wrong("there is no such job");
    Running& entry = running_[action.job];
    switch (action.kind) {
      case Action::Kind::kPause:
        if (!entry.on) return wrong("it does not run");
        interrupt(action.job);
        return {};
      case Action::Kind::kReject:
        if (entry.on) return wrong("it runs");
        result_.jobs[action.job].reason = action.reason.empty() ? "rejected" : action.reason;
        ++result_.rejected;
        --left;
        return {};
      case Action::Kind::kResize:
        if (!entry.on) return wrong("it does not run");
        entry.opportunistic = action.opportunistic;
        for (const uint32_t d : entry.devices) mark(d);
        return {};
      case Action::Kind::kReconfigure: {
        const auto& sizes = jobs_[action.job].batch_sizes;
        if (!entry.on) return wrong("it does not run");
        if (std::find(sizes.begin(), sizes.end(), action.batch) == sizes.end())
          return wrong("the batch size is none of its own");
        advance(action.job);
        for (const uint32_t d : entry.devices) used_bytes_[d] -= entry.memory_bytes;
        configure(entry, jobs_[action.job], action.batch);
        ++result_.reconfigured;
        for (const uint32_t d : entry.devices) {
          used_bytes_[d] += entry.memory_bytes;
          mark(d);
          if (used_bytes_[d] > devices_[d].memory_bytes) {
            ++result_.oom;
            return wrong("a device has not the memory for that batch size");
          }
        }
        return {};
      }
      case Action::Kind::kPlace:
        break;
    }
    if (entry.on) return wrong("it runs already");
    if (action.devices.size() != jobs_[action.job].gang)
      return wrong("the devices are not as many as its gang");
    for (size_t i = 0; i < action.devices.size(); ++i) {
      const uint32_t d = action.devices[i];
      if (d >= devices_.size() ||
          std::find(action.devices.begin(), action.devices.begin() + static_cast<std::ptrdiff_t>(i), d) !=
              action.devices.begin() + static_cast<std::ptrdiff_t>(i))
        return wrong("a device is none, or there twice");
      if (!up_[d]) return wrong("a device is not up");
      if (used_bytes_[d] + entry.memory_bytes > devices_[d].memory_bytes) {
        ++result_.oom;
        return wrong("a device has not that much memory left");
      }
    }
    entry.on = true;
    entry.opportunistic = action.opportunistic;
    entry.devices = action.devices;
    entry.since_s = entry.placed_s = now_s_;
    if (result_.jobs[action.job].start_s < 0) result_.jobs[action.job].start_s = now_s_;
    for (const uint32_t d : entry.devices) {
      if (here_[d].empty()) busy_since_s_[d] = now_s_;
      here_[d].push_back(action.job);
      used_bytes_[d] += entry.memory_bytes;
      mark(d);
    }
    on_.insert(std::lower_bound(on_.begin(), on_.end(), action.job), action.job);
    return {};
  }

  // How much slower than alone `job` runs on a device.
  double slowdown_on(uint32_t job, uint32_t device) const {
    const Running& self = running_[job];
    const std::vector<double>& own = jobs_[job].demands;
    double excess = 0;
    std::vector<double> sum = own;
    double above = 0;  // demand, by the jobs that go first, for the resource that `job` wants most
    const size_t main = static_cast<size_t>(std::max_element(own.begin(), own.end()) - own.begin());
    for (const uint32_t other : here_[device]) {
      if (other == job) continue;
      const Running& entry = running_[other];
      if (entry.opportunistic && !self.opportunistic) continue;
      const std::vector<double>& theirs = jobs_[other].demands;
      if (self.opportunistic && !entry.opportunistic) {
        if (main < theirs.size()) above += theirs[main];
        continue;
      }
      const double measured = options_.table != nullptr && self.config != InterferenceTable::kNone &&
                                      entry.config != InterferenceTable::kNone
                                  ? options_.table->pair_rate(self.config, entry.config)
                                  : 0;
      if (measured > 0) {
        excess += 1 / measured - 1;
      } else {
        for (size_t r = 0; r < sum.size() && r < theirs.size(); ++r) sum[r] += theirs[r];
      }
    }
    double slowdown = std::max(1.0, sum.empty() ? 1.0 : *std::max_element(sum.begin(), sum.end())) + excess;
    if (above > 0) slowdown /= std::clamp((1 - above) / std::max(own[main], 1e-6), kLeastSpeed, 1.0);
    return std::min(slowdown, 1 / kLeastSpeed) * self.batch_factor;
  }

  // Speeds of all jobs on devices whose jobs changed.
  void update_speeds() {
    touched_.clear();
    for (const uint32_t d : changed_) {
      dirty_[d] = false;
      touched_.insert(touched_.end(), here_[d].begin(), here_[d].end());
    }
    changed_.clear();
    std::sort(touched_.begin(), touched_.end());
    touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
    for (const uint32_t job : touched_) {
      Running& entry = running_[job];
      advance(job);
      double slowest = 1e300, slowdown = 0, alone = 1e300;
      for (const uint32_t d : entry.devices) {
        const double here = slowdown_on(job, d);
        slowdown = std::max(slowdown, here);
        slowest = std::min(slowest, devices_[d].speed / here);
        alone = std::min(alone, devices_[d].speed / entry.batch_factor);
      }
      entry.slowdown = slowdown;
      entry.speed = slowest * entry.factor;
      entry.alone_speed = alone * entry.factor;
      ends_.push({now_s_ + entry.remaining_s / entry.speed, job, ++entry.version});
    }
  }

  const std::vector<cluster::JobInfo>& jobs_;
  const std::vector<cluster::Device>& devices_;
  cluster::Scheduler& scheduler_;
  const ClusterOptions& options_;
  const bool want_spans_;
  const std::function<uint64_t()>& now_ns_;
  double now_s_ = 0;
  double tick_at_ = cluster::kNever;
  uint32_t idle_ticks_ = 0;
  uint64_t quiet_ticks_ = 0;  // in a row: nothing happened, and the scheduler decided nothing
  double busy_s_ = 0;
  std::vector<Running> running_;
  std::vector<uint32_t> on_;  // jobs that run, ascending
  std::vector<std::vector<uint32_t>> here_;
  std::vector<uint64_t> used_bytes_;
  std::vector<double> busy_since_s_;
  std::vector<uint32_t> nodes_;
  std::vector<bool> dirty_;
  std::vector<uint32_t> changed_, touched_;
  std::vector<bool> up_;  // a device
  std::vector<cluster::DeviceChange> changes_;
  size_t next_change_ = 0;
  std::vector<Action> actions_;
  std::vector<uint64_t> decision_ns_;
  std::priority_queue<End, std::vector<End>, std::greater<>> ends_;
  ClusterResult result_;
};

}  // namespace

void tell_known_pairs(const InterferenceTable& table, cluster::Scheduler& scheduler) {
  const std::vector<std::string> names = table.names();
  cluster::JobInfo job, other;
  job.demands = other.demands = {InterferenceModel::kDefaultDemand};
  for (size_t i = 0; i < names.size(); ++i)
    for (size_t j = 0; j < names.size(); ++j) {
      if (table.pair_rate(i, j) <= 0) continue;
      job.config = names[i];
      other.config = names[j];
      scheduler.known_pair(job, other, 1 / table.pair_rate(i, j));
    }
}

void summarize(const std::vector<cluster::JobInfo>& jobs, size_t devices, double busy_s,
               ClusterResult& result) {
  std::vector<double> completion, slowdown, company;
  double first = cluster::kNever, last = 0, queue = 0;
  for (size_t j = 0; j < jobs.size(); ++j) {
    const ClusterJobResult& job = result.jobs[j];
    first = std::min(first, job.arrival_s);
    if (job.end_s < 0) continue;
    last = std::max(last, job.end_s);
    completion.push_back(job.end_s - job.arrival_s);
    queue += job.start_s - job.arrival_s;
    if (!jobs[j].guaranteed) continue;
    slowdown.push_back(job.running_s / std::max(job.work_s, 1e-9));
    company.push_back(job.company);
  }
  result.completed = completion.size();
  if (completion.empty()) return;
  for (const double value : completion) result.jct_mean_s += value;
  result.jct_mean_s /= static_cast<double>(completion.size());
  result.queue_mean_s = queue / static_cast<double>(completion.size());
  result.jct_p95_s = rank(completion, 0.95);
  result.slowdown_p99 = rank(slowdown, 0.99);
  result.company_p99 = rank(company, 0.99);
  result.makespan_s = last - first;
  if (result.makespan_s > 0) result.utilization = busy_s / (result.makespan_s * static_cast<double>(devices));
}

base::Result<ClusterResult> run_cluster(const std::vector<cluster::JobInfo>& jobs,
                                        const std::vector<cluster::Device>& devices,
                                        cluster::Scheduler& scheduler, const ClusterOptions& options,
                                        bool want_spans, const std::function<uint64_t()>& now_ns) {
  return Cluster(jobs, devices, scheduler, options, want_spans, now_ns).run();
}

}  // namespace gpushare::sim
