// no_signals.hpp: the signals of the process are for the program's own threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

namespace gpushare::base {

// While one exists, signals reach neither this thread nor, ever, the threads that it starts. Left out are those that a
// thread's own fault raises, which a program's crash handler wants to see, and a profiler's. (On Linux sigprocmask() is
// the thread's own, as pthread_sigmask() is, whose symbol moved in glibc 2.32.)
class NoSignals {
 public:
  NoSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF})
      sigdelset(&blocked, signal);
    sigprocmask(SIG_BLOCK, &blocked, &before_);
  }
  ~NoSignals() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace gpushare::base
