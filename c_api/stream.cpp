// Streams.
// SPDX-License-Identifier: Apache-2.0
#include "base/waits.hpp"
#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "executor/runtime.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

extern "C" {

int32_t gpushare_stream_create(gpushare_runtime runtime, int32_t priority, gpushare_stream* out_stream) {
  return capi::guard([&]() -> base::Status {
    if (out_stream == nullptr) return capi::null_argument("out_stream");
    const auto pin = capi::find(runtime);
    if (!pin) return capi::stale(runtime);
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<executor::Stream> stream, pin->create_stream(priority));
    return capi::publish(std::move(stream), out_stream);
  });
}

int32_t gpushare_stream_release(gpushare_stream stream) {
  return capi::with(stream, [&](executor::Stream& of) -> base::Status {
    if (of.is_lane())
      return {GPUSHARE_INVALID_ARGUMENT, "a lane's stream belongs to its lane; it is not released"};
    if (base::may_not_wait()) return of.release();  // refused: the handle stays good
    if (!capi::table_of<gpushare_stream>().remove(stream)) return capi::stale(stream);
    const base::Status status = of.release();
    // Gone with its runtime: the handle was all that was left.
    return status.code() == GPUSHARE_INVALID_STATE ? base::Status() : status;
  });
}

int32_t gpushare_stream_get_native(gpushare_stream stream, void** out_native) {
  return capi::with(stream, [&](executor::Stream& of) -> base::Status {
    if (out_native == nullptr) return capi::null_argument("out_native");
    GPUSHARE_ASSIGN_OR_RETURN(*out_native, of.native());
    return {};
  });
}

int32_t gpushare_stream_synchronize(gpushare_stream stream) {
  return capi::with(stream, [](executor::Stream& of) { return of.synchronize(); });
}

int32_t gpushare_stream_launch_host(gpushare_stream stream, gpushare_host_function fn, void* user_data) {
  return capi::with(stream, [&](executor::Stream& of) -> base::Status {
    if (fn == nullptr) return capi::null_argument("fn");
    return of.launch_host(fn, user_data);
  });
}

int32_t gpushare_stream_copy(gpushare_stream stream, uint64_t destination, uint64_t source, uint64_t bytes,
                             uint32_t kind) {
  return capi::with(stream, [&](executor::Stream& of) -> base::Status {
    if (kind > GPUSHARE_COPY_DEVICE_TO_DEVICE)
      return {
          GPUSHARE_INVALID_ARGUMENT,
          base::format("kind is %u, allowed are 0 (host to device), 1 (device to host), 2 (device to device)",
                       kind)};
    return of.copy(destination, source, bytes, kind);
  });
}

int32_t gpushare_stream_fill(gpushare_stream stream, gpushare_device_address address, uint8_t value,
                             uint64_t bytes) {
  return capi::with(stream, [&](executor::Stream& of) { return of.fill(address, value, bytes); });
}

int32_t gpushare_stream_work(gpushare_stream stream, const gpushare_backend_work* work) {
  return capi::with(stream, [&](executor::Stream& of) -> base::Status {
    gpushare_backend_work read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("work", work, &read));
    read.struct_size = sizeof read;
    return of.work(read);
  });
}

}  // extern "C"
