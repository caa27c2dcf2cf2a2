// Reservations: the policies of the source (thesis 002, section 4.4) as requests, and what a transactional table adds:
// all or nothing, ordered alternatives, deadlines, leases, replay, cycles, no starvation.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/reservations.hpp"

#include <map>
#include <set>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace gpushare::cluster {
namespace {

using State = ReservationState;

ReservationRequest one(const std::string& owner, std::vector<Part> parts) {
  return {owner, {std::move(parts)}, std::nullopt, std::nullopt};
}

// Nodes a, b, ... with so many gpus each.
void add_nodes(ReservationTable& table, int nodes, double gpus) {
  for (int n = 0; n < nodes; ++n)
    REQUIRE(table.add_node(std::string(1, char('a' + n)), {{"gpu", gpus}, {"cpu", 16}}, 0).ok());
}

ReservationTable::Where on(const std::string& node) {
  return {node, {}, 1};
}

State state_of(const ReservationTable& table, ReservationId id) {
  return *table.state(id);
}

// Whether the placements of the parts, from one on, go on nodes with these amounts left: every node is tried for every placement.
bool goes(const std::vector<Part>& parts, size_t part, int placed, std::set<std::string>& taken,
          std::map<std::string, Amounts>& left) {
  if (part == parts.size()) return true;
  if (placed == parts[part].count) {
    std::set<std::string> none;
    return goes(parts, part + 1, 0, none, left);
  }
  for (auto& [node, free] : left) {
    if (!parts[part].node.empty() && parts[part].node != node) continue;
    if (parts[part].apart && taken.contains(node)) continue;
    bool fits = true;
    for (const auto& [name, amount] : parts[part].needs) fits = fits && free[name] >= amount;
    if (!fits) continue;
    for (const auto& [name, amount] : parts[part].needs) free[name] -= amount;
    const bool fresh = taken.insert(node).second;
    const bool found = goes(parts, part, placed + 1, taken, left);
    if (fresh) taken.erase(node);
    for (const auto& [name, amount] : parts[part].needs) free[name] += amount;
    if (found) return true;
  }
  return false;
}

void check_levels(const ReservationTable& table) {
  for (const auto& level : table.levels())
    if (level.used > level.capacity + 1e-9 || level.used < 0)
      FAIL(level.name << " on " << level.node << ": " << level.used);
}

}  // namespace

TEST_CASE("gang: eight tasks run together or not at all") {
  ReservationTable table;
  add_nodes(table, 2, 4);
  const auto first = *table.acquire(one("x", {{{{"gpu", 1}}, 8, false, ""}}), 0);
  const auto second = *table.acquire(one("y", {{{{"gpu", 1}}, 8, false, ""}}), 0);
  CHECK(state_of(table, first) == State::kGranted);
  CHECK(table.grant(first)->nodes[0] == std::vector<std::string>{"a", "a", "a", "a", "b", "b", "b", "b"});
  CHECK(state_of(table, second) == State::kWaiting);
  CHECK(table.release(first, 1).ok());
  CHECK(state_of(table, second) == State::kGranted);
}

TEST_CASE("affinity: a task where another one runs") {
  ReservationTable table;
  add_nodes(table, 3, 1);
  const auto first = *table.acquire(one("t1", {{{{"gpu", 1}}, 1, false, "b"}}), 0);
  REQUIRE(table.set("t1", "with-t1", 1e9, on(table.grant(first)->nodes[0][0]), 0).ok());
  const auto second = *table.acquire(one("t2", {{{{"with-t1", 1}, {"cpu", 2}}, 1, false, ""}}), 0);
  CHECK(table.grant(second)->nodes[0][0] == "b");
}

