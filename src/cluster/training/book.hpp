// book.hpp: the books of every training scheduler: jobs, their devices, the memory left.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "cluster/scheduler.hpp"

namespace gpushare::cluster::training {

struct BookJob {
  // The fields that each observation reads and writes lie together.
  JobId id = 0;  // the driver's, also in books of a part of the jobs
  bool running = false;
  bool opportunistic = false;
  bool gone = false;      // it has ended, or was rejected; in the portfolio also while too few devices are up
  bool measured = false;  // `slowdown`, since its batch size or its neighbours changed
  bool same_company = false;  // since observed() looked last, see Book::company_changed()
  bool tunable = false;       // it has batch sizes to choose from
  double attained_s = 0;
  double remaining_s = 0;
  double slowdown = 1;
  double pace = 1;       // progress over what its measured slowdowns say; the portfolio knows it
  uint32_t pauses = 0;   // for other jobs
  uint32_t changes = 0;  // of its batch size, and so of its configuration
  double lost_s = 0;     // work that it would have done but for others on its devices
  double waiting_since_s = 0;
  std::vector<DeviceIndex> devices;
  JobInfo info;
};

// The slowdown of the job alone at its batch size.
double alone_slowdown(const JobInfo& info);
inline double alone_slowdown(const BookJob& job) {
  return job.tunable ? alone_slowdown(job.info) : 1;
}
// A guaranteed job may take so much longer than alone on the same devices, over its whole run.
inline constexpr double kMostSlowed = 1.05;
inline constexpr double kSlowedRounding = 1e-9;  // of its work: demands that sum to just 1.05 are within it
// The work that a guaranteed job may still lose to others on its devices.
inline double may_lose(const BookJob& job) {
  return std::max(0.0, (kMostSlowed - 1 + kSlowedRounding) * job.info.work_s - job.lost_s);
}

struct BookDevice {
  DeviceInfo info;
  bool up = false;
  uint64_t used_bytes = 0;
  uint32_t changes = 0;  // of its jobs, their classes and batch sizes, and of what else their speeds hang on
  std::vector<JobId> jobs;
};

// Holds the books; derived classes decide.
class Book : public Scheduler {
 public:
  void device_changed(DeviceIndex device, const DeviceInfo& info, bool up, double now_s) override {
    if (devices_.size() <= device) devices_.resize(device + 1);
    BookDevice& entry = devices_[device];
    entry.info = info;
    entry.up = up;
    ++entry.changes;
    for (const JobId job : entry.jobs) {  // the speed may be another
      jobs_[job].same_company = false;
      for (const DeviceIndex other : jobs_[job].devices) ++devices_[other].changes;
    }
    if (up) return;
    const std::vector<JobId> lost = entry.jobs;
    for (const JobId job : lost) {
      leave(job);
      jobs_[job].waiting_since_s = now_s;
      waiting_again(job, now_s);
    }
  }
  void arrived(JobId job, const JobInfo& info, double now_s) override {
    if (jobs_.size() <= job) jobs_.resize(job + 1);
    jobs_[job].id = job;
    jobs_[job].info = info;
    jobs_[job].tunable = info.batch_sizes.size() > 1;
    jobs_[job].remaining_s = info.work_s;
    jobs_[job].waiting_since_s = now_s;
    size_t fitting = 0;
    for (const BookDevice& device : devices_) {
      if (device.info.memory_bytes >= info.memory_bytes) ++fitting;
      if (fitting >= info.gang) break;
    }
    if (fitting < info.gang) {
      jobs_[job].gone = true;
      rejected_.push_back(
          {Action::Kind::kReject,
           job,
           {},
           false,
           base::format("it needs %u devices of %.2f GiB at once, and there are %zu", info.gang,
                        static_cast<double>(info.memory_bytes) / 1073741824.0, fitting)});
      return;
    }
    waiting_again(job, now_s);
  }
  void observed(JobId job, double attained_s, double remaining_s, double slowdown, double) override {
    BookJob& entry = jobs_[job];
    if (slowdown > 0) {
      const double made = entry.remaining_s - remaining_s, alone = alone_slowdown(entry);
      if (entry.running && made > 0 && slowdown > alone) entry.lost_s += made * (slowdown / alone - 1);
      entry.slowdown = slowdown;
    }
    entry.attained_s = attained_s;
    entry.remaining_s = remaining_s;
  }
  void finished(JobId job, double) override {
    leave(job);
    jobs_[job].gone = true;
  }
  // Goes on from the books of another scheduler, before anything else. Jobs that run there go on.
  void take_over(const std::vector<BookJob>& jobs, const std::vector<BookDevice>& devices) {
    jobs_ = jobs;
    devices_ = devices;
    took_over();
    for (JobId job = 0; job < jobs_.size(); ++job) join(job);
  }
  // The same in place of `replaced`, a rule for the same jobs, which is of no use after it. `unfinished` has all that are
  // not gone, and each that is gone here and not there. Costs what these cost, however many have gone.
  void take_over(Book& replaced, const std::vector<BookJob>& jobs, const std::vector<BookDevice>& devices,
                 const std::set<JobId>& unfinished) {
    jobs_ = std::move(replaced.jobs_);
    devices_ = devices;
    for (const JobId job : unfinished) jobs_[job] = jobs[job];
    took_over();
    for (const JobId job : unfinished) join(job);
  }
  // Devices change names: what is on `d` goes to `to[d]`, a permutation among equal ones.
  void rename(const std::vector<DeviceIndex>& to) {
    std::vector<BookDevice> before = devices_;
    for (DeviceIndex d = 0; d < devices_.size(); ++d) {
      devices_[to[d]].jobs = std::move(before[d].jobs);
      devices_[to[d]].used_bytes = before[d].used_bytes;
    }
    for (BookDevice& device : devices_) ++device.changes;
    for (BookJob& job : jobs_)
      for (DeviceIndex& d : job.devices) d = to[d];
  }
  // Predictions from here on are only thought: nothing is tried that would tell something new.
  void think() { forward_ = true; }

