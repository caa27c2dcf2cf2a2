// The daemon's side of gates, with the gate of a session at the other end of a slot: on virtual time, without a socket.
// SPDX-License-Identifier: Apache-2.0
#include "daemon/gates.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <deque>
#include <memory>
#include <thread>

#include "executor/op_gate.hpp"
#include "support/executor_fixture.hpp"
#include "support/shared_service.hpp"
#include "support/status_checks.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr uint64_t kSure = 1, kOwn = 7, kOther = 8, kUs = 1'000, kMs = 1'000'000, kS = 1'000'000'000;

// An opportunistic session of one process beside a guaranteed one of another, whose messages the daemon takes up `late_ns` after
// they were sent.
struct Between {
  explicit Between(uint64_t longest_ns = 10 * kS) : gates(longest_ns) {
    now_ns = 1000 * kS;
    link->set(slot);
    auto made = executor::LaunchGate::make(op, runtime->device(), kOwn, "own", 1, false, false, link);
    REQUIRE(made.ok());
    gate = *made;
    gates.open(kOwn, *slot, 1, now_ns);
  }
  ~Between() {
    gate->end();
    gate->shut();
  }
  bool lets_in(uint64_t ns) const { return gate->enter(nullptr, ns, 0).ok(); }
  // So many iterations of a millisecond, a tenth of one between them, and the daemon hears of each at once.
  void iterate(int times) {
    for (; times > 0; --times) {
      gates.began(kSure, 0, now_ns, now_ns);
      now_ns += kMs;
      gates.ended(kSure, kMs, now_ns, now_ns);
      now_ns += kMs / 10;
      CHECK(gates.check().empty());
    }
  }
  base::GateTerms terms() const {
    base::GateTerms out;
    REQUIRE(slot->read(&out));
    return out;
  }
  // Time passes as the daemon asks for it, until the gate lets work in.
  void until_let_in() {
    while (!lets_in(kUs)) {
      const uint64_t next_ns = gates.tick(now_ns);
      REQUIRE(next_ns < UINT64_MAX);
      now_ns += std::clamp<uint64_t>(next_ns, kUs, 100 * kMs);
    }
  }
  daemon::Gates gates;
  std::shared_ptr<base::GateSlot> slot = std::make_shared<base::GateSlot>();
  std::shared_ptr<sched::GateLink> link = std::make_shared<sched::GateLink>();
  std::shared_ptr<executor::Runtime> runtime = open_runtime(options_of(kSetups[0]));
  std::shared_ptr<executor::OpGate> op = std::make_shared<executor::OpGate>([] { return now_ns.load(); });
  std::shared_ptr<executor::LaunchGate> gate;
  inline static std::atomic<uint64_t> now_ns{0};
};

// A device that does one thing at a time: while a kernel of the opportunistic session runs, the guaranteed one stands still.
struct SerialDevice {
  SerialDevice(uint64_t the_iteration_ns, uint64_t the_kernel_ns, uint64_t the_late_ns)
      : iteration_ns(the_iteration_ns), kernel_ns(the_kernel_ns), late_ns(the_late_ns) {}
  void run(uint64_t iterations) {
    const uint64_t from_ns = Between::now_ns;
    uint64_t back_at_ns = from_ns, left_ns = 0, kernel_left_ns = 0, since_ns = 0;
    for (uint64_t ended = 0; ended < iterations; Between::now_ns += tick_ns) {
      const uint64_t now_ns = Between::now_ns;
      hear(now_ns);
      if (left_ns == 0 && now_ns >= back_at_ns) {
        said.push_back({now_ns, 0});
        left_ns = iteration_ns;
        since_ns = now_ns;
        hear(now_ns);
      }
      if (kernel_left_ns == 0 && f.lets_in(kernel_ns)) kernel_left_ns = kernel_ns;
      const uint64_t after_ns = now_ns + tick_ns;
      if (kernel_left_ns > 0) {
        if ((kernel_left_ns -= std::min(kernel_left_ns, tick_ns)) > 0) continue;
        f.gate->done(kernel_ns);
        done_ns += kernel_ns;
      } else if (left_ns > 0 && (left_ns -= std::min(left_ns, tick_ns)) == 0) {
        said.push_back({after_ns, after_ns - since_ns});
        total_ns += after_ns - since_ns;
        alone_ns += iteration_ns;
        back_at_ns = after_ns + pause_ns;
        ++ended;
      }
    }
    passed_ns = Between::now_ns - from_ns;
  }
  void hear(uint64_t now_ns) {
    for (; !said.empty() && said.front().at_ns + late_ns <= now_ns; said.pop_front()) {
      const auto [at_ns, took_ns] = said.front();
      if (took_ns == 0)
        f.gates.began(kSure, 0, at_ns, now_ns);
      else
        f.gates.ended(kSure, took_ns, at_ns, now_ns);
    }
  }
  double excess() const { return static_cast<double>(total_ns) / static_cast<double>(alone_ns) - 1; }
  double share() const { return static_cast<double>(done_ns) / static_cast<double>(passed_ns); }
  struct Said {
    uint64_t at_ns, took_ns;  // 0: it began
  };
  Between f;
  const uint64_t iteration_ns, kernel_ns, late_ns;
  const uint64_t pause_ns = 100 * kUs;
  std::deque<Said> said;
  const uint64_t tick_ns = std::max(20 * kUs, std::min({iteration_ns, kernel_ns, 4 * kMs}) / 8);
  uint64_t total_ns = 0, alone_ns = 0, done_ns = 0, passed_ns = 0;
};

