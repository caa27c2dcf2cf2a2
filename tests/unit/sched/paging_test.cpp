// Page-outs and page-ins: who goes out for whom, who comes back when, and what turns back.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "unit/sched/scheduler_fixture.hpp"

using namespace gpushare;
using namespace gpushare::sched;
using namespace gpushare::test::scheduling;

TEST_CASE("srtf: a shorter session is let in by paging out longer ones, no more than needed") {
  Scheduler scheduler = make("srtf", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 20, 40, 1000), 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 30, 40, 2000), 0).ok());
  CHECK(actions(scheduler) == Strings{"open 0:40", "admit 1@0", "admit 2@0"});
  scheduler.ready(1, 0);
  scheduler.ready(2, 0);
  uint64_t now = 0;
  CHECK(run(scheduler, 0, 10, now) == 1);
  REQUIRE(scheduler.arrive(spec(3, 25, 40, 100), now).ok());
  CHECK(actions(scheduler) == Strings{"out 2"});
  CHECK(scheduler.state(2) == SessionState::kPagedOut);
  CHECK(scheduler.state(3) == SessionState::kQueued);
  CHECK(run(scheduler, 0, 10, now) == 1);  // the lane goes on meanwhile
  scheduler.page_done(2, now);
  CHECK(actions(scheduler) == Strings{"admit 3@0"});
  scheduler.ready(3, now);
  CHECK(run(scheduler, 0, 10, now) == 3);
  scheduler.leave(3, now);
  CHECK(actions(scheduler) == Strings{"in 2@0"});
  CHECK(scheduler.state(2) == SessionState::kPagedOut);
  scheduler.page_done(2, now);
  CHECK(scheduler.state(2) == SessionState::kResident);
  CHECK(run(scheduler, 0, 10, now) == 1);
}

TEST_CASE("srtf: a victim finishes what it has in flight before it is paged out") {
  Scheduler scheduler = make("srtf", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 60, 40, 1000), 0).ok());
  scheduler.ready(1, 0);
  actions(scheduler);
  scheduler.pick(0, 0);
  scheduler.dispatched(1, 0, 0);
  scheduler.ready(1, 0);
  REQUIRE(scheduler.arrive(spec(2, 60, 40, 10), 1).ok());
  CHECK(actions(scheduler).empty());
  CHECK_FALSE(scheduler.pick(0, 1));  // not picked any more
  scheduler.finished(1, 5, 5);
  CHECK(actions(scheduler) == Strings{"out 1"});
  scheduler.page_done(1, 6);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:40", "admit 2@0"});
}

TEST_CASE("srtf: without paging, or against what is shorter, a session waits") {
  SchedulerOptions options = capacity(100);
  options.paging = false;
  Scheduler scheduler = make("srtf", options);
  REQUIRE(scheduler.arrive(spec(1, 60, 40, 1000), 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 60, 40, 10), 1).ok());
  CHECK(actions(scheduler) == Strings{"open 0:40", "admit 1@0"});
  Scheduler paging = make("srtf", capacity(100));
  REQUIRE(paging.arrive(spec(1, 20, 40, 10), 0).ok());
  REQUIRE(paging.arrive(spec(2, 30, 40, 1000), 0).ok());
  REQUIRE(paging.arrive(spec(3, 25, 40, 100), 0).ok());  // outranks 2, but 1 would run before it anyway
  CHECK(actions(paging) == Strings{"open 0:40", "admit 1@0", "admit 2@0"});
  paging.leave(1, 5);
  CHECK(actions(paging) == Strings{"admit 3@0"});
}

TEST_CASE("a page-out not begun is called off when the session it was for goes away") {
  Scheduler scheduler = make("srtf", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 60, 40, 1000), 0).ok());
  scheduler.ready(1, 0);
  scheduler.pick(0, 0);
  scheduler.dispatched(1, 0, 0);
  scheduler.ready(1, 0);
  REQUIRE(scheduler.arrive(spec(2, 60, 40, 10), 1).ok());
  scheduler.leave(2, 2);
  scheduler.finished(1, 5, 5);
  CHECK(scheduler.pick(0, 5) == 1);
  CHECK(actions(scheduler) == Strings{"open 0:40", "admit 1@0"});
}

