// cluster_simulation.hpp: jobs under a cluster scheduler on several simulated devices, on virtual time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "cluster/model/device.hpp"
#include "cluster/scheduler.hpp"
#include "sim/interference.hpp"

namespace gpushare::sim {

struct ClusterOptions {
  double restart_s = 0;  // work that a job repeats each time it goes on after a pause
  double noise = 0;      // relative standard deviation of a job's speed, drawn once a job; in [0, 1)
  uint64_t seed = 1;     // of the noise
  const InterferenceTable* table = nullptr;  // measured pairs by config; others as their demands say
  std::function<bool(double now_s, size_t finished, size_t jobs)> progress;  // now and then; false cancels
};

struct ClusterJobResult {
  double arrival_s = 0;
  double start_s = -1;   // below 0: never
  double end_s = -1;     // below 0: never
  double running_s = 0;  // on devices
  double work_s = 0;
  double company = 1;  // work that it would have done alone on the devices that it had, over work done
  uint32_t pauses = 0;
  std::string reason;  // why it was rejected
};

// A run of a job on its devices, for pictures.
struct ClusterSpan {
  uint32_t job = 0;
  uint32_t device = 0;
  double begin_s = 0;
  double end_s = 0;
};

struct ClusterResult {
  std::vector<ClusterJobResult> jobs;
  size_t completed = 0;
  size_t rejected = 0;
  double makespan_s = 0;    // first arrival to last completion
  double jct_mean_s = 0;    // of completed jobs, as are the next three
  double jct_p95_s = 0;     // nearest rank
  double queue_mean_s = 0;  // until the first run
  double slowdown_p99 = 0;  // time on devices over work, of guaranteed jobs; nearest rank
  double company_p99 = 0;   // the same against alone on the same devices: what others beside them cost
  double utilization = 0;   // device time with a job over all device time of the makespan
  uint64_t oom = 0;         // placements beyond a device's memory: refused
  uint64_t decisions = 0;
  double decision_ms_p99 = 0;      // by `now_ns` of run(); 0 without
  std::vector<ClusterSpan> spans;  // if they were wanted
  uint64_t reconfigured = 0;       // changes of batch sizes
  cluster::PredictionReport predictions;
};

// Tells a scheduler the pairs of a table, as of jobs that state no demand.
void tell_known_pairs(const InterferenceTable& table, cluster::Scheduler& scheduler);

// Fills the sums over jobs. `busy_s` is device time with a job, of `devices`.
void summarize(const std::vector<cluster::JobInfo>& jobs, size_t devices, double busy_s,
               ClusterResult& result);

// The speed of a job beside others on a device, both running in turns as the device gives them. Measured pairs add
// their excess; of unmeasured ones the most demanded resource is shared in proportion to demand. An opportunistic job
// gets what is left of the most demanded resource, and guaranteed ones do not feel it: that is what a device's
// coordinator enforces. An iteration with another batch size takes what the table's rates alone say, else
// assumed_iteration_factor.
//
// Deterministic: the same inputs give the same result, bit by bit. O(log jobs) an event, and what the scheduler takes.
// Errors: INTERNAL naming the action, if the scheduler places a job that runs, or on the wrong number of devices; CANCELLED.
base::Result<ClusterResult> run_cluster(const std::vector<cluster::JobInfo>& jobs,
                                        const std::vector<cluster::Device>& devices,
                                        cluster::Scheduler& scheduler, const ClusterOptions& options,
                                        bool want_spans = false,
                                        const std::function<uint64_t()>& now_ns = {});

}  // namespace gpushare::sim
