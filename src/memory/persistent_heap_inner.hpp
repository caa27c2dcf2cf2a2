// persistent_heap_inner.hpp: the calls that nearly every persistent block makes, inlined from the door to the heap. The C ABI
// includes it, and persistent_heap.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "memory/heap_inner.hpp"
#include "memory/persistent_heap.hpp"

namespace gpushare::memory {

// All heaps of a device count in one number, which threads of different sessions must not write for each block: a heap tells
// it when its live bytes differ enough from what it told last, and when it is asked.
[[gnu::always_inline]] inline void PersistentHeapImpl::tell_live() {
  const uint64_t live = device_live();
  highest_ = std::max(highest_, live);
  if (live - quiet_from_ > quiet_width_) [[unlikely]]
    leave_quiet();
}

// Whether the block lies in the granule that was used last of all: it stays the last.
[[gnu::always_inline]] inline bool PersistentHeapImpl::touched_last(Address address, uint64_t bytes) const {
  return address >= touched_.base && address + bytes <= touched_.base + touched_.bytes &&
         spill_owner_.last_tick() == touched_tick_;
}

[[gnu::always_inline]] inline bool PersistentHeapImpl::alloc_plain(uint64_t bytes, uint64_t tag,
                                                                   Address* out) {
  if (moving_ || !is_resident() ||
      device_live() + promoted_ + round_up(bytes, kBlockGranuleBytes) > promised_) [[unlikely]]
    return false;
  for (Extent& extent : extents_) {
    if (!extent.hollow.empty() || extent.away > 0) [[unlikely]]
      return false;
    const BlockHandle handle = extent.heap->allocate_front(bytes, tag, kBlockHeap);
    if (!handle) continue;
    const uint64_t size = extent.heap->size_bytes(handle);
    *out = extent.range.base + handle.offset_bytes;
    if (!extent.granules.empty() && !touched_last(*out, size)) touch(extent, handle.offset_bytes, size);
    live_ += size;
    peak_ = std::max(peak_, device_live() + promoted_);
    tell_live();
    return true;
  }
  return false;
}

[[gnu::always_inline]] inline bool PersistentHeapImpl::free_plain(Address address) {
  if (moving_) [[unlikely]]
    return false;
  for (Extent& extent : extents_) {
    const uint64_t offset = address - extent.range.base;
    if (offset >= extent.range.bytes) continue;
    // Another extent may lie in hollow granules of this one.
    if (!extent.hollow.empty() || extent.away > 0) [[unlikely]]
      return false;
    const uint64_t before = extent.heap->live_granules();
    if (!extent.heap->free_unless(offset, BlockTag::kUsed | BlockTag::kFreed, kBlockHeap)) return false;
    live_ -= (before - extent.heap->live_granules()) * kBlockGranuleBytes;
    tell_live();
    return true;
  }
  return false;
}

[[gnu::always_inline]] inline bool HeapDoor::alloc(const void* name, Kind kind, uint64_t bytes,
                                                   uint64_t alignment,
                                                   Address* out) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  if (!is_ordinary_request(bytes, alignment)) [[unlikely]]
    return false;
  const ShortLockGuard lock(lock_);
  return name_ == name && name != nullptr && heap_->alloc_plain(bytes, BlockTag::make(kind, bytes), out);
}

[[gnu::always_inline]] inline bool HeapDoor::free(const void* owner,
                                                  Address address) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  const ShortLockGuard lock(lock_);
  return name_ != nullptr && owner_ == owner && heap_->free_plain(address);
}

}  // namespace gpushare::memory
