// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupt.hpp"

namespace gpushare::cli {
namespace {

volatile std::sig_atomic_t g_interrupted = 0;

void remember(int) {
  g_interrupted = 1;
}

}  // namespace

InterruptScope::InterruptScope() {
  g_interrupted = 0;
  struct sigaction action {};
  action.sa_handler = remember;
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  (void)::sigaction(SIGINT, &action, &before_);
}

InterruptScope::~InterruptScope() {
  (void)::sigaction(SIGINT, &before_, nullptr);
}

bool InterruptScope::interrupted() {
  return g_interrupted != 0;
}

}  // namespace gpushare::cli