TEST_CASE("anti-affinity: one task a node, by a count of 1 or by parts that stand apart") {
  ReservationTable table;
  add_nodes(table, 3, 4);
  for (const char* node : {"a", "b", "c"}) REQUIRE(table.set("spread", "lonely", 1, on(node), 0).ok());
  std::map<std::string, int> seen;
  for (int i = 0; i < 3; ++i)
    ++seen[table.grant(*table.acquire(one("spread", {{{{"lonely", 1}}, 1, false, ""}}), 0))->nodes[0][0]];
  CHECK(seen.size() == 3);
  const auto apart = *table.acquire(one("gang", {{{{"gpu", 2}}, 3, true, ""}}), 0);
  CHECK(table.grant(apart)->nodes[0] == std::vector<std::string>{"a", "b", "c"});
  CHECK(table.explain(one("gang", {{{{"gpu", 1}}, 4, true, ""}})).find("no nodes can satisfy it") == 0);
}

TEST_CASE("signals, barriers, queues and locks") {
  ReservationTable table;
  add_nodes(table, 1, 8);
  // T3 starts when T1 and T2 have signalled.
  const auto third = *table.acquire(one("t3", {{{{"t1-done", 1}, {"t2-done", 1}}, 1, false, ""}}), 0);
  REQUIRE(table.set("t1", "t1-done", 1, on("a"), 1).ok());
  CHECK(state_of(table, third) == State::kWaiting);
  REQUIRE(table.set("t2", "t2-done", 1, on("a"), 2).ok());
  CHECK(state_of(table, third) == State::kGranted);
  // A queue that drains two at a time.
  std::vector<ReservationId> queued;
  for (int i = 0; i < 4; ++i)
    queued.push_back(*table.acquire(one("q" + std::to_string(i), {{{{"queue", 1}}, 1, false, ""}}), 3));
  REQUIRE(table.set("drain", "queue", 2, on("a"), 4).ok());
  CHECK(state_of(table, queued[1]) == State::kGranted);
  CHECK(state_of(table, queued[2]) == State::kWaiting);
  REQUIRE(table.set("drain", "queue", 4, on("a"), 5).ok());
  CHECK(state_of(table, queued[3]) == State::kGranted);
}

TEST_CASE("soft constraints: ordered alternatives") {
  ReservationTable table;
  add_nodes(table, 1, 1);
  const ReservationRequest prefers{
      "x", {{{{{"gpu", 1}}, 1, false, ""}}, {{{{"cpu", 1}}, 1, false, ""}}}, std::nullopt, std::nullopt};
  const auto first = *table.acquire(prefers, 0);
  const auto second = *table.acquire(prefers, 0);
  CHECK(table.grant(first)->alternative == 0);
  CHECK(table.grant(second)->alternative == 1);
}

TEST_CASE(
    "load balancing within a factor of 2 by halving alternatives") {  // the objective function of section 4.4.2
  ReservationTable table;
  add_nodes(table, 4, 100);
  test::Random random(test::seed());
  std::map<std::string, double> load;
  for (const char* node : {"a", "b", "c", "d"}) REQUIRE(table.set("balance", "room", 1, on(node), 0).ok());
  for (int i = 0; i < 24; ++i) {
    // The task goes where more than half, a quarter, ... of the room is left: "room" is held for the moment of choosing only.
    ReservationRequest request{"t" + std::to_string(i), {}, std::nullopt, std::nullopt};
    for (double level = 1; level > 0.01; level /= 2)
      request.alternatives.push_back({{{{"room", level}}, 1, false, ""}});
    const auto choice = *table.acquire(request, 0);
    const std::string node = table.grant(choice)->nodes[0][0];
    REQUIRE(table.release(choice, 0).ok());
    load[node] += double(test::uniform(random, 10, 30)) / 1000;
    REQUIRE(table.set("balance", "room", 1 - load[node], on(node), 0).ok());
  }
  double least = 1;
  double most = 0;
  for (const auto& [node, used] : load) {
    least = std::min(least, 1 - used);
    most = std::max(most, 1 - used);
  }
  CHECK(load.size() == 4);
  CHECK(most <= 2 * least + 1e-9);  // free room differs by at most a factor of 2
}

