// Deadlines in turns: whose next iteration would win nothing if it waited goes first, within its part of the device.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "support/random.hpp"
#include "unit/sched/scheduler_fixture.hpp"

using namespace gpushare;
using namespace gpushare::sched;
using namespace gpushare::test::scheduling;

namespace {

constexpr uint64_t kOneMs = 1'000'000;

// Sessions of one lane. Session 1 serves requests, the others always have an iteration of 10 ms to run.
struct ServedLane {
  explicit ServedLane(const char* policy = "fair", size_t neighbours = 1)
      : scheduler(make(policy, one_lane())) {
    for (SessionId id = 1; id <= 1 + neighbours; ++id) REQUIRE(scheduler.arrive(spec(id, 1, 1), now).ok());
    actions(scheduler);
    for (SessionId id = 2; id <= 1 + neighbours; ++id) scheduler.ready(id, now);
    for (size_t i = 0; i < 30; ++i) CHECK(run(10 * kOneMs) != 1);  // 1 leaves its part of the device unused
  }
  static SchedulerOptions one_lane() {
    SchedulerOptions options = capacity(1000);
    options.max_lanes = 1;
    options.enqueues = false;
    return options;
  }
  // Runs the next iteration; whose it was. Others than 1 have another one.
  SessionId run(uint64_t length_ns) {
    const auto picked = scheduler.pick(0, now);
    REQUIRE(picked);
    scheduler.dispatched(*picked, 0, now);
    now += length_ns;
    scheduler.finished(*picked, length_ns, now);
    if (*picked != 1) scheduler.ready(*picked, now);
    return *picked;
  }
  // 1 has a batch that is to begin within so long.
  void submit(double worth, uint64_t within_ns) {
    scheduler.set_worth(1, worth, now + within_ns);
    scheduler.ready(1, now);
  }

  uint64_t now = 0;
  Scheduler scheduler;
};

}  // namespace

TEST_CASE("worth: what would be lost by waiting goes first while unused time is left") {
  ServedLane shared;
  // The first batch has its turn in any case, and those after it as long as the unused time lasts.
  for (uint64_t batch = 0; batch < 1 + kMostUnusedNs / (20 * kOneMs); ++batch) {
    shared.submit(1, 5 * kOneMs);
    INFO("batch " << batch);
    CHECK(shared.run(20 * kOneMs) == 1);
  }
  shared.submit(1, 5 * kOneMs);
  CHECK(shared.run(10 * kOneMs) == 2);
  CHECK(shared.scheduler.check().empty());
}

TEST_CASE("worth: a batch that can wait, is late already, or has no worth waits for its turn") {
  for (const auto& [worth, within_ns] :
       {std::pair(1.0, 200 * kOneMs), std::pair(0.0, 5 * kOneMs), std::pair(-1.0, 5 * kOneMs),
        std::pair(std::numeric_limits<double>::quiet_NaN(), 5 * kOneMs),
        std::pair(std::numeric_limits<double>::infinity(), 5 * kOneMs)}) {
    ServedLane shared;
    shared.submit(1, 5 * kOneMs);
    CHECK(shared.run(20 * kOneMs) == 1);
    shared.submit(worth, within_ns);
    INFO(worth << " within " << within_ns);
    CHECK(shared.run(10 * kOneMs) == 2);
  }
  ServedLane late;
  late.submit(1, 5 * kOneMs);
  CHECK(late.run(20 * kOneMs) == 1);
  late.submit(1, 5 * kOneMs);
  late.now += 6 * kOneMs;
  CHECK(late.run(10 * kOneMs) == 2);
}

TEST_CASE("worth: it is of one iteration, and of the session while it is there") {
  ServedLane shared;
  shared.submit(1, 500 * kOneMs);
  CHECK(shared.run(20 * kOneMs) == 1);
  shared.scheduler.ready(1, shared.now);  // an iteration that nothing was said of
  shared.now += 490 * kOneMs;
  CHECK(shared.run(10 * kOneMs) == 2);
  shared.submit(1, 5 * kOneMs);
  shared.scheduler.leave(1, shared.now);
  CHECK(shared.run(10 * kOneMs) == 2);
  shared.scheduler.set_worth(1, 1, shared.now + 5 * kOneMs);  // of nobody
  CHECK(shared.scheduler.check().empty());
}

TEST_CASE("worth: who has said that more waits is expected back at once, for a short time") {
  for (const bool comes : {true, false}) {
    ServedLane shared;
    shared.submit(1, 5 * kOneMs);
    REQUIRE(shared.scheduler.pick(0, shared.now) == SessionId{1});
    shared.scheduler.dispatched(1, 0, shared.now);
    shared.now += 20 * kOneMs;
    shared.scheduler.set_worth(1, 1, shared.now + 5 * kOneMs);
    shared.scheduler.finished(1, 20 * kOneMs, shared.now);
    CHECK_FALSE(shared.scheduler.pick(0, shared.now));
    const uint64_t until_ns = shared.scheduler.look_again_ns();
    CHECK(until_ns >= shared.now + kIdleForTurnNs);
    REQUIRE(until_ns <= shared.now + kMostExpectedNs);
    shared.now = comes ? until_ns - 1 : until_ns;
    if (comes) shared.submit(1, 4 * kOneMs);
    CHECK(shared.run(10 * kOneMs) == (comes ? 1 : 2));
    CHECK(shared.scheduler.check().empty());
  }
}

