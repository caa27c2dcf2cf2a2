// Which models stay: by hand, against a plain re-statement of least recently used, and against the best set
// by brute force.
// SPDX-License-Identifier: Apache-2.0
#include "sched/residency.hpp"

#include <algorithm>
#include <list>
#include <map>

#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using sched::ModelId;
using sched::Residency;
using sched::ResidencyPolicy;

namespace {

// A request for a model where models may have `capacity` bytes together; which are dropped for it.
std::vector<ModelId> request(Residency& residency, uint64_t capacity, ModelId id, uint64_t now) {
  residency.request(id, now);
  const uint64_t bytes = residency.resident_bytes();
  return bytes > capacity ? residency.shed(bytes - capacity, id, now) : std::vector<ModelId>();
}

}  // namespace

TEST_CASE("least recently used drops the model requested longest ago") {
  Residency residency(ResidencyPolicy::kLeastRecentlyUsed);
  for (ModelId id = 1; id <= 4; ++id) residency.add(id, 40, 10);
  CHECK(request(residency, 100, 1, 0).empty());
  CHECK(request(residency, 100, 2, 1).empty());
  CHECK(request(residency, 100, 1, 2).empty());
  CHECK(request(residency, 100, 3, 3) == std::vector<ModelId>{2});
  CHECK(residency.resident(1));
  CHECK_FALSE(residency.resident(2));
  CHECK(residency.resident_bytes() == 80);
}

TEST_CASE("weighted keeps what is dear to load and often wanted") {
  Residency residency(ResidencyPolicy::kWeighted, 1'000'000);
  residency.add(1, 50, 1000);
  residency.add(2, 50, 10);
  residency.add(3, 50, 10);
  CHECK(request(residency, 100, 1, 0).empty());
  CHECK(request(residency, 100, 2, 1).empty());
  CHECK(request(residency, 100, 3, 2) == std::vector<ModelId>{2});  // 1 is older and dearer
  // Often enough, a cheap one outweighs it.
  for (uint64_t now = 3; now < 203; ++now) CHECK(request(residency, 100, 3, now).empty());
  CHECK(residency.worth(3, 203) > residency.worth(1, 203));
  CHECK(request(residency, 100, 2, 203) == std::vector<ModelId>{1});
  // Popularity fades: after 20 half-lives little is left of it.
  CHECK(residency.worth(3, 20'000'203) < 0.01);
}

TEST_CASE("one large model of little worth goes before several small dear ones, and the other way") {
  for (const bool large_is_dear : {false, true}) {
    Residency residency(ResidencyPolicy::kWeighted, uint64_t{1} << 60);
    residency.add(1, 60, large_is_dear ? 1000 : 15);
    residency.add(2, 20, 10);
    residency.add(3, 20, 10);
    residency.add(4, 40, 1);
    for (ModelId id = 1; id <= 3; ++id) CHECK(request(residency, 100, id, 0).empty());
    auto drops = request(residency, 100, 4, 1);
    std::sort(drops.begin(), drops.end());
    CHECK(drops == (large_is_dear ? std::vector<ModelId>{2, 3} : std::vector<ModelId>{1}));
  }
}

TEST_CASE("least recently used equals its plain statement on random requests") {
  const uint64_t seed = test::seed();
  INFO("seed " << seed);
  test::Random random(seed);
  for (int round = 0; round < 200; ++round) {
    const uint64_t capacity = test::uniform(random, 10, 100);
    Residency residency(ResidencyPolicy::kLeastRecentlyUsed);
    std::map<ModelId, uint64_t> bytes;
    for (ModelId id = 1; id <= 12; ++id) {
      bytes[id] = test::uniform(random, 1, capacity);
      residency.add(id, bytes[id], 1);
    }
    std::list<ModelId> recent;  // most recent first
    for (int step = 0; step < 100; ++step) {
      const ModelId id = test::uniform(random, 1, 12);
      const bool had = std::find(recent.begin(), recent.end(), id) != recent.end();
      REQUIRE(residency.resident(id) == had);
      const auto dropped = request(residency, capacity, id, static_cast<uint64_t>(step / 3));
      recent.remove(id);
      recent.push_front(id);
      uint64_t used = 0;
      for (const ModelId each : recent) used += bytes[each];
      std::vector<ModelId> drops, spared;
      while (used > capacity) {
        drops.push_back(recent.back());
        used -= bytes[recent.back()];
        recent.pop_back();
      }
      // Drops that prove unnecessary are spared, the most recent first.
      if (!drops.empty())
        for (size_t i = drops.size() - 1; i-- > 0;) {
          if (used + bytes[drops[i]] > capacity) continue;
          used += bytes[drops[i]];
          spared.push_back(drops[i]);
          drops.erase(drops.begin() + static_cast<std::ptrdiff_t>(i));
        }
      for (const ModelId each : spared) recent.push_back(each);  // in the order of their last requests
      REQUIRE(dropped == drops);
      REQUIRE(residency.resident_bytes() == used);
    }
  }
}

