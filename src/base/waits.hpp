// waits.hpp: what a thread must not have with it when it waits for the device, for another process or for a function of
// the caller's: a lock of the library, because whoever is waited for may want it. Builds with GPUSHARE_CHECK_WAITS count
// the locks of each thread (mutex.hpp) and check that at every such wait. Tests end at the first wait that breaks the
// rule; elsewhere the log tells it.
//
// A WorkMutex (work_mutex.hpp) does not count: it may be held over such a wait.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/thread_local.hpp"

namespace gpushare::base {

// How many functions the calling thread is in that the device or the runtime waits for (a host function, a progress
// function). Inside of one nothing may be waited for that the function itself may hold up.
inline int& no_wait_depth() {
  static GPUSHARE_THREAD_LOCAL int depth = 0;
  return depth;
}
inline bool may_not_wait() {
  return no_wait_depth() > 0;
}

// While one lives, a question to the device changes nothing: a simulated device does not move its clock, nor run host
// functions, for the calling thread. For questions asked with a lock held.
class QuietQueries {
 public:
  QuietQueries() { ++depth(); }
  ~QuietQueries() { --depth(); }
  QuietQueries(const QuietQueries&) = delete;
  QuietQueries& operator=(const QuietQueries&) = delete;
  static bool active() { return depth() > 0; }

 private:
  static int& depth() {
    static GPUSHARE_THREAD_LOCAL int quiet = 0;
    return quiet;
  }
};

#if defined(GPUSHARE_CHECK_WAITS)

// The locks that the calling thread holds. Not inlined: in a loop that waits GCC 12 keeps the address in a register under
// -fsanitize=null, and finds it null the second time round.
[[gnu::noinline]] inline int& locks_held() {
  static GPUSHARE_THREAD_LOCAL int held = 0;
  return held;
}
inline void count_lock(int change) {
  locks_held() += change;
}
// Logs the wait, or ends the process where the environment has GPUSHARE_BAD_WAIT=abort.
[[gnu::cold]] void report_bad_wait(const char* what, int locks) noexcept;
// The thread is about to wait for `what`. `own`: locks that the wait itself lets go.
inline void check_wait(const char* what, int own = 0) {
  if (locks_held() > own) [[unlikely]]
    report_bad_wait(what, locks_held() - own);
}

#else

inline void count_lock(int) {}
inline void check_wait(const char*, int = 0) {}

#endif

}  // namespace gpushare::base