TEST_CASE("priority pages out what ranks lower, across lanes, and class comes first") {
  Scheduler scheduler = make("priority", capacity(100));
  SessionSpec low = spec(1, 40, 20);
  low.cls = SessionClass::kOpportunistic;
  low.priority = 99;
  REQUIRE(scheduler.arrive(low, 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 20, 20), 0).ok());
  CHECK(actions(scheduler) == Strings{"open 0:20", "admit 1@0", "open 1:20", "admit 2@1"});
  REQUIRE(scheduler.arrive(spec(3, 30, 20), 0).ok());
  CHECK(actions(scheduler) == Strings{"out 1"});
  scheduler.page_done(1, 1);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:20", "admit 3@0"});
  // Idle in host memory, it comes back only for a reason.
  scheduler.leave(2, 2);
  CHECK(actions(scheduler) == Strings{"close 1", "in 1@0"});
}

TEST_CASE("a session that may not be paged yet stays until it may") {
  Scheduler scheduler = make("priority", capacity(100));
  SessionSpec low = spec(1, 60, 20);
  low.may_page = false;
  REQUIRE(scheduler.arrive(low, 0).ok());
  scheduler.ready(1, 0);
  CHECK(actions(scheduler) == Strings{"open 0:20", "admit 1@0"});
  REQUIRE(scheduler.pick(0, 0) == SessionId{1});
  scheduler.dispatched(1, 0, 0);
  SessionSpec high = spec(2, 60, 20);
  high.priority = 1;
  REQUIRE(scheduler.arrive(high, 0).ok());
  scheduler.finished(1, 10, 10);
  CHECK(actions(scheduler) == Strings{});
  CHECK(scheduler.state(1) == SessionState::kResident);
  scheduler.ready(1, 11);
  CHECK_FALSE(scheduler.pick(0, 11));  // it goes next
  scheduler.allow_paging(1, 12);
  CHECK(actions(scheduler) == Strings{"out 1"});
  scheduler.allow_paging(1, 13);
  scheduler.page_done(1, 14);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:20", "admit 2@0"});
  // Nor for one that is there and grows.
  SessionSpec opportunistic = spec(3, 10, 10);
  opportunistic.cls = SessionClass::kOpportunistic;
  opportunistic.may_page = false;
  REQUIRE(scheduler.arrive(opportunistic, 15).ok());
  actions(scheduler);
  CHECK_FALSE(scheduler.make_room(2, {Giver::kSessions, 10}, 16));
  scheduler.allow_paging(3, 17);
  CHECK(actions(scheduler) == Strings{});  // nobody wants its room any more
  CHECK(scheduler.make_room(2, {Giver::kSessions, 10}, 18));
  CHECK(actions(scheduler) == Strings{"out 3"});
}

TEST_CASE("a session that is being paged out gives its bytes as they go") {
  Scheduler scheduler = make("priority", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 80, 10), 0).ok());
  SessionSpec high = spec(2, 40, 10);
  high.priority = 1;
  REQUIRE(scheduler.arrive(high, 0).ok());
  CHECK(actions(scheduler) == Strings{"open 0:10", "admit 1@0", "out 1"});
  scheduler.page_part(2, 10, 1);  // not being paged out
  scheduler.page_part(1, 20, 1);
  CHECK(scheduler.promised_bytes() == 70);
  CHECK(scheduler.check() == "");
  CHECK(actions(scheduler) == Strings{});
  // The bytes that it no longer needs may have gone already.
  REQUIRE(scheduler.set_need(1, 70, 10, 2).ok());
  CHECK(scheduler.promised_bytes() == 70);
  CHECK(scheduler.check() == "");
  scheduler.page_part(1, 20, 3);
  CHECK(scheduler.promised_bytes() == 50 + 50);  // session 2 has what has gone
  CHECK(actions(scheduler) == Strings{"open 1:10", "admit 2@1"});
  CHECK(scheduler.state(1) == SessionState::kPagedOut);
  scheduler.page_part(1, 1000, 4);
  CHECK(scheduler.promised_bytes() == 10 + 50);
  CHECK(scheduler.check() == "");
  // It cannot be as before any more.
  scheduler.page_out_failed(1, 5);
  CHECK(scheduler.state(1) == SessionState::kPagedOut);
  CHECK(scheduler.lane_of(1) == kNoLane);
  CHECK(scheduler.promised_bytes() == 50);
  CHECK(scheduler.check() == "");
  // It needs all of its bytes to come back.
  scheduler.ready(1, 6);
  scheduler.leave(2, 7);
  CHECK(scheduler.promised_bytes() == 80);
  scheduler.page_done(1, 8);
  CHECK(scheduler.check() == "");
  // A session that is out in part leaves.
  REQUIRE(scheduler.arrive(high, 9).ok());
  scheduler.not_ready(1, 9);
  scheduler.page_part(1, 30, 10);
  scheduler.leave(1, 11);
  CHECK(scheduler.promised_bytes() == 50);
  CHECK(scheduler.check() == "");
}

