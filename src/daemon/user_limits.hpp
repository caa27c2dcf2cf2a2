// user_limits.hpp: limits for one user: lines in the daemon's log, CPU time for questions whose cost a client controls,
// weight and rank of sessions. For the service's thread alone.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>

namespace gpushare::daemon {

// Warnings about clients. A user gets kLines of them in kWindowNs; only the number of the others is logged.
class LogLimit {
 public:
  static constexpr uint32_t kLines = 10;
  static constexpr uint64_t kWindowNs = 60'000'000'000;

  void warn(uid_t user, const std::string& message, uint64_t now_ns);
  // Logs how many lines were left out, for users whose window is over. Returns when to call again, in nanoseconds from now;
  // UINT64_MAX if nothing is left out.
  uint64_t tick(uint64_t now_ns);
  uint64_t left_out() const { return left_out_; }  // ever

 private:
  struct Window {
    uint64_t began_ns = 0;
    uint32_t lines = 0;
    uint64_t left_out = 0;
  };
  std::map<uid_t, Window> windows_;
  uint64_t left_out_ = 0;
};

// CPU time for questions whose cost a client controls. Example: the kernel walks all locks on a file of the client's
// one by one. Such questions about one user get a hundredth of the daemon's time. A user who has used more is not asked
// about until the rest of the time has passed.
class Patience {
 public:
  static constexpr uint64_t kShare = 100;
  static constexpr uint64_t kBurstNs = 2'000'000;  // the most CPU time at once

  bool may(uid_t user, uint64_t now_ns) const {
    const auto owes = owes_until_ns_.find(user);
    return owes == owes_until_ns_.end() || owes->second < now_ns + kBurstNs * kShare;
  }
  void spent(uid_t user, uint64_t cpu_ns, uint64_t now_ns) {
    std::erase_if(owes_until_ns_, [now_ns](const auto& entry) { return entry.second <= now_ns; });
    uint64_t& until_ns = owes_until_ns_[user];
    until_ns = std::max(until_ns, now_ns) + cpu_ns * kShare;
  }

 private:
  std::map<uid_t, uint64_t> owes_until_ns_;
};

// The most that sessions may ask for; more counts as the limit.
struct RankLimits {
  double max_weight = 100;
  int32_t max_priority = 1000;

  // A number that is no valid weight stays as it is, to be refused later.
  double weight(double asked) const {
    return std::isfinite(asked) && asked > max_weight ? max_weight : asked;
  }
  int32_t priority(int32_t asked) const { return std::min(asked, max_priority); }
};

}  // namespace gpushare::daemon
