// Sessions that each want the device's memory take turns on it, under every policy.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "unit/sched/scheduler_fixture.hpp"

using namespace gpushare;
using namespace gpushare::sched;
using namespace gpushare::test::scheduling;

namespace {

constexpr uint64_t kStaysMs = 1'000'000, kStaysSecond = 1000 * kStaysMs;

SessionSpec alternating(SessionId id, uint64_t bytes, double weight = 1) {
  SessionSpec out = spec(id, bytes, 0);
  out.alternates = true;
  out.weight = weight;
  return out;
}

// As the daemon has it: lanes of turns, one a device.
SchedulerOptions one_lane(uint64_t bytes) {
  SchedulerOptions options = capacity(bytes);
  options.max_lanes = 1;
  return options;
}

// A driver on virtual time: one iteration at a time, and copies one after the other.
class Alternation {
 public:
  Alternation(const char* policy, double copy_ns_per_byte, double told_ns_per_byte = 0)
      : scheduler_(one_lane(1000), std::move(*make_policy(policy))), copy_ns_per_byte_(copy_ns_per_byte) {
    scheduler_.set_link(told_ns_per_byte > 0 ? told_ns_per_byte : copy_ns_per_byte);
  }

  struct Program {
    uint64_t iteration_ns = 0, rest_ns = 0;  // works, rests, works
    uint64_t wakes_ns = 0, service_ns = 0, came_ns = 0, longest_out_ns = 0, outs = 0;
    bool resident = false;
  };

  void add(const SessionSpec& spec, uint64_t iteration_ns, uint64_t rest_ns = 0) {
    programs_[spec.id] = {iteration_ns, rest_ns, 0, 0, now_, 0, 0, false};
    REQUIRE(scheduler_.arrive(spec, now_).ok());
    carry_out();
    scheduler_.ready(spec.id, now_);
    carry_out();
  }
  void remove(SessionId id) {
    scheduler_.leave(id, now_);
    programs_.erase(id);
    carry_out();
  }

  void run_until(uint64_t until_ns) {
    while (now_ < until_ns) {
      for (auto& [id, program] : programs_) {
        if (program.wakes_ns == 0 || program.wakes_ns > now_) continue;
        program.wakes_ns = 0;
        scheduler_.ready(id, now_);
        carry_out();
      }
      while (!copies_.empty() && copies_.front().ends_ns <= now_) end_copy();
      uint64_t next_ns = std::min(until_ns, std::max(scheduler_.look_again_ns(), now_ + 1));
      if (!copies_.empty()) next_ns = std::min(next_ns, copies_.front().ends_ns);
      for (const auto& [id, program] : programs_)
        if (program.wakes_ns > now_) next_ns = std::min(next_ns, program.wakes_ns);
      const auto picked = scheduler_.lane_is_open(0) ? scheduler_.pick(0, now_) : std::nullopt;
      carry_out();
      if (!picked || scheduler_.state(*picked) != SessionState::kResident) {
        idle_ns_ += next_ns - now_;
        now_ = next_ns;
        continue;
      }
      Program& program = programs_.at(*picked);
      scheduler_.dispatched(*picked, 0, now_);
      now_ += program.iteration_ns;
      program.service_ns += program.iteration_ns;
      scheduler_.finished(*picked, program.iteration_ns, now_);
      if (program.rest_ns != 0)
        program.wakes_ns = now_ + program.rest_ns;
      else
        scheduler_.ready(*picked, now_);
      carry_out();
    }
  }

  double share(SessionId id) const {
    uint64_t sum = 0;
    for (const auto& [other, program] : programs_) sum += program.service_ns;
    return 100.0 * static_cast<double>(programs_.at(id).service_ns) / static_cast<double>(sum);
  }
  const Program& program(SessionId id) const { return programs_.at(id); }
  Scheduler& scheduler() { return scheduler_; }
  uint64_t now() const { return now_; }
  uint64_t idle_ns() const { return idle_ns_; }
  uint64_t outs() const { return outs_; }
  bool fails = false;       // copies to the host
  uint64_t held_up_ns = 0;  // the next copy: it takes so much longer

