// Guesses of where iterations begin (src/shim/pattern.hpp).
// SPDX-License-Identifier: Apache-2.0
#include "shim/pattern.hpp"

#include <memory>
#include <set>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"

using gpushare::shim::LaunchPattern;

namespace {

// The places of the iteration at which launches of `rounds` iterations were taken for a beginning, of the last half of
// the rounds.
std::multiset<size_t> places(LaunchPattern& pattern, const std::vector<uint64_t>& iteration, int rounds) {
  std::multiset<size_t> out;
  for (int round = 0; round < rounds; ++round)
    for (size_t place = 0; place < iteration.size(); ++place)
      if (pattern.next(iteration[place]) && round >= rounds / 2) out.insert(place);
  return out;
}

// One place, once in each round.
bool once_a_round(const std::multiset<size_t>& found, size_t rounds) {
  return found.size() == rounds && std::set<size_t>(found.begin(), found.end()).size() == 1;
}

}  // namespace

TEST_CASE("an iteration of launches is found where it begins anew") {
  const auto pattern = std::make_unique<LaunchPattern>();
  CHECK(once_a_round(places(*pattern, {10, 11, 12, 13, 14, 15}, 20), 10));
}

TEST_CASE("layers inside an iteration are not taken for it") {
  // Twelve equal layers of four kernels, a loss and an update.
  std::vector<uint64_t> iteration;
  for (int layer = 0; layer < 12; ++layer)
    for (const uint64_t kernel : {1, 2, 2, 3}) iteration.push_back(kernel);
  iteration.push_back(4);
  iteration.push_back(5);
  const auto pattern = std::make_unique<LaunchPattern>();
  const auto found = places(*pattern, iteration, 20);
  CHECK(once_a_round(found, 10));
  CHECK(*found.begin() >= 48);  // the loss or the update
}

TEST_CASE("one kernel over and over, two by turns, and launches without order have no iterations") {
  const auto pattern = std::make_unique<LaunchPattern>();
  CHECK(places(*pattern, {7}, 100).empty());
  CHECK(places(*pattern, {7, 8}, 100).empty());
  const uint64_t seed = gpushare::test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  gpushare::test::Random random(seed);
  int found = 0;
  for (int i = 0; i < 10'000; ++i) found += pattern->next(gpushare::test::uniform(random, 100, 130)) ? 1 : 0;
  CHECK(found < 10);
}

TEST_CASE("a program that changes to other iterations is followed") {
  const auto pattern = std::make_unique<LaunchPattern>();
  CHECK(once_a_round(places(*pattern, {1, 2, 3, 4, 5, 6, 7, 8, 9}, 20), 10));
  // Shorter ones, of other kernels: the former mark comes no more.
  CHECK(once_a_round(places(*pattern, {21, 22, 23, 24}, 40), 20));
  // Longer ones, with some of the same kernels.
  CHECK(once_a_round(places(*pattern, {21, 22, 23, 24, 1, 2, 3, 4, 5, 6, 7}, 20), 10));
}
