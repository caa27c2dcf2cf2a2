// Lanes of a device: how they shrink, merge and close for who waits.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "unit/sched/scheduler_fixture.hpp"

using namespace gpushare;
using namespace gpushare::sched;
using namespace gpushare::test::scheduling;

namespace {

// Carries out all actions as a device does on which no session finds a place any more though the books have room, as when
// the free memory is in pieces. Returns how often each session was tried.
std::map<SessionId, int> tries_without_place(Scheduler& scheduler, const std::vector<SessionId>& placed) {
  std::map<SessionId, int> tries;
  std::deque<Action> queue;
  const auto collect = [&] {
    for (const Action& action : scheduler.take_actions()) queue.push_back(action);
  };
  for (collect(); !queue.empty() && tries.size() < 100; collect()) {
    const Action action = queue.front();
    queue.pop_front();
    if (action.kind == ActionKind::kOpenLane || action.kind == ActionKind::kResizeLane ||
        action.kind == ActionKind::kCloseLane)
      scheduler.lane_applied(action.lane, action.bytes, 1);
    if (action.kind != ActionKind::kAdmit || std::count(placed.begin(), placed.end(), action.session) > 0)
      continue;
    if (++tries[action.session] > 50) return tries;
    scheduler.unplaced(action.session, 1);
  }
  return tries;
}

}  // namespace

namespace {

// A policy of somebody's that changes its mind: from some question on everybody outranks everybody.
class ChangesItsMind final : public Policy {
 public:
  explicit ChangesItsMind(uint64_t after) : after_(after) {}
  std::string_view name() const override { return "changes its mind"; }
  Answers answers() const override { return {.before = true}; }
  bool before(const SessionView&, const SessionView&) const override { return ++asked_ > after_; }

 private:
  uint64_t after_;
  mutable uint64_t asked_ = 0;
};

}  // namespace

TEST_CASE("lanes merge or stay, whenever a policy changes its mind about who gives way") {
  for (uint64_t after = 0; after < 300; ++after) {
    INFO("after question " << after);
    SchedulerOptions options = capacity(100);
    options.paging = false;
    Scheduler scheduler(options, std::make_unique<ChangesItsMind>(after));
    for (SessionId id = 1; id <= 3; ++id) REQUIRE(scheduler.arrive(spec(id, 3, 30), 0).ok());
    REQUIRE(scheduler.arrive(spec(4, 20, 20), 0).ok());
    REQUIRE(scheduler.set_capacity(90, 0).ok());
    REQUIRE(scheduler.set_capacity(100, 0).ok());
    for (SessionId id = 1; id <= 4; ++id) scheduler.leave(id, 1);
    CHECK(scheduler.promised_bytes() == 0);
    CHECK(scheduler.check() == "");
  }
}

TEST_CASE("a session that finds no place on the device is tried once however lanes merge for it") {
  test::Random random(test::seed());
  for (int round = 0; round < 400; ++round) {
    INFO("seed " << test::seed() << " round " << round);
    SchedulerOptions options = capacity(64);
    options.paging = false;
    options.confirms_lanes = true;
    const char* const policies[] = {"fair", "priority", "pack"};
    Scheduler scheduler = make(policies[round % 3], options);
    std::vector<SessionId> placed;
    SessionId id = 0;
    for (uint64_t sessions = test::uniform(random, 1, 4); id < sessions;) {
      ++id;
      REQUIRE(scheduler.arrive(spec(id, test::uniform(random, 0, 8), test::uniform(random, 1, 16)), id).ok());
      placed.push_back(id);
    }
    (void)tries_without_place(scheduler, placed);
    const SessionId first = id + 1;
    for (uint64_t more = id + test::uniform(random, 2, 5); id < more;) {
      ++id;
      REQUIRE(
          scheduler.arrive(spec(id, test::uniform(random, 0, 20), test::uniform(random, 1, 16)), id).ok());
    }
    for (const auto& [session, tried] : tries_without_place(scheduler, placed)) {
      INFO("session " << session << ", the first that waits is " << first);
      CHECK(tried == 1);
    }
    CHECK(scheduler.check() == "");
  }
}

