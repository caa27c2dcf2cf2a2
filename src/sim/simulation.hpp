// simulation.hpp: a trace under a policy on a simulated device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "sched/scheduler.hpp"
#include "sim/events.hpp"
#include "sim/interference.hpp"
#include "sim/job.hpp"

namespace gpushare::sim {

struct SimulationOptions {
  uint64_t capacity_bytes = uint64_t{16} << 30;
  uint32_t max_lanes = 0;                            // on top of the policy's own limit; 0 = no limit
  std::optional<sched::LaneFinderKind> lane_finder;  // without: as the policy says, else kSalus
  bool paging = true;
  uint64_t keeps_lag_ns = sched::kKeepsLagNs;  // SchedulerOptions::keeps_lag_ns, as the executor has it
  double host_link_bytes_per_s = 12e9;         // copies of persistent bytes, one at a time; > 0
  uint64_t switch_ns = 0;                      // lane idle time when it goes on with another session
  bool interference = true;                    // false: lanes do not slow each other
  // pack is told the interference model, so its estimates are right; false: pack decides by memory alone, as Salus does.
  bool tell_policy = true;
  // True: nobody tells the policy anything. The scheduler measures, as on a device.
  bool measures = false;
  double jitter = 0;                         // relative standard deviation of an iteration's time, in [0, 1]
  uint64_t seed = 1;                         // of the jitter
  uint64_t max_picks = 1'000'000;            // sets quantum_ns when it is 0
  uint64_t quantum_ns = 0;                   // 0: none, unless the trace has more iterations than max_picks
  const InterferenceTable* table = nullptr;  // used during construction only
  std::function<bool(uint64_t now_ns, size_t finished, size_t jobs)>
      progress;  // after each job; false cancels
};

struct JobResult {
  std::string name;
  uint64_t arrival_ns = 0;
  uint64_t start_ns = 0;    // of its first iteration
  uint64_t end_ns = 0;      // of its last
  uint64_t service_ns = 0;  // device time received
  uint64_t iterations = 0;
  uint32_t page_outs = 0;
  bool refused = false;  // could not run alone; all times but arrival are 0
  std::string reason;    // why it was refused

  uint64_t completion_ns() const { return end_ns - arrival_ns; }
  uint64_t queue_ns() const { return start_ns - arrival_ns; }  // until its first iteration
};

struct SimulationResult {
  std::string policy;
  std::vector<JobResult> jobs;  // in the order given; session id = index + 1
  uint64_t completed = 0;
  uint64_t refused = 0;
  uint64_t makespan_ns = 0;        // first arrival to last completion
  double completion_mean_ns = 0;   // of completed jobs, as are the next two
  uint64_t completion_p95_ns = 0;  // nearest rank
  double queue_mean_ns = 0;
  double utilization = 0;  // share of the makespan in which at least one lane ran an iteration
  double work_rate = 0;    // work done (device time alone) over makespan: above 1 if lanes in parallel gained
  uint64_t switches = 0;   // times a lane went on with another session
  uint64_t peak_bytes = 0;  // most live at once: persistent of residents, ephemeral of running iterations
  uint64_t peak_promised_bytes = 0;
  uint64_t oom = 0;  // times live bytes exceeded capacity, counted apart from the scheduler's own books
  uint64_t page_outs = 0;
  uint64_t page_ins = 0;
  uint64_t paged_bytes = 0;  // both ways
  uint64_t picks = 0;        // decisions made
  uint64_t quantum_ns =
      0;  // iterations were run in groups of this much device time; 0: each decision was made
  uint64_t iteration_group =
      1;  // most iterations run on one decision that the policy could have changed within
  std::vector<std::string> notes;  // what the figures rest on
};

// One run. Iterations are not simulated one by one: a decision that holds is carried on until something
// happens that could change it (an arrival, a departure, a page copied, a job that has thought), and is then ended at the
// next iteration boundary. Jobs that think between iterations are simulated iteration by iteration.
//
// Threads: none; use from one thread. Deterministic: the same inputs give the same result, bit by bit.
class Simulation {
 public:
  // `jobs` ascending by arrival. `sink` may be null and must outlive run().
  Simulation(SimulationOptions options, std::vector<Job> jobs, std::unique_ptr<sched::Policy> policy,
             EventSink* sink = nullptr);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // Call once. Errors: INVALID_ARGUMENT (options or jobs out of range; the message names the field),
  // CANCELLED (progress said so), INVALID_STATE (called twice; or a custom policy leaves every lane idle for
  // ever: the message names the waiting jobs).
  base::Result<SimulationResult> run();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gpushare::sim
