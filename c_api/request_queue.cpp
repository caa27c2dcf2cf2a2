// The request queue: requests with deadlines in front of a runtime.
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "base/clock.hpp"
#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/serving.hpp"
#include "c_api/tags.hpp"
#include "executor/serving/iteration_batch.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;
using executor::RequestOutcome;
using sched::slo::DropReason;

namespace gpushare::capi {

struct RequestQueueObject {
  std::shared_ptr<executor::Runtime> runtime;
  std::unique_ptr<executor::RequestServer> server;
};

}  // namespace gpushare::capi

namespace {

using Queue = capi::RequestQueueObject;

// Runs `body` on the queue behind the handle.
template <class F>
int32_t with(gpushare_request_queue handle, F&& body) {
  return capi::guard([&]() -> base::Status {
    const auto pin = capi::RequestQueueHandles::instance().find(handle);
    if (!pin) return capi::stale("request queue");
    return body(*pin);
  });
}

// A model's function with its data, given back exactly once.
struct ModelFunction {
  gpushare_batch_fn fn = nullptr;
  void* user_data = nullptr;
  void (*release)(void*) = nullptr;
  bool owned = false;  // release is due
  ModelFunction() = default;
  ModelFunction(const ModelFunction&) = delete;
  ModelFunction& operator=(const ModelFunction&) = delete;
  ~ModelFunction() {
    if (!owned || release == nullptr) return;
    try {
      release(user_data);
    } catch (...) {  // NOLINT(bugprone-empty-catch): nobody is left to tell
    }
  }
};

base::Status run_batch(const ModelFunction& model, const sched::slo::Batch& batch,
                       const std::shared_ptr<executor::Iteration>& iteration, executor::BatchReport& report) {
  void* handle = capi::IterationHandles::instance().add(std::make_shared<capi::IterationObject>(iteration));
  if (handle == nullptr) return capi::too_many_handles("iterations");
  struct Remove {
    void* handle;
    ~Remove() { capi::IterationHandles::instance().remove(handle); }
  } remove{handle};
  gpushare_queued_batch seen{};
  seen.struct_size = sizeof seen;
  seen.model = batch.model;
  seen.count = batch.requests.size();
  seen.ids = batch.requests.data();
  seen.user_data = report.tags.data();
  seen.expected_ns = batch.expected_ns;
  seen.execution_ns = report.execution_ns.data();
  capi::forget_last_error();
  const int32_t code = model.fn(model.user_data, static_cast<gpushare_iteration>(handle), &seen);
  if (code == GPUSHARE_OK) return {};
  const base::Status& last = capi::last_error();
  if (last.code() == code) return last;
  return {code, base::format("the batch's function returned %s (%d)", base::status_name(code), code)};
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
    const auto pin = capi::RuntimeHandles::instance().find(runtime);
    if (!pin) return capi::stale("runtime");
    gpushare_batcher_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    executor::RequestServerOptions options;
    options.policy = capi::policy_name(read);
    GPUSHARE_ASSIGN_OR_RETURN(options.batcher, capi::batcher_options(read));
    auto queue = std::make_shared<Queue>();
    queue->runtime = pin.shared();
    GPUSHARE_ASSIGN_OR_RETURN(queue->server, executor::RequestServer::start(options));
    return capi::publish<capi::RequestQueueHandles>(std::move(queue), "request queues", out_queue);
  });
}

int32_t gpushare_request_queue_close(gpushare_request_queue handle) {
  return capi::guard([&]() -> base::Status {
    const auto pin = capi::RequestQueueHandles::instance().find(handle);
    if (!pin) return capi::stale("request queue");
    GPUSHARE_RETURN_IF_ERROR(pin->server->stop());
    return capi::RequestQueueHandles::instance().remove(handle) ? base::Status()
                                                                : capi::stale("request queue");
  });
}

int32_t gpushare_request_queue_drain(gpushare_request_queue handle, uint64_t timeout_ns) {
  return with(handle, [&](Queue& queue) { return queue.server->drain(timeout_ns); });
}

int32_t gpushare_request_queue_add_model(gpushare_request_queue handle, gpushare_session session,
                                         const gpushare_batcher_model* model, gpushare_batch_fn fn,
                                         void* user_data, void (*release)(void*), uint32_t* out_model) {
  return with(handle, [&](Queue& queue) -> base::Status {
    if (fn == nullptr) return capi::null_argument("fn");
    if (out_model == nullptr) return capi::null_argument("out_model");
    const auto pin = capi::SessionHandles::instance().find(session);
    if (!pin) return capi::stale("session");
    if (!pin->belongs_to(*queue.runtime))
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("session '%s' is of another runtime than the request queue", pin->name().c_str())};
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::ModelSpec spec, capi::model_spec(model));
    auto function = std::make_shared<ModelFunction>();
    function->fn = fn;
    function->user_data = user_data;
    function->release = release;
    GPUSHARE_ASSIGN_OR_RETURN(
        const uint32_t added,
        queue.server->add_model(
            spec, executor::run_as_iterations(
                      pin.shared(), [function](const sched::slo::Batch& batch,
                                               const std::shared_ptr<executor::Iteration>& iteration,
                                               executor::BatchReport& report) {
                        return run_batch(*function, batch, iteration, report);
                      })));
    function->owned = true;
    *out_model = added;
    return {};
  });
}

int32_t gpushare_request_queue_submit(gpushare_request_queue handle, const gpushare_request* request,
                                      gpushare_answer_fn answer, void* user_data) {
  return with(handle, [&](Queue& queue) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::Request read, capi::request(request));
    executor::RequestServer::Answer take;
    if (answer != nullptr)
      take = [answer, user_data](const RequestOutcome& outcome) { answer_with(answer, user_data, outcome); };
    return queue.server->submit(read, std::move(take), user_data);
  });
}

int32_t gpushare_request_queue_cancel(gpushare_request_queue handle, uint64_t id) {
  return with(handle, [&](Queue& queue) -> base::Status {
    if (queue.server->cancel(id)) return {};
    return {GPUSHARE_NOT_FOUND,
            base::format("request %llu is not waiting", static_cast<unsigned long long>(id))};
  });
}

int32_t gpushare_request_queue_observe(gpushare_request_queue handle, uint32_t model, uint32_t application,
                                       uint64_t execution_ns) {
  return with(handle, [&](Queue& queue) -> base::Status {
    queue.server->observe(model, application, execution_ns);
    return {};
  });
}

int32_t gpushare_request_queue_observe_batch(gpushare_request_queue handle, uint32_t model, uint32_t k,
                                             uint64_t longest_ns, uint64_t device_ns) {
  return with(handle, [&](Queue& queue) -> base::Status {
    queue.server->observe_batch(model, k, longest_ns, device_ns);
    return {};
  });
}

int32_t gpushare_request_queue_get_profile(gpushare_request_queue handle, uint32_t model,
                                           uint32_t application, gpushare_profile* out_profile) {
  return with(handle, [&](Queue& queue) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const sched::slo::Profile profile, queue.server->profile(model, application));
    return capi::write_profile(profile, out_profile);
  });
}

int32_t gpushare_request_queue_get_info(gpushare_request_queue handle,
                                        gpushare_request_queue_info* out_info) {
  return with(handle, [&](Queue& queue) -> base::Status {
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
    return capi::write_struct("out_info", out, out_info);
  });
}

}  // extern "C"
