// progress.hpp: one line on the terminal that is overwritten as work goes on; nothing at all when stderr is
// no terminal.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

namespace gpushare::cli {

// Threads: one at a time.
class ProgressLine {
 public:
  // Active if stderr is a terminal.
  ProgressLine();
  ~ProgressLine() { clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  // True about ten times a second, so that callers build the text only when it is shown.
  bool due();
  void show(const std::string& text);
  // Leaves an empty line behind, for the next output.
  void clear();

 private:
  bool terminal_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace gpushare::cli
