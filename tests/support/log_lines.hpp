// log_lines.hpp: what the library logs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "base/log.hpp"

namespace gpushare::test {

// The lines of the log up to `level` while it lives.
class LogLines {
 public:
  explicit LogLines(int32_t level = base::kWarning) {
    base::set_log_sink(
        [](void* self, int32_t, const char* message) {
          auto& lines = *static_cast<LogLines*>(self);
          const std::lock_guard lock(lines.mutex_);
          lines.lines_.emplace_back(message);
        },
        this, level);
  }
  ~LogLines() { base::set_log_sink(nullptr, nullptr, base::kWarning); }
  LogLines(const LogLines&) = delete;
  LogLines& operator=(const LogLines&) = delete;
  std::vector<std::string> all() {
    const std::lock_guard lock(mutex_);
    return lines_;
  }
  // The first line with the words; "" if there is none.
  std::string with(const std::string& words) {
    for (const std::string& line : all())
      if (line.find(words) != std::string::npos) return line;
    return "";
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace gpushare::test
