// The block heap and the placement solver, without a device.
// SPDX-License-Identifier: Apache-2.0

#include <atomic>

#include "base/calls.hpp"
#include "base/units.hpp"
#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/handles.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"
#include "memory/heap_inner.hpp"

using namespace gpushare;

namespace {

constexpr uint64_t kMaxHeapBytes = 1ull << 50;
constexpr uint64_t kMostAtOnce = 1ull << 46;  // 2^42 granules at most, what Heap::allocate_front() takes

// All heaps of the C ABI find blocks by their offset.
memory::Heap::Shape shape_of(const memory::Heap& heap) {
  return {heap.shape().granule_shift, true};
}

// The call without guard.hpp and without a pin: the caller serialises the calls on a heap, its release among them. False if
// the thread may make no call, the handle is not live, or `at` does nothing.
template <class At>
[[gnu::always_inline]] inline bool at_once(gpushare_heap heap, At&& at) {
  if (base::calls_refused() != nullptr) return false;
  const base::CallScope inside(base::kInsideCall);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  memory::Heap* const of = capi::table_of<gpushare_heap>().peek(heap);
  return of != nullptr && at(*of);
}

[[gnu::noinline]] int32_t alloc_by_guard(gpushare_heap heap, uint64_t bytes, uint64_t* out_offset) {
  return capi::guard([&]() -> base::Status {
    if (out_offset == nullptr) return capi::null_argument("out_offset");
    const auto pin = capi::find(heap);
    if (!pin) return capi::stale(heap);
    if (bytes == 0) return {GPUSHARE_INVALID_ARGUMENT, "bytes is 0; a block has at least one byte"};
    const memory::BlockHandle block = pin->allocate(bytes);
    if (block) {
      *out_offset = block.offset_bytes;
      return {};
    }
    if (block.status == memory::HeapStatus::kNoRecords) return memory::too_many_blocks("the heap", *pin);
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
            "asked for " + base::format_bytes(bytes) + "; " + base::format_bytes(pin->free_bytes()) + " of " +
                base::format_bytes(pin->capacity_bytes()) + " are free, the largest hole is " +
                base::format_bytes(pin->largest_hole_bytes())};
  });
}

[[gnu::noinline]] int32_t free_by_guard(gpushare_heap heap, uint64_t offset) {
  return capi::with(heap, [&](memory::Heap& of) -> base::Status {
    if (of.free_at(offset) == memory::HeapStatus::kOk) return {};
    return {GPUSHARE_NOT_FOUND,
            base::format("no live block starts at offset %llu", static_cast<unsigned long long>(offset))};
  });
}

}  // namespace

extern "C" {

int32_t gpushare_heap_create(const gpushare_heap_params* params, gpushare_heap* out_heap) {
  return capi::guard([&]() -> base::Status {
    if (out_heap == nullptr) return capi::null_argument("out_heap");
    gpushare_heap_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    const uint64_t granule = read.alignment_bytes == 0 ? 256 : read.alignment_bytes;
    if (granule < 16 || granule > (1u << 30) || (granule & (granule - 1)) != 0)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("alignment_bytes is %llu, allowed are powers of two from 16 to 2^30, or 0 for 256",
                           static_cast<unsigned long long>(granule))};
    if (read.capacity_bytes < granule || read.capacity_bytes > kMaxHeapBytes)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("capacity_bytes is %llu, allowed are one granule (%llu) to 2^50",
                           static_cast<unsigned long long>(read.capacity_bytes),
                           static_cast<unsigned long long>(granule))};
    memory::HeapOptions options;
    options.capacity_bytes = read.capacity_bytes;
    options.granule_bytes = granule;
    GPUSHARE_ASSIGN_OR_RETURN(memory::Heap heap, memory::Heap::create(options));
    return capi::publish(std::make_shared<memory::Heap>(std::move(heap)), out_heap);
  });
}

int32_t gpushare_heap_release(gpushare_heap heap) {
  return capi::release(heap);
}

int32_t gpushare_heap_alloc(gpushare_heap heap, uint64_t bytes, uint64_t* out_offset) {
  const bool ordinary = out_offset != nullptr && bytes - 1 < kMostAtOnce;  // wraps for 0 bytes
  const bool done = ordinary && at_once(
                                    heap, [&](memory::Heap & of) __attribute__((always_inline)) {
                                      const memory::BlockHandle block =
                                          of.allocate_front(bytes, 0, shape_of(of));
                                      if (!block) return false;
                                      *out_offset = block.offset_bytes;
                                      return true;
                                    });
  return done ? GPUSHARE_OK : alloc_by_guard(heap, bytes, out_offset);
}

int32_t gpushare_heap_free(gpushare_heap heap, uint64_t offset) {
  const bool done = at_once(
      heap, [&](memory::Heap & of)
                __attribute__((always_inline)) { return of.free_unless(offset, 0, shape_of(of)); });
  return done ? GPUSHARE_OK : free_by_guard(heap, offset);
}

int32_t gpushare_heap_get_info(gpushare_heap heap, gpushare_heap_info* out_info) {
  return capi::with(heap, [&](memory::Heap& of) -> base::Status {
    gpushare_heap_info info = GPUSHARE_HEAP_INFO_INIT;
    info.capacity_bytes = of.capacity_bytes();
    info.live_bytes = of.live_bytes();
    info.live_blocks = of.live_blocks();
    info.largest_hole_bytes = of.largest_hole_bytes();
    info.high_water_bytes = of.high_water_bytes();
    return capi::write_struct("out_info", info, out_info);
  });
}

}  // extern "C"
