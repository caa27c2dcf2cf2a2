// Caches with first parts: whoever wants a cache wants its first part as well, and a first part comes before what rests
// on it and never goes without it.
// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <string>
#include <vector>

#include "sched/scheduler.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace {

using namespace gpushare;         // NOLINT
using namespace gpushare::sched;  // NOLINT

constexpr uint64_t kFirst = 100'001, kRest = 100'002;

Scheduler caches_scheduler() {
  SchedulerOptions options;
  options.capacity_bytes = 100;
  return {options, std::move(*make_policy("fair"))};
}

SessionSpec of_class(SessionId id, uint64_t persistent_bytes, SessionClass cls) {
  SessionSpec out;
  out.id = id;
  out.persistent_bytes = persistent_bytes;
  out.cls = cls;
  return out;
}

// The caches of the scheduler's actions of that kind; drops all actions.
std::vector<uint64_t> caches_of(Scheduler& scheduler, ActionKind kind) {
  std::vector<uint64_t> out;
  for (const Action& action : scheduler.take_actions())
    if (action.kind == kind) out.push_back(action.session);
  return out;
}

using List = std::vector<uint64_t>;

TEST_CASE("first layers stay while a session or a mapping needs the rest of them") {
  Scheduler scheduler = caches_scheduler();
  REQUIRE(scheduler.add_cache(kFirst, 40, 1.0).ok());
  REQUIRE(scheduler.add_cache(kRest, 40, 1.0, kFirst).ok());
  scheduler.want_cache(kRest, kNoSession, 0);
  CHECK(caches_of(scheduler, ActionKind::kFillCache) == List{kFirst, kRest});
  REQUIRE(scheduler.arrive(of_class(1, 50, SessionClass::kGuaranteed), 1).ok());
  CHECK(caches_of(scheduler, ActionKind::kDropCache).empty());
  CHECK(scheduler.check() == "");
  CHECK(scheduler.state(1) == SessionState::kQueued);
  scheduler.unwant_cache(kRest, 2);
  CHECK(caches_of(scheduler, ActionKind::kDropCache) == List{kRest});
  CHECK(scheduler.check() == "");
}

TEST_CASE("a first part is filled before what rests on it though it stands behind in line") {
  constexpr uint64_t kOther = kRest + 1;
  Scheduler scheduler = caches_scheduler();
  REQUIRE(scheduler.arrive(of_class(1, 100, SessionClass::kGuaranteed), 0).ok());
  REQUIRE(scheduler.arrive(of_class(2, 0, SessionClass::kOpportunistic), 0).ok());
  for (const SessionId id : {3, 4})
    REQUIRE(scheduler.arrive(of_class(id, 0, SessionClass::kGuaranteed), 0).ok());
  for (const uint64_t id : {kFirst, kOther}) REQUIRE(scheduler.add_cache(id, 10, 1.0).ok());
  REQUIRE(scheduler.add_cache(kRest, 10, 1.0, kFirst).ok());
  (void)scheduler.take_actions();
  scheduler.want_cache(kRest, 2, 1);
  scheduler.want_cache(kFirst, 3, 1);
  scheduler.want_cache(kOther, 4, 1);
  scheduler.want_cache(kRest, 3, 1);
  scheduler.leave(3, 2);  // the first part waits for 2 and moves back
  scheduler.want_cache(kRest, 4, 2);
  CHECK(scheduler.check() == "");
  REQUIRE(scheduler.set_need(1, 80, 0, 3).ok());
  CHECK(caches_of(scheduler, ActionKind::kFillCache) == List{kOther, kFirst});
  CHECK(scheduler.check() == "");
}

TEST_CASE("a cache whose session has gone stands in line by the class of those that still want it") {
  Scheduler scheduler = caches_scheduler();
  REQUIRE(scheduler.arrive(of_class(1, 100, SessionClass::kGuaranteed), 0).ok());
  REQUIRE(scheduler.arrive(of_class(2, 0, SessionClass::kOpportunistic), 0).ok());
  for (const SessionId id : {3, 4})
    REQUIRE(scheduler.arrive(of_class(id, 0, SessionClass::kGuaranteed), 0).ok());
  for (const uint64_t id : {kFirst, kRest}) REQUIRE(scheduler.add_cache(id, 20, 1.0).ok());
  (void)scheduler.take_actions();
  for (const SessionId id : {2, 3}) scheduler.want_cache(kFirst, id, 1);
  scheduler.want_cache(kRest, 4, 1);
  scheduler.unwant_cache(kFirst, 2);
  scheduler.leave(3, 2);
  REQUIRE(scheduler.set_need(1, 60, 0, 3).ok());
  CHECK(caches_of(scheduler, ActionKind::kFillCache) == List{kRest, kFirst});
  CHECK(scheduler.check() == "");
}

TEST_CASE("a cache that is removed wants its first part no more") {
  Scheduler scheduler = caches_scheduler();
  REQUIRE(scheduler.add_cache(kFirst, 40, 1.0).ok());
  REQUIRE(scheduler.add_cache(kRest, 40, 1.0, kFirst).ok());
  for (int times = 0; times < 2; ++times) scheduler.want_cache(kRest, kNoSession, 0);
  scheduler.remove_cache(kRest, 1);
  (void)scheduler.take_actions();
  REQUIRE(scheduler.arrive(of_class(1, 80, SessionClass::kGuaranteed), 2).ok());
  CHECK(caches_of(scheduler, ActionKind::kDropCache) == List{kFirst});
  CHECK(scheduler.check() == "");
}

