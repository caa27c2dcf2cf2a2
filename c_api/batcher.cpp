// Deadline-aware batching: src/sched/slo as it is, a state machine that the caller drives.
// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/batcher.hpp"

#include <algorithm>
#include <deque>
#include <span>
#include <vector>

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/handles.hpp"
#include "c_api/serving.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

namespace gpushare::capi {

struct BatcherObject {
  std::unique_ptr<sched::slo::Batcher> batcher;
  uint32_t largest_batch = 1;  // of all models
  uint32_t models = 0;
  std::deque<sched::slo::Drop> drops;
  std::vector<sched::slo::Drop> taken;  // scratch
};

}  // namespace gpushare::capi

extern "C" {

int32_t gpushare_batcher_create(const gpushare_batcher_params* params, gpushare_batcher* out_batcher) {
  return capi::guard([&]() -> base::Status {
    if (out_batcher == nullptr) return capi::null_argument("out_batcher");
    gpushare_batcher_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::BatcherOptions options, capi::batcher_options(read));
    auto object = std::make_shared<capi::BatcherObject>();
    GPUSHARE_ASSIGN_OR_RETURN(object->batcher, sched::slo::make_batcher(capi::policy_name(read), options));
    return capi::publish(std::move(object), out_batcher);
  });
}

int32_t gpushare_batcher_release(gpushare_batcher batcher) {
  return capi::release(batcher);
}

int32_t gpushare_batcher_add_model(gpushare_batcher batcher, const gpushare_batcher_model* model,
                                   uint32_t* out_model) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    if (out_model == nullptr) return capi::null_argument("out_model");
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::ModelSpec spec, capi::model_spec(model));
    GPUSHARE_ASSIGN_OR_RETURN(const uint32_t added, object.batcher->add_model(spec));
    object.largest_batch = std::max(object.largest_batch, spec.batch_sizes.back());
    object.models = added + 1;
    *out_model = added;
    return {};
  });
}

int32_t gpushare_batcher_arrive(gpushare_batcher batcher, const gpushare_request* request, uint64_t now_ns) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::Request r, capi::request(request));
    return object.batcher->arrive(r, now_ns);
  });
}

int32_t gpushare_batcher_cancel(gpushare_batcher batcher, uint64_t id, uint64_t now_ns) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    if (object.batcher->cancel(id, now_ns)) return {};
    return {GPUSHARE_NOT_FOUND,
            base::format("request %llu is not waiting", static_cast<unsigned long long>(id))};
  });
}

int32_t gpushare_batcher_next(gpushare_batcher batcher, uint64_t now_ns, uint32_t in_flight,
                              gpushare_batch* out_batch, uint64_t* out_ids, uint64_t capacity) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    if (out_ids == nullptr) return capi::null_argument("out_ids");
    if (capacity < object.largest_batch)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("capacity is %llu; a batch may have %u requests",
                           static_cast<unsigned long long>(capacity), object.largest_batch)};
    // Before the decision: what it takes out must not be lost to a bad struct.
    gpushare_batch batch = GPUSHARE_BATCH_INIT;
    GPUSHARE_RETURN_IF_ERROR(capi::write_struct("out_batch", batch, out_batch));
    const sched::slo::Decision decision = object.batcher->next(now_ns, in_flight);
    batch.wake_ns = decision.wake_ns;
    if (decision.batch) {
      batch.model = decision.batch->model;
      batch.id = decision.batch->id;
      batch.count = decision.batch->requests.size();
      batch.expected_ns = decision.batch->expected_ns;
      batch.not_before_ns = decision.batch->not_before_ns;
      batch.latest_start_ns = decision.batch->latest_start_ns;
      std::copy(decision.batch->requests.begin(), decision.batch->requests.end(), out_ids);
    }
    GPUSHARE_RETURN_IF_ERROR(capi::write_struct("out_batch", batch, out_batch));
    return decision.batch ? base::Status() : base::Status(GPUSHARE_NOT_READY, "no batch is to run now");
  });
}