namespace {

// Session 1 of two is opportunistic and on its way in.
void begin_page_in(Scheduler& scheduler) {
  SessionSpec low = spec(1, 60, 10);
  low.cls = SessionClass::kOpportunistic;
  REQUIRE(scheduler.arrive(low, 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 20, 10), 0).ok());
  CHECK(scheduler.make_room(2, {Giver::kSessions, 30}, 1));
  scheduler.page_done(1, 2);
  scheduler.room_used(2, 3);
  REQUIRE(actions(scheduler).back() == "in 1@0");
}

}  // namespace

TEST_CASE("a page-in of an opportunistic session turns back for a guaranteed one") {
  Scheduler scheduler = make("priority", capacity(100));
  begin_page_in(scheduler);
  for (const bool in_time : {true, false}) {
    CHECK(scheduler.make_room(2, {Giver::kSessions, 30}, 4));
    CHECK(actions(scheduler) == Strings{"back 1"});
    CHECK(scheduler.make_room(2, {Giver::kSessions, 30}, 5));
    CHECK(actions(scheduler) == Strings{});
    CHECK(scheduler.making_room(2));
    CHECK(scheduler.check() == "");
    if (in_time) {
      scheduler.unplaced(1, 6);
      CHECK_FALSE(scheduler.making_room(2));
      CHECK(actions(scheduler) == Strings{"close 0"});
      CHECK(scheduler.promised_bytes() == 30);
      scheduler.room_used(2, 7);
      CHECK(actions(scheduler) == Strings{"open 0:10", "in 1@0"});
    } else {
      scheduler.page_done(1, 6);
      CHECK_FALSE(scheduler.making_room(2));
      CHECK(scheduler.state(1) == SessionState::kResident);
      CHECK(scheduler.make_room(2, {Giver::kSessions, 30}, 7));
      CHECK(actions(scheduler) == Strings{"out 1"});
    }
    CHECK(scheduler.check() == "");
  }
  // The page-in of an equal goes on.
  scheduler.page_done(1, 8);
  scheduler.set_class(1, SessionClass::kGuaranteed, 9);
  scheduler.room_used(2, 10);
  actions(scheduler);
  (void)scheduler.make_room(2, {Giver::kSessions, 30}, 11);
  CHECK(actions(scheduler) == Strings{});
}

