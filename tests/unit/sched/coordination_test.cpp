// A scheduler with a coordinator: classes, limits, sessions that may not run, and what the driver is told.
// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sched/scheduler.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace {

using namespace gpushare;  // NOLINT
using sched::Action;
using sched::ActionKind;
using sched::CoordinatorOptions;
using sched::Scheduler;
using sched::SchedulerOptions;
using sched::SessionClass;
using sched::SessionSpec;
using sched::SessionState;

constexpr auto kSureClass = SessionClass::kGuaranteed;
constexpr auto kSpareClass = SessionClass::kOpportunistic;
constexpr uint64_t kCoordinatedWaitNs = 1'000'000'000, kShrinkTimeNs = 100'000'000;

uint64_t below_end(test::Random& random, uint64_t end) {
  return test::uniform(random, 0, end - 1);
}

// A driver without a device: page-outs and page-ins end at once, unless `copies` is off.
struct Coordinated {
  explicit Coordinated(uint64_t capacity_bytes, const char* policy = "fair", uint32_t max_lanes = 0) {
    SchedulerOptions options;
    options.max_lanes = max_lanes;
    options.capacity_bytes = capacity_bytes;
    scheduler = std::make_unique<Scheduler>(options, std::move(*sched::make_policy(policy)));
    coordinate({});
  }
  void coordinate(std::optional<CoordinatorOptions> options) {
    if (options) options->long_wait_ns = kCoordinatedWaitNs;
    REQUIRE(scheduler->set_coordination(options, now_ns).ok());
    carry_out();
  }
  base::Status arrive(uint64_t id, SessionClass cls, uint64_t bytes, uint64_t least_bytes = 0,
                      bool may_upgrade = false, bool may_queue = true) {
    SessionSpec spec;
    spec.id = id;
    spec.name = "session";
    spec.cls = cls;
    spec.persistent_bytes = bytes;
    spec.least_bytes = least_bytes;
    spec.may_upgrade = may_upgrade;
    spec.may_queue = may_queue;
    const base::Status status = scheduler->arrive(spec, now_ns);
    carry_out();
    return status;
  }
  void leave(uint64_t id) {
    scheduler->leave(id, now_ns);
    carry_out();
  }
  // The driver's boundary of a session: it sends out what it has above its limit.
  bool shrink(uint64_t id) {
    const uint64_t limit = limits[id], has = scheduler->view(id).persistent_bytes;
    if (limit == 0 || has <= limit) return false;
    REQUIRE(scheduler->set_need(id, limit, 0, now_ns).ok());
    carry_out();
    return true;
  }
  void pass(uint64_t ns) {
    now_ns += ns;
    if (now_ns >= scheduler->look_again_ns()) scheduler->look(now_ns);
    carry_out();
  }
  void carry_out() {
    for (std::vector<Action> actions = scheduler->take_actions(); !actions.empty();
         actions = scheduler->take_actions()) {
      for (const Action& action : actions) {
        if (action.kind == ActionKind::kTerms) {
          limits[action.session] = action.bytes;
          classes[action.session] = action.cls;
        }
        if (action.kind == ActionKind::kPageOut) ++page_outs;
        if (action.kind == ActionKind::kPageOut || action.kind == ActionKind::kPageIn)
          scheduler->page_done(action.session, now_ns);
      }
      REQUIRE(scheduler->check().empty());
    }
    REQUIRE(scheduler->check().empty());
  }
  bool runs(uint64_t id) const { return scheduler->state(id) == SessionState::kResident; }

  std::unique_ptr<Scheduler> scheduler;
  std::map<uint64_t, uint64_t> limits;
  std::map<uint64_t, SessionClass> classes;
  uint64_t now_ns = 1;
  int page_outs = 0;
};

}  // namespace

TEST_CASE("a guaranteed session has the bytes that opportunistic ones shrink by, under every policy") {
  for (const char* policy : {"fair", "pack", "priority"}) {
    CAPTURE(policy);
    Coordinated of(32, policy);
    of.coordinate(CoordinatorOptions{});
    REQUIRE(of.arrive(1, kSpareClass, 20, 4).ok());
    CHECK(of.runs(1));
    CHECK(of.limits[1] == 0);  // all that it wants
    REQUIRE(of.arrive(2, kSureClass, 24).ok());
    CHECK_FALSE(of.runs(2));
    CHECK(of.limits[1] == 8);
    CHECK(of.shrink(1));
    CHECK(of.runs(2));
    CHECK(of.runs(1));
    CHECK(of.page_outs == 0);
    of.leave(2);
    CHECK(of.limits[1] == 0);  // as much as before
    CHECK(of.scheduler->set_need(1, 20, 0, of.now_ns).ok());
  }
}

