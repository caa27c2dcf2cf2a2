// SPDX-License-Identifier: Apache-2.0
#include "daemon/user_limits.hpp"

#include "base/log.hpp"
#include "base/status.hpp"

namespace gpushare::daemon {

void LogLimit::warn(uid_t user, const std::string& message, uint64_t now_ns) {
  (void)tick(now_ns);
  Window& window = windows_[user];
  if (window.lines == 0) window.began_ns = now_ns;
  if (window.lines < kLines) {
    ++window.lines;
    base::log(base::kWarning, message);
    return;
  }
  ++window.left_out;
  ++left_out_;
}

uint64_t LogLimit::tick(uint64_t now_ns) {
  uint64_t next_ns = UINT64_MAX;
  for (auto entry = windows_.begin(); entry != windows_.end();) {
    const auto& [user, window] = *entry;
    if (const uint64_t age_ns = now_ns - window.began_ns; age_ns < kWindowNs) {
      if (window.left_out > 0) next_ns = std::min(next_ns, kWindowNs - age_ns);
      ++entry;
      continue;
    }
    if (window.left_out > 0)
      base::log(base::kWarning,
                base::format("daemon: %llu more warnings about processes of user %u were left out",
                             static_cast<unsigned long long>(window.left_out), user));
    entry = windows_.erase(entry);
  }
  return next_ns;
}

}  // namespace gpushare::daemon