 private:
  struct Copying {
    SessionId session;
    uint64_t ends_ns;
    bool out;
  };
  void carry_out() {
    for (const Action& action : scheduler_.take_actions()) {
      if (action.kind == ActionKind::kPageOut || action.kind == ActionKind::kPageIn) {
        const uint64_t begins_ns = copies_.empty() ? now_ : copies_.back().ends_ns;
        const auto takes_ns = static_cast<uint64_t>(static_cast<double>(action.bytes) * copy_ns_per_byte_) +
                              std::exchange(held_up_ns, 0);
        const bool out = action.kind == ActionKind::kPageOut;
        copies_.push_back({action.session, begins_ns + takes_ns, out});
        if (out) {
          ++outs_;
          Program& program = programs_.at(action.session);
          program.resident = false;
          ++program.outs;
          program.came_ns = now_;
        }
      } else if (action.kind == ActionKind::kAdmit) {
        came(action.session);
      }
    }
    books_.after_event(scheduler_);
  }
  void came(SessionId id) {
    Program& program = programs_.at(id);
    program.resident = true;
    program.longest_out_ns = std::max(program.longest_out_ns, now_ - program.came_ns);
  }
  void end_copy() {
    const auto [id, ends_ns, out] = copies_.front();
    copies_.pop_front();
    if (out && fails) {
      programs_.at(id).resident = true;
      scheduler_.page_out_failed(id, now_);
    } else {
      if (!out) came(id);
      scheduler_.page_done(id, now_);
    }
    carry_out();
  }

  Scheduler scheduler_;
  SoundBooks books_;
  double copy_ns_per_byte_;
  std::map<SessionId, Program> programs_;
  uint64_t now_ = 0, idle_ns_ = 0, outs_ = 0;
  std::deque<Copying> copies_;  // one link
};

// Moving all 1,000 bytes takes 0.1 s.
constexpr double kCopy = 0.1 * kStaysSecond / 1000;

}  // namespace

