// guard.hpp: the one wrapper around every extern "C" body: Status and exceptions become a code and the
// thread's last error.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "base/calls.hpp"
#include "base/cancel.hpp"
#include "base/status.hpp"

namespace gpushare::capi {

// Keeps `status` as the calling thread's last error and returns its code. OK leaves the last error as it is.
int32_t report(const base::Status& status) noexcept;
// The thread's last error; OK before the first.
base::Status last_error();
// On a thread of the library's own, before a function of the caller's: what failed there before is not its doing.
void forget_last_error() noexcept;
// When memory for the real message cannot be had.
int32_t report_out_of_memory() noexcept;
// INVALID_STATE with `why` (static storage) for a call that the thread may not make now. Allocates nothing and frees
// nothing: the thread may be in a signal handler.
int32_t report_refused(const char* why) noexcept;

// kCancellableWaits: the call may be cancelled (pthread_cancel) where it waits for other sessions.
// guard() is not noexcept, because a thread that ends inside a callback (pthread_exit) or is cancelled in a wait is
// unwound through it.
template <bool kCancellableWaits = false, class F>
GPUSHARE_CATCHES_FORCED_UNWIND int32_t guard(F&& body) {
  if (const char* why = base::calls_refused(); why != nullptr) return report_refused(why);
  const base::CallScope inside(base::kInsideCall);
  const base::CancelOff cancel_off;
  const base::CancellableWaits waits(kCancellableWaits && cancel_off.outermost());
  try {
    return report(std::forward<F>(body)());
  } catch (const std::bad_alloc&) {
    return report_out_of_memory();
  } catch (const std::exception& error) {
    try {
      return report({GPUSHARE_INTERNAL, std::string("unexpected exception: ") + error.what()});
    } catch (...) {
      return report_out_of_memory();
    }
  } catch (const base::ForcedUnwind&) {
    throw;
  } catch (...) {
    try {
      return report({GPUSHARE_INTERNAL, "unexpected exception of an unknown type"});
    } catch (...) {
      return report_out_of_memory();
    }
  }
}

}  // namespace gpushare::capi
