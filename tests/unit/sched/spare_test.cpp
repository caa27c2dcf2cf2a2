// Spare sessions and caches make room before all memory in use, by class, then by price. The scheduler's choice among sessions,
// spare sessions, images and their first layers is compared with exhaustive search.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "sched/claims.hpp"
#include "sched/scheduler.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "unit/sched/price_distance.hpp"

namespace {

using namespace gpushare;         // NOLINT
using namespace gpushare::sched;  // NOLINT

constexpr double kLinkNs = 3;  // a byte

SessionSpec spare_spec(SessionId id, uint64_t persistent_bytes,
                       SessionClass cls = SessionClass::kGuaranteed) {
  SessionSpec out;
  out.id = id;
  out.persistent_bytes = persistent_bytes;
  out.cls = cls;
  return out;
}

Scheduler scheduler_of(uint64_t capacity_bytes, const char* policy = "fair", bool paging = true) {
  SchedulerOptions options;
  options.capacity_bytes = capacity_bytes;
  options.paging = paging;
  return {options, std::move(*make_policy(policy))};
}

// Ids of sessions and caches that are to go since the last call; the scheduler is told that they have gone.
std::set<uint64_t> gone(Scheduler& scheduler, uint64_t now_ns) {
  std::set<uint64_t> out;
  for (std::vector<Action> actions = scheduler.take_actions(); !actions.empty();
       actions = scheduler.take_actions()) {
    for (const Action& action : actions) {
      if (action.kind == ActionKind::kDropCache) scheduler.cache_dropped(action.session, now_ns);
      if (action.kind == ActionKind::kPageOut) scheduler.page_done(action.session, now_ns);
      if (action.kind == ActionKind::kDrop) scheduler.leave(action.session, now_ns);
      if (action.kind == ActionKind::kDropCache || action.kind == ActionKind::kPageOut ||
          action.kind == ActionKind::kDrop)
        out.insert(action.session);
    }
    CHECK(scheduler.check() == "");
  }
  return out;
}

using Ids = std::set<uint64_t>;

TEST_CASE(
    "a session that found no place has caches dropped for it, which may be all that is left on the device") {
  Scheduler scheduler = scheduler_of(100);
  for (const uint64_t id : {11, 12, 13}) {
    REQUIRE(scheduler.add_cache(id, 20, 1.0, 0).ok());
    scheduler.want_cache(id, kNoSession, 0);
  }
  scheduler.unwant_cache(11, 0);
  scheduler.unwant_cache(12, 0);
  (void)scheduler.take_actions();
  REQUIRE(scheduler.arrive(spare_spec(1, 15), 0).ok());
  (void)scheduler.take_actions();
  scheduler.unplaced(1, 1);
  CHECK(scheduler.state(1) == SessionState::kQueued);
  CHECK(gone(scheduler, 1).size() == 1);  // as many as it needs
  CHECK(scheduler.state(1) == SessionState::kResident);
  scheduler.unplaced(1, 2);  // not where it would fit
  CHECK(gone(scheduler, 2).size() == 1);
  CHECK(scheduler.state(1) == SessionState::kResident);
  scheduler.unplaced(1, 3);
  CHECK(gone(scheduler, 3).empty());  // somebody uses the last one
  CHECK(scheduler.state(1) == SessionState::kQueued);
  scheduler.unwant_cache(13, 4);
  CHECK(gone(scheduler, 4) == Ids{13});
  CHECK(scheduler.state(1) == SessionState::kResident);
}

TEST_CASE("room that is made for a cache is for others once the cache is let go") {
  Scheduler scheduler = scheduler_of(100, "priority");
  REQUIRE(scheduler.arrive(spare_spec(1, 80, SessionClass::kOpportunistic), 0).ok());
  REQUIRE(scheduler.arrive(spare_spec(2, 0), 0).ok());
  REQUIRE(scheduler.add_cache(11, 50, 1.0, 0).ok());
  (void)scheduler.take_actions();
  scheduler.want_cache(11, 2, 1);  // 1 goes for it
  CHECK(scheduler.state(1) == SessionState::kPagedOut);
  (void)scheduler.take_actions();
  REQUIRE(scheduler.arrive(spare_spec(3, 60), 2).ok());
  scheduler.unwant_cache(11, 3);
  scheduler.page_done(1, 4);
  CHECK(scheduler.state(3) == SessionState::kResident);
  CHECK(scheduler.check() == "");
}

TEST_CASE("caches wait in line by class, and one that a better class wants moves up") {
  Scheduler scheduler = scheduler_of(100, "fair", false);
  REQUIRE(scheduler.arrive(spare_spec(1, 100), 0).ok());
  REQUIRE(scheduler.arrive(spare_spec(2, 0, SessionClass::kOpportunistic), 0).ok());
  REQUIRE(scheduler.arrive(spare_spec(3, 0), 0).ok());
  for (const uint64_t id : {11, 12, 13}) {
    REQUIRE(scheduler.add_cache(id, 20, 1.0, 0).ok());
    scheduler.want_cache(id, id == 13 ? 3 : 2, 1);
  }
  scheduler.want_cache(12, 3, 2);
  scheduler.want_cache(13, 2, 3);  // it stays where the guaranteed session has put it
  (void)scheduler.take_actions();
  REQUIRE(scheduler.set_need(1, 60, 0, 4).ok());
  std::vector<uint64_t> filled;
  for (const Action& action : scheduler.take_actions())
    if (action.kind == ActionKind::kFillCache) filled.push_back(action.session);
  CHECK(filled == std::vector<uint64_t>{13, 12});
  CHECK(scheduler.check() == "");
}

TEST_CASE("a cache that waits asks for another session that wants it when its own has gone") {
  Scheduler scheduler = scheduler_of(100, "priority");
  REQUIRE(scheduler.arrive(spare_spec(1, 60), 0).ok());
  REQUIRE(scheduler.arrive(spare_spec(2, 0), 0).ok());
  REQUIRE(scheduler.arrive(spare_spec(3, 40, SessionClass::kOpportunistic), 0).ok());
  REQUIRE(scheduler.arrive(spare_spec(4, 0), 0).ok());
  REQUIRE(scheduler.add_cache(11, 70, 1.0, 0).ok());
  (void)scheduler.take_actions();
  scheduler.want_cache(11, 2, 1);  // too large beside 1
  scheduler.want_cache(11, 4, 2);
  scheduler.unwant_cache(11, 3);
  scheduler.leave(2, 3);
  CHECK(scheduler.check() == "");
  scheduler.leave(1, 4);  // 3 has to go for it
  CHECK(scheduler.state(3) == SessionState::kPagedOut);
  CHECK(scheduler.check() == "");
}

TEST_CASE("the needs of a group's sessions are summed whether they are promised or not") {
  Scheduler scheduler = scheduler_of(100);
  const auto spec_in = [](SessionId id, uint64_t persistent_bytes, uint64_t group) {
    SessionSpec out = spare_spec(id, persistent_bytes);
    out.ephemeral_bytes = 10;
    out.group = group;
    return out;
  };
  REQUIRE(scheduler.arrive(spec_in(1, 60, 7), 0).ok());
  REQUIRE(scheduler.arrive(spec_in(2, 50, 7), 0).ok());  // waits
  REQUIRE(scheduler.arrive(spec_in(3, 5, 8), 0).ok());
  REQUIRE(scheduler.arrive(spec_in(4, 5, 0), 0).ok());
  CHECK(scheduler.state(2) == SessionState::kQueued);
  CHECK(scheduler.group_needs(7) == 130);
  CHECK(scheduler.group_needs(8) == 15);
  CHECK(scheduler.group_needs(0) == 0);
  REQUIRE(scheduler.set_need(1, 20, 5, 1).ok());
  CHECK(scheduler.group_needs(7) == 85);
  SessionSpec refused = spec_in(5, 90, 7);
  refused.may_queue = false;
  CHECK_FALSE(scheduler.arrive(refused, 2).ok());
  CHECK(scheduler.group_needs(7) == 85);
  CHECK(scheduler.check() == "");
  scheduler.leave(1, 3);
  scheduler.leave(2, 3);
  CHECK(scheduler.group_needs(7) == 0);
  CHECK(scheduler.check() == "");
}

TEST_CASE(
    "spare sessions make room for whoever waits, least price first, under policies that page nobody out") {
  for (const char* policy : {"fair", "pack", "priority"})
    for (const bool paging : {true, false}) {
      INFO(policy << paging);
      Scheduler scheduler = scheduler_of(100, policy, paging);
      for (SessionId id = 1; id <= 4; ++id) REQUIRE(scheduler.arrive(spare_spec(id, 20), 0).ok());
      CHECK(scheduler.set_spare(1, 50.0, 0));
      CHECK(scheduler.set_spare(2, 10.0, 0));
      CHECK(scheduler.set_spare(3, 20.0, 0));
      CHECK(gone(scheduler, 0).empty());  // nobody needs the room
      CHECK(scheduler.set_spare(3, std::nullopt, 0));
      REQUIRE(scheduler.arrive(spare_spec(5, 35), 1).ok());
      CHECK(gone(scheduler, 1) == Ids{2});
      CHECK(scheduler.state(5) == SessionState::kResident);
      // Both that are left would not do for this one: they stay, and it waits until another becomes spare.
      REQUIRE(scheduler.arrive(spare_spec(6, 65), 2).ok());
      CHECK(gone(scheduler, 2).empty());
      CHECK(scheduler.state(6) == SessionState::kQueued);
      CHECK(scheduler.set_spare(3, 1.0, 3));
      CHECK(gone(scheduler, 3).empty());
      CHECK(scheduler.set_spare(4, 1.0, 3));
      CHECK(gone(scheduler, 3) == Ids{1, 3, 4});
      CHECK(scheduler.state(6) == SessionState::kResident);
    }
}

TEST_CASE("a spare session is dropped at its boundary, and not once it is wanted again") {
  Scheduler scheduler = scheduler_of(100);
  REQUIRE(scheduler.arrive(spare_spec(1, 60), 0).ok());
  scheduler.ready(1, 0);
  REQUIRE(scheduler.pick(0, 0) == 1u);
  scheduler.dispatched(1, 0, 0);
  CHECK(scheduler.set_spare(1, 5.0, 1));
  REQUIRE(scheduler.arrive(spare_spec(2, 60), 1).ok());
  CHECK(gone(scheduler, 1).empty());
  CHECK(scheduler.dropping() == std::vector<SessionId>{1});
  CHECK_FALSE(scheduler.set_spare(1, std::nullopt, 1));  // others count on its bytes
  scheduler.finished(1, 1, 2);
  CHECK(gone(scheduler, 2) == Ids{1});
  CHECK(scheduler.dropping().empty());
  CHECK(scheduler.state(2) == SessionState::kResident);
  // With an iteration to run it is as others.
  CHECK(scheduler.set_spare(2, 1.0, 3));
  scheduler.ready(2, 3);
  SessionSpec refused = spare_spec(3, 60);
  refused.may_queue = false;
  CHECK(scheduler.arrive(refused, 3).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(scheduler.dropping().empty());
  CHECK_FALSE(scheduler.set_spare(9, 1.0, 3));
}

TEST_CASE("who may not claim takes nothing; who may not queue is refused until what goes for it has gone") {
  Scheduler scheduler = scheduler_of(100);
  REQUIRE(scheduler.arrive(spare_spec(1, 60), 0).ok());
  CHECK(scheduler.set_spare(1, 5.0, 0));
  SessionSpec modest = spare_spec(2, 60);
  modest.may_queue = modest.may_claim = false;
  CHECK_FALSE(scheduler.arrive(modest, 0).ok());
  CHECK(gone(scheduler, 0).empty());
  modest.may_claim = true;
  CHECK(scheduler.arrive(modest, 0).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(scheduler.dropping() == std::vector<SessionId>{1});
  CHECK(gone(scheduler, 0) == Ids{1});
  CHECK(scheduler.arrive(modest, 0).ok());
}

TEST_CASE("room for an allocation is kept for it after a spare session went") {
  Scheduler scheduler = scheduler_of(100);
  REQUIRE(scheduler.arrive(spare_spec(1, 40), 0).ok());
  REQUIRE(scheduler.arrive(spare_spec(2, 40), 0).ok());
  CHECK(scheduler.set_spare(2, 5.0, 0));
  CHECK(scheduler.make_room(1, {Giver::kSessions, 30}, 0));
  REQUIRE(scheduler.arrive(spare_spec(3, 90), 0).ok());  // waits, for more than there is
  CHECK(gone(scheduler, 0) == Ids{2});
  CHECK(scheduler.set_need(1, 70, 0, 0).ok());
  scheduler.room_used(1, 0);
  CHECK_FALSE(scheduler.make_room(1, {Giver::kSessions, 30}, 0));
}

TEST_CASE("what is spare goes for an allocation if that and what it gets elsewhere are enough") {
  Scheduler scheduler = scheduler_of(100);
  REQUIRE(scheduler.arrive(spare_spec(1, 40), 0).ok());
  CHECK_FALSE(scheduler.make_room(1, {Giver::kSpare, 10}, 0));  // nothing is
  REQUIRE(scheduler.arrive(spare_spec(2, 20), 0).ok());
  REQUIRE(scheduler.arrive(spare_spec(3, 40), 0).ok());
  CHECK(scheduler.set_spare(2, 5.0, 0));
  CHECK_FALSE(scheduler.make_room(1, {Giver::kSpare, 30, 9}, 0));
  CHECK(scheduler.dropping().empty());
  CHECK_FALSE(scheduler.make_room(9, {Giver::kSpare, 10}, 0));   // unknown
  CHECK_FALSE(scheduler.make_room(1, {Giver::kRanges, 10}, 0));  // the driver's
  CHECK(scheduler.make_room(1, {Giver::kSpare, 30, 10}, 0));
  CHECK(scheduler.making_room(1));
  CHECK(gone(scheduler, 0) == Ids{2});
  CHECK_FALSE(scheduler.making_room(1));
  CHECK(scheduler.state(3) == SessionState::kResident);
  CHECK(scheduler.set_need(1, 60, 0, 0).ok());
  scheduler.room_used(1, 0);
  CHECK(scheduler.check() == "");
}

TEST_CASE("the measured link is the price of paging") {
  Scheduler scheduler = scheduler_of(100, "priority");
  CHECK(scheduler.link_ns_per_byte() == 0);
  for (const double wrong : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")})
    scheduler.set_link(wrong);
  CHECK(scheduler.link_ns_per_byte() == 0);
  scheduler.set_link(0.25);
  CHECK(scheduler.link_ns_per_byte() == 0.25);
}

// ---- beside exhaustive search -----------------------------------------------------------------------------------

struct Held {
  uint64_t id = 0, bytes = 0;
  size_t rests_on = SIZE_MAX;  // place of its first layers
  uint32_t rank = 0;
  double price_ns = 0;
};

// Prices by rank, highest rank first: what is compared.
using Prices = std::array<double, 8>;
Prices prices_of(const std::vector<Held>& all, uint64_t set) {
  Prices out{};
  for (size_t i = 0; i < all.size(); ++i)
    if ((set >> i & 1) != 0) out[7 - all[i].rank] += all[i].price_ns;
  return out;
}

TEST_CASE(
    "sessions, spare sessions, images and first layers: the scheduler's choice beside exhaustive search") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  test::PriceDistance distance;
  for (int round = 0; round < 400; ++round) {
    const uint64_t later_ns = test::uniform(random, 0, 1000);
    Scheduler scheduler = scheduler_of(100'000, "priority");
    scheduler.set_link(kLinkNs);
    std::vector<Held> all;
    Ids caches;
    uint64_t next_id = 1;
    const auto any_class = [&] {
      return test::uniform(random, 0, 1) == 0 ? SessionClass::kOpportunistic : SessionClass::kGuaranteed;
    };
    const auto spare = [](SessionClass cls) { return cls == SessionClass::kGuaranteed ? 2u : 0u; };
    // Sessions of no bytes that want the images, one of each class.
    const SessionId opportunistic = next_id++, guaranteed = next_id++;
    REQUIRE(scheduler.arrive(spare_spec(opportunistic, 0, SessionClass::kOpportunistic), 0).ok());
    REQUIRE(scheduler.arrive(spare_spec(guaranteed, 0), 0).ok());
    const size_t count = test::uniform(random, 2, 11);  // and one more: first layers
    while (all.size() < count) {
      Held one;
      one.id = next_id++;
      one.bytes = test::uniform(random, 1, 60);
      const auto bytes = static_cast<double>(one.bytes);
      const SessionClass cls = any_class();
      const uint64_t kind = test::uniform(random, 0, 3);
      if (kind <= 1) {
        SessionSpec spec = spare_spec(one.id, one.bytes, cls);
        spec.priority = static_cast<int32_t>(test::uniform(random, 0, 1));
        REQUIRE(scheduler.arrive(spec, 0).ok());
        one.rank = 4 + 2 * (cls == SessionClass::kGuaranteed ? 1 : 0) + static_cast<uint32_t>(spec.priority);
        one.price_ns = price_of(bytes * kLinkNs, bytes * kLinkNs, static_cast<double>(later_ns));
        if (kind == 1) {
          const auto worth_ns = static_cast<double>(test::uniform(random, 1, 100));
          REQUIRE(scheduler.set_spare(one.id, worth_ns, 0));
          one.rank = spare(cls);
          one.price_ns = decayed(worth_ns, 0, later_ns);
        }
        all.push_back(one);
        continue;
      }
      // An image, with first layers or without.
      const SessionId by = cls == SessionClass::kGuaranteed ? guaranteed : opportunistic;
      if (kind == 2) {
        Held first = one;
        first.id = next_id++;
        first.bytes = test::uniform(random, 1, 20);
        one.rests_on = all.size();
        const auto restore_ns = static_cast<double>(test::uniform(random, 1, 100));
        REQUIRE(scheduler.add_cache(first.id, first.bytes, restore_ns).ok());
        first.rank = spare(cls) + 1;
        first.price_ns = decayed(restore_ns, 0, later_ns);
        all.push_back(first);
      }
      const auto restore_ns = static_cast<double>(test::uniform(random, 1, 100));
      REQUIRE(scheduler.add_cache(one.id, one.bytes, restore_ns, kind == 2 ? all.back().id : 0).ok());
      scheduler.want_cache(one.id, by, 0);
      caches.insert(one.id);
      one.rank = spare(cls);
      one.price_ns = decayed(restore_ns, 0, later_ns);
      all.push_back(one);
    }
    for (const uint64_t id : caches) scheduler.unwant_cache(id, 0);
    CHECK(gone(scheduler, 0).empty());
    uint64_t all_bytes = 0;
    for (const Held& each : all) all_bytes += each.bytes;
    REQUIRE(scheduler.promised_bytes() == all_bytes);
    REQUIRE(scheduler.set_capacity(all_bytes, 0).ok());
    const uint64_t wanted = test::uniform(random, 1, all_bytes);
    SessionSpec guest = spare_spec(next_id++, wanted);
    guest.priority = 9;
    REQUIRE(scheduler.arrive(guest, later_ns).ok());
    const Ids taken = gone(scheduler, later_ns);
    REQUIRE(scheduler.state(guest.id) == SessionState::kResident);
    uint64_t taken_set = 0;
    for (size_t i = 0; i < all.size(); ++i)
      if (taken.contains(all[i].id)) taken_set |= uint64_t{1} << i;
    // Enough, and no first layers without what rests on them.
    const auto possible = [&](uint64_t set) {
      uint64_t bytes = 0;
      for (size_t i = 0; i < all.size(); ++i) {
        if ((set >> i & 1) != 0)
          bytes += all[i].bytes;
        else if (all[i].rests_on != SIZE_MAX && (set >> all[i].rests_on & 1) != 0)
          return false;
      }
      return bytes >= wanted;
    };
    REQUIRE(possible(taken_set));
    Prices best;
    best.fill(std::numeric_limits<double>::infinity());
    for (uint64_t set = 0; set < uint64_t{1} << all.size(); ++set)
      if (possible(set)) best = std::min(best, prices_of(all, set));
    INFO("round " << round);
    distance.add(best, prices_of(all, taken_set));
  }
  INFO(distance.text());
  CHECK(distance.mean() < 1.05);
  CHECK(distance.optimal_share() > 0.8);
}

}  // namespace
