// calls.hpp: whether the calling thread may call the library now. A thread that is inside of a call may not call again
// except from a callback: otherwise the second call comes from a signal handler that interrupted the first, whose locks it
// would wait for.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "base/thread_local.hpp"
#include "base/waits.hpp"

namespace gpushare::base {

inline constexpr const char* kInsideCall =
    "the calling thread is inside of another gpushare call: a signal handler cannot call gpushare";

// Why the calling thread may not call the library; null: it may. Static storage.
inline const char*& calls_refused() {
  static GPUSHARE_THREAD_LOCAL const char* why = nullptr;
  return why;
}

// While a CallScope lives, the calling thread may not call the library, for the reason `why`. With null it may call
// again, as around a callback. The scope before holds again afterwards.
class CallScope {
 public:
  explicit CallScope(const char* why) : before_(std::exchange(calls_refused(), why)) {}
  ~CallScope() { calls_refused() = before_; }
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  const char* const before_;
};

// Around a function of the caller's that may call the library.
class CallbackCalls : public CallScope {
 public:
  CallbackCalls() : CallScope(nullptr) { check_wait("a function of the caller's"); }
};

}  // namespace gpushare::base