TEST_CASE("a lane shrinks for others only when what was dispatched before has finished") {
  SchedulerOptions options = capacity(100);
  options.max_lanes = 1;
  Scheduler scheduler = make("fair", options);
  REQUIRE(scheduler.arrive(spec(1, 0, 90), 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 5, 20), 0).ok());
  REQUIRE(scheduler.arrive(spec(3, 50, 10), 0).ok());
  actions(scheduler);
  scheduler.ready(2, 0);
  CHECK(scheduler.pick(0, 0) == 2);
  scheduler.dispatched(2, 0, 0);
  scheduler.leave(1, 1);
  CHECK(actions(scheduler) == Strings{"resize 0:20"});
  CHECK(scheduler.promised_bytes() == 95);  // still
  scheduler.ready(2, 1);
  scheduler.dispatched(2, 0, 2);  // keeps to the new size already
  scheduler.finished(2, 5, 5);
  CHECK(actions(scheduler) == Strings{"admit 3@0"});
  CHECK(scheduler.promised_bytes() == 75);
}

TEST_CASE("lanes give way: 42 inference sessions of 0.6 GB each are all let in, 11.2 GB of P beside them") {
  for (const char* policy : {"fair", "priority"}) {
    INFO(policy);
    Scheduler scheduler = make(policy, capacity(uint64_t{16} << 30));
    for (SessionId id = 1; id <= 42; ++id) {
      REQUIRE(scheduler.arrive(spec(id, 11'200'000'000 / 42, 600'000'000), 0).ok());
      scheduler.ready(id, 0);
      actions(scheduler);
    }
    CHECK(scheduler.residents() == 42);
    CHECK(scheduler.waiting() == 0);
    CHECK(scheduler.lanes_open() >= 2);
    CHECK(scheduler.promised_bytes() <= uint64_t{16} << 30);
    uint64_t now = 0;
    std::vector<uint64_t> turns(43);
    for (int round = 0; round < 42 * 4; ++round)
      for (LaneId lane = 0; lane < scheduler.lane_limit(); ++lane) {
        const auto picked = scheduler.pick(lane, now);
        if (!picked) continue;
        scheduler.dispatched(*picked, lane, now);
        scheduler.finished(*picked, 1'000'000, now += 1'000'000);
        actions(scheduler);
        if (++turns[*picked] < 3) scheduler.ready(*picked, now);
      }
    for (SessionId id = 1; id <= 42; ++id) CHECK(turns[id] == 3);
  }
}

TEST_CASE("lanes give way at boundaries: what is in flight is waited for, and nothing is paged out instead") {
  Scheduler scheduler = make("fair", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 10, 40), 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 10, 30), 0).ok());
  scheduler.ready(1, 0);
  scheduler.ready(2, 0);
  CHECK(actions(scheduler) == Strings{"open 0:40", "admit 1@0", "open 1:30", "admit 2@1"});
  REQUIRE(scheduler.pick(1, 0) == 2);
  scheduler.dispatched(2, 1, 0);
  REQUIRE(scheduler.arrive(spec(3, 20, 40), 1).ok());
  CHECK(actions(scheduler).empty());
  CHECK(scheduler.state(3) == SessionState::kQueued);
  scheduler.finished(2, 5, 5);
  CHECK(actions(scheduler) == Strings{"move 2@0", "close 1", "admit 3@0"});
  // The one that waits gives up before the boundary: the lanes stay.
  Scheduler other = make("fair", capacity(100));
  for (SessionId id = 1; id <= 2; ++id) {
    REQUIRE(other.arrive(spec(id, 10, 30), 0).ok());
    other.ready(id, 0);
    other.dispatched(*other.pick(other.lane_of(id), 0), other.lane_of(id), 0);
  }
  REQUIRE(other.arrive(spec(3, 50, 30), 1).ok());
  other.leave(3, 2);
  actions(other);
  other.finished(1, 5, 5);
  other.finished(2, 5, 5);
  CHECK(actions(other).empty());
  CHECK(other.lanes_open() == 2);
}

