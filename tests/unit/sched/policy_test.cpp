// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "sched/policy.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace gpushare::sched;

namespace {

std::unique_ptr<Policy> policy(const char* name) {
  return std::move(*make_policy(name));
}

SessionView view(SessionId id, uint64_t remaining_ns = kUnknown, int32_t priority = 0) {
  SessionView view;
  view.id = id;
  view.remaining_ns = remaining_ns;
  view.priority = priority;
  return view;
}

// The sum of speeds is 1 whatever runs together, except for the pairs named friendly.
class Pairs final : public Interference {
 public:
  double rate(SessionId session, std::span<const SessionId> beside) const override {
    double share = 1;
    for (const SessionId other : beside)
      if (!(session % 10 == 0 && other % 10 == 0)) share += 1;
    return 1 / share;
  }
};

}  // namespace

TEST_CASE("policies are made by name and an unknown name lists them") {
  for (const char* name : policy_names()) CHECK(policy(name)->name() == name);
  const auto missing = make_policy("lottery");
  CHECK(missing.status().code() == GPUSHARE_NOT_FOUND);
  CHECK(missing.status().message().find("fifo, srtf, pack, fair, priority") != std::string::npos);
}

TEST_CASE("fifo runs one session at a time in arrival order") {
  const auto fifo = policy("fifo");
  CHECK(fifo->traits().max_residents == 1);
  CHECK(fifo->traits().head_of_line);
  CHECK(fifo->pick(0, std::vector{view(3), view(1), view(2)}, 0) == 1);
  CHECK_FALSE(fifo->outranks(view(1), view(2)));
}

TEST_CASE("srtf prefers what ends first, unknown lengths by service received") {
  const auto srtf = policy("srtf");
  CHECK(srtf->pick(0, std::vector{view(1, 50), view(2, 20), view(3)}, 0) == 1);
  CHECK(srtf->pick(0, std::vector{view(5, 20), view(2, 20)}, 0) == 1);  // ties by arrival
  SessionView young = view(9), old = view(1);
  old.service_ns = 10'000'000'000;
  CHECK(srtf->pick(0, std::vector{old, young}, 0) == 1);
  CHECK(srtf->outranks(young, old));
  CHECK_FALSE(srtf->outranks(old, young));
  CHECK(srtf->outranks(view(2, 10), view(1, 11)));
  CHECK_FALSE(srtf->outranks(view(2, 10), view(1, 10)));
  CHECK_FALSE(srtf->outranks(view(2), view(1)));  // equals do not page each other out
  CHECK(srtf->outranks(view(2, 10), view(1)));
  SessionView returning = view(2, 999);
  returning.service_ns = 1;
  CHECK_FALSE(srtf->outranks(returning, view(1, 1000)));  // a copy each way for nothing
  returning.remaining_ns = 900;
  CHECK(srtf->outranks(returning, view(1, 1000)));
}

