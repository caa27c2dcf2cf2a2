// pulse.hpp: tells whether the whole process stood still (SIGSTOP, a suspended machine) while a batch or a step ran. The sign
// is a thread that sleeps in short pieces meanwhile and wakes long after the end of a piece. The time of such a batch is
// not known, so no estimate learns from it. A thread that does other things than sleep at that moment shows nothing.
//
// Threads: the owner serialises calls. Times are base::host_now_ns.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

namespace gpushare::executor {

class Pulse {
 public:
  // The batch begins. True: the sleeping thread is to be woken, so that it sleeps in pieces.
  bool begins(uint64_t now_ns) noexcept {
    missed_ = false;
    runs_ = true;
    if (sleeps_ && until_ns_ < now_ns) until_ns_ = now_ns;  // what was missed before is not of the batch
    if (!sleeps_ || until_ns_ <= now_ns + kPieceNs) return false;
    until_ns_ = now_ns + kPieceNs;
    return true;
  }
  // The batch has ended. True if the process stood still while it ran.
  bool ends(uint64_t now_ns) noexcept {
    runs_ = false;
    look(now_ns);
    return missed_;
  }
  // The thread goes to sleep, and wants to wake at wake_ns. Returns when it has to.
  uint64_t asleep(uint64_t now_ns, uint64_t wake_ns) noexcept {
    sleeps_ = true;
    return until_ns_ = runs_ ? std::min(wake_ns, now_ns + kPieceNs) : wake_ns;
  }
  void awake(uint64_t now_ns) noexcept {
    look(now_ns);
    sleeps_ = false;
  }

 private:
  static constexpr uint64_t kPieceNs = 20'000'000;
  static constexpr uint64_t kLateNs = 200'000'000;  // more than a busy machine takes to wake a thread
  void look(uint64_t now_ns) noexcept {
    missed_ = missed_ || (sleeps_ && now_ns > until_ns_ && now_ns - until_ns_ > kLateNs);
  }

  bool sleeps_ = false, runs_ = false;
  uint64_t until_ns_ = 0;  // of the sleeping thread
  bool missed_ = false;
};

}  // namespace gpushare::executor