TEST_CASE("priority: lanes of sessions that outrank the one that waits do not merge for it") {
  SchedulerOptions options = capacity(100);
  options.paging = false;
  Scheduler scheduler = make("priority", options);
  for (SessionId id = 1; id <= 2; ++id) {
    SessionSpec high = spec(id, 10, 35);
    high.priority = 5;
    REQUIRE(scheduler.arrive(high, 0).ok());
  }
  REQUIRE(scheduler.arrive(spec(3, 20, 35), 0).ok());
  CHECK(scheduler.state(3) == SessionState::kQueued);
  scheduler.set_priority(3, 5, 1);
  CHECK(scheduler.state(3) == SessionState::kResident);
  CHECK(scheduler.lanes_open() == 1);
  CHECK(scheduler.check() == "");
}

TEST_CASE("lanes that are busy merge for a session of equal rank, which then has its share of the turns") {
  for (const char* policy : {"fair", "priority"})
    for (const bool comes_first : {false, true}) {
      INFO(policy << (comes_first ? ", comes first" : ""));
      SchedulerOptions options = capacity(100);
      options.paging = false;
      Scheduler scheduler = make(policy, options);
      for (SessionId id = 1; id <= 2; ++id) REQUIRE(scheduler.arrive(spec(id, 10, 35), 0).ok());
      for (uint64_t now = 0; now < 100; now += 10)
        for (SessionId id = 1; id <= 2; ++id) {
          scheduler.ready(id, now);
          REQUIRE(scheduler.pick(scheduler.lane_of(id), now) == id);
          scheduler.dispatched(id, scheduler.lane_of(id), now);
          scheduler.finished(id, 10, now + 10);
        }
      SessionSpec third = spec(3, 20, 35);
      third.priority = comes_first ? 1 : 0;
      REQUIRE(scheduler.arrive(third, 100).ok());
      CHECK(scheduler.state(3) == SessionState::kResident);
      CHECK(scheduler.lanes_open() == 1);
      CHECK(scheduler.check() == "");
    }
}

namespace {

// Sessions 1, 2 and 3 of one trust group share a lane; 1 had a turn that was taken back.
void make_overdue(Scheduler& scheduler, uint64_t others_persistent_bytes) {
  for (const SessionId id : {1, 2, 3}) {
    SessionSpec session = spec(id, id == 1 ? 20 : others_persistent_bytes, 10);
    session.trust_group = 1;
    REQUIRE(scheduler.arrive(session, 0).ok());
  }
  CHECK(actions(scheduler) == Strings{"open 0:10", "admit 1@0", "admit 2@0", "admit 3@0"});
  scheduler.lane_applied(0, 10, 0);
  scheduler.ready(1, 0);
  REQUIRE(scheduler.pick(0, 0) == 1);
  scheduler.dispatched(1, 0, 0);
  scheduler.set_overdue(1, true, 10);
  scheduler.finished(1, 10, 10);
}

SchedulerOptions one_shared_lane(uint64_t capacity_bytes) {
  SchedulerOptions options = capacity(capacity_bytes);
  options.shared_lanes = true;
  options.max_lanes = 1;
  return options;
}

}  // namespace

