// The request queue: requests with deadlines in front of a runtime.
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "base/clock.hpp"
#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/request_queue.hpp"
#include "c_api/serving.hpp"
#include "c_api/tags.hpp"
#include "c_api/user_function.hpp"
#include "executor/serving/iteration_batch.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;
using executor::RequestOutcome;
using sched::slo::DropReason;

namespace {

using Queue = capi::RequestQueueObject;

using ModelFunction = capi::UserFunction<gpushare_batch_fn>;

base::Status run_batch(const ModelFunction& function, const sched::slo::Batch& batch,
                       const std::shared_ptr<executor::Iteration>& iteration, executor::BatchReport& report) {
  gpushare_queued_batch seen{};
  seen.struct_size = sizeof seen;
  seen.model = batch.model;
  seen.count = batch.requests.size();
  seen.ids = batch.requests.data();
  seen.user_data = report.tags.data();
  seen.expected_ns = batch.expected_ns;
  seen.execution_ns = report.execution_ns.data();
  seen.statuses = report.statuses.data();
  return function.run(iteration, "batch", &seen);
}

void answer_with(gpushare_answer_fn answer, void* user_data, const RequestOutcome& outcome) {
  gpushare_request_outcome out{};
  out.struct_size = sizeof out;
  out.status = outcome.status;
  out.id = outcome.id;
  out.drop = outcome.dropped ? static_cast<uint32_t>(*outcome.dropped) : uint32_t{GPUSHARE_DROP_NONE};
  out.batch_count = outcome.batch_size;
  out.finished_ns = outcome.finished_ns;
  out.deadline_ns = outcome.deadline_ns;
  const base::CallbackCalls may_call;
  answer(user_data, &out);
}

}  // namespace

extern "C" {

uint64_t gpushare_now_ns(void) {
  return base::host_now_ns();
}

int32_t gpushare_request_queue_create(gpushare_runtime runtime, const gpushare_batcher_params* params,
                                      gpushare_request_queue* out_queue) {
  return capi::guard([&]() -> base::Status {
    if (out_queue == nullptr) return capi::null_argument("out_queue");
    const auto pin = capi::find(runtime);
    if (!pin) return capi::stale(runtime);
    gpushare_batcher_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    executor::RequestServerOptions options;
    options.policy = capi::policy_name(read);
    GPUSHARE_ASSIGN_OR_RETURN(options.batcher, capi::batcher_options(read));
    auto queue = std::make_shared<Queue>();
    queue->runtime = pin.shared();
    options.changed = [shown = queue->shown](const executor::RequestServerStats& stats) {
      shown->show(stats);
    };
    GPUSHARE_ASSIGN_OR_RETURN(queue->server, executor::RequestServer::start(options));
    return capi::publish(std::move(queue), out_queue);
  });
}

int32_t gpushare_request_queue_close(gpushare_request_queue handle) {
  return capi::with(handle, [&](Queue& queue) -> base::Status {
    GPUSHARE_RETURN_IF_ERROR(queue.server->stop());
    return capi::table_of<gpushare_request_queue>().remove(handle) ? base::Status() : capi::stale(handle);
  });
}

int32_t gpushare_request_queue_drain(gpushare_request_queue handle, uint64_t timeout_ns) {
  return capi::with(handle, [&](Queue& queue) { return queue.server->drain(timeout_ns); });
}

int32_t gpushare_request_queue_add_model(gpushare_request_queue handle, gpushare_session session,
                                         const gpushare_batcher_model* model, gpushare_batch_fn fn,
                                         void* user_data, void (*release)(void*), uint32_t* out_model) {
  return capi::with(handle, [&](Queue& queue) -> base::Status {
    if (fn == nullptr) return capi::null_argument("fn");
    if (out_model == nullptr) return capi::null_argument("out_model");
    const auto pin = capi::find(session);
    if (!pin) return capi::stale(session);
    if (!pin->belongs_to(*queue.runtime))
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("session '%s' is of another runtime than the request queue", pin->name().c_str())};
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::ModelSpec spec, capi::model_spec(model));
    auto function = std::make_shared<ModelFunction>(fn, user_data, release);
    GPUSHARE_ASSIGN_OR_RETURN(
        const uint32_t added,
        queue.server->add_model(
            spec, executor::run_as_iterations(
                      pin.shared(), [function](const sched::slo::Batch& batch,
                                               const std::shared_ptr<executor::Iteration>& iteration,
                                               executor::BatchReport& report) {
                        return run_batch(*function, batch, iteration, report);
                      })));
    function->own();
    queue.shown->begin(pin.shared());
    *out_model = added;
    return {};
  });
}

