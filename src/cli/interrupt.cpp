// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupt.hpp"

#include <atomic>
#include <ctime>

namespace gpushare::cli {
namespace {

// The handler runs on whichever thread the signal reaches; another one reads the time of the first signal. 0: none came.
std::atomic<int64_t> g_first_ns{0};
static_assert(std::atomic<int64_t>::is_always_lock_free);

void remember(int signal) {
  timespec now{};
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t now_ns = now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
  int64_t first_ns = 0;
  if (g_first_ns.compare_exchange_strong(first_ns, now_ns) || now_ns - first_ns < kOneInterruptNs) return;
  // The default action, once the handler returns.
  (void)std::signal(signal, SIG_DFL);
  (void)std::raise(signal);
}

}  // namespace

InterruptScope::InterruptScope() {
  g_first_ns.store(0, std::memory_order_relaxed);
  struct sigaction action {};
  action.sa_handler = remember;
  action.sa_flags = SA_RESTART;
  (void)::sigaction(SIGINT, &action, &before_);
}

InterruptScope::~InterruptScope() {
  (void)::sigaction(SIGINT, &before_, nullptr);
}

bool InterruptScope::interrupted() {
  return g_first_ns.load(std::memory_order_relaxed) != 0;
}

}  // namespace gpushare::cli