TEST_CASE("a stay is nine times as long as both moves, and a second at least") {
  const Resident fresh{0, 40, 1, 0};
  const StayRule rule{1000, 1, false};
  CHECK(stay_left_ns(fresh, {60, 0, true}, rule) == 1000);
  CHECK(stay_left_ns(fresh, {160, 0, true}, rule) == 1800);
  CHECK(stay_left_ns({300, 40, 1, 0}, {160, 0, true}, rule) == 1500);
  CHECK(stay_left_ns({1800, 40, 1, 0}, {160, 0, true}, rule) == 0);
  CHECK(stay_left_ns({UINT64_MAX, 40, 1, 0}, {160, 0, true}, rule) == 0);
  CHECK(stay_left_ns(fresh, {160, 0, true}, {1000, 10, false}) == 18'000);
  CHECK(stay_left_ns({0, UINT64_MAX, 1, 0}, {UINT64_MAX, 0, true}, {1000, 10, false}) == UINT64_MAX);
}

TEST_CASE("by weight a stay ends when the resident is not behind the one that waits") {
  const StayRule rule{1000, 1, true};
  CHECK(tag_of({600, 0, 2, 5000}) == 5300);
  CHECK(stay_left_ns({0, 0, 3, 2000}, {0, 4000, true}, rule) == 6000);
  CHECK(stay_left_ns({5990, 0, 3, 2000}, {0, 4000, true}, rule) == 10);
  CHECK(stay_left_ns({0, 0, 3, 2000}, {0, 2100, true}, rule) == 1000);  // the least
  CHECK(stay_left_ns({0, 0, 3, 9000}, {0, 2100, true}, rule) == 1000);
  CHECK(stay_left_ns({0, 0, 3, 2000}, {0, 4000, false}, rule) == 1000);  // of a better class
  CHECK(stay_left_ns({0, 0, 3, 2000}, {0, 4000, true}, {1000, 1, false}) == 1000);
}

TEST_CASE("sessions that each want the whole device run in turns under every policy") {
  for (const char* policy : policy_names()) {
    for (const SessionId count : {2, 3}) {
      INFO(policy << ", " << count);
      Alternation device(policy, kCopy);
      for (SessionId id = 1; id <= count; ++id) device.add(alternating(id, 900), 5 * kStaysMs);
      device.run_until(600 * kStaysSecond);
      // The moves are known after the first: 90 ms each.
      const uint64_t stay_ns = 9 * 180 * kStaysMs * (std::string(policy) == "fifo" ? kLongStays : 1);
      for (SessionId id = 1; id <= count; ++id) {
        CHECK(std::abs(device.share(id) - 100.0 / static_cast<double>(count)) < 2);
        CHECK(device.program(id).longest_out_ns < count * (stay_ns + 400 * kStaysMs));
      }
      CHECK(device.outs() <= 600 * kStaysSecond / stay_ns);
      CHECK(device.idle_ns() <= device.now() / 10);
    }
  }
}

TEST_CASE("the longer the moves, the longer the stays: they take a tenth of the time at most") {
  for (const double times : {0.1, 1.0, 10.0}) {
    INFO(times);
    Alternation device("fair", kCopy * times);
    for (SessionId id = 1; id <= 3; ++id) device.add(alternating(id, 1000), 10 * kStaysMs);
    device.run_until(4000 * kStaysSecond);
    const double change_ns = 2000 * kCopy * times;
    CHECK(static_cast<double>(device.idle_ns()) <= static_cast<double>(device.now()) / 10 + change_ns);
    if (times > 1) CHECK(device.idle_ns() > device.now() / 14);
    for (SessionId id = 1; id <= 3; ++id) CHECK(std::abs(device.share(id) - 100.0 / 3) < 2);
  }
}

TEST_CASE(
    "a move that takes much longer than expected counts twice as long, unless no stay is longer for it") {
  CHECK(counted_move_ns(150, 100, 0) == 150);
  CHECK(counted_move_ns(201, 100, 0) == 200);
  CHECK(counted_move_ns(3, 100, 0) == 3);
  CHECK(counted_move_ns(0, 100, 0) == 1);
  CHECK(counted_move_ns(90, 0, 1800) == 90);
  CHECK(counted_move_ns(110, 0, 1800) == 100);
  CHECK(counted_move_ns(7, 0, 0) == 1);
  CHECK(counted_move_ns(UINT64_MAX, UINT64_MAX, 1000) == UINT64_MAX);
}

TEST_CASE("one move that the host holds up keeps nobody out for many times as long") {
  for (const char* policy : policy_names()) {
    for (const uint64_t before_s : {0, 100}) {
      INFO(policy << ", " << before_s << " s");
      Alternation device(policy, kCopy);
      device.add(alternating(1, 900), 5 * kStaysMs);
      device.add(alternating(2, 900), 5 * kStaysMs);
      device.run_until(before_s * kStaysSecond);
      device.held_up_ns = 20 * kStaysSecond;
      const uint64_t outs = device.outs();
      device.run_until((before_s + 200) * kStaysSecond);
      CHECK(device.held_up_ns == 0);
      // Stays of 1.62 s, or 2.43 s after the long move: the other waits for a stay, the moves, and 20 s at most.
      const uint64_t factor = (std::string(policy) == "fifo" ? kLongStays : 1);
      CHECK(device.program(1).longest_out_ns < (21 + 3 * factor) * kStaysSecond);
      CHECK(device.program(2).longest_out_ns < (21 + 3 * factor) * kStaysSecond);
      CHECK(device.outs() - outs > 90 / factor);
    }
  }
}

TEST_CASE("moves that take longer than the link says take a tenth of the time after some of them") {
  Alternation device("fair", kCopy, kCopy / 1000);
  for (SessionId id = 1; id <= 3; ++id) device.add(alternating(id, 1000), 10 * kStaysMs);
  device.run_until(100 * kStaysSecond);
  const uint64_t before_ns = device.idle_ns();
  device.run_until(1100 * kStaysSecond);
  CHECK(device.idle_ns() - before_ns <= 101 * kStaysSecond);
}

TEST_CASE("fair: the device's time follows the weights over many stays, whatever the iterations") {
  struct Mix {
    std::vector<std::pair<double, uint64_t>> programs;  // weight, iteration in ms
  };
  for (const Mix& mix : {Mix{{{2, 5}, {1, 5}, {1, 5}}}, Mix{{{1, 5}, {9, 5}}}, Mix{{{9, 5}, {1, 5}}},
                         Mix{{{1, 10'000}, {1, 100}}}, Mix{{{1, 10'000}, {3, 100}, {2, 700}}}}) {
    Alternation device("fair", kCopy);
    SessionId id = 0;
    double weights = 0;
    for (const auto& [weight, iteration_ms] : mix.programs) {
      device.add(alternating(++id, 800, weight), iteration_ms * kStaysMs);
      weights += weight;
    }
    device.run_until(2000 * kStaysSecond);
    for (SessionId each = 1; each <= id; ++each) {
      INFO(each << " of " << id << ", " << mix.programs[each - 1].second << " ms");
      CHECK(std::abs(device.share(each) - 100 * mix.programs[each - 1].first / weights) < 2);
    }
  }
}

TEST_CASE("fair: who comes later, or back, has nothing to make up for") {
  Alternation device("fair", kCopy);
  device.add(alternating(1, 800), 5 * kStaysMs);
  device.run_until(1000 * kStaysSecond);
  device.add(alternating(2, 800), 5 * kStaysMs);
  const uint64_t before_ns = device.program(1).service_ns;
  device.run_until(1100 * kStaysSecond);
  CHECK(device.program(2).service_ns > 40 * kStaysSecond);
  CHECK(device.program(1).service_ns - before_ns > 40 * kStaysSecond);
}

TEST_CASE("three of which two fit have the same time") {
  for (const char* policy : {"fair", "priority", "pack"}) {
    INFO(policy);
    Alternation device(policy, kCopy);
    for (SessionId id = 1; id <= 3; ++id) device.add(alternating(id, 500), 5 * kStaysMs);
    device.run_until(600 * kStaysSecond);
    // Under fair those that fit share the device; under the others the first of the line has it.
    const double least = std::string(policy) == "fair" ? 31 : 20;
    for (SessionId id = 1; id <= 3; ++id) CHECK(device.share(id) > least);
    CHECK(device.idle_ns() <= device.now() / 10);
  }
}

TEST_CASE("sessions with little work change places no more often than stays allow") {
  Alternation device("fair", kCopy / 1000);
  device.add(alternating(1, 900), kStaysMs, 20 * kStaysMs);
  device.add(alternating(2, 900), kStaysMs, 20 * kStaysMs);
  device.run_until(100 * kStaysSecond);
  CHECK(device.outs() <= 100);
  CHECK(device.outs() >= 90);
  // A resident without work has its stay too, and no more.
  CHECK(device.program(1).longest_out_ns < 1100 * kStaysMs);
  CHECK(device.program(2).longest_out_ns < 1100 * kStaysMs);
}

TEST_CASE("a session that rests on the host costs nobody a move until it has work") {
  Alternation device("fair", kCopy);
  device.add(alternating(1, 900), kStaysMs, 100 * kStaysSecond);
  device.add(alternating(2, 900), kStaysMs);
  device.run_until(95 * kStaysSecond);
  CHECK(device.outs() == 1);
  device.run_until(190 * kStaysSecond);
  CHECK(device.outs() == 3);  // in for one iteration, and out after a stay
}

TEST_CASE("nobody of lower rank has a place, and one of better class needs no weight") {
  Alternation device("priority", kCopy);
  SessionSpec high = alternating(1, 900);
  high.priority = 1;
  device.add(high, 5 * kStaysMs);
  device.add(alternating(2, 900), 5 * kStaysMs);
  device.run_until(100 * kStaysSecond);
  CHECK(device.outs() == 0);
  for (const char* policy : {"fair", "pack"}) {
    Alternation other(policy, kCopy);
    SessionSpec low = alternating(1, 900, 100);
    low.cls = SessionClass::kOpportunistic;
    other.add(low, 5 * kStaysMs);
    other.run_until(50 * kStaysMs);
    other.add(alternating(2, 900), 5 * kStaysMs);
    other.run_until(100 * kStaysSecond);
    CHECK(other.outs() == 1);
    CHECK(other.scheduler().state(1) == SessionState::kPagedOut);
  }
}

TEST_CASE("who does not alternate keeps its place, and who waits need not alternate") {
  for (const char* policy : policy_names()) {
    Alternation device(policy, kCopy);
    device.add(spec(1, 900, 0), 5 * kStaysMs);
    device.add(alternating(2, 900), 5 * kStaysMs);
    if (std::string(policy) == "srtf") continue;  // by service, without stays
    device.run_until(100 * kStaysSecond);
    CHECK(device.outs() == 0);
    device.remove(1);
    device.add(spec(3, 900, 0), 5 * kStaysMs);
    device.run_until(200 * kStaysSecond);
    CHECK(device.outs() == 1);
    CHECK(device.scheduler().state(3) == SessionState::kResident);
  }
}

TEST_CASE("a large session that waits is passed by no small one, nor by newcomers while its place is made") {
  Alternation device("fair", kCopy);
  device.add(alternating(1, 500), 5 * kStaysMs);
  device.add(alternating(2, 500), 5 * kStaysMs);
  device.add(alternating(3, 1000), 5 * kStaysMs);
  for (SessionId id = 4; id <= 8; ++id) device.add(alternating(id, 400), 5 * kStaysMs);
  device.run_until(600 * kStaysSecond);
  CHECK(device.program(3).service_ns > 60 * kStaysSecond);
  for (SessionId id = 1; id <= 8; ++id) CHECK(device.program(id).outs > 5);

  Scheduler scheduler = gpushare::test::scheduling::make("fair", one_lane(1000));
  REQUIRE(scheduler.arrive(alternating(1, 500), 0).ok());
  REQUIRE(scheduler.arrive(alternating(2, 500), 0).ok());
  REQUIRE(scheduler.arrive(alternating(3, 1000), 0).ok());
  CHECK(scheduler.look_again_ns() == kStaysSecond);
  actions(scheduler);
  CHECK_FALSE(scheduler.pick(0, kStaysSecond));
  CHECK(actions(scheduler) == Strings{"out 1", "out 2"});
  scheduler.page_done(1, kStaysSecond + 1);
  REQUIRE(scheduler.arrive(alternating(4, 100), kStaysSecond + 2).ok());
  CHECK(actions(scheduler).empty());
  scheduler.page_done(2, kStaysSecond + 3);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:0", "admit 3@0"});
}

TEST_CASE("a stay that ends while an iteration is in flight is looked at when that has finished") {
  Scheduler scheduler = gpushare::test::scheduling::make("fair", one_lane(1000));
  REQUIRE(scheduler.arrive(alternating(1, 900), 0).ok());
  REQUIRE(scheduler.arrive(alternating(2, 900), 0).ok());
  CHECK(scheduler.look_again_ns() == kStaysSecond);
  scheduler.ready(1, 0);
  REQUIRE(scheduler.pick(0, 0) == 1);
  scheduler.dispatched(1, 0, 0);
  CHECK(scheduler.look_again_ns() == kUnknown);
  CHECK(scheduler.decision_holds_until(0, 0) <= kStaysSecond);
  actions(scheduler);
  scheduler.finished(1, 5 * kStaysSecond, 5 * kStaysSecond);
  CHECK(actions(scheduler) == Strings{"out 1"});
}

TEST_CASE("a place that is not wanted any more is not made") {
  Scheduler scheduler = gpushare::test::scheduling::make("fair", one_lane(1000));
  REQUIRE(scheduler.arrive(alternating(1, 900), 0).ok());
  scheduler.ready(1, 0);
  scheduler.dispatched(1, 0, 0);
  REQUIRE(scheduler.arrive(alternating(2, 900), 0).ok());
  actions(scheduler);
  scheduler.finished(1, 2 * kStaysSecond, 2 * kStaysSecond);
  CHECK(actions(scheduler) == Strings{"out 1"});
  scheduler.leave(2, 2 * kStaysSecond);
  scheduler.ready(1, 2 * kStaysSecond);
  CHECK(actions(scheduler).empty());
  scheduler.page_done(1, 3 * kStaysSecond);
  CHECK(actions(scheduler) == Strings{"close 0", "open 0:0", "in 1@0"});
  scheduler.page_done(1, 4 * kStaysSecond);
  // One in flight goes on where the other leaves before its end.
  REQUIRE(scheduler.pick(0, 4 * kStaysSecond) == 1);
  scheduler.dispatched(1, 0, 4 * kStaysSecond);
  scheduler.ready(1, 4 * kStaysSecond);
  REQUIRE(scheduler.arrive(alternating(3, 900), 4 * kStaysSecond).ok());
  scheduler.finished(1, 1000 * kStaysSecond, 1004 * kStaysSecond);
  actions(scheduler);
  CHECK(scheduler.state(1) == SessionState::kPagedOut);
}

TEST_CASE("a session that cannot go is asked again after another stay, not before") {
  Alternation device("fair", kCopy / 100);
  device.fails = true;
  device.add(alternating(1, 900), 5 * kStaysMs);
  device.add(alternating(2, 900), 5 * kStaysMs);
  device.run_until(20 * kStaysSecond);
  CHECK(device.outs() >= 18);
  CHECK(device.outs() <= 20);
  CHECK(device.program(1).service_ns > 19 * kStaysSecond);
  device.fails = false;
  device.run_until(60 * kStaysSecond);
  CHECK(device.program(2).service_ns > 15 * kStaysSecond);
}
