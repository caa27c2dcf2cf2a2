// serving.hpp: the structs of serving.h as src/sched/slo has them; for batcher.cpp and request_queue.cpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "base/status.hpp"
#include "gpushare/gpushare.h"
#include "sched/slo/batcher.hpp"

namespace gpushare::capi {

// `params` was read by read_struct. An empty policy is "gpushare". make_batcher reports values that are out of
// range.
base::Result<sched::slo::BatcherOptions> batcher_options(const gpushare_batcher_params& params);
inline const char* policy_name(const gpushare_batcher_params& params) {
  return params.policy == nullptr ? "gpushare" : params.policy;
}
base::Result<sched::slo::ModelSpec> model_spec(const gpushare_batcher_model* model);
base::Result<sched::slo::Request> request(const gpushare_request* request);
base::Result<std::vector<sched::slo::CostStep>> cost_steps(const char* name, const gpushare_cost_step* steps,
                                                           uint64_t count);
base::Status write_profile(const sched::slo::Profile& profile, gpushare_profile* out_profile);

}  // namespace gpushare::capi
