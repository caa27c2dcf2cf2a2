// run_options.hpp: what `gpushare run` was asked for, after parsing and checking, and the two engines that
// can do it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "cli/policy_choice.hpp"
#include "cli/run_result.hpp"
#include "sim/interference.hpp"
#include "sim/job_file.hpp"

namespace gpushare::cli {

struct RunOptions {
  std::string device = "sim";
  std::vector<PolicyChoice> policies;
  uint32_t lanes = 0;             // 0: as the policy says
  uint64_t capacity_bytes = 0;    // 0: the engine's default
  bool interference = true;       // sim: lanes slow each other
  bool tell_policy = true;        // sim: pack is told how much they do
  bool measures = false;          // sim: it is told nothing and measures, as on a device
  std::string lane_finder;        // "" = as the policy says
  std::string interference_file;  // device: of what was measured; "" = none
  double time_scale = 1.0;
  uint64_t seed = 1;
  double jitter = 0;
  std::string timeline_path;  // "" = none
  std::string snapshot_path;
};

// Called now and then with the progress; cheap to call. False ends the run early: the result is the work done until then.
using Progress =
    std::function<bool(const std::string& policy, uint64_t jobs_done, uint64_t jobs, double now_s)>;

// The path of policy `index`'s own file where a format cannot hold several policies: the first gets `path`,
// the others "out.srtf.json" for "out.json".
std::string policy_path(const std::string& path, const std::string& policy, size_t index);

// Runs every policy on virtual time. `table` may be null. Errors: of the options, and of writing the files.
base::Result<RunResult> run_simulated(const RunOptions& options, const sim::JobFile& file,
                                      const sim::InterferenceTable* table, const Progress& progress);

// Runs every policy on a real device through the public API: one session and one thread a job, real
// arithmetic and real memory. Errors: UNAVAILABLE, and of the options; a job that fails is part of the
// result.
base::Result<RunResult> run_measured(const RunOptions& options, const sim::JobFile& file,
                                     const Progress& progress);

}  // namespace gpushare::cli
