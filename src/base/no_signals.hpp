// no_signals.hpp: the signals of the process are for the program's own threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

namespace gpushare::base {

// While one exists, signals do not reach this thread, and the threads that it starts meanwhile never get any. Two kinds
// still come: signals that a thread's own fault raises, which a program's crash handler wants to see, and a profiler's.
// (On Linux sigprocmask() works for one thread, as pthread_sigmask() does, whose symbol moved in glibc 2.32.)
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
