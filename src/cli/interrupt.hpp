// interrupt.hpp: Ctrl-C ends a command's work early and in order: the command asks now and then, and prints the results so far.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <cstdint>

namespace gpushare::cli {

// `timeout -s INT` sends each of its signals twice, to the process and to its group: all that come this soon after the first are one
// request.
constexpr int64_t kOneInterruptNs = 500'000'000;

// While one exists, the first SIGINT is remembered, and one that comes kOneInterruptNs after it or later ends the process. One at a
// time.
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
