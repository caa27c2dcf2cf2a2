// claims.hpp: which claims give device bytes back when somebody needs room. Each holder of device bytes is a claim: a session
// with its share of a lane, a model kept for its next request, first layers on standby, an image. Each has a rank and a price;
// this one decision is asked for all of them. It only decides and moves nothing.
//
// Rank before price: a claim is taken only if all claims of lower ranks together do not do. Within a rank the least
// sum of prices is wanted, which is a minimum knapsack. It is solved greedily by price a byte, closing each prefix
// with the one claim that makes the rest of the room, which costs at most twice the best choice (Csirik, Frenk, Labbe,
// Zhang 1991); claims that turn out unnecessary are then spared, the dearest first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gpushare::sched {

struct Claim {
  uint64_t bytes = 0;  // that taking it makes free
  uint32_t rank = 0;   // the lowest goes first
  // Device or link time to take it back and, as far as that is to be expected, to restore it. At least 0.
  double price_ns = 0;
};

// A count of requests for what a claim holds, and with it the price, halves in this time.
inline constexpr uint64_t kRequestHalfLifeNs = 60'000'000'000;

// `value` as of `since_ns`, halved every half-life since.
double decayed(double value, uint64_t since_ns, uint64_t now_ns);

// Price of a claim that is taken back in `take_ns` and restored in `restore_ns`, and that nobody has wanted for
// `idle_ns` (0: it is wanted now). The price of restoring falls with the idle time, to half when idle_ns equals
// restore_ns: the longer nobody has wanted a claim, the later it is likely to be wanted.
double price_of(double take_ns, double restore_ns, double idle_ns);

// Indexes of the claims to take so that at least `bytes` become free, in ascending order. Empty if `bytes` is
// 0, or if all claims together do not suffice. Claims of no bytes are not taken. Among equal claims the first in
// the list are taken. O(n log n).
std::vector<size_t> choose_claims(std::span<const Claim> claims, uint64_t bytes);

// The same for claims that can give a part of their bytes, as blocks of a heap: how many bytes each gives. The lowest rank
// gives first, then the cheapest byte, then the first in the list, and nobody gives more than is missing. If all claims
// together do not suffice, each gives all.
std::vector<uint64_t> choose_parts(std::span<const Claim> claims, uint64_t bytes);

}  // namespace gpushare::sched
