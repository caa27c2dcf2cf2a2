// Schedulers that put several jobs on a device: pack, as MPS would; antman, the global scheduler of AntMan (Xiao et
// al., OSDI 2020); iadeep, interference-aware placement; best, one of the rules of our own.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "cluster/training/schedulers.hpp"
#include "cluster/training/sharing.hpp"

namespace gpushare::cluster::training {
namespace {

class Pack final : public Sharing {
 public:
  using Sharing::Sharing;
  double tick(double, std::vector<Action>& actions) override {
    take_rejected(actions);
    while (!queue_.empty()) {
      const JobId job = *queue_.begin();
      std::vector<DeviceIndex> devices = cheapest(
          jobs_[job].info, [&](DeviceIndex d) { return static_cast<double>(devices_[d].jobs.size()); });
      if (devices.empty()) break;
      queue_.erase(queue_.begin());
      enter(job, std::move(devices), false, actions);
    }
    return kNever;
  }
};

// Algorithm 1: guaranteed jobs get devices without another guaranteed one, in order, or wait; opportunistic ones, and
// guaranteed ones that have waited long, run on the least-loaded devices below a load limit, with what is left there;
// the latter are upgraded when devices are free of guaranteed jobs. An opportunistic job alone on its device has all of
// it, so an upgrade would change nothing there. The source does not say what its limit M counts: here a device takes
// the job if it is the second one, or if all jobs together keep the device busy for less than a part of the time.
class AntMan final : public Sharing {
  static constexpr double kLongWaitS = 600;
  static constexpr size_t kLoadLimit = 2;    // jobs on a device, the newcomer included
  static constexpr double kBusyLimit = 0.8;  // of the time, the newcomer included

 public:
  using Sharing::Sharing;
  double tick(double now_s, std::vector<Action>& actions) override {
    take_rejected(actions);
    // Long-waiting ones that run as opportunistic are upgraded where they are.
    for (auto at = lent_.begin(); at != lent_.end();) {
      const JobId job = *at;
      if (!jobs_[job].running) {
        at = lent_.erase(at);
        continue;
      }
      if (std::all_of(jobs_[job].devices.begin(), jobs_[job].devices.end(),
                      [&](DeviceIndex d) { return !holds_guaranteed(d); })) {
        set_opportunistic(job, false);
        actions.push_back({Action::Kind::kResize, job, {}, false, ""});
        at = lent_.erase(at);
        continue;
      }
      ++at;
    }
    double next = kNever;
    bool reserved = false;  // an earlier guaranteed job waits for devices: later ones do not take them
    for (auto at = queue_.begin(); at != queue_.end();) {
      const JobId job = *at;
      const JobInfo& info = jobs_[job].info;
      const bool long_wait = now_s - jobs_[job].waiting_since_s >= kLongWaitS;
      std::vector<DeviceIndex> devices;
      bool opportunistic = !info.guaranteed;
      if (info.guaranteed && !reserved)
        devices = cheapest(info, [&](DeviceIndex d) {
          return holds_guaranteed(d) ? kNever : static_cast<double>(devices_[d].jobs.size());
        });
      if (devices.empty() && (!info.guaranteed || long_wait)) {
        opportunistic = true;
        devices = cheapest(info, [&](DeviceIndex d) {
          const double load = busy(d);
          return devices_[d].jobs.size() >= kLoadLimit && load + demand(info) > kBusyLimit ? kNever : load;
        });
      }
      if (devices.empty()) {
        if (info.guaranteed) {
          reserved = true;
          if (!long_wait) next = std::min(next, jobs_[job].waiting_since_s + kLongWaitS);
        }
        ++at;
        continue;
      }
      at = queue_.erase(at);
      enter(job, std::move(devices), opportunistic, actions);
      if (opportunistic && info.guaranteed) lent_.insert(job);
    }
    return next;
  }

