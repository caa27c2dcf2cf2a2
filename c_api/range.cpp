// Elastic ranges.
// SPDX-License-Identifier: Apache-2.0
#include "executor/range.hpp"

#include <cmath>
#include <new>

#include "base/no_memory.hpp"
#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

extern "C" {

int32_t gpushare_range_open(gpushare_session session, const gpushare_range_params* params,
                            gpushare_range* out_range) {
  return capi::guard<true>([&]() -> base::Status {
    gpushare_range_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    if (out_range == nullptr) return capi::null_argument("out_range");
    if (!std::isfinite(read.price_ns_per_byte) || read.price_ns_per_byte < 0)
      return {
          GPUSHARE_INVALID_ARGUMENT,
          base::format("price_ns_per_byte is %g; it must be finite and not below 0", read.price_ns_per_byte)};
    const auto pin = capi::find(session);
    if (!pin) return capi::stale(session);
    executor::RangeOptions options;
    if (read.name != nullptr) options.name = read.name;
    options.reserved_bytes = read.reserved_bytes;
    options.answer_ns = read.answer_ns;
    options.price_ns_per_byte = read.price_ns_per_byte;
    if (read.give_back != nullptr)
      options.give_back = [fn = read.give_back, data = read.user_data](uint64_t bytes, uint64_t within_ns) {
        const base::CallbackCalls may_call;
        return fn(data, bytes, within_ns);
      };
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<executor::Range> range, pin->open_range(std::move(options)));
    return capi::publish(std::move(range), out_range);
  });
}

int32_t gpushare_range_close(gpushare_range range) {
  return capi::with(range, [&](executor::Range& of) -> base::Status {
    base::Status status = base::no_memory();
    try {
      status = of.close();
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): status says it
    }
    // Refused: the handle stays good. Closed before, without the memory to do all of it: the rest goes with the session, and giving
    // the handle back is all that is left to do.
    if (!status.ok() && !of.closed()) return status;
    return capi::table_of<gpushare_range>().remove(range) ? base::Status() : capi::stale(range);
  });
}

int32_t gpushare_range_commit(gpushare_range range, uint64_t offset_bytes, uint64_t bytes,
                              uint64_t timeout_ns) {
  return capi::with_cancellable(
      range, [&](executor::Range& of) { return of.commit(offset_bytes, bytes, timeout_ns); });
}

int32_t gpushare_range_decommit(gpushare_range range, uint64_t offset_bytes, uint64_t bytes) {
  return capi::with(range, [&](executor::Range& of) { return of.decommit(offset_bytes, bytes); });
}

int32_t gpushare_range_get_info(gpushare_range range, gpushare_range_info* out_info) {
  return capi::with(range, [&](executor::Range& of) -> base::Status {
    const executor::RangeInfo info = of.info();
    gpushare_range_info out = GPUSHARE_RANGE_INFO_INIT;
    out.silent = info.silent ? 1 : 0;
    out.address = info.address;
    out.reserved_bytes = info.reserved_bytes;
    out.granule_bytes = info.granule_bytes;
    out.committed_bytes = info.committed_bytes;
    out.peak_bytes = info.peak_bytes;
    out.requests = info.requests;
    out.requested_bytes = info.requested_bytes;
    out.silences = info.silences;
    out.waits = info.waits;
    out.waited_ns = info.waited_ns;
    out.longest_wait_ns = info.longest_wait_ns;
    out.unanswered_by = info.unanswered_by;
    return capi::write_struct("out_info", out, out_info);
  });
}

}  // extern "C"