TEST_CASE("srtf's answer holds until the level of an unknown session ends") {
  const auto srtf = policy("srtf");
  SessionView session = view(1);
  CHECK(srtf->pick_holds_ns(0, std::vector{session}, 0) == 1'000'000'000);
  session.service_ns = 5'000'000'000;
  CHECK(srtf->pick_holds_ns(0, std::vector{session}, 0) == 3'000'000'000);
  CHECK(srtf->pick_holds_ns(0, std::vector{view(1, 70)}, 0) == 70);
}

TEST_CASE("fair takes the least virtual time, then the fewest in flight, then the oldest") {
  const auto fair = policy("fair");
  SessionView a = view(1), b = view(2), c = view(3);
  a.virtual_ns = 30;
  b.virtual_ns = c.virtual_ns = 10;
  CHECK(fair->pick(0, std::vector{a, b, c}, 0) == 1);
  b.in_flight = 1;
  CHECK(fair->pick(0, std::vector{a, b, c}, 0) == 2);
  c.weight = 4;
  c.virtual_ns = 5;
  CHECK(fair->pick_holds_ns(0, std::vector{a, b, c}, 2) == 20);  // 5 of virtual time at weight 4
  CHECK(fair->pick_holds_ns(0, std::vector{c}, 0) == kUnknown);
}

TEST_CASE("priority ranks class, then priority, then arrival") {
  const auto priority = policy("priority");
  CHECK(priority->pick(0, std::vector{view(1, 0, 1), view(2, 0, 7), view(3, 0, 7)}, 0) == 1);
  SessionView spare = view(4, 0, 100);
  spare.cls = SessionClass::kOpportunistic;
  CHECK(priority->pick(0, std::vector{spare, view(5, 0, -3)}, 0) == 1);
  CHECK(priority->outranks(view(5, 0, -3), spare));
  CHECK_FALSE(priority->outranks(view(5, 0, 2), view(1, 0, 2)));
  CHECK(priority->outranks(view(5, 0, INT32_MAX), view(1, 0, INT32_MIN)));
  CHECK_FALSE(priority->outranks(view(5, 0, INT32_MIN), view(1, 0, INT32_MAX)));
}

TEST_CASE("pack told of interference runs only what adds speed, and always the oldest") {
  const auto pack = policy("pack");
  pack->admitted(view(10), 0, 0);
  CHECK(pack->welcomes(view(7)));  // nothing known: memory alone decides
  pack->set_interference(std::make_shared<Pairs>());
  CHECK(pack->welcomes(view(20)));
  CHECK_FALSE(pack->welcomes(view(7)));
  pack->admitted(view(20), 1, 0);
  pack->admitted(view(33), 2, 0);
  CHECK(pack->pick(0, std::vector{view(10)}, 0) == 0);
  CHECK(pack->pick(1, std::vector{view(20)}, 0) == 0);
  CHECK(pack->pick(2, std::vector{view(33)}, 0) == Policy::kIdle);
  pack->left(10, 0);
  CHECK(pack->pick(2, std::vector{view(33)}, 0) == Policy::kIdle);  // 20 is older
  pack->left(20, 0);
  CHECK(pack->pick(2, std::vector{view(33)}, 0) == 0);
}

TEST_CASE("a custom policy decides through its C table") {
  struct Seen {
    uint32_t count = 0;
    uint64_t last_id = 0;
    int released = 0;
    uint32_t answer = 1;
  } seen;
  gpushare_policy_ops ops{};
  ops.struct_size = sizeof(ops);
  ops.max_lanes = 2;
  ops.max_residents = 3;
  ops.head_of_line = 1;
  ops.name = "mine";
  ops.user_data = &seen;
  ops.pick = [](void* user, uint32_t, const gpushare_candidate* candidates, uint32_t count, uint64_t) {
    auto* state = static_cast<Seen*>(user);
    state->count = count;
    state->last_id = candidates[count - 1].session_id;
    return state->answer;
  };
  ops.before = [](void*, const gpushare_candidate* a, const gpushare_candidate* b) -> int32_t {
    return a->priority > b->priority;
  };
  ops.outranks = [](void*, const gpushare_candidate* a, const gpushare_candidate* b) -> int32_t {
    return a->remaining_ns < b->remaining_ns;
  };
  ops.release = [](void* user) { ++static_cast<Seen*>(user)->released; };
  {
    const auto mine = std::move(*make_custom_policy(&ops));
    CHECK(mine->name() == "mine");
    CHECK(mine->traits().max_lanes == 2);
    CHECK(mine->traits().max_residents == 3);
    CHECK(mine->traits().head_of_line);
    CHECK(mine->pick(0, std::vector{view(4), view(6)}, 0) == 1);
    CHECK(seen.count == 2);
    CHECK(seen.last_id == 6);
    CHECK(mine->before(view(1, 0, 5), view(2, 0, 1)));
    CHECK(mine->outranks(view(1, 5), view(2, 6)));
    seen.answer = UINT32_MAX;
    CHECK(mine->pick(0, std::vector{view(4), view(6)}, 0) == Policy::kIdle);
    CHECK(mine->pick_holds_ns(0, std::vector{view(4)}, 0) == 0);

    std::vector<std::string> lines;
    base::set_log_sink(
        [](void* user, int32_t, const char* text) {
          static_cast<std::vector<std::string>*>(user)->emplace_back(text);
        },
        &lines, base::kError);
    seen.answer = 2;
    CHECK(mine->pick(0, std::vector{view(4), view(6)}, 0) == Policy::kIdle);
    CHECK(mine->pick(0, std::vector{view(4), view(6)}, 0) == Policy::kIdle);
    base::set_log_sink(nullptr, nullptr, base::kWarning);
    REQUIRE(lines.size() == 1);  // said once
    CHECK(lines[0].find("'mine'") != std::string::npos);
  }
  CHECK(seen.released == 1);
}

TEST_CASE("a custom policy that throws counts as idle and no") {
  gpushare_policy_ops ops{};
  ops.struct_size = sizeof(ops);
  ops.pick = [](void*, uint32_t, const gpushare_candidate*, uint32_t, uint64_t) -> uint32_t {
    throw std::runtime_error("pick");
  };
  ops.outranks = [](void*, const gpushare_candidate*, const gpushare_candidate*) -> int32_t {
    throw std::runtime_error("outranks");
  };
  base::set_log_sink([](void*, int32_t, const char*) {}, nullptr, base::kError);
  const auto bad = std::move(*make_custom_policy(&ops));
  CHECK(bad->name() == "custom");
  CHECK(bad->pick(0, std::vector{view(4)}, 0) == Policy::kIdle);
  CHECK_FALSE(bad->outranks(view(1), view(2)));
  CHECK(bad->before(view(1), view(2)));  // null: arrival order
  base::set_log_sink(nullptr, nullptr, base::kWarning);
}

TEST_CASE("a custom policy's table is checked and not released when refused") {
  CHECK(make_custom_policy(nullptr).status().code() == GPUSHARE_INVALID_ARGUMENT);
  static int released;
  released = 0;
  gpushare_policy_ops ops{};
  ops.release = [](void*) { ++released; };
  ops.struct_size = 8;
  CHECK(make_custom_policy(&ops).status().code() == GPUSHARE_INVALID_ARGUMENT);
  ops.struct_size = sizeof(ops);
  CHECK(make_custom_policy(&ops).status().message().find("pick") != std::string::npos);
  CHECK(released == 0);
}