 private:
  // The part of the time that a job keeps a device busy, and that its jobs do.
  static double demand(const JobInfo& info) {
    return info.demands.empty() ? 1 : *std::max_element(info.demands.begin(), info.demands.end());
  }
  double busy(DeviceIndex d) const {
    double sum = 0;
    for (const JobId job : devices_[d].jobs) sum += demand(jobs_[job].info);
    return sum;
  }
  bool holds_guaranteed(DeviceIndex d) const {
    const auto& here = devices_[d].jobs;
    return std::any_of(here.begin(), here.end(), [&](JobId job) { return !jobs_[job].opportunistic; });
  }
  void goes_on(JobId job) override {
    if (jobs_[job].opportunistic && jobs_[job].info.guaranteed) lent_.insert(job);
  }
  std::set<JobId> lent_;
};

// The device on which the newcomer degrades least in sum, the least used of equal ones; waits where packing would cost more
// than it gives. The rule of the slides, for any job i there: E_i = (1 + e_i) x sum over all of e/(1 + e) - 1 > 0, where e is how
// much the newcomer changes a job's degradation, and the newcomer's own is its degradation. Slowdowns are predicted as for
// our own schedulers, in place of the source's random forest.
class IaDeep final : public Sharing {
  // On many devices: how many are looked at for jobs that find no place, after which the rest of a long queue waits for
  // the next event. A job like one that just found no place is not looked at, and does not count.
  static constexpr size_t kManyDevices = 128;
  static constexpr size_t kMostChecks = 8'000;

 public:
  using Sharing::Sharing;
  double tick(double now_s, std::vector<Action>& actions) override {
    take_rejected(actions);
    size_t left =
        devices_.size() > kManyDevices ? std::max<size_t>(1, kMostChecks / devices_.size()) : SIZE_MAX;
    std::map<Likeness, uint64_t> failed;  // the least memory that found no place
    for (auto at = queue_.begin(); at != queue_.end() && left > 0;) {
      const JobId job = *at;
      const JobInfo& info = jobs_[job].info;
      const auto like = failed.find(likeness(info));
      if (like != failed.end() && like->second <= info.memory_bytes) {
        ++at;
        continue;
      }
      std::vector<DeviceIndex> devices = cheapest(info, [&](DeviceIndex d) { return cost(job, d); });
      if (devices.empty()) {
        failed[likeness(info)] = info.memory_bytes;
        --left;
        ++at;
        continue;
      }
      at = queue_.erase(at);
      enter(job, std::move(devices), false, actions);
      failed.clear();
    }
    return tune(now_s, actions);
  }

 private:
  static constexpr double kEvenWeight = 1e-3;  // of a device's use: only between devices of equal degradation

  // All that cost() sees of a newcomer: jobs that are alike cost the same everywhere.
  using Likeness =
      std::tuple<std::string, std::vector<double>, double, std::vector<double>, double, uint32_t>;
  static Likeness likeness(const JobInfo& info) {
    return {info.config, info.demands, info.batch, info.batch_sizes, info.noise_scale, info.gang};
  }

  // The mean of what a device's jobs use of its compute and its memory.
  double use(DeviceIndex d) const {
    double demand = 0;
    for (const JobId job : devices_[d].jobs)
      for (const double part : jobs_[job].info.demands)
        demand += part / static_cast<double>(jobs_[job].info.demands.size());
    const BookDevice& device = devices_[d];
    return (demand + static_cast<double>(device.used_bytes) / static_cast<double>(device.info.memory_bytes)) /
           2;
  }

  double cost(JobId newcomer, DeviceIndex d) const {
    const std::vector<JobId>& here = devices_[d].jobs;
    if (here.empty()) return 0;
    std::vector<double> changes;  // of those there
    double own = 0, sum = 0;
    for (const JobId job : here) {
      const double by_newcomer = interference(jobs_[job].info, jobs_[newcomer].info).mean;
      double before = 0;
      for (const JobId other : here)
        if (other != job) before += interference(jobs_[job].info, jobs_[other].info).mean;
      own += interference(jobs_[newcomer].info, jobs_[job].info).mean;
      sum += by_newcomer;
      changes.push_back(by_newcomer / (1 + before));
    }
    double lost = own / (1 + own);
    for (const double e : changes) lost += e / (1 + e);
    for (const double e : changes)
      if ((1 + e) * lost - 1 > 0) return kNever;
    return sum + own + kEvenWeight * use(d);
  }
};

// Some jobs, in no order.
class JobSet {
 public:
  void insert(JobId job) {
    if (at_.size() <= job) at_.resize(job + size_t{1}, kOut);
    if (at_[job] != kOut) return;
    at_[job] = jobs_.size();
    jobs_.push_back(job);
  }
  void erase(JobId job) {
    if (job >= at_.size() || at_[job] == kOut) return;
    at_[jobs_.back()] = at_[job];
    jobs_[at_[job]] = jobs_.back();
    jobs_.pop_back();
    at_[job] = kOut;
  }
  const std::vector<JobId>& jobs() const { return jobs_; }

