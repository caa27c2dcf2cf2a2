// SPDX-License-Identifier: Apache-2.0
#include "sched/claims.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

#include "base/saturate.hpp"

namespace gpushare::sched {
namespace {

// As a float, so that an equal price a byte stays equal for claims of any size.
float by_byte(const Claim& claim) {
  return claim.bytes == 0 ? std::numeric_limits<float>::infinity()
                          : static_cast<float>(claim.price_ns / static_cast<double>(claim.bytes));
}

// The claims of one rank give at least `bytes`, which is above 0 and no more than they have. `order` has the cheapest byte first.
// Returns what they give together.
uint64_t give_of_rank(std::span<const Claim> claims, std::span<const size_t> order, uint64_t bytes,
                      std::vector<uint64_t>& given) {
  // A claim smaller than the missing bytes joins the prefix. A claim that has all of them closes the prefix: the two are one
  // solution. The search goes on without that claim and keeps the cheapest solution. One that closes it with a part is the last
  // to be looked at, because every later byte is dearer.
  double best_price = std::numeric_limits<double>::infinity(), prefix_price = 0;
  uint64_t prefix_bytes = 0, closing_bytes = 0;
  std::vector<size_t> prefix;
  size_t best_prefix = 0, closes = order.front();
  for (const size_t index : order) {
    const Claim& claim = claims[index];
    if (claim.bytes == 0) continue;
    const uint64_t missing = bytes - prefix_bytes;
    if (claim.bytes < missing) {
      prefix.push_back(index);
      prefix_price += claim.price_ns;
      prefix_bytes += claim.bytes;
      continue;
    }
    const uint64_t gives = claim.in_parts ? missing : claim.bytes;
    const double part = static_cast<double>(gives) / static_cast<double>(claim.bytes);
    if (const double price = prefix_price + claim.price_ns * part; closing_bytes == 0 || price < best_price) {
      best_price = price;
      best_prefix = prefix.size();
      closes = index;
      closing_bytes = gives;
    }
    if (claim.in_parts) break;
  }
  prefix.resize(best_prefix);
  uint64_t sum = given[closes] = closing_bytes;
  for (const size_t index : prefix) sum += given[index] = claims[index].bytes;
  prefix.push_back(closes);
  std::stable_sort(prefix.begin(), prefix.end(),
                   [&](size_t a, size_t b) { return claims[a].price_ns > claims[b].price_ns; });
  for (const size_t index : prefix) {
    const uint64_t spare_bytes = sum - bytes;
    const uint64_t spared = claims[index].in_parts        ? std::min(spare_bytes, given[index])
                            : given[index] <= spare_bytes ? given[index]
                                                          : 0;
    given[index] -= spared;
    sum -= spared;
  }
  return sum;
}

}  // namespace

std::vector<size_t> giving_order(std::span<const Claim> claims) {
  std::vector<size_t> order(claims.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::tuple(claims[a].rank, by_byte(claims[a]), a) <
           std::tuple(claims[b].rank, by_byte(claims[b]), b);
  });
  return order;
}

double decayed(double value, uint64_t since_ns, uint64_t now_ns) {
  const auto age_ns = static_cast<double>(now_ns - std::min(now_ns, since_ns));
  return value * std::exp2(-age_ns / static_cast<double>(kRequestHalfLifeNs));
}

double price_of(double take_ns, double restore_ns, double idle_ns) {
  return restore_ns <= 0 ? take_ns : take_ns + restore_ns * restore_ns / (restore_ns + idle_ns);
}

std::vector<uint64_t> give_up(std::span<const Claim> claims, uint64_t bytes) {
  std::vector<uint64_t> given(claims.size());
  if (bytes == 0) return given;
  const std::vector<size_t> order = giving_order(claims);
  // Where each rank begins in the order, and the bytes below it, up to the rank that makes the rest of the room.
  struct Rank {
    size_t first, end;
    uint64_t below_bytes;
  };
  std::vector<Rank> ranks;
  uint64_t sum = 0;
  for (size_t at = 0; at < order.size() && sum < bytes;) {
    Rank rank{at, at, sum};
    for (; rank.end < order.size() && claims[order[rank.end]].rank == claims[order[at]].rank; ++rank.end)
      sum = base::add_saturated(sum, claims[order[rank.end]].bytes);
    ranks.push_back(rank);
    at = rank.end;
  }
  bytes = std::min(bytes, sum);
  // The highest rank takes as little as it can; what it makes beyond the need is spared in the ranks below, the highest first.
  for (auto rank = ranks.rbegin(); rank != ranks.rend() && bytes > 0; ++rank) {
    if (bytes <= rank->below_bytes) continue;
    const auto of_rank = std::span(order).subspan(rank->first, rank->end - rank->first);
    bytes -= std::min(bytes, give_of_rank(claims, of_rank, bytes - rank->below_bytes, given));
  }
  return given;
}

}  // namespace gpushare::sched
