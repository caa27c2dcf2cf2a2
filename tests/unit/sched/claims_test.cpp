// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "sched/claims.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "unit/sched/price_distance.hpp"

namespace {

using namespace gpushare;  // NOLINT
using sched::Claim;
using sched::give_up;

// Prices by rank, highest rank first: what is compared.
std::vector<double> prices(const std::vector<Claim>& claims, uint64_t set) {
  std::map<uint32_t, double, std::greater<>> by_rank;
  for (const Claim& claim : claims) by_rank[claim.rank] += 0;
  for (size_t i = 0; i < claims.size(); ++i)
    if ((set >> i & 1) != 0) by_rank[claims[i].rank] += claims[i].price_ns;
  std::vector<double> out;
  for (const auto& [rank, price] : by_rank) out.push_back(price);
  return out;
}

uint64_t bytes_of(const std::vector<Claim>& claims, uint64_t set) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < claims.size(); ++i)
    if ((set >> i & 1) != 0) bytes += claims[i].bytes;
  return bytes;
}

uint64_t set_of(const std::vector<size_t>& indexes) {
  uint64_t set = 0;
  for (const size_t index : indexes) set |= uint64_t{1} << index;
  return set;
}

std::vector<size_t> choose_claims(const std::vector<Claim>& claims, uint64_t bytes) {
  const std::vector<uint64_t> given = give_up(claims, bytes);
  std::vector<size_t> chosen;
  for (size_t i = 0; i < claims.size(); ++i) {
    if (given[i] == 0) continue;
    REQUIRE(given[i] == claims[i].bytes);
    chosen.push_back(i);
  }
  return chosen;
}

TEST_CASE("rank before price, and within a rank the least price") {
  const std::vector<Claim> claims{{10, 2, 1}, {10, 1, 100}, {4, 1, 10}, {6, 1, 12}, {20, 3, 0}};
  CHECK(choose_claims(claims, 0).empty());
  CHECK(choose_claims(claims, 51) == std::vector<size_t>{0, 1, 2, 3, 4});  // all that there is
  CHECK(choose_claims(claims, 50) == std::vector<size_t>{0, 1, 2, 3, 4});
  CHECK(choose_claims(claims, 1) == std::vector<size_t>{2});
  CHECK(choose_claims(claims, 10) == std::vector<size_t>{2, 3});
  // The higher rank gives what the lower ones together cannot, and these no more than is needed beside it.
  CHECK(choose_claims(claims, 21) == std::vector<size_t>{0, 1, 2});
  CHECK(choose_claims(claims, 20) == std::vector<size_t>{1, 2, 3});
  CHECK(choose_claims({}, 1).empty());
  CHECK(choose_claims(std::vector<Claim>{{0, 0, 0}}, 1).empty());
}

TEST_CASE("what nobody has wanted for long costs less to take") {
  CHECK(sched::price_of(10, 20, 0) == 30);
  CHECK(sched::price_of(10, 20, 20) == 20);
  CHECK(sched::price_of(10, 20, 1e30) == Approx(10));
  CHECK(sched::price_of(10, 0, 0) == 10);
}

TEST_CASE("parts: rank, then the cheapest byte, then the order of the list, and never more than is missing") {
  const std::vector<Claim> claims{
      {100, 1, 0, true}, {50, 0, 100, true}, {50, 0, 50, true}, {50, 0, 50, true}, {0, 0, 0, true}};
  using Parts = std::vector<uint64_t>;
  CHECK(give_up(claims, 0) == Parts{0, 0, 0, 0, 0});
  CHECK(give_up(claims, 30) == Parts{0, 0, 30, 0, 0});
  CHECK(give_up(claims, 120) == Parts{0, 20, 50, 50, 0});
  CHECK(give_up(claims, 151) == Parts{1, 50, 50, 50, 0});
  CHECK(give_up(claims, 1000) == Parts{100, 50, 50, 50, 0});
}

TEST_CASE("parts beside claims that go whole") {
  using Parts = std::vector<uint64_t>;
  // The part closes what the cheaper claim leaves.
  CHECK(give_up(std::vector<Claim>{{60, 0, 6}, {100, 0, 20, true}}, 70) == Parts{60, 10});
  // A whole claim at a lower price than the part that is missing.
  CHECK(give_up(std::vector<Claim>{{60, 0, 6}, {10, 0, 9, true}, {70, 0, 100}}, 65) == Parts{60, 5, 0});
  CHECK(give_up(std::vector<Claim>{{60, 0, 6}, {70, 0, 8}, {10, 0, 90, true}}, 65) == Parts{0, 70, 0});
  // A part that is in the prefix gives no more than is needed beside the claim that closes it.
  CHECK(give_up(std::vector<Claim>{{20, 0, 1, true}, {40, 0, 40}}, 50) == Parts{10, 40});
  // A price that cannot be compared is no reason to give nothing.
  CHECK(give_up(std::vector<Claim>{{10, 0, INFINITY}}, 5) == Parts{10});
}

TEST_CASE("claims of no bytes hide nobody, whatever the others' bytes cost") {
  const std::vector<Claim> claims{{0, 1, 0}, {10, 1, 1e300}, {5, 0, 1}};
  CHECK(give_up(claims, 12) == std::vector<uint64_t>{0, 10, 5});
}

TEST_CASE("the choice beside exhaustive search") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  test::PriceDistance distance;
  for (int round = 0; round < 3000; ++round) {
    std::vector<Claim> claims(test::uniform(random, 1, 12));
    const uint32_t ranks = static_cast<uint32_t>(test::uniform(random, 1, 3));
    for (Claim& claim : claims)
      claim = {test::uniform(random, 0, 60), static_cast<uint32_t>(test::uniform(random, 1, ranks)),
               static_cast<double>(test::uniform(random, 1, 100))};
    const uint64_t all = (uint64_t{1} << claims.size()) - 1;
    const uint64_t wanted = test::uniform(random, 1, std::max<uint64_t>(bytes_of(claims, all), 1));
    const uint64_t chosen = set_of(choose_claims(claims, wanted));
    if (bytes_of(claims, all) < wanted) continue;
    REQUIRE(bytes_of(claims, chosen) >= wanted);
    for (size_t i = 0; i < claims.size(); ++i) {
      if ((chosen >> i & 1) == 0) continue;
      REQUIRE(claims[i].bytes > 0);
    }
    std::vector<double> best;
    for (uint64_t set = 0; set <= all; ++set)
      if (bytes_of(claims, set) >= wanted)
        if (std::vector<double> found = prices(claims, set); best.empty() || found < best) best = found;
    distance.add(best, prices(claims, chosen));
  }
  INFO(distance.text());
  CHECK(distance.mean() < 1.02);  // 1.004, at worst 1.59 times the least price; 96% are optimal
}

}  // namespace
