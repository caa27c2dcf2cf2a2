// The table of the states of a session's bytes: what it lists, that each state can be reached and left, and that the
// scheduler ignores what it does not list.
// SPDX-License-Identifier: Apache-2.0
#include "sched/session_states.hpp"

#include <memory>
#include <set>
#include <vector>

#include "support/catch.hpp"
#include "unit/sched/scheduler_fixture.hpp"

namespace gpushare::test::scheduling {

TEST_CASE("each state of a session's bytes can be reached, and ends") {
  std::set<Bytes> reached{Bytes::kWaiting};
  for (bool more = true; more;) {
    more = false;
    for (const BytesChange& each : kBytesTable)
      if (reached.contains(each.from)) more = reached.insert(each.to).second || more;
  }
  CHECK(reached.size() == kBytesStates.size());
  for (const Bytes state : kBytesStates)
    CHECK(is_listed(state, BytesEvent::kLeft) == (state != Bytes::kGone));
}

TEST_CASE("no state has two ways for one event, and what is not listed is an error") {
  size_t listed = 0;
  for (const Bytes state : kBytesStates)
    for (const BytesEvent event : kBytesEvents) {
      if (!is_listed(state, event)) continue;
      ++listed;
      const BytesChange& row = kBytesTable[change_of(state, event)];
      CHECK(row.from == state);
      CHECK(row.to != state);
    }
  CHECK(listed == kBytesTable.size());
  CHECK_FALSE(is_listed(Bytes::kOut, BytesEvent::kDone));
  CHECK_FALSE(is_listed(Bytes::kGoing, BytesEvent::kChosen));
  CHECK_FALSE(is_listed(Bytes::kGone, BytesEvent::kPlaced));
}

TEST_CASE("an answer to nothing changes nothing") {
  Scheduler scheduler = make("fair", capacity(100));
  REQUIRE(scheduler.arrive(spec(1, 10, 10), 0).ok());
  REQUIRE(scheduler.arrive(spec(2, 85, 10), 0).ok());
  REQUIRE(scheduler.state(2) == SessionState::kQueued);
  const uint64_t before = scheduler.states_taken();
  for (const SessionId id : {1, 2, 3}) {
    scheduler.page_done(id, 1);
    scheduler.page_part(id, 5, 1);
    scheduler.page_out_failed(id, 1);
    scheduler.wake(id, 1);
  }
  scheduler.unplaced(2, 1);
  CHECK(scheduler.states_taken() == before);
  CHECK(scheduler.state(1) == SessionState::kResident);
  CHECK(scheduler.check() == "");
}

namespace {

bool taken(const Scheduler& scheduler, Bytes from, BytesEvent event) {
  return (scheduler.states_taken() >> change_of(from, event) & 1) != 0;
}

// 1 has an iteration in flight and is to make room for 2, which ranks higher.
std::unique_ptr<Scheduler> with_one_leaving() {
  auto made = std::make_unique<Scheduler>(capacity(100), std::move(*make_policy("priority")));
  Scheduler& scheduler = *made;
  REQUIRE(scheduler.arrive(spec(1, 80, 10), 0).ok());
  scheduler.ready(1, 0);
  scheduler.dispatched(1, 0, 0);
  SessionSpec high = spec(2, 50, 10);
  high.priority = 1;
  REQUIRE(scheduler.arrive(high, 1).ok());
  REQUIRE(taken(scheduler, Bytes::kResident, BytesEvent::kChosen));
  REQUIRE(scheduler.state(1) == SessionState::kResident);
  return made;
}

}  // namespace

TEST_CASE("a session that is leaving is spared, finds no place, or ends") {
  const auto spared_by = with_one_leaving();
  Scheduler& spared = *spared_by;
  spared.leave(2, 2);
  CHECK(taken(spared, Bytes::kLeaving, BytesEvent::kSpared));
  CHECK(spared.state(1) == SessionState::kResident);
  CHECK(spared.check() == "");

  const auto unplaced_by = with_one_leaving();
  Scheduler& unplaced = *unplaced_by;
  unplaced.unplaced(1, 2);
  CHECK(taken(unplaced, Bytes::kLeaving, BytesEvent::kUnplaced));
  CHECK(unplaced.state(1) == SessionState::kQueued);

  const auto ended_by = with_one_leaving();
  Scheduler& ended = *ended_by;
  ended.leave(1, 2);
  CHECK(taken(ended, Bytes::kLeaving, BytesEvent::kLeft));
  CHECK(ended.state(2) == SessionState::kResident);
  CHECK(ended.check() == "");
}

TEST_CASE("a page-in that finds no place leaves the session on the host") {
  const auto made = with_one_leaving();
  Scheduler& scheduler = *made;
  scheduler.finished(1, 5, 5);
  REQUIRE(scheduler.state(1) == SessionState::kPagedOut);
  scheduler.page_done(1, 6);
  scheduler.ready(1, 7);
  scheduler.leave(2, 8);
  REQUIRE(taken(scheduler, Bytes::kOut, BytesEvent::kPlaced));
  scheduler.unplaced(1, 9);
  CHECK(taken(scheduler, Bytes::kComing, BytesEvent::kUnplaced));
  CHECK(scheduler.state(1) == SessionState::kPagedOut);
  CHECK(scheduler.lane_of(1) == kNoLane);
  CHECK(scheduler.check() == "");
}

}  // namespace gpushare::test::scheduling
