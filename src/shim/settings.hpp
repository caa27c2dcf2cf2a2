// settings.hpp: what the environment says. `gpushare exec` writes these variables; without it they may be set by hand.
//   GPUSHARE_MEMORY          limit in bytes of each device, e.g. 8G
//   GPUSHARE_SHIM_GROUP      file of the group's page, made by `gpushare exec`; its limit counts then
//   GPUSHARE_SHIM_FAIL       closed: a program that cannot be held gets no memory; open (default): it runs without limits
//   GPUSHARE_CUDA_DRIVER     the real driver
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::shim {

struct Settings {
  uint64_t memory_bytes;  // kNoLimit when not set
  char group[256];
  bool fails_closed;
  bool broken;  // a value that cannot be read; said in the log
};

// Reads the environment, once.
const Settings& load_settings();
// "512", "64K", "1.5GiB", "16G" (binary), "16GB" (decimal). False: none of these.
bool parse_bytes(const char* text, uint64_t* out_bytes);

}  // namespace gpushare::shim
