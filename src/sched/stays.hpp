// stays.hpp: sessions that each want the device's memory take turns on it. A stay is the time for which a session is
// resident before one that waits for memory may have its place. Pure functions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::sched {

// Both moves of a change take at most one part in so many, and one, of the time from one change to the next: a tenth.
inline constexpr uint64_t kHeldPerMove = 9;
// However little there is to move, a stay is no shorter.
inline constexpr uint64_t kLeastStayNs = 1'000'000'000;

struct StayRule {
  uint64_t least_ns = kLeastStayNs;
  uint32_t factor = 1;     // stays are so many times as long as they must be
  bool by_weight = false;  // device time follows the weights; else each has its stay in turn
};

// A resident session that alternates.
struct Resident {
  uint64_t used_ns = 0;  // of this stay: device time, and time in which it had no work
  uint64_t out_ns = 0;   // to move it to the host
  double weight = 1;
  double begun_tag_ns = 0;  // its weighted use of the memory when the stay began
};

// The session that waits for the resident's place.
struct Newcomer {
  uint64_t in_ns = 0;  // to move it to the device
  double tag_ns = 0;   // its weighted use of the memory so far
  bool same_class = true;
};

// The time that the resident may still use before the newcomer may have its place; 0: its stay is over. By weight a
// stay lasts until the resident is no longer behind the newcomer.
uint64_t stay_left_ns(const Resident& resident, const Newcomer& newcomer, const StayRule& rule);

// The length that a move counts as, in ns. `took_ns`: its real length; `expected_ns`: the length that was expected. A
// move counts as twice the expected length at most, because a much longer one may have waited for a busy host, and a
// stay is many times as long as a move. Moves that are really longer are known to be so after some of them. A move that
// makes no stay longer than the least one counts as it is.
uint64_t counted_move_ns(uint64_t took_ns, uint64_t expected_ns, uint64_t least_stay_ns);

// The resident's weighted use of the memory by now.
double tag_of(const Resident& resident);

}  // namespace gpushare::sched
