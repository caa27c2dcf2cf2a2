// Interference learned from iterations as they end, how it ages, and its table as text.
// SPDX-License-Identifier: Apache-2.0
#include "sched/measured_interference.hpp"

#include <memory>
#include <string>
#include <vector>

#include "sched/scheduler.hpp"
#include "support/catch.hpp"

namespace gpushare::sched {
namespace {

constexpr uint64_t kMs = 1'000'000;

// Sessions in lanes of their own whose iterations begin and end together.
struct Bench {
  MeasuredInterference measured;
  uint64_t now_ns = 0;

  void run(const std::vector<SessionId>& together, const std::vector<uint64_t>& device_ms) {
    uint64_t last_ns = now_ns;
    for (const SessionId id : together) measured.dispatched(id, static_cast<LaneId>(id), now_ns);
    for (size_t i = 0; i < together.size(); ++i) {
      const uint64_t end_ns = now_ns + device_ms[i] * kMs;
      last_ns = std::max(last_ns, end_ns);
      measured.finished(together[i], static_cast<LaneId>(together[i]), device_ms[i] * kMs, 1, end_ns);
    }
    now_ns = last_ns;
  }
  double slowdown(SessionId of, const std::vector<SessionId>& beside) const {
    return 1 / measured.rate(of, beside);
  }
};

Bench with(const std::vector<std::string>& names) {
  Bench bench;
  for (SessionId id = 1; id <= names.size(); ++id) {
    bench.measured.arrived(id, names[id - 1]);
    for (int i = 0; i < 3; ++i) bench.run({id}, {10 * id});
  }
  return bench;
}

}  // namespace

TEST_CASE("a pair's slowdown is the time beside over the time alone") {
  Bench bench = with({"a", "b"});
  CHECK_FALSE(bench.measured.wants_alone(1));
  CHECK(bench.slowdown(1, {2}) == 1);  // not known yet
  bench.run({1, 2}, {15, 15});         // 2 ends early: it takes 20 alone
  CHECK(bench.slowdown(1, {2}) == Approx(1.5));
  CHECK(bench.slowdown(2, {1}) == 1);  // noise: nothing runs faster beside another than alone
  CHECK(bench.measured.kind(1) != bench.measured.kind(2));
  bench.measured.arrived(3, "a");
  CHECK(bench.measured.kind(3) == bench.measured.kind(1));
  CHECK(bench.slowdown(3, {2}) == Approx(1.5));
  CHECK(bench.measured.rate(99, std::vector<SessionId>{1}) == 1);
}

TEST_CASE("the first iteration of a session teaches nothing, and the next two run alone") {
  Bench bench;
  bench.measured.arrived(1, "a");
  CHECK(bench.measured.wants_alone(1));
  bench.run({1}, {500});
  CHECK(bench.measured.entries().empty());
  bench.run({1}, {10});
  CHECK(bench.measured.wants_alone(1));
  bench.run({1}, {10});
  CHECK_FALSE(bench.measured.wants_alone(1));
  REQUIRE(bench.measured.entries().size() == 1);
  CHECK(bench.measured.entries()[0].value == 1e7);
  CHECK_FALSE(bench.measured.wants_alone(7));  // unknown
}

TEST_CASE("an iteration partly beside another tells the slowdown of that part") {
  Bench bench = with({"a", "b"});
  // 1 takes 10 alone. Beside 2 it is half as fast: 8 ms alone, then 4 ms beside 2 for the other 2.
  bench.measured.dispatched(1, 1, bench.now_ns);
  bench.measured.dispatched(2, 2, bench.now_ns + 8 * kMs);
  bench.measured.finished(1, 1, 12 * kMs, 1, bench.now_ns + 12 * kMs);
  CHECK(bench.slowdown(1, {2}) == Approx(2));
}

TEST_CASE("iterations beside several sessions correct each pair by its part") {
  Bench bench = with({"a", "b", "c"});
  for (int i = 0; i < 3; ++i) bench.run({1, 2}, {12, 40});  // b adds 0.2
  for (int i = 0; i < 40; ++i) bench.run({1, 2, 3}, {17, 40, 60});
  CHECK(bench.slowdown(1, {2, 3}) == Approx(1.7).epsilon(0.02));
  CHECK(bench.slowdown(1, {2}) + bench.slowdown(1, {3}) == Approx(2.7).epsilon(0.02));
}

TEST_CASE("what was noticed late, was given back, or is of unknown sessions teaches nothing of pairs") {
  Bench bench = with({"a", "b"});
  bench.measured.dispatched(1, 1, bench.now_ns);
  bench.measured.dispatched(2, 2, bench.now_ns);
  bench.measured.finished(1, 1, 15 * kMs, 1, bench.now_ns + 100 * kMs);
  CHECK(bench.slowdown(1, {2}) == 1);
  bench.measured.dispatched(1, 1, bench.now_ns + 100 * kMs);
  bench.measured.finished(1, 1, 0, 0, bench.now_ns + 115 * kMs);
  bench.measured.finished(9, 1, 5, 1, bench.now_ns + 115 * kMs);
  bench.measured.finished(1, 77, 5, 1, bench.now_ns + 115 * kMs);
  CHECK(bench.slowdown(1, {2}) == 1);
  bench.measured.left(2);
  bench.measured.left(2);
  CHECK(bench.slowdown(1, {2}) == 1);
}

TEST_CASE("knowledge ages: it is measured again after half-lives by its confidence") {
  Bench bench = with({"a", "b"});
  bench.run({1, 2}, {15, 20});
  CHECK(bench.slowdown(1, {2}) == Approx(1.5));
  const auto confidence = [&] { return bench.measured.entries()[1].confidence; };
  CHECK(confidence() == Approx(1).epsilon(0.01));
  bench.now_ns += MeasuredInterference::kHalfLifeNs;
  bench.run({2}, {20});
  CHECK(confidence() == Approx(0.5).epsilon(0.01));
  CHECK(bench.slowdown(1, {2}) == 1);  // to be tried again
  CHECK_FALSE(bench.measured.wants_alone(1));
  bench.now_ns += MeasuredInterference::kHalfLifeNs;
  bench.run({2}, {20});
  CHECK(bench.measured.wants_alone(1));
  for (int i = 0; i < 20; ++i) bench.run({1}, {30});  // it has become slower by itself
  CHECK(bench.measured.entries()[0].value > 2.9e7);
}

TEST_CASE("the table goes to text and back, with ages") {
  Bench bench = with({"a\tb%", "c"});
  bench.measured.arrived(3, "");
  for (int i = 0; i < 3; ++i) bench.run({3}, {7});
  bench.run({1, 2}, {15, 30});
  const std::string text = bench.measured.text(1'000'000);
  CHECK(text.find("gpushare interference 1\nalone\ta%09b%25\t10000000\t") == 0);
  MeasuredInterference other;
  REQUIRE(other.read(text, "table", 1'000'600).ok());
  const auto entries = other.entries();
  REQUIRE(entries.size() == 4);  // not of the session without a name
  CHECK(entries[0].name == "a\tb%");
  CHECK(entries[1].beside == "c");
  CHECK(entries[1].value == Approx(1.5));
  CHECK(entries[1].confidence == Approx(0.5).epsilon(0.01));  // 600 s are a half-life
  CHECK(entries[1].age_s == Approx(600).epsilon(0.01));
  CHECK(entries[3].value == Approx(3));  // 15 of 30 ms beside the other, for a quarter of the work
}

TEST_CASE("a correction below nothing is no slowdown in the table either") {
  Bench bench = with({"a", "b", "c"});
  bench.run({1, 3}, {15, 15});
  bench.run({1, 2, 3}, {10, 10, 10});  // neither slows a this time, so b is corrected to less than nothing
  size_t pairs = 0;
  for (const auto& entry : bench.measured.entries()) {
    if (entry.beside.empty()) continue;
    ++pairs;
    CHECK(entry.value >= 1);
  }
  CHECK(pairs > 2);
  MeasuredInterference loaded;
  CHECK(loaded.read(bench.measured.text(0), "table", 0).ok());
}

TEST_CASE("a malformed table is refused with file, line and what is allowed") {
  const std::string head = "gpushare interference 1\n";
  MeasuredInterference measured;
  const auto refused = [&](const std::string& text) {
    const base::Status status = measured.read(text, "t.txt", 100);
    CHECK(status.code() == GPUSHARE_MALFORMED_INPUT);
    CHECK(measured.entries().empty());
    return status.message();
  };
  CHECK(refused("").find("t.txt:1: the first line is ''") != std::string::npos);
  CHECK(refused("gpushare interference 2\n").find("expected 'gpushare interference 1'") != std::string::npos);
  CHECK(refused(head + "alone\ta\t5\t1\t90\nalone\tb\t5\t1\n").find("t.txt:3: expected 'alone'") !=
        std::string::npos);
  CHECK(refused(head + "alone\t\t5\t1\t90").find("a name is empty") != std::string::npos);
  CHECK(refused(head + "alone\ta%2\t5\t1\t90").find("hexadecimal") != std::string::npos);
  CHECK(refused(head + "alone\ta\tnan\t1\t90").find("value is 'nan'") != std::string::npos);
  CHECK(refused(head + "alone\ta\t0\t1\t90").find("0 ns") != std::string::npos);
  CHECK(refused(head + "pair\ta\tb\t0.5\t1\t90").find("slowdown is 0.5") != std::string::npos);
  CHECK(refused(head + "pair\ta\tb\t2\t-1\t90").find("iterations is '-1'") != std::string::npos);
  CHECK(refused(head + "pair\ta\tb\t2\t1\t9x").find("time is '9x'") != std::string::npos);
  std::string many = head;
  for (size_t i = 0; i <= MeasuredInterference::kMostKinds; ++i)
    many += "alone\tn" + std::to_string(i) + "\t5\t1\t90\n";
  CHECK(refused(many).find("more than 256 names") != std::string::npos);
  CHECK(measured.read(head, "t.txt", 100).ok());
}

TEST_CASE("names used longest ago are forgotten") {
  Bench bench;
  for (SessionId id = 1; id <= MeasuredInterference::kMostKinds + 1; ++id) {
    bench.measured.arrived(id, "n" + std::to_string(id));
    for (int i = 0; i < 3; ++i) bench.run({id}, {1});
    bench.measured.left(id);
  }
  CHECK(bench.measured.entries().size() == MeasuredInterference::kMostKinds);
  bench.measured.arrived(1000, "n1");
  CHECK(bench.measured.wants_alone(1000));
}

namespace {

struct Lanes {
  explicit Lanes(bool measures = true) : scheduler(options(measures), std::move(*make_policy("pack"))) {}
  static SchedulerOptions options(bool measures) {
    SchedulerOptions options;
    options.capacity_bytes = 1000;
    options.measures = measures;
    return options;
  }
  void open(SessionId id, const char* name, uint64_t now_ns, SessionClass cls = SessionClass::kGuaranteed) {
    SessionSpec spec;
    spec.cls = cls;
    spec.id = id;
    spec.name = name;
    spec.persistent_bytes = spec.ephemeral_bytes = 10;
    REQUIRE(scheduler.arrive(spec, now_ns).ok());
  }
  bool picks(SessionId id, uint64_t now_ns) {
    return scheduler.pick(scheduler.lane_of(id), now_ns) == std::optional<SessionId>(id);
  }
  void begin(SessionId id, uint64_t now_ns) {
    scheduler.ready(id, now_ns);
    REQUIRE(picks(id, now_ns));
    scheduler.dispatched(id, scheduler.lane_of(id), now_ns);
  }
  Scheduler scheduler;
};

}  // namespace

TEST_CASE("pack runs a session alone until its time is known, and keeps apart what does not gain") {
  Lanes lanes;
  Scheduler& scheduler = lanes.scheduler;
  lanes.open(1, "a", 0);
  lanes.open(2, "b", 0);
  uint64_t now = 0;
  // Both want to run all the time. 1 is learned first, then 2.
  for (const SessionId id : {SessionId{1}, SessionId{2}})
    for (int i = 0; i < 3; ++i) {
      scheduler.ready(1, now);
      scheduler.ready(2, now);
      CHECK_FALSE(lanes.picks(3 - id, now));
      lanes.begin(id, now);
      CHECK_FALSE(lanes.picks(3 - id, now));
      CHECK(scheduler.look_again_ns() > now);
      now += 10 * kMs;
      scheduler.finished(id, 10 * kMs, now);
    }
  // The pair is unknown: it is tried, and the policy finds that it must take turns.
  lanes.begin(1, now);
  lanes.begin(2, now);
  now += 25 * kMs;
  scheduler.finished(1, 25 * kMs, now);
  scheduler.finished(2, 25 * kMs, now);
  CHECK(1 / scheduler.measured()->rate(1, std::vector<SessionId>{2}) == Approx(2.5));
  now += 1'000 * kMs;
  scheduler.ready(2, now);
  lanes.begin(1, now);
  CHECK_FALSE(lanes.picks(2, now));
  // The oldest is idle: after a moment the other runs. An iteration held open by its host is not waited for either.
  now += 10 * kMs;
  scheduler.finished(1, 10 * kMs, now);
  CHECK_FALSE(lanes.picks(2, now));
  const uint64_t again = scheduler.look_again_ns();
  REQUIRE(again < now + 10 * kMs);
  CHECK(lanes.picks(2, again));
  lanes.begin(1, again);
  CHECK_FALSE(lanes.picks(2, again + 1));
  REQUIRE(scheduler.look_again_ns() < again + 100 * kMs);
  CHECK(lanes.picks(2, scheduler.look_again_ns()));
  CHECK(scheduler.check().empty());
}

TEST_CASE("under pack no guaranteed session waits for opportunistic ones, whatever they do to it") {
  Lanes lanes;
  Scheduler& scheduler = lanes.scheduler;
  lanes.open(1, "spare", 0, SessionClass::kOpportunistic);
  uint64_t now = 0;
  for (int i = 0; i < 3; ++i) {
    lanes.begin(1, now);
    now += 10 * kMs;
    scheduler.finished(1, 10 * kMs, now);
  }
  lanes.begin(1, now);
  lanes.open(2, "sure", now);
  // Its first iteration, beside the one under way; the next two are alone.
  for (int i = 0; i < 3; ++i) {
    lanes.begin(2, now);
    now += 10 * kMs;
    scheduler.finished(2, 10 * kMs, now);
    if (i == 0) scheduler.finished(1, 10 * kMs, now);
    scheduler.ready(2, now);
    scheduler.ready(1, now);
    CHECK(lanes.picks(1, now) == (i == 2));
  }
  // Each takes 2.5 times as long beside the other, so they take turns, and they are the guaranteed one's.
  lanes.begin(1, now);
  lanes.begin(2, now);
  now += 25 * kMs;
  scheduler.finished(1, 25 * kMs, now);
  scheduler.finished(2, 25 * kMs, now);
  now += 1'000 * kMs;
  for (int i = 0; i < 3; ++i) {
    scheduler.ready(1, now);
    lanes.begin(2, now);
    CHECK_FALSE(lanes.picks(1, now));
    now += 10 * kMs;
    scheduler.finished(2, 10 * kMs, now);
  }
  // While it pauses the other one runs, and is not waited for.
  now += 100 * kMs;
  lanes.begin(1, now);
  lanes.begin(2, now + kMs);
}

TEST_CASE("iterations that a gate held up teach nothing") {
  Bench bench = with({"a", "b"});
  bench.measured.held_up(2);
  bench.run({1, 2}, {20, 40});
  bench.measured.held_up(2);
  bench.run({1, 2}, {15, 60});
  CHECK(bench.slowdown(2, {1}) == 1);
  CHECK(bench.slowdown(1, {2}) > 1);  // it was not held up itself
  bench.run({2}, {60});               // may have been under way behind it
  bench.run({1, 2}, {30, 30});
  CHECK(bench.slowdown(2, {1}) == Approx(1.5));
}

TEST_CASE("pack measures nothing unless asked to, and any policy may be measured") {
  CHECK(Lanes(false).scheduler.measured() == nullptr);
  Scheduler scheduler(Lanes::options(true), std::move(*make_policy("fair")));
  CHECK(scheduler.measured() == nullptr);
  scheduler.set_policy(std::move(*make_policy("pack")), 0);
  CHECK(scheduler.measured() != nullptr);
  Scheduler other(Lanes::options(false), std::move(*make_policy("fair")));
  const auto measured = other.measure();
  CHECK(measured != nullptr);
  CHECK(other.measured() == measured);
}

}  // namespace gpushare::sched
