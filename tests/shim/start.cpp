// A program's start, as CUDA's runtime makes it: hundreds of libraries, one after the other. GPUSHARE_MEMORY=1G, and the shim's own
// looks are ten minutes apart. Run with the shim preloaded over the recording driver.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <ctime>

#include "support/catch.hpp"
#include "through_shim.hpp"

namespace {
constexpr uint64_t kMiB = 1 << 20;
uint64_t free_bytes() {
  uint64_t free = 0, total = 0;
  REQUIRE(cu("cuMemGetInfo_v2", &free, &total) == kSuccess);
  return free;
}
uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}
}  // namespace

TEST_CASE("libraries that come one after the other are measured together, and all count in the end") {
  const auto overhead = control<decltype(&recorder_set_overhead)>("recorder_set_overhead");
  const auto looks = control<decltype(&recorder_nvml_looks)>("recorder_nvml_looks");
  constexpr uint64_t kLibraries = 300;
  void *context = nullptr, *library = nullptr;
  overhead(64 * kMiB, kMiB);
  REQUIRE(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
  REQUIRE(cu("cuCtxSetCurrent", context) == kSuccess);
  CHECK(free_bytes() == 960 * kMiB);
  const uint64_t before = looks(), began_ns = now_ns();
  for (uint64_t i = 0; i < kLibraries; ++i)
    REQUIRE(cu("cuModuleLoadData", &library, static_cast<const void*>("image")) == kSuccess);
  // One in each tenth of a second that the loads took, by them or by the shim's thread, and what the ends of it add.
  const uint64_t tenths = (now_ns() - began_ns) / 100'000'000;
  CHECK(looks() - before <= 2 * tenths + 2);
  while (free_bytes() != (960 - kLibraries) * kMiB) usleep(1000);
  uint64_t address = 0;
  CHECK(cu("cuMemAlloc_v2", &address, (961 - kLibraries) * kMiB) == kOutOfMemory);
  // The last look is more than a tenth of a second ago: the next library is measured at once. (The shim's thread may have owed a look
  // beside the one that measured them all.)
  for (uint64_t looked = looks() - 1; looks() != looked;) {
    looked = looks();
    const uint64_t looked_ns = now_ns();
    while (now_ns() - looked_ns < 150'000'000) usleep(1000);
  }
  overhead(64 * kMiB, 16 * kMiB);
  CHECK(cu("cuModuleLoadData", &library, static_cast<const void*>("image")) == kOutOfMemory);
}
