// clock.hpp: monotonic host time in nanoseconds, and deadlines that cannot overflow.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace gpushare::base {

inline uint64_t host_now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// The point `timeout_ns` from now; timeouts longer than a century (GPUSHARE_NO_TIMEOUT among them) mean "never".
class Deadline {
 public:
  static Deadline after(uint64_t timeout_ns) {
    constexpr uint64_t kCenturyNs = 100ull * 365 * 24 * 3600 * 1'000'000'000ull;
    Deadline deadline;
    deadline.never_ = timeout_ns >= kCenturyNs;
    if (!deadline.never_)
      deadline.at_ = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    return deadline;
  }
  // The time `ns` of host_now_ns(); UINT64_MAX: never.
  static Deadline at_ns(uint64_t ns) { return after(ns - std::min(ns, host_now_ns())); }
  bool never() const { return never_; }
  std::chrono::steady_clock::time_point at() const { return at_; }
  uint64_t left_ns() const {  // 0 once passed; only unless never()
    const auto left = at_ - std::chrono::steady_clock::now();
    return left.count() <= 0 ? 0 : static_cast<uint64_t>(std::chrono::nanoseconds(left).count());
  }
  bool passed() const { return !never_ && std::chrono::steady_clock::now() >= at_; }

  friend Deadline earlier(const Deadline& a, const Deadline& b) {
    return a.never_ || (!b.never_ && b.at_ < a.at_) ? b : a;
  }

 private:
  bool never_ = false;
  std::chrono::steady_clock::time_point at_{};
};

}  // namespace gpushare::base
