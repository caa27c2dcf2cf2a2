// Admission, waiting, page-outs and turns, under every policy.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "unit/sched/scheduler_fixture.hpp"

using namespace gpushare;
using namespace gpushare::sched;
using namespace gpushare::test::scheduling;

TEST_CASE("a session is admitted to a lane, runs when ready, and leaves nothing behind") {
  Scheduler scheduler = make("pack", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 10, 40), 0).ok());
  CHECK(actions(scheduler) == Strings{"open 0:40", "admit 1@0"});
  CHECK(scheduler.state(1) == SessionState::kResident);
  CHECK(scheduler.promised_bytes() == 50);
  CHECK_FALSE(scheduler.pick(0, 0));
  scheduler.ready(1, 5);
  CHECK(scheduler.pick(0, 5) == 1);
  scheduler.not_ready(1, 6);
  CHECK_FALSE(scheduler.pick(0, 6));
  scheduler.leave(1, 7);
  CHECK(actions(scheduler) == Strings{"close 0"});
  CHECK(scheduler.promised_bytes() == 0);
  CHECK_FALSE(scheduler.knows(1));
}

TEST_CASE("what could never run is refused with the numbers, what must not queue too") {
  Scheduler scheduler = make("fair", capacity(100));
  const base::Status large = scheduler.arrive(spec(1, 60, 41), 0);
  CHECK(large.code() == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(large.message().find("60 B") != std::string::npos);
  CHECK(scheduler.arrive(spec(2, UINT64_MAX, UINT64_MAX), 0).code() == GPUSHARE_EXCEEDS_CAPACITY);
  REQUIRE(scheduler.arrive(spec(3, 20, 60), 0).ok());
  SessionSpec hasty = spec(4, 30, 10);
  hasty.may_queue = false;
  const base::Status full = scheduler.arrive(hasty, 0);
  CHECK(full.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(full.message().find("20 B of 100 B can be promised") != std::string::npos);
  CHECK_FALSE(scheduler.knows(4));
  CHECK(scheduler.arrive(spec(3, 1, 1), 0).code() == GPUSHARE_INVALID_ARGUMENT);
  SessionSpec weightless = spec(5, 1, 1);
  weightless.weight = 0;
  CHECK(scheduler.arrive(weightless, 0).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(scheduler.check() == "");
}

TEST_CASE("sizes are rounded to the granularity") {
  SchedulerOptions options = capacity(128);
  options.granularity_bytes = 32;
  Scheduler scheduler = make("fair", options);
  REQUIRE(scheduler.arrive(spec(1, 1, 33), 0).ok());
  CHECK(scheduler.promised_bytes() == 96);
  CHECK(scheduler.arrive(spec(2, 33, 65), 0).code() == GPUSHARE_EXCEEDS_CAPACITY);
}

TEST_CASE("calls about sessions that do not exist do nothing") {
  Scheduler scheduler = make("srtf", capacity(10));
  scheduler.ready(9, 0);
  scheduler.finished(9, 1, 0);
  scheduler.dispatched(9, 0, 0);
  scheduler.leave(9, 0);
  scheduler.page_done(9, 0);
  scheduler.unplaced(9, 0);
  scheduler.wake(9, 0);
  CHECK(scheduler.set_need(9, 1, 1, 0).code() == GPUSHARE_NOT_FOUND);
  CHECK_FALSE(scheduler.pick(3, 0));
  CHECK(actions(scheduler).empty());
}

TEST_CASE("fifo admits one at a time, in order, though others would fit") {
  Scheduler scheduler = make("fifo", capacity(100));
  for (SessionId id = 1; id <= 3; ++id) REQUIRE(scheduler.arrive(spec(id, 1, 1), 0).ok());
  CHECK(actions(scheduler) == Strings{"open 0:1", "admit 1@0"});
  scheduler.leave(1, 10);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:1", "admit 2@0"});
  scheduler.leave(3, 11);  // from the queue
  scheduler.leave(2, 12);
  CHECK(actions(scheduler) == Strings{"close 0"});
}

TEST_CASE("a large session that waits is not overtaken for ever") {
  Scheduler scheduler = make("fair", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 10, 10), 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 10, 90), 0).ok());
  uint64_t overtakers = 0;
  std::vector<SessionId> small;
  for (SessionId id = 3; id < 500; ++id) {
    REQUIRE(scheduler.arrive(spec(id, 10, 10), 0).ok());
    small.push_back(id);
    if (scheduler.state(id) == SessionState::kResident) ++overtakers;
    if (small.size() > 2) {
      scheduler.leave(small.front(), 0);
      small.erase(small.begin());
    }
    if (scheduler.state(2) == SessionState::kResident) break;
    if (id == 100) scheduler.leave(1, 0);
  }
  CHECK(scheduler.state(2) == SessionState::kResident);
  CHECK(overtakers <= scheduler.policy().traits().max_overtakes + 2);
}

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
  CHECK_FALSE(scheduler.make_room(2, 10, 16));
  scheduler.allow_paging(3, 17);
  CHECK(actions(scheduler) == Strings{});  // nobody wants its room any more
  CHECK(scheduler.make_room(2, 10, 18));
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
  CHECK(scheduler.make_room(2, 30, 1));
  scheduler.page_done(1, 2);
  scheduler.room_used(2, 3);
  REQUIRE(actions(scheduler).back() == "in 1@0");
}

}  // namespace

