// lane_inner.hpp: the calls that nearly every block of a lane makes, inlined from the door to the heap. The C ABI
// includes it, and lane.cpp.
//
// These calls take about as many cycles as a processor needs to issue their instructions, so each one counts.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>

#include "memory/heap_inner.hpp"
#include "memory/lane.hpp"

namespace gpushare::memory {

// The shape of every lane's heap.
constexpr Heap::Shape kLaneHeap{std::countr_zero(kBlockGranuleBytes), true};
// Blocks of a lane that need more than the heap when they are freed.
constexpr uint64_t kSpecialTags = BlockTag::kPromoted | BlockTag::kUsed | BlockTag::kFreed;

// The device's peak is of all lanes together at one time, so each lane reports its live bytes: in steps and on request, because
// the counter is shared. With a placement plan the whole arena counts.
[[gnu::always_inline]] inline void LaneImpl::tell_live() {
  const uint64_t live = ephemeral_live();
  highest_bytes_ = std::max(highest_bytes_, live);
  if (live - quiet_from_ > quiet_width_) [[unlikely]]
    tell_now();
}

[[gnu::always_inline]] inline void LaneImpl::tell_freed() {
  if (ephemeral_live() - quiet_from_ > quiet_width_) [[unlikely]]
    tell_now();
}

[[gnu::always_inline]] inline BlockHandle LaneImpl::alloc_plain(uint64_t bytes) {
  const BlockHandle handle = heap_->allocate_front(bytes, BlockTag::make(Kind::kEphemeral, bytes), kLaneHeap);
  if (handle) tell_live();
  return handle;
}

[[gnu::always_inline]] inline bool LaneImpl::free_plain(Address address) {
  // No block of the heap lies at an offset outside of the range.
  if (!heap_->free_unless(address - range_.base, kSpecialTags, kLaneHeap)) return false;
  tell_freed();
  return true;
}

[[gnu::always_inline]] inline bool LaneDoor::alloc(uint64_t key, uint64_t bytes, uint64_t alignment,
                                                   Address* out) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  const bool odd_alignment =
      alignment != 0 && (alignment > kBlockGranuleBytes || (alignment & (alignment - 1)) != 0);
  if (odd_alignment || bytes - 1 >= kMaxBlockBytes - kMaxAlignmentBytes) [[unlikely]]
    return false;
  const ShortLockGuard lock(lock_);
  if (key_.load(std::memory_order_relaxed) != key) [[unlikely]]
    return false;
  LaneImpl& lane = *lane_;
  const BlockHandle handle = lane.is_plain() ? lane.alloc_plain(bytes) : lane.alloc_here(bytes, alignment);
  if (!handle) [[unlikely]]
    return false;
  *out = lane.range_.base + handle.offset_bytes;
  return true;
}

[[gnu::always_inline]] inline bool LaneDoor::free(uint64_t key,
                                                  Address address) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  const ShortLockGuard lock(lock_);
  if (key_.load(std::memory_order_relaxed) != key) [[unlikely]]
    return false;
  LaneImpl& lane = *lane_;
  return lane.is_plain() ? lane.free_plain(address) : lane.free_here(address);
}

}  // namespace gpushare::memory