 private:
  static constexpr size_t kOut = SIZE_MAX;
  std::vector<JobId> jobs_;
  std::vector<size_t> at_;  // a job's place among them
};

// Ours. Jobs of greater priority go first, then those with the least remaining work times devices^0.8 over weight, much
// as srtf; devices that are left over by gangs or memory, and second places beside a job, go to the next in that order
// where the pair is worth it. Beside a guaranteed job, an opportunistic one gets what it leaves, by the device's
// coordinator, so that the guaranteed one runs as if alone; two guaranteed jobs share only where both keep within their
// limit by the upper end of the predicted slowdowns, and part again if what is observed says otherwise. Runs are paused
// only for someone who needs clearly less than they still need, so that a change pays. Demands alone often say that a
// pair gains nothing where it does: pairs of opportunistic jobs that nobody has seen are tried, few at a time, where
// they are worth it should the prediction err by its spread, and part if they are slower than one after the other.
class Best final : public Lending {
  static constexpr double kPairGain = 1.1;          // of 1/slowdown summed, at the least
  static constexpr double kGuaranteedLimit = 1.04;  // slowdown of a guaranteed job beside another
  static constexpr double kPreemptRatio = 0.95;
  static constexpr double kGangExponent = 0.8;
  static constexpr double kWorthSlowdown = 1.6;  // from which on a pair of opportunistic jobs is looked at
  static constexpr size_t kMostTogether = 4;     // jobs on a device
  static constexpr size_t kDevicesPerTry = 8;    // one pair is tried at a time for so many devices

 public:
  using Lending::Lending;
  void finished(JobId job, double now_s) override {
    Sharing::finished(job, now_s);
    running_.erase(job);
  }
  void device_changed(DeviceIndex device, const DeviceInfo& info, bool up, double now_s) override {
    Lending::device_changed(device, info, up, now_s);
    changed();
  }
  void observed(JobId job, double attained_s, double remaining_s, double slowdown, double now_s) override {
    Sharing::observed(job, attained_s, remaining_s, slowdown, now_s);
    const BookJob& entry = jobs_[job];
    if (entry.opportunistic || !(slowdown > 0)) return;
    static_assert(kGuaranteedLimit < kWorthSlowdown);
    const double slower = slowed(job);
    if (slower > kGuaranteedLimit && (entry.info.guaranteed || slower > kWorthSlowdown))
      crowded_.push_back(job);
  }
  double tick(double now_s, std::vector<Action>& actions) override {
    take_rejected(actions);
    tries_ = 0;  // what was tried before this event has been observed
    part(now_s, actions);
    give_back(actions);
    changed();
    size_t failures = 0;
    for (auto at = order_.begin(); at != order_.end() && failures < kMostFailures;) {
      const JobId job = at->second;
      if (place(job, now_s, actions)) {
        at = order_.erase(at);
      } else {
        ++failures;
        ++at;
      }
    }
    for (const JobId job : paused_) order_.emplace(key(job), job);
    paused_.clear();
    drop_void_resizes(actions);
    return tune(now_s, actions);
  }

 private:
  static constexpr size_t kMostFailures =
      64;  // jobs that found no place, after which the rest waits for the next event