TEST_CASE("a page-in of an opportunistic session turns back for a guaranteed one") {
  Scheduler scheduler = make("priority", capacity(100));
  begin_page_in(scheduler);
  for (const bool in_time : {true, false}) {
    CHECK(scheduler.make_room(2, 30, 4));
    CHECK(actions(scheduler) == Strings{"back 1"});
    CHECK(scheduler.make_room(2, 30, 5));
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
      CHECK(scheduler.make_room(2, 30, 7));
      CHECK(actions(scheduler) == Strings{"out 1"});
    }
    CHECK(scheduler.check() == "");
  }
  // The page-in of an equal goes on.
  scheduler.page_done(1, 8);
  scheduler.set_class(1, SessionClass::kGuaranteed, 9);
  scheduler.room_used(2, 10);
  actions(scheduler);
  (void)scheduler.make_room(2, 30, 11);
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
    CHECK(scheduler.make_room(2, 40, 5));
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
  CHECK(scheduler.make_room(2, 40, 1));
  CHECK(actions(scheduler) == Strings{"out 1"});
  scheduler.page_done(1, 2);
  scheduler.room_used(2, 3);
  REQUIRE(actions(scheduler).back() == "in 1@0");
  CHECK(scheduler.make_room(2, 30, 4));
  CHECK(actions(scheduler) == Strings{"back 1"});
  SECTION("what is left of them is enough for the second session") {
    CHECK(scheduler.make_room(3, 10, 5));
    CHECK(actions(scheduler) == Strings{});
    SECTION("and comes to it, also if the first one gives up") {
      scheduler.room_used(2, 6);
      scheduler.unplaced(1, 7);
      CHECK(actions(scheduler) == Strings{"close 0"});
      REQUIRE(scheduler.set_need(3, 30, 10, 8).ok());
    }
  }
  SECTION("it is not enough: somebody else goes out at once") {
    CHECK(scheduler.make_room(3, 30, 5));
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
    CHECK(scheduler.make_room(3, 40, 8));
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
    CHECK(scheduler.make_room(1, 30, 1));
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
    CHECK_FALSE(one_lane.make_room(1, 30, 1));
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
  CHECK_FALSE(scheduler.make_room(1, 30, 1));  // nobody is idle
  CHECK_FALSE(scheduler.make_room_at_boundaries(2, 30, 1));
  CHECK_FALSE(scheduler.make_room_at_boundaries(1, 90, 1));  // all of them would not do
  CHECK_FALSE(scheduler.making_room(1));
  REQUIRE(scheduler.make_room_at_boundaries(1, 30, 1));
  CHECK(scheduler.making_room(1));
  CHECK_FALSE(scheduler.making_room(2));
  CHECK(actions(scheduler) == Strings{});
  scheduler.stop_making_room(2);  // of another session: nothing is made for it
  CHECK(scheduler.making_room(1));
  // Given up: it goes on.
  scheduler.stop_making_room(1);
  CHECK_FALSE(scheduler.making_room(1));
  CHECK(scheduler.check() == "");
  REQUIRE(scheduler.make_room_at_boundaries(1, 30, 2));
  const bool third = scheduler.make_room_at_boundaries(1, 30, 2);
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
  REQUIRE(scheduler.make_room(1, 8, 1));
  CHECK(actions(scheduler) == Strings{"out 2"});
  scheduler.page_done(2, 2);
  REQUIRE(scheduler.make_room(1, 20, 3));
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
  REQUIRE(scheduler.make_room(1, 50, 1));
  CHECK(actions(scheduler) == Strings{"out 2"});
  scheduler.ready(2, 2);
  leaves ? scheduler.leave(1, 3) : scheduler.room_used(1, 3);
  actions(scheduler);
  scheduler.page_done(2, 4);  // only now, and nothing else will happen
  CHECK(actions(scheduler).back() == (leaves ? "in 2@0" : "in 2@1"));
  CHECK(scheduler.check() == "");
}

