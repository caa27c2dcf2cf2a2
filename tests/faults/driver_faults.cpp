// Faults of the driver under the cuda backend, through the executor, on the stand-in for libcuda: each entry
// point refused at its n-th call, for every n that the scenario reaches, and contexts poisoned by work. The
// stand-in ends the process if anything then misuses the driver.
// SPDX-License-Identifier: Apache-2.0
#include "faults/scenario.hpp"
#include "standin.h"
#include "support/sanitizers.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

const std::string kDevice = std::string("cuda?driver=") + GPUSHARE_CUDA_STANDIN;
constexpr memory::Layout kLayouts[] = {memory::Layout::kVirtual, memory::Layout::kContiguous};

struct Call {
  const char* name;
  int result;  // CUresult
};
// 2 out of memory, 999 unknown.
constexpr Call kCalls[] = {
    {"cuMemCreate", 2},         {"cuMemMap", 2},       {"cuMemSetAccess", 2},
    {"cuMemAddressReserve", 2}, {"cuStreamCreate", 2}, {"cuStreamCreateWithPriority", 999},
    {"cuEventCreate", 2},       {"cuMemHostAlloc", 2}, {"cuLaunchHostFunc", 999},
    {"cuMemsetD8Async", 999},   {"cuEventRecord", 2},  {"cuStreamWaitEvent", 2},
};

TEST_CASE("a refused driver call, for every n: a clear status, the bystander unharmed, nothing left") {
  const memory::Layout layout = GENERATE(from_range(std::begin(kLayouts), std::end(kLayouts)));
  const Call call = GENERATE(from_range(std::begin(kCalls), std::end(kCalls)));
  for (uint64_t n = 1;; n += kFaultStep) {
    INFO("layout " << static_cast<int>(layout) << ": " << call.name << " fails at call " << n);
    REQUIRE(n < 10'000);
    Scenario scenario(kDevice, layout);
    const uint64_t before = standin_calls(call.name);
    standin_fail_call(call.name, n, call.result);
    scenario.run();
    const bool fired = standin_calls(call.name) - before >= n;
    standin_clear_faults();
    scenario.verify(false);
    if (!fired) break;
  }
}

TEST_CASE("work that poisons the context, at enqueue n: everybody is told, and it can be closed") {
  const memory::Layout layout = GENERATE(from_range(std::begin(kLayouts), std::end(kLayouts)));
  uint64_t n = 1;
  for (;; n += kFaultStep) {
    INFO("layout " << static_cast<int>(layout) << ": poisoned by fill " << n);
    REQUIRE(n < 1000);
    Scenario scenario(kDevice, layout);
    const uint64_t before = standin_calls("cuMemsetD8Async");
    standin_fail_work("cuMemsetD8Async", n, 700);
    scenario.run();
    const bool lost = standin_calls("cuMemsetD8Async") - before >= n;
    standin_clear_faults();
    if (lost) scenario.use_device();  // the work may fail after all others were told of theirs
    scenario.verify(lost);
    if (!lost) break;
  }
  CHECK(n > 1);
}

}  // namespace
