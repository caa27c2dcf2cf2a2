// cuda_context.hpp: the CUDA context that a device works in.
//
// Every op that calls the driver does so inside a ContextScope. So when the op returns, the caller's current context is
// as it was, on any thread and beside any other user of CUDA in the process. When our context is current already, which
// is usual in programs that use the CUDA runtime, the scope costs one read of the driver's thread-local state.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "device/cuda/driver.hpp"

namespace gpushare::device::cuda {

// A retained or borrowed context, and the first cause of its loss. Thread-safe.
class Context {
 public:
  // Retains the primary context of `device`, or borrows `given` (which must outlive this and belong to
  // `device`).
  static base::Result<std::unique_ptr<Context>> open(const Driver& driver, uint32_t index, uint64_t given);
  // Releases the primary context.
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver() const { return driver_; }
  api::CUdevice device() const { return device_; }
  api::CUcontext handle() const { return context_; }

  // DEVICE_LOST with the first cause, once the context is poisoned.
  base::Status check_lost() const;
  bool lost() const { return lost_.load(std::memory_order_acquire); }

  // The status of a driver call, as to_status(). A sticky result loses the device: the loss is logged once, and from
  // then on ops return DEVICE_LOST without calling the driver.
  base::Status status(api::CUresult result, const char* call);

 private:
  Context(const Driver& driver, uint32_t index, api::CUdevice device, api::CUcontext context, bool primary)
      : driver_(driver), index_(index), device_(device), context_(context), primary_(primary) {}
  const Driver& driver_;
  const uint32_t index_;
  const api::CUdevice device_;
  const api::CUcontext context_;
  const bool primary_;
  std::atomic<bool> lost_{false};
  mutable base::Mutex mutex_;
  base::Status cause_ GPUSHARE_GUARDED_BY(mutex_);
};

// Makes the context current for the enclosing block. Check status() before calling the driver.
class ContextScope {
 public:
  explicit ContextScope(Context& context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  // Errors: DEVICE_LOST; INVALID_STATE inside a host function of a stream, where CUDA forbids driver calls.
  const base::Status& status() const { return status_; }

 private:
  Context& context_;
  bool pushed_ = false;
  base::Status status_;
};

// Lets this thread allocate, free, map, query and wait while some stream captures a graph: such calls are not
// captured, they happen at once, exactly as outside a capture. Without it the driver refuses them and ends
// the capture under way.
class CaptureRelaxed {
 public:
  explicit CaptureRelaxed(const Driver& driver) : driver_(driver) {
    if (driver_.has_capture())
      exchanged_ = driver_.cuThreadExchangeStreamCaptureMode(&mode_) == api::CUDA_SUCCESS;
  }
  ~CaptureRelaxed() {
    if (exchanged_) (void)driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  CaptureRelaxed(const CaptureRelaxed&) = delete;
  CaptureRelaxed& operator=(const CaptureRelaxed&) = delete;

 private:
  const Driver& driver_;
  int mode_ = api::CU_STREAM_CAPTURE_MODE_RELAXED;
  bool exchanged_ = false;
};

// Marks the calling thread as inside a host function of a stream.
class HostFunctionScope {
 public:
  HostFunctionScope();
  ~HostFunctionScope();
};

}  // namespace gpushare::device::cuda

// Enters `context` for the rest of the block or returns why it cannot.
#define GPUSHARE_ENTER_CONTEXT(context)                   \
  ::gpushare::device::cuda::ContextScope scope_(context); \
  if (!scope_.status().ok()) return scope_.status()