TEST_CASE("a session that could not be placed waits until something is freed") {
  Scheduler scheduler = make("pack", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 10, 20), 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 10, 20), 0).ok());
  actions(scheduler);
  scheduler.unplaced(2, 0);
  CHECK(scheduler.state(2) == SessionState::kQueued);
  CHECK(actions(scheduler) == Strings{"close 1"});
  REQUIRE(scheduler.arrive(spec(3, 10, 10), 0).ok());
  CHECK(actions(scheduler) == Strings{"open 1:10", "admit 3@1"});
  scheduler.leave(1, 1);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:20", "admit 2@0"});
}

TEST_CASE("a session of unknown need is profiled with all that is free, then keeps what it measured") {
  Scheduler scheduler = make("pack", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 10, 20), 0).ok());
  SessionSpec unknown = spec(2, 5, 1);
  unknown.profiling = true;
  REQUIRE(scheduler.arrive(unknown, 0).ok());
  CHECK(actions(scheduler) == Strings{"open 0:20", "admit 1@0", "open 1:65", "admit 2@1"});
  REQUIRE(scheduler.arrive(spec(3, 10, 20), 0).ok());
  CHECK(scheduler.state(3) == SessionState::kQueued);
  REQUIRE(scheduler.set_need(2, 8, 12, 1).ok());
  CHECK(actions(scheduler) == Strings{"resize 1:12", "open 2:20", "admit 3@2"});
  CHECK(scheduler.promised_bytes() == 80);
  CHECK(scheduler.set_need(2, 8, 33, 2).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(scheduler.set_need(2, 8, 93, 2).code() == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(scheduler.promised_bytes() == 80);
  REQUIRE(scheduler.set_need(2, 8, 32, 2).ok());
  CHECK(actions(scheduler) == Strings{"resize 1:32"});
}

TEST_CASE("remaining time is declared, else estimated from measured iterations, else unknown") {
  Scheduler scheduler = make("fair", capacity(100));
  SessionSpec estimated = spec(1, 1, 1);
  estimated.iterations_total = 10;
  REQUIRE(scheduler.arrive(estimated, 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 1, 1, 500), 0).ok());
  CHECK(scheduler.view(1).remaining_ns == kUnknown);
  CHECK(scheduler.view(2).remaining_ns == 500);
  scheduler.ready(1, 0);
  scheduler.dispatched(1, 0, 0);
  scheduler.finished(1, 30, 30);
  CHECK(scheduler.view(1).remaining_ns == 270);
  scheduler.ready(1, 0);
  scheduler.dispatched(1, 0, 0);
  scheduler.finished(1, 90, 120, 3);
  CHECK(scheduler.view(1).remaining_ns == 180);
  CHECK(scheduler.view(1).iterations_done == 4);
  scheduler.ready(2, 0);
  scheduler.dispatched(2, 1, 0);
  scheduler.finished(2, 501, 600);
  CHECK(scheduler.view(2).remaining_ns == kUnknown);  // the declaration proved wrong
  scheduler.set_remaining(2, 40, 601);
  CHECK(scheduler.view(2).remaining_ns == 40);
}

