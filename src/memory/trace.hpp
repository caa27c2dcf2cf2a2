// trace.hpp: a sequence of allocations and frees, whatever file or recording it came from.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace gpushare::memory {

// A step of a trace. Blocks are numbered by their allocation: the k-th allocation of a trace makes block k.
struct TraceOp {
  uint64_t size_bytes;  // of the block; the same in its allocation and its free
  uint32_t block;
  bool is_free;
};

// Invariants (held by every producer in this folder): blocks are numbered 0, 1, 2 ... in order of allocation,
// sizes are above 0, a block is freed at most once and after its allocation; the sizes live at any time add
// up to less than 2^63. Blocks never freed live to the end.
struct Trace {
  std::vector<TraceOp> ops;
  uint32_t block_count = 0;
  uint64_t peak_live_bytes = 0;  // sizes as asked for, not rounded
  // Blocks live from the first instant to the last, which hold what outlives one iteration. Only lifetime
  // files know.
  std::vector<bool> persistent;  // empty, or one entry a block
};

// Appends to a trace and keeps its invariants. Not thread-safe.
class TraceBuilder {
 public:
  // Returns the new block's number. `size_bytes` > 0 and live bytes stay below 2^63: the caller's duty.
  uint32_t allocate(uint64_t size_bytes);
  // `block` is live: the caller's duty.
  void free(uint32_t block);
  uint64_t live_bytes() const { return live_bytes_; }
  uint64_t size_bytes(uint32_t block) const { return sizes_[block]; }
  Trace take();

 private:
  Trace trace_;
  std::vector<uint64_t> sizes_;
  uint64_t live_bytes_ = 0;
};

// A buffer with its lifetime [lower, upper), for placement.
struct Buffer {
  uint64_t lower;
  uint64_t upper;
  uint64_t size_bytes;
};

// Lifetimes of a trace's blocks, by block number; time is the position of the operation.
std::vector<Buffer> lifetimes(const Trace& trace);
// The other way: at equal times all frees come before allocations, allocations in the order given. `buffers`
// have lower < upper, size > 0 and a sum of sizes below 2^63: the caller's duty (trace_io checks). Block k of
// the trace is buffers[order[k]]; `order` may be null.
Trace trace_of(std::span<const Buffer> buffers, std::vector<uint32_t>* order = nullptr);

}  // namespace gpushare::memory
