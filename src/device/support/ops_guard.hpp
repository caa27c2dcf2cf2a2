// support: what the built-in backends share: the frame of an op and its last error, option strings, scripted
// faults, and the bookkeeping of device memory. May be called from src/device/{host,sim,cuda} only.
//
// ops_guard.hpp: the frame around the body of every backend op.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "base/cancel.hpp"
#include "base/status.hpp"
#include "base/thread_exit.hpp"
#include "gpushare/backend.h"

namespace gpushare::device {

// Copies `status` into the caller's struct, at most as many bytes as it says. Returns a status, as the op
// last_error does.
int32_t write_backend_error(const base::Status& status, gpushare_backend_error* out_error);

// Keeps a failure in `last_error`. Returns its code.
int32_t keep_failure(base::ThreadStatus& last_error, base::Status status) noexcept;
// Keeps the exception that is being handled, which is not a ForcedUnwind. Returns its code.
int32_t keep_exception(base::ThreadStatus& last_error, const char* op) noexcept;

// Runs `body` (returning base::Status) and keeps a failure in `last_error`, the backend's thread-local slot.
// No exception leaves it: bad_alloc becomes HOST_OUT_OF_MEMORY, any other INTERNAL. not_ready() is an
// answer and is not kept.
template <class Body>
GPUSHARE_CATCHES_FORCED_UNWIND int32_t guard_op(base::ThreadStatus& last_error, const char* op, Body&& body) {
  try {
    base::Status status = body();
    return status.ok() ? GPUSHARE_OK : keep_failure(last_error, std::move(status));
  } catch (const base::ForcedUnwind&) {
    throw;  // a host function that a simulated device runs on the thread that waits for it ends the thread
  } catch (...) {
    return keep_exception(last_error, op);
  }
}

// The shared NOT_READY status: queries are polled, so answering must not allocate.
const base::Status& not_ready();

// Errors: CALLBACK_FAILED if it throws. It may end its thread (base::ForcedUnwind).
base::Status call_host_function(gpushare_host_function function, void* user_data);

// INVALID_HANDLE / INVALID_ARGUMENT for a null object or output.
base::Status null_handle(const char* what);
base::Status null_output();

}  // namespace gpushare::device