TEST_CASE("weighted drops a set of at most twice the worth of the best one, by brute force") {
  const uint64_t seed = test::seed() + 1;
  INFO("seed " << seed);
  test::Random random(seed);
  size_t misses = 0, best_found = 0;
  for (int round = 0; round < 300; ++round) {
    const uint64_t capacity = test::uniform(random, 50, 200);
    Residency residency(ResidencyPolicy::kWeighted, 1000);
    std::map<ModelId, uint64_t> bytes;
    for (ModelId id = 1; id <= 14; ++id) {
      bytes[id] = test::uniform(random, 1, capacity / 2);
      residency.add(id, bytes[id], test::uniform(random, 1, 100));
    }
    for (uint64_t now = 0; now < 60; ++now) {
      const ModelId id = test::uniform(random, 1, 14);
      std::vector<ModelId> there;
      for (const auto& [model, size] : bytes)
        if (residency.resident(model)) there.push_back(model);
      const uint64_t used = residency.resident_bytes();
      const bool had = residency.resident(id);
      const auto drops = request(residency, capacity, id, now);
      REQUIRE(residency.resident(id));
      REQUIRE(residency.resident_bytes() <= capacity);
      if (had || used + bytes[id] <= capacity) {
        REQUIRE(drops.empty());
        continue;
      }
      double best = 1e300;
      for (uint32_t set = 0; set < (1u << there.size()); ++set) {
        double worth = 0;
        uint64_t freed = 0;
        for (size_t i = 0; i < there.size(); ++i)
          if ((set >> i) & 1) {
            worth += residency.worth(there[i], now);
            freed += bytes[there[i]];
          }
        if (used - freed + bytes[id] <= capacity) best = std::min(best, worth);
      }
      double worth = 0;
      for (const ModelId dropped : drops) worth += residency.worth(dropped, now);
      REQUIRE(worth <= 2 * best * (1 + 1e-9));
      REQUIRE(worth >= best * (1 - 1e-9));
      ++misses;
      best_found += worth <= best * (1 + 1e-9);
    }
  }
  REQUIRE(misses > 1000);
  // Far from the worst case as a rule.
  CHECK(best_found * 10 > misses * 7);
}

TEST_CASE("models are shed for room that others took, and dropped models come back") {
  for (const auto policy : {ResidencyPolicy::kLeastRecentlyUsed, ResidencyPolicy::kWeighted}) {
    Residency residency(policy);
    for (ModelId id = 1; id <= 4; ++id) residency.add(id, id * 10, 100);
    for (ModelId id = 1; id <= 4; ++id) residency.request(id, id);
    const std::vector<ModelId> first = residency.shed(1, 4, 10);
    REQUIRE(first.size() == 1);
    CHECK(first[0] != 4);
    // More than there is: all that may go.
    CHECK(residency.shed(1000, 4, 11).size() == 2);
    CHECK(residency.shed(1, 4, 12).empty());
    CHECK(residency.resident_bytes() == 40);
    residency.drop(4);
    residency.drop(4);
    CHECK(residency.resident_bytes() == 0);
    residency.request(4, 13);
    CHECK(residency.resident_bytes() == 40);
    residency.remove(4);
    CHECK(residency.resident_bytes() == 0);
    // Models that are not known.
    residency.request(4, 14);
    residency.drop(4);
    CHECK(residency.worth(4, 14) == 0);
    CHECK(residency.resident_bytes() == 0);
  }
}
