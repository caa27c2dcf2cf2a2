// gate_slot.hpp: what the daemon says to the gate of an opportunistic session, and what the session's process says of its work, in
// memory that both map (client/lease.hpp). The gate reads it before each launch, without a call. The header uses none of the
// project's libraries and no C++ runtime, since src/shim includes it.
//
// The daemon is the only writer of the terms. A reader that meets it while it writes goes by the terms that it had before.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "base/bell.hpp"

namespace gpushare::base {

// The terms by which a gate lets work in until it is told otherwise. Times are CLOCK_MONOTONIC.
struct GateTerms {
  static constexpr uint64_t kNever = UINT64_MAX;
  static constexpr uint64_t kLongAwayNs = 1'000'000'000;
  // The terms hold up to then. Later nothing is limited: whoever decided has gone, or no guaranteed session is known.
  uint64_t until_ns = 0;
  double share = 1;  // of the time, that the session's work may take; in [0, 1]
  uint64_t in_flight_ns =
      kNever;  // most work of the session on the device at once, while guaranteed sessions run
  // Likewise while all of them pause: this part of the time since `since_ns`, and `away_most_ns` at most, if that is more.
  double away_share = 0, away_most_ns = 0;
  uint64_t since_ns = 0;
  uint64_t busy = 0;        // 1: an iteration of a guaranteed session is on the device
  uint64_t used_ns = 0;     // GateSlot::used_ns() when the terms were made
  double paid_ns = -1;      // work that may be let in since then, whatever it costs; below 0: none
  uint64_t back_ns = 0;     // nobody who pauses comes back before
  uint64_t overdue_ns = 0;  // and from then on nobody waits for who pauses
  // For readers: the guaranteed session with the least credit, 0 if there is none, and its sched::OpController::Estimate.
  uint64_t guaranteed_id = 0, alone_ns = 0, iterations = 0, learning = 1;
  double slowdown = 0, error = 1, credit = 0, target = 0;

