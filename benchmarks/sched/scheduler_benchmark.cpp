// Cost of one decision and of a session coming and going. Figures with their command: docs/design/sched.md.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <functional>
#include <numeric>
#include <queue>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "sched/claims.hpp"
#include "sched/scheduler.hpp"
#include "sched/turn_rules.hpp"

namespace {

using namespace gpushare;
using namespace gpushare::sched;

SessionSpec spec(SessionId id) {
  SessionSpec out;
  out.id = id;
  out.name = "bench";
  out.priority = static_cast<int32_t>(id * 7919 % 5);
  out.persistent_bytes = 100;
  out.ephemeral_bytes = 1000 + id % 10;
  out.remaining_ns = 1'000'000'000'000 + id * 104729 % 1'000'000;
  return out;
}

SchedulerOptions one_lane() {
  SchedulerOptions options;
  options.capacity_bytes = 1'000'000'000;
  options.max_lanes = 1;
  return options;
}

// pick, dispatched, finished, ready: all that one iteration costs with `n` candidates in its lane.
void iteration(benchmark::State& state, const char* policy) {
  Scheduler scheduler(one_lane(), std::move(*make_policy(policy)));
  const auto n = static_cast<SessionId>(state.range(0));
  for (SessionId id = 1; id <= n; ++id) {
    if (!scheduler.arrive(spec(id), 0).ok()) return state.SkipWithError("refused");
    scheduler.ready(id, 0);
  }
  scheduler.take_actions();
  uint64_t now = 0;
  for (auto _ : state) {
    const SessionId id = *scheduler.pick(0, now);
    scheduler.dispatched(id, 0, now);
    now += 1000;
    scheduler.finished(id, 1000, now);
    scheduler.ready(id, now);
  }
}
BENCHMARK_CAPTURE(iteration, srtf, "srtf")->Arg(1)->Arg(10)->Arg(100)->Arg(1000);
BENCHMARK_CAPTURE(iteration, fair, "fair")->Arg(1)->Arg(10)->Arg(100)->Arg(1000);
BENCHMARK_CAPTURE(iteration, priority, "priority")->Arg(1)->Arg(10)->Arg(100)->Arg(1000);
BENCHMARK_CAPTURE(iteration, pack, "pack")->Arg(1)->Arg(10)->Arg(100)->Arg(1000);

// One iteration of one of `n` lanes, each of which has a session that always has work: the lane whose iteration ends
// first, and then pick for each lane with room that may have an answer, as the executor asks. `depth`: iterations that a lane
// may have in flight.
void busy_lanes(benchmark::State& state, const char* policy, size_t depth) {
  SchedulerOptions options = one_lane();
  options.max_lanes = 0;
  options.keeps_lag_ns = kKeepsLagNs;
  options.enqueues = depth > 1;
  Scheduler scheduler(options, std::move(*make_policy(policy)));
  const auto n = static_cast<SessionId>(state.range(0));
  std::vector<LaneId> all(n);
  std::iota(all.begin(), all.end(), LaneId{0});
  std::vector<size_t> in_flight(n);
  using End = std::tuple<uint64_t, LaneId, SessionId>;
  std::priority_queue<End, std::vector<End>, std::greater<>> ends;
  uint64_t now = 0;
  const auto ask = [&] {
    for (bool any = true; any;) {
      any = false;
      const auto some = scheduler.lanes_to_ask();
      const std::vector<LaneId> lanes = some ? std::vector<LaneId>(some->begin(), some->end()) : all;
      for (const LaneId lane : lanes) {
        if (in_flight[lane] >= depth) continue;
        const auto picked = scheduler.pick(lane, now);
        if (!picked) continue;
        scheduler.dispatched(*picked, lane, now);
        if (depth > 1) scheduler.ready(*picked, now);
        ++in_flight[lane];
        ends.emplace(now + in_flight[lane] * (100'000 + *picked * 7919 % 50'000), lane, *picked);
        any = true;
      }
    }
  };
  for (SessionId id = 1; id <= n; ++id) {
    SessionSpec each = spec(id);
    each.priority = 0;
    if (!scheduler.arrive(each, 0).ok()) return state.SkipWithError("refused");
    scheduler.ready(id, 0);
  }
  scheduler.take_actions();
  ask();
  for (auto _ : state) {
    if (ends.empty()) return state.SkipWithError("nothing runs");
    const auto [at, lane, id] = ends.top();
    ends.pop();
    now = at;
    --in_flight[lane];
    scheduler.finished(id, 100'000 + id * 7919 % 50'000, now, 1);
    scheduler.ready(id, now);
    ask();
    benchmark::DoNotOptimize(scheduler.look_again_ns());
  }
}
BENCHMARK_CAPTURE(busy_lanes, fair, "fair", 1)->Arg(1)->Arg(8)->Arg(64)->Arg(640);
BENCHMARK_CAPTURE(busy_lanes, priority, "priority", 1)->Arg(1)->Arg(8)->Arg(64)->Arg(640);
BENCHMARK_CAPTURE(busy_lanes, fair_ahead, "fair", 2)->Arg(1)->Arg(8)->Arg(64)->Arg(640);
BENCHMARK_CAPTURE(busy_lanes, priority_ahead, "priority", 2)->Arg(1)->Arg(8)->Arg(64)->Arg(640);

// The decision alone.
void pick(benchmark::State& state, const char* policy) {
  Scheduler scheduler(one_lane(), std::move(*make_policy(policy)));
  for (SessionId id = 1; id <= static_cast<SessionId>(state.range(0)); ++id) {
    if (!scheduler.arrive(spec(id), 0).ok()) return state.SkipWithError("refused");
    scheduler.ready(id, 0);
  }
  for (auto _ : state) benchmark::DoNotOptimize(scheduler.pick(0, 0));
}
BENCHMARK_CAPTURE(pick, srtf, "srtf")->Arg(10)->Arg(100)->Arg(1000);
BENCHMARK_CAPTURE(pick, fair, "fair")->Arg(10)->Arg(100)->Arg(1000);

// A session arrives, is admitted, and leaves, beside `n` residents.
void arrive_leave(benchmark::State& state, const char* policy) {
  Scheduler scheduler(one_lane(), std::move(*make_policy(policy)));
  SessionId id = 0;
  for (int i = 0; i < state.range(0); ++i)
    if (!scheduler.arrive(spec(++id), 0).ok()) return state.SkipWithError("refused");
  for (auto _ : state) {
    if (!scheduler.arrive(spec(++id), 0).ok()) return state.SkipWithError("refused");
    scheduler.leave(id, 0);
    benchmark::DoNotOptimize(scheduler.take_actions());
  }
}
BENCHMARK_CAPTURE(arrive_leave, fair, "fair")->Arg(1)->Arg(10)->Arg(100)->Arg(1000)->Arg(10'000);
BENCHMARK_CAPTURE(arrive_leave, srtf, "srtf")->Arg(1)->Arg(10)->Arg(100)->Arg(1000)->Arg(10'000);

// A full device with `n` sessions at the door: one leaves, the next is admitted.
void queue_moves(benchmark::State& state, const char* policy) {
  SchedulerOptions options = one_lane();
  options.capacity_bytes = 100 * 20 + 1100;
  options.paging = false;
  Scheduler scheduler(options, std::move(*make_policy(policy)));
  const auto n = static_cast<SessionId>(state.range(0));
  SessionId next = 0, oldest = 1;
  while (next < n + 20)
    if (!scheduler.arrive(spec(++next), 0).ok()) return state.SkipWithError("refused");
  for (auto _ : state) {
    scheduler.leave(oldest++, 0);
    if (!scheduler.arrive(spec(++next), 0).ok()) return state.SkipWithError("refused");
    benchmark::DoNotOptimize(scheduler.take_actions());
  }
}
BENCHMARK_CAPTURE(queue_moves, fair, "fair")->Arg(10)->Arg(100)->Arg(1000)->Arg(10'000)->Arg(100'000);
BENCHMARK_CAPTURE(queue_moves, srtf, "srtf")->Arg(10)->Arg(100)->Arg(1000)->Arg(10'000)->Arg(100'000);
BENCHMARK_CAPTURE(queue_moves, priority, "priority")->Arg(10)->Arg(100)->Arg(1000)->Arg(10'000)->Arg(100'000);

// The same with paging, where each session that waits might have residents paged out, and with needs that the
// index of the waiting list tells apart worst: half of them have a P that does not fit, the others an E.
void queue_moves_paging(benchmark::State& state, const char* policy) {
  SchedulerOptions options = one_lane();
  options.capacity_bytes = 100 * 20 + 1100;
  Scheduler scheduler(options, std::move(*make_policy(policy)));
  const auto n = static_cast<SessionId>(state.range(0));
  SessionId next = 0, oldest = 1;
  for (; next < 20;)
    if (!scheduler.arrive(spec(++next), 0).ok()) return state.SkipWithError("refused");
  const auto arrive = [&] {
    SessionSpec each = spec(++next);
    each.priority = -1;
    each.remaining_ns *= 2;
    (next % 2 == 0 ? each.persistent_bytes : each.ephemeral_bytes) = 2000;
    (next % 2 == 0 ? each.ephemeral_bytes : each.persistent_bytes) = 1;
    return scheduler.arrive(each, 0).ok();
  };
  while (next < n + 20)
    if (!arrive()) return state.SkipWithError("refused");
  scheduler.take_actions();
  for (auto _ : state) {
    scheduler.leave(21 + oldest++, 0);  // one that waits
    if (!arrive()) return state.SkipWithError("refused");
    scheduler.set_priority(20, 0, 0);  // asks everybody who waits
    benchmark::DoNotOptimize(scheduler.take_actions());
  }
}
BENCHMARK_CAPTURE(queue_moves_paging, srtf, "srtf")->Arg(10)->Arg(100)->Arg(1000)->Arg(10'000)->Arg(100'000);
BENCHMARK_CAPTURE(queue_moves_paging, priority, "priority")
    ->Arg(10)
    ->Arg(100)
    ->Arg(1000)
    ->Arg(10'000)
    ->Arg(100'000);

// Which of `n` claims of three ranks make room for a half of all bytes.
void choose(benchmark::State& state) {
  std::mt19937_64 random(1);
  std::vector<Claim> claims(static_cast<size_t>(state.range(0)));
  uint64_t bytes = 0;
  for (Claim& claim : claims) {
    claim = {1 + random() % 1'000'000, static_cast<uint32_t>(random() % 3),
             static_cast<double>(random() % 1'000'000)};
    bytes += claim.bytes;
  }
  for (auto _ : state) benchmark::DoNotOptimize(give_up(claims, bytes / 2));
}
BENCHMARK(choose)->Arg(10)->Arg(1000)->Arg(10'000);

// The capacity is lowered so that a half of `n` sessions, all with an iteration in flight, must go; then it is raised
// again before any has.
void lower_capacity(benchmark::State& state) {
  SchedulerOptions options = one_lane();
  Scheduler scheduler(options, std::move(*make_policy("fair")));
  for (int i = 0; i < state.range(0); ++i) {
    SessionSpec each = spec(static_cast<SessionId>(i) + 1);
    each.persistent_bytes = 100 + each.id * 7919 % 100;
    if (!scheduler.arrive(each, 0).ok()) return state.SkipWithError("refused");
    scheduler.ready(each.id, 0);
    scheduler.dispatched(each.id, 0, 0);
  }
  const uint64_t half = scheduler.promised_bytes() / 2;
  for (auto _ : state) {
    if (!scheduler.set_capacity(half, 1).ok() || !scheduler.set_capacity(options.capacity_bytes, 1).ok())
      return state.SkipWithError("refused");
    benchmark::DoNotOptimize(scheduler.take_actions());
  }
}
BENCHMARK(lower_capacity)->Arg(10)->Arg(1000)->Arg(10'000);

}  // namespace
