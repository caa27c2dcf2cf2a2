// soft_limit.hpp: the limits under which shim_spill and shim_move run, and memory of the program under them:
// GPUSHARE_MEMORY=3G, GPUSHARE_SOFT=1G, GPUSHARE_PINNED=1536M.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "support/catch.hpp"
#include "through_shim.hpp"

constexpr uint64_t kMiB = 1 << 20, kDevice = 1024 * kMiB, kTotal = 3072 * kMiB, kPinned = 1536 * kMiB;

inline uint64_t on_device() {
  return control<decltype(&recorder_used_bytes)>("recorder_used_bytes")();
}
inline uint64_t on_host() {
  return control<decltype(&recorder_host_bytes)>("recorder_host_bytes")();
}
inline uint64_t free_bytes() {
  uint64_t free = 0, total = 0;
  REQUIRE(cu("cuMemGetInfo_v2", &free, &total) == kSuccess);
  CHECK(total == kTotal);
  return free;
}
inline uint64_t get(uint64_t mebibytes) {
  uint64_t address = 0;
  REQUIRE(cu("cuMemAlloc_v2", &address, mebibytes * kMiB) == kSuccess);
  return address;
}
inline Result give_back(uint64_t address) {
  return cu("cuMemFree_v2", address);
}