TEST_CASE("a page-in of an opportunistic session turns back for a guaranteed one that waits for admission") {
  Scheduler scheduler = make("priority", capacity(100));
  begin_page_in(scheduler);
  SECTION("in time") {
    REQUIRE(scheduler.arrive(spec(3, 40, 10), 4).ok());
    CHECK(actions(scheduler) == Strings{"back 1"});
    REQUIRE(scheduler.arrive(spec(4, 10, 5), 4).ok());  // that may be let in beside it
    scheduler.unplaced(1, 5);
    const Strings done = actions(scheduler);
    CHECK(std::find(done.begin(), done.end(), "admit 3@0") != done.end());
    CHECK(scheduler.state(1) == SessionState::kPagedOut);
    scheduler.leave(3, 6);
    scheduler.leave(4, 6);
    CHECK(actions(scheduler).back() == "in 1@0");
  }
  SECTION("it was in already") {
    REQUIRE(scheduler.arrive(spec(3, 40, 10), 4).ok());
    CHECK(actions(scheduler) == Strings{"back 1"});
    scheduler.page_done(1, 5);
    CHECK(actions(scheduler) == Strings{"out 1"});
    scheduler.page_done(1, 6);
    CHECK(actions(scheduler).back() == "admit 3@0");
  }
  SECTION("the waiting session leaves") {
    REQUIRE(scheduler.arrive(spec(3, 40, 10), 4).ok());
    CHECK(actions(scheduler) == Strings{"back 1"});
    scheduler.leave(3, 5);
    scheduler.unplaced(1, 6);
    CHECK(actions(scheduler).back() == "in 1@0");
  }
  SECTION("an allocation of another one comes first, and is told") {
    REQUIRE(scheduler.arrive(spec(3, 40, 10), 4).ok());
    CHECK(actions(scheduler) == Strings{"back 1"});
    CHECK(scheduler.make_room(2, {Giver::kSessions, 40}, 5));
    CHECK(actions(scheduler) == Strings{});
    scheduler.unplaced(1, 6);
    CHECK(actions(scheduler) == Strings{"close 0"});
    REQUIRE(scheduler.set_need(2, 60, 10, 7).ok());
    scheduler.room_used(2, 8);
    CHECK(scheduler.state(3) == SessionState::kQueued);
    scheduler.leave(2, 9);
    CHECK(scheduler.state(3) == SessionState::kResident);
  }
  SECTION("not for one of its class") {
    SessionSpec equal = spec(3, 40, 10);
    equal.cls = SessionClass::kOpportunistic;
    equal.priority = 1;
    REQUIRE(scheduler.arrive(equal, 4).ok());
    CHECK(actions(scheduler) == Strings{});
  }
  CHECK(scheduler.check() == "");
}

TEST_CASE("a policy that pages nobody out turns no page-in back for a session that waits for admission") {
  Scheduler scheduler = make("fair", capacity(100));
  begin_page_in(scheduler);
  REQUIRE(scheduler.arrive(spec(3, 40, 10), 4).ok());
  CHECK(actions(scheduler) == Strings{});
}

TEST_CASE("of several page-ins those of the lowest rank turn back, whatever lanes they are in") {
  for (const SessionId lower : {1, 4}) {
    Scheduler scheduler = make("priority", capacity(160));
    for (const SessionId id : {1, 4}) {
      SessionSpec low = spec(id, 40, 10);
      low.cls = SessionClass::kOpportunistic;
      low.priority = id == lower ? -1 : 1;
      REQUIRE(scheduler.arrive(low, 0).ok());
    }
    REQUIRE(scheduler.arrive(spec(2, 20, 10), 0).ok());
    CHECK(scheduler.make_room(2, {Giver::kSessions, 90}, 1));
    for (const SessionId id : {1, 4}) scheduler.page_done(id, 2);
    scheduler.room_used(2, 3);
    (void)actions(scheduler);
    for (const SessionId id : {1, 4}) REQUIRE(scheduler.lane_of(id) != kNoLane);
    CHECK(scheduler.make_room(2, {Giver::kSessions, 30}, 4));
    CHECK(actions(scheduler) == Strings{"back " + std::to_string(lower)});
    CHECK(scheduler.make_room(2, {Giver::kSessions, 50}, 5));  // 10 of the first one are left
    CHECK(actions(scheduler) == Strings{"back " + std::to_string(5 - lower)});
  }
}

