// SPDX-License-Identifier: Apache-2.0
#include "cluster/training/forward.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "cluster/never.hpp"

namespace gpushare::cluster::training {
namespace {

constexpr double kLeastSpeed = 1e-3;  // of the device's, that a job has beside others
constexpr double kPatienceS = 600, kPatienceOfWork = 10;
// The worth of a second of a device, in seconds of a job's completion: who arrives later may need it whole. Among plans that
// are as good, the one that shares where nobody is slowed is therefore taken, and devices stay free.
constexpr double kDeviceWorth = 0.05;
// Each earlier pause of a job adds so many restarts to what the next one costs. Each move alone may pay, but jobs go on
// arriving, and one that is moved for each of them would never end.
constexpr double kRepeatedPause = 1;
constexpr size_t kTicksOfAJob = 40;  // beyond, a rule goes round in circles

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

size_t most_wanted(const JobInfo& info) {
  return static_cast<size_t>(std::max_element(info.demands.begin(), info.demands.end()) -
                             info.demands.begin());
}

// Names for the devices, among equal ones, such that of the placed jobs as many as possible stay where they are.
std::vector<DeviceIndex> kept_names(const std::vector<BookDevice>& devices,
                                    const std::vector<Action>& actions) {
  constexpr DeviceIndex kNone = UINT32_MAX;
  const auto kind = [&](DeviceIndex d) {
    const DeviceInfo& info = devices[d].info;
    return std::tuple(info.speed, info.memory_bytes, info.node, devices[d].up);
  };
  std::vector<std::vector<JobId>> then(devices.size());
  for (const Action& action : actions)
    if (action.kind == Action::Kind::kPlace)
      for (const DeviceIndex d : action.devices) then[d].push_back(action.job);
  // (jobs in common, new name, old name), the most first.
  std::vector<std::tuple<size_t, DeviceIndex, DeviceIndex>> common;
  for (DeviceIndex d = 0; d < devices.size(); ++d) {
    if (then[d].empty()) continue;
    std::map<DeviceIndex, size_t> where;
    for (DeviceIndex old = 0; old < devices.size(); ++old)
      for (const JobId job : devices[old].jobs)
        if (kind(old) == kind(d) && std::find(then[d].begin(), then[d].end(), job) != then[d].end())
          ++where[old];
    for (const auto& [old, jobs] : where) common.emplace_back(jobs, old, d);
  }
  std::stable_sort(common.begin(), common.end(),
                   [](const auto& a, const auto& b) { return std::get<0>(a) > std::get<0>(b); });
  std::vector<DeviceIndex> to(devices.size(), kNone);
  std::vector<bool> taken(devices.size(), false);
  const auto name = [&](DeviceIndex d, DeviceIndex as) {
    if (to[d] != kNone || taken[as]) return;
    to[d] = as;
    taken[as] = true;
  };
  for (const auto& [jobs, old, d] : common) name(d, old);
  for (DeviceIndex d = 0; d < devices.size(); ++d) name(d, d);
  for (DeviceIndex d = 0; d < devices.size(); ++d)
    for (DeviceIndex as = 0; as < devices.size() && to[d] == kNone; ++as)
      if (kind(as) == kind(d)) name(d, as);
  return to;
}

// A run of one rule.
class Forward {
 public:
  Forward(Book& rule, const ForwardStart& start, const Knowledge& known)
      : rule_(rule),
        known_(known),
        jobs_(start.jobs),
        devices_(start.devices),
        weights_(start.weights),
        restart_s_(start.restart_s),
        begin_s_(start.now_s),
        now_s_(start.now_s),
        speed_(start.jobs.size(), 0),
        alone_speed_(start.jobs.size(), 0),
        dirty_(start.devices.size(), true) {}

  double run(bool afresh, double most) {
    size_t left = jobs_.size(), ticks = 0;
    double weight_left = 0, sum = 0;
    for (const double weight : weights_) weight_left += weight;
    while (left > 0) {
      if (++ticks > kTicksOfAJob * jobs_.size()) return kNever;
      std::vector<Action> actions;
      double wake = rule_.tick(now_s_, actions);
      if (afresh && ticks == 1) settle(jobs_, devices_, rule_, actions);
      if (!take(actions)) return kNever;
      update_speeds();
      if (wake <= now_s_) wake = now_s_ + 1e-3;
      double next = wake;
      for (JobId job = 0; job < jobs_.size(); ++job)
        if (jobs_[job].running) next = std::min(next, now_s_ + jobs_[job].remaining_s / speed_[job]);
      if (next == kNever) return kNever;
      const double passed = next - now_s_;
      sum += kDeviceWorth * passed * busy() + std::exchange(regret_s_, 0);
      if (sum + weight_left * (next - begin_s_) >= most) return kNever;
      now_s_ = next;
      for (JobId job = 0; job < jobs_.size(); ++job) {
        BookJob& entry = jobs_[job];
        if (!entry.running) continue;
        entry.attained_s += passed;
        entry.remaining_s -= passed * speed_[job];
        if (!loses(entry, passed * (alone_speed_[job] - speed_[job]))) return kNever;
        if (entry.remaining_s > 1e-9 * (1 + entry.info.work_s)) {
          rule_.observed(job, entry.attained_s, entry.remaining_s, 0, now_s_);
          continue;
        }
        sum += weights_[job] * (now_s_ - begin_s_);
        weight_left -= weights_[job];
        --left;
        leave(job);
        entry.gone = true;
        rule_.finished(job, now_s_);
      }
    }
    return sum;
  }

