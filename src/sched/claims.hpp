// claims.hpp: who gives device bytes up when somebody needs room. Each holder of device bytes is a claim: a session with its
// share of a lane, a model kept for its next request, first layers on standby, an image, the blocks of a session that may lie
// on the host, an elastic range. Each has a rank and a price. give_up() is the one decision for all of them; it moves nothing.
//
// Rank before price: a claim gives only if all claims of lower ranks together do not do. Within a rank the least sum of prices
// is wanted, which is a minimum knapsack. It is solved greedily by price a byte, closing each prefix with the one claim that
// makes the rest of the room, which costs at most twice the best choice (Csirik, Frenk, Labbe, Zhang 1991); claims that turn
// out unnecessary are then spared, the dearest first. Claims that can give parts make the choice exact.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gpushare::sched {

struct Claim {
  uint64_t bytes = 0;  // that it can give
  uint32_t rank = 0;   // the lowest goes first
  // Device or link time to take it back and, as far as that is to be expected, to restore it. At least 0.
  double price_ns = 0;
  bool in_parts = false;  // it can give any part of its bytes, for that part of the price
};

// A count of requests for what a claim holds, and with it the price, halves in this time.
inline constexpr uint64_t kRequestHalfLifeNs = 60'000'000'000;

// `value` as of `since_ns`, halved every half-life since.
double decayed(double value, uint64_t since_ns, uint64_t now_ns);

// Price of a claim that is taken back in `take_ns` and restored in `restore_ns`, and that nobody has wanted for
// `idle_ns` (0: it is wanted now). The price of restoring falls with the idle time, to half when idle_ns equals
// restore_ns: the longer nobody has wanted a claim, the later it is likely to be wanted.
double price_of(double take_ns, double restore_ns, double idle_ns);

// The bytes that each claim gives so that at least `bytes` become free: all or nothing of a claim, unless it can give parts.
// If all claims together do not suffice, each gives all. Among equal claims the first in the list give. O(n log n).
std::vector<uint64_t> give_up(std::span<const Claim> claims, uint64_t bytes);

// The indexes of the claims: the lowest rank first, then the cheapest byte, then as listed. Claims of no bytes are the last of
// their rank.
std::vector<size_t> giving_order(std::span<const Claim> claims);

}  // namespace gpushare::sched
