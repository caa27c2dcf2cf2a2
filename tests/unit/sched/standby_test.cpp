// Which models keep their first layers: by hand, and against the best choice by brute force.
// SPDX-License-Identifier: Apache-2.0
#include "sched/standby.hpp"

#include <algorithm>

#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using sched::ModelId;
using sched::StandbyWish;

TEST_CASE("who is worth most a byte keeps its layers; what takes or saves nothing is not granted") {
  const std::vector<StandbyWish> wishes = {{1, 40, 10, false}, {2, 40, 30, false}, {3, 40, 20, false},
                                           {4, 0, 99, false},  {5, 10, 0, true},   {6, 101, 999, false}};
  CHECK(sched::grant_standby(wishes, 100) == std::vector<ModelId>{2, 3});
  CHECK(sched::grant_standby(wishes, 40) == std::vector<ModelId>{2});
  CHECK(sched::grant_standby(wishes, 39).empty());
  CHECK(sched::grant_standby({}, 100).empty());
  // One that is worth more than the small ones that fill the room before it.
  const std::vector<StandbyWish> large = {{1, 1, 2, false}, {2, 100, 100, false}};
  CHECK(sched::grant_standby(large, 100) == std::vector<ModelId>{2});
}

TEST_CASE("what is held stays until another is clearly worth more") {
  for (const double worth : {1.0, 1.2, 1.3}) {
    const std::vector<StandbyWish> wishes = {{1, 50, worth, false}, {2, 50, 1.0, true}};
    CHECK(sched::grant_standby(wishes, 60) == std::vector<ModelId>{worth < 1.25 ? ModelId{2} : ModelId{1}});
  }
}

TEST_CASE("at least half of what the best choice is worth, and never above the budget") {
  test::Random random(test::seed());
  int best_found = 0;
  constexpr int kRounds = 2000;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<StandbyWish> wishes(test::uniform(random, 1, 10));
    for (size_t i = 0; i < wishes.size(); ++i)
      wishes[i] = {i + 1, test::uniform(random, 1, 60), static_cast<double>(test::uniform(random, 1, 50)),
                   false};
    const uint64_t budget = test::uniform(random, 0, 150);
    uint64_t bytes = 0;
    double worth = 0;
    for (const ModelId id : sched::grant_standby(wishes, budget)) {
      bytes += wishes[id - 1].bytes;
      worth += wishes[id - 1].worth;
    }
    REQUIRE(bytes <= budget);
    double best = 0;
    for (uint32_t set = 0; set < (1u << wishes.size()); ++set) {
      uint64_t set_bytes = 0;
      double set_worth = 0;
      for (size_t i = 0; i < wishes.size(); ++i)
        if ((set >> i & 1) != 0) {
          set_bytes += wishes[i].bytes;
          set_worth += wishes[i].worth;
        }
      if (set_bytes <= budget) best = std::max(best, set_worth);
    }
    REQUIRE(worth * 2 >= best);
    best_found += worth == best ? 1 : 0;
  }
  CHECK(best_found > kRounds / 2);
}
