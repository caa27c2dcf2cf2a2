// time_cap.hpp: the most of a device's time that sessions may have, also while nobody else wants the device.
//
// A balance of device time grows by `share` of the time that passes and falls by what the sessions used. They may begin
// a turn while it is above zero. One turn may overshoot; after that they wait until the debt is repaid. So within any
// time T they get at most share * T + kMostBalanceNs + one turn. Time in which they had no work is lost to them beyond
// kMostBalanceNs. Times are nanoseconds of one clock, the caller's, that does not run backwards. Threads: the caller
// serialises calls.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/saturate.hpp"

namespace gpushare::sched {

class TimeCap {
 public:
  // The most that may be saved up: half a percent of ten seconds.
  static constexpr double kMostBalanceNs = 50'000'000;

  // The balance begins full.
  TimeCap(double share, uint64_t now_ns) : share_(share), at_ns_(now_ns) {}
  // A share of a device's time: above 0, at most 1, which holds nobody back.
  static bool valid(double share) { return share > 0 && share <= 1; }

  double share() const { return share_; }
  bool binds() const { return share_ < 1; }
  void set_share(double share, uint64_t now_ns) {
    advance(now_ns);
    share_ = share;
  }
  void charge(uint64_t device_ns, uint64_t now_ns) {
    advance(now_ns);
    balance_ns_ -= static_cast<double>(device_ns);
  }
  // Device time that may be used by now, in ns; below 0: a debt.
  double balance_ns(uint64_t now_ns) {
    advance(now_ns);
    return balance_ns_;
  }
  // The time at which a turn may begin: now_ns, or later while there is a debt.
  uint64_t may_begin_ns(uint64_t now_ns) {
    advance(now_ns);
    if (!binds() || balance_ns_ > 0) return now_ns;
    return base::add_saturated(now_ns, base::to_uint64(std::ceil(-balance_ns_ / share_)) + 1);
  }

 private:
  void advance(uint64_t now_ns) {
    const uint64_t passed_ns = now_ns - std::min(now_ns, at_ns_);
    at_ns_ += passed_ns;
    balance_ns_ = std::min(balance_ns_ + share_ * static_cast<double>(passed_ns), kMostBalanceNs);
    // Without a bound a debt that was made before set_share() would hold for long after it.
    if (!binds()) balance_ns_ = kMostBalanceNs;
  }

  double share_;
  double balance_ns_ = kMostBalanceNs;
  uint64_t at_ns_;
};

}  // namespace gpushare::sched
