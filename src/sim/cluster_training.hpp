// cluster_training.hpp: training jobs on several devices: the kind "training" of cluster documents, and files of jobs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "cluster/kinds.hpp"
#include "sim/cluster_simulation.hpp"

namespace gpushare::sim {

struct TrainingJobs {
  std::string layout;  // "gpushare", "salus", "gavel", "muri", "document", or one of published_jobs.hpp
  std::vector<cluster::JobInfo> jobs;  // by arrival
  std::vector<std::string> notes;      // what was assumed
};

struct TrainingFileOptions {
  uint64_t limit = 0;  // only the first jobs of the file; 0 = all
  double load = 0.95;  // gavel: work over the span of arrivals and the devices, in (0, 10]
  double guaranteed =
      0;  // layouts without a class: the part of the jobs that is guaranteed, drawn by `seed`; in [0, 1]
  uint64_t seed = 1;
  double time_scale = 1.0;  // arrivals are multiplied by it; finite, >= 0
  const InterferenceTable* table = nullptr;
};

// Job files of job_file.hpp, to whose first layout a column `gang` (devices, 1 unless given) may be added, and Muri's traces
// (job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,resource_time_0..2,priority; times in ms).
// And the logs of published_jobs.hpp. `devices` is what arrivals of the gavel layout are stretched to load. Errors: as of read_jobs.
base::Result<TrainingJobs> read_training_jobs(const std::string& path, size_t devices,
                                              const TrainingFileOptions& options);

// The kind: `jobs[]` with the columns of a job file.
const cluster::Kind& training_kind();
// src/cluster's kinds and the ones that need the simulator.
const std::vector<const cluster::Kind*>& all_cluster_kinds();

// A training document's devices and jobs. Errors: MALFORMED_INPUT, as of cluster::plan.
struct TrainingDocument {
  std::vector<cluster::Device> devices;
  TrainingJobs jobs;
  double noise = 0;      // of its field run
  double restart_s = 0;  // the same
};
base::Result<TrainingDocument> parse_training_document(std::string_view text);

// The fields of a result: jobs, completed, rejected, makespan_s, jct_mean_s, ...
void write_result(const std::vector<cluster::JobInfo>& jobs, const ClusterResult& result,
                  cluster::OrderedJson& out);

}  // namespace gpushare::sim