  // The slowdown relative to the job alone with its best batch size.
  double slowed(JobId job) const {
    const BookJob& entry = jobs_[job];
    return entry.tunable ? entry.slowdown / known_->tuner.best_alone(entry.info) : entry.slowdown;
  }
  // Least first: of greater priority, then what needs less for its weight (Smith's rule: that order has the least
  // weighted completion on one device). A gang counts less than all its devices, since it leaves room beside it:
  // benchmarks/results/training.md has other exponents.
  struct Key {
    int32_t priority = 0;
    double length = 0;
    bool operator<(const Key& other) const {
      return priority != other.priority ? priority > other.priority : length < other.length;
    }
    bool operator>(const Key& other) const { return other < *this; }
  };
  Key key(JobId job) const {
    const JobInfo& info = jobs_[job].info;
    const double devices = info.gang == 1 ? 1 : std::pow(info.gang, kGangExponent);
    return {info.priority, jobs_[job].remaining_s * devices / info.weight};
  }
  void waiting_again(JobId job, double) override {
    running_.erase(job);
    order_.emplace(key(job), job);
  }
  void goes_on(JobId job) override {
    Lending::goes_on(job);
    running_.insert(job);
  }
  // The devices' jobs are others than they were.
  void changed() {
    lengths_known_ = false;
    open_known_ = false;
  }

  // Parts jobs that slow each other beyond their limit, or by more than sharing gains: the job that needs longer leaves.
  void part(double now_s, std::vector<Action>& actions) {
    for (const JobId job : crowded_) {
      if (!jobs_[job].running) continue;
      JobId leaver = job;
      bool beside = false;
      for (const DeviceIndex d : jobs_[job].devices) {
        double speeds = 0;
        for (const JobId other : devices_[d].jobs)
          if (!jobs_[other].opportunistic) speeds += 1 / slowed(other);
        for (const JobId other : devices_[d].jobs) {
          if (other == job || jobs_[other].opportunistic) continue;
          const bool worth =
              !jobs_[job].info.guaranteed && !jobs_[other].info.guaranteed && speeds >= pair_gain() - 0.05;
          if (worth) continue;
          beside = true;
          if (key(other) > key(leaver)) leaver = other;
        }
      }
      if (!beside) continue;
      pause(leaver, now_s, actions);
      running_.erase(leaver);
      paused_.push_back(leaver);
    }
    crowded_.clear();
  }

  // The speed of an opportunistic job beside a guaranteed one: what that leaves of the resource that it wants most.
  static double left_by(const JobInfo& guaranteed, const JobInfo& opportunistic) {
    if (opportunistic.demands.empty()) return 0;
    const auto main =
        static_cast<size_t>(std::max_element(opportunistic.demands.begin(), opportunistic.demands.end()) -
                            opportunistic.demands.begin());
    const double used = main < guaranteed.demands.size() ? guaranteed.demands[main] : 0;
    return std::clamp((1 - used) / std::max(opportunistic.demands[main], 1e-6), 0.0, 1.0);
  }

  // The cost of placing `newcomer` beside the jobs that run on `d`; kNever if it is not worth it.
  double cost(JobId newcomer, DeviceIndex d) const {
    const std::vector<JobId>& here = devices_[d].jobs;
    if (here.empty()) return 0;
    if (here.size() > 1) return crowd_cost(newcomer, here);
    const JobId host = here[0];
    const JobInfo &own = jobs_[newcomer].info, &there = jobs_[host].info;
    if (own.guaranteed != there.guaranteed) {
      const double left = own.guaranteed ? left_by(own, there) : left_by(there, own);
      // If the opportunistic job gets next to nothing, the two are no pair. A job that needs much less may then pause the other.
      return 1 + left >= kPairGain ? 1 - left + 1e-3 : kNever;
    }
    const auto on_host = between(host, newcomer);
    const auto on_newcomer = between(newcomer, host);
    const double host_slowdown = 1 + on_host.mean + on_host.spread,
                 own_slowdown = 1 + on_newcomer.mean + on_newcomer.spread;
    const double speed = 1 / host_slowdown + 1 / own_slowdown;
    if (speed < (own.guaranteed ? kPairGain : pair_gain())) {
      const bool trial =
          !forward_ && !own.guaranteed && own.gang == 1 && there.gang == 1 && !own.config.empty() &&
          !there.config.empty() && tries_ < 1 + devices_.size() / kDevicesPerTry &&
          !known_->slowdowns.seen(own, there) && hoped(on_host) + hoped(on_newcomer) >= pair_gain();
      return trial ? 1.0 : kNever;
    }
    if (own.guaranteed && (std::max(host_slowdown, own_slowdown) > kGuaranteedLimit ||
                           (host_slowdown - 1) * jobs_[host].remaining_s > may_lose(jobs_[host]) ||
                           (own_slowdown - 1) * jobs_[newcomer].remaining_s > may_lose(jobs_[newcomer])))
      return kNever;
    return 2 - speed + 1e-3;
  }