TEST_CASE(
    "hierarchical max-min shares with weights 2:3") {  // users' own resources on the nodes that they are given
  ReservationTable table;
  add_nodes(table, 5, 1);
  for (const char* node : {"a", "b"}) REQUIRE(table.set("fair", "user1", 1, on(node), 0).ok());
  for (const char* node : {"c", "d", "e"}) REQUIRE(table.set("fair", "user2", 1, on(node), 0).ok());
  int granted1 = 0;
  std::vector<ReservationId> waiting;
  for (int i = 0; i < 5; ++i) {
    const auto id =
        *table.acquire(one("u1-" + std::to_string(i), {{{{"user1", 1}, {"gpu", 1}}, 1, false, ""}}), 0);
    if (state_of(table, id) == State::kGranted)
      ++granted1;
    else
      waiting.push_back(id);
  }
  CHECK(granted1 == 2);
  // User 2 is idle: user 1 holds its nodes meanwhile. When user 2 comes back, what is not in use goes back.
  for (const char* node : {"c", "d"}) REQUIRE(table.set("fair", "user1", 1, on(node), 1).ok());
  CHECK(state_of(table, waiting[1]) == State::kGranted);
  CHECK(state_of(table, waiting[2]) == State::kWaiting);
  for (const char* node : {"c", "d"}) REQUIRE(table.set("fair", "user1", 0, on(node), 2).ok());
  CHECK(state_of(table, waiting[0]) == State::kGranted);  // runs on, but nothing new starts there
  REQUIRE(table.release(waiting[0], 3).ok());
  CHECK(state_of(table, waiting[2]) == State::kWaiting);
  const auto back = *table.acquire(one("u2", {{{{"user2", 1}, {"gpu", 1}}, 1, false, ""}}), 4);
  CHECK(state_of(table, back) == State::kGranted);
}

// Thesis 002, section 4.6.1 and figure 4.5c: two teams of equal weight; A and B share the first one 2:3, C is the
// second. A submits from the beginning, then B, then C. A team's resource and a user's are set on the nodes of its
// share, and tasks ask for both and a device.
TEST_CASE("hierarchical fair share: A and B have their team's part 2:3, and C as much as both") {
  constexpr int kNodes = 20;
  ReservationTable table;
  add_nodes(table, kNodes, 1);
  std::map<std::string, std::vector<ReservationId>> tasks;
  const auto node = [](int n) { return std::string(1, char('a' + n)); };
  const auto submit = [&](const std::string& user, const std::string& team) {
    for (int i = 0; i < kNodes; ++i)
      tasks[user].push_back(*table.acquire(one(user + std::to_string(tasks[user].size()),
                                               {{{{team, 1}, {user, 1}, {"gpu", 1}}, 1, false, ""}}),
                                           0));
  };
  const auto give = [&](const std::string& name, int first, int count) {
    for (int n = 0; n < kNodes; ++n)
      REQUIRE(table.set("fair", name, n >= first && n < first + count ? 100 : 0, on(node(n)), 0).ok());
  };
  // The running tasks end. The tasks submitted then start within the present shares.
  const auto running_after_a_round = [&](const std::string& user) {
    int running = 0;
    for (const ReservationId id : tasks[user]) running += state_of(table, id) == State::kGranted ? 1 : 0;
    return running;
  };
  const auto all_end = [&] {
    std::vector<ReservationId> ending;
    for (const auto& [user, ids] : tasks)
      for (const ReservationId id : ids)
        if (state_of(table, id) == State::kGranted) ending.push_back(id);
    for (const ReservationId id : ending) REQUIRE(table.release(id, 0).ok());
    check_levels(table);
  };
  give("team1", 0, kNodes);
  give("A", 0, kNodes);
  submit("A", "team1");
  CHECK(running_after_a_round("A") == kNodes);  // the others are idle
  give("A", 0, 8);
  give("B", 8, 12);
  submit("A", "team1");
  submit("B", "team1");
  CHECK(running_after_a_round("A") == kNodes);  // nothing is taken from who runs
  all_end();
  CHECK(running_after_a_round("A") == 8);
  CHECK(running_after_a_round("B") == 12);
  give("team1", 0, 10);
  give("team2", 10, 10);
  give("A", 0, 4);
  give("B", 4, 6);
  give("C", 10, 10);
  submit("A", "team1");
  submit("B", "team1");
  submit("C", "team2");
  all_end();
  CHECK(running_after_a_round("A") == 4);
  CHECK(running_after_a_round("B") == 6);
  CHECK(running_after_a_round("C") == 10);
  // Fair share and anti-affinity together can be infeasible; an alternative without the second resolves that (section 4.4.3).
  ReservationRequest apart{
      "A-apart", {{{{{"A", 1}}, 5, true, ""}}, {{{{"A", 1}}, 5, false, ""}}}, std::nullopt, std::nullopt};
  const auto soft = *table.acquire(apart, 0);
  CHECK(state_of(table, soft) == State::kGranted);
  CHECK(table.grant(soft)->alternative == 1);
}