 private:
  double busy() const {
    return double(std::count_if(devices_.begin(), devices_.end(),
                                [](const BookDevice& device) { return !device.jobs.empty(); }));
  }
  void leave(JobId job) {
    BookJob& entry = jobs_[job];
    for (const DeviceIndex d : entry.devices) {
      auto& here = devices_[d].jobs;
      here.erase(std::find(here.begin(), here.end(), job));
      dirty_[d] = true;
    }
    entry.devices.clear();
    entry.running = false;
  }
  bool take(const std::vector<Action>& actions) {
    for (const bool pauses : {true, false})
      for (const Action& action : actions) {
        if ((action.kind == Action::Kind::kPause) != pauses) continue;
        BookJob& entry = jobs_[action.job];
        switch (action.kind) {
          case Action::Kind::kPause:
            leave(action.job);
            entry.remaining_s += restart_s_;
            regret_s_ += kRepeatedPause * weights_[action.job] * restart_s_ * entry.pauses++;
            break;
          case Action::Kind::kPlace:
            entry.running = true;
            entry.opportunistic = action.opportunistic;
            entry.devices = action.devices;
            for (const DeviceIndex d : entry.devices) {
              devices_[d].jobs.push_back(action.job);
              dirty_[d] = true;
            }
            break;
          case Action::Kind::kResize:
            entry.opportunistic = action.opportunistic;
            for (const DeviceIndex d : entry.devices) dirty_[d] = true;
            break;
          case Action::Kind::kReject:
            return false;
          case Action::Kind::kReconfigure:
            break;
        }
      }
    return true;
  }
  // False if it is more than a guaranteed job may lose. A job that has lost more already loses nothing any longer.
  static bool loses(BookJob& job, double work_s) {
    if (!job.info.guaranteed || work_s <= 1e-9 * job.info.work_s) return true;
    if (work_s > may_lose(job) * (1 + 1e-9)) return false;
    job.lost_s += work_s;
    return true;
  }
  void update_speeds() {
    for (JobId job = 0; job < jobs_.size(); ++job) {
      const BookJob& entry = jobs_[job];
      if (!entry.running ||
          std::none_of(entry.devices.begin(), entry.devices.end(), [&](DeviceIndex d) { return dirty_[d]; }))
        continue;
      double slowest = kNever, slowest_alone = kNever;
      const double alone = alone_slowdown(entry.info);
      for (const DeviceIndex d : entry.devices) {
        others_.clear();
        for (const JobId other : devices_[d].jobs)
          if (other != job) others_.push_back({&jobs_[other], jobs_[other].opportunistic});
        const double slowdown = believed_slowdown(known_, {&entry, entry.opportunistic}, others_);
        slowest = std::min(slowest, devices_[d].info.speed / slowdown);
        slowest_alone = std::min(slowest_alone, devices_[d].info.speed / alone);
      }
      speed_[job] = slowest * entry.pace;
      // A gang waits for its slowest device: company on a faster one may cost it nothing.
      alone_speed_[job] = slowest_alone * entry.pace;
    }
    std::fill(dirty_.begin(), dirty_.end(), false);
  }

