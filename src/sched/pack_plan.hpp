// pack_plan.hpp: which sessions run together under pack, and how long all of them would take. Pure functions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sched/interference.hpp"
#include "sched/types.hpp"

namespace gpushare::sched {

// The least that a session must add to the sum of speeds to run together with others.
inline constexpr double kPackLeastGain = 0.01;

// How sessions join those that run. The oldest session always runs, so nobody starves.
enum class PackOrder : uint32_t {
  kAge,      // oldest first, while each adds speed
  kLongest,  // those with the most work left first, while each adds speed
  kGain,     // the one that adds the most speed first
  kAll       // all of them, however they slow each other, as fair does with sessions in lanes of their own
};

struct PackJob {
  SessionId id = kNoSession;
  double left_ns = 0;  // device time alone; infinite: not known
};

// The sum of speeds of sessions that run together, each relative to running alone.
double total_speed(std::span<const SessionId> sessions, const Interference& interference);

// The sessions that run together. `heads`: the first session of each lane, oldest first.
std::vector<SessionId> run_together(PackOrder order, std::span<const PackJob> heads,
                                    const Interference& interference);

// The time until all sessions are done if no other session comes. `lanes`: the sessions of each lane, oldest first;
// they run one after the other.
double predicted_ns(PackOrder order, std::vector<std::vector<PackJob>> lanes,
                    const Interference& interference);

// The order with the least predicted time; `present` where no other is better.
PackOrder best_order(PackOrder present, const std::vector<std::vector<PackJob>>& lanes,
                     const Interference& interference);

}  // namespace gpushare::sched
