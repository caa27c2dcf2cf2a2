// Version, status names, last error, log.
// SPDX-License-Identifier: Apache-2.0
#include "base/log.hpp"
#include "base/status.hpp"
#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "gpushare/gpushare.h"

namespace gpushare::capi {
namespace {

thread_local base::Status t_last_error;

const base::Status& out_of_memory_status() {
  // Made before it is needed: at that point nothing can be allocated any more.
  static const base::Status status(GPUSHARE_HOST_OUT_OF_MEMORY, "the process is out of host memory");
  return status;
}

}  // namespace

int32_t report(const base::Status& status) noexcept {
  if (!status.ok()) t_last_error = status;
  return status.code();
}

const base::Status& last_error() noexcept {
  return t_last_error;
}

void forget_last_error() noexcept {
  t_last_error = base::Status();
}

int32_t report_out_of_memory() noexcept {
  try {
    t_last_error = out_of_memory_status();
  } catch (...) {
    t_last_error = base::Status();
  }
  return GPUSHARE_HOST_OUT_OF_MEMORY;
}

}  // namespace gpushare::capi

using namespace gpushare;

extern "C" {

uint32_t gpushare_version(void) {
  return GPUSHARE_VERSION;
}

const char* gpushare_version_string(void) {
  return GPUSHARE_VERSION_STRING;
}

const char* gpushare_status_name(int32_t status) {
  return base::status_name(status);
}

const char* gpushare_last_error_message(void) {
  return capi::last_error().message().c_str();
}

int32_t gpushare_last_error(gpushare_error_info* out_info) {
  // Not through guard: reading the last error must not replace it.
  gpushare_error_info info = GPUSHARE_ERROR_INFO_INIT;
  info.status = capi::last_error().code();
  info.native_code = capi::last_error().native_code();
  info.message = capi::last_error().message().c_str();
  info.backend = capi::last_error().backend().c_str();
  try {
    return capi::write_struct("out_info", info, out_info).code();
  } catch (...) {
    return GPUSHARE_HOST_OUT_OF_MEMORY;
  }
}

int32_t gpushare_log_set(gpushare_log_fn fn, void* user_data, int32_t level) {
  return capi::guard([&]() -> base::Status {
    if (level < GPUSHARE_LOG_ERROR || level > GPUSHARE_LOG_DEBUG)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("level is %d, allowed are 0 (error) to 3 (debug)", level)};
    base::set_log_sink(fn, user_data, level);
    return {};
  });
}

}  // extern "C"
