// Gates of opportunistic sessions beside guaranteed ones, under each policy that lets sessions of both classes take turns.
// SPDX-License-Identifier: Apache-2.0
#include "support/gate.hpp"
#include "support/gated_session.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

constexpr uint64_t kOwn = 7, kMs = 1'000'000;

// The gate of session kOwn, driven without a runtime's sessions: iterations of guaranteed ones take a millisecond each.
struct OneGate {
  OneGate() {
    auto made = executor::LaunchGate::make(op, runtime->device(), kOwn, "own", 1, false);
    REQUIRE(made.ok());
    gate = *made;
  }
  ~OneGate() { gate->shut(); }
  void begin(uint64_t guaranteed) { op->began(guaranteed, 0, now_ns); }
  void finish(uint64_t guaranteed) { op->finished(guaranteed, kMs, now_ns += kMs); }
  void iterate(uint64_t guaranteed, int times) {
    for (; times > 0; --times) {
      begin(guaranteed);
      finish(guaranteed);
    }
  }
  std::shared_ptr<executor::Runtime> runtime = open_runtime(options_of(kSetups[0]));
  std::shared_ptr<executor::OpGate> op = std::make_shared<executor::OpGate>();
  std::shared_ptr<executor::LaunchGate> gate;
  uint64_t now_ns = 0;
};

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
