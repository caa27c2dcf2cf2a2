// Schedulers that give whole devices: fifo; srtf, gangs by least remaining work times devices first; tiresias,
// discretised least attained service (Gu et al., NSDI 2019). The latter two preempt.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <set>

#include "cluster/training/schedulers.hpp"

namespace gpushare::cluster::training {
namespace {

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
    std::vector<JobId> paused;
    if (!start.empty())
      for (const auto& [unused, job] : running)
        if (!kept.contains(job)) paused.push_back(job);
    for (auto job = paused.rbegin(); job != paused.rend(); ++job) {
      pause(*job, now_s, actions);
      waiting_again(*job, now_s);
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
    for (const JobId job : paused)
      if (!free.empty()) try_start(job);  // someone who was to start does not fit by memory
    return next_change(now_s);
  }

 protected:
  virtual std::pair<double, double> key(JobId job) const = 0;  // least first
  virtual double next_change(double) { return kNever; }
  virtual void stopped(JobId) {}
  void waiting_again(JobId job, double) override {
    running_.erase(job);
    stopped(job);
    waiting_.emplace(key(job), job);
  }
  void goes_on(JobId job) override { running_.insert(job); }
  std::set<JobId> running_;
  std::set<std::pair<std::pair<double, double>, JobId>> waiting_;
};

class Srtf final : public Preemptive {
  std::pair<double, double> key(JobId job) const override {
    return {jobs_[job].remaining_s * jobs_[job].info.gang, jobs_[job].info.arrival_s};
  }
};

// Jobs of an earlier queue first. Within a queue those that run go on, and others start in the order in which they came
// to it; what was paused is ahead of those.
class Tiresias final : public Preemptive {
 public:
  explicit Tiresias(std::vector<double> limits) : limits_(std::move(limits)) {}
  void arrived(JobId job, const JobInfo& info, double now_s) override {
    if (places_.size() <= job) places_.resize(job + size_t{1});
    places_[job].rank = ++count_;
    Preemptive::arrived(job, info, now_s);
  }
  double tick(double now_s, std::vector<Action>& actions) override {
    for (const JobId job : running_) {
      Place& place = places_[job];
      const size_t before = place.queue;
      while (place.queue < limits_.size() && left_s(job) <= 0) ++place.queue;
      if (place.queue != before) place = {place.queue, false, ++count_};
    }
    const double next = Preemptive::tick(now_s, actions);
    for (const JobId job : running_) {
      Place& place = places_[job];
      if (!place.running) place = {place.queue, true, ++count_};
    }
    return next;
  }

 private:
  struct Place {
    size_t queue = 0;
    bool running = false;  // and so ahead of the others of its queue
    double rank = 0;
  };
  // Until the job falls to the next queue.
  double left_s(JobId job) const {
    return limits_[places_[job].queue] / jobs_[job].info.gang - jobs_[job].attained_s;
  }
  std::pair<double, double> key(JobId job) const override {
    const Place& place = places_[job];
    return {2 * static_cast<double>(place.queue) + (place.running ? 0 : 1), place.rank};
  }
  void took_over() override {
    places_.resize(jobs_.size());
    for (JobId job = 0; job < jobs_.size(); ++job) places_[job] = {0, jobs_[job].running, ++count_};
  }
  void stopped(JobId job) override {
    if (places_[job].running) places_[job] = {places_[job].queue, false, -++count_};
  }
  double next_change(double now_s) override {
    double next = kNever;
    if (waiting_.empty()) return next;
    for (const JobId job : running_) {
      if (places_[job].queue >= limits_.size()) continue;
      const double left = left_s(job);
      if (left > 0) next = std::min(next, now_s + left + 1e-6);
    }
    return next;
  }

  const std::vector<double> limits_;
  std::vector<Place> places_;
  double count_ = 0;
};

}  // namespace

std::unique_ptr<Book> make_fifo() {
  return std::make_unique<Fifo>();
}
std::unique_ptr<Book> make_srtf() {
  return std::make_unique<Srtf>();
}
std::unique_ptr<Book> make_tiresias(std::vector<double> limits) {
  return std::make_unique<Tiresias>(std::move(limits));
}

}  // namespace gpushare::cluster::training
