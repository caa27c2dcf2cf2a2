// small_heap.hpp: plain allocations of up to 32 KiB out of chunks of 2 MiB, where GPUSHARE_SMALL_HEAP=1 asks for it. A
// chunk is got and counted as any allocation of that size, belongs to one context, and goes with it. A block of the
// heap costs no call of the driver.
//
// cuMemFree promises that the memory is used again only after the work that the device had then. A freed block
// therefore rests until the context has been synchronised once more. The frees do that: when an eighth of a context's
// heap (at least 1 MiB) rests, the free that came last synchronises, as the driver's own free may at any time. An
// allocation never waits, unless it would be refused otherwise.
//
// Threads: every function may be called from any thread. One lock is held for a few instructions, never across a call
// of the driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "shim/device.hpp"
#include "shim/group.hpp"
#include "shim/table.hpp"

namespace gpushare::shim {

inline constexpr uint64_t kLargestSmall = 32 << 10;

extern uint32_t g_wants_small;   // 1: the settings ask for the heap
extern uint32_t g_small_chunks;  // that there are now; 0 is the usual answer
inline bool has_small() {
  return __builtin_expect(load(g_small_chunks) != 0, 0);
}

// Whether a plain allocation is to come from the heap.
inline bool is_small(uint64_t bytes) {
  group();  // reads the settings
  return __builtin_expect(g_wants_small != 0, 0) && bytes - 1 < kLargestSmall;
}
// False: there is no such block to be had, and nothing was done.
bool allocate_small(const Current& at, uint64_t bytes, void* out_address);
// Frees the block; `stream` orders the free. False: the address is not in the heap.
struct Ordered {
  bool is;          // by a stream: cuMemFreeAsync
  bool per_thread;  // stream 0 is the thread's own
  P stream;
};
bool free_of_heap(uint64_t address, const Ordered& ordered, Result* out_result);
inline bool free_small(uint64_t address, const Ordered& ordered, Result* out_result) {
  return has_small() && free_of_heap(address, ordered, out_result);
}
// Whether the address lies in a chunk, and in which block of it; out_base 0: in none that the program has.
bool find_small(uint64_t address, uint64_t* out_base, uint64_t* out_bytes);
// Called before memory of the device is refused. Waits for the device, so that freed blocks can be used, and gives back
// chunks without blocks. True: one of the two happened.
bool give_back_small(int place);
// Called before the context may go. Gives its chunks back, except those in which the program still has blocks.
void leave_small(uint64_t context);
// The context is gone, and its chunks with it.
void forget_small(uint64_t context);
void forget_small_in_child();

// memory.cpp: memory of the device as cuMemAlloc and cuMemFree get and give it back, without the heap.
Result allocate_large(const Current& at, uint64_t bytes, void* out_address, bool may_spill);
Result free_large(uint64_t address);

}  // namespace gpushare::shim
