// lane_inner.hpp: the calls that nearly every block of a lane makes, inlined from the door to the heap. The C ABI
// includes it, and lane.cpp.
//
// These calls take about as many cycles as a processor needs to issue their instructions, so each one counts.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "memory/heap_inner.hpp"
#include "memory/lane.hpp"

namespace gpushare::memory {

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
  const BlockHandle handle =
      heap_->allocate_front(bytes, BlockTag::make(Kind::kEphemeral, bytes), kBlockHeap);
  if (handle) tell_live();
  return handle;
}

[[gnu::always_inline]] inline bool LaneImpl::free_plain(Address address) {
  // No block of the heap lies at an offset outside of the range.
  if (!heap_->free_unless(address - range_.base, kSpecialTags, kBlockHeap)) return false;
  tell_freed();
  return true;
}

[[gnu::always_inline]] inline bool LaneDoor::alloc(uint64_t key, uint64_t bytes, uint64_t alignment,
                                                   Address* out) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  if (!is_ordinary_request(bytes, alignment)) [[unlikely]]
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

[[gnu::always_inline]] inline bool LaneDoor::alloc_listed(uint64_t key, uint64_t owner, const void* native,
                                                          uint64_t bytes, uint64_t alignment,
                                                          Address* out) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  if (!is_ordinary_request(bytes, alignment)) [[unlikely]]
    return false;
  const ShortLockGuard lock(lock_);
  Journal* const journal = journal_;
  if (key_.load(std::memory_order_relaxed) != key || journal == nullptr || journal->owner != owner)
      [[unlikely]]
    return false;
  LaneImpl& lane = *lane_;
  const size_t place = journal->count;
  if (!lane.is_home(native) || place >= journal->most || journal->expects(bytes)) [[unlikely]]
    return false;
  const BlockHandle handle = lane.is_plain() ? lane.alloc_plain(bytes) : lane.alloc_here(bytes, alignment);
  if (!handle) [[unlikely]]
    return false;
  *out = lane.range_.base + handle.offset_bytes;
  journal->entries[place] = {bytes, *out};
  journal->count = place + 1;
  journal->served.store(journal->served.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  return true;
}

[[gnu::always_inline]] inline bool LaneDoor::free_listed(uint64_t key, uint64_t owner, const void* native,
                                                         Address address) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  const ShortLockGuard lock(lock_);
  const Journal* const journal = journal_;
  if (key_.load(std::memory_order_relaxed) != key || journal == nullptr || journal->owner != owner)
      [[unlikely]]
    return false;
  LaneImpl& lane = *lane_;
  if (!lane.is_home(native)) [[unlikely]]
    return false;
  return lane.is_plain() ? lane.free_plain(address) : lane.free_here(address);
}

// So many requests of a bulk call are served under one lock.
constexpr size_t kBulk = 64;

[[gnu::always_inline]] inline size_t LaneDoor::alloc_many(uint64_t key, const uint64_t* bytes, size_t count,
                                                          uint64_t alignment,
                                                          Address* out) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  if (alignment > kBlockGranuleBytes || (alignment & (alignment - 1)) != 0) return 0;
  size_t done = 0;
  while (done < count) {
    const size_t until = std::min(count, done + kBulk);
    const ShortLockGuard lock(lock_);
    if (key_.load(std::memory_order_relaxed) != key) return done;
    LaneImpl& lane = *lane_;
    const bool plain = lane.is_plain();
    for (; done < until; ++done) {
      if (bytes[done] - 1 >= kMaxBlockBytes - kMaxAlignmentBytes) return done;
      const BlockHandle handle =
          plain ? lane.alloc_plain(bytes[done]) : lane.alloc_here(bytes[done], alignment);
      if (!handle) return done;
      out[done] = lane.range_.base + handle.offset_bytes;
    }
  }
  return done;
}

[[gnu::always_inline]] inline size_t LaneDoor::free_many(uint64_t key, const Address* addresses,
                                                         size_t count) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  size_t done = 0;
  while (done < count) {
    const size_t until = std::min(count, done + kBulk);
    const ShortLockGuard lock(lock_);
    if (key_.load(std::memory_order_relaxed) != key) return done;
    LaneImpl& lane = *lane_;
    const bool plain = lane.is_plain();
    for (; done < until; ++done)
      if (!(plain ? lane.free_plain(addresses[done]) : lane.free_here(addresses[done]))) return done;
  }
  return done;
}

}  // namespace gpushare::memory