TEST_CASE("bytes of a page-in that turns back are counted once") {
  Scheduler scheduler = make("priority", capacity(160));
  for (const SessionId id : {1, 4}) {
    SessionSpec low = spec(id, id == 1 ? 40 : 30, 10);
    low.cls = SessionClass::kOpportunistic;
    REQUIRE(scheduler.arrive(low, 0).ok());
  }
  for (const SessionId id : {2, 3}) REQUIRE(scheduler.arrive(spec(id, 20, 10), 0).ok());
  CHECK(actions(scheduler).size() == 8);
  CHECK(scheduler.promised_bytes() == 150);
  scheduler.set_priority(1, -1, 0);
  CHECK(scheduler.make_room(2, {Giver::kSessions, 40}, 1));
  CHECK(actions(scheduler) == Strings{"out 1"});
  scheduler.page_done(1, 2);
  scheduler.room_used(2, 3);
  REQUIRE(actions(scheduler).back() == "in 1@0");
  CHECK(scheduler.make_room(2, {Giver::kSessions, 30}, 4));
  CHECK(actions(scheduler) == Strings{"back 1"});
  SECTION("what is left of them is enough for the second session") {
    CHECK(scheduler.make_room(3, {Giver::kSessions, 10}, 5));
    CHECK(actions(scheduler) == Strings{});
    SECTION("and comes to it, also if the first one gives up") {
      scheduler.room_used(2, 6);
      scheduler.unplaced(1, 7);
      CHECK(actions(scheduler) == Strings{"close 0"});
      REQUIRE(scheduler.set_need(3, 30, 10, 8).ok());
    }
  }
  SECTION("it is not enough: somebody else goes out at once") {
    CHECK(scheduler.make_room(3, {Giver::kSessions, 30}, 5));
    CHECK(actions(scheduler) == Strings{"out 4"});
    scheduler.unplaced(1, 6);
    scheduler.page_done(4, 7);
    CHECK_FALSE(scheduler.making_room(3));
    REQUIRE(scheduler.set_need(2, 50, 10, 8).ok());
    REQUIRE(scheduler.set_need(3, 50, 10, 8).ok());
  }
  SECTION("the first one has its bytes: the next page-in has all of its own") {
    scheduler.unplaced(1, 6);
    scheduler.room_used(2, 7);
    REQUIRE(actions(scheduler).back() == "in 1@0");
    CHECK(scheduler.make_room(3, {Giver::kSessions, 40}, 8));
    CHECK(actions(scheduler) == Strings{"back 1"});
  }
  CHECK(scheduler.check() == "");
}

TEST_CASE("who waits does not overtake a session of higher rank that is out in part and wants to be in") {
  Scheduler scheduler = make("priority", capacity(100));
  SessionSpec first = spec(1, 80, 10), high = spec(2, 40, 10);
  first.priority = 1;
  high.priority = 2;
  REQUIRE(scheduler.arrive(first, 0).ok());
  scheduler.ready(1, 0);
  REQUIRE(scheduler.arrive(high, 0).ok());
  REQUIRE(scheduler.arrive(spec(3, 40, 10), 0).ok());
  actions(scheduler);
  scheduler.page_part(1, 40, 1);
  REQUIRE(scheduler.lane_of(2) != kNoLane);
  scheduler.leave(2, 2);
  REQUIRE(scheduler.arrive(spec(4, 10, 10), 3).ok());
  CHECK(scheduler.lane_of(3) == kNoLane);
  CHECK(scheduler.lane_of(4) == kNoLane);
  scheduler.page_done(1, 4);
  CHECK(scheduler.lane_of(1) != kNoLane);
  CHECK(scheduler.lane_of(3) == kNoLane);
  scheduler.not_ready(1, 5);
  CHECK(scheduler.check() == "");
}

TEST_CASE("a session of lower rank that has only ephemeral bytes gives them") {
  SchedulerOptions options = capacity(100);
  options.max_lanes = 2;
  Scheduler scheduler = make("pack", options);
  SessionSpec lower = spec(2, 0, 60);
  lower.cls = SessionClass::kOpportunistic;
  REQUIRE(scheduler.arrive(spec(1, 20, 10), 0).ok());
  SECTION("of a lane of its own") {
    REQUIRE(scheduler.arrive(lower, 0).ok());
    REQUIRE(scheduler.lane_of(2) != scheduler.lane_of(1));
    actions(scheduler);
    CHECK(scheduler.make_room(1, {Giver::kSessions, 30}, 1));
    CHECK(actions(scheduler) == Strings{"out 2"});
    scheduler.page_done(2, 2);
    CHECK(scheduler.promised_bytes() == 30);
  }
  SECTION("which it does not take along where another one needs them") {
    SessionSpec equal = lower;
    equal.id = 3;
    equal.cls = SessionClass::kGuaranteed;
    equal.compute_units = lower.compute_units;
    options.max_lanes = 1;
    Scheduler one_lane = make("pack", options);
    REQUIRE(one_lane.arrive(spec(1, 20, 10), 0).ok());
    REQUIRE(one_lane.arrive(equal, 0).ok());
    REQUIRE(one_lane.arrive(lower, 0).ok());
    actions(one_lane);
    CHECK_FALSE(one_lane.make_room(1, {Giver::kSessions, 30}, 1));
    CHECK(actions(one_lane) == Strings{});
    CHECK(one_lane.check() == "");
  }
  CHECK(scheduler.check() == "");
}

