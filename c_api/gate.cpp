// Gates before the launches of opportunistic sessions.
// SPDX-License-Identifier: Apache-2.0
#include "gpushare/gate.h"

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "executor/op_gate.hpp"

using namespace gpushare;

extern "C" {

int32_t gpushare_gate_open(gpushare_session session, gpushare_gate* out_gate) {
  return capi::with(session, [&](executor::Session& of) -> base::Status {
    if (out_gate == nullptr) return capi::null_argument("out_gate");
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<executor::LaunchGate> gate, of.gate());
    return capi::publish(std::move(gate), out_gate);
  });
}

int32_t gpushare_gate_release(gpushare_gate gate) {
  return capi::release(gate);
}

int32_t gpushare_gate_get_flag(gpushare_gate gate, const uint32_t** out_flag) {
  return capi::with(gate, [&](executor::LaunchGate& of) -> base::Status {
    if (out_flag == nullptr) return capi::null_argument("out_flag");
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
                  std::atomic<uint32_t>::is_always_lock_free);
    *out_flag = reinterpret_cast<const uint32_t*>(&of.closed());
    return {};
  });
}

int32_t gpushare_gate_enter(gpushare_gate gate, gpushare_stream stream, uint64_t estimated_ns,
                            uint64_t timeout_ns) {
  return capi::with(gate, [&](executor::LaunchGate& of) -> base::Status {
    if (stream == nullptr) return of.enter(nullptr, estimated_ns, timeout_ns);
    const auto pin = capi::find(stream);
    return pin ? of.enter(&*pin, estimated_ns, timeout_ns) : capi::stale(stream);
  });
}

int32_t gpushare_gate_done(gpushare_gate gate, uint64_t estimated_ns) {
  return capi::with(gate, [&](executor::LaunchGate& of) -> base::Status {
    of.done(estimated_ns);
    return {};
  });
}

int32_t gpushare_gate_get_info(gpushare_gate gate, gpushare_gate_info* out_info) {
  return capi::with(gate, [&](executor::LaunchGate& of) -> base::Status {
    const executor::GateInfo info = of.info();
    gpushare_gate_info out = GPUSHARE_GATE_INFO_INIT;
    out.open = info.open ? 1 : 0;
    out.share = info.share;
    out.in_flight_limit_ns = info.in_flight_limit_ns;
    out.in_flight_ns = info.in_flight_ns;
    out.entries = info.entries;
    out.waits = info.waits;
    out.waited_ns = info.waited_ns;
    out.guaranteed_id = info.guaranteed_id;
    if (info.guaranteed_id != 0) {
      out.alone_ns = info.estimate.alone_ns;
      out.iterations = info.estimate.iterations;
      out.learning = info.estimate.learning ? 1 : 0;
      out.slowdown = info.estimate.slowdown;
      out.slowdown_error = info.estimate.error;
      out.target_slowdown = info.estimate.target;
      out.credit = info.estimate.credit;
    }
    return capi::write_struct("out_info", out, out_info);
  });
}

int32_t gpushare_session_set_target_slowdown(gpushare_session session, double target_slowdown) {
  return capi::with(session, [&](executor::Session& of) { return of.set_target_slowdown(target_slowdown); });
}

int32_t gpushare_runtime_set_target_slowdown(gpushare_runtime runtime, double target_slowdown) {
  return capi::with(runtime, [&](executor::Runtime& of) { return of.set_target_slowdown(target_slowdown); });
}

}  // extern "C"
