// group.hpp: the page of a group: its limits, its devices, and a slot for each of its processes.
//
// The page is either this process's own or a file, mapped by all processes of the group: one that `gpushare exec` made,
// or an empty one, which the first process makes a page with its own limits. Each process writes only its own slot, so
// that a process that is killed leaves nothing wrong behind: what a group holds is the sum over the slots of living
// processes (books.hpp).
//
// Threads: every function may be called from any thread. Locks are held for a few instructions, never across a call of
// the driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "shim/words.hpp"

namespace gpushare::shim {

inline constexpr int kDevices = 16;  // devices beyond these are not counted
inline constexpr int kUncounted =
    kDevices;  // the place of such a device where nothing may go uncounted: under a limit each charge is refused
// The place of physical memory of the host, which counts against the limit of pinned memory.
inline constexpr int kOfHost = -2;
inline constexpr int kSlots = 1024;  // processes of a group at one time; under a limit more get no memory
inline constexpr uint64_t kNoLimit = UINT64_MAX;
inline constexpr uint32_t kPageMagic = 0x67707368;  // "gpsh"
inline constexpr uint32_t kPageVersion = 1;

// One process. `identity` is its number and the time at which it started, so that a number in use again is not taken
// for it; 0: free. A container numbers its own processes, so the number has a meaning within one namespace alone. For
// processes of other namespaces, each process holds a lock in the page's file, on the byte with the number of its slot.
struct Slot {
  uint64_t identity;
  uint64_t space;               // the namespace of its number
  uint64_t counted[kDevices];   // bytes of blocks
  uint64_t overhead[kDevices];  // bytes of contexts, modules and what else the driver takes, as measured
  uint64_t spilled[kDevices];   // bytes of blocks that lie in host memory
  uint64_t pinned;              // bytes of pinned host memory, those of spilled blocks included
};

// The limits of a group. Each may change at any time; memory held already stays.
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

// The group's share of the device's time as `gpushare exec --change` set it. Values that were not set come from the environment.
struct Share {
  static constexpr uint32_t kWeight = 1, kClass = 2, kPriority = 4, kCap = 8;
  uint32_t said;    // of these; written last
  uint64_t weight;  // the bits of a double
  uint32_t cls;     // 1: opportunistic
  int32_t priority;
  uint64_t cap;  // the bits of a double: of 1, which is no cap
};

struct GroupPage {
  uint32_t magic;
  uint32_t version;
  Limits limits;
  // Memory of each device, a part of the limit, that its daemon has lent to the group's sessions of programs that use
  // gpushare: what the group may have on a device is its limit less these bytes.
  uint64_t lent_bytes[kDevices];
  uint32_t slots_used;  // slots beyond were never taken
  uint32_t reports;  // how often this library has said, in a program that was just loaded, that it is there
  Share share;
  // The settings of `gpushare exec` as NAME=VALUE, each with a zero behind it, for programs whose environment was cleared.
  char environment[2048];
  uint64_t devices[kDevices];  // which device has which place: a number made of its PCI address; 0: free
  Slot slots[kSlots];
};

// Notes on the group's page, which the environment names, that this library is in the program. Called once, when the
// program is loaded. The note tells `gpushare exec` that the loader has preloaded the library.
void report_to_group();
// The process leaves the group: it counts alone from now on, without limits. A child of fork belongs to the group again.
// False: the process holds memory already, and stays.
bool leave_group();
// Whether a process of that number has a place on the page.
bool is_of_group(uint32_t process);
// The file of the group's page; -1: the page is this process's own.
int page_file();

// The page, null until first used, this process's slot of it, and a word that the kernel sets to 0 in a child of fork.
extern GroupPage* g_page;
extern Slot* g_slot;
extern uint32_t* g_mark;
GroupPage& set_up_group();
// The page, made ready on first use; in a child of fork, its own slot.
inline GroupPage& group() {
  GroupPage* page = load(g_page);
  return __builtin_expect(page == nullptr || (g_mark != nullptr && load(*g_mark) == 0), 0) ? set_up_group()
                                                                                           : *page;
}
// Frees the slots of processes that have ended. Reads files of /proc.
void reap(GroupPage& page);

inline bool is_counted(int device) {
  return device >= 0 && device < kDevices;
}
// The group may have so many bytes on the device of that place.
inline uint64_t device_limit(const GroupPage& page, int device) {
  const uint64_t limit = load(page.limits.device_bytes);
  if (!is_counted(device) || limit == kNoLimit) return limit;
  const uint64_t lent = load(page.lent_bytes[device]);
  return limit > lent ? limit - lent : 0;
}
// A PCI address as a number: domain << 16 | bus << 8 | device << 3. The function is 0 for devices that compute.
uint32_t pci_number(const char* pci_address);
// How the page names the device of that number.
inline uint64_t device_word(uint32_t pci_number) {
  return pci_number | uint64_t{1} << 63;
}
// The place of the device of that PCI address ("0000:3b:00.0", also with a longer domain) on the page; -1 when all are taken.
int place_of_device(const char* pci_address);

}  // namespace gpushare::shim