TEST_CASE("migration and a lost node: the same requests go where the resource is set again") {
  ReservationTable table;
  add_nodes(table, 3, 4);
  const ReservationTable::Where anywhere{"", {{{"gpu", 4}}}, 1};
  REQUIRE(table.set("job", "home", 1, anywhere, 0).ok());
  const auto request = one("job", {{{{"home", 1}, {"gpu", 2}}, 1, false, ""}});
  const auto first = *table.acquire(request, 0);
  CHECK(table.grant(first)->nodes[0][0] == "a");
  const auto elsewhere = *table.acquire(one("other", {{{{"gpu", 4}}, 1, false, "c"}}), 0);
  REQUIRE(table.lose_node("a", 1).ok());
  CHECK(state_of(table, first) == State::kNodeLost);
  CHECK(state_of(table, elsewhere) == State::kGranted);
  const auto again = *table.acquire(request, 1);
  CHECK(table.grant(again)->nodes[0][0] == "b");
  REQUIRE(table.set("job", "pinned", 1, on("c"), 2).ok());
  REQUIRE(table.lose_node("c", 3).ok());
  const auto pinned = *table.acquire(one("job2", {{{{"pinned", 1}}, 1, false, ""}}), 3);
  CHECK(state_of(table, pinned) == State::kWaiting);
  REQUIRE(table.add_node("c", {{"gpu", 4}}, 4).ok());  // back, with what was set on it
  CHECK(state_of(table, pinned) == State::kGranted);
  CHECK(table.lose_node("z", 5).code() == GPUSHARE_NOT_FOUND);
  check_levels(table);
}

TEST_CASE("deadlines, leases, cancelling and the end of an owner") {
  ReservationTable table;
  add_nodes(table, 1, 1);
  ReservationRequest leased = one("x", {{{{"gpu", 1}}, 1, false, ""}});
  leased.lease_ns = 10;
  const auto first = *table.acquire(leased, 0);
  ReservationRequest hurried = one("y", {{{{"gpu", 1}}, 1, false, ""}});
  hurried.deadline_ns = 5;
  const auto second = *table.acquire(hurried, 0);
  const auto third = *table.acquire(one("z", {{{{"gpu", 1}}, 1, false, ""}}), 0);
  const auto fourth = *table.acquire(one("w", {{{{"gpu", 1}}, 1, false, ""}}), 0);
  CHECK(table.next_tick_ns() == 5);
  table.tick(5);
  CHECK(state_of(table, second) == State::kTimedOut);
  CHECK(table.renew(first, 8).ok());
  table.tick(17);
  CHECK(state_of(table, first) == State::kGranted);
  CHECK(table.cancel(third, 17).ok());
  CHECK_FALSE(table.cancel(third, 17).ok());
  table.tick(18);
  CHECK(state_of(table, first) == State::kExpired);
  CHECK(state_of(table, third) == State::kCancelled);
  CHECK(state_of(table, fourth) == State::kGranted);
  CHECK_FALSE(table.release(first, 18).ok());
  REQUIRE(table.set("w", "mine", 1, on("a"), 19).ok());
  CHECK(table.set("v", "mine", 1, on("a"), 19).code() == GPUSHARE_ALREADY_EXISTS);
  CHECK(table.set("v", "gpu", 1, on("a"), 19).code() == GPUSHARE_ALREADY_EXISTS);
  table.end_owner("w", 20);
  CHECK(state_of(table, fourth) == State::kReleased);
  CHECK(table.set("v", "mine", 1, on("a"), 21).ok());
  table.forget(fourth);
  CHECK_FALSE(table.state(fourth).ok());
}

