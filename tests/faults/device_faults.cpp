// Scripted faults of host and sim, through the executor: each kind at its n-th call, for every n that the
// scenario reaches.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "faults/scenario.hpp"
#include "faults/scripted_fault.hpp"
#include "support/sanitizers.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

struct Kind {
  const char* name;
  uint32_t fault;
  int32_t code;
  uint64_t at_least;  // calls of the scenario in the virtual layout
};
constexpr Kind kKinds[] = {
    {"device out of memory", GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY, GPUSHARE_DEVICE_OUT_OF_MEMORY, 10},
    {"map fails", GPUSHARE_FAULT_MAP_FAILS, GPUSHARE_DEVICE_OUT_OF_MEMORY, 10},
    {"stream create fails", GPUSHARE_FAULT_STREAM_CREATE_FAILS, GPUSHARE_UNKNOWN, 3},
    {"launch fails", GPUSHARE_FAULT_LAUNCH_FAILS, GPUSHARE_UNKNOWN, 4},
    {"host out of memory", GPUSHARE_FAULT_HOST_OUT_OF_MEMORY, GPUSHARE_HOST_OUT_OF_MEMORY, 2},
};

TEST_CASE("a fault at call n, for every n: a clear status, the bystander unharmed, nothing left") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  uint64_t n = 1;
  for (;; n += kFaultStep) {
    INFO(setup.device << ", layout " << static_cast<int>(setup.layout) << ": " << kind.name << " at call "
                      << n);
    REQUIRE(n < 10'000);
    Scenario scenario(setup.device, setup.layout);
    arm(scenario.runtime(), kind.fault, n);
    scenario.run();
    const bool fired = has_fired(scenario.runtime(), kind.fault, n);
    if (!fired && setup.layout == memory::Layout::kVirtual) {
      for (const base::Status& failure : scenario.failures()) UNSCOPED_INFO(failure.to_string());
      // Without a fault nothing fails; on a busy machine the wait for a paging copy may be cut short.
      CHECK(std::all_of(scenario.failures().begin(), scenario.failures().end(),
                        [](const base::Status& failure) { return failure.code() == GPUSHARE_TIMED_OUT; }));
    }
    scenario.verify(false);
    if (!fired) break;
  }
  INFO(setup.device << ", layout " << static_cast<int>(setup.layout) << ": " << kind.name);
  if (setup.layout == memory::Layout::kVirtual) CHECK(n > kind.at_least);
}

TEST_CASE("the device is lost at enqueue n, for every n: everybody is told, and it can be closed") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  uint64_t n = 1;
  for (;; n += kFaultStep) {
    INFO(setup.device << ", layout " << static_cast<int>(setup.layout) << ": lost at call " << n);
    REQUIRE(n < 1000);
    Scenario scenario(setup.device, setup.layout);
    arm(scenario.runtime(), GPUSHARE_FAULT_DEVICE_LOST, n);
    scenario.run();
    const bool lost = scenario.failed_with(GPUSHARE_DEVICE_LOST);
    if (!lost) arm(scenario.runtime(), GPUSHARE_FAULT_NONE, 0);
    scenario.verify(lost);
    if (!lost) break;
  }
  CHECK(n > 3);
}

TEST_CASE("a slow stream makes nothing fail and nothing wait for ever") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  constexpr uint64_t kStep = kSanitized ? 3 : 1;
  for (uint64_t n = 1; n < 8; n += kStep) {
    INFO(setup.device << ", layout " << static_cast<int>(setup.layout) << ": slow from call " << n);
    Scenario scenario(setup.device, setup.layout, 100'000'000'000);
    arm(scenario.runtime(), GPUSHARE_FAULT_SLOW_STREAM, n, 8);
    scenario.run();
    for (const base::Status& failure : scenario.failures()) UNSCOPED_INFO(failure.to_string());
    if (setup.layout == memory::Layout::kVirtual) CHECK(scenario.failures().empty());
    scenario.verify(false);
  }
}

// Opening is the part that the scenario finds done already.
TEST_CASE("opening a runtime on a device that is out of memory leaves nothing") {
  for (const char* spec : {"host?total_bytes=1048576", "sim?total_bytes=1048576"}) {
    executor::RuntimeOptions options;
    options.device = spec;
    CHECK_FALSE(executor::Runtime::open(std::move(options)).ok());
  }
}

}  // namespace
