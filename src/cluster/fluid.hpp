// fluid.hpp: running groups of tuning trials on devices (Fluid; thesis 000, chapter 3): how many devices, or which part
// of one, each trial gets, and when that changes. The goal is the makespan of a group.
//
// Widths are 1/p of a device for p = 1..max_packed, or whole devices up to max_workers. A trial of budget h1 takes (3.2)
//   h(w) = h1 alpha^(1/w - 1) for w < 1 (h1/w if no alpha is stated: packing neither gains nor costs), (h1/w)
//   beta^(w-1) for w >= 1,
// divided by the speed of its slowest device. A change of a started trial's width or devices costs change_cost_s
// without progress.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cluster/model/device.hpp"

namespace gpushare::cluster {

struct Trial {
  std::string name;
  double budget_s = 0;          // h1, on one device of speed 1
  std::optional<double> alpha;  // packing overhead, >= 1
  double beta = 1;              // scaling overhead, >= 1
  uint64_t memory_bytes = 0;
};

struct TrialGroup {
  double arrival_s = 0;
  std::vector<Trial> trials;
};

struct TrialDevice {
  double speed = 1;
  uint64_t memory_bytes = UINT64_MAX;
};

struct TrialLimits {
  int max_packed = 1;   // c
  int max_workers = 1;  // d
  double change_cost_s = 0;
};

// A width: 0 none, w > 0 so many devices, -p the p-th part of one.
using Width = int;
inline double size_of(Width width) {
  return width >= 0 ? double(width) : 1.0 / -width;
}
// h(w) on devices of speed 1.
double duration(const Trial& trial, Width width);

// The state of an execution on virtual time, and what a policy may do to it. Deterministic.
class TrialRun {
 public:
  struct State {
    Trial trial;
    double arrival_s = 0;
    double scale = 1;      // what it really takes over what it was said to take; policies do not look at it
    double remaining = 1;  // part of the work, at `updated_s`
    double updated_s = 0;
    double stalled_until_s = 0;
    Width width = 0;
    std::vector<int> devices;
    double rate = 0;  // part of the work a second, on these devices
    bool started = false;
    bool finished = false;
    bool rejected = false;  // its memory is beyond every device
    double finish_s = 0;
    uint32_t version = 0;  // of its entry in the event queue
  };

  TrialRun(std::vector<TrialDevice> devices, TrialLimits limits);

  // Adds a trial that has arrived; its index. It waits until a policy places it.
  size_t add(const Trial& trial, double scale = 1);
  double now_s() const { return now_s_; }
  const TrialLimits& limits() const { return limits_; }
  const std::vector<TrialDevice>& devices() const { return devices_; }
  // A device fails: the trials that hold it wait, and keep their progress. Or it comes back. All are up at first.
  void set_up(int device, bool up);
  // The devices that are up, ascending.
  const std::vector<int>& up() const { return up_; }
  std::vector<TrialDevice> devices_up() const;
  // No device that is up has the trial's memory: it waits until one comes back, and no policy is told of it.
  bool stranded(size_t trial) const { return stranded_.count(trial) != 0; }
  const std::vector<State>& trials() const { return trials_; }
  // The part of a trial's work that is still to be done now.
  double remaining(size_t trial) const;
  // Trials that were placed for the first time since the last call, in that order.
  std::vector<size_t> take_started() { return std::exchange(started_, {}); }
  // Arrived, not finished and not stranded, in order of arrival.
  std::vector<size_t> unfinished() const;
  size_t unfinished_count() const { return unfinished_.size(); }
  int idle_devices() const;

  // Devices for a width: whole ones that are idle, or for a part the fullest device that has it free with the memory.
  // Empty if there are none.
  std::vector<int> find(Width width, uint64_t memory_bytes) const;
  // Whether a device has that part of it free, and the memory.
  bool has(int device, Width width, uint64_t memory_bytes) const;
  // The same as find() if the trial's own devices were free.
  std::vector<int> find_for(size_t trial, Width width);
  // This state as policies know it: every trial takes its stated time.
  TrialRun believed() const;
  // Starts, resizes or moves a trial. The devices that it held before are free at once.
  void place(size_t trial, Width width, std::vector<int> devices);
  // A trial that really runs has so much of its work left now.
  void measured(size_t trial, double remaining);
  // Takes its devices; it keeps its progress.
  void pause(size_t trial);
  // Ends a trial before its budget is used: stopped by the tuning algorithm.
  void stop(size_t trial);

