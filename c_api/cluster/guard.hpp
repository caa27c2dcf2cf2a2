// guard.hpp: how every extern "C" body of libgpushare_cluster ends: a status for the caller, the message for the
// calling thread, no exception.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "base/cancel.hpp"
#include "base/status.hpp"

namespace gpushare::capi_cluster {

inline thread_local base::Status t_last_error;

// A struct_size above this is an uninitialised struct rather than a future one; as in libgpushare.
inline constexpr uint32_t kMaxStructSize = 4096;

inline int32_t report(const base::Status& status) noexcept {
  if (!status.ok()) t_last_error = status;
  return status.code();
}

inline int32_t report_out_of_memory() noexcept {
  try {
    // Made before it is needed: at that point nothing can be allocated any more.
    static const base::Status status(GPUSHARE_HOST_OUT_OF_MEMORY, "the process is out of host memory");
    t_last_error = status;
  } catch (...) {
    t_last_error = base::Status();
  }
  return GPUSHARE_HOST_OUT_OF_MEMORY;
}

// A function of the caller's threw; what() says which function, and what it threw.
class CallbackThrew : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// For the exception that is being handled, which is no ForcedUnwind.
inline int32_t report_exception() noexcept {
  try {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const CallbackThrew& error) {
      return report({GPUSHARE_CALLBACK_FAILED, error.what()});
    } catch (const std::exception& error) {
      return report({GPUSHARE_INTERNAL, std::string("unexpected exception: ") + error.what()});
    } catch (...) {
      return report({GPUSHARE_INTERNAL, "unexpected exception of an unknown type"});
    }
  } catch (...) {  // no memory, for the call or for the message
    return report_out_of_memory();
  }
}

// Status and exceptions become a code and the thread's last error. It is not noexcept, because a thread that ends inside
// a callback (pthread_exit) is unwound through it.
template <class F>
GPUSHARE_CATCHES_FORCED_UNWIND int32_t guard(F&& body) {
  try {
    return report(body());
  } catch (const base::ForcedUnwind&) {
    throw;
  } catch (...) {
    return report_exception();
  }
}

inline base::Status give(const std::string& text, char** out) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  *out = copy;
  return {};
}

}  // namespace gpushare::capi_cluster
