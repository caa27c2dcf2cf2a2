// step_baselines.hpp: published rules of continuous batching as policies of the step batcher, for comparison. benchmarks/results/continuous.md
// says what each takes from where.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>

#include "sched/slo/step_batcher.hpp"

namespace gpushare::experiments {

// orca, vllm, sarathi, slos-serve, jitserve, or a policy of the product. Null: unknown.
std::unique_ptr<sched::slo::StepBatcher> step_policy(std::string_view name,
                                                     const sched::slo::StepOptions& options);

}  // namespace gpushare::experiments
