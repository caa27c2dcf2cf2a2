// Capacity and quotas that change while sessions run.
// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>
#include <vector>

#include "sched/scheduler.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace gpushare::sched;

namespace {

Scheduler make(const char* policy, uint64_t capacity_bytes, bool paging = true) {
  SchedulerOptions options;
  options.capacity_bytes = capacity_bytes;
  options.paging = paging;
  return {options, std::move(*make_policy(policy))};
}

void arrive(Scheduler& scheduler, SessionId id, uint64_t p, uint64_t e,
            SessionClass cls = SessionClass::kGuaranteed) {
  SessionSpec spec;
  spec.id = id;
  spec.name = std::to_string(id);
  spec.persistent_bytes = p;
  spec.ephemeral_bytes = e;
  spec.cls = cls;
  REQUIRE(scheduler.arrive(spec, id).ok());
}

// Sessions that the actions since the last call page out; done at once.
std::vector<SessionId> paged_out(Scheduler& scheduler, uint64_t now_ns = 100) {
  std::vector<SessionId> out;
  for (const Action& action : scheduler.take_actions())
    if (action.kind == ActionKind::kPageOut) out.push_back(action.session);
  for (const SessionId id : out) scheduler.page_done(id, now_ns);
  CHECK(scheduler.check() == "");
  return out;
}

void run(Scheduler& scheduler, SessionId id, uint64_t now_ns) {
  scheduler.ready(id, now_ns);
  scheduler.dispatched(id, scheduler.lane_of(id), now_ns);
}

}  // namespace

