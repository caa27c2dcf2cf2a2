// books.hpp: how much device memory the processes of one group hold, against their limit, and which blocks are alive in this process.
//
// The group's page is either this process's own or a file, mapped by all processes of the group: one that `gpushare exec` made, or an empty one, which
// the first process makes a page with its own limits. Each process writes only its own slot, so that a process that is killed leaves nothing wrong
// behind: what a group holds is the sum over the slots of living processes.
//
// Threads: every function may be called from any thread. Locks are held for a few instructions, never across a call of the driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpushare::shim {

inline constexpr int kDevices = 16;  // devices beyond these are not counted
inline constexpr int kUncounted =
    kDevices;  // the place of such a device where nothing may go uncounted: under a limit each charge is refused
inline constexpr int kSlots = 128;  // processes of a group that hold memory at one time
inline constexpr uint64_t kNoLimit = UINT64_MAX;
inline constexpr uint32_t kPageMagic = 0x67707368;  // "gpsh"
inline constexpr uint32_t kPageVersion = 4;

// One process. `identity` is its number and the time at which it started, so that a number in use again is not taken for it; 0: free. Containers
// number processes for themselves, so the number means something only to processes of the same namespace. For those of others, each process holds a
// lock on the byte of the page's file whose number is that of its slot.
struct Slot {
  uint64_t identity;
  uint64_t space;               // the namespace of its number
  uint64_t counted[kDevices];   // bytes of blocks
  uint64_t overhead[kDevices];  // bytes of contexts, modules and what else the driver takes, as measured
  uint64_t spilled[kDevices];   // bytes of blocks that lie in host memory
  uint64_t pinned;              // bytes of pinned host memory, those of spilled blocks included
};

// What a group may hold. Any of them may change at any time; what is held already stays.
struct Limits {
  uint64_t device_bytes;  // on each device
  uint64_t spill_bytes;   // that may lie on the host instead, for each device
  uint64_t pinned_bytes;  // pinned host memory
};
// `memory` and `soft`: the smaller is what may lie on the device, the larger what there may be in all.
inline Limits make_limits(uint64_t memory, uint64_t soft, uint64_t pinned) {
  if (soft == kNoLimit) return {memory, 0, pinned};
  return soft < memory ? Limits{soft, memory - soft, pinned} : Limits{memory, soft - memory, pinned};
}

// What `gpushare exec --change` said of the group's share of the device's time. What was not said is as the environment has it.
struct Share {
  static constexpr uint32_t kWeight = 1, kClass = 2, kPriority = 4;
  uint32_t said;    // of these; written last
  uint64_t weight;  // the bits of a double
  uint32_t cls;     // 1: opportunistic
  int32_t priority;
};

struct GroupPage {
  uint32_t magic;
  uint32_t version;
  Limits limits;
  uint32_t slots_used;  // slots beyond were never taken
  uint32_t reserved;
  Share share;
  uint64_t devices[kDevices];  // which device has which place: a number made of its PCI address; 0: free
  Slot slots[kSlots];
};

// Whether a process of that number has a place on the page.
bool is_of_group(uint32_t process);

// The page, null until first used, and a word that the kernel sets to 0 in a child of fork.
extern GroupPage* g_page;
extern uint32_t* g_mark;
GroupPage& set_up_group();
// The page, made ready on first use; in a child of fork, its own slot.
inline GroupPage& group() {
  GroupPage* page = __atomic_load_n(&g_page, __ATOMIC_ACQUIRE);
  return __builtin_expect(page == nullptr || (g_mark != nullptr && *g_mark == 0), 0) ? set_up_group() : *page;
}

inline bool is_counted(int device) {
  return device >= 0 && device < kDevices;
}
// The place of the device of that PCI address ("0000:3b:00.0", also with a longer domain) on the page; -1 when all are taken.
int place_of_device(const char* pci_address);

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
  return __atomic_load_n(&group().limits.device_bytes, __ATOMIC_ACQUIRE);
}
// Whether there is host memory for what does not fit on the device.
inline bool may_spill() {
  return __atomic_load_n(&group().limits.spill_bytes, __ATOMIC_ACQUIRE) != 0;
}
inline bool limited() {
  return limit_bytes() != kNoLimit;
}

// What a program is told about a device of `total` bytes of which `free` are free: no more than the limits leave.
struct Told {
  uint64_t total, free, used;
};
Told tell(int device, uint64_t total, uint64_t free);

// The type of a key of the live blocks. Memory is what is freed by its address; memory that was opened is another process's.
enum class Kind : uint8_t { none, memory, opened, host, array, handle, mapping, external, graph, pool };

struct Block {
  uint64_t key;      // address or handle
  uint64_t bytes;    // charged
  uint64_t context;  // in which it lives and with which it goes; 0: none
  uint64_t other;    // mapping: its handle
  uint32_t references;
  Kind kind;
  int8_t device;  // -1: of the host
  bool pooled;    // memory of a pool, which may keep it when it is freed
};
void discharge(const Block& block);

// What pools of this process may keep of a device beyond their blocks, without asking them: the most that blocks of pools ever had together, less what
// they have. note_kept() replaces it by what is known.
bool has_pools(int device);
void add_pooled(int device, uint64_t bytes);
uint64_t kept_by_pools(int device);
void note_kept(int device, uint64_t bytes);
// Handles of the pools that the program has made on the device; returns how many, at most `room`.
int pools_of(int device, uint64_t* out_pools, int room);

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
