// book.hpp: the books of every training scheduler: jobs, their devices, the memory left.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include "cluster/scheduler.hpp"

namespace gpushare::cluster::training {

struct BookJob {
  JobInfo info;
  bool running = false;
  bool opportunistic = false;
  bool gone = false;
  double attained_s = 0;
  double remaining_s = 0;
  double slowdown = 1;
  bool measured = false;  // `slowdown`, since its batch size or its neighbours changed
  double waiting_since_s = 0;
  std::vector<DeviceIndex> devices;
};

struct BookDevice {
  DeviceInfo info;
  bool up = false;
  uint64_t used_bytes = 0;
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
    jobs_[job].info = info;
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
    jobs_[job].attained_s = attained_s;
    jobs_[job].remaining_s = remaining_s;
    if (slowdown > 0) jobs_[job].slowdown = slowdown;
  }
  void finished(JobId job, double) override {
    leave(job);
    jobs_[job].gone = true;
  }

 protected:
  // `job` has to be placed (again).
  virtual void waiting_again(JobId job, double now_s) = 0;

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
    actions.push_back({Action::Kind::kPlace, job, std::move(devices), opportunistic, ""});
  }
  void pause(JobId job, double now_s, std::vector<Action>& actions) {
    leave(job);
    jobs_[job].waiting_since_s = now_s;
    actions.push_back({Action::Kind::kPause, job, {}, false, ""});
  }
  // A running job goes on with another batch size; it fits.
  void reconfigure(JobId job, double batch, std::vector<Action>& actions) {
    BookJob& entry = jobs_[job];
    const uint64_t before = entry.info.memory_bytes;
    entry.info = with_batch(std::move(entry.info), batch);
    for (const DeviceIndex device : entry.devices)
      devices_[device].used_bytes += entry.info.memory_bytes - before;
    actions.push_back({Action::Kind::kReconfigure, job, {}, false, "", batch});
  }
  void leave(JobId job) {
    BookJob& entry = jobs_[job];
    if (!entry.running) return;
    entry.running = false;
    for (const DeviceIndex device : entry.devices) {
      BookDevice& place = devices_[device];
      place.used_bytes -= entry.info.memory_bytes;
      place.jobs.erase(std::find(place.jobs.begin(), place.jobs.end(), job));
    }
    entry.devices.clear();
  }

  std::vector<BookJob> jobs_;
  std::vector<BookDevice> devices_;

 private:
  std::vector<Action> rejected_;
};

}  // namespace gpushare::cluster::training