int32_t gpushare_request_queue_submit(gpushare_request_queue handle, const gpushare_request* request,
                                      gpushare_answer_fn answer, void* user_data) {
  return capi::with(handle, [&](Queue& queue) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::Request read, capi::request(request));
    executor::RequestServer::Answer take;
    if (answer != nullptr)
      take = [answer, user_data](const RequestOutcome& outcome) { answer_with(answer, user_data, outcome); };
    return queue.server->submit(read, std::move(take), user_data);
  });
}

int32_t gpushare_request_queue_cancel(gpushare_request_queue handle, uint64_t id) {
  return capi::with(handle, [&](Queue& queue) -> base::Status {
    if (queue.server->cancel(id)) return {};
    return {GPUSHARE_NOT_FOUND,
            base::format("request %llu is not waiting", static_cast<unsigned long long>(id))};
  });
}

int32_t gpushare_request_queue_observe(gpushare_request_queue handle, uint32_t model, uint32_t application,
                                       uint64_t execution_ns) {
  return capi::with(handle, [&](Queue& queue) -> base::Status {
    sched::slo::Request request;
    request.model = model;
    request.application = application;
    return queue.server->observe(request, execution_ns);
  });
}

int32_t gpushare_request_queue_observe_request(gpushare_request_queue handle, const gpushare_request* request,
                                               uint64_t execution_ns) {
  return capi::with(handle, [&](Queue& queue) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::Request read, capi::request(request));
    return queue.server->observe(read, execution_ns);
  });
}

int32_t gpushare_request_queue_observe_batch(gpushare_request_queue handle, uint32_t model, uint32_t k,
                                             uint64_t longest_ns, uint64_t device_ns) {
  return capi::with(handle, [&](Queue& queue) -> base::Status {
    queue.server->observe_batch(model, k, longest_ns, device_ns);
    return {};
  });
}

int32_t gpushare_request_queue_get_profile(gpushare_request_queue handle, uint32_t model,
                                           uint32_t application, gpushare_profile* out_profile) {
  return capi::with(handle, [&](Queue& queue) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::Profile profile, queue.server->profile(model, application));
    return capi::write_profile(profile, out_profile);
  });
}

int32_t gpushare_request_queue_get_info(gpushare_request_queue handle,
                                        gpushare_request_queue_info* out_info) {
  return capi::with(handle, [&](Queue& queue) -> base::Status {
    const executor::RequestServerStats stats = queue.server->stats();
    const auto dropped = [&stats](DropReason reason) { return stats.dropped[static_cast<size_t>(reason)]; };
    gpushare_request_queue_info out = GPUSHARE_REQUEST_QUEUE_INFO_INIT;
    out.accepted = stats.accepted;
    out.refused_full = stats.refused_full;
    out.refused_hopeless = stats.refused_hopeless;
    out.in_time = stats.in_time;
    out.late = stats.late;
    out.failed = stats.failed;
    out.expired = dropped(DropReason::kExpired);
    out.hopeless = dropped(DropReason::kHopeless);
    out.rejected = dropped(DropReason::kRejected);
    out.cancelled = dropped(DropReason::kCancelled);
    out.pending = stats.pending;
    out.held = stats.held;
    out.most_held = stats.most_held;
    out.batches = stats.batches;
    out.batched_requests = stats.batched_requests;
    out.busy_ns = stats.busy_ns;
    out.decisions = stats.decisions;
    out.decision_ns = stats.decision_ns;
    out.predicted_miss_rate = stats.signals.predicted_miss_rate;
    out.price_per_s = stats.signals.price_per_s;
    return capi::write_struct("out_info", out, out_info);
  });
}

}  // extern "C"
