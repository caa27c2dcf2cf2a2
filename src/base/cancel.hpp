// cancel.hpp: pthread_cancel and pthread_exit inside the library. The C library carries both out as an exception that
// unwinds the thread's frames and must not be swallowed: a handler for everything rethrows ForcedUnwind first.
//
// pthread_cancel is put off while a thread is inside of a call (CancelOff), except where the call waits for other sessions
// (CancelPoint). So a call is either done or undone by the code around its wait.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <cstddef>  // for the library's macro

#if defined(__GLIBCXX__)
#include <cxxabi.h>

#include "base/thread_local.hpp"
#endif

namespace gpushare::base {

#if defined(__GLIBCXX__)
using ForcedUnwind = abi::__forced_unwind;
#else
class ForcedUnwind {};
#endif

// For each function with a handler of ForcedUnwind: the exception has no object, and UndefinedBehaviorSanitizer takes
// the handler for a reference to null. GCC leaves that check out only where it checks neither null nor alignment.
#define GPUSHARE_CATCHES_FORCED_UNWIND __attribute__((no_sanitize("null", "alignment")))

// For each function without a handler or a destructor that such an unwinding leaves: AddressSanitizer does not see it, and
// would take the function's variables on the stack for ones that are still there.
#define GPUSHARE_LEFT_BY_FORCED_UNWIND __attribute__((noinline, no_sanitize("address")))

// True once the calling thread is being unwound to end inside of a callback. Code that rethrows ForcedUnwind at
// a callback sets it, so that locks which the unwinding passes can tell it from an exception that left their
// data incomplete.
inline bool& thread_ends() {
  static GPUSHARE_THREAD_LOCAL bool ends = false;
  return ends;
}

// While one lives the calling thread is not cancelled.
class CancelOff {
 public:
  CancelOff() { (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~CancelOff() {
    int ignored = 0;
    (void)pthread_setcancelstate(before_, &ignored);
  }
  CancelOff(const CancelOff&) = delete;
  CancelOff& operator=(const CancelOff&) = delete;
  // Whether the thread could be cancelled before.
  bool outermost() const { return before_ == PTHREAD_CANCEL_ENABLE; }

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

// Whether waits of the call that this thread is in may be cancelled; false at first.
inline bool& waits_cancellable() {
  static GPUSHARE_THREAD_LOCAL bool cancellable = false;
  return cancellable;
}

// For a call whose waits leave nothing half done when the thread is cancelled in one.
class CancellableWaits {
 public:
  explicit CancellableWaits(bool cancellable) : before_(waits_cancellable()) {
    waits_cancellable() = cancellable;
  }
  ~CancellableWaits() { waits_cancellable() = before_; }
  CancellableWaits(const CancellableWaits&) = delete;
  CancellableWaits& operator=(const CancellableWaits&) = delete;

 private:
  const bool before_;
};

// While one lives, and the call allows it, the calling thread is cancelled where the C library has a cancellation point.
class CancelPoint {
 public:
  CancelPoint() : on_(waits_cancellable()) {
    if (!on_) return;
    (void)pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, &type_);
    int ignored = 0;
    (void)pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &ignored);
  }
  ~CancelPoint() {
    if (!on_) return;
    int ignored = 0;
    (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &ignored);
    (void)pthread_setcanceltype(type_, &ignored);
  }
  CancelPoint(const CancelPoint&) = delete;
  CancelPoint& operator=(const CancelPoint&) = delete;

 private:
  const bool on_;
  int type_ = PTHREAD_CANCEL_DEFERRED;
};

}  // namespace gpushare::base