  // The same beside several opportunistic jobs: the sum of speeds must gain what a pair must. Slowdowns add up.
  double crowd_cost(JobId newcomer, const std::vector<JobId>& here) const {
    if (here.size() >= kMostTogether || jobs_[newcomer].info.guaranteed) return kNever;
    double before = 0, after = 0, own = 1;
    for (const JobId job : here) {
      const JobInfo& info = jobs_[job].info;
      if (info.guaranteed || jobs_[job].opportunistic || info.gang > 1) return kNever;
      double slowdown = 1;
      for (const JobId other : here)
        if (other != job) slowdown += upper(between(job, other));
      before += 1 / slowdown;
      after += 1 / (slowdown + upper(between(job, newcomer)));
      own += upper(between(newcomer, job));
    }
    after += 1 / own;
    return after - before >= pair_gain() - 1 ? static_cast<double>(here.size()) + 1 - after + 1e-3 : kNever;
  }
  static double upper(const SlowdownModel::Estimate& told) { return told.mean + told.spread; }
  // The speed if the prediction errs to the good side.
  static double hoped(const SlowdownModel::Estimate& told) {
    return 1 / (1 + std::max(0.0, told.mean - told.spread));
  }

  // interference() of two jobs, whose names are looked up once.
  SlowdownModel::Estimate between(JobId job, JobId other) const {
    const JobInfo &own = jobs_[job].info, &theirs = jobs_[other].info;
    return beyond_alone(own, known_->slowdowns.excess(own, ref(job), theirs, ref(other)));
  }
  SlowdownModel::Ref ref(JobId job) const {
    if (jobs_[job].info.config.empty()) return {};
    if (refs_.size() <= job) refs_.resize(jobs_.size());
    Named& named = refs_[job];
    const BookJob& entry = jobs_[job];
    if (named.names != known_->slowdowns.names() || named.changes != entry.changes)
      named = {known_->slowdowns.ref(entry.info.config), known_->slowdowns.names(), entry.changes};
    return named.ref;
  }

  // A device that some job could join: it is empty, or its jobs are not too many, and of the right classes.
  struct Open {
    DeviceIndex device = 0;
    uint64_t free_bytes = 0;
    JobId host = 0;  // its first job
    uint32_t jobs = 0;
  };
  void find_open() {
    open_known_ = true;
    open_.clear();
    empty_.clear();
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      const BookDevice& entry = devices_[d];
      if (!entry.up || entry.used_bytes > entry.info.memory_bytes) continue;
      const Open open{d, entry.info.memory_bytes - entry.used_bytes,
                      entry.jobs.empty() ? JobId{0} : entry.jobs[0],
                      static_cast<uint32_t>(entry.jobs.size())};
      if (entry.jobs.empty())
        empty_.push_back(open);
      else if (entry.jobs.size() == 1 || takes_more(entry.jobs))
        open_.push_back(open);
    }
  }
  // Whether crowd_cost() may be less than kNever.
  bool takes_more(const std::vector<JobId>& here) const {
    return here.size() < kMostTogether && std::none_of(here.begin(), here.end(), [&](JobId job) {
             return jobs_[job].info.guaranteed || jobs_[job].opportunistic || jobs_[job].info.gang > 1;
           });
  }

  // Whether cost() is kNever, seen from demands alone; else that is to be asked. Only of jobs of which nothing is known
  // but their demands, so that no logarithm is needed for the thousands of pairs that come to nothing.
  bool hopeless(const JobInfo& own, const Open& open) const {
    constexpr double kRounding = 1e-9;
    const JobInfo& there = jobs_[open.host].info;
    if (open.jobs > 1 && own.guaranteed) return true;
    if (open.jobs == 1 && own.guaranteed != there.guaranteed) return false;  // the cost is as cheap
    if (!own.config.empty() || !own.batch_sizes.empty()) return false;
    double sum = 1;  // the newcomer's slowdown, at the least
    for (const JobId other : devices_[open.device].jobs) {
      const JobInfo& info = jobs_[other].info;
      if (!info.config.empty() || !info.batch_sizes.empty()) return false;
      sum += std::max(nameless_least_, (1 + SlowdownModel::guessed(own, info)) * nameless_factor_) - 1;
    }
    sum *= 1 - kRounding;
    if (open.jobs > 1) return 1 / sum < pair_gain_ - 1;
    return 2 / sum < (own.guaranteed ? kPairGain : pair_gain_) || (own.guaranteed && sum > kGuaranteedLimit);
  }

