// scheduler.hpp: the one interface of schedulers that decide over time. A driver (the simulator; a process with several
// runtimes) tells what happened, then asks for actions. Times are seconds on the driver's clock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "cluster/never.hpp"

namespace gpushare::cluster {

using JobId = uint32_t;
using DeviceIndex = uint32_t;

// A training job as it is known when it arrives.
struct JobInfo {
  std::string name;
  std::string config;      // model and batch, the key of what is learned about it; may be ""
  bool guaranteed = true;  // else opportunistic
  double arrival_s = 0;
  double work_s = 0;  // alone, on each of its devices of speed 1, at its first batch size; as declared
  uint64_t memory_bytes = 0;     // on each of its devices, at `batch`
  uint64_t ephemeral_bytes = 0;  // the part of memory_bytes that is in proportion to the batch size
  uint64_t iterations = 1;       // that work_s is divided into
  uint32_t gang = 1;             // devices, all at once
  std::vector<double> demands;   // parts of a device's resources that it keeps busy alone, each in [0, 1]
  int32_t priority = 0;          // greater ones first
  double weight = 1;             // > 0, of its completion beside those of other jobs
  double batch = 0;              // that it runs with; 0: none is known
  std::vector<double>
      batch_sizes;  // that it may run with, the first of which `work_s` is of; at most one: none is chosen
  double noise_scale =
      0;  // of the gradient, in the unit of batch sizes: the greater, the more a larger batch is worth
  bool divides = false;  // it runs on any number of devices, among which an iteration's work is divided
};

// Training with batch m instead of m0 needs (noise + m)/(noise + m0) times the samples (McCandlish et al. 2018), so
// m0/m times that in iterations. 1 without batch sizes.
double iterations_factor(const JobInfo& info);
// The assumed time of an iteration, relative to that with the first batch size, where nothing was measured: a fifth of
// it is fixed.
double assumed_iteration_factor(const JobInfo& info);
// `info` with another batch size: its memory, and the batch size that its config names ("NAME (batch size 32)").
JobInfo with_batch(JobInfo info, double batch);

struct DeviceInfo {
  uint64_t memory_bytes = 0;
  double speed = 1;
  uint32_t node = 0;  // devices of a node have the same number
};

struct Action {
  enum class Kind {
    kPlace,        // start, or go on after a pause, on `devices`
    kPause,        // stop and leave the devices; work done is kept
    kResize,       // `opportunistic` of a running job changes
    kReconfigure,  // a running job goes on with the batch size `batch`, one of its batch_sizes
    kReject,       // never to run; `reason`
  };
  Kind kind = Kind::kPlace;
  JobId job = 0;
  std::vector<DeviceIndex> devices;  // distinct, as many as the gang
  bool opportunistic = false;        // the device's coordinator gives it what guaranteed jobs leave
  std::string reason;
  double batch = 0;
  double share =
      0;  // kPlace: the part of each device that is meant, which is then the job's weight; 0: its own weight
};

// How well a scheduler predicted the slowdowns of pairs that it had never observed, before it observed them: the mean of
// |predicted - observed| / observed. Beside it, that of predicting the mean of all that was observed until then.
struct PredictionReport {
  struct Part {
    uint64_t pairs = 0;
    double error = 0;
    double mean_error = 0;
  };
  uint64_t observations = 0;
  Part early;  // of the first 100 observations
  Part late;   // of the others
};

// Use from one thread. Deterministic. Job ids ascend in the order of arrival.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  // Before anything else, once for each device; later when one goes (`up` false: its jobs are waiting again) or comes back.
  virtual void device_changed(DeviceIndex device, const DeviceInfo& info, bool up, double now_s) = 0;
  virtual void arrived(JobId job, const JobInfo& info, double now_s) = 0;
  // An earlier measurement of jobs that need not come: `job` ran `slowdown` times slower beside `other`. Called before
  // any job arrives.
  virtual void known_pair(const JobInfo& job, const JobInfo& other, double slowdown);
  // Work that a job repeats each time it goes on after a pause. Called before any job arrives; nothing unless told.
  virtual void restart_cost(double /*seconds*/) {}
  // A running job: device time it has had, work left, and how much slower it makes progress than alone at its first
  // batch size, since its devices' jobs last changed. 0: not known yet.
  virtual void observed(JobId job, double attained_s, double remaining_s, double slowdown, double now_s) = 0;
  virtual void finished(JobId job, double now_s) = 0;
  // After all that happened at `now_s` was told. Appends actions, which the driver takes in order, pauses before
  // places. Returns when it wants to be asked again though nothing happens.
  virtual double tick(double now_s, std::vector<Action>& actions) = 0;
  virtual PredictionReport predictions() const { return {}; }
};

inline constexpr const char* kTrainingSchedulers[] = {"fifo",   "srtf", "tiresias", "antman",
                                                      "iadeep", "pack", "gpushare"};

// Null if there is none of that name.
std::unique_ptr<Scheduler> make_training_scheduler(std::string_view name);

}  // namespace gpushare::cluster
