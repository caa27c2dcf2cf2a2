// The step queue: continuous batching in a session.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "c_api/user_function.hpp"
#include "executor/serving/step_server.hpp"

using namespace gpushare;
using executor::RunningStep;
using sched::slo::StepEvent;
using sched::slo::StepMember;

namespace gpushare::capi {

struct StepQueueObject {
  std::unique_ptr<executor::StepServer> server;
};

}  // namespace gpushare::capi

namespace {

using StepQueue = capi::StepQueueObject;

// The step function and the arrays that it sees, which are good until the device has finished the step.
struct StepBody {
  StepBody(gpushare_step_fn fn, void* user_data, void (*release)(void*)) : function(fn, user_data, release) {}
  capi::UserFunction<gpushare_step_fn> function;
  std::vector<gpushare_step_member> members, left;
};

base::Status run_step(StepBody& body, const std::shared_ptr<executor::Iteration>& iteration,
                      RunningStep& step) {
  body.members.clear();
  body.left.clear();
  for (size_t i = 0; i < step.members.size(); ++i) {
    const StepMember& each = step.members[i];
    body.members.push_back(
        {each.id, step.member_tags[i], each.prefill, each.before, each.total, each.tokens});
  }
  for (size_t i = 0; i < step.left.size(); ++i)
    body.left.push_back({step.left[i], step.left_tags[i], 0, 0, 0, 0});
  gpushare_step seen{};
  seen.struct_size = sizeof seen;
  seen.count = body.members.size();
  seen.members = body.members.data();
  seen.left_count = body.left.size();
  seen.left = body.left.data();
  seen.expected_ns = step.expected_ns;
  seen.done = step.done.data();
  seen.statuses = step.statuses.data();
  seen.bytes = step.bytes.data();
  return body.function.run(iteration, "step", &seen);
}

void tell(gpushare_step_answer_fn answer, void* user_data, const StepEvent& event) {
  gpushare_step_answer out{};
  out.struct_size = sizeof out;
  out.status = event.status;
  out.id = event.id;
  out.tokens = event.tokens;
  out.ended = event.ended ? 1 : 0;
  out.late = event.late ? 1 : 0;
  out.at_ns = event.at_ns;
  out.due_ns = event.due_ns;
  const base::CallbackCalls may_call;
  answer(user_data, &out);
}

sched::slo::StepOptions step_options(const gpushare_step_queue_params& params) {
  sched::slo::StepOptions options;
  if (params.max_members != 0) options.max_members = params.max_members;
  if (params.max_pending != 0) options.max_pending = params.max_pending;
  options.max_prefill_tokens = params.max_prefill_tokens;
  options.memory_bytes = params.memory_bytes;
  options.step_ns = params.step_ns;
  options.decode_ns = params.decode_ns;
  options.prefill_ns = params.prefill_ns;
  options.read_ns = params.read_ns;
  return options;
}

}  // namespace

extern "C" {

int32_t gpushare_step_queue_create(gpushare_session session, const gpushare_step_queue_params* params,
                                   gpushare_step_fn fn, void* user_data, void (*release)(void*),
                                   gpushare_step_queue* out_queue) {
  return capi::guard([&]() -> base::Status {
    if (fn == nullptr) return capi::null_argument("fn");
    if (out_queue == nullptr) return capi::null_argument("out_queue");
    const auto pin = capi::find(session);
    if (!pin) return capi::stale(session);
    gpushare_step_queue_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    auto body = std::make_shared<StepBody>(fn, user_data, release);
    auto queue = std::make_shared<StepQueue>();
    GPUSHARE_ASSIGN_OR_RETURN(
        queue->server,
        executor::StepServer::start(read.policy == nullptr ? "gpushare" : read.policy, step_options(read),
                                    pin.shared(),
                                    [body](const std::shared_ptr<executor::Iteration>& iteration,
                                           RunningStep& step) { return run_step(*body, iteration, step); }));
    GPUSHARE_RETURN_IF_ERROR(capi::publish(std::move(queue), out_queue));
    body->function.own();
    return {};
  });
}

int32_t gpushare_step_queue_close(gpushare_step_queue handle) {
  return capi::with(handle, [&](StepQueue& queue) -> base::Status {
    GPUSHARE_RETURN_IF_ERROR(queue.server->stop());
    return capi::table_of<gpushare_step_queue>().remove(handle) ? base::Status() : capi::stale(handle);
  });
}

int32_t gpushare_step_queue_drain(gpushare_step_queue handle, uint64_t timeout_ns) {
  return capi::with(handle, [&](StepQueue& queue) { return queue.server->drain(timeout_ns); });
}

int32_t gpushare_step_queue_submit(gpushare_step_queue handle, const gpushare_step_request* request,
                                   gpushare_step_answer_fn answer, void* user_data) {
  return capi::with(handle, [&](StepQueue& queue) -> base::Status {
    gpushare_step_request read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("request", request, &read));
    sched::slo::StepRequest made;
    made.id = read.id;
    made.arrival_ns = read.arrival_ns;
    made.prompt_tokens = read.prompt_tokens;
    made.expected_tokens = read.expected_tokens;
    made.start_bytes = read.start_bytes;
    made.step_bytes = read.step_bytes;
    made.first_deadline_ns = read.first_deadline_ns;
    made.token_ns = read.token_ns;
    made.cost = read.cost;
    executor::StepServer::Answer take;
    if (answer != nullptr)
      take = [answer, user_data](const StepEvent& event) { tell(answer, user_data, event); };
    return queue.server->submit(made, std::move(take), user_data);
  });
}

int32_t gpushare_step_queue_cancel(gpushare_step_queue handle, uint64_t id) {
  return capi::with(handle, [&](StepQueue& queue) -> base::Status {
    if (queue.server->cancel(id)) return {};
    return {GPUSHARE_NOT_FOUND,
            base::format("request %llu is not held", static_cast<unsigned long long>(id))};
  });
}

int32_t gpushare_step_queue_set_memory(gpushare_step_queue handle, uint64_t bytes) {
  return capi::with(handle, [&](StepQueue& queue) { return queue.server->set_memory(bytes); });
}

int32_t gpushare_step_queue_get_info(gpushare_step_queue handle, gpushare_step_queue_info* out_info) {
  return capi::with(handle, [&](StepQueue& queue) -> base::Status {
    const executor::StepServer::Stats stats = queue.server->stats();
    gpushare_step_queue_info out = GPUSHARE_STEP_QUEUE_INFO_INIT;
    out.accepted = stats.accepted;
    out.refused = stats.refused;
    out.in_time = stats.in_time;
    out.late = stats.late;
    out.failed = stats.failed;
    out.expired = stats.expired;
    out.cancelled = stats.cancelled;
    out.pending = stats.pending;
    out.members = stats.members;
    out.held = stats.held;
    out.bytes = stats.bytes;
    out.returned = stats.returned;
    out.steps = stats.steps;
    out.tokens = stats.tokens;
    out.prefill_tokens = stats.prefilled_tokens;
    out.lost_tokens = stats.lost_tokens;
    out.busy_ns = stats.busy_ns;
    out.step_ns = stats.step_ns;
    out.decode_ns = stats.decode_ns;
    out.prefill_ns = stats.prefill_ns;
    out.read_ns = stats.read_ns;
    return capi::write_struct("out_info", out, out_info);
  });
}

}  // extern "C"