// Otherwise the iterations of both would take turns for as long as both run.
TEST_CASE("a guaranteed session waits for a lane of its own while opportunistic ones shrink") {
  Coordinated of(32, "pack");
  of.coordinate(CoordinatorOptions{});
  const auto arrive = [&](uint64_t id, SessionClass cls, uint64_t bytes) {
    SessionSpec spec;
    spec.id = id;
    spec.cls = cls;
    spec.persistent_bytes = bytes;
    spec.ephemeral_bytes = 2;
    spec.least_bytes = cls == kSpareClass ? 6 : 0;
    REQUIRE(of.scheduler->arrive(spec, of.now_ns).ok());
    of.carry_out();
  };
  const auto shrink_to = [&](uint64_t bytes) {
    REQUIRE(of.scheduler->set_need(1, bytes, 2, of.now_ns).ok());
    of.carry_out();
  };
  arrive(1, kSpareClass, 18);
  arrive(2, kSureClass, 24);
  CHECK(of.limits[1] == 6);
  shrink_to(10);
  CHECK_FALSE(of.runs(2));
  shrink_to(6);  // enough for the lane of the other
  CHECK_FALSE(of.runs(2));
  shrink_to(4);
  CHECK(of.runs(2));
  CHECK(of.scheduler->lane_of(1) != of.scheduler->lane_of(2));
  // A session that does not shrink is paged out.
  of.leave(2);
  shrink_to(18);
  arrive(3, kSureClass, 24);
  shrink_to(6);
  CHECK_FALSE(of.runs(3));
  of.pass(kShrinkTimeNs);
  CHECK(of.runs(3));
}

TEST_CASE("a session that does not shrink is paged out, and comes back when there is room") {
  Coordinated of(32);
  of.coordinate(CoordinatorOptions{});
  REQUIRE(of.arrive(1, kSpareClass, 20, 4).ok());
  of.scheduler->ready(1, of.now_ns);
  REQUIRE(of.arrive(2, kSureClass, 24).ok());
  of.pass(kShrinkTimeNs - 1);
  CHECK(of.runs(1));
  of.pass(1);
  CHECK(of.page_outs == 1);
  CHECK_FALSE(of.runs(1));
  CHECK(of.runs(2));
  CHECK_FALSE(of.scheduler->coordinated_wait(1).empty());
  CHECK(of.scheduler->coordinated_wait(2).empty());
  of.leave(2);
  CHECK(of.runs(1));
}

TEST_CASE("a session that comes nearer to its limit is given time") {
  Coordinated of(32);
  of.coordinate(CoordinatorOptions{});
  REQUIRE(of.arrive(1, kSpareClass, 20, 4).ok());
  REQUIRE(of.arrive(2, kSureClass, 24).ok());
  for (const uint64_t bytes : {18, 15, 12, 9}) {
    of.pass(kShrinkTimeNs - 1);
    REQUIRE(of.scheduler->set_need(1, bytes, 0, of.now_ns).ok());
    of.carry_out();
    CHECK(of.runs(1));
    CHECK_FALSE(of.runs(2));
  }
  CHECK(of.shrink(1));
  CHECK(of.runs(2));
  CHECK(of.page_outs == 0);
}

