// blocks.hpp: the blocks that are alive in this process, by kind and key, whatever gives them: memory, arrays, handles,
// mappings, graphs.
//
// Threads: every function may be called from any thread. Locks are held for a few instructions, never across a call of
// the driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::shim {

// The type of a key of the live blocks. Memory is freed by its address; opened memory is another process's.
enum class Kind : uint8_t { none, memory, opened, host, array, handle, mapping, external, graph, pool };

struct Block {
  uint64_t key;      // address or handle
  uint64_t bytes;    // charged
  uint64_t context;  // in which it lives and with which it goes; 0: none
  uint64_t other;    // mapping: its handle
  uint32_t references;
  Kind kind;
  int8_t device;  // -1: not counted; kOfHost: physical memory of the host
  bool pooled;    // memory of a pool, which may keep it when it is freed
};

// Live blocks by kind and key: O(1) at any number.
void insert(const Block& block);
bool take(Kind kind, uint64_t key, Block* out_block);  // removes it; false: unknown
bool look(Kind kind, uint64_t key, Block* out_block);
// Adds to the references of a block and returns the number left. A block that reaches 0 is removed and written to
// `out_block`. -1: the block is unknown.
int64_t refer(Kind kind, uint64_t key, int change, Block* out_block);
// Raises the charged bytes of a block to `bytes`; a block with as many or more stays as it is. Returns the bytes that it
// had, or -1: the block is unknown.
int64_t raise_bytes(Kind kind, uint64_t key, uint64_t bytes);
// Removes every block of the context, and discharges it.
void drop_context(uint64_t context);
// Handles of the pools that the program has made on the device; returns how many, at most `room`.
int pools_of(int device, uint64_t* out_pools, int room);
// A child of fork has no blocks, because a context does not survive fork.
void forget_blocks_in_child();

}  // namespace gpushare::shim