TEST_CASE("a first part is a cache that has none itself") {
  Scheduler scheduler = caches_scheduler();
  CHECK(scheduler.add_cache(kRest, 1, 1.0, kFirst).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(scheduler.add_cache(kRest, 1, 1.0, kRest).code() == GPUSHARE_INVALID_ARGUMENT);
  REQUIRE(scheduler.add_cache(kFirst, 1, 1.0).ok());
  REQUIRE(scheduler.add_cache(kRest, 1, 1.0, kFirst).ok());
  CHECK(scheduler.add_cache(kRest + 1, 1, 1.0, kRest).code() == GPUSHARE_INVALID_ARGUMENT);
}

// Sessions and mappings want images and let go of them in any order, while sessions come, go and find no place, and the
// capacity changes.
struct RandomCaches {
  struct Image {
    uint64_t first = 0, rest = 0, first_bytes = 0, rest_bytes = 0;
    std::vector<SessionId> users;
  };
  struct Cache {
    bool held = false, dropping = false;
  };
  explicit RandomCaches(test::Random& of) : random(of), scheduler(caches_scheduler()) {
    for (uint64_t i = 0; i < 3; ++i) {
      images.push_back({i == 0 ? 0 : kFirst + 2 * i, kRest + 2 * i, any(1, 30), any(1, 60), {}});
      add(images.back());
    }
  }
  uint64_t any(uint64_t low, uint64_t high) { return test::uniform(random, low, high); }
  void add(const Image& image) {
    if (image.first != 0) REQUIRE(scheduler.add_cache(image.first, image.first_bytes, 1.0).ok());
    REQUIRE(scheduler.add_cache(image.rest, image.rest_bytes, 2.0, image.first).ok());
  }
  void want(Image& image) {
    SessionId by = kNoSession;
    if (!sessions.empty() && any(0, 9) != 0) by = sessions[any(0, sessions.size() - 1)];
    image.users.push_back(by);
    scheduler.want_cache(image.rest, by, now_ns);
  }
  void unwant(Image& image) {
    image.users.erase(image.users.begin() + static_cast<std::ptrdiff_t>(any(0, image.users.size() - 1)));
    scheduler.unwant_cache(image.rest, now_ns);
  }
  void gone(uint64_t id) {
    caches[id] = {};
    scheduler.cache_dropped(id, now_ns);
  }
  void end_drops(const Image& image) {
    for (const uint64_t id : {image.rest, image.first})
      if (caches[id].dropping) gone(id);
  }
  // The bytes for an image were promised and could not be had.
  void fail(const Image& image) {
    if (!stays(image.rest)) return;
    gone(image.rest);
    carry_out();
    if (image.first != 0) gone(image.first);
  }
  bool stays(uint64_t id) { return caches[id].held && !caches[id].dropping; }
  void forget(Image& image) {
    while (!image.users.empty()) unwant(image);
    carry_out();
    for (const uint64_t id : {image.rest, image.first}) {
      scheduler.remove_cache(id, now_ns);
      caches.erase(id);
      carry_out();
    }
    add(image);
  }
  void arrive() {
    const bool low = any(0, 1) != 0;
    const SessionSpec spec =
        of_class(++last_session, any(0, 60), low ? SessionClass::kOpportunistic : SessionClass::kGuaranteed);
    if (scheduler.arrive(spec, now_ns).ok()) sessions.push_back(spec.id);
  }
  void carry_out() {
    for (std::vector<Action> actions = scheduler.take_actions(); !actions.empty();
         actions = scheduler.take_actions()) {
      for (const Action& action : actions) {
        if (action.kind == ActionKind::kPageOut || action.kind == ActionKind::kPageIn)
          scheduler.page_done(action.session, now_ns);
        if (action.kind == ActionKind::kTurnBack) scheduler.unplaced(action.session, now_ns);
        if (action.kind == ActionKind::kFillCache) {
          REQUIRE_FALSE(caches[action.session].held);
          caches[action.session].held = true;
        }
        if (action.kind == ActionKind::kDropCache) {
          REQUIRE(caches[action.session].held);
          REQUIRE_FALSE(caches[action.session].dropping);
          caches[action.session].dropping = true;
        }
      }
    }
    const std::string broken = scheduler.check();
    REQUIRE(broken == "");
    for (const Image& image : images)
      if (image.first != 0 && stays(image.rest)) REQUIRE(stays(image.first));
  }
  void step() {
    now_ns += any(0, 1'000'000'000);
    Image& image = images[any(0, images.size() - 1)];
    switch (any(0, 9)) {
      case 0:
      case 1:
        if (image.users.size() < 4) want(image);
        break;
      case 2:
      case 3:
        if (!image.users.empty()) unwant(image);
        break;
      case 4:
        if (sessions.size() < 5) arrive();
        break;
      case 5:
        if (sessions.empty()) break;
        scheduler.leave(sessions.front(), now_ns);
        sessions.erase(sessions.begin());
        break;
      case 6:
        if (!sessions.empty()) scheduler.unplaced(sessions[any(0, sessions.size() - 1)], now_ns);
        break;
      case 7:
        REQUIRE(scheduler.set_capacity(any(40, 100), now_ns).ok());
        break;
      case 8:
        if (any(0, 9) == 0) forget(image);
        if (any(0, 9) == 0) fail(image);
        break;
      default:
        end_drops(image);
    }
    carry_out();
  }
  test::Random& random;
  Scheduler scheduler;
  std::vector<Image> images;
  std::map<uint64_t, Cache> caches;
  std::vector<SessionId> sessions;
  SessionId last_session = 0;
  uint64_t now_ns = 0;
};

TEST_CASE("random wants, drops and sessions break no rule of caches") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  for (int round = 0; round < 50; ++round) {
    RandomCaches caches(random);
    for (int i = 0; i < 1000; ++i) {
      INFO("round " << round << " step " << i);
      caches.step();
    }
  }
}

}  // namespace