  // For a launch that takes `work_ns`. After a long absence it may wait behind another one, if that is within the part of the time:
  // the device would stand still between the two.
  uint64_t in_flight_at(uint64_t now_ns, uint64_t work_ns = 0) const {
    if (busy != 0 || now_ns <= since_ns) return in_flight_ns;
    const double grown_ns = away_share * static_cast<double>(now_ns - since_ns);
    const double two_ns = 2 * static_cast<double>(work_ns);
    double away_ns = grown_ns < away_most_ns ? grown_ns : away_most_ns;
    if (now_ns - since_ns >= kLongAwayNs && two_ns <= grown_ns && two_ns > away_ns) away_ns = two_ns;
    return away_ns > static_cast<double>(in_flight_ns) && away_ns < 1e18 ? static_cast<uint64_t>(away_ns)
                                                                         : in_flight_ns;
  }
  // When a launch that takes `work_ns` may come, after others of `let_in_ns` since the terms were made, and beside `on_device_ns`
  // of the session's own on the device: `now_ns` or earlier: now; later: ask again then; kNever: ask when the terms have changed.
  uint64_t admits_at(double let_in_ns, uint64_t work_ns, uint64_t on_device_ns, uint64_t now_ns) const {
    if (let_in_ns + static_cast<double>(work_ns) <= paid_ns) return now_ns;
    if (busy != 0) return kNever;
    // Work that is done when the session comes back costs it nothing; other work waits until the session is overdue.
    const uint64_t left_ns = now_ns < back_ns ? back_ns - now_ns : 0;
    if (on_device_ns < left_ns && work_ns < left_ns - on_device_ns) return now_ns;
    return overdue_ns;
  }
};

class GateSlot {
 public:
  // ---- the daemon
  void publish(const GateTerms& terms) {
    uint64_t words[kWords];
    std::memcpy(words, &terms, sizeof terms);
    const uint64_t now = sequence_.load(std::memory_order_relaxed) | 1;
    sequence_.store(now, std::memory_order_relaxed);
    for (uint32_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
    sequence_.store(now + 1, std::memory_order_seq_cst);
  }
  void reset() {
    publish({});
    used_ns_.store(0, std::memory_order_relaxed);
    entries_.store(0, std::memory_order_relaxed);
    held_up_.store(0, std::memory_order_relaxed);
    asked_ns_.store(0, std::memory_order_relaxed);
    busy_until_ns_.store(0, std::memory_order_relaxed);
    unseen_.store(0, std::memory_order_relaxed);
    bell_.expect(false);
  }
  // The process says these; nothing of it is trusted.
  uint64_t used_ns() const { return used_ns_.load(std::memory_order_acquire); }
  uint64_t entries() const { return entries_.load(std::memory_order_relaxed); }
  uint64_t held_up() const { return held_up_.load(std::memory_order_relaxed); }
  // The last launch that was refused has this. 0: one has come in since.
  uint64_t asked_ns() const { return asked_ns_.load(std::memory_order_relaxed); }
  uint64_t busy_until_ns() const { return busy_until_ns_.load(std::memory_order_acquire); }
  // Launches do not ask at the gate now, so nothing else here tells of them.
  bool unseen() const { return unseen_.load(std::memory_order_seq_cst) != 0; }

  // ---- the process
  // False, and nothing changes, where the daemon writes meanwhile.
  bool read(GateTerms* out) const {
    uint64_t words[kWords];
    for (int tries = 0; tries < 8; ++tries) {
      const uint64_t before = sequence_.load(std::memory_order_seq_cst);
      if (before % 2 != 0) continue;
      for (uint32_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
      if (sequence_.load(std::memory_order_relaxed) != before) continue;
      std::memcpy(static_cast<void*>(out), words, sizeof *out);
      // Other processes of the user may write here, too.
      if (!(out->share >= 0 && out->share <= 1)) out->share = 1;
      return true;
    }
    return false;
  }
  void let_in(uint64_t work_ns) { used_ns_.fetch_add(work_ns, std::memory_order_release); }
  void count_entry() { entries_.fetch_add(1, std::memory_order_relaxed); }
  void count_held_up() { held_up_.fetch_add(1, std::memory_order_relaxed); }
  void set_asked(uint64_t work_ns) { asked_ns_.store(work_ns, std::memory_order_relaxed); }
  // Whether work of the session may be on the device. busy_until_ns() is the time when the last of it had gone.
  void set_busy(bool busy, uint64_t now_ns) {
    if (busy)
      busy_until_ns_.store(kBusy, std::memory_order_release);
    else if (busy_until_ns() == kBusy)
      busy_until_ns_.store(now_ns, std::memory_order_release);
  }
  static constexpr uint64_t kBusy = UINT64_MAX;
  // True before launches cease to ask; false when they ask again and set_busy() has told of those before.
  void set_unseen(bool unseen) { unseen_.store(unseen ? 1 : 0, std::memory_order_seq_cst); }

  // ---- both: rings when more may be let in
  Bell& bell() { return bell_; }

 private:
  static constexpr uint32_t kWords = sizeof(GateTerms) / sizeof(uint64_t);
  static_assert(sizeof(GateTerms) == kWords * sizeof(uint64_t));
  // In lines of their own: each side writes one part.
  alignas(64) std::atomic<uint64_t> sequence_{0};  // odd: the daemon writes
  std::atomic<uint64_t> words_[kWords] = {};
  alignas(64) Bell bell_;
  std::atomic<uint64_t> used_ns_{0};  // estimates of all work that was let in
  std::atomic<uint64_t> entries_{0};  // launches that asked
  std::atomic<uint64_t> held_up_{0};  // those that had to wait
  std::atomic<uint64_t> asked_ns_{0};
  std::atomic<uint64_t> busy_until_ns_{0};
  std::atomic<uint64_t> unseen_{0};
};

}  // namespace gpushare::base
