// ranges.hpp: blocks of memory that need not lie on the device: those that lie in pinned host memory (spill.hpp), and
// those in virtual memory, whose bytes can change places (move.hpp). The program may ask about any address in them, so
// they are kept by address. They are large and few.
//
// Threads: any. A thread that moves a range holds it; a thread that wants to free the range waits. No lock is held
// while the driver is called.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "shim/words.hpp"

namespace gpushare::shim {

enum class Lies : uint8_t {
  pinned,   // for good in pinned host memory: no virtual memory
  device,   // on the device
  spilled,  // on the host, since the device had no room for it: it comes to the device when that has
  away,     // on the host until the process comes back to the device: its room there stays counted
};

struct Range {
  uint64_t begin;
  uint64_t bytes;    // that the program asked for
  uint64_t size;     // that it takes, and that is counted
  uint64_t context;  // with which it goes
  uint64_t handle;   // of the physical memory; 0: pinned
  int32_t place;     // of the device
  Lies lies;
  bool held;
};

extern uint64_t g_ranges_now;  // read without the lock: 0 is the usual answer
inline bool has_ranges() {
  return __builtin_expect(load(g_ranges_now) != 0, 0);
}

// False: there is no memory for the table.
bool add_range(const Range& range);
// Whether the address lies in a range.
bool find_range(uint64_t address, Range* out_range);
// Removes the range that begins there, once nobody holds it.
bool take_known_range(uint64_t begin, Range* out_range);
inline bool take_range(uint64_t begin, Range* out_range) {
  return has_ranges() && take_known_range(begin, out_range);
}
// Removes one of the context's ranges; false: there is none left.
bool take_range_of(uint64_t context, Range* out_range);
// Holds the first range of the device at or behind the address that lies in the given place. release_range() ends the
// hold, and says where the range lies from now on and in which memory.
bool hold_range(int place, uint64_t from, Lies lies, Range* out_range);
void release_range(const Range& range);
// The same wherever the range lies. If somebody holds the range, waits for the end of that hold.
bool wait_range(int place, uint64_t from, Range* out_range);
// How many holds have ended; kHeld while a hold lasts. Two equal answers mean that nothing has moved between them.
inline constexpr uint64_t kHeld = UINT64_MAX;
uint64_t ended_holds();
// Bytes of a device's ranges that lie there.
uint64_t range_bytes(int place, Lies lies);
// The size of the smallest of them; UINT64_MAX: there is none.
uint64_t least_range(int place, Lies lies);
// A child of fork has none, and no thread that holds the lock.
void forget_ranges_in_child();

}  // namespace gpushare::shim