TEST_CASE("worth: of two that would be lost the greater one goes first") {
  for (const double other : {0.5, 2.0}) {
    ServedLane shared("fair", 2);
    shared.submit(1, 5 * kOneMs);
    CHECK(shared.run(20 * kOneMs) == 1);
    shared.submit(1, 5 * kOneMs);
    const SessionId next = *shared.scheduler.pick(0, shared.now) == 1 ? 2 : 1;
    CHECK(next == 2);  // 1 is ahead of the others
    for (SessionId id : {2, 3}) shared.scheduler.set_worth(id, other, shared.now + 5 * kOneMs);
    CHECK((shared.run(10 * kOneMs) == 1) == (other < 1));
  }
}

TEST_CASE("worth: of equal ones who has left more of its part unused goes first") {
  ServedLane shared;
  shared.submit(1, 5 * kOneMs);
  CHECK(shared.run(20 * kOneMs) == 1);
  shared.scheduler.set_worth(2, 1, shared.now + 5 * kOneMs);  // it has had the device all the time
  shared.submit(1, 5 * kOneMs);
  CHECK(shared.run(20 * kOneMs) == 1);
}

TEST_CASE("worth: ranks come before it") {
  ServedLane shared("priority");
  shared.scheduler.set_priority(2, 1, shared.now);
  shared.submit(1, 5 * kOneMs);
  CHECK(shared.run(10 * kOneMs) == 2);
  shared.scheduler.set_priority(2, 0, shared.now);
  CHECK(shared.run(10 * kOneMs) == 1);
}

// Each iteration lasts a moment, and each promise is broken.
TEST_CASE("worth: who says that more waits and does not come is not waited for after each iteration") {
  ServedLane shared;
  constexpr uint64_t kMoment = 10'000;
  uint64_t idle_ns = 0;
  for (int round = 0; round < 100; ++round) {
    shared.submit(1, 1000 * kOneMs);
    while (*shared.scheduler.pick(0, shared.now) != 1) (void)shared.run(kOneMs);
    shared.scheduler.dispatched(1, 0, shared.now);
    shared.now += kMoment;
    shared.scheduler.set_worth(1, 1, UINT64_MAX);
    shared.scheduler.finished(1, kMoment, shared.now);
    while (!shared.scheduler.pick(0, shared.now)) {
      const uint64_t until_ns = shared.scheduler.look_again_ns();
      REQUIRE(until_ns > shared.now);
      REQUIRE(until_ns <= shared.now + kMostExpectedNs);
      idle_ns += until_ns - shared.now;
      shared.now = until_ns;
    }
    CHECK(shared.run(kOneMs) == 2);
    REQUIRE(shared.scheduler.check().empty());
  }
  CHECK(idle_ns > 0);
  CHECK(idle_ns <= 100 / (1 + kUnbelieved) * kIdleForTurnNs);
}

TEST_CASE("worth: that more waits is not believed once its time is over") {
  ServedLane shared;
  shared.submit(1, 5 * kOneMs);
  REQUIRE(shared.scheduler.pick(0, shared.now) == SessionId{1});
  shared.scheduler.dispatched(1, 0, shared.now);
  shared.scheduler.set_worth(1, 1, shared.now + kOneMs / 100);
  shared.now += kOneMs / 50;
  shared.scheduler.finished(1, kOneMs / 50, shared.now);
  CHECK(shared.scheduler.pick(0, shared.now) == SessionId{2});
}

// Virtual time of a small weight is worth more at a great one.
TEST_CASE("worth: unused time stays the same device time when the weight changes") {
  ServedLane shared;
  shared.scheduler.set_weight(1, 0.001);
  shared.scheduler.ready(1, shared.now);
  CHECK(shared.run(kOneMs / 1000) == 1);
  for (int i = 0; i < 400; ++i) CHECK(shared.run(10 * kOneMs) != 1);
  shared.submit(1, 5 * kOneMs);
  shared.scheduler.set_weight(1, 1);
  uint64_t ran_ns = 0;
  for (int batch = 0; batch < 100; ++batch) {
    shared.submit(1, 5 * kOneMs);
    if (shared.run(10 * kOneMs) != 1) break;
    ran_ns += 10 * kOneMs;
  }
  CHECK(ran_ns <= kMostUnusedNs + 20 * kOneMs);
  CHECK(shared.scheduler.check().empty());
}

// One that always says that its next iteration would be lost, and one that says nothing.
TEST_CASE("worth: over time nobody has more than its part, whatever it says") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  for (const double weight : {1.0, 3.0}) {
    ServedLane shared;
    shared.scheduler.set_weight(1, weight);
    uint64_t service[3] = {};
    for (int step = 0; step < 20'000; ++step) {
      const uint64_t length_ns = test::uniform(random, 1, 20) * kOneMs;
      shared.submit(1e30, test::uniform(random, 0, 20) * kOneMs);
      service[shared.run(length_ns)] += length_ns;
      // It was owed up to kMostUnusedNs at the beginning, and two iterations lie between any two sessions.
      const double ahead_ns = static_cast<double>(service[1]) / weight - static_cast<double>(service[2]);
      REQUIRE(ahead_ns <= static_cast<double>(kMostUnusedNs) / weight + 40e6);
      REQUIRE(ahead_ns >= -40e6);
    }
    CHECK(shared.scheduler.check().empty());
  }
}
