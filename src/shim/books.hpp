// books.hpp: how much device memory the processes of one group hold, against their limit, and which blocks are alive in this process.
//
// The group's page is either this process's own or a file that `gpushare exec` made, mapped by all its processes. Each process writes only
// its own slot, so that a process that is killed leaves nothing wrong behind: what a group holds is the sum over the slots of living processes.
//
// Threads: every function may be called from any thread. Locks are held for a few instructions, never across a call of the driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpushare::shim {

inline constexpr int kDevices = 16;  // devices beyond these are not counted
inline constexpr int kSlots = 128;   // processes of a group that hold memory at one time
inline constexpr uint64_t kNoLimit = UINT64_MAX;
inline constexpr uint32_t kPageMagic = 0x67707368;  // "gpsh"
inline constexpr uint32_t kPageVersion = 1;

// One process. `identity` is its number and the time at which it started, so that a number in use again is not taken for it; 0: free.
struct Slot {
  uint64_t identity;
  uint64_t counted[kDevices];   // bytes of blocks
  uint64_t overhead[kDevices];  // bytes of contexts, modules and what else the driver takes, as measured
};

struct GroupPage {
  uint32_t magic;
  uint32_t version;
  uint64_t limit_bytes;  // of each device; may change at any time
  uint32_t slots_used;   // slots beyond were never taken
  uint32_t reserved[11];
  uint64_t devices[kDevices];  // which device has which place: a number made of its PCI address; 0: free
  Slot slots[kSlots];
};

// The page, made ready on first use; in a child of fork, its own slot.
GroupPage& group();

// The place of the device of that PCI address ("0000:3b:00.0", also with a longer domain) on the page; -1 when all are taken.
int place_of_device(const char* pci_address);

// Devices are given by their place. Charges `bytes` of `device` to this process; false (and nothing charged) if the group would be above its limit.
bool charge(int device, uint64_t bytes);
void discharge(int device, uint64_t bytes);
// Measured overhead of this process: replaces what was noted before. False, and nothing changed, if the group would be above its limit.
bool note_overhead(int device, uint64_t bytes);
// Bytes of `device` that the group holds, and the part of them that this process has counted as blocks.
uint64_t held_bytes(int device);
uint64_t counted_here(int device);
uint64_t limit_bytes();
inline bool limited() {
  return limit_bytes() != kNoLimit;
}

// The type of a key of the live blocks.
enum class Kind : uint8_t { none, memory, array, handle, mapping, external, graph, pool };

struct Block {
  uint64_t key;      // address or handle
  uint64_t bytes;    // charged
  uint64_t context;  // in which it lives and with which it goes; 0: none
  uint64_t other;    // mapping: its handle
  uint32_t references;
  Kind kind;
  int8_t device;  // -1: of the host
};

// Live blocks by kind and key: O(1) at any number.
void insert(const Block& block);
bool take(Kind kind, uint64_t key, Block* out_block);  // removes it; false: unknown
bool look(Kind kind, uint64_t key, Block* out_block);
// Adds to the references of a block; the number left. A block that reaches 0 is removed, and `out_block` gets it. -1: unknown.
int64_t refer(Kind kind, uint64_t key, int change, Block* out_block);
// Sets the charged bytes of a block that had none. False: unknown, or it had some.
bool set_bytes(Kind kind, uint64_t key, uint64_t bytes);
// Removes every block of the context, and discharges it.
void drop_context(uint64_t context);

}  // namespace gpushare::shim
