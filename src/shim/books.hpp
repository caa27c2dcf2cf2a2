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

// Devices are given by their place. Charges `bytes` of `device` to this process; false (and nothing charged) if the group would be above its limit.
bool charge(int device, uint64_t bytes);
void discharge(int device, uint64_t bytes);
// Measured overhead of this process: replaces what was noted before. False, and nothing changed, if the group would be above its limit.
bool note_overhead(int device, uint64_t bytes);
// The same for pinned host memory; of a spilled block, with the device for which it stands, else with device -1.
bool charge_host(int device, uint64_t bytes);
void discharge_host(int device, uint64_t bytes);
// Bytes on `device` that the group holds, and the part of them that this process has counted as blocks.
uint64_t held_bytes(int device);
uint64_t counted_here(int device);
inline uint64_t limit_bytes() {
  return load(group().limits.device_bytes);
}
// Whether there is host memory for what does not fit on the device.
inline bool may_spill() {
  return load(group().limits.spill_bytes) != 0;
}
inline bool limited() {
  return limit_bytes() != kNoLimit;
}

// What a program is told about a device of `total` bytes of which `free` are free: no more than the limits leave.
struct Told {
  uint64_t total, free, used;
};
Told tell(int device, uint64_t total, uint64_t free);

// Gives back what the block was charged.
void discharge(const Block& block);

// What pools of this process may keep of a device beyond their blocks, without asking them: the most that blocks of pools ever had together, less what
// they have. note_kept() replaces it by what is known.
bool has_pools(int device);
void add_pooled(int device, uint64_t bytes);
uint64_t kept_by_pools(int device);
void note_kept(int device, uint64_t bytes);
void forget_pools_in_child();

}  // namespace gpushare::shim
