// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <optional>
#include <vector>

#include "sched/lane_finder.hpp"
#include "sched/scheduler.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::sched;
using Kind = Placement::Kind;

TEST_CASE("algorithm 2.1 opens a lane while one fits") {
  const std::vector<LaneView> lanes = {{0, 50, 0, 1}};
  const Placement found = find_lane(LaneFinderKind::kSalus, 10, 40, 50, lanes, true);
  CHECK(found.kind == Kind::kOpen);
  CHECK(found.bytes == 40);
  CHECK(find_lane(LaneFinderKind::kSalus, 11, 40, 50, {}, true).kind == Kind::kNone);
}

TEST_CASE("algorithm 2.1 then joins the best fit, and only if P fits too") {
  const std::vector<LaneView> lanes = {{0, 90, 0, 1}, {1, 60, 0, 1}, {2, 40, 0, 1}};
  Placement found = find_lane(LaneFinderKind::kSalus, 10, 50, 10, lanes, true);
  CHECK(found.kind == Kind::kJoin);
  CHECK(found.lane == 1);
  CHECK(found.bytes == 60);
  CHECK(find_lane(LaneFinderKind::kSalus, 11, 50, 10, lanes, true).kind == Kind::kNone);
  found = find_lane(LaneFinderKind::kSalus, 0, 30, 1000, lanes, false);  // the limit on lanes is reached
  CHECK(found.kind == Kind::kJoin);
  CHECK(found.lane == 2);
}

TEST_CASE("algorithm 2.1 at last enlarges the smallest lane that can grow") {
  const std::vector<LaneView> lanes = {{0, 20, 0, 1}, {1, 60, 0, 1}, {2, 40, 0, 1}};
  Placement found = find_lane(LaneFinderKind::kSalus, 5, 70, 35, lanes, true);
  CHECK(found.kind == Kind::kEnlarge);
  CHECK(found.lane == 2);  // lane 0 would need 50 more, 30 are left after P
  CHECK(found.bytes == 70);
  CHECK(find_lane(LaneFinderKind::kSalus, 5, 70, 14, lanes, true).kind == Kind::kNone);
}

TEST_CASE("balanced takes the lane with the least work ahead, compact shares before it opens") {
  const std::vector<LaneView> lanes = {{0, 50, 900, 1}, {1, 70, 100, 3}, {2, 10, 0, 1}};
  CHECK(find_lane(LaneFinderKind::kBalanced, 0, 50, 20, lanes, false).lane == 1);
  CHECK(find_lane(LaneFinderKind::kBalanced, 0, 50, 40, lanes, false).lane == 2);  // growing is allowed
  CHECK(find_lane(LaneFinderKind::kCompact, 0, 50, 100, lanes, true).lane == 0);
  CHECK(find_lane(LaneFinderKind::kCompact, 0, 4, 100, lanes, true).kind ==
        Kind::kOpen);  // no lane fits closely
}

TEST_CASE("no placement promises more than is free") {
  test::Random random(test::seed());
  for (int i = 0; i < 20'000; ++i) {
    std::vector<LaneView> lanes;
    for (uint64_t n = test::uniform(random, 0, 5); n-- > 0;)
      lanes.push_back(
          {static_cast<LaneId>(lanes.size()), test::uniform(random, 0, 100), test::uniform(random, 0, 9), 1});
    const uint64_t p = test::uniform(random, 0, 120), e = test::uniform(random, 0, 120),
                   free = test::uniform(random, 0, 120);
    for (const auto kind : {LaneFinderKind::kSalus, LaneFinderKind::kBalanced, LaneFinderKind::kCompact}) {
      const Placement found = find_lane(kind, p, e, free, lanes, test::uniform(random, 0, 1) != 0);
      if (found.kind == Kind::kNone) continue;
      const uint64_t had = found.kind == Kind::kOpen ? 0 : lanes[found.lane].bytes;
      REQUIRE(found.bytes >= e);
      REQUIRE(p + (found.bytes - had) <= free);
    }
  }
}

TEST_CASE("lane finders have names, and a policy may name one") {
  for (const char* name : {"salus", "balanced", "compact"}) CHECK(lane_finder_named(name).ok());
  CHECK(*lane_finder_named("compact") == LaneFinderKind::kCompact);
  const auto missing = lane_finder_named("first");
  CHECK(missing.status().code() == GPUSHARE_NOT_FOUND);
  CHECK(missing.status().message().find("'first'; there are: salus, balanced, compact") != std::string::npos);

  gpushare_policy_ops ops{};
  ops.struct_size = sizeof(ops);
  ops.share = [](void*, const gpushare_candidate* session) -> double { return session->weight; };
  ops.lane_finder = "first";
  CHECK(make_custom_policy(&ops).status().code() == GPUSHARE_NOT_FOUND);
  ops.lane_finder = "compact";
  const auto lanes = [&](std::optional<LaneFinderKind> finder) {
    auto policy = make_custom_policy(&ops);
    REQUIRE(policy.ok());
    SchedulerOptions options;
    options.capacity_bytes = 1000;
    options.lane_finder = finder;
    Scheduler scheduler(options, std::move(*policy));
    for (SessionId id = 1; id <= 2; ++id) {
      SessionSpec spec;
      spec.id = id;
      spec.persistent_bytes = spec.ephemeral_bytes = 10;
      REQUIRE(scheduler.arrive(spec, 0).ok());
    }
    return scheduler.lanes_open();
  };
  CHECK(lanes(std::nullopt) == 1);
  CHECK(lanes(LaneFinderKind::kSalus) == 2);
  ops.struct_size = offsetof(gpushare_policy_ops, lane_finder);  // a caller that does not know the field
  CHECK(lanes(std::nullopt) == 2);
}
