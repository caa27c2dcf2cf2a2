// Contexts that grow after they were made, by kernels: GPUSHARE_MEMORY=64M, GPUSHARE_SHIM_LOOK_MS=10. Run with the shim
// preloaded over the recording driver.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include "support/catch.hpp"
#include "through_shim.hpp"

namespace {
constexpr uint64_t kMiB = 1 << 20;
uint64_t free_bytes() {
  uint64_t free = 0, total = 0;
  REQUIRE(cu("cuMemGetInfo_v2", &free, &total) == kSuccess);
  return free;
}
}  // namespace

TEST_CASE("what contexts take counts also when it grows later, and no longer when it shrinks") {
  const auto overhead = control<decltype(&recorder_set_overhead)>("recorder_set_overhead");
  void* context = nullptr;
  uint64_t address = 0;
  overhead(8 * kMiB, 0);
  REQUIRE(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
  REQUIRE(cu("cuMemAlloc_v2", &address, 8 * kMiB) == kSuccess);
  CHECK(free_bytes() == 48 * kMiB);
  for (const uint64_t mebibytes : {40, 80, 8}) {
    overhead(mebibytes * kMiB, 0);
    const uint64_t left = mebibytes + 8 < 64 ? 64 - 8 - mebibytes : 0;
    while (free_bytes() != left * kMiB) usleep(1000);
    uint64_t more = 0;
    CHECK(cu("cuMemAlloc_v2", &more, (left + 1) * kMiB) == kOutOfMemory);
  }
  REQUIRE(cu("cuMemFree_v2", address) == kSuccess);
}
