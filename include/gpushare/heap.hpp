// heap.hpp: the block heap and the placement solver in C++, over heap.h. Included by gpushare.hpp, whose rules hold here too.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_HEAP_HPP_
#define GPUSHARE_HEAP_HPP_

#include <optional>
#include <vector>

#include "gpushare/gpushare.hpp"

namespace gpushare {

// The block heap alone: places blocks in [0, capacity) of anything. Not thread-safe.
class Heap {
 public:
  explicit Heap(uint64_t capacity_bytes, uint64_t alignment_bytes = 0) {
    gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
    params.capacity_bytes = capacity_bytes;
    params.alignment_bytes = alignment_bytes;
    gpushare_heap out = nullptr;
    check(gpushare_heap_create(&params, &out));
    handle_ = detail::Handle<gpushare_heap, gpushare_heap_release>(out);
  }
  // Empty when no hole is large enough.
  std::optional<uint64_t> alloc(uint64_t bytes) {
    uint64_t offset = 0;
    const int32_t status = gpushare_heap_alloc(handle_.get(), bytes, &offset);
    if (status == GPUSHARE_DEVICE_OUT_OF_MEMORY) return std::nullopt;
    check(status);
    return offset;
  }
  void free(uint64_t offset) { check(gpushare_heap_free(handle_.get(), offset)); }
  gpushare_heap_info info() const {
    gpushare_heap_info info = GPUSHARE_HEAP_INFO_INIT;
    check(gpushare_heap_get_info(handle_.get(), &info));
    return info;
  }

 private:
  detail::Handle<gpushare_heap, gpushare_heap_release> handle_;
};

// When a buffer is alive: [lower, upper) on any axis.
struct Lifetime {
  uint64_t lower = 0;
  uint64_t upper = 0;
  uint64_t bytes = 0;
};
struct Placement {
  std::vector<uint64_t> offsets;  // of each buffer
  uint64_t arena_bytes = 0;
};
// Computes offsets at which buffers alive at the same time do not overlap, in the smallest arena that the
// solver finds. time_limit_ns 0: some seconds.
inline Placement solve_placement(const std::vector<Lifetime>& buffers, uint64_t alignment_bytes = 0,
                                 uint64_t time_limit_ns = 0) {
  std::vector<uint64_t> lower, upper, bytes;
  for (const Lifetime& buffer : buffers) {
    lower.push_back(buffer.lower);
    upper.push_back(buffer.upper);
    bytes.push_back(buffer.bytes);
  }
  Placement out;
  out.offsets.resize(buffers.size());
  check(gpushare_placement_solve(buffers.size(), lower.data(), upper.data(), bytes.data(), alignment_bytes,
                                 time_limit_ns, out.offsets.data(), &out.arena_bytes));
  return out;
}

}  // namespace gpushare

#endif  // GPUSHARE_HEAP_HPP_
