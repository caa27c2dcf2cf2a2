// turn_rules.hpp: every number of turns: how long one lasts, who is waited for and how long, and how soon a session usually
// comes back. The scheduler, its drivers and the policies read them here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "sched/types.hpp"

namespace gpushare::sched {

// A session that has ended an iteration whose work its thread has waited for, as a training loop with `loss.item()`
// does, has nothing to run for the moment in which the thread begins the next one. Without a rule for this, any ready
// session would get the turn, whatever its rank and weight. So the session is expected back instead, as disk schedulers
// wait for synchronous readers (Iyer and Druschel, "Anticipatory scheduling", SOSP 2001). It is expected for twice the
// time that it usually needs. A turn is never left unused for it for longer than this part of its iteration and this
// time, so that waiting in vain costs little.
inline constexpr uint64_t kExpectedPart = 10;
inline constexpr uint64_t kMostExpectedNs = 20'000'000;
// The time that a thread needs to come back even if it does little; on a busy machine it needs more.
inline constexpr uint64_t kLeastExpectedNs = 200'000;
// The shortest time for which a session is expected; the driver would look at the clock too late for a shorter one.
inline constexpr uint64_t kShortestExpectedNs = 20'000;

// A session may pause between iterations for longer than it is expected for. If its pauses are at most kSoonNs, it keeps its
// turn in a busy lane: while an iteration of kLongNs or more is in flight, no iteration of another session is enqueued before
// its next one. The session then waits for one iteration, and not for as many as a lane has in flight.
inline constexpr uint64_t kSoonNs = 50'000'000;
inline constexpr uint64_t kLongNs = 1'000'000;

// A session is waited for no longer than twice the time that its iterations take, and this: its host may hold the iteration
// open, or its driver may not serve its lane.
inline constexpr uint64_t kPatienceNs = 10'000'000;

// Turns of sessions of several processes. A preloaded program ends its turn after so much device time while others wait
// for one, and after the longest time in any case.
inline constexpr uint64_t kQuantumNs = 5'000'000;
inline constexpr uint64_t kLongestTurnNs = 50'000'000;
// How long the device may be idle for a session that is behind others.
inline constexpr uint64_t kIdleForTurnNs = 1'000'000;
// A session that has said that more work waits for it (Authority::set_worth) is expected for that long at once. If it
// does not come, it is not believed for this number of times. Otherwise the device would stand idle for it after each
// iteration, however short its iterations are.
inline constexpr uint32_t kUnbelieved = 9;
// How long a session that needs room waits for the iterations of the sessions that give it, and a guaranteed session
// for opportunistic ones.
inline constexpr uint64_t kRoomWaitNs = 50'000'000;
inline constexpr uint64_t kBoundaryWaitNs = 5'000'000'000;

// Ranks by the service that sessions have received change in steps of this or more (srtf), so sessions that wait are looked
// at again then.
inline constexpr uint64_t kServiceStepNs = 1'000'000'000;

// A session that wants nothing for a shorter time than this keeps what it was behind the others when it stopped.
inline constexpr uint64_t kKeepsLagNs = 100'000'000;

// The most unused time that a session keeps: device time of its part that it left to others while it wanted nothing.
// The session uses that time when its iteration would win nothing after a wait (Authority::set_worth). So it is never
// ahead of what its weight gives it since its arrival, and others wait for no more than this. A server whose requests
// come at random and take all of its part beside an overloaded server (benchmarks/serving/beside.cpp) keeps 94% of what
// it has alone with 100 ms, and 96% with 200 ms.
inline constexpr uint64_t kMostUnusedNs = 200'000'000;

// After this number of later sessions has been admitted past a waiting session, no further session may pass it, so that
// large sessions do not starve behind a stream of small ones.
inline constexpr uint32_t kMostOvertakes = 64;

// Stays of a session whose policy lets it run to its end undisturbed, unless that takes longer (GivesWay::kAfterLongStay).
inline constexpr uint32_t kLongStays = 10;

// The last pauses of a session: the times between two iterations in which it wanted nothing.
class Pauses {
 public:
  void note(uint64_t pause_ns) {
    pauses_[noted_ % pauses_.size()] = pause_ns;
    ++noted_;
  }
  // The median; kUnknown: there was no pause yet.
  uint64_t usual_ns() const {
    if (noted_ == 0) return kUnknown;
    auto sorted = pauses_;
    const auto end = sorted.begin() + static_cast<ptrdiff_t>(std::min<size_t>(noted_, sorted.size()));
    const auto middle = sorted.begin() + (end - sorted.begin()) / 2;
    std::nth_element(sorted.begin(), middle, end);
    return *middle;
  }
  // By how much they differ; kUnknown: there were too few.
  uint64_t spread_ns() const {
    if (noted_ < pauses_.size()) return kUnknown;
    const auto [least, most] = std::minmax_element(pauses_.begin(), pauses_.end());
    return *most - *least;
  }

 private:
  std::array<uint64_t, 5> pauses_{};
  size_t noted_ = 0;
};

// When a session is expected back, counted from the beginning of its pause; nothing where `until_ns` is 0.
struct Expected {
  uint64_t from_ns = 0, until_ns = 0;
};

inline Expected expected_of(const Pauses& pauses, uint64_t iteration_ns) {
  const uint64_t most = std::min(iteration_ns / kExpectedPart, kMostExpectedNs);
  if (most < kShortestExpectedNs) return {};
  const uint64_t usual = pauses.usual_ns();
  if (usual == kUnknown) return {0, most};
  if (usual <= most) return {0, std::min(std::max(2 * usual, kLeastExpectedNs), most)};
  // A longer pause is waited for near its end, where the pauses differ by less.
  if (usual > kSoonNs || pauses.spread_ns() > most / 2) return {};
  return {usual - most / 2, usual + most / 2};
}

}  // namespace gpushare::sched
