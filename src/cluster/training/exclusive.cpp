// Schedulers that give whole devices: fifo; srtf, gangs by least remaining work times devices first; tiresias, discretised two-queue least
// attained service (Gu et al., NSDI 2019). The latter two preempt.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <set>

#include "cluster/training/schedulers.hpp"

namespace gpushare::cluster::training {
namespace {

// Device seconds after which a job falls to the second queue.
constexpr double kTiresiasThreshold = 3200;

class Fifo final : public Book {
 public:
  double tick(double, std::vector<Action>& actions) override {
    take_rejected(actions);
    while (!queue_.empty()) {
      const JobId job = queue_.front();
      std::vector<DeviceIndex> devices;
      for (DeviceIndex d = 0; d < devices_.size() && devices.size() < jobs_[job].info.gang; ++d) {
        if (devices_[d].jobs.empty() && fits(d, jobs_[job].info)) devices.push_back(d);
      }
      if (devices.size() < jobs_[job].info.gang) break;
      queue_.pop_front();
      enter(job, std::move(devices), false, actions);
    }
    return kNever;
  }

 private:
  void waiting_again(JobId job, double) override {
    queue_.insert(std::upper_bound(queue_.begin(), queue_.end(), job), job);
  }
  std::deque<JobId> queue_;
};

// Runs, in an order of keys, whoever fits on whole devices; others are paused.
class Preemptive : public Book {
 public:
  void finished(JobId job, double now_s) override {
    Book::finished(job, now_s);
    running_.erase(job);
  }
  double tick(double now_s, std::vector<Action>& actions) override {
    take_rejected(actions);
    // Running jobs' keys have moved; those of waiting ones have not.
    std::vector<std::pair<std::pair<double, double>, JobId>> running;
    for (const JobId job : running_) running.emplace_back(key(job), job);
    std::sort(running.begin(), running.end());
    size_t up = 0;
    for (const BookDevice& device : devices_) up += device.up ? 1 : 0;
    size_t left = up;
    std::vector<JobId> start, keep;
    auto r = running.begin();
    auto w = waiting_.begin();
    while (left > 0 && (r != running.end() || w != waiting_.end())) {
      const bool take_running = w == waiting_.end() || (r != running.end() && *r < *w);
      const JobId job = take_running ? r->second : w->second;
      take_running ? (void)++r : (void)++w;
      if (jobs_[job].info.gang > left) continue;
      left -= jobs_[job].info.gang;
      (take_running ? keep : start).push_back(job);
    }
    // A running job that is not kept is paused only when another job starts.
    std::set<JobId> kept(keep.begin(), keep.end());
    std::vector<JobId> stopped;
    if (!start.empty())
      for (const auto& [unused, job] : running)
        if (!kept.contains(job)) stopped.push_back(job);
    for (const JobId job : stopped) {
      pause(job, now_s, actions);
      running_.erase(job);
      waiting_.emplace(key(job), job);
    }
    std::vector<DeviceIndex> free;
    for (DeviceIndex d = 0; d < devices_.size(); ++d)
      if (devices_[d].up && devices_[d].jobs.empty()) free.push_back(d);
    const auto try_start = [&](JobId job) {
      std::vector<DeviceIndex> devices;
      for (const DeviceIndex d : free)
        if (devices.size() < jobs_[job].info.gang && fits(d, jobs_[job].info)) devices.push_back(d);
      if (devices.size() < jobs_[job].info.gang) return;
      for (const DeviceIndex d : devices) free.erase(std::find(free.begin(), free.end(), d));
      waiting_.erase({key(job), job});
      enter(job, std::move(devices), false, actions);
      running_.insert(job);
    };
    for (const JobId job : start) try_start(job);
    for (const JobId job : stopped)
      if (!free.empty()) try_start(job);  // someone who was to start does not fit by memory
    return next_change(now_s);
  }

 protected:
  virtual std::pair<double, double> key(JobId job) const = 0;  // least first
  virtual double next_change(double) { return kNever; }
  void waiting_again(JobId job, double) override {
    running_.erase(job);
    waiting_.emplace(key(job), job);
  }
  std::set<JobId> running_;
  std::set<std::pair<std::pair<double, double>, JobId>> waiting_;
};

class Srtf final : public Preemptive {
  std::pair<double, double> key(JobId job) const override {
    return {jobs_[job].remaining_s * jobs_[job].info.gang, jobs_[job].info.arrival_s};
  }
};

class Tiresias final : public Preemptive {
  std::pair<double, double> key(JobId job) const override {
    return {jobs_[job].attained_s * jobs_[job].info.gang < kTiresiasThreshold ? 0 : 1,
            jobs_[job].info.arrival_s};
  }
  double next_change(double now_s) override {
    double next = kNever;
    if (waiting_.empty()) return next;
    for (const JobId job : running_) {
      const double left = kTiresiasThreshold / jobs_[job].info.gang - jobs_[job].attained_s;
      if (left > 0) next = std::min(next, now_s + left + 1e-6);
    }
    return next;
  }
};

}  // namespace

std::unique_ptr<Scheduler> make_fifo() {
  return std::make_unique<Fifo>();
}
std::unique_ptr<Scheduler> make_srtf() {
  return std::make_unique<Srtf>();
}
std::unique_ptr<Scheduler> make_tiresias() {
  return std::make_unique<Tiresias>();
}

}  // namespace gpushare::cluster::training
