// stop_signals.hpp: waiting for SIGTERM and SIGINT, for commands that run until they are told to stop.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <csignal>
#include <ctime>

namespace gpushare::cli {

// SIGTERM and SIGINT, held back from the threads that start while it lives and waited for by wait().
class StopSignals {
 public:
  StopSignals() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGTERM);
    sigaddset(&signals_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  }
  ~StopSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  // Until one comes, which is true, or for so long; 0 = for ever.
  bool wait(double seconds) const {
    const auto whole = static_cast<time_t>(seconds);
    const timespec limit{whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
    int got = -1;
    do {
      got = sigtimedwait(&signals_, nullptr, seconds > 0 ? &limit : nullptr);
    } while (got < 0 && errno == EINTR);
    return got > 0;
  }

 private:
  sigset_t signals_{};
  sigset_t before_{};
};

}  // namespace gpushare::cli