  // The next completion, or infinity.
  double next_completion_s();
  // Moves time to `time_s`, at most the next completion; where trials really run, beyond it too, and measured() follows.
  void advance(double time_s);
  // Completes what ends now; the trials that did.
  std::vector<size_t> complete();
  // Devices x seconds held so far.
  double area() const { return area_; }

 private:
  void set_rate(State& state) const;
  void update(State& state) const;
  void release(State& state);
  void schedule(size_t trial);
  void change_free(int device, double share, int64_t memory);
  bool some_device_has(uint64_t memory_bytes) const;

  std::vector<TrialDevice> devices_;
  std::vector<int> up_;
  TrialLimits limits_;
  std::vector<State> trials_;
  std::set<size_t> unfinished_, stranded_;
  std::vector<size_t> started_;
  std::vector<double> free_;
  std::vector<uint64_t> free_memory_;
  std::set<std::tuple<double, double, int>> by_free_;  // (free part, -speed, device), of those that are up
  using Event = std::tuple<double, size_t, uint32_t>;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  double now_s_ = 0;
  double area_ = 0;
  double held_ = 0;  // devices held now
};

// Decides for a TrialRun. Told of arrivals and completions, it places, resizes and pauses; asked again at wake_s() at the latest.
class TrialPolicy {
 public:
  virtual ~TrialPolicy() = default;
  virtual void arrived(TrialRun& run, const std::vector<size_t>& trials) = 0;
  virtual void finished(TrialRun& run) = 0;
  // Devices failed, some of which trials may have held, or came back. A policy without an answer of its own is not asked
  // further: who made it replaces it where `failed`.
  virtual void devices_changed(TrialRun&, bool /*failed*/) {}
  virtual double wake_s() const { return std::numeric_limits<double>::infinity(); }
  virtual void woken(TrialRun&) {}
  // Takes one more trial at that width into what is planned already. False: this policy cannot.
  virtual bool insert(TrialRun&, size_t /*trial*/, Width) { return false; }
  virtual std::unique_ptr<TrialPolicy> clone() const = 0;
};

enum class TrialScheduler { kFifo, kStaticFluid, kDynamicFluid, kGpushare };

std::unique_ptr<TrialPolicy> make_trial_policy(TrialScheduler scheduler);

// Runs until nothing is left. `on_finished` may add trials to the run; those that it returns are told to the policy as arrived.
using TrialsFinished = std::function<std::vector<size_t>(TrialRun&, const std::vector<size_t>& finished)>;
void run_trials(TrialRun& run, TrialPolicy& policy, const TrialsFinished& on_finished = {});

struct TrialResult {
  double makespan_s = 0;  // from the first arrival to the last completion
  double bound_s = 0;     // trials_bound
  double utilization = 0;
  struct Row {
    Width width = 0;  // at its start
    double start_s = 0;
    double finish_s = 0;
    bool rejected = false;
    bool stranded = false;  // to its end: the devices with its memory failed and did not come back
  };
  std::vector<Row> trials;  // in document order
};

// Plays a document's groups as they come. `scales`, unless empty, has what each trial (in document order) really takes
// over what it was said to take, which no scheduler is told. `spans`, unless null, gets what each device ran. `changes` are in
// order; schedulers learn of each when it comes.
struct TrialSpan {
  size_t trial = 0;  // in document order
  Width width = 0;
  int device = 0;
  double begin_s = 0;
  double end_s = 0;
};
TrialResult play_trials(const std::vector<TrialDevice>& devices, const TrialLimits& limits,
                        const std::vector<TrialGroup>& groups, TrialScheduler scheduler,
                        const std::vector<double>& scales = {}, std::vector<TrialSpan>* spans = nullptr,
                        const std::vector<DeviceChange>& changes = {});

// Plays a document's groups. kGpushare here knows all arrivals, so it is never worse than any of the others.
TrialResult plan_trials(const std::vector<TrialDevice>& devices, const TrialLimits& limits,
                        const std::vector<TrialGroup>& groups, TrialScheduler scheduler);

// The least makespan that areas allow: the least T at which, for every arrival time a, the trials that arrive from a on
// have least areas, each within T less its arrival and with widths mixed over time, that sum to at most the devices'
// speeds x (T - a). No schedule is faster.
double trials_bound(const std::vector<TrialDevice>& devices, const TrialLimits& limits,
                    const std::vector<TrialGroup>& groups);

// The largest p whose marginal benefit O^p = 1 - ((p - 1) / p) avg(T^p) / avg(T^(p-1)) exceeds the threshold (3.1).
// mean_iteration_s[p - 1] is the mean time of an iteration with p trials on a device.
int packing_limit(const std::vector<double>& mean_iteration_s, double threshold);

}  // namespace gpushare::cluster
