// Sessions.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "base/no_memory.hpp"
#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "executor/runtime.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

namespace {

base::Status check_weight(double weight) {
  if (std::isfinite(weight) && weight > 0) return {};
  return {GPUSHARE_INVALID_ARGUMENT, base::format("weight is %g; it must be finite and above 0", weight)};
}

}  // namespace

base::Result<executor::SessionOptions> capi::session_options(const gpushare_session_params& params) {
  if (params.session_class > GPUSHARE_CLASS_OPPORTUNISTIC)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("session_class is %u, allowed are 0 (guaranteed) and 1 (opportunistic)",
                                     params.session_class));
  constexpr uint32_t kKnown = GPUSHARE_SESSION_ALLOW_QUEUEING | GPUSHARE_SESSION_ALLOW_SPILL |
                              GPUSHARE_SESSION_MAY_UPGRADE | GPUSHARE_SESSION_FAIL_ON_ERROR;
  if ((params.flags & ~kKnown) != 0)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("flags is 0x%x, known bits are 0x%x", params.flags, kKnown));
  executor::SessionOptions options;
  if (params.weight != 0) {
    GPUSHARE_RETURN_IF_ERROR(check_weight(params.weight));
    options.weight = params.weight;
  }
  if (params.name != nullptr) options.name = params.name;
  options.cls = static_cast<sched::SessionClass>(params.session_class);
  options.persistent_bytes = params.persistent_bytes;
  options.ephemeral_bytes = params.ephemeral_bytes;
  options.remaining_ns = params.remaining_ns;
  options.iterations_total = params.iterations_total;
  options.quota_bytes = params.quota_bytes;
  options.priority = params.priority;
  options.allow_queueing = (params.flags & GPUSHARE_SESSION_ALLOW_QUEUEING) != 0;
  options.allow_spill = (params.flags & GPUSHARE_SESSION_ALLOW_SPILL) != 0;
  options.plan_iterations = params.plan_iterations != 0;
  options.compute_units = params.compute_units;
  options.least_bytes = params.least_bytes;
  options.may_upgrade = (params.flags & GPUSHARE_SESSION_MAY_UPGRADE) != 0;
  options.fail_on_error = (params.flags & GPUSHARE_SESSION_FAIL_ON_ERROR) != 0;
  return options;
}

extern "C" {

int32_t gpushare_session_open(gpushare_runtime runtime, const gpushare_session_params* params,
                              gpushare_session* out_session) {
  return capi::guard([&]() -> base::Status {
    if (out_session == nullptr) return capi::null_argument("out_session");
    const auto pin = capi::find(runtime);
    if (!pin) return capi::stale(runtime);
    gpushare_session_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    GPUSHARE_ASSIGN_OR_RETURN(const executor::SessionOptions options, capi::session_options(read));
    GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<executor::Session> session, pin->open_session(options));
    // From here on the session must not stay open without a handle.
    base::Status status = base::no_memory();
    try {
      status = capi::publish(session, out_session);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): status says it
    }
    if (!status.ok()) (void)session->close();
    return status;
  });
}

int32_t gpushare_session_close(gpushare_session session) {
  return capi::with_cancellable(session, [&](executor::Session& of) -> base::Status {
    base::Status status = of.close();
    // Refused (from a callback, or inside its own iteration): the handle stays good. Closed with its runtime: giving the handle
    // back is all that is left to do.
    if (!status.ok() && !of.closed()) return status;
    const bool removed = capi::table_of<gpushare_session>().remove(session);
    return status.ok() || removed ? base::Status() : capi::stale(session);
  });
}

int32_t gpushare_session_cancel(gpushare_session session) {
  return capi::with(session, [&](executor::Session& of) { return of.cancel(); });
}

int32_t gpushare_session_wait_admitted(gpushare_session session, uint64_t timeout_ns) {
  return capi::with_cancellable(session, [&](executor::Session& of) { return of.wait_admitted(timeout_ns); });
}

int32_t gpushare_session_explain_wait(gpushare_session session, char* out_text, uint64_t text_bytes) {
  return capi::with(session, [&](executor::Session& of) -> base::Status {
    if (out_text == nullptr) return capi::null_argument("out_text");
    if (text_bytes == 0) return {GPUSHARE_INVALID_ARGUMENT, "text_bytes is 0: there is no room for the text"};
    const std::string text = of.explain_wait();
    const size_t length = std::min<uint64_t>(text.size(), text_bytes - 1);
    std::memcpy(out_text, text.data(), length);
    out_text[length] = '\0';
    return {};
  });
}

int32_t gpushare_session_get_info(gpushare_session session, gpushare_session_info* out_info) {
  return capi::with(session, [&](executor::Session& of) -> base::Status {
    const executor::SessionInfo info = of.info();
    gpushare_session_info out = GPUSHARE_SESSION_INFO_INIT;
    out.state = static_cast<uint32_t>(info.state);
    out.session_id = info.session_id;
    out.status = info.status.code();
    out.lane = info.lane;
    out.persistent_bytes = info.persistent_bytes;
    out.ephemeral_bytes = info.ephemeral_bytes;
    out.peak_bytes = info.peak_bytes;
    out.promised_persistent_bytes = info.promised_persistent_bytes;
    out.promised_ephemeral_bytes = info.promised_ephemeral_bytes;
    out.promoted_bytes = info.promoted_bytes;
    out.spilled_bytes = info.spilled_bytes;
    out.iterations_done = info.iterations_done;
    out.iterations_queued = info.iterations_queued;
    out.service_ns = info.service_ns;
    out.queued_ns = info.queued_ns;
    out.waited_ns = info.waited_ns;
    out.remaining_ns = info.remaining_ns;
    out.planned_iterations = info.planned_iterations;
    out.compute_units = info.compute_units;
    out.quota_bytes = info.quota_bytes;
    out.effective_quota_bytes = info.effective_quota_bytes;
    out.home_bytes = info.home_bytes;
    out.limit_bytes = info.limit_bytes;
    out.session_class = static_cast<uint32_t>(info.cls);
    return capi::write_struct("out_info", out, out_info);
  });
}

int32_t gpushare_session_set_priority(gpushare_session session, int32_t priority) {
  return capi::with(session, [&](executor::Session& of) { return of.set_priority(priority); });
}

int32_t gpushare_session_set_weight(gpushare_session session, double weight) {
  return capi::with(session, [&](executor::Session& of) -> base::Status {
    GPUSHARE_RETURN_IF_ERROR(check_weight(weight));
    return of.set_weight(weight);
  });
}

int32_t gpushare_session_set_quota(gpushare_session session, uint64_t quota_bytes) {
  return capi::with(session, [&](executor::Session& of) { return of.set_quota(quota_bytes); });
}

int32_t gpushare_session_set_remaining(gpushare_session session, uint64_t remaining_ns) {
  return capi::with(session, [&](executor::Session& of) { return of.set_remaining(remaining_ns); });
}

}  // extern "C"
