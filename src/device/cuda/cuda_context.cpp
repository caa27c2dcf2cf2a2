// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/cuda_context.hpp"

#include <memory>

#include "base/log.hpp"
#include "base/thread_local.hpp"

namespace gpushare::device::cuda {
namespace {

GPUSHARE_THREAD_LOCAL int t_host_functions = 0;

}  // namespace

base::Result<std::unique_ptr<Context>> Context::open(const Driver& driver, uint32_t index, uint64_t given) {
  int count = 0;
  GPUSHARE_RETURN_IF_ERROR(to_status(driver.cuDeviceGetCount(&count), "cuDeviceGetCount"));
  if (index >= static_cast<uint32_t>(count)) {
    return base::Status(GPUSHARE_UNAVAILABLE,
                        base::format("the CUDA driver shows %d device%s; asked for index %u", count,
                                     count == 1 ? "" : "s", index));
  }
  api::CUdevice device = 0;
  GPUSHARE_RETURN_IF_ERROR(to_status(driver.cuDeviceGet(&device, static_cast<int>(index)), "cuDeviceGet"));
  if (given == 0) {
    api::CUcontext primary = nullptr;
    GPUSHARE_RETURN_IF_ERROR(
        to_status(driver.cuDevicePrimaryCtxRetain(&primary, device), "cuDevicePrimaryCtxRetain"));
    return std::unique_ptr<Context>(new Context(driver, index, device, primary, /*primary=*/true));
  }
  const auto borrowed = reinterpret_cast<api::CUcontext>(static_cast<uintptr_t>(given));
  std::unique_ptr<Context> context(new Context(driver, index, device, borrowed, /*primary=*/false));
  api::CUdevice owner = -1;
  {
    ContextScope scope(*context);
    GPUSHARE_RETURN_IF_ERROR(scope.status().with_context("option context"));
    GPUSHARE_RETURN_IF_ERROR(context->status(driver.cuCtxGetDevice(&owner), "cuCtxGetDevice"));
  }
  if (owner != device) {
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        base::format("option context: the context belongs to CUDA device %d, not to cuda:%u", owner, index));
  }
  return context;
}

Context::~Context() {
  // A failure here has nobody to tell: the device is closing. On a lost context the release still drops our
  // count, so that the process may reset the device and go on.
  if (primary_) (void)driver_.cuDevicePrimaryCtxRelease(device_);
}

base::Status Context::check_lost() const {
  if (!lost()) return {};
  base::MutexLock lock(mutex_);
  return cause_;
}

base::Status Context::status(api::CUresult result, const char* call) {
  if (result == api::CUDA_SUCCESS) return {};
  if (!is_sticky(result)) return to_status(result, call);
  // The driver shuts down before the process's static objects go: who closes a device there has done nothing wrong.
  const bool at_exit = result == api::CUDA_ERROR_DEINITIALIZED;
  bool first = false;
  base::Status cause;
  {
    base::MutexLock lock(mutex_);
    first = cause_.ok();
    if (first) {
      cause_ = base::Status(
          GPUSHARE_DEVICE_LOST,
          at_exit
              ? base::format(
                    "cuda:%u: the CUDA driver has shut down, since the process ends (%s reported %s); "
                    "close the runtime before main returns",
                    index_, call, result_name(result))
              : base::format(
                    "the context of cuda:%u is lost: %s reported %s (%d), which an earlier kernel or copy "
                    "may have caused; close the runtime and restart the process, or reset the device",
                    index_, call, result_name(result), result),
          result);
      lost_.store(true, std::memory_order_release);
    }
    cause = cause_;
  }
  if (first && !at_exit) base::log(base::kError, cause.message());
  return cause;
}

ContextScope::ContextScope(Context& context) : context_(context) {
  if (context.lost()) {
    status_ = context.check_lost();
    return;
  }
  if (t_host_functions > 0) {
    status_ = base::Status(
        GPUSHARE_INVALID_STATE,
        "called from a host function of a stream: CUDA forbids driver calls there; hand the work to "
        "another thread");
    return;
  }
  const Driver& driver = context.driver();
  api::CUcontext current = nullptr;
  status_ = context.status(driver.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (!status_.ok() || current == context.handle()) return;
  status_ = context.status(driver.cuCtxPushCurrent(context.handle()), "cuCtxPushCurrent");
  pushed_ = status_.ok();
}

ContextScope::~ContextScope() {
  if (!pushed_) return;
  api::CUcontext popped = nullptr;
  (void)context_.driver().cuCtxPopCurrent(&popped);
}

HostFunctionScope::HostFunctionScope() {
  ++t_host_functions;
}
HostFunctionScope::~HostFunctionScope() {
  --t_host_functions;
}

}  // namespace gpushare::device::cuda