  // As cheapest() with cost(), but of devices that come into question.
  std::vector<DeviceIndex> cheapest_open(JobId job) {
    const JobInfo& info = jobs_[job].info;
    if (!open_known_) find_open();
    std::vector<std::pair<double, DeviceIndex>> all;
    const bool near = info.gang > 1 && nodes_ > 1;  // then all empty devices are compared
    for (const Open& open : empty_) {
      if (open.free_bytes >= info.memory_bytes) all.emplace_back(0.0, open.device);
      if (!near && all.size() == info.gang) break;
    }
    if (all.size() < info.gang) {  // company always costs more than 0
      pair_gain_ = pair_gain();
      nameless_factor_ = known_->slowdowns.nameless_factor();
      nameless_least_ = known_->slowdowns.nameless_least();
      for (const Open& open : open_) {
        if (open.free_bytes < info.memory_bytes || hopeless(info, open)) continue;
        const double value = cost(job, open.device);
        if (value < kNever) all.emplace_back(value, open.device);
      }
    }
    return cheapest_of(info, std::move(all));
  }

  // The least sum of speeds with which two jobs of the same length beside each other end sooner in the mean than one
  // after the other, where n jobs a device are to run: (n + 2)/(n + 1).
  double pair_gain() const {
    const double n = 2 + static_cast<double>(order_.size()) / static_cast<double>(devices_.size());
    return std::max(kPairGain, (n + 2) / (n + 1));
  }

  bool place(JobId job, double now_s, std::vector<Action>& actions) {
    const JobInfo& info = jobs_[job].info;
    std::vector<DeviceIndex> devices = cheapest_open(job);
    if (devices.empty()) devices = by_preemption(job, now_s, actions);
    if (devices.empty()) return false;
    if (!info.guaranteed && info.gang == 1 && !devices_[devices[0]].jobs.empty() &&
        !known_->slowdowns.seen(info, jobs_[devices_[devices[0]].jobs[0]].info))
      ++tries_;
    enter_classes(job, std::move(devices), actions);
    running_.insert(job);
    changed();
    return true;
  }

  // Finds devices for the job by pausing jobs that need much longer, the longest first; empty if that is not enough.
  std::vector<DeviceIndex> by_preemption(JobId job, double now_s, std::vector<Action>& actions) {
    const JobInfo& info = jobs_[job].info;
    if (!lengths_known_) learn_lengths();
    const Key own = key(job);
    const auto much_longer = [&](const std::pair<Key, uint32_t>& other) {
      return own < Key{other.first.priority, other.first.length * kPreemptRatio};
    };
    size_t enough = 0;  // devices that pauses would free, as far as they are needed
    for (size_t i = 0; i < by_shortest_.size() && enough < info.gang; ++i) {
      const std::pair<Key, DeviceIndex>& device = by_shortest_.longest(i);
      if (!much_longer(device)) break;
      if (devices_[device.second].info.memory_bytes >= info.memory_bytes) ++enough;
    }
    if (enough < info.gang) return {};
    std::set<DeviceIndex> freed;
    for (DeviceIndex d = 0; d < devices_.size(); ++d)
      if (devices_[d].jobs.empty() && fits(d, info)) freed.insert(d);
    std::vector<JobId> chosen;
    chosen_.resize(jobs_.size());
    for (size_t i = 0; i < by_length_.size(); ++i) {
      const std::pair<Key, JobId> victim = by_length_.longest(i);
      if (freed.size() >= info.gang || !much_longer(victim)) break;
      chosen.push_back(victim.second);
      chosen_[victim.second] = true;
      for (const DeviceIndex d : jobs_[victim.second].devices) {
        const bool alone = std::all_of(devices_[d].jobs.begin(), devices_[d].jobs.end(),
                                       [&](JobId here) { return chosen_[here]; });
        if (alone && devices_[d].up && devices_[d].info.memory_bytes >= info.memory_bytes) freed.insert(d);
      }
    }
    for (const JobId victim : chosen) chosen_[victim] = false;
    if (freed.size() < info.gang) return {};
    std::vector<DeviceIndex> devices(freed.begin(), freed.end());
    devices.resize(info.gang);
    for (const JobId victim : chosen) {
      // Only jobs that are in the way are paused.
      if (std::none_of(jobs_[victim].devices.begin(), jobs_[victim].devices.end(), [&](DeviceIndex d) {
            return std::find(devices.begin(), devices.end(), d) != devices.end();
          }))
        continue;
      pause(victim, now_s, actions);
      running_.erase(victim);
      changed();
      paused_.push_back(victim);
    }
    return devices;
  }

