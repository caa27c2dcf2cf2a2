// fair and priority written outside, by the C table alone, decide like the built-in ones over random schedules.
// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <set>
#include <string>
#include <vector>

#include "sched/scheduler.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace gpushare::sched {
namespace {

int32_t outside_before(void*, const gpushare_candidate* a, const gpushare_candidate* b) {
  if (a->session_class != b->session_class) return a->session_class < b->session_class;
  return a->priority > b->priority;
}

int32_t outside_gives_way(void* user_data, const gpushare_candidate* victim,
                          const gpushare_candidate* other) {
  if (outside_before(user_data, other, victim) != 0) return GPUSHARE_GIVES_WAY_AT_ONCE;
  return outside_before(user_data, victim, other) != 0 ? GPUSHARE_GIVES_WAY_NEVER
                                                       : GPUSHARE_GIVES_WAY_AFTER_STAY;
}

double outside_share(void*, const gpushare_candidate* session) {
  return session->weight;
}

std::unique_ptr<Policy> outside(const std::string& name) {
  gpushare_policy_ops ops{};
  ops.struct_size = sizeof ops;
  ops.name = "outside";
  ops.share = outside_share;
  ops.gives_way = [](void*, const gpushare_candidate*, const gpushare_candidate*) -> int32_t {
    return GPUSHARE_GIVES_WAY_AFTER_STAY;
  };
  if (name == "priority") {
    ops.before = outside_before;
    ops.gives_way = outside_gives_way;
  }
  return std::move(*make_custom_policy(&ops));
}

// Two schedulers that are told the same, and must do the same.
class Twins {
 public:
  Twins(test::Random& random, const std::string& name, const SchedulerOptions& options)
      : random_(random), inside_(options, std::move(*make_policy(name))), outside_(options, outside(name)) {}

  void step() {
    now_ += any(1'000'000);
    const uint64_t what = any(11);
    if (sessions_.size() < 12 && what < 2) arrive();
    if (sessions_.empty()) return;
    auto chosen = sessions_.begin();
    std::advance(chosen, static_cast<long>(any(sessions_.size() - 1)));
    const SessionId id = *chosen;
    const bool idle = inside_.view(id).in_flight == 0;
    if (what == 2) {
      const auto priority = static_cast<int32_t>(any(2));
      both([&](Scheduler& each) { each.set_priority(id, priority, now_); });
    } else if (what == 3) {
      const double weight = static_cast<double>(1 + any(3));
      both([&](Scheduler& each) { each.set_weight(id, weight); });
    } else if (what == 4 && idle && !moving_.contains(id) && any(3) == 0) {
      both([&](Scheduler& each) { each.leave(id, now_); });
      sessions_.erase(id);
    } else if (what == 5) {
      for (const SessionId moved : std::exchange(moving_, {}))
        both([&](Scheduler& each) { each.page_done(moved, now_); });
    } else {
      both([&](Scheduler& each) { each.ready(id, now_); });
    }
    carry_out();
    run();
  }
  uint64_t picks() const { return picks_; }
  uint64_t moves() const { return moves_; }

 private:
  uint64_t any(uint64_t most) { return test::uniform(random_, 0, most); }
  template <class Tell>
  void both(Tell tell) {
    tell(inside_);
    tell(outside_);
  }
  void arrive() {
    SessionSpec spec;
    spec.id = ++last_id_;
    spec.cls = any(2) == 0 ? SessionClass::kOpportunistic : SessionClass::kGuaranteed;
    spec.priority = static_cast<int32_t>(any(2));
    spec.weight = static_cast<double>(1 + any(3));
    spec.persistent_bytes = 50 + any(250);
    spec.ephemeral_bytes = 10 + any(150);
    spec.alternates = any(2) == 0;
    both([&](Scheduler& each) { REQUIRE(each.arrive(spec, now_).ok()); });
    sessions_.insert(spec.id);
  }
  void carry_out() {
    const std::vector<Action> a = inside_.take_actions(), b = outside_.take_actions();
    REQUIRE(a.size() == b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      REQUIRE(a[i].kind == b[i].kind);
      REQUIRE(a[i].lane == b[i].lane);
      REQUIRE(a[i].session == b[i].session);
      REQUIRE(a[i].bytes == b[i].bytes);
      const bool moves = a[i].kind == ActionKind::kPageOut || a[i].kind == ActionKind::kPageIn;
      if (moves && sessions_.contains(a[i].session)) {
        moving_.insert(a[i].session);
        ++moves_;
      }
    }
    REQUIRE(inside_.look_again_ns() == outside_.look_again_ns());
    REQUIRE(inside_.check() == "");
  }
  void run() {
    std::vector<SessionId> flying;
    for (LaneId lane = 0; lane < inside_.lane_limit(); ++lane) {
      const auto a = inside_.pick(lane, now_), b = outside_.pick(lane, now_);
      REQUIRE(a == b);
      carry_out();
      if (!a) continue;
      ++picks_;
      both([&](Scheduler& each) { each.dispatched(*a, lane, now_); });
      flying.push_back(*a);
    }
    for (const SessionId id : flying) {
      if (any(1) == 0 && inside_.view(id).in_flight > 2) continue;
      const uint64_t took = 100'000 + any(5'000'000);
      now_ += took / flying.size();
      both([&](Scheduler& each) { each.finished(id, took, now_); });
      carry_out();
    }
  }

  test::Random& random_;
  Scheduler inside_, outside_;
  uint64_t now_ = 0, picks_ = 0, moves_ = 0;
  SessionId last_id_ = 0;
  std::set<SessionId> sessions_, moving_;
};

}  // namespace

TEST_CASE("fair and priority written outside decide like the built-in ones") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  for (const char* name : {"fair", "priority"}) {
    for (const bool shared : {false, true}) {
      SchedulerOptions options;
      options.capacity_bytes = 1000;
      options.shared_lanes = shared;
      options.least_stay_ns = 1'000'000;
      options.keeps_lag_ns = 10'000'000;
      Twins twins(random, name, options);
      for (int i = 0; i < 5'000; ++i) twins.step();
      CHECK(twins.picks() > 1'000);
      CHECK(twins.moves() > 20);
    }
  }
}

}  // namespace gpushare::sched
