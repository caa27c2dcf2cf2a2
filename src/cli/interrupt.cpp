// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupt.hpp"

#include <atomic>

namespace gpushare::cli {
namespace {

// The handler runs on whichever thread the signal reaches; another one reads the flag.
std::atomic<bool> g_interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void remember(int) {
  g_interrupted.store(true, std::memory_order_relaxed);
}

}  // namespace

InterruptScope::InterruptScope() {
  g_interrupted.store(false, std::memory_order_relaxed);
  struct sigaction action {};
  action.sa_handler = remember;
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  (void)::sigaction(SIGINT, &action, &before_);
}

InterruptScope::~InterruptScope() {
  (void)::sigaction(SIGINT, &before_, nullptr);
}

bool InterruptScope::interrupted() {
  return g_interrupted.load(std::memory_order_relaxed);
}

}  // namespace gpushare::cli
