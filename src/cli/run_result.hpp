// run_result.hpp: what a run of jobs under several policies came to, whatever device it ran on; and its table
// and JSON.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/series.hpp"

namespace gpushare::cli {

struct JobOutcome {
  enum class State { kCompleted, kRefused, kFailed, kInterrupted };
  std::string name;
  State state = State::kCompleted;
  double arrival_s = 0;
  double start_s = 0;  // of its first iteration
  double end_s = 0;    // of its last
  uint64_t iterations = 0;
  double service_s = 0;  // device time received
  std::string reason;    // when it did not complete

  double completion_s() const { return end_s - arrival_s; }
  double queue_s() const { return start_s - arrival_s; }
};

// As results name it: "completed", "refused", "failed", "interrupted".
const char* name_of(JobOutcome::State state);

// A measurement: device ns of an iteration alone (`beside` is empty), or how many times as long it takes beside another session.
struct MeasuredBeside {
  std::string name, beside;
  double value = 0;
  double confidence = 0;
};

// One policy's run.
struct PolicyRun {
  std::string policy;
  std::vector<JobOutcome> jobs;  // in file order
  double makespan_s = 0;         // first arrival to last completion
  double utilization = 0;        // share of the makespan in which at least one lane ran an iteration
  uint64_t switches = 0;
  uint64_t peak_bytes = 0;   // most in use at once
  uint64_t oom = 0;          // times a job got an out-of-memory error, or live bytes exceeded capacity
  uint64_t paged_bytes = 0;  // of sessions moved to host memory to let another in, and back
  uint64_t most_inside = 0;  // jobs with their persistent bytes on the device at once
  uint64_t most_apart_bytes =
      0;  // what those inside would have held at most were nothing shared: the sum of their P + E
  // Measured runs. Median time that a lane stood idle before work of another job (before more of the same job),
  // counting only work that was enqueued before the lane became idle; below 0: not measured, or none was seen.
  double switch_s = -1;
  double stay_s = -1;
  // Measured runs: what the simulator makes of the same jobs; below 0: it was not asked.
  double simulated_makespan_s = -1;
  double simulated_jct_mean_s = -1;

  std::vector<MeasuredBeside> interference;  // measured runs under pack, or with a file for it

  // Filled in by summarize().
  uint64_t completed = 0;
  uint64_t refused = 0;
  uint64_t failed = 0;
  double jct_mean_s = 0;  // of completed jobs, as are the next three
  double jct_p50_s = 0;
  double jct_p95_s = 0;  // nearest rank
  double queue_mean_s = 0;

  // Over the run, from the first arrival on. Bytes: promised to persistent memory and to lanes, and in use: blocks
  // whose device work has begun and not ended.
  Series lanes_open, lanes_busy, waiting, persistent_bytes, lane_bytes, live_bytes;
};

struct RunResult {
  std::string device;  // spec: "sim", "host", "cuda:0"
  std::string
      label;  // where the figures come from: "sim" (virtual time), "host" (measured on CPU threads), "device"
  std::string jobs_file;
  std::string layout;  // of the job file
  uint64_t capacity_bytes = 0;
  uint32_t lanes = 0;  // limit on top of the policy's own; 0 = none
  uint64_t seed = 0;
  double time_scale = 1.0;
  std::vector<PolicyRun> policies;
  std::vector<std::string> notes;  // what the figures rest on, one sentence or two each
  bool interrupted = false;        // by the user: the last policy's figures are of what was done until then
};

// Policies that completed the same jobs: one that completed fewer looks quick and is not.
std::vector<const PolicyRun*> compared(const RunResult& result);

// The gains of sharing, in one or two sentences each: time against one job at a time (fifo), the cost of a
// switch, memory, and whether host and simulator agree. Empty for a single policy.
std::vector<std::string> findings(const RunResult& result);

// Nearest-rank percentile of `sorted`, p in (0, 1]; 0 of nothing.
double percentile(const std::vector<double>& sorted, double p);

// Computes the fields that follow from `jobs`.
void summarize(PolicyRun& run);

// A unit and a number of decimals that fit `largest_s`. All durations of a table use one, so that they line
// up.
struct TimeUnit {
  const char* name;  // "s", "min", "h", "days"
  double seconds;
  int decimals;
  // "12.34", in this unit.
  std::string number(double seconds_of_it) const;
};
TimeUnit time_unit(double largest_s);

// The table with policies as rows, then notes; ends with '\n'.
std::string render_table(const RunResult& result);
nlohmann::ordered_json to_json(const RunResult& result);
// One row a policy and job:
// policy,job,state,arrival_s,start_s,end_s,completion_s,queue_s,iterations,service_s,reason.
std::string per_job_csv(const RunResult& result);

}  // namespace gpushare::cli