TEST_CASE("between processes the excess over alone stays within the target") {
  for (const uint64_t iteration_ns : {kMs, 10 * kMs, 100 * kMs})
    for (const uint64_t kernel_ns : {kMs / 5, 2 * kMs, 20 * kMs})
      for (const uint64_t late_ns : {uint64_t{0}, 60 * kUs}) {
        if (iteration_ns / kernel_ns > 100) continue;  // many steps, and nothing new
        SerialDevice device(iteration_ns, kernel_ns, late_ns);
        device.run(std::max<uint64_t>(400, 4000 * kMs / iteration_ns));
        const auto known = device.f.gate->info().estimate;
        CAPTURE(iteration_ns, kernel_ns, late_ns, device.excess(), known.alone_ns, device.done_ns);
        CHECK(known.alone_ns < iteration_ns * 101 / 100);
        CHECK(device.excess() < 0.01 + 0.005);
        CHECK(device.share() > 0.001);
        CHECK(device.f.gates.check().empty());
      }
}

TEST_CASE("figures of gates between processes", "[.figures]") {
  std::printf(
      "| iteration, ms | kernel, ms | message late, us | excess, %% | its work, %% of the device "
      "|\n|---|---|---|---|---|\n");
  for (const uint64_t iteration_ns : {kMs, 10 * kMs, 100 * kMs})
    for (const uint64_t kernel_ns : {kMs / 5, 2 * kMs, 20 * kMs})
      for (const uint64_t late_ns : {uint64_t{0}, 60 * kUs}) {
        SerialDevice device(iteration_ns, kernel_ns, late_ns);
        device.run(std::max<uint64_t>(1000, 20'000 * kMs / iteration_ns));
        std::printf("| %g | %g | %g | %.2f | %.2f |\n", static_cast<double>(iteration_ns) * 1e-6,
                    static_cast<double>(kernel_ns) * 1e-6, static_cast<double>(late_ns) * 1e-3,
                    100 * device.excess(), 100 * device.share());
      }
}

TEST_CASE("a gate of another process is open until a guaranteed session is known, and after it has left") {
  Between f;
  CHECK(f.gate->info().open);
  CHECK(f.lets_in(kS));
  f.gate->done(kS);
  CHECK(f.gates.tick(Between::now_ns) == UINT64_MAX);
  f.gates.began(kSure, 0.25, Between::now_ns, Between::now_ns);
  CHECK_FALSE(f.gate->info().open);
  CHECK(f.gate->info().guaranteed_id == kSure);
  CHECK(f.gate->info().estimate.target == 0.25);
  CHECK_FALSE(f.lets_in(1));
  f.gates.left(kSure, Between::now_ns);
  CHECK(f.gate->info().open);
  CHECK(f.lets_in(kS));
}

TEST_CASE("work that came and went during an iteration is not taken for nothing") {
  Between f;
  for (int i = 0; i < 3; ++i) f.iterate(1);
  CHECK(f.terms().learning == 1);
  // The begin is heard of late: the launch was let in before, and is done before.
  const uint64_t began_ns = Between::now_ns;
  Between::now_ns += kMs;
  REQUIRE(f.lets_in(kUs));
  f.gate->done(kUs);
  f.gates.began(kSure, 0, began_ns, Between::now_ns);
  f.gates.ended(kSure, 5 * kMs, Between::now_ns, Between::now_ns);
  CHECK(f.terms().learning == 1);
  f.iterate(2);
  CHECK(f.terms().learning == 0);
  CHECK(f.terms().alone_ns == kMs);
}

TEST_CASE("launches that do not ask count as being on the device until they ask and are done") {
  Between f;
  f.gate->under_way(true);
  f.gate->set_asks(false);
  CHECK(f.gate->closed() == 0);
  CHECK(f.slot->unseen());
  f.iterate(8);  // the process has not heard of it
  CHECK(f.gates.asks());
  CHECK(f.terms().alone_ns == 0);
  f.gate->set_asks(true);
  CHECK(f.gate->closed() == 1);
  CHECK_FALSE(f.slot->unseen());
  f.iterate(8);  // its iteration has not ended
  CHECK(f.terms().alone_ns == 0);
  f.gate->under_way(false);
  f.iterate(8);
  CHECK(f.terms().learning == 0);
  CHECK(f.terms().alone_ns == kMs);
}

TEST_CASE("work whose time nobody has estimated is there until it is done") {
  Between f;
  REQUIRE(f.lets_in(0));
  CHECK(f.slot->busy_until_ns() == base::GateSlot::kBusy);
  f.gate->done(0);
  CHECK(f.slot->busy_until_ns() == Between::now_ns);
  CHECK(f.gate->info().in_flight_ns == 0);
  REQUIRE(f.lets_in(UINT64_MAX));
  REQUIRE(f.lets_in(UINT64_MAX));
  CHECK(f.gate->info().in_flight_ns == UINT64_MAX);
  f.gate->done(UINT64_MAX);
}

TEST_CASE("a process that does not hear that its launches must ask keeps nobody from being measured") {
  Between f;
  f.gate->set_asks(false);
  const uint64_t since_ns = Between::now_ns;
  while (Between::now_ns - since_ns < 2 * kS) f.iterate(1);
  CHECK(f.terms().learning == 0);
  CHECK(f.terms().alone_ns == kMs);
}

TEST_CASE("a launch that waits goes by the slot of the next daemon, and a session that has ended by none") {
  Between f;
  f.gates.began(kSure, 0, Between::now_ns, Between::now_ns);
  base::Status entered(GPUSHARE_UNKNOWN, "");
  std::thread waits([&] { entered = f.gate->enter(nullptr, kUs, GPUSHARE_NO_TIMEOUT); });
  eventually([&] { return f.gate->info().waits == 1; });
  const auto next = std::make_shared<base::GateSlot>();
  f.link->set(next);
  waits.join();
  CHECK_OK(entered);
  CHECK(next->used_ns() == kUs);
  CHECK(next->busy_until_ns() == base::GateSlot::kBusy);
  f.gate->end();
  CHECK_FALSE(f.lets_in(kUs));
  f.gate->shut();
  next->reset();  // for another session
  f.gate->done(kUs);
  f.gate->set_asks(false);
  (void)f.gate->info();
  CHECK(f.gate->closed() == 1);
  CHECK(next->busy_until_ns() == 0);
  CHECK_FALSE(next->unseen());
}

TEST_CASE("gates that open and go while no guaranteed session is known do nothing to the others") {
  Between f;
  base::GateSlot other;
  base::GateTerms said;
  said.guaranteed_id = 5;
  f.slot->publish(said);
  other.publish(said);
  f.gates.open(kOther, other, 1, Between::now_ns);
  CHECK(f.terms().guaranteed_id == 5);
  base::GateTerms terms;
  REQUIRE(other.read(&terms));
  CHECK(terms.guaranteed_id == 0);  // its own terms are new
  f.gates.left(kOther, Between::now_ns);
  CHECK(f.terms().guaranteed_id == 5);
  f.gates.began(kSure, 0, Between::now_ns, Between::now_ns);
  CHECK(f.terms().guaranteed_id == kSure);
  f.gates.left(kSure, Between::now_ns);
  CHECK(f.terms().guaranteed_id == 0);
}

TEST_CASE("a session that changes its class is what it was no more") {
  Between f;
  f.gates.set_class(kOwn, false, Between::now_ns);
  CHECK(f.gates.has(kOwn));
  f.gates.began(kSure, 0, Between::now_ns, Between::now_ns);
  f.gates.set_class(kSure, true, Between::now_ns);
  CHECK_FALSE(f.lets_in(kUs));
  f.gates.set_class(kSure, false, Between::now_ns);
  CHECK_FALSE(f.gates.asks());
  CHECK(f.lets_in(kUs));
  f.gates.ended(kSure, kMs, Between::now_ns, Between::now_ns);
  f.gates.set_class(kOwn, true, Between::now_ns);
  CHECK_FALSE(f.gates.any());
  CHECK(f.gates.check().empty());
}

TEST_CASE("a process that stops in an iteration keeps nobody out for long") {
  Between f(10 * kS);
  // Its usual time is not known: the longest that is allowed.
  uint64_t began_ns = Between::now_ns;
  f.gates.began(kSure, 0, began_ns, began_ns);
  CHECK_FALSE(f.lets_in(kUs));
  f.until_let_in();
  CHECK(Between::now_ns - began_ns >= 10 * kS);
  CHECK(Between::now_ns - began_ns < 11 * kS);
  f.gate->done(kUs);
  f.gates.ended(kSure, 0, Between::now_ns, Between::now_ns);  // it goes on, and is one like any other
  f.iterate(8);
  CHECK(f.terms().learning == 0);
  // Its usual time is a millisecond: a second. Iterations that share the device come first.
  for (;;) {
    f.gate->enter(nullptr, 0, 0).ok();  // somebody wants it
    began_ns = Between::now_ns;
    f.gates.began(kSure, 0, began_ns, began_ns);
    if (f.terms().share == 0) break;
    Between::now_ns += kMs;
    f.gates.ended(kSure, kMs, Between::now_ns, Between::now_ns);
  }
  CHECK_FALSE(f.lets_in(kUs));
  f.until_let_in();
  CHECK(Between::now_ns - began_ns >= kS);
  CHECK(Between::now_ns - began_ns < 2 * kS);
}

TEST_CASE("iterations after one that took too long count again, also if some are always in flight") {
  Between f;
  const auto began = [&] { f.gates.began(kSure, 0, Between::now_ns, Between::now_ns); };
  const auto ended = [&] { f.gates.ended(kSure, kMs, Between::now_ns, Between::now_ns); };
  began();
  began();
  f.until_let_in();
  f.gate->done(kUs);
  began();
  ended();
  CHECK(f.lets_in(kUs));  // one that the device was to do in that time is still there
  f.gate->done(kUs);
  ended();
  CHECK_FALSE(f.lets_in(kUs));
  for (int i = 0; i < 8; ++i) {
    began();
    Between::now_ns += kMs;
    ended();
    CHECK(f.gates.check().empty());
  }
  CHECK(f.terms().learning == 0);
  CHECK(f.terms().alone_ns == kMs);
  ended();
  for (int i = 0; i < 8; ++i) f.iterate(1);
  CHECK(f.terms().alone_ns == kMs);
}

TEST_CASE("a session that loses its turn keeps nobody out") {
  Between f;
  f.gates.began(kSure, 0, Between::now_ns, Between::now_ns);
  CHECK_FALSE(f.lets_in(kUs));
  f.gates.lapse(kSure, Between::now_ns);
  CHECK(f.lets_in(kUs));
  f.gate->done(kUs);
  f.gates.began(kSure, 0, Between::now_ns, Between::now_ns);  // nor by an iteration before that one has ended
  CHECK(f.lets_in(kUs));
}

TEST_CASE("the gate goes by no terms of a daemon that does not move") {
  Between f(10 * kS);
  f.gates.began(kSure, 0, Between::now_ns, Between::now_ns);
  CHECK_FALSE(f.lets_in(kUs));
  Between::now_ns += 10 * kS;
  CHECK(f.lets_in(kUs));
}

TEST_CASE("a process that lies about its work keeps nobody from being measured, nor others out") {
  for (const bool comes_and_goes : {false, true}) {
    CAPTURE(comes_and_goes);
    Between f(10 * kS);
    base::GateSlot liar;
    f.gates.open(kOther, liar, 1, Between::now_ns);
    liar.bell().expect(true);
    for (int i = 0; i < 20'000 && f.terms().learning == 1; ++i) {
      f.gates.began(kSure, 0, Between::now_ns, Between::now_ns);
      liar.set_busy(true, Between::now_ns);
      liar.let_in(comes_and_goes ? 100 * kS : 0);
      liar.count_entry();
      Between::now_ns += kMs;
      liar.set_busy(!comes_and_goes, Between::now_ns);
      f.gates.ended(kSure, kMs, Between::now_ns, Between::now_ns);
      Between::now_ns += kMs / 10;
    }
    CHECK(f.terms().learning == 0);
    CHECK(f.terms().alone_ns == kMs);
    CHECK(f.gates.check().empty());
  }
}

TEST_CASE("device time that cannot have passed teaches nothing") {
  Between f;
  for (int i = 0; i < 100; ++i) {
    f.gates.began(kSure, 1e300, Between::now_ns + kS, Between::now_ns);
    Between::now_ns += kMs;
    f.gates.ended(kSure, UINT64_MAX - 1, 0, Between::now_ns);
    CHECK(f.gates.check().empty());
  }
  CHECK(f.terms().alone_ns == 0);
  for (int i = 0; i < 5'000; ++i) f.gates.began(kSure, 0, 0, Between::now_ns);  // many are one
  for (int i = 0; i < 10'000; ++i) f.gates.ended(kSure, 0, 0, Between::now_ns);
  CHECK(f.lets_in(kUs));
}

}  // namespace