TEST_CASE("who wants a turn in a lane that is held up goes on in another lane") {
  Scheduler scheduler = make("fair", one_shared_lane(80));
  make_overdue(scheduler, 20);
  scheduler.look(10);
  CHECK(actions(scheduler) == Strings{});  // nobody wants one
  scheduler.ready(2, 11);
  CHECK_FALSE(scheduler.pick(0, 11));
  scheduler.look(11);
  CHECK(actions(scheduler) == Strings{"out 2"});
  scheduler.look(12);
  CHECK(actions(scheduler) == Strings{});
  scheduler.page_done(2, 13);
  CHECK(actions(scheduler) == Strings{"open 1:10", "in 2@1"});
  scheduler.lane_applied(1, 10, 13);
  scheduler.page_done(2, 14);
  CHECK(scheduler.promised_bytes() == 80);
  CHECK(scheduler.pick(1, 15) == 2);
  CHECK(scheduler.lane_of(1) == 0);
  // The third finds room in the lane that the second has now.
  scheduler.ready(3, 16);
  scheduler.look(16);
  CHECK(actions(scheduler) == Strings{"out 3"});
  scheduler.page_done(3, 17);
  CHECK(actions(scheduler) == Strings{"in 3@1"});
  scheduler.page_done(3, 18);
  SECTION("and both go on when the first has ended") {
    scheduler.set_overdue(1, false, 20);
    scheduler.ready(1, 20);
    CHECK((scheduler.pick(0, 20) || scheduler.pick(1, 20)));
  }
  SECTION("and the lane goes with the first") {
    scheduler.leave(1, 20);
    CHECK(actions(scheduler) == Strings{"close 0"});
    CHECK(scheduler.promised_bytes() == 50);
  }
}

TEST_CASE("nobody loses memory by leaving a lane that is held up") {
  Scheduler scheduler = make("fair", one_shared_lane(80));
  make_overdue(scheduler, 20);
  SECTION("those who wait for memory do not get it between the way out and the way in") {
    SessionSpec waits = spec(4, 20, 0);
    waits.trust_group = 2;
    waits.weight = 100;
    REQUIRE(scheduler.arrive(waits, 10).ok());
    scheduler.ready(2, 11);
    scheduler.look(11);
    CHECK(actions(scheduler) == Strings{"out 2"});
    scheduler.page_done(2, 13);
    CHECK(actions(scheduler) == Strings{"open 1:10", "in 2@1"});
    CHECK(scheduler.state(4) == SessionState::kQueued);
  }
  SECTION("without room for another lane of its size a session waits where it is, and smaller ones go") {
    REQUIRE(scheduler.set_need(3, 25, 4, 10).ok());
    scheduler.ready(2, 11);
    scheduler.ready(3, 11);
    scheduler.look(11);
    CHECK(actions(scheduler) == Strings{"out 3"});
    scheduler.page_done(3, 13);
    CHECK(actions(scheduler) == Strings{"open 1:4", "in 3@1"});
    scheduler.look(14);
    CHECK(actions(scheduler) == Strings{});
    scheduler.set_overdue(1, false, 15);
    CHECK(scheduler.pick(0, 16) == 2);
  }
  SECTION("whoever came to want nothing on the way out waits outside") {
    scheduler.ready(2, 11);
    scheduler.look(11);
    CHECK(actions(scheduler) == Strings{"out 2"});
    scheduler.not_ready(2, 12);
    scheduler.page_done(2, 13);
    CHECK(actions(scheduler) == Strings{"open 1:10", "in 2@1"});  // into room that nobody wants
  }
  CHECK(scheduler.check() == "");
}

