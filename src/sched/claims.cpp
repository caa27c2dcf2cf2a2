// SPDX-License-Identifier: Apache-2.0
#include "sched/claims.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/saturate.hpp"

namespace gpushare::sched {
namespace {

double by_byte(const Claim& claim) {
  return claim.price_ns / static_cast<double>(claim.bytes);
}

// Those that have bytes: by rank, then by the price of a byte, then as listed.
std::vector<size_t> in_order(std::span<const Claim> claims) {
  std::vector<size_t> order;
  order.reserve(claims.size());
  for (size_t i = 0; i < claims.size(); ++i)
    if (claims[i].bytes > 0) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (claims[a].rank != claims[b].rank) return claims[a].rank < claims[b].rank;
    const double price_a = by_byte(claims[a]), price_b = by_byte(claims[b]);
    return price_a != price_b ? price_a < price_b : a < b;
  });
  return order;
}

// Chooses among claims of one rank. `order` has the cheapest byte first; together the claims have at least `bytes`,
// which is above 0.
std::vector<size_t> choose_of_rank(std::span<const Claim> claims, std::span<const size_t> order,
                                   uint64_t bytes) {
  // A claim smaller than the missing bytes joins the prefix. A claim that has all of them closes the prefix: the two are one
  // solution. The search goes on without that claim and keeps the cheapest solution.
  double best_price = std::numeric_limits<double>::infinity(), prefix_price = 0;
  uint64_t made_bytes = 0;
  std::vector<size_t> prefix, best;
  size_t best_prefix = 0, closes = 0;
  for (const size_t index : order) {
    const Claim& claim = claims[index];
    if (made_bytes + claim.bytes < bytes) {
      prefix.push_back(index);
      prefix_price += claim.price_ns;
      made_bytes += claim.bytes;
    } else if (prefix_price + claim.price_ns < best_price) {
      best_price = prefix_price + claim.price_ns;
      best_prefix = prefix.size();
      closes = index;
    }
  }
  best.assign(prefix.begin(), prefix.begin() + static_cast<std::ptrdiff_t>(best_prefix));
  best.push_back(closes);
  uint64_t spare_bytes = 0;
  for (const size_t index : best) spare_bytes += claims[index].bytes;
  spare_bytes -= bytes;
  std::stable_sort(best.begin(), best.end(),
                   [&](size_t a, size_t b) { return claims[a].price_ns > claims[b].price_ns; });
  std::erase_if(best, [&](size_t index) {
    if (claims[index].bytes > spare_bytes) return false;
    spare_bytes -= claims[index].bytes;
    return true;
  });
  return best;
}

}  // namespace

double decayed(double value, uint64_t since_ns, uint64_t now_ns) {
  const auto age_ns = static_cast<double>(now_ns - std::min(now_ns, since_ns));
  return value * std::exp2(-age_ns / static_cast<double>(kRequestHalfLifeNs));
}

double price_of(double take_ns, double restore_ns, double idle_ns) {
  return restore_ns <= 0 ? take_ns : take_ns + restore_ns * restore_ns / (restore_ns + idle_ns);
}

std::vector<uint64_t> choose_parts(std::span<const Claim> claims, uint64_t bytes) {
  std::vector<uint64_t> parts(claims.size());
  for (const size_t index : in_order(claims)) {
    parts[index] = std::min(bytes, claims[index].bytes);
    bytes -= parts[index];
  }
  return parts;
}

std::vector<size_t> choose_claims(std::span<const Claim> claims, uint64_t bytes) {
  if (bytes == 0) return {};
  uint64_t all_bytes = 0;
  for (const Claim& each : claims) all_bytes = base::add_saturated(all_bytes, each.bytes);
  if (all_bytes < bytes) return {};
  const std::vector<size_t> order = in_order(claims);
  // Which ranks go wholly before the one that makes the rest of the room: that one takes as little as it can, and what
  // it makes beyond the need is spared in the ranks below, the highest first.
  uint64_t below_bytes = 0;
  size_t first = 0, last = 0;
  for (;;) {
    uint64_t rank_bytes = 0;
    for (last = first; last < order.size() && claims[order[last]].rank == claims[order[first]].rank; ++last)
      rank_bytes = base::add_saturated(rank_bytes, claims[order[last]].bytes);
    if (base::add_saturated(below_bytes, rank_bytes) >= bytes) break;
    below_bytes += rank_bytes;
    first = last;
  }
  std::vector<size_t> taken;
  uint64_t missing = bytes - below_bytes;  // of the rank at hand, those below it gone
  for (;;) {
    if (missing > 0) {
      const auto chosen = choose_of_rank(claims, std::span(order).subspan(first, last - first), missing);
      uint64_t made = 0;
      for (const size_t index : chosen) made += claims[index].bytes;
      taken.insert(taken.end(), chosen.begin(), chosen.end());
      bytes -= std::min(bytes, made);
    }
    if (first == 0 || bytes == 0) break;
    last = first;
    uint64_t rank_bytes = 0;
    while (first > 0 && claims[order[first - 1]].rank == claims[order[last - 1]].rank)
      rank_bytes += claims[order[--first]].bytes;
    below_bytes -= rank_bytes;
    missing = bytes - std::min(bytes, below_bytes);
  }
  std::sort(taken.begin(), taken.end());
  return taken;
}

}  // namespace gpushare::sched
