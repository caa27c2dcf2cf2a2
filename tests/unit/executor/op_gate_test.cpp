// Gates of opportunistic sessions beside guaranteed ones, under each policy that lets sessions of both classes take turns.
// SPDX-License-Identifier: Apache-2.0
#include "support/gate.hpp"
#include "support/gated_session.hpp"
#include "support/random.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr uint64_t kOwn = 7, kMs = 1'000'000;

// The gate of session kOwn, driven without a runtime's sessions: iterations of guaranteed ones take a millisecond each.
struct OneGate {
  OneGate() {
    now_ns = 1000 * kMs;
    auto made = executor::LaunchGate::make(op, runtime->device(), kOwn, "own", 1, false, false);
    REQUIRE(made.ok());
    gate = *made;
  }
  ~OneGate() { gate->shut(); }
  void begin(uint64_t guaranteed) { op->began(guaranteed, 0); }
  void finish(uint64_t guaranteed) {
    now_ns += kMs;
    op->finished(guaranteed, kMs);
  }
  void iterate(uint64_t guaranteed, int times) {
    for (; times > 0; --times) {
      begin(guaranteed);
      finish(guaranteed);
    }
  }
  std::shared_ptr<executor::Runtime> runtime = open_runtime(options_of(kSetups[0]));
  std::shared_ptr<executor::OpGate> op = std::make_shared<executor::OpGate>([] { return now_ns.load(); });
  std::shared_ptr<executor::LaunchGate> gate;
  inline static std::atomic<uint64_t> now_ns{0};
};

// A device on virtual time that does one thing at a time: while a kernel of the opportunistic session runs, the guaranteed session stands
// still (`harm` 1) or goes on (0). So what an iteration takes alone is known exactly, and so is its excess.
struct SerialDevice {
  explicit SerialDevice(uint64_t the_iteration_ns, uint64_t the_kernel_ns)
      : iteration_ns(the_iteration_ns), kernel_ns(the_kernel_ns) {}
  // So many iterations, and then the guaranteed session stays away for so long.
  void run(uint64_t iterations, uint64_t away_ns = 0) {
    const uint64_t from_ns = OneGate::now_ns;
    uint64_t until_ns = 0;
    while (ended < iterations || OneGate::now_ns < until_ns) {
      if (begun == 0 && OneGate::now_ns >= back_at_ns && ended < iterations) begin();
      if (wants && (kernels_waits ? on_device == 0 : on_device < 64)) launch();
      OneGate::now_ns += tick_ns;
      const bool ran = on_device > 0;
      if (ran && (kernel_left -= std::min(kernel_left, tick_ns)) == 0) {
        f.gate->done(told_ns);
        done_ns += kernel_ns;
        kernel_left = --on_device > 0 ? kernel_ns : 0;
      }
      if (begun == 0 || (ran && harm)) continue;
      if ((left_ns -= std::min(left_ns, tick_ns)) > 0) continue;
      end();
      if (ended == iterations) until_ns = OneGate::now_ns + away_ns;
    }
    passed_ns = OneGate::now_ns - from_ns;
  }
  void begin() {
    f.begin(1);
    ++begun;
    if (!waits && begun == 1) f.begin(1);
    left_ns = next();
    since_ns = OneGate::now_ns;
  }
  void end() {
    const uint64_t took_ns = OneGate::now_ns - since_ns;
    f.op->finished(1, took_ns);
    total_ns += took_ns;
    alone_total_ns += next_ns;
    ++ended;
    begun = 0;
    back_at_ns = OneGate::now_ns + pause_ns;
    if (!waits) {  // another iteration is on the device already
      f.begin(1);
      begun = 1;
      left_ns = next();
      since_ns = OneGate::now_ns;
    }
  }
  // What the next iteration takes alone.
  uint64_t next() {
    const uint64_t spread = iteration_ns * spread_percent / 100;
    const uint64_t ns = iteration_ns - spread + (spread > 0 ? test::uniform(random, 0, 2 * spread) : 0);
    next_ns = std::max(tick_ns, ns / tick_ns * tick_ns);  // what a clock of ticks can tell
    return next_ns;
  }
  void launch() {
    if (!f.gate->enter(nullptr, told_ns, 0).ok()) return;
    if (on_device++ == 0) kernel_left = kernel_ns;
  }
  double excess() const { return static_cast<double>(total_ns) / static_cast<double>(alone_total_ns) - 1; }
  double share() const { return static_cast<double>(done_ns) / static_cast<double>(passed_ns); }