TEST_CASE(
    "without room for another lane sessions go out until there is, and come back when the lanes are one") {
  Scheduler scheduler = make("fair", one_shared_lane(75));
  make_overdue(scheduler, 20);
  scheduler.ready(2, 11);
  bool wants = false;
  SECTION("those that want nothing go first") {}
  SECTION("also those that want a turn") {
    scheduler.ready(3, 11);
    wants = true;
  }
  scheduler.look(11);
  CHECK(actions(scheduler) == Strings{"out 3"});
  scheduler.look(12);
  CHECK(actions(scheduler) == Strings{});  // its way out is waited for
  scheduler.page_done(3, 13);
  CHECK(actions(scheduler) == Strings{});  // it would need an E of its own, too
  scheduler.look(13);
  CHECK(actions(scheduler) == Strings{"out 2"});
  scheduler.page_done(2, 14);
  CHECK(actions(scheduler) == Strings{"open 1:10", "in 2@1"});
  scheduler.lane_applied(1, 10, 14);
  scheduler.page_done(2, 15);
  CHECK(scheduler.pick(1, 15) == 2);
  scheduler.dispatched(2, 1, 15);
  if (!wants) scheduler.ready(3, 16);
  scheduler.look(16);
  CHECK(actions(scheduler) == Strings{});
  CHECK(scheduler.state(3) == SessionState::kPagedOut);
  SECTION("when the holder has returned") {
    scheduler.set_overdue(1, false, 20);
    scheduler.ready(1, 20);
    scheduler.look(20);
    CHECK(actions(scheduler) == Strings{"out 1"});
    scheduler.page_done(1, 21);
    CHECK(actions(scheduler) == Strings{"close 0", "in 1@1", "in 3@1"});
    scheduler.page_done(1, 22);
    scheduler.page_done(3, 22);
    CHECK(scheduler.promised_bytes() == 70);
  }
  SECTION("when the holder is dead") {
    scheduler.leave(1, 20);
    CHECK(actions(scheduler) == Strings{"close 0", "in 3@1"});
  }
  scheduler.look(23);
  CHECK(actions(scheduler) == Strings{});
  CHECK(scheduler.check() == "");
}

TEST_CASE("lanes that nobody needs to be one stay two") {
  Scheduler scheduler = make("fair", one_shared_lane(80));
  make_overdue(scheduler, 20);
  scheduler.ready(2, 11);
  scheduler.look(11);
  scheduler.page_done(2, 13);
  scheduler.lane_applied(1, 10, 13);
  scheduler.page_done(2, 14);
  (void)actions(scheduler);
  scheduler.set_overdue(1, false, 15);
  scheduler.look(15);
  CHECK(actions(scheduler) == Strings{});
  SessionSpec large = spec(4, 30, 0);  // another lane less would not let it in
  large.trust_group = 2;
  REQUIRE(scheduler.arrive(large, 16).ok());
  scheduler.look(16);
  CHECK(actions(scheduler) == Strings{});
  CHECK(scheduler.lanes_open() == 2);
}

TEST_CASE("who owes its bytes is not paged out for others until its iteration has ended") {
  Scheduler scheduler = make("priority", one_shared_lane(45));
  SessionSpec above = spec(4, 25, 0);
  above.trust_group = 2;
  above.priority = 5;
  SECTION("also if that was decided before") {
    SessionSpec first = spec(1, 20, 10);
    first.trust_group = 1;
    REQUIRE(scheduler.arrive(first, 0).ok());
    CHECK(actions(scheduler) == Strings{"open 0:10", "admit 1@0"});
    scheduler.lane_applied(0, 10, 0);
    scheduler.ready(1, 0);
    REQUIRE(scheduler.pick(0, 0) == 1);
    scheduler.dispatched(1, 0, 0);
    REQUIRE(scheduler.arrive(above, 1).ok());
    scheduler.set_overdue(1, true, 10);
    scheduler.finished(1, 10, 10);
    scheduler.look(11);
    CHECK(actions(scheduler) == Strings{});
    CHECK(scheduler.owes(1));
    scheduler.set_overdue(1, false, 12);
    CHECK(actions(scheduler) == Strings{"out 1"});
  }
  SECTION("nor chosen") {
    make_overdue(scheduler, 5);
    REQUIRE(scheduler.set_need(1, 25, 10, 11).ok());
    REQUIRE(scheduler.arrive(above, 12).ok());
    scheduler.look(12);
    CHECK(actions(scheduler) == Strings{});
    scheduler.set_overdue(1, false, 13);
    CHECK(actions(scheduler) == Strings{"out 1"});
  }
  CHECK(scheduler.check() == "");
}

