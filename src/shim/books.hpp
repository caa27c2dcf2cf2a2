// books.hpp: how much device memory, and pinned host memory, the processes of a group hold, against their limits.
//
// Threads: every function may be called from any thread. Nothing here holds a lock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "shim/blocks.hpp"
#include "shim/group.hpp"
#include "shim/words.hpp"

namespace gpushare::shim {

// Devices are given by their place. Charges `bytes` of `device` to this process; false (and nothing charged) if the
// group would be above its limit.
bool charge(int device, uint64_t bytes);
// For a place that is no device: memory of the host, or memory that is not counted.
void discharge_elsewhere(int place, uint64_t bytes);
inline void discharge(int device, uint64_t bytes) {
  group();
  if (__builtin_expect(!is_counted(device), 0)) return discharge_elsewhere(device, bytes);
  __atomic_sub_fetch(&g_slot->counted[device], bytes, __ATOMIC_ACQ_REL);
}
// Replaces the measured overhead of this process. False, and nothing has changed, if the group would then be above its
// limit.
bool note_overhead(int device, uint64_t bytes);
// Notes overhead that exists already, whatever the limit says.
void set_overhead(int device, uint64_t bytes);
// Charges pinned host memory. `device`: for a spilled block the device for which the block stands, else -1.
bool charge_host(int device, uint64_t bytes);
void discharge_host(int device, uint64_t bytes);
// Bytes on `device` that the group holds, and the part of them that this process has counted as blocks.
uint64_t held_bytes(int device);
uint64_t counted_here(int device);
inline uint64_t limit_bytes(int device) {
  return device_limit(group(), device);
}
// Whether the limits allow host memory in place of device memory.
inline bool may_spill() {
  return load(group().limits.spill_bytes) != 0;
}
inline bool limited() {
  return load(group().limits.device_bytes) != kNoLimit;
}

// The figures that a program is told about a device of `total` bytes with `free` bytes free: no more than the limits leave.
struct Told {
  uint64_t total, free, used;
};
Told tell(int device, uint64_t total, uint64_t free);

// Estimates what this process's pools keep of a device beyond their blocks, without asking the driver: the most bytes
// that pool blocks ever had together, less their bytes now. note_kept() replaces the estimate by a measured value.
struct Pooled {  // the pool blocks of one device: bytes now, and the most bytes since the last measured value
  uint64_t live, most;
  bool any;
};
extern Pooled g_pooled[kDevices];
inline bool has_pools(int device) {
  return is_counted(device) && load(g_pooled[device].any);
}
void add_pooled(int device, uint64_t bytes);
uint64_t kept_by_pools(int device);
void note_kept(int device, uint64_t bytes);
void forget_pools_in_child();

// Gives back what the block was charged.
inline void discharge(const Block& block) {
  if (__builtin_expect(block.pooled, 0) && is_counted(block.device))
    __atomic_sub_fetch(&g_pooled[block.device].live, block.bytes, __ATOMIC_ACQ_REL);
  if (__builtin_expect(block.kind == Kind::host, 0))
    discharge_host(block.device, block.bytes);
  else
    discharge(block.device, block.bytes);
}

}  // namespace gpushare::shim
