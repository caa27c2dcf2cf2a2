// Admission, waiting and turns, under every policy.
// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "sched/scheduler_impl.hpp"
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

namespace {

// The scheduler's books, which nobody else can reach: access is not checked where a template is instantiated by name.
template <auto kMember>
struct Opener {
  friend auto& books_of(Scheduler& scheduler) { return *(scheduler.*kMember); }
};
auto& books_of(Scheduler& scheduler);
template struct Opener<&Scheduler::impl_>;

}  // namespace

TEST_CASE("the check of the books sees each number that is wrong in one way alone") {
  SchedulerOptions options = capacity(200);
  options.compute_units = 8;
  Scheduler scheduler = make("fair", options);
  SessionSpec one = spec(1, 10, 40);
  one.compute_units = 4;
  REQUIRE(scheduler.arrive(one, 0).ok());
  CHECK(actions(scheduler) == Strings{"open 0:40", "admit 1@0"});
  auto& books = books_of(scheduler);
  const auto wrong = [&](auto& number) {
    std::vector<std::string> said;
    for (const int change : {1, -1}) {
      number = static_cast<std::decay_t<decltype(number)>>(number + change);
      said.push_back(scheduler.check());
      number = static_cast<std::decay_t<decltype(number)>>(number - change);
    }
    CHECK(scheduler.check() == "");
    return said;
  };
  const std::string units = "lanes have 4 compute units of 8", total = "a running total is wrong";
  CHECK(wrong(books.compute_units) == Strings{units, units});
  CHECK(wrong(books.residents) == Strings{total, total});
  CHECK(wrong(books.lanes_open) == Strings{total, total});
  CHECK(wrong(books.evicting) == Strings{total, total});
  CHECK(wrong(books.spares) == Strings{total, total});
  const auto wrong_claim = [&](ClaimNode& claim) {
    std::vector<std::string> said;
    claim.promise(claim.promised() + 1);
    said.push_back(scheduler.check());
    claim.promise(claim.promised() - 1);
    claim.need(claim.needed() + 1);
    said.push_back(scheduler.check());
    claim.need(claim.needed() - 1);
    CHECK(scheduler.check() == "");
    return said;
  };
  const std::string sum = "a claim is not the sum of those below it";
  for (ClaimNode* each : {&books.tree.sessions, &books.tree.lanes, &books.tree.caches, &books.tree.device})
    CHECK(wrong_claim(*each) == Strings{sum, sum});
  const std::string own = "session 1, resident: its claim has other bytes than it needs or is promised";
  CHECK(wrong_claim(books.find(1)->claim) == Strings{own, own});
  // The same on both sides, and more than there is.
  books.options.compute_units = 3;
  CHECK(scheduler.check() == "lanes have 4 compute units of 3");
}

TEST_CASE("sizes are rounded to the granularity") {
  SchedulerOptions options = capacity(128);
  options.granularity_bytes = 32;
  Scheduler scheduler = make("fair", options);
  REQUIRE(scheduler.arrive(spec(1, 1, 33), 0).ok());
  CHECK(scheduler.promised_bytes() == 96);
  CHECK(scheduler.arrive(spec(2, 33, 65), 0).code() == GPUSHARE_EXCEEDS_CAPACITY);
}

TEST_CASE("P below the granularity is rounded to the small one, lanes are not") {
  SchedulerOptions options = capacity(128);
  options.granularity_bytes = 32;
  options.small_granularity_bytes = 4;
  Scheduler scheduler = make("fair", options);
  REQUIRE(scheduler.arrive(spec(1, 1, 1), 0).ok());
  CHECK(scheduler.promised_bytes() == 4 + 32);
  const std::pair<uint64_t, uint64_t> sizes[] = {{4, 4},   {5, 8},   {28, 28}, {29, 32},
                                                 {32, 32}, {33, 64}, {0, 0}};
  for (const auto& [need, promised] : sizes) {
    INFO(need);
    REQUIRE(scheduler.set_need(1, need, 1, 0).ok());
    CHECK(scheduler.promised_bytes() == promised + 32);
    CHECK(scheduler.check() == "");
  }
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
  CHECK(overtakers <= kMostOvertakes + 2);
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
  CHECK(scheduler.policy_name() == "srtf");
}

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
