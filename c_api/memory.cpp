// Blocks by address and by stream.
// SPDX-License-Identifier: Apache-2.0
#include "c_api/abi.hpp"
#include "c_api/door.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "executor/runtime.hpp"
#include "gpushare/bulk.h"
#include "gpushare/gpushare.h"

using namespace gpushare;

namespace {

[[gnu::noinline]] int32_t free_otherwise(gpushare_runtime runtime, gpushare_device_address address) {
  if (capi::free_at_other_doors(runtime, address)) return GPUSHARE_OK;
  return capi::with(runtime, [&](executor::Runtime& of) { return of.free(address); });
}

// All but the first `done` of the addresses.
[[gnu::noinline]] int32_t free_rest_by_guard(gpushare_runtime runtime, uint64_t count,
                                             const gpushare_device_address* addresses, uint64_t done,
                                             uint64_t* out_freed) {
  uint64_t freed = done;
  const int32_t status = capi::with(runtime, [&](executor::Runtime& of) -> base::Status {
    if (addresses == nullptr && count > 0) return capi::null_argument("addresses");
    base::Status first;
    for (; done < count; ++done) {
      base::Status each = of.free(addresses[done]);
      if (each.ok())
        ++freed;
      else if (first.ok())
        first = std::move(each);
    }
    return first;
  });
  if (out_freed != nullptr) *out_freed = freed;
  return status;
}

[[gnu::noinline]] int32_t alloc_otherwise(gpushare_session session, uint32_t kind, uint64_t bytes,
                                          uint64_t alignment, gpushare_device_address* out_address) {
  if (kind <= GPUSHARE_KIND_FRAMEWORK &&
      capi::alloc_at_other_door(session, static_cast<memory::Kind>(kind), bytes, alignment, out_address))
    return GPUSHARE_OK;
  return capi::guard([&]() -> base::Status {
    if (out_address == nullptr) return capi::null_argument("out_address");
    const auto pin = capi::find(session);
    if (!pin) return capi::stale(session);
    if (kind > GPUSHARE_KIND_FRAMEWORK)
      return {GPUSHARE_INVALID_ARGUMENT, base::format("kind is %u, allowed are 0 (model) and 1 (framework); "
                                                      "ephemeral blocks come from gpushare_iteration_alloc",
                                                      kind)};
    GPUSHARE_ASSIGN_OR_RETURN(*out_address, pin->alloc(static_cast<memory::Kind>(kind), bytes, alignment));
    capi::remember(session, pin);
    return {};
  });
}

}  // namespace

extern "C" {

int32_t gpushare_session_alloc(gpushare_session session, uint32_t kind, uint64_t bytes,
                               uint64_t alignment_bytes, gpushare_device_address* out_address) {
  if (kind <= GPUSHARE_KIND_FRAMEWORK &&
      capi::alloc_at_door(session, static_cast<memory::Kind>(kind), bytes, alignment_bytes, out_address))
    return GPUSHARE_OK;
  return alloc_otherwise(session, kind, bytes, alignment_bytes, out_address);
}

int32_t gpushare_memory_alloc(gpushare_runtime runtime, gpushare_stream stream, uint32_t kind, uint64_t bytes,
                              uint64_t alignment_bytes, gpushare_device_address* out_address) {
  return capi::guard([&]() -> base::Status {
    if (out_address == nullptr) return capi::null_argument("out_address");
    const auto pin = capi::find(runtime);
    if (!pin) return capi::stale(runtime);
    if (kind > GPUSHARE_KIND_EPHEMERAL)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("kind is %u, allowed are 0 (model), 1 (framework), 2 (ephemeral)", kind)};
    const auto owner = capi::find(stream);
    if (stream != nullptr && !owner) return capi::stale(stream);
    GPUSHARE_ASSIGN_OR_RETURN(
        *out_address,
        pin->alloc(owner ? &*owner : nullptr, static_cast<memory::Kind>(kind), bytes, alignment_bytes));
    return {};
  });
}

int32_t gpushare_memory_free(gpushare_runtime runtime, gpushare_device_address address) {
  if (capi::free_at_door(runtime, address)) return GPUSHARE_OK;
  return free_otherwise(runtime, address);
}

int32_t gpushare_memory_free_many(gpushare_runtime runtime, uint64_t count,
                                  const gpushare_device_address* addresses, uint64_t* out_freed) {
  const uint64_t done = addresses == nullptr ? 0 : capi::free_many_at_door(runtime, addresses, count);
  if (done < count || count == 0) return free_rest_by_guard(runtime, count, addresses, done, out_freed);
  if (out_freed != nullptr) *out_freed = done;
  return GPUSHARE_OK;
}

int32_t gpushare_memory_record_use(gpushare_runtime runtime, gpushare_device_address address,
                                   gpushare_stream stream) {
  return capi::with(runtime, [&](executor::Runtime& of) -> base::Status {
    const auto on = capi::find(stream);
    if (!on) return capi::stale(stream);
    return of.record_use(address, *on);
  });
}

int32_t gpushare_memory_get_info(gpushare_runtime runtime, gpushare_device_address address,
                                 gpushare_block_info* out_info) {
  return capi::with(runtime, [&](executor::Runtime& of) -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const memory::BlockInfo block, of.find(address));
    gpushare_block_info out = GPUSHARE_BLOCK_INFO_INIT;
    out.kind = static_cast<uint32_t>(block.kind);
    out.address = block.address;
    out.bytes = block.bytes;
    out.session_id = block.session;
    out.lane = block.lane;
    out.promoted = block.promoted ? 1 : 0;
    out.spilled = block.spilled ? 1 : 0;
    return capi::write_struct("out_info", out, out_info);
  });
}

}  // extern "C"
