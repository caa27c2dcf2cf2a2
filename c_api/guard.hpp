// guard.hpp: the one wrapper around every extern "C" body: Status and exceptions become a code and the
// thread's last error.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "base/status.hpp"
#include "sched/policy.hpp"

namespace gpushare::capi {

// Keeps `status` as the calling thread's last error and returns its code. OK leaves the last error as it is.
int32_t report(const base::Status& status) noexcept;
// The thread's last error; OK before the first.
const base::Status& last_error() noexcept;
// On a thread of the library's own, before a function of the caller's: what failed there before is not its doing.
void forget_last_error() noexcept;
// When memory for the real message cannot be had.
int32_t report_out_of_memory() noexcept;

template <class F>
int32_t guard(F&& body) noexcept {
  try {
    if (sched::in_custom_policy())
      return report({GPUSHARE_INVALID_STATE, "a function of a custom policy cannot call gpushare"});
    return report(std::forward<F>(body)());
  } catch (const std::bad_alloc&) {
    return report_out_of_memory();
  } catch (const std::exception& error) {
    try {
      return report({GPUSHARE_INTERNAL, std::string("unexpected exception: ") + error.what()});
    } catch (...) {
      return report_out_of_memory();
    }
  } catch (...) {
    try {
      return report({GPUSHARE_INTERNAL, "unexpected exception of an unknown type"});
    } catch (...) {
      return report_out_of_memory();
    }
  }
}

}  // namespace gpushare::capi