TEST_CASE("a capacity that is lowered is a target, and the effective one falls with the promises") {
  Scheduler scheduler = make("fair", 100, false);
  arrive(scheduler, 1, 30, 10);
  arrive(scheduler, 2, 30, 10);
  CHECK(scheduler.capacity().target_bytes == 100);
  CHECK(scheduler.capacity().effective_bytes == 100);
  REQUIRE(scheduler.set_capacity(50, 1).ok());
  CHECK(scheduler.capacity().target_bytes == 50);
  CHECK(scheduler.capacity().effective_bytes == 70);  // the two lanes have merged into one
  CHECK(scheduler.promised_bytes() == 70);
  // Nothing new above it.
  CHECK(scheduler.set_need(1, 31, 10, 2).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(scheduler.set_need(1, 45, 10, 2).code() == GPUSHARE_EXCEEDS_CAPACITY);
  SessionSpec spec;
  spec.id = 3;
  spec.persistent_bytes = 51;
  CHECK(scheduler.arrive(spec, 2).code() == GPUSHARE_EXCEEDS_CAPACITY);
  // Less is always taken.
  CHECK(scheduler.set_need(1, 25, 10, 3).ok());
  CHECK(scheduler.capacity().effective_bytes == 65);
  arrive(scheduler, 4, 10, 0);
  CHECK(scheduler.state(4) == SessionState::kQueued);
  scheduler.leave(2, 4);
  CHECK(scheduler.capacity().effective_bytes == 50);
  CHECK(scheduler.state(4) == SessionState::kResident);
  CHECK(scheduler.promised_bytes() == 45);
  CHECK(scheduler.check() == "");
}

TEST_CASE("more than there is cannot be promised, and what comes back lets sessions in") {
  Scheduler scheduler = make("fair", 100);
  const base::Status refused = scheduler.set_capacity(101, 1);
  CHECK(refused.code() == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(refused.message().find("101") != std::string::npos);
  REQUIRE(scheduler.set_capacity(0, 1).ok());
  REQUIRE(scheduler.set_capacity(40, 2).ok());
  arrive(scheduler, 1, 30, 10);
  arrive(scheduler, 2, 30, 10);
  CHECK(scheduler.state(2) == SessionState::kQueued);
  REQUIRE(scheduler.set_capacity(100, 3).ok());
  CHECK(scheduler.state(2) == SessionState::kResident);
  CHECK(scheduler.check() == "");
}

TEST_CASE("lanes merge before anybody is paged out; then class, then the least copying") {
  Scheduler scheduler = make("fair", 200);
  arrive(scheduler, 1, 40, 10);
  arrive(scheduler, 2, 20, 10, SessionClass::kOpportunistic);
  arrive(scheduler, 3, 30, 10, SessionClass::kOpportunistic);
  arrive(scheduler, 4, 25, 10);
  REQUIRE(scheduler.promised_bytes() == 155);
  REQUIRE(scheduler.set_capacity(125, 10).ok());
  CHECK(paged_out(scheduler).empty());
  CHECK(scheduler.promised_bytes() == 125);
  CHECK(scheduler.lanes_open() == 1);
  REQUIRE(scheduler.set_capacity(110, 11).ok());  // 15 are missing: the smaller one of the lower class
  CHECK(paged_out(scheduler) == std::vector<SessionId>{2});
  REQUIRE(scheduler.set_capacity(50, 12).ok());  // that class does not do, and of the other 25 are missing
  CHECK(paged_out(scheduler) == std::vector<SessionId>{3, 4});
  CHECK(scheduler.promised_bytes() == 50);
  REQUIRE(scheduler.set_capacity(200, 13).ok());
  for (const SessionId id : {2, 3, 4}) scheduler.ready(id, 14);
  for (const Action& action : scheduler.take_actions())
    if (action.kind == ActionKind::kPageIn) scheduler.page_done(action.session, 15);
  for (const SessionId id : {1, 2, 3, 4}) CHECK(scheduler.state(id) == SessionState::kResident);
  CHECK(scheduler.check() == "");
}

TEST_CASE(
    "what is in flight keeps its bytes until its boundary, and a capacity raised before that spares it") {
  Scheduler scheduler = make("fifo", 100);
  arrive(scheduler, 1, 40, 20);
  run(scheduler, 1, 2);
  REQUIRE(scheduler.set_capacity(30, 3).ok());
  CHECK(paged_out(scheduler).empty());
  CHECK(scheduler.capacity().effective_bytes == 60);
  SECTION("it is raised") {
    REQUIRE(scheduler.set_capacity(60, 4).ok());
    scheduler.finished(1, 10, 14);
    CHECK(paged_out(scheduler).empty());
    scheduler.ready(1, 15);
    CHECK(scheduler.pick(scheduler.lane_of(1), 15) == SessionId{1});
  }
  SECTION("it ends") {
    scheduler.ready(1, 5);
    CHECK_FALSE(scheduler.pick(scheduler.lane_of(1), 5));
    scheduler.finished(1, 10, 14);
    CHECK(paged_out(scheduler) == std::vector<SessionId>{1});
    CHECK(scheduler.capacity().effective_bytes == 30);
    CHECK(scheduler.promised_bytes() == 0);
    REQUIRE(scheduler.set_capacity(100, 20).ok());  // its work waits: it comes back
    CHECK(scheduler.lane_of(1) != kNoLane);
  }
}

TEST_CASE("a session's quota limits what it may be promised, not what it has") {
  Scheduler scheduler = make("fair", 100);
  arrive(scheduler, 1, 20, 10);
  scheduler.set_quota(1, 35);
  CHECK(scheduler.set_need(1, 30, 10, 2).code() == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(scheduler.set_need(1, 25, 10, 2).ok());
  scheduler.set_quota(1, 20);
  CHECK(scheduler.promised_bytes() == 35);
  CHECK(scheduler.set_need(1, 26, 10, 3).code() == GPUSHARE_QUOTA_EXCEEDED);
  CHECK(scheduler.set_need(1, 20, 5, 3).ok());
  CHECK(scheduler.promised_bytes() == 25);
  CHECK(scheduler.set_need(1, 20, 0, 3).ok());
  CHECK(scheduler.promised_bytes() == 20);
  scheduler.set_quota(1, 0);
  CHECK(scheduler.set_need(1, 60, 10, 4).ok());
  CHECK(scheduler.check() == "");
  // Rounding up both parts of a need within the quota does not exceed it.
  CHECK(quota_in_granules(0, 4) == kUnknown);
  for (uint64_t granule : {1, 2, 4, 7})
    for (uint64_t quota = 2; quota < 40; ++quota) {
      uint64_t most = 0;
      for (uint64_t p = 0; p <= quota; ++p)
        most = std::max(
            most, (p + granule - 1) / granule * granule + (quota - p + granule - 1) / granule * granule);
      CAPTURE(granule, quota);
      CHECK(quota_in_granules(quota, granule) == most);
    }
}
