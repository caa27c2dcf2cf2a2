// What the scheduler keeps instead of looking at every session and lane (peers.hpp): it is what the sessions say, at each
// step of random schedules, and it spares the policy's questions.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>

#include "sched/turn_rules.hpp"
#include "scheduler_fixture.hpp"

using namespace gpushare::test::scheduling;

namespace {

// As priority. Counts how often it is asked who goes before.
class Counting final : public Policy {
 public:
  explicit Counting(std::shared_ptr<size_t> asked) : asked_(std::move(asked)) {}
  std::string_view name() const override { return "counting"; }
  Answers answers() const override { return {.before = true, .ranks = true}; }
  bool before(const SessionView& a, const SessionView& b) const override {
    ++*asked_;
    return a.priority > b.priority;
  }
  uint64_t rank(const SessionView& session) const override {
    return static_cast<uint64_t>(1000 - session.priority);
  }

 private:
  std::shared_ptr<size_t> asked_;
};

}  // namespace

TEST_CASE("where ranks are numbers an iteration asks nobody who goes before") {
  const auto asked = std::make_shared<size_t>(0);
  SchedulerOptions options = capacity(1'000'000);
  options.keeps_lag_ns = kKeepsLagNs;
  Scheduler scheduler(options, std::make_unique<Counting>(asked));
  for (SessionId id = 1; id <= 100; ++id) {
    SessionSpec each = spec(id, 10, 100);
    each.priority = static_cast<int32_t>(id % 3);
    REQUIRE(scheduler.arrive(each, 0).ok());
    scheduler.ready(id, 0);
  }
  scheduler.take_actions();
  *asked = 0;
  uint64_t now = 0;
  for (int i = 0; i < 100; ++i) {
    for (LaneId lane = 0; lane < scheduler.lane_limit(); ++lane) {
      const auto picked = scheduler.pick(lane, now);
      if (!picked) continue;
      scheduler.dispatched(*picked, lane, now);
      now += 1000;
      scheduler.finished(*picked, 1000, now, 1);
      scheduler.ready(*picked, now);
    }
    REQUIRE(scheduler.check().empty());
  }
  REQUIRE(*asked == 0);
}

// The number of a rank may be the same under both policies, though the one asks who goes before and the other does not.
TEST_CASE("what is kept for turns follows a new policy whose ranks have the same numbers") {
  SchedulerOptions options = capacity(20'000);
  options.keeps_lag_ns = kKeepsLagNs;
  Scheduler scheduler = make("fair", options);
  for (SessionId id = 1; id <= 4; ++id) {
    SessionSpec each = spec(id, 10, 100);
    each.priority = INT32_MAX;
    REQUIRE(scheduler.arrive(each, 0).ok());
    scheduler.ready(id, 0);
  }
  scheduler.take_actions();
  const LaneId lane = scheduler.lane_of(1);
  REQUIRE(scheduler.pick(lane, 0) == 1);
  scheduler.dispatched(1, lane, 0);
  scheduler.not_ready(2, 0);
  for (const char* policy : {"priority", "fair", "srtf", "priority", "pack"}) {
    scheduler.set_policy(std::move(*make_policy(policy)), 1);
    for (SessionId id = 2; id <= 4; ++id) (void)scheduler.would_pick(id, scheduler.lane_of(id), 1);
    scheduler.ready(3, 1);  // looks at the others' places
    scheduler.not_ready(3, 1);
    REQUIRE(scheduler.check() == "");
  }
}

TEST_CASE("a lane that need not be asked has no turn, and what is kept for turns is what the sessions say") {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    INFO("seed " << seed);
    std::mt19937_64 random(seed);
    const auto any = [&](uint64_t below) { return random() % below; };
    SchedulerOptions options = capacity(20'000);
    options.max_lanes = static_cast<uint32_t>(any(2) * 6);
    options.keeps_lag_ns = 1'000'000;
    Scheduler scheduler = make(seed % 3 == 0 ? "priority" : "fair", options);
    uint64_t now = 0;
    SessionId next = 1;
    std::vector<std::pair<SessionId, LaneId>> flying;
    for (int step = 0; step < 2000; ++step) {
      now += any(5) == 0 ? any(20'000'000) : any(2000);
      const SessionId some = 1 + any(next);
      switch (any(8)) {
        case 0:
          if (next < 40) {
            SessionSpec each = spec(next++, any(300), 50 + any(4) * 100);
            each.priority = static_cast<int32_t>(any(3));
            each.weight = 1 + static_cast<double>(any(3));
            REQUIRE(scheduler.arrive(each, now).ok());
          }
          break;
        case 1:
          if (any(6) == 0) scheduler.set_priority(some, static_cast<int32_t>(any(3)), now);
          if (any(6) == 0) scheduler.set_weight(some, 1 + static_cast<double>(any(3)));
          break;
        case 2:
          scheduler.not_ready(some, now);
          break;
        case 3:
          if (!flying.empty()) {
            const size_t at = any(flying.size());
            scheduler.finished(flying[at].first, any(3'000'000), now, 1);
            flying.erase(flying.begin() + static_cast<ptrdiff_t>(at));
          }
          break;
        case 4:
          if (any(10) == 0 && std::none_of(flying.begin(), flying.end(),
                                           [&](const auto& each) { return each.first == some; }))
            scheduler.leave(some, now);
          break;
        default:
          scheduler.ready(some, now);
      }
      for (const Action& action : scheduler.take_actions())
        if (action.kind == ActionKind::kPageOut || action.kind == ActionKind::kPageIn)
          scheduler.page_done(action.session, now);
      scheduler.take_actions();
      for (LaneId lane = 0; lane < scheduler.lane_limit(); ++lane) {
        if (!scheduler.lane_is_open(lane) ||
            std::any_of(flying.begin(), flying.end(), [&](const auto& each) { return each.second == lane; }))
          continue;
        const auto asked = scheduler.lanes_to_ask();
        const bool named = !asked || std::find(asked->begin(), asked->end(), lane) != asked->end();
        const auto picked = scheduler.pick(lane, now);
        REQUIRE((named || !picked));
        if (picked && any(2) == 0) {
          scheduler.dispatched(*picked, lane, now);
          flying.emplace_back(*picked, lane);
        }
        const std::string wrong = scheduler.check();
        REQUIRE(wrong == "");
      }
    }
  }
}
