// SPDX-License-Identifier: Apache-2.0
#include "device/support/ops_guard.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>

namespace gpushare::device {

int32_t write_backend_error(const base::Status& status, gpushare_backend_error* out_error) {
  if (out_error == nullptr || out_error->struct_size < sizeof(uint32_t)) return GPUSHARE_INVALID_ARGUMENT;
  gpushare_backend_error error{};
  error.struct_size = out_error->struct_size;
  error.status = status.code();
  error.native_code = status.native_code();
  const size_t length = std::min(status.message().size(), sizeof(error.message) - 1);
  std::memcpy(error.message, status.message().data(), length);
  std::memcpy(out_error, &error, std::min<size_t>(out_error->struct_size, sizeof(error)));
  return GPUSHARE_OK;
}

int32_t keep_failure(base::ThreadStatus& last_error, base::Status status) noexcept {
  const int32_t code = status.code();
  const bool is_query = code == GPUSHARE_NOT_READY && &status.message() == &not_ready().message();
  if (!is_query) last_error.set(std::move(status));
  return code;
}

int32_t keep_exception(base::ThreadStatus& last_error, const char* op) noexcept {
  last_error.set({});  // building a message could fail again
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return GPUSHARE_HOST_OUT_OF_MEMORY;
  } catch (...) {
    try {
      last_error.set({GPUSHARE_INTERNAL, std::string(op) + ": unexpected exception"});
    } catch (const std::bad_alloc&) {
      // INTERNAL without a message
    }
    return GPUSHARE_INTERNAL;
  }
}

const base::Status& not_ready() {
  // Never destroyed: queries may run while static destructors do.
  static const base::Status* status = new base::Status(GPUSHARE_NOT_READY, "the work has not finished");
  return *status;
}

base::Status null_handle(const char* what) {
  return {GPUSHARE_INVALID_HANDLE, std::string("the ") + what + " is null"};
}

base::Status null_output() {
  return {GPUSHARE_INVALID_ARGUMENT, "the output pointer is null"};
}

GPUSHARE_CATCHES_FORCED_UNWIND
base::Status call_host_function(gpushare_host_function function, void* user_data) {
  try {
    function(user_data);
    return {};
  } catch (const std::exception& error) {
    return {GPUSHARE_CALLBACK_FAILED, std::string("a host function threw: ") + error.what()};
  } catch (const base::ForcedUnwind&) {
    throw;
  } catch (...) {
    return {GPUSHARE_CALLBACK_FAILED, "a host function threw"};
  }
}

}  // namespace gpushare::device
