// interrupt.hpp: Ctrl-C ends a command's work early and in order: the command asks now and then, and prints the results so far.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>

namespace gpushare::cli {

// While one exists, the first SIGINT is remembered and the second one ends the process. One at a time.
class InterruptScope {
 public:
  InterruptScope();
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;
  static bool interrupted();

 private:
  struct sigaction before_ {};
};

}  // namespace gpushare::cli