 protected:
  // `job` has to be placed (again).
  virtual void waiting_again(JobId job, double now_s) = 0;
  // Books were taken over, and their jobs are told next.
  virtual void took_over() {}
  // `job` runs already, in books that were taken over.
  virtual void goes_on(JobId) {}

  void take_rejected(std::vector<Action>& actions) {
    for (Action& action : rejected_) actions.push_back(std::move(action));
    rejected_.clear();
  }
  bool fits(DeviceIndex device, const JobInfo& info) const {
    const BookDevice& entry = devices_[device];
    return entry.up && entry.used_bytes + info.memory_bytes <= entry.info.memory_bytes;
  }
  void enter(JobId job, std::vector<DeviceIndex> devices, bool opportunistic, std::vector<Action>& actions) {
    BookJob& entry = jobs_[job];
    entry.running = true;
    entry.opportunistic = opportunistic;
    entry.devices = devices;
    for (const DeviceIndex device : devices) {
      devices_[device].used_bytes += entry.info.memory_bytes;
      devices_[device].jobs.push_back(job);
    }
    company_changed(job);
    actions.push_back({Action::Kind::kPlace, job, std::move(devices), opportunistic, ""});
  }
  void pause(JobId job, double now_s, std::vector<Action>& actions) {
    leave(job);
    ++jobs_[job].pauses;
    jobs_[job].waiting_since_s = now_s;
    actions.push_back({Action::Kind::kPause, job, {}, false, ""});
  }
  // Does what another scheduler on the same jobs has decided.
  void follow(const std::vector<Action>& told, double now_s, std::vector<Action>& actions) {
    for (const bool pauses : {true, false})
      for (const Action& action : told) {
        if ((action.kind == Action::Kind::kPause) != pauses) continue;
        switch (action.kind) {
          case Action::Kind::kPause:
            pause(action.job, now_s, actions);
            break;
          case Action::Kind::kPlace:
            enter(action.job, action.devices, action.opportunistic, actions);
            break;
          case Action::Kind::kResize:
            set_opportunistic(action.job, action.opportunistic);
            actions.push_back(action);
            break;
          case Action::Kind::kReconfigure:
            reconfigure(action.job, action.batch, actions);
            break;
          case Action::Kind::kReject:
            break;  // the own books have said so
        }
      }
  }
  void set_opportunistic(JobId job, bool opportunistic) {
    jobs_[job].opportunistic = opportunistic;
    company_changed(job);
  }
  // The job and all on its devices have another company: a job more or less, or of another class or batch size. What
  // observed() does by the company alone, it does once for each company and not at each event.
  void company_changed(JobId job) {
    jobs_[job].same_company = false;
    for (const DeviceIndex device : jobs_[job].devices) {
      ++devices_[device].changes;
      for (const JobId other : devices_[device].jobs) jobs_[other].same_company = false;
    }
  }
  // A running job goes on with another batch size; it fits.
  void reconfigure(JobId job, double batch, std::vector<Action>& actions) {
    BookJob& entry = jobs_[job];
    const uint64_t before = entry.info.memory_bytes;
    entry.info = with_batch(std::move(entry.info), batch);
    ++entry.changes;
    for (const DeviceIndex device : entry.devices)
      devices_[device].used_bytes += entry.info.memory_bytes - before;
    company_changed(job);
    actions.push_back({Action::Kind::kReconfigure, job, {}, false, "", batch});
  }
  void leave(JobId job) {
    BookJob& entry = jobs_[job];
    if (!entry.running) return;
    entry.running = false;
    company_changed(job);
    for (const DeviceIndex device : entry.devices) {
      BookDevice& place = devices_[device];
      place.used_bytes -= entry.info.memory_bytes;
      place.jobs.erase(std::find(place.jobs.begin(), place.jobs.end(), job));
    }
    entry.devices.clear();
  }

  std::vector<BookJob> jobs_;
  std::vector<BookDevice> devices_;
  bool forward_ = false;

 private:
  void join(JobId job) {
    jobs_[job].same_company = false;
    if (jobs_[job].gone) return;
    if (jobs_[job].running)
      goes_on(job);
    else
      waiting_again(job, jobs_[job].waiting_since_s);
  }

  std::vector<Action> rejected_;
};

}  // namespace gpushare::cluster::training