TEST_CASE("a guaranteed session's growth has busy opportunistic sessions paged out at their boundaries") {
  Scheduler scheduler = make("fair", capacity(100));
  const auto runs = [&](SessionId id, SessionClass cls, uint64_t persistent_bytes) {
    SessionSpec wanted = spec(id, persistent_bytes, 5);
    wanted.cls = cls;
    REQUIRE(scheduler.arrive(wanted, 0).ok());
    scheduler.ready(id, 0);
    actions(scheduler);
    REQUIRE(scheduler.pick(scheduler.lane_of(id), 0) == id);
    scheduler.dispatched(id, scheduler.lane_of(id), 0);
  };
  runs(1, SessionClass::kGuaranteed, 20);
  runs(2, SessionClass::kOpportunistic, 20);
  runs(3, SessionClass::kOpportunistic, 35);
  CHECK_FALSE(scheduler.make_room(1, {Giver::kSessions, 30}, 1));  // nobody is idle
  CHECK_FALSE(scheduler.make_room(2, {Giver::kBoundaries, 30}, 1));
  CHECK_FALSE(scheduler.make_room(1, {Giver::kBoundaries, 90}, 1));  // all of them would not do
  CHECK_FALSE(scheduler.making_room(1));
  REQUIRE(scheduler.make_room(1, {Giver::kBoundaries, 30}, 1));
  CHECK(scheduler.making_room(1));
  CHECK_FALSE(scheduler.making_room(2));
  CHECK(actions(scheduler) == Strings{});
  scheduler.stop_making_room(2);  // of another session: nothing is made for it
  CHECK(scheduler.making_room(1));
  // Given up: it goes on.
  scheduler.stop_making_room(1);
  CHECK_FALSE(scheduler.making_room(1));
  CHECK(scheduler.check() == "");
  REQUIRE(scheduler.make_room(1, {Giver::kBoundaries, 30}, 2));
  const bool third = scheduler.make_room(1, {Giver::kBoundaries, 30}, 2);
  CHECK(third);  // under way
  scheduler.finished(3, 3, 3);
  scheduler.finished(2, 3, 3);
  CHECK(actions(scheduler) == Strings{"out 2"});  // 10 are free, and its 20 are enough
  CHECK(scheduler.state(3) == SessionState::kResident);
  scheduler.page_done(2, 4);
  CHECK_FALSE(scheduler.making_room(1));
  CHECK(scheduler.set_need(1, 50, 5, 5).ok());
  scheduler.ready(2, 6);
  scheduler.room_used(1, 6);
  CHECK(scheduler.state(2) == SessionState::kPagedOut);  // no room now
  CHECK(scheduler.check() == "");
}

TEST_CASE("an idle paged-out session does not claim room that others want, until it is woken") {
  Scheduler scheduler = make("priority", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 60, 20), 0).ok());
  SessionSpec high = spec(2, 60, 20);
  high.priority = 1;
  REQUIRE(scheduler.arrive(high, 0).ok());
  scheduler.page_done(1, 1);
  REQUIRE(scheduler.arrive(spec(3, 70, 20), 2).ok());
  actions(scheduler);
  scheduler.leave(2, 3);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:20", "admit 3@0"});  // 1 is older, but idle
  scheduler.wake(1, 4);
  scheduler.leave(3, 5);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:20", "in 1@0"});
}

TEST_CASE("a policy that comes later has idle paged-out sessions in its own order") {
  Scheduler scheduler = make("priority", capacity(100));
  SessionSpec second = spec(2, 30, 10);
  second.priority = 1;
  SessionSpec high = spec(3, 70, 20);
  high.priority = 5;
  REQUIRE(scheduler.arrive(spec(1, 30, 10), 0).ok());
  REQUIRE(scheduler.arrive(second, 0).ok());
  REQUIRE(scheduler.arrive(high, 1).ok());
  scheduler.page_done(1, 2);
  scheduler.page_done(2, 2);
  actions(scheduler);
  REQUIRE(scheduler.state(1) == SessionState::kPagedOut);
  REQUIRE(scheduler.state(2) == SessionState::kPagedOut);
  scheduler.set_policy(std::move(*make_policy("pack")), 3);
  actions(scheduler);
  scheduler.leave(3, 4);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:10", "in 1@0", "open 1:10", "in 2@1"});
}