int32_t gpushare_batcher_started(gpushare_batcher batcher, uint64_t batch_id, uint64_t now_ns) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    object.batcher->started(batch_id, now_ns);
    return {};
  });
}

int32_t gpushare_batcher_finished(gpushare_batcher batcher, uint64_t batch_id, uint64_t device_ns,
                                  uint64_t now_ns) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    object.batcher->finished(batch_id, device_ns, now_ns);
    return {};
  });
}

int32_t gpushare_batcher_finished_run(gpushare_batcher batcher, uint64_t batch_id,
                                      const uint64_t* execution_ns, uint64_t count, uint64_t device_ns,
                                      uint64_t now_ns) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    if (execution_ns == nullptr && count != 0) return capi::null_argument("execution_ns");
    if (count > 4096)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("count is %llu, allowed are up to 4096", static_cast<unsigned long long>(count))};
    object.batcher->finished_run(batch_id, std::span(execution_ns, count), device_ns, now_ns);
    return {};
  });
}

int32_t gpushare_batcher_rejected(gpushare_batcher batcher, uint64_t batch_id, uint64_t now_ns) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    object.batcher->rejected(batch_id, now_ns);
    return {};
  });
}

int32_t gpushare_batcher_observe(gpushare_batcher batcher, uint32_t model, uint32_t application,
                                 uint64_t execution_ns) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    object.batcher->observe(model, application, execution_ns);
    return {};
  });
}

int32_t gpushare_batcher_observe_request(gpushare_batcher batcher, const gpushare_request* request,
                                         uint64_t execution_ns) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::Request read, capi::request(request));
    return object.batcher->observe_request(read, execution_ns);
  });
}

int32_t gpushare_batcher_observe_batch(gpushare_batcher batcher, uint32_t model, uint32_t k,
                                       uint64_t longest_ns, uint64_t device_ns) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    object.batcher->observe_batch(model, k, longest_ns, device_ns);
    return {};
  });
}

int32_t gpushare_batcher_observe_run(gpushare_batcher batcher, uint32_t model, const uint32_t* applications,
                                     const uint64_t* execution_ns, uint64_t count, uint64_t device_ns) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    if (applications == nullptr) return capi::null_argument("applications");
    if (count == 0 || count > 4096)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("count is %llu, allowed are 1 to 4096", static_cast<unsigned long long>(count))};
    if (model >= object.models)
      return {GPUSHARE_INVALID_ARGUMENT, base::format("model %u of %u", model, object.models)};
    const std::span<const uint64_t> known =
        execution_ns == nullptr ? std::span<const uint64_t>() : std::span(execution_ns, count);
    object.batcher->observe_run(model, std::span(applications, count), known, device_ns);
    return {};
  });
}

int32_t gpushare_batcher_get_profile(gpushare_batcher batcher, uint32_t model, uint32_t application,
                                     gpushare_profile* out_profile) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::Profile profile, object.batcher->profile(model, application));
    return capi::write_profile(profile, out_profile);
  });
}

int32_t gpushare_batcher_take_drops(gpushare_batcher batcher, gpushare_drop* out_drops, uint64_t capacity,
                                    uint64_t* out_count) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    if (out_count == nullptr) return capi::null_argument("out_count");
    if (out_drops == nullptr && capacity != 0) return capi::null_argument("out_drops");
    object.taken.clear();
    object.batcher->take_drops(object.taken);
    object.drops.insert(object.drops.end(), object.taken.begin(), object.taken.end());
    uint64_t count = 0;
    for (; count < capacity && !object.drops.empty(); ++count) {
      out_drops[count] = {object.drops.front().id, static_cast<uint32_t>(object.drops.front().reason), 0};
      object.drops.pop_front();
    }
    *out_count = count;
    return {};
  });
}

int32_t gpushare_batcher_get_pending(gpushare_batcher batcher, uint64_t* out_pending) {
  return capi::with(batcher, [&](capi::BatcherObject& object) -> base::Status {
    if (out_pending == nullptr) return capi::null_argument("out_pending");
    *out_pending = object.batcher->pending();
    return {};
  });
}

}  // extern "C"
