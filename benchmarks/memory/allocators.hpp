// allocators.hpp: every allocator of the device-memory benchmarks in the shape that memory::time_trace()
// takes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "memory/heap.hpp"
#include "memory/replay.hpp"
#include "memory/trace.hpp"
#include "reference/float_bins.hpp"
#include "reference/tree_best_fit.hpp"

namespace gpushare::bench {

constexpr uint64_t kGranule = 256;

inline memory::Heap make_heap(uint64_t capacity_bytes, uint32_t max_blocks, bool index_offsets) {
  memory::HeapOptions options;
  options.capacity_bytes = capacity_bytes;
  options.max_blocks = max_blocks;
  options.index_offsets = index_offsets;
  return std::move(memory::Heap::create(options)).value();
}

// The block heap, freed by handle.
class OurHeap {
 public:
  OurHeap(uint64_t capacity_bytes, uint32_t max_blocks)
      : heap_(make_heap(capacity_bytes, max_blocks, false)) {}
  memory::BlockHandle allocate(uint32_t, uint64_t bytes) { return heap_.allocate(bytes); }
  static bool ok(memory::BlockHandle handle) { return static_cast<bool>(handle); }
  void free(memory::BlockHandle handle) { heap_.free(handle); }
  void finish() {
    if (heap_.live_blocks() != 0) heap_.reset();
  }

 private:
  memory::Heap heap_;
};

// The block heap with its offset index, freed by offset, as behind the C ABI.
class OurIndexedHeap {
 public:
  OurIndexedHeap(uint64_t capacity_bytes, uint32_t max_blocks)
      : heap_(make_heap(capacity_bytes, max_blocks, true)) {}
  uint64_t allocate(uint32_t, uint64_t bytes) {
    const memory::BlockHandle handle = heap_.allocate(bytes);
    return handle ? handle.offset_bytes : ~uint64_t{0};
  }
  static bool ok(uint64_t offset) { return offset != ~uint64_t{0}; }
  void free(uint64_t offset) { heap_.free_at(offset); }
  void finish() {
    if (heap_.live_blocks() != 0) heap_.reset();
  }

 private:
  memory::Heap heap_;
};

class FloatBins {
 public:
  FloatBins(uint64_t capacity_bytes, uint32_t max_blocks)
      : bins_(std::make_unique<reference::FloatBins>(static_cast<uint32_t>(capacity_bytes / kGranule),
                                                     max_blocks)) {}
  uint32_t allocate(uint32_t, uint64_t bytes) {
    return bins_->allocate(static_cast<uint32_t>((bytes + kGranule - 1) / kGranule));
  }
  static bool ok(uint32_t node) { return node != reference::FloatBins::kNone; }
  void free(uint32_t node) { bins_->free(node); }
  void finish() {}

 private:
  std::unique_ptr<reference::FloatBins> bins_;
};

class TreeBestFit {
 public:
  struct Handle {
    uint64_t offset, size;
  };
  TreeBestFit(uint64_t capacity_bytes, uint32_t) : tree_(capacity_bytes / kGranule) {}
  Handle allocate(uint32_t, uint64_t bytes) {
    const uint64_t size = (bytes + kGranule - 1) / kGranule;
    return {tree_.allocate(size), size};
  }
  static bool ok(Handle handle) { return handle.offset != reference::TreeBestFit::kNone; }
  void free(Handle handle) { tree_.free(handle.offset, handle.size); }
  void finish() {}

 private:
  reference::TreeBestFit tree_;
};

// The smallest arena that serves `trace`, over its peak of live bytes.
template <class Allocator>
double min_arena(const memory::Trace& trace) {
  std::vector<decltype(std::declval<Allocator&>().allocate(0u, uint64_t{1}))> handles(trace.block_count);
  const uint64_t granules =
      memory::smallest_capacity(trace.peak_live_bytes / kGranule, [&](uint64_t capacity) {
        Allocator allocator(capacity * kGranule, 2 * trace.block_count + 16);
        for (const memory::TraceOp& op : trace.ops) {
          if (op.is_free) {
            allocator.free(handles[op.block]);
          } else {
            handles[op.block] = allocator.allocate(op.block, op.size_bytes);
            if (!Allocator::ok(handles[op.block])) return false;
          }
        }
        return true;
      });
  return static_cast<double>(granules * kGranule) / static_cast<double>(trace.peak_live_bytes);
}

}  // namespace gpushare::bench
