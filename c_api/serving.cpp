// SPDX-License-Identifier: Apache-2.0
#include "c_api/serving.hpp"

#include "c_api/abi.hpp"
#include "sched/slo/feature_model.hpp"

namespace gpushare::capi {

using sched::slo::BatcherOptions;
using sched::slo::CostStep;
using sched::slo::DropReason;
using sched::slo::ModelSpec;
using sched::slo::Profile;
using sched::slo::Request;

static_assert(GPUSHARE_DROP_EXPIRED == static_cast<int>(DropReason::kExpired));
static_assert(GPUSHARE_DROP_HOPELESS == static_cast<int>(DropReason::kHopeless));
static_assert(GPUSHARE_DROP_REJECTED == static_cast<int>(DropReason::kRejected));
static_assert(GPUSHARE_DROP_CANCELLED == static_cast<int>(DropReason::kCancelled));

base::Result<BatcherOptions> batcher_options(const gpushare_batcher_params& params) {
  constexpr uint32_t kKnown = GPUSHARE_BATCHER_EARLIEST_FIRST | GPUSHARE_BATCHER_MORE_THAN_SIZE;
  if ((params.flags & ~kKnown) != 0)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("flags is 0x%x, known bits are 0x%x", params.flags, kKnown));
  if (params.window > (1u << 20))
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("window is %llu, allowed are 1 to 2^20, or 0 for 2048",
                                     static_cast<unsigned long long>(params.window)));
  BatcherOptions options;
  const auto set = [](auto value, auto* to) {
    if (value != 0) *to = static_cast<std::remove_pointer_t<decltype(to)>>(value);
  };
  const auto set_ms = [](uint64_t ns, double* to) {
    if (ns != 0) *to = static_cast<double>(ns) / 1e6;
  };
  set(params.max_pending, &options.max_pending);
  set(params.window, &options.histogram.window);
  set(params.bins, &options.bins);
  set(params.opportunity, &options.opportunity);
  set(params.feasible_quantile, &options.feasible_quantile);
  set(params.delay_rate_per_ms, &options.delay_rate_per_ms);
  set(params.estimate_quantile, &options.estimate_quantile);
  set_ms(params.max_defer_ns, &options.max_defer_ms);
  set_ms(params.max_delay_ns, &options.max_delay_ms);
  set_ms(params.clockwork_window_ns, &options.clockwork_window_ms);
  set_ms(params.clockwork_slack_ns, &options.clockwork_slack_ms);
  set_ms(params.nexus_overhead_ns, &options.nexus_overhead_ms);
  if ((params.flags & GPUSHARE_BATCHER_EARLIEST_FIRST) != 0)
    options.size_order = sched::slo::SizeOrder::kEarliestDeadline;
  options.more_than_size = (params.flags & GPUSHARE_BATCHER_MORE_THAN_SIZE) != 0;
  return options;
}

base::Result<ModelSpec> model_spec(const gpushare_batcher_model* model) {
  gpushare_batcher_model read{};
  GPUSHARE_RETURN_IF_ERROR(read_struct("model", model, &read));
  ModelSpec spec;
  spec.c0_ns = static_cast<double>(read.c0_ns);
  spec.c1 = read.c1;
  if (read.batch_size_count != 0) {
    if (read.batch_sizes == nullptr) return null_argument("model->batch_sizes");
    if (read.batch_size_count > 4096)
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("batch_size_count is %u, allowed are up to 4096", read.batch_size_count));
    spec.batch_sizes.assign(read.batch_sizes, read.batch_sizes + read.batch_size_count);
  }
  return spec;
}

base::Result<std::vector<CostStep>> cost_steps(const char* name, const gpushare_cost_step* steps,
                                               uint64_t count) {
  if (count == 0) return std::vector<CostStep>();
  if (steps == nullptr) return null_argument(name);
  if (count > 64)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("%s has %llu steps, allowed are up to 64", name,
                                     static_cast<unsigned long long>(count)));
  std::vector<CostStep> out;
  for (uint64_t i = 0; i < count; ++i) out.push_back({static_cast<double>(steps[i].after_ns), steps[i].cost});
  return out;
}

base::Result<Request> request(const gpushare_request* request) {
  gpushare_request read{};
  GPUSHARE_RETURN_IF_ERROR(read_struct("request", request, &read));
  Request r;
  r.id = read.id;
  r.model = read.model;
  r.application = read.application;
  if (read.feature_count != 0) {
    constexpr size_t kMost = sched::slo::FeatureModel::kMaxFeatures;
    if (read.features == nullptr) return null_argument("request->features");
    if (read.feature_count > kMost)
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("request->feature_count is %u, allowed are up to %zu", read.feature_count, kMost));
    r.features.assign(read.features, read.features + read.feature_count);
  }
  r.arrival_ns = read.arrival_ns;
  r.deadline_ns = read.deadline_ns;
  r.cost = read.cost;
  GPUSHARE_ASSIGN_OR_RETURN(r.later_steps,
                            cost_steps("request->later_steps", read.later_steps, read.later_step_count));
  return r;
}

base::Status write_profile(const Profile& profile, gpushare_profile* out_profile) {
  gpushare_profile out = GPUSHARE_PROFILE_INIT;
  out.c0_ns = profile.c0_ns;
  out.c1 = profile.c1;
  out.samples = profile.samples;
  out.drifts = profile.drifts;
  out.mean_ns = profile.mean_ns;
  out.p50_ns = profile.p50_ns;
  out.p99_ns = profile.p99_ns;
  return write_struct("out_profile", out, out_profile);
}

}  // namespace gpushare::capi
