// guard.hpp: the one wrapper around every extern "C" body: Status and exceptions become a code and the
// thread's last error.
// SPDX-License-Identifier: Apache-2.0
#pragma once

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
// For the exception that is being handled, which is no ForcedUnwind.
int32_t report_exception() noexcept;
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
  } catch (const base::ForcedUnwind&) {
    throw;
  } catch (...) {
    return report_exception();
  }
}

}  // namespace gpushare::capi
