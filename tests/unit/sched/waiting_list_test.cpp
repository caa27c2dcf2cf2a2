// The waiting list against a plain vector: the same order, the same answers.
// SPDX-License-Identifier: Apache-2.0
#include "sched/waiting_list.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "sched/scheduler_impl.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::sched;

namespace {

struct World {
  std::unique_ptr<Policy> policy = std::move(*make_policy("priority"));
  WaitingList list;
  std::vector<std::unique_ptr<SessionRecord>> sessions;  // in the order that the list should have
  std::vector<uint32_t> overtaken;

  size_t insert(test::Random& random, SessionId id) {
    auto session = std::make_unique<SessionRecord>();
    session->view.id = id;
    session->view.priority = static_cast<int32_t>(test::uniform(random, 0, 5));
    session->persistent_bytes = test::uniform(random, 0, 1000);
    session->ephemeral_bytes = test::uniform(random, 0, 1000);
    session->overtaken = static_cast<uint32_t>(test::uniform(random, 0, 3));
    session->compute_units = test::uniform(random, 0, 50) == 0 ? 1 : 0;
    size_t at = 0;
    while (at < sessions.size() && !goes_before(*policy, session->view, sessions[at]->view)) ++at;
    list.insert(*session, *policy);
    overtaken.insert(overtaken.begin() + static_cast<std::ptrdiff_t>(at), session->overtaken);
    sessions.insert(sessions.begin() + static_cast<std::ptrdiff_t>(at), std::move(session));
    return at;
  }
  void erase(size_t at) {
    list.erase(*sessions[at]);
    CHECK(sessions[at]->overtaken == overtaken[at]);
    sessions.erase(sessions.begin() + static_cast<std::ptrdiff_t>(at));
    overtaken.erase(overtaken.begin() + static_cast<std::ptrdiff_t>(at));
  }
  WaitingList::Position position(size_t at) const {
    return at == sessions.size() ? list.end() : list.position_of(*sessions[at]);
  }
  size_t first_fit(size_t from, const WaitingList::Room& room) const {
    for (size_t i = from; i < sessions.size(); ++i) {
      const SessionRecord& each = *sessions[i];
      if (each.blocked) continue;
      if (each.claiming || each.compute_units > 0) return i;
      if (room.any && each.persistent_bytes <= room.persistent_bytes &&
          each.persistent_bytes + each.ephemeral_bytes <= room.total_bytes)
        return i;
    }
    return sessions.size();
  }
  size_t first_overtaken(size_t from, uint32_t most) const {
    for (size_t i = from; i < sessions.size(); ++i)
      if (overtaken[i] >= most) return i;
    return sessions.size();
  }
};

}  // namespace

TEST_CASE("the waiting list keeps the policy's order and finds who fits, as a plain list does") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  World world;
  SessionId next = 0;
  for (int step = 0; step < 6000; ++step) {
    const size_t size = world.sessions.size();
    const size_t at = size == 0 ? 0 : test::uniform(random, 0, size - 1);
    const uint64_t what = test::uniform(random, 0, 9);
    if (size == 0 || what < (step < 3000 ? 6 : 3)) {
      world.insert(random, ++next);
    } else if (what < 7) {
      world.erase(at);
    } else if (what < 8) {
      SessionRecord& session = *world.sessions[at];
      session.blocked = test::uniform(random, 0, 1) != 0;
      session.claiming = test::uniform(random, 0, 20) == 0;
      world.list.update(session);
    } else {
      world.list.overtake(world.position(at));
      for (size_t i = 0; i < at; ++i) ++world.overtaken[i];
    }
    if (step % 20 != 0) continue;
    const size_t now = world.sessions.size(), from = now == 0 ? 0 : test::uniform(random, 0, now - 1);
    std::vector<SessionRecord*> expected;
    for (const auto& session : world.sessions) expected.push_back(session.get());
    REQUIRE(world.list.sessions() == expected);
    REQUIRE(world.list.size() == now);
    const uint64_t persistent = test::uniform(random, 0, 30);
    const WaitingList::Room room{test::uniform(random, 0, 9) != 0, persistent,
                                 persistent + test::uniform(random, 0, 30)};
    REQUIRE(world.list.first_fit(world.position(from), room) == world.position(world.first_fit(from, room)));
    const auto most = static_cast<uint32_t>(test::uniform(random, 1, 400));
    REQUIRE(world.list.first_overtaken(world.position(from), most) ==
            world.position(world.first_overtaken(from, most)));
    const auto claims = [](const auto& session) { return session->claiming; };
    const auto ahead = world.sessions.begin() + static_cast<std::ptrdiff_t>(from);
    REQUIRE(world.list.barred(world.position(from), most) ==
            (world.first_overtaken(0, most) < from || std::any_of(world.sessions.begin(), ahead, claims)));
    REQUIRE(world.list.any_claims() == std::any_of(world.sessions.begin(), world.sessions.end(), claims));
  }
}