TEST_CASE("compute units are promised like memory, and lanes of unequal shares do not mix", "[sched]") {
  SchedulerOptions options = capacity(1000);
  options.compute_units = 24;
  options.granularity_compute_units = 8;
  Scheduler scheduler = make("fair", options);
  const auto with_units = [](SessionId id, uint32_t units) {
    SessionSpec made = spec(id, 10, 10);
    made.compute_units = units;
    return made;
  };
  REQUIRE(scheduler.arrive(with_units(1, 0), 0).ok());
  REQUIRE(scheduler.arrive(with_units(2, 3), 0).ok());  // rounded up to 8
  REQUIRE(scheduler.arrive(with_units(3, 16), 0).ok());
  CHECK(scheduler.promised_compute_units() == 24);
  CHECK(scheduler.lane_compute_units(scheduler.lane_of(1)) == 0);
  CHECK(scheduler.lane_compute_units(scheduler.lane_of(2)) == 8);
  CHECK(scheduler.lane_compute_units(scheduler.lane_of(3)) == 16);
  CHECK(scheduler.check() == "");

  // No units are left: one of the same share joins, one of another waits, one without opens a lane.
  REQUIRE(scheduler.arrive(with_units(4, 8), 0).ok());
  CHECK(scheduler.lane_of(4) == scheduler.lane_of(2));
  SessionSpec refused = with_units(5, 24);
  refused.may_queue = false;
  const base::Status full = scheduler.arrive(refused, 0);
  CHECK(full.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(full.message().find("24 compute units for itself; 0 of 24") != std::string::npos);
  REQUIRE(scheduler.arrive(with_units(6, 24), 0).ok());
  CHECK(scheduler.state(6) == SessionState::kQueued);
  REQUIRE(scheduler.arrive(with_units(7, 0), 0).ok());
  CHECK(scheduler.state(7) == SessionState::kResident);
  CHECK(scheduler.arrive(with_units(8, 25), 0).code() == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(scheduler.check() == "");

  // They come back when the lane closes.
  for (const SessionId id : {2, 3, 4}) scheduler.leave(id, 1);
  CHECK(scheduler.state(6) == SessionState::kResident);
  CHECK(scheduler.lane_compute_units(scheduler.lane_of(6)) == 24);
  CHECK(scheduler.check() == "");
  for (const SessionId id : {1, 6, 7}) scheduler.leave(id, 2);
  CHECK(scheduler.promised_compute_units() == 0);
}

TEST_CASE("a session whose turn was taken back stays in its lane until its iteration has ended") {
  Scheduler scheduler = make("fair", capacity(100));
  for (SessionId id = 1; id <= 2; ++id) {
    REQUIRE(scheduler.arrive(spec(id, 10, 30), 0).ok());
    scheduler.ready(id, 0);
    REQUIRE(scheduler.pick(scheduler.lane_of(id), 0) == id);
    scheduler.dispatched(id, scheduler.lane_of(id), 0);
  }
  REQUIRE(scheduler.lane_of(2) == 1);
  SECTION("its lane is closing") {
    REQUIRE(scheduler.arrive(spec(3, 40, 30), 0).ok());  // has room once the lanes are one
    scheduler.set_overdue(2, true, 1);
    scheduler.finished(2, 1, 1);
  }
  SECTION("lanes merge later") {
    scheduler.set_overdue(2, true, 1);
    scheduler.finished(2, 1, 1);
    REQUIRE(scheduler.arrive(spec(3, 40, 30), 1).ok());
  }
  SECTION("it wants another turn meanwhile, and the other lane is free") {
    REQUIRE(scheduler.arrive(spec(3, 40, 30), 1).ok());
    scheduler.set_overdue(2, true, 1);
    scheduler.finished(2, 1, 1);
    scheduler.ready(2, 1);
    scheduler.finished(1, 1, 1);
    CHECK(scheduler.pick(0, 1) != 2);
  }
  CHECK(scheduler.lane_of(2) == 1);
  CHECK(scheduler.state(3) == SessionState::kQueued);
  CHECK(scheduler.check() == "");
  scheduler.finished(1, 1, 2);
  scheduler.set_overdue(2, false, 2);
  CHECK(scheduler.lane_of(2) == scheduler.lane_of(1));
  CHECK(scheduler.state(3) == SessionState::kResident);
  CHECK(scheduler.check() == "");
}