TEST_CASE("requests that end and that nobody asks about are forgotten, those that are watched are not") {
  ReservationTable table;
  add_nodes(table, 1, 4);
  ReservationRequest leased = one("watched", {{{{"gpu", 1}}, 1, false, ""}});
  leased.lease_ns = 1;
  const auto watched = table.acquire(leased, 0);
  REQUIRE(watched.ok());
  table.watch(*watched);
  ReservationId last = 0;
  uint64_t now_ns = 10;
  for (int i = 0; i < 20'000; ++i, now_ns += 10) {
    ReservationRequest request = one("o", {{{{"gpu", i % 4 == 3 ? 5.0 : 1.0}}, 1, false, ""}});
    if (i % 4 == 3)
      request.deadline_ns = now_ns + 1;  // no node has so many
    else
      request.lease_ns = 1;
    const auto id = table.acquire(request, now_ns);
    REQUIRE(id.ok());
    last = *id;
    if (i % 4 == 2) REQUIRE(table.release(*id, now_ns).ok());
    if (i % 100 == 99) {
      REQUIRE(table.lose_node("a", now_ns).ok());
      add_nodes(table, 1, 4);
    }
  }
  table.tick(now_ns);
  CHECK(table.remembered() <= ReservationTable::kMostEnded + 8);
  CHECK(state_of(table, last) == State::kTimedOut);
  CHECK(state_of(table, *watched) == State::kExpired);
  table.unwatch(*watched);
  CHECK_FALSE(table.state(*watched).ok());
  check_levels(table);
}

TEST_CASE("a wait that closes a cycle of owners is refused by their names") {
  ReservationTable table;
  REQUIRE(table.add_node("a", {{"left", 1}, {"right", 1}}, 0).ok());
  const auto left = *table.acquire(one("x", {{{{"left", 1}}, 1, false, ""}}), 0);
  const auto right = *table.acquire(one("y", {{{{"right", 1}}, 1, false, ""}}), 0);
  const auto waits = *table.acquire(one("x", {{{{"right", 1}}, 1, false, ""}}), 0);
  CHECK(state_of(table, waits) == State::kWaiting);
  const auto refused = table.acquire(one("y", {{{{"left", 1}}, 1, false, ""}}), 0);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().code() == GPUSHARE_INVALID_STATE);
  CHECK(refused.status().message().find("'x', 'y'") != std::string::npos);
  CHECK(table.explain(waits).find("'y'") != std::string::npos);
  CHECK(table.release(right, 1).ok());
  CHECK(state_of(table, waits) == State::kGranted);
  CHECK(table.release(left, 1).ok());
}

TEST_CASE("a wide request is passed a bounded number of times") {
  ReservationTable table;
  add_nodes(table, 1, 8);
  std::vector<ReservationId> small{*table.acquire(one("s", {{{{"gpu", 1}}, 1, false, ""}}), 0)};
  const auto wide = *table.acquire(one("wide", {{{{"gpu", 8}}, 1, false, ""}}), 0);
  int rounds = 0;
  while (state_of(table, wide) != State::kGranted &&
         rounds < 1000) {  // one small one always overlaps the next
    small.push_back(*table.acquire(one("s" + std::to_string(++rounds), {{{{"gpu", 1}}, 1, false, ""}}), 0));
    if (state_of(table, small[small.size() - 2]) == State::kGranted)
      REQUIRE(table.release(small[small.size() - 2], 0).ok());
  }
  CHECK(rounds <= ReservationTable::kMostPasses + 2);
}

