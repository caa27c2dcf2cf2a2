// scheduler.hpp: the one interface of schedulers that decide over time. A driver (the simulator; a process with several runtimes) tells
// what happened, then asks for actions. Times are seconds on the driver's clock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"

namespace gpushare::cluster {

using JobId = uint32_t;
using DeviceIndex = uint32_t;
inline constexpr double kNever = std::numeric_limits<double>::infinity();

// A training job as it is known when it arrives.
struct JobInfo {
  std::string name;
  std::string config;      // model and batch, the key of what is learned about it; may be ""
  bool guaranteed = true;  // else opportunistic
  double arrival_s = 0;
  double work_s = 0;            // alone, on each of its devices of speed 1; as declared
  uint64_t memory_bytes = 0;    // on each of its devices
  uint32_t gang = 1;            // devices, all at once
  std::vector<double> demands;  // parts of a device's resources that it keeps busy alone, each in [0, 1]
  int32_t priority = 0;
};

struct DeviceInfo {
  uint64_t memory_bytes = 0;
  double speed = 1;
};

struct Action {
  enum class Kind {
    kPlace,   // start, or go on after a pause, on `devices`
    kPause,   // stop and leave the devices; work done is kept
    kResize,  // `opportunistic` of a running job changes
    kReject,  // never to run; `reason`
  };
  Kind kind = Kind::kPlace;
  JobId job = 0;
  std::vector<DeviceIndex> devices;  // distinct, as many as the gang
  bool opportunistic = false;        // the device's coordinator gives it what guaranteed jobs leave
  std::string reason;
};

// Use from one thread. Deterministic. Job ids ascend in the order of arrival.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  // Before anything else, once for each device; later when one goes (`up` false: its jobs are waiting again) or comes back.
  virtual void device_changed(DeviceIndex device, const DeviceInfo& info, bool up, double now_s) = 0;
  virtual void arrived(JobId job, const JobInfo& info, double now_s) = 0;
  // A running job: device time it has had, work left, and how much slower than alone it runs since its devices' jobs last changed.
  virtual void observed(JobId job, double attained_s, double remaining_s, double slowdown, double now_s) = 0;
  virtual void finished(JobId job, double now_s) = 0;
  // After all that happened at `now_s` was told. Appends actions, which the driver takes in order, pauses before places. Returns when it
  // wants to be asked again though nothing happens.
  virtual double tick(double now_s, std::vector<Action>& actions) = 0;
};

inline constexpr const char* kTrainingSchedulers[] = {"fifo",   "srtf", "tiresias", "antman",
                                                      "iadeep", "pack", "gpushare"};

// Null if there is none of that name.
std::unique_ptr<Scheduler> make_training_scheduler(std::string_view name);

}  // namespace gpushare::cluster