TEST_CASE("opportunistic sessions are upgraded, demoted, capped and share by weight") {
  Coordinated of(100);
  CoordinatorOptions options;
  options.max_opportunistic = 2;
  of.coordinate(options);
  REQUIRE(of.arrive(1, kSpareClass, 60, 10, true).ok());
  CHECK(of.scheduler->view(1).cls == kSureClass);
  CHECK(of.classes[1] == kSureClass);
  REQUIRE(of.arrive(2, kSpareClass, 60, 10).ok());
  CHECK(of.limits[2] == 40);
  REQUIRE(of.arrive(3, kSureClass, 50).ok());
  CHECK(of.classes[1] == kSpareClass);  // demoted
  CHECK(of.limits[1] == 25);
  CHECK(of.limits[2] == 25);
  REQUIRE(of.arrive(4, kSpareClass, 5, 5).ok());
  CHECK(of.scheduler->state(4) == SessionState::kQueued);  // two run already
  CHECK(of.arrive(5, kSpareClass, 5, 5, false, false).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  (void)of.shrink(1);
  (void)of.shrink(2);
  CHECK(of.runs(3));
  of.leave(2);
  CHECK(of.runs(4));
  of.leave(3);
  CHECK(of.classes[1] == kSureClass);  // there is room again
}

TEST_CASE("a guaranteed session that has waited long runs as opportunistic until its bytes are free") {
  Coordinated of(100);
  of.coordinate(CoordinatorOptions{});
  REQUIRE(of.arrive(1, kSureClass, 60).ok());
  REQUIRE(of.arrive(2, kSureClass, 30).ok());
  CHECK(of.scheduler->state(2) == SessionState::kQueued);  // one guaranteed session at a time
  of.pass(kCoordinatedWaitNs - 1);
  CHECK_FALSE(of.runs(2));
  of.pass(1);
  CHECK(of.runs(2));
  CHECK(of.classes[2] == kSpareClass);
  of.leave(1);
  CHECK(of.classes[2] == kSureClass);
}

// It lacks bytes, and nothing of what the policy gives a guaranteed session: its rank and its weight.
TEST_CASE("a guaranteed session that runs before its bytes are free has its share of the turns") {
  for (const char* policy : {"fair", "priority"}) {
    CAPTURE(policy);
    Coordinated of(100, policy, 1);
    of.coordinate(CoordinatorOptions{});
    REQUIRE(of.arrive(1, kSureClass, 60).ok());
    REQUIRE(of.arrive(2, kSureClass, 30).ok());
    REQUIRE(of.arrive(3, kSpareClass, 10).ok());
    of.pass(kCoordinatedWaitNs);
    REQUIRE(of.runs(2));
    CHECK(of.classes[2] == kSpareClass);
    CHECK(of.scheduler->class_for_bytes(2) == kSpareClass);
    const auto run = [&](int turns) {
      for (const uint64_t id : {1, 2, 3}) of.scheduler->ready(id, of.now_ns);
      for (int turn = 0; turn < turns; ++turn) {
        const auto picked = of.scheduler->pick(0, of.now_ns);
        REQUIRE(picked);
        of.scheduler->dispatched(*picked, 0, of.now_ns);
        of.now_ns += 1'000'000;
        of.scheduler->finished(*picked, 1'000'000, of.now_ns);
        of.scheduler->ready(*picked, of.now_ns);
        of.carry_out();
      }
    };
    run(300);
    const bool ranks = std::string(policy) == "priority";
    const uint64_t share_ns = ranks ? 150'000'000 : 100'000'000;
    for (const uint64_t id : {1, 2}) {
      CHECK(of.scheduler->view(id).service_ns >= share_ns - 5'000'000);
      CHECK(of.scheduler->view(id).service_ns <= share_ns + 5'000'000);
    }
    // Where bytes are asked for it comes after the one that has its own.
    CHECK(of.scheduler->class_for_bytes(1) == kSureClass);
    // Its class falls in turns, too, when the session itself is of the lower one: an owner that keeps silent.
    of.scheduler->set_class(2, kSpareClass, of.now_ns);
    CHECK(of.scheduler->view(2).cls == kSpareClass);
    of.scheduler->set_class(2, kSureClass, of.now_ns);
    of.carry_out();
    CHECK(of.scheduler->class_for_bytes(2) == kSpareClass);
    of.leave(1);
    CHECK(of.scheduler->class_for_bytes(2) == kSureClass);
  }
}

TEST_CASE("a guaranteed session that grows takes it from opportunistic ones' limits") {
  Coordinated of(100);
  of.coordinate(CoordinatorOptions{});
  REQUIRE(of.arrive(1, kSureClass, 40).ok());
  REQUIRE(of.arrive(2, kSpareClass, 50, 10).ok());
  CHECK(of.limits[2] == 0);
  REQUIRE(of.scheduler->set_need(1, 50, 0, of.now_ns).ok());
  of.carry_out();
  CHECK(of.limits[2] == 0);
  CHECK(of.scheduler->set_need(1, 70, 0, of.now_ns).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  of.carry_out();
  REQUIRE(of.scheduler->set_need(2, 20, 0, of.now_ns).ok());
  REQUIRE(of.scheduler->set_need(1, 70, 0, of.now_ns).ok());
  of.carry_out();
  // It wants no more than it has, so nothing limits it until it grows.
  CHECK(of.limits[2] == 0);
  CHECK(of.scheduler->set_need(2, 50, 0, of.now_ns).code() == GPUSHARE_QUOTA_EXCEEDED);
  of.carry_out();
  CHECK(of.limits[2] == 30);
}

TEST_CASE("a coordinator that is taken away leaves every session its class and no limit") {
  Coordinated of(32);
  of.coordinate(CoordinatorOptions{});
  REQUIRE(of.arrive(1, kSpareClass, 20, 4, true).ok());
  REQUIRE(of.arrive(2, kSpareClass, 20, 4).ok());
  CHECK(of.classes[1] == kSureClass);
  CHECK(of.limits[2] == 12);
  of.coordinate(std::nullopt);
  CHECK(of.classes[1] == kSpareClass);
  CHECK(of.limits[2] == 0);
  CHECK_FALSE(of.scheduler->coordination());
}

TEST_CASE("sessions that stay for speed alone are no jobs of the coordinator") {
  Coordinated of(32);
  of.coordinate(CoordinatorOptions{});
  REQUIRE(of.arrive(1, kSureClass, 10).ok());
  CHECK(of.scheduler->set_spare(1, 1e9, of.now_ns));
  of.carry_out();
  REQUIRE(of.arrive(2, kSureClass, 10).ok());
  CHECK(of.runs(2));  // the only guaranteed one that counts
  of.scheduler->ready(1, of.now_ns);
  of.carry_out();
  CHECK_FALSE(of.runs(1));
  of.leave(2);
  CHECK(of.runs(1));
}

TEST_CASE("coordinated sessions at random: invariants hold, and limits are reached") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    test::Random random(seed);
    CAPTURE(seed);
    constexpr uint64_t kCapacity = 1000;
    Coordinated of(kCapacity, std::vector<const char*>{"fair", "pack", "priority", "fifo"}[seed % 4]);
    CoordinatorOptions options;
    options.max_guaranteed = 2;
    of.coordinate(options);
    std::vector<uint64_t> live;
    uint64_t next = 1;
    for (int step = 0; step < 400; ++step) {
      const uint64_t what = below_end(random, 10);
      if (live.empty() || what < 3) {
        const uint64_t bytes = 1 + below_end(random, kCapacity / 2);
        const auto cls = below_end(random, 2) == 0 ? kSureClass : kSpareClass;
        REQUIRE(
            of.arrive(next, cls, bytes, test::uniform(random, 0, bytes - 1), below_end(random, 2) == 0).ok());
        live.push_back(next++);
      } else if (what < 5) {
        const size_t at = below_end(random, live.size());
        of.leave(live[at]);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
      } else if (what < 6) {
        of.scheduler->ready(live[below_end(random, live.size())], of.now_ns);
        of.carry_out();
      } else if (what < 7) {
        const uint64_t id = live[below_end(random, live.size())];
        if (of.runs(id)) (void)of.scheduler->set_need(id, 1 + below_end(random, kCapacity / 2), 0, of.now_ns);
        of.carry_out();
      } else if (what < 9) {
        (void)of.shrink(live[below_end(random, live.size())]);
      } else {
        of.pass(below_end(random, 2 * kShrinkTimeNs));
      }
    }
    // Once all have shrunk and some time has passed, everybody who may run does.
    for (int round = 0; round < 20; ++round) {
      for (const uint64_t id : live) (void)of.shrink(id);
      of.pass(kShrinkTimeNs);
    }
    for (const uint64_t id : live)
      if (of.scheduler->coordinated_wait(id).empty()) of.scheduler->ready(id, of.now_ns);
    of.carry_out();
    uint64_t guaranteed = 0;
    for (const uint64_t id : live) {
      const auto view = of.scheduler->view(id);
      if (!of.scheduler->coordinated_wait(id).empty()) {
        CHECK_FALSE(of.runs(id));
        continue;
      }
      guaranteed += of.scheduler->class_for_bytes(id) == kSureClass ? 1 : 0;
      if (of.limits[id] > 0 && of.runs(id)) CHECK(view.persistent_bytes <= of.limits[id]);
    }
    CHECK(guaranteed <= 2);
  }
}
