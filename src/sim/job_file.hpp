// job_file.hpp: job traces from CSV, in three layouts recognised by their header.
//
//   gpushare
//   name,class,arrival_s,iterations,iteration_ms,persistent_mb,ephemeral_mb,priority[,weight][,demand][,config][,think_ms]
//   salus      name,seconds_alone,peak_mb,iterations            all jobs arrive at time 0, in file order
//   gavel      model,steps,arrival_s,gpus                       arrivals stretched to a stated load on one GPU
//
// MB are 10^6 bytes. In the first layout "205?" is a need of 205 MB that the job does not declare: a runtime profiles
// it. Columns of the first layout may come in any order. class is guaranteed or opportunistic; demand and config feed
// the interference model. think_ms is the time for which the job's host thinks between the end of an iteration, for
// which it waits, and the next one; 0, as without the column: it waits for nothing. Fields that the other layouts lack are filled in from published facts (known_models.hpp), and
// the notes say how.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "sim/interference.hpp"
#include "sim/job.hpp"

namespace gpushare::sim {

struct JobFileOptions {
  uint64_t limit = 0;       // only the first jobs of the file; 0 = all
  double time_scale = 1.0;  // arrivals are multiplied by it; finite, >= 0
  bool gangs = false;       // a file may have a column gang, the devices that a job runs on at once
  double load = 0.95;       // gavel: work over the span of arrivals, in (0, 10]
  const InterferenceTable* table =
      nullptr;  // gavel: its steps per second, where it has them, go before the built-in ones
};

struct JobFile {
  std::string layout;              // "gpushare", "salus", "gavel"
  std::vector<Job> jobs;           // by arrival, file order among equals
  std::vector<std::string> notes;  // what was assumed; one line each, for the output
};

// Errors: MALFORMED_INPUT naming file, line, field and what is allowed (unknown header, missing or too many
// columns, not a number, negative, zero, too large, no jobs); INVALID_ARGUMENT for options out of range. Jobs
// larger than a device are not an error here: the simulation reports them at admission.
base::Result<JobFile> parse_jobs(std::string_view text, const std::string& file,
                                 const JobFileOptions& options = {});
// Errors: also NOT_FOUND, IO_ERROR. Blocks on the disk.
base::Result<JobFile> read_jobs(const std::string& path, const JobFileOptions& options = {});

}  // namespace gpushare::sim
