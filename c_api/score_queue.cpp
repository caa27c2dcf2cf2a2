// The score queue.
// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/score_queue.hpp"

#include <cmath>
#include <utility>
#include <vector>

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/serving.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"
#include "sched/slo/histogram.hpp"

using namespace gpushare;
using sched::slo::CostStep;
using sched::slo::Distribution;
using sched::slo::ScoreCurve;
using sched::slo::ScoreQueue;

namespace {

base::Status wrong(const char* name, double value, const char* allowed) {
  return {GPUSHARE_INVALID_ARGUMENT,
          base::format("score_class->%s is %g, allowed: %s", name, value, allowed)};
}

base::Result<ScoreCurve> curve_of(const gpushare_score_class* score_class) {
  gpushare_score_class read{};
  GPUSHARE_RETURN_IF_ERROR(capi::read_struct("score_class", score_class, &read));
  const uint32_t k = read.k == 0 ? 1 : read.k;
  const uint32_t bins = read.bins == 0 ? 32 : read.bins;
  const double c1 = read.c1 == 0 ? 1 : read.c1;
  const double rate_per_ms = read.delay_rate_per_ms == 0 ? 1e-4 : read.delay_rate_per_ms;
  if (k > 4096) return wrong("k", k, "1 to 4096");
  if (bins > 4096) return wrong("bins", bins, "1 to 4096");
  if (!(read.c0_ns >= 0) || !std::isfinite(read.c0_ns)) return wrong("c0_ns", read.c0_ns, "0 and more");
  if (!(c1 > 0) || !std::isfinite(c1)) return wrong("c1", c1, "above 0");
  if (!(rate_per_ms > 0) || !std::isfinite(rate_per_ms))
    return wrong("delay_rate_per_ms", rate_per_ms, "above 0");
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<CostStep> steps,
                            capi::cost_steps("score_class->steps", read.steps, read.step_count));
  for (const CostStep& step : steps)
    if (!(step.cost > 0) || !std::isfinite(step.cost)) return wrong("steps[].cost", step.cost, "above 0");
  const auto histogram = capi::find(read.histogram);
  if (!histogram) return capi::stale(read.histogram);
  const Distribution one = histogram->distribution(bins);
  if (one.empty())
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "score_class->histogram is empty: record durations first");
  const Distribution longest = k == 1 ? one : sched::slo::maximum(one, one, k - 1, bins);
  const Distribution batch = longest.affine(read.c0_ns, c1 * k);
  return ScoreCurve(batch, batch.mean_ns(), rate_per_ms / 1e6, steps);
}

}  // namespace

extern "C" {

int32_t gpushare_score_queue_create(gpushare_score_queue* out_queue) {
  return capi::guard([&]() -> base::Status {
    if (out_queue == nullptr) return capi::null_argument("out_queue");
    return capi::publish(std::make_shared<ScoreQueue>(), out_queue);
  });
}

int32_t gpushare_score_queue_release(gpushare_score_queue queue) {
  return capi::release(queue);
}

int32_t gpushare_score_queue_add_class(gpushare_score_queue handle, const gpushare_score_class* score_class,
                                       uint32_t* out_class) {
  return capi::with(handle, [&](ScoreQueue& queue) -> base::Status {
    if (out_class == nullptr) return capi::null_argument("out_class");
    GPUSHARE_ASSIGN_OR_RETURN(const ScoreCurve curve, curve_of(score_class));
    *out_class = queue.add_class(curve);
    return {};
  });
}

int32_t gpushare_score_queue_set_class(gpushare_score_queue handle, uint32_t index,
                                       const gpushare_score_class* score_class) {
  return capi::with(handle, [&](ScoreQueue& queue) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const ScoreCurve curve, curve_of(score_class));
    return queue.set_curve(index, curve);
  });
}

int32_t gpushare_score_queue_insert(gpushare_score_queue handle, uint32_t index, uint64_t deadline_ns,
                                    uint64_t id, uint32_t* out_entry) {
  return capi::with(handle, [&](ScoreQueue& queue) -> base::Status {
    if (out_entry == nullptr) return capi::null_argument("out_entry");
    const ScoreQueue::Handle entry = queue.insert(index, deadline_ns, id);
    if (entry == ScoreQueue::kNoHandle)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("no score class %u: gpushare_score_queue_add_class has not made it", index)};
    *out_entry = entry;
    return {};
  });
}

int32_t gpushare_score_queue_erase(gpushare_score_queue handle, uint32_t entry) {
  return capi::with(handle, [&](ScoreQueue& queue) -> base::Status {
    if (queue.erase(entry)) return {};
    return {GPUSHARE_NOT_FOUND, base::format("the score queue has no entry %u", entry)};
  });
}

int32_t gpushare_score_queue_best(gpushare_score_queue handle, uint64_t now_ns, uint64_t* out_id,
                                  double* out_score) {
  return capi::with(handle, [&](ScoreQueue& queue) -> base::Status {
    if (out_id == nullptr) return capi::null_argument("out_id");
    const std::optional<ScoreQueue::Best> best = queue.best(now_ns);
    if (!best) return {GPUSHARE_NOT_READY, "the score queue is empty"};
    *out_id = best->id;
    if (out_score != nullptr) *out_score = best->score;
    return {};
  });
}

int32_t gpushare_score_queue_pop(gpushare_score_queue handle, uint64_t now_ns, uint64_t count,
                                 uint64_t* out_ids, uint64_t* out_count) {
  return capi::with(handle, [&](ScoreQueue& queue) -> base::Status {
    if (out_count == nullptr) return capi::null_argument("out_count");
    if (out_ids == nullptr && count != 0) return capi::null_argument("out_ids");
    uint64_t taken = 0;
    for (; taken < count; ++taken) {
      const std::optional<ScoreQueue::Best> best = queue.best(now_ns);
      if (!best) break;
      out_ids[taken] = best->id;
      queue.erase(best->handle);
    }
    *out_count = taken;
    return {};
  });
}

int32_t gpushare_score_queue_get_size(gpushare_score_queue handle, uint64_t* out_size) {
  return capi::with(handle, [&](ScoreQueue& queue) -> base::Status {
    if (out_size == nullptr) return capi::null_argument("out_size");
    *out_size = queue.size();
    return {};
  });
}

}  // extern "C"
