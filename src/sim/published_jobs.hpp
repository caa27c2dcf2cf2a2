// published_jobs.hpp: jobs of clusters' own logs, as they are published. docs/cli.md, "Traces", has the table.
//
//   philly   JSON list of jobs with attempts (Microsoft, cluster_job_log)
//   helios   CSV job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue (SenseTime)
//   pai      CSV without a header: job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type
//            (Alibaba 2020, pai_task_table.csv; a header line is accepted)
//   trace    Gavel's own .trace: lines of 9 to 12 fields between tabs, the first one a model with its batch size
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "sim/cluster_training.hpp"

namespace gpushare::sim {

// The layout of `text`, by its content; null: none of these.
const char* published_layout(std::string_view text);

// Jobs with GPUs, by arrival, the first one at 0; they have no class. A job's work is the time for which it had its GPUs, in
// all attempts, also if it failed or was killed; of `trace` it is steps over the steps a second alone. Entries without
// GPUs or without times are left out, and a last line that was cut off; the notes count them. Errors: MALFORMED_INPUT
// naming line or entry, field and what is allowed; nothing left.
base::Result<TrainingJobs> parse_published(std::string_view text, const std::string& file,
                                           const TrainingFileOptions& options);

}  // namespace gpushare::sim