  Book& rule_;
  const Knowledge& known_;
  std::vector<BookJob> jobs_;
  std::vector<BookDevice> devices_;
  const std::vector<double>& weights_;
  const double restart_s_, begin_s_;
  double now_s_;
  std::vector<double> speed_, alone_speed_;  // of a job: now, and without others on its devices
  std::vector<bool> dirty_;
  std::vector<Beside> others_;
  double regret_s_ = 0;  // of pauses
};

}  // namespace

double alone_slowdown(const JobInfo& info) {
  return info.batch_sizes.size() < 2 ? 1 : assumed_iteration_factor(info) * iterations_factor(info);
}

double starves_at(const BookJob& job, double fastest) {
  return job.info.arrival_s + job.attained_s + kPatienceS + kPatienceOfWork * job.info.work_s / fastest;
}

bool starves(const BookJob& job, const std::vector<BookDevice>& devices, double now_s) {
  const double waited = now_s - job.info.arrival_s - job.attained_s;
  if (waited <= kPatienceS) return false;
  double fastest = 0;
  for (const BookDevice& device : devices)
    if (device.up && device.info.memory_bytes >= job.info.memory_bytes)
      fastest = std::max(fastest, device.info.speed);
  return (waited - kPatienceS) * fastest > kPatienceOfWork * job.info.work_s;
}

uint64_t company_of(JobId job, const std::vector<JobId>& here) {
  uint64_t key = mixed(mixed(job) + 1);
  for (const JobId other : here)
    if (other != job) key += mixed(other);  // in any order
  return key;
}

double believed_slowdown(const Knowledge& known, const Beside& job, const std::vector<Beside>& others) {
  if (!known.companies.empty())
    if (const auto company = company_among(job, others); company)
      if (const auto at = known.companies.find(*company); at != known.companies.end()) return at->second;
  return guessed_slowdown(known, job, others);
}

std::optional<uint64_t> company_among(const Beside& job, const std::vector<Beside>& others) {
  if (others.empty() || job.job->info.gang > 1 || job.opportunistic) return {};
  uint64_t key = mixed(mixed(job.job->id) + 1);
  for (const Beside& other : others) {
    if (other.opportunistic) return {};
    key += mixed(other.job->id);
  }
  return key;
}

bool names_both(const Beside& job, const std::vector<Beside>& others) {
  return !job.job->info.config.empty() && std::any_of(others.begin(), others.end(), [](const Beside& other) {
    return !other.job->info.config.empty();
  });
}

double guessed_slowdown(const Knowledge& known, const Beside& job, const std::vector<Beside>& others) {
  const JobInfo& own = job.job->info;
  const double alone = alone_slowdown(own);
  if (others.empty()) return alone;
  const size_t main = most_wanted(own);
  double most = 1, corrected = 0, above = 0;
  for (const Beside& other : others) {
    if (other.opportunistic && !job.opportunistic) continue;  // gives way
    const JobInfo& theirs = other.job->info;
    if (job.opportunistic && !other.opportunistic) {
      if (main < theirs.demands.size()) above += theirs.demands[main];
      continue;
    }
    if (own.config.empty() || theirs.config.empty()) continue;  // nothing was learned of it
    corrected += std::max(0.0, (1 + known.slowdowns.excess(own, theirs).mean) / alone - 1) -
                 SlowdownModel::guessed(own, theirs);
  }
  for (size_t r = 0; r < own.demands.size(); ++r) {
    double sum = own.demands[r];
    for (const Beside& other : others)
      if (other.opportunistic == job.opportunistic && r < other.job->info.demands.size())
        sum += other.job->info.demands[r];
    most = std::max(most, sum);
  }
  double slowdown = std::max(1.0, most + corrected);
  if (above > 0)
    slowdown /= std::clamp((1 - above) / std::max(main < own.demands.size() ? own.demands[main] : 1.0, 1e-6),
                           kLeastSpeed, 1.0);
  return std::min(slowdown, 1 / kLeastSpeed) * alone;
}

void settle(const std::vector<BookJob>& jobs, const std::vector<BookDevice>& devices, Book& rule,
            std::vector<Action>& actions) {
  const std::vector<DeviceIndex> to = kept_names(devices, actions);
  for (Action& action : actions)
    for (DeviceIndex& d : action.devices) d = to[d];
  rule.rename(to);
  std::map<JobId, Action> placed;
  std::vector<Action> out, reconfigured;  // a job runs before its batch size changes
  for (Action& action : actions) {
    if (action.kind == Action::Kind::kPlace)
      placed[action.job] = std::move(action);
    else if (action.kind == Action::Kind::kResize)
      placed[action.job].opportunistic = action.opportunistic;
    else if (action.kind == Action::Kind::kReconfigure)
      reconfigured.push_back(std::move(action));
    else if (action.kind != Action::Kind::kPause)
      out.push_back(std::move(action));
  }
  for (JobId job = 0; job < jobs.size(); ++job) {
    if (!jobs[job].running) continue;
    const auto at = placed.find(job);
    if (at != placed.end()) {
      std::vector<DeviceIndex> now = jobs[job].devices, then = at->second.devices;
      std::sort(now.begin(), now.end());
      std::sort(then.begin(), then.end());
      if (now == then) {
        if (jobs[job].opportunistic != at->second.opportunistic)
          out.push_back({Action::Kind::kResize, job, {}, at->second.opportunistic, ""});
        placed.erase(at);
        continue;
      }
    }
    out.push_back({Action::Kind::kPause, job, {}, false, ""});
  }
  for (auto& [job, action] : placed) out.push_back(std::move(action));
  for (Action& action : reconfigured) out.push_back(std::move(action));
  actions = std::move(out);
}

ForwardStart stopped(const ForwardStart& start) {
  ForwardStart out = start;
  for (BookJob& job : out.jobs) {
    job.running = job.opportunistic = false;
    job.devices.clear();
  }
  for (BookDevice& device : out.devices) {
    device.jobs.clear();
    device.used_bytes = 0;
  }
  return out;
}

double play_forward(Book& rule, const ForwardStart& start, bool afresh, const Knowledge& known, double most) {
  rule.think();
  if (afresh) {
    const ForwardStart none = stopped(start);
    rule.take_over(none.jobs, none.devices);
  } else {
    rule.take_over(start.jobs, start.devices);
  }
  return Forward(rule, start, known).run(afresh, most);
}

}  // namespace gpushare::cluster::training
