// settings.hpp: what the environment says, or for a program whose environment was cleared the page of its group
// (process.hpp). `gpushare exec` writes these variables; without it they may be set by hand.
//   GPUSHARE_MEMORY          limit of each device's memory, e.g. 8G. Sizes have a unit, B for bytes
//   GPUSHARE_SOFT            with GPUSHARE_MEMORY: the smaller of the two is for the device, the larger for device and host together
//   GPUSHARE_PINNED          limit of pinned host memory; a quarter of the host's memory when there is a limit for the device
//   GPUSHARE_PAGEABLE        1: outside its turns the process's memory may go to the host for others
//   GPUSHARE_SMALL_HEAP      1: small plain allocations come from the shim's heap (small_heap.hpp)
//   GPUSHARE_SHIM_GROUP      file of the group's page, whose limit counts then: made by `gpushare exec`, or empty: the first process fills it in
//   GPUSHARE_SHIM_FAIL       closed: a program that cannot be held gets no memory; open (default): it runs without limits
//   GPUSHARE_SHIM_LOOK_MS    under a limit: how often what contexts take is measured again, 500; 0: when contexts and modules are made alone
//   GPUSHARE_CUDA_DRIVER     the real driver
//   GPUSHARE_SOCKET          the daemon's socket; else gpushare/daemon.sock in XDG_RUNTIME_DIR, else in /run
//   GPUSHARE_WEIGHT, GPUSHARE_PRIORITY, GPUSHARE_CLASS (guaranteed, opportunistic)
//   GPUSHARE_CAP             the most of each device's time, e.g. 30%, also while nobody else wants the device
//   GPUSHARE_GROUP           number of the group: its processes have memory, weight and turns together
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/host_memory.hpp"
#include "shim/books.hpp"

namespace gpushare::shim {

struct Settings {
  Limits limits;
  char group[256];
  bool fails_closed;
  bool pageable;
  uint32_t look_ms;  // between two looks at what contexts take
  bool broken;       // a value that cannot be read; said in the log
  bool
      aside;  // a program of no group on a machine whose /etc/ld.so.preload names the library: it is left alone
};

// Reads the environment, once.
const Settings& load_settings();

// The process as a session, as the environment says. The group's page may say otherwise later (take_share).
struct Options {
  char socket[108];
  bool named;  // by the environment
  double weight;
  double cap;  // of 1; 0: none
  int32_t priority;
  uint32_t cls;
  uint64_t group;
  bool read;
};
extern Options g_options;
void read_options();
// Copies changes by `gpushare exec --change` into the options. Returns the bits of Share that have changed.
uint32_t take_share(Options* options);

// A quarter of the host memory that this process may use.
inline uint64_t default_pinned_bytes() {
  const uint64_t bytes = base::host_memory().total_bytes;
  return bytes == UINT64_MAX ? kNoLimit : bytes / 4;
}
// "512", "64K", "1.5GiB", "16G" (binary), "16GB" (decimal). False: none of these.
bool parse_bytes(const char* text, uint64_t* out_bytes);

}  // namespace gpushare::shim