TEST_CASE("a request is granted at once exactly if some placement of an alternative fits, by brute force") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  int granted = 0;
  for (int round = 0; round < 3000; ++round) {
    ReservationTable table;
    std::map<std::string, Amounts> nodes;
    for (const char* name : {"a", "b", "c"}) {
      nodes[name] = {{"gpu", double(test::uniform(random, 0, 4))},
                     {"cpu", double(test::uniform(random, 0, 4))}};
      REQUIRE(table.add_node(name, nodes[name], 0).ok());
    }
    ReservationRequest request{"o", {}, std::nullopt, std::nullopt};
    int expected = -1;
    for (uint64_t a = test::uniform(random, 1, 2); a > 0; --a) {
      std::vector<Part> parts;
      for (uint64_t p = test::uniform(random, 1, 3); p > 0; --p) {
        Part part{{{"gpu", double(test::uniform(random, 1, 3))}},
                  int(test::uniform(random, 1, 3)),
                  test::uniform(random, 0, 2) == 0,
                  test::uniform(random, 0, 4) == 0 ? "b" : ""};
        if (test::uniform(random, 0, 1) == 1) part.needs["cpu"] = double(test::uniform(random, 1, 3));
        parts.push_back(part);
      }
      std::set<std::string> taken;
      if (expected < 0 && goes(parts, 0, 0, taken, nodes)) expected = int(request.alternatives.size());
      request.alternatives.push_back(std::move(parts));
    }
    const auto id = table.acquire(request, 0);
    REQUIRE(id.ok());
    const Grant* grant = table.grant(*id);
    if ((grant == nullptr ? -1 : grant->alternative) != expected)
      FAIL("round " << round << ": alternative " << expected << " fits");
    check_levels(table);
    granted += grant != nullptr ? 1 : 0;
  }
  CHECK(granted > 500);
  CHECK(granted < 2500);
}

TEST_CASE(
    "any sequence of calls keeps every node within its capacity, and everything possible is granted in the "
    "end") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  for (int round = 0; round < 60; ++round) {
    ReservationTable table;
    add_nodes(table, 3, 4);
    std::vector<ReservationId> ids;
    for (int step = 0; step < 60; ++step) {
      const auto pick = [&] { return ids[test::uniform(random, 0, ids.size() - 1)]; };
      const uint64_t what = test::uniform(random, 0, 9);
      if (what < 6 || ids.empty()) {
        const auto id =
            table.acquire(one("o" + std::to_string(step), {{{{"gpu", double(test::uniform(random, 1, 4))}},
                                                            int(test::uniform(random, 1, 3)),
                                                            test::uniform(random, 0, 1) == 1,
                                                            ""}}),
                          uint64_t(step));
        REQUIRE(id.ok());
        ids.push_back(*id);
      } else if (what < 8) {
        (void)table.release(pick(), uint64_t(step));
      } else if (what < 9) {
        (void)table.cancel(pick(), uint64_t(step));
      } else if (table.lose_node("b", uint64_t(step)).ok()) {
        REQUIRE(table.add_node("b", {{"gpu", 4}, {"cpu", 16}}, uint64_t(step)).ok());
      }
      check_levels(table);
    }
    for (int again = 0; again < 200 && table.waiting() > 0; ++again)
      for (ReservationId id : ids) (void)table.release(id, 100);
    if (table.waiting() > 0) FAIL(table.waiting() << " still wait in round " << round);
    for (ReservationId id : ids) (void)table.release(id, 100);
    for (const auto& level : table.levels())
      if (level.used != 0) FAIL("something is still held in round " << round);
  }
}

}  // namespace gpushare::cluster