  // Lengths of running jobs, and for each device that is up that of its shortest: it is free once that job is paused,
  // and with it all others there. An idle device is longer than any job.
  void learn_lengths() {
    lengths_known_ = true;
    lengths_.resize(jobs_.size());
    by_length_.clear();
    by_shortest_.clear();
    for (const JobId job : running_.jobs()) {
      lengths_[job] = key(job);
      by_length_.add(lengths_[job], job);
    }
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      if (!devices_[d].up) continue;
      Key shortest{INT32_MIN, kNever};
      for (const JobId job : devices_[d].jobs) shortest = std::min(shortest, lengths_[job]);
      by_shortest_.add(shortest, d);
    }
  }

  // Numbers by key, of which only as many are sorted as anybody asks for.
  class Longest {
   public:
    void clear() {
      all_.clear();
      heap_ = false;
    }
    void add(const Key& key, uint32_t number) { all_.emplace_back(key, number); }
    size_t size() const { return all_.size(); }
    // The i-th of the longest; of equal ones, the least number is first.
    const std::pair<Key, uint32_t>& longest(size_t i) {
      if (!heap_) {
        std::make_heap(all_.begin(), all_.end(), ends_before);
        heap_ = true;
        sorted_ = 0;
      }
      for (; sorted_ <= i; ++sorted_)
        std::pop_heap(all_.begin(), all_.end() - static_cast<std::ptrdiff_t>(sorted_), ends_before);
      return all_[all_.size() - 1 - i];
    }

   private:
    static bool ends_before(const std::pair<Key, uint32_t>& a, const std::pair<Key, uint32_t>& b) {
      return a.first < b.first || (!(b.first < a.first) && a.second > b.second);
    }
    std::vector<std::pair<Key, uint32_t>>
        all_;  // a heap, and behind it, the longest last, what was taken out of it
    size_t sorted_ = 0;
    bool heap_ = false;
  };

  std::set<std::pair<Key, JobId>> order_;
  JobSet running_;
  std::vector<JobId> paused_, crowded_;
  std::vector<Key> lengths_;  // by job, of running ones
  Longest by_length_;         // running jobs
  Longest by_shortest_;       // devices
  bool lengths_known_ = false;
  std::vector<Open> open_, empty_;  // by device
  bool open_known_ = false;
  double pair_gain_ = 0, nameless_factor_ = 0, nameless_least_ = 0;  // of the model, now
  struct Named {
    SlowdownModel::Ref ref;
    size_t names = SIZE_MAX;  // of the model, then
    uint32_t changes = 0;     // of the job, until then
  };
  mutable std::vector<Named> refs_;  // by job
  std::vector<bool> chosen_;         // by job: a victim of the preemption that is considered
  size_t tries_ = 0;
};

}  // namespace

std::unique_ptr<Book> make_pack(std::shared_ptr<Knowledge> known) {
  return std::make_unique<Pack>(std::move(known));
}
std::unique_ptr<Book> make_antman(std::shared_ptr<Knowledge> known) {
  return std::make_unique<AntMan>(std::move(known));
}
std::unique_ptr<Book> make_iadeep(std::shared_ptr<Knowledge> known) {
  return std::make_unique<IaDeep>(std::move(known));
}
std::unique_ptr<Book> make_best(std::shared_ptr<Knowledge> known) {
  return std::make_unique<Best>(std::move(known));
}

}  // namespace gpushare::cluster::training
