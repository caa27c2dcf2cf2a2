// Loops as programs write them, on virtual time: asynchronous ones, and those whose thread waits for the device in each
// iteration and begins the next one a moment later, or after some thought. Ranks and weights hold for all of them.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "unit/sched/scheduler_fixture.hpp"

using namespace gpushare;
using namespace gpushare::sched;
using namespace gpushare::test::scheduling;

namespace {

constexpr uint64_t kMicro = 1'000, kMilli = 1'000'000, kAsynchronous = kUnknown, kEndless = kUnknown;

struct Loop {
  uint64_t iteration_ns = 0;
  uint64_t pause_ns = kAsynchronous;  // from an iteration's end to the next begin
  double weight = 1;
  int32_t priority = 0;
  uint64_t iterations = kEndless;
  uint64_t from_ns = 0;
  uint32_t pause_for_ever_after =
      0;  // of five iterations, after so many the thread is away for ten iterations
  // What became of it.
  uint64_t service_ns = 0, done = 0, begun = 0, ended_ns = 0;
};

// One device: each lane runs its iterations one after the other, all lanes side by side.
class Device {
 public:
  Device(const char* policy, uint32_t max_lanes, std::vector<Loop> loops, uint32_t depth = 2)
      : loops_(std::move(loops)), depth_(depth) {
    SchedulerOptions options = capacity(1'000);
    options.max_lanes = max_lanes;
    options.keeps_lag_ns = kKeepsLagNs;
    scheduler_ = std::make_unique<Scheduler>(options, std::move(*make_policy(policy)));
    for (SessionId id = 1; id <= loops_.size(); ++id) at(loops_[id - 1].from_ns, {id, kNoLane, true});
  }

  // Until the loop has ended, or until the time.
  void run(uint64_t until_ns, size_t until_ended = SIZE_MAX) {
    while (!events_.empty() && (until_ended == SIZE_MAX || loops_[until_ended].ended_ns == 0)) {
      const auto next = events_.begin();
      if (next->first > until_ns) break;
      now_ = next->first;
      const Event event = next->second;
      events_.erase(next);
      handle(event);
      dispatch();
    }
    now_ = std::max(now_, until_ended == SIZE_MAX ? until_ns : now_);
  }
  const Loop& loop(size_t i) const { return loops_[i]; }
  double share(size_t i) const {
    uint64_t sum = 0;
    for (const Loop& each : loops_) sum += each.service_ns;
    return static_cast<double>(loops_[i].service_ns) / static_cast<double>(sum);
  }
  uint64_t service_ns() const {
    uint64_t sum = 0;
    for (const Loop& each : loops_) sum += each.service_ns;
    return sum;
  }
  uint64_t now() const { return now_; }

 private:
  struct Event {
    SessionId session = kNoSession;
    LaneId lane = kNoLane;  // its iteration there has ended
    bool arrives = false;
  };
  void at(uint64_t time, Event event) { events_.emplace(time, event); }

  void handle(const Event& event) {
    if (event.session == kNoSession) {  // only a look
      looks_.erase(now_);
      return;
    }
    Loop& loop = loops_[event.session - 1];
    if (event.arrives) {
      SessionSpec asks = spec(event.session, 10, 10);
      asks.weight = loop.weight;
      asks.priority = loop.priority;
      if (loop.iterations != kEndless) {
        asks.iterations_total = loop.iterations;
        asks.remaining_ns = loop.iterations * loop.iteration_ns;
      } else {
        asks.remaining_ns = 3'600'000 * kMilli;
      }
      REQUIRE(scheduler_->arrive(asks, now_).ok());
      begin(event.session);
      return;
    }
    if (event.lane == kNoLane) return begin(event.session);
    Flight& flight = lanes_[event.lane];
    --flight.in_flight;
    loop.service_ns += loop.iteration_ns;
    ++loop.done;
    scheduler_->finished(event.session, loop.iteration_ns, now_);
    if (loop.done == loop.iterations) {
      loop.ended_ns = now_;
      scheduler_->leave(event.session, now_);
    } else if (loop.pause_ns != kAsynchronous) {
      const bool away = loop.pause_for_ever_after > 0 && loop.done % 5 >= loop.pause_for_ever_after;
      at(now_ + (away ? 10 * loop.iteration_ns : loop.pause_ns), {event.session, kNoLane, false});
    }
  }
  void begin(SessionId id) {
    if (loops_[id - 1].begun < loops_[id - 1].iterations) scheduler_->ready(id, now_);
  }
  void dispatch() {
    for (bool any = true; any;) {
      any = false;
      (void)scheduler_->take_actions();
      for (LaneId lane = 0; lane < scheduler_->lane_limit(); ++lane) {
        Flight& flight = lanes_[lane];
        if (!scheduler_->lane_is_open(lane) || flight.in_flight >= depth_) continue;
        const auto picked = scheduler_->pick(lane, now_);
        if (!picked) continue;
        any = true;
        Loop& loop = loops_[*picked - 1];
        scheduler_->dispatched(*picked, lane, now_);
        ++loop.begun;
        ++flight.in_flight;
        flight.free_ns = std::max(flight.free_ns, now_) + loop.iteration_ns;
        at(flight.free_ns, {*picked, lane, false});
        if (loop.pause_ns == kAsynchronous) begin(*picked);
      }
    }
    if (const uint64_t look = scheduler_->look_again_ns(); look != kUnknown)
      if (const uint64_t time = std::max(look, now_ + 1); looks_.insert(time).second) at(time, {});
    books_.after_event(*scheduler_);
  }

  struct Flight {
    uint32_t in_flight = 0;
    uint64_t free_ns = 0;
  };
  std::vector<Loop> loops_;
  uint32_t depth_;
  std::unique_ptr<Scheduler> scheduler_;
  SoundBooks books_;
  std::map<LaneId, Flight> lanes_;
  std::multimap<uint64_t, Event> events_;
  std::set<uint64_t> looks_;  // the times of those that only look
  uint64_t now_ = 0;
};

std::string describe(const std::vector<Loop>& loops) {
  std::string text;
  for (const Loop& each : loops) {
    char line[160];
    std::snprintf(line, sizeof line, "[%llu us, pause %lld us, weight %g, priority %d] ",
                  static_cast<unsigned long long>(each.iteration_ns / kMicro),
                  each.pause_ns == kAsynchronous ? -1 : static_cast<long long>(each.pause_ns / kMicro),
                  each.weight, each.priority);
    text += line;
  }
  return text;
}

}  // namespace

TEST_CASE("weights hold for loops that wait for the device, in one lane and in several") {
  for (const uint32_t lanes : {1u, 2u, 0u})
    for (const uint64_t iteration : {2 * kMilli, 10 * kMilli})
      for (const uint64_t pause : {kAsynchronous, uint64_t{0}, 5 * kMicro, 40 * kMicro, 150 * kMicro}) {
        const std::vector<Loop> loops = {{iteration, pause, 2}, {iteration, pause, 1}, {iteration, pause, 1}};
        INFO(lanes << " lanes, " << describe(loops));
        Device device("fair", lanes, loops);
        device.run(10'000 * kMilli);
        CHECK(std::abs(device.share(0) - 0.5) <= 0.01);
        CHECK(std::abs(device.share(1) - 0.25) <= 0.01);
      }
}

TEST_CASE("weights hold for loops that think between iterations") {
  for (const uint64_t thought : {300 * kMicro, 3 * kMilli, 10 * kMilli})
    for (const uint32_t lanes : {1u, 2u, 0u})
      // In one lane also where they think for as long as they run, in several for up to a tenth of that.
      for (const uint64_t iteration : {10 * kMilli, 10 * thought, 15 * thought}) {
        if (lanes != 1 && thought > iteration / 10) continue;
        const std::vector<Loop> loops = {
            {iteration, thought, 2}, {iteration, thought, 1}, {iteration, thought, 1}};
        INFO(lanes << " lanes, " << describe(loops));
        Device device("fair", lanes, loops);
        device.run(10'000 * kMilli);
        CHECK(std::abs(device.share(0) - 0.5) <= 0.02);
        CHECK(std::abs(device.share(1) - 0.25) <= 0.02);
      }
}

TEST_CASE("a job of higher rank takes as long as alone beside others that wait for the device as it does") {
  for (const char* policy : {"priority", "srtf"})
    for (const uint32_t lanes : {1u, 0u})
      for (const uint64_t pause : {kAsynchronous, uint64_t{0}, 30 * kMicro, 500 * kMicro})
        for (const uint64_t others : {kAsynchronous, 30 * kMicro}) {
          const std::vector<Loop> loops = {{20 * kMilli, others, 1, 0},
                                           {20 * kMilli, others, 1, 0},
                                           {20 * kMilli, pause, 1, 5, 50, 205 * kMilli}};
          INFO(policy << ", " << lanes << " lanes, " << describe(loops));
          Device device(policy, lanes, loops);
          device.run(kUnknown, 2);
          const uint64_t pauses = pause == kAsynchronous ? 0 : 50 * pause;
          // At first it waits for what is in flight, an iteration of each of the two.
          CHECK(device.loop(2).ended_ns - 205 * kMilli <= 50 * 20 * kMilli + pauses + 2 * 20 * kMilli);
        }
}

TEST_CASE(
    "whoever is outranked has one iteration in flight, and no second one that the other would wait for") {
  for (const uint32_t lanes : {1u, 0u}) {
    const std::vector<Loop> loops = {{20 * kMilli}, {20 * kMilli}, {2 * kMilli, 30 * kMilli, 1, 10, 100}};
    Device device("priority", lanes, loops);
    device.run(kUnknown, 2);
    // In one lane each request waits for one iteration at most: half of it in the mean.
    const uint64_t alone = (100 * 2 + 99 * 30) * kMilli;
    CHECK(device.loop(2).ended_ns - alone <= 100 * 20 * kMilli);
  }
}

TEST_CASE("sessions of equal priority share by weight") {
  for (const uint64_t pause : {kAsynchronous, 20 * kMicro}) {
    const std::vector<Loop> loops = {{5 * kMilli, pause, 1, 3},
                                     {5 * kMilli, pause, 1, 3},
                                     {5 * kMilli, pause, 2, 3},
                                     {5 * kMilli, pause, 1, 0}};
    INFO(describe(loops));
    Device device("priority", 1, loops);
    device.run(4'000 * kMilli);
    CHECK(std::abs(device.share(0) - 0.25) <= 0.01);
    CHECK(std::abs(device.share(2) - 0.5) <= 0.01);
    CHECK(device.loop(3).service_ns <= 10 * kMilli);
  }
}

TEST_CASE("a session that waits for admission may withdraw its iteration under every policy") {
  for (const char* policy : policy_names()) {
    INFO(policy);
    SchedulerOptions options = capacity(100);
    options.keeps_lag_ns = kKeepsLagNs;
    Scheduler scheduler = make(policy, options);
    REQUIRE(scheduler.arrive(spec(1, 50, 40), 0).ok());
    REQUIRE(scheduler.arrive(spec(2, 50, 40), 0).ok());
    REQUIRE(scheduler.state(2) == SessionState::kQueued);
    scheduler.ready(2, 1);
    scheduler.not_ready(2, 2);
    CHECK(scheduler.check() == "");
  }
}

TEST_CASE("waiting for a session that does not come back costs little") {
  // The worst case for the median of five pauses: three short ones, then two long ones.
  const std::vector<Loop> loops = {{5 * kMilli, 20 * kMicro, 4, 0, kEndless, 0, 3}, {5 * kMilli}};
  Device device("fair", 1, loops);
  device.run(20'000 * kMilli);
  CHECK(static_cast<double>(device.service_ns()) >= 0.97 * 20e9);
  const std::vector<Loop> asynchronous = {{5 * kMilli, kAsynchronous, 4}, {5 * kMilli}, {300 * kMicro}};
  Device busy("fair", 1, asynchronous);
  busy.run(20'000 * kMilli);
  CHECK(static_cast<double>(busy.service_ns()) >= 0.999 * 20e9);
}

TEST_CASE("random loops get their weights, whether they wait for the device or not") {
  const uint64_t seed = test::seed();
  test::Random generator(seed);
  const auto below = [&](uint64_t bound) { return test::uniform(generator, 0, bound - 1); };
  for (int round = 0; round < 60; ++round) {
    std::vector<Loop> loops;
    uint64_t longest = 0;
    const size_t count = 2 + below(4);
    for (size_t i = 0; i < count; ++i) {
      Loop loop;
      loop.iteration_ns = 300 * kMicro + below(20 * kMilli);
      // Up to a twentieth of the iteration, which is half of what a session may be expected for.
      loop.pause_ns = below(3) == 0 ? kAsynchronous : below(loop.iteration_ns / 20);
      loop.weight = 1 + static_cast<double>(below(4));
      longest = std::max(longest, loop.iteration_ns);
      loops.push_back(loop);
    }
    INFO("seed " << seed << ", round " << round << ": " << describe(loops));
    Device device("fair", 1, loops, 1 + static_cast<uint32_t>(below(2)));
    device.run(3'000 * kMilli);
    double least = INFINITY, most = 0;
    for (size_t i = 0; i < count; ++i) {
      const double weighted = static_cast<double>(device.loop(i).service_ns) / loops[i].weight;
      least = std::min(least, weighted);
      most = std::max(most, weighted);
    }
    CHECK(most - least <= 2.0 * static_cast<double>(longest));
  }
}