TEST_CASE("an idle paged-out session stays out while another is on its way out") {
  Scheduler scheduler = make("fair", capacity(120));
  const auto comes = [&](SessionId id, uint64_t bytes, SessionClass cls) {
    SessionSpec wanted = spec(id, bytes, 5);
    wanted.cls = cls;
    REQUIRE(scheduler.arrive(wanted, 0).ok());
  };
  comes(1, 20, SessionClass::kGuaranteed);
  comes(2, 10, SessionClass::kOpportunistic);
  comes(3, 12, SessionClass::kOpportunistic);
  comes(4, 35, SessionClass::kGuaranteed);
  actions(scheduler);
  REQUIRE(scheduler.make_room(1, {Giver::kSessions, 8}, 1));
  CHECK(actions(scheduler) == Strings{"out 2"});
  scheduler.page_done(2, 2);
  REQUIRE(scheduler.make_room(1, {Giver::kSessions, 20}, 3));
  CHECK(actions(scheduler) == Strings{"close 1", "out 3"});
  scheduler.leave(4, 4);
  CHECK(actions(scheduler) == Strings{"close 3"});  // there is room for 2 now
  CHECK(scheduler.state(2) == SessionState::kPagedOut);
}

TEST_CASE("room on its way for an allocation is for everybody once the allocation is given up") {
  const bool leaves = GENERATE(false, true);
  CAPTURE(leaves);
  Scheduler scheduler = make("fair", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 20, 10), 0).ok());
  SessionSpec lower = spec(2, 40, 10);
  lower.cls = SessionClass::kOpportunistic;
  REQUIRE(scheduler.arrive(lower, 0).ok());
  actions(scheduler);
  REQUIRE(scheduler.make_room(1, {Giver::kSessions, 50}, 1));
  CHECK(actions(scheduler) == Strings{"out 2"});
  scheduler.ready(2, 2);
  leaves ? scheduler.leave(1, 3) : scheduler.room_used(1, 3);
  actions(scheduler);
  scheduler.page_done(2, 4);  // only now, and nothing else will happen
  CHECK(actions(scheduler).back() == (leaves ? "in 2@0" : "in 2@1"));
  CHECK(scheduler.check() == "");
}

TEST_CASE("srtf: a victim that turns out not to be needed is spared") {
  Scheduler scheduler = make("srtf", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 30, 40, 2000), 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 10, 40, 3000), 0).ok());  // ranks last, but its 10 are not enough
  actions(scheduler);
  REQUIRE(scheduler.arrive(spec(3, 45, 40, 10), 0).ok());
  CHECK(actions(scheduler) == Strings{"out 1"});
}

TEST_CASE("priority: what was paged out makes room in the lane where the session runs next") {
  SchedulerOptions options = capacity(100);
  options.max_lanes = 2;
  Scheduler scheduler = make("priority", options);
  const auto arrive = [&](SessionId id, uint64_t persistent, uint64_t ephemeral, int32_t priority) {
    SessionSpec next = spec(id, persistent, ephemeral);
    next.priority = priority;
    REQUIRE(scheduler.arrive(next, 0).ok());
  };
  arrive(1, 5, 20, 9);
  arrive(2, 30, 30, 1);
  arrive(3, 1, 30, 2);
  CHECK(actions(scheduler) == Strings{"open 0:20", "admit 1@0", "open 1:30", "admit 2@1", "admit 3@1"});
  arrive(4, 30, 20, 5);
  CHECK(actions(scheduler) == Strings{"out 2"});
  scheduler.page_done(2, 1);
  CHECK(actions(scheduler) == Strings{"admit 4@1"});  // lane 0 would fit better, but 1 runs before it there
}

TEST_CASE("a session paged out while it was profiled asks for its least again") {
  Scheduler scheduler = make("srtf", capacity(100));
  SessionSpec unknown = spec(1, 10, 20);
  unknown.profiling = true;
  REQUIRE(scheduler.arrive(unknown, 0).ok());
  scheduler.ready(1, 0);
  CHECK(actions(scheduler) == Strings{"open 0:90", "admit 1@0"});
  REQUIRE(scheduler.arrive(spec(2, 10, 40, 100), 0).ok());
  CHECK(actions(scheduler) == Strings{"out 1"});
  scheduler.page_done(1, 1);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:40", "admit 2@0", "resize 0:80", "in 1@0"});
}