TEST_CASE("the policy can be changed while sessions run") {
  Scheduler scheduler = make("fifo", capacity(100));
  for (SessionId id = 1; id <= 3; ++id) REQUIRE(scheduler.arrive(spec(id, 10, 10, 1000 / id), 0).ok());
  actions(scheduler);
  scheduler.set_policy(std::move(*make_policy("pack")), 1);
  CHECK(actions(scheduler) == Strings{"open 1:10", "admit 2@1", "open 2:10", "admit 3@2"});
  scheduler.set_policy(std::move(*make_policy("srtf")), 2);
  CHECK(scheduler.residents() == 3);
  CHECK(scheduler.policy().name() == "srtf");
}

// Invariant 7: the service of two backlogged sessions in a lane differs by at most two of the longest
// iterations, weighted.
TEST_CASE("priority: nobody of lower rank starts in another lane while a session has work") {
  Scheduler scheduler = make("priority", capacity(100));
  uint64_t now = 0;
  for (SessionId id = 1; id <= 2; ++id) {
    REQUIRE(scheduler.arrive(spec(id, 1, 10), 0).ok());
    scheduler.ready(id, 0);
  }
  SessionSpec high = spec(3, 1, 10);
  high.priority = 1;
  REQUIRE(scheduler.arrive(high, 0).ok());
  actions(scheduler);
  CHECK(run(scheduler, 0, 1000, now) == 1);  // it has nothing to run yet
  CHECK(run(scheduler, 1, 1000, now) == 2);
  scheduler.ready(3, now);
  CHECK_FALSE(scheduler.pick(0, now));
  CHECK_FALSE(scheduler.pick(1, now));
  REQUIRE(scheduler.pick(2, now) == 3);
  scheduler.dispatched(3, 2, now);
  CHECK_FALSE(scheduler.pick(0, now));
  CHECK(scheduler.look_again_ns() > now);
  scheduler.finished(3, 1000, now += 1000);
  CHECK(scheduler.pick(0, now) == 1);
  CHECK(scheduler.pick(1, now) == 2);
  // One whose iteration does not end keeps nobody for ever.
  scheduler.ready(3, now);
  scheduler.dispatched(*scheduler.pick(2, now), 2, now);
  CHECK_FALSE(scheduler.pick(0, now));
  CHECK(scheduler.pick(0, scheduler.look_again_ns()) == 1);
}

TEST_CASE("a million sessions come and go and leave nothing behind") {
  Scheduler scheduler = make("fair", capacity(1000));
  SessionId id = 0;
  for (int i = 0; i < 250'000; ++i) {
    // Three fit, the fourth waits and is let in by the first that leaves.
    for (int k = 0; k < 4; ++k)
      if (!scheduler.arrive(spec(++id, 100, 200), 0).ok()) FAIL("refused " << id);
    for (int k = 3; k >= 0; --k) scheduler.leave(id - static_cast<SessionId>(k), 0);
    scheduler.take_actions();
  }
  CHECK(id == 1'000'000);
  CHECK(scheduler.promised_bytes() == 0);
  CHECK(scheduler.lanes_open() == 0);
  CHECK(scheduler.lane_limit() <= 4);
  CHECK(scheduler.waiting() == 0);
  CHECK(scheduler.check() == "");
}

TEST_CASE("interference told to the scheduler reaches every policy set later") {
  class Saturated final : public Interference {
   public:
    double rate(SessionId, std::span<const SessionId> beside) const override {
      return 1.0 / static_cast<double>(beside.size() + 1);
    }
  };
  Scheduler scheduler = make("pack", capacity(1000));
  scheduler.set_interference(std::make_shared<Saturated>(), 0);
  for (SessionId id = 1; id <= 3; ++id) REQUIRE(scheduler.arrive(spec(id, 10, 10), 0).ok());
  CHECK(scheduler.residents() == 1);  // a second lane would add nothing
  scheduler.set_policy(std::move(*make_policy("pack")), 1);
  CHECK(scheduler.residents() == 1);
  scheduler.set_interference(nullptr, 2);
  CHECK(scheduler.residents() == 3);
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