  OneGate f;
  const uint64_t iteration_ns, kernel_ns;
  uint64_t told_ns = kernel_ns;  // what the opportunistic session says that a kernel takes
  uint64_t pause_ns = 100'000;   // between iterations that the host waits for
  bool waits = true;             // the guaranteed session's host waits for each iteration
  bool kernels_waits = true;     // the opportunistic one's waits for each kernel
  bool harm = true, wants = true;
  uint64_t spread_percent = 0;  // an iteration takes so much more or less alone, at random
  test::Random random{test::seed()};
  const uint64_t tick_ns =
      std::max<uint64_t>(20'000, std::min({iteration_ns, kernel_ns, uint64_t{4 * kMs}}) / 8);
  uint64_t next_ns = 0, alone_total_ns = 0;
  uint64_t ended = 0, total_ns = 0, done_ns = 0, passed_ns = 0;
  uint64_t on_device = 0, kernel_left = 0, begun = 0, left_ns = 0, since_ns = 0, back_at_ns = 0;
};

TEST_CASE("the excess over alone stays within the target, whatever the iterations, kernels and loops") {
  int tried = 0;
  for (const uint64_t iteration_ns : {kMs, 10 * kMs, 100 * kMs})
    for (const uint64_t kernel_ns : {kMs / 5, 2 * kMs, 20 * kMs})
      for (const int loops : {0, 1, 2, 3}) {
        if (test::kThreadSanitizer && tried++ % 3 != 0) continue;
        SerialDevice device(iteration_ns, kernel_ns);
        device.waits = loops % 2 == 0;
        device.kernels_waits = loops / 2 == 0;
        device.run(std::max<uint64_t>(400, 8000 * kMs / iteration_ns));
        const auto known = device.f.gate->info().estimate;
        CAPTURE(iteration_ns, kernel_ns, loops, device.excess(), known.alone_ns, device.done_ns);
        CHECK(known.alone_ns < iteration_ns * 101 / 100);
        CHECK(device.excess() < 0.01 + 0.005);
        CHECK(device.share() > 0.001);
      }
}

TEST_CASE("the excess stays within the target where iterations differ at random") {
  INFO("GPUSHARE_TEST_SEED=" << test::seed());
  for (const uint64_t kernel_ns : {kMs / 5, 2 * kMs, 20 * kMs}) {
    SerialDevice device(10 * kMs, kernel_ns);
    device.spread_percent = 15;
    device.run(3000);
    CAPTURE(kernel_ns, device.share());
    CHECK(device.excess() < 0.01 + 0.005);
  }
}

TEST_CASE(
    "work that does no harm has most of the device, and all of it while the guaranteed session is away") {
  SerialDevice device(10 * kMs, 2 * kMs);
  device.harm = false;
  device.run(1000);
  CHECK(device.share() > 0.9);
  SerialDevice other(kMs, 2 * kMs);
  other.run(200);
  const uint64_t had_ns = other.done_ns;
  other.run(other.ended + 1, 4000 * kMs);
  CHECK(static_cast<double>(other.done_ns - had_ns) > 0.98 * static_cast<double>(other.passed_ns));
}

TEST_CASE("a gate names the guaranteed session with the least credit") {
  OneGate f;
  CHECK(f.gate->info().guaranteed_id == 0);
  f.iterate(1, 20);
  CHECK(f.gate->info().guaranteed_id == 1);
  CHECK(f.gate->info().estimate.credit > 0);
  f.iterate(2, 1);  // learned still: it has none
  f.iterate(3, 30);
  CHECK(f.gate->info().guaranteed_id == 2);
  CHECK(f.gate->info().estimate.credit == 0);
  f.op->left(2);
  CHECK(f.gate->info().guaranteed_id == 1);
  f.op->left(1);
  CHECK(f.gate->info().guaranteed_id == 3);
}

TEST_CASE("a gate that an iteration long nobody used leaves the device to whoever comes") {
  OneGate f;
  f.iterate(1, 20);
  f.begin(1);
  CHECK(f.gate->info().share == 1);  // nobody has asked yet
  (void)f.gate->enter(nullptr, 1000, 0);
  CHECK(f.gate->info().share < 1);
  f.finish(1);
  f.begin(1);
  CHECK(f.gate->info().share < 1);  // it was used in the iteration before
  f.finish(1);
  f.begin(1);
  CHECK(f.gate->info().share == 1);
}

TEST_CASE("a gate waits for the work in flight each time that its limit is reached") {
  OneGate f;
  f.iterate(1, 20);
  auto stream = f.runtime->create_stream(0);
  REQUIRE(stream.ok());
  const auto enter = [&] {  // as much as may be in flight between iterations
    return f.gate->enter(stream->get(), f.gate->info().in_flight_limit_ns, 0).code();
  };
  for (int round = 0; round < 8; ++round) {  // more often than a gate has events
    CAPTURE(round);
    Gate busy;
    REQUIRE(enter() == GPUSHARE_OK);
    REQUIRE_OK((*stream)->launch_host(Gate::block, &busy));
    CHECK(enter() == GPUSHARE_TIMED_OUT);
    CHECK(f.gate->info().in_flight_ns == f.gate->info().in_flight_limit_ns);
    busy.open();
    REQUIRE_OK((*stream)->synchronize());
  }
  REQUIRE_OK((*stream)->release());
}

TEST_CASE("half of the work that may be in flight goes on while a launch waits for the other half") {
  OneGate f;
  f.iterate(1, 20);
  auto stream = f.runtime->create_stream(0);
  REQUIRE(stream.ok());
  const uint64_t half_ns = f.gate->info().in_flight_limit_ns / 2;
  Gate first, second, third;
  const auto launch = [&](Gate& busy, uint64_t timeout_ns) {
    const int32_t code = f.gate->enter(stream->get(), half_ns, timeout_ns).code();
    if (code == GPUSHARE_OK) REQUIRE_OK((*stream)->launch_host(Gate::block, &busy));
    return code;
  };
  REQUIRE(launch(first, 0) == GPUSHARE_OK);
  REQUIRE(launch(second, 0) == GPUSHARE_OK);
  CHECK(launch(third, 0) == GPUSHARE_TIMED_OUT);
  first.open();
  CHECK(launch(third, GPUSHARE_NO_TIMEOUT) == GPUSHARE_OK);  // the second still runs
  second.open();
  third.open();
  REQUIRE_OK((*stream)->synchronize());
  REQUIRE_OK((*stream)->release());
}

TEST_CASE(
    "one launch waits behind another of any length once the guaranteed session has been away for long") {
  OneGate f;
  f.iterate(1, 20);  // of a millisecond each
  for (const uint64_t away_ms : {500, 900, 2000}) {
    CAPTURE(away_ms);
    OneGate::now_ns += away_ms * kMs;
    REQUIRE(f.gate->enter(nullptr, 4 * kMs, 0).ok());
    const bool waits_behind = f.gate->enter(nullptr, 4 * kMs, 0).ok();
    CHECK(waits_behind == (away_ms > 500));
    CHECK_FALSE(f.gate->enter(nullptr, 4 * kMs, 0).ok());  // two at most
    for (int i = 0; i < (waits_behind ? 2 : 1); ++i) f.gate->done(4 * kMs);
    OneGate::now_ns += kMs;
    CHECK(f.gate->enter(nullptr, 100 * kMs, 0).ok());
    CHECK_FALSE(f.gate->enter(nullptr, 100 * kMs, 0).ok());  // more than the target of the time away
    f.gate->done(100 * kMs);
  }
  f.iterate(1, 1);
  REQUIRE(f.gate->enter(nullptr, 4 * kMs, 0).ok());
  CHECK_FALSE(f.gate->enter(nullptr, 4 * kMs, 0).ok());
}

TEST_CASE(
    "gates of opportunistic sessions close while a guaranteed one is learned, and open when it pauses or "
    "leaves") {
  for (const char* policy : {"pack", "fair", "priority"}) {
    CAPTURE(policy);
    auto runtime = open_runtime(options_of({"host?total_bytes=134217728", memory::Layout::kVirtual}, policy));
    gates_close_and_open(*runtime);
    CHECK(runtime->check().empty());
  }
}

TEST_CASE("guaranteed sessions go on beside opportunistic ones that wait at their gates inside iterations") {
  for (const char* policy : {"pack", "fair", "priority"})
    for (const uint32_t lanes : {1U, 3U}) {
      CAPTURE(policy, lanes);
      auto options = options_of({"host?total_bytes=134217728", memory::Layout::kVirtual}, policy);
      options.max_lanes = lanes;
      auto runtime = open_runtime(std::move(options));
      guaranteed_go_on(*runtime);
      CHECK(runtime->check().empty());
    }
}

}  // namespace
