// block_owner.hpp: the common part of a heap, a lane and the host-memory store: they own blocks, each under its
// own lock, and an address finds them through the index. The header also has the parts that they share: the packed
// facts of a block, blocks whose reuse must wait for other streams, and the state of the whole device memory.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/flat_hash.hpp"
#include "base/mutex.hpp"
#include "base/round_up.hpp"
#include "base/status.hpp"
#include "base/work_mutex.hpp"
#include "memory/address_index.hpp"
#include "memory/device_memory.hpp"
#include "memory/event_recorder.hpp"
#include "memory/fence.hpp"
#include "memory/heap.hpp"
#include "memory/plan_solver.hpp"
#include "memory/range_layout.hpp"

namespace gpushare::memory {

class PersistentHeapImpl;
class SpillStore;
class GranuleMover;

// All are thread-safe and take the owner's lock; none blocks.
class BlockOwner {
 public:
  virtual ~BlockOwner() = default;
  // NOT_FOUND if no live block of this owner begins there.
  virtual base::Status free_block(Address address) = 0;
  virtual base::Status add_use(Address address, const FencePtr& use) = 0;
  // Returns false in place of NOT_FOUND: a framework asks for many blocks that were freed, and needs no message.
  virtual bool find_block(Address address, BlockInfo* out_info) = 0;
  // The stream that reuse is ordered on in any case: uses on it need no record. null if there is none.
  virtual const device::Stream* home_stream() const = 0;
  // Whether that is its native handle.
  virtual bool is_home(const void* native) const = 0;
};

inline base::Status no_such_block(Address address) {
  return {GPUSHARE_NOT_FOUND, base::format("no live block begins at device address %#llx",
                                           static_cast<unsigned long long>(address))};
}

constexpr uint64_t kBlockGranuleBytes = 256;
// The shape of the heap of every lane and session.
constexpr Heap::Shape kBlockHeap{std::countr_zero(kBlockGranuleBytes), true};
constexpr uint64_t kMaxBlockBytes = (uint64_t{1} << 48) - 1;
constexpr uint64_t kMaxAlignmentBytes = uint64_t{2} << 20;

using base::round_up;

// The content of a block's 64-bit tag in the heap.
struct BlockTag {
  static constexpr uint64_t kPromoted = uint64_t{1} << 50;
  static constexpr uint64_t kUsed = uint64_t{1} << 51;    // has uses on other streams
  static constexpr uint64_t kFreed = uint64_t{1} << 52;   // freed; waits for those uses
  static constexpr uint64_t kHollow = uint64_t{1} << 53;  // with kFreed: no block, addresses without memory
  static uint64_t make(Kind kind, uint64_t bytes) {
    return bytes | uint64_t{static_cast<uint32_t>(kind)} << 48;
  }
  static uint64_t bytes(uint64_t tag) { return tag & kMaxBlockBytes; }
  static Kind kind(uint64_t tag) { return static_cast<Kind>((tag >> 48) & 3); }
};

// Calls fn(granule, bytes) for each granule that the bytes from `offset` on lie in.
template <class Fn>
void for_each_granule(uint64_t granularity, uint64_t offset, uint64_t bytes, Fn&& fn) {
  for (uint64_t at = offset; at < offset + bytes;) {
    const uint64_t end = std::min(offset + bytes, (at / granularity + 1) * granularity);
    fn(at / granularity, end - at);
    at = end;
  }
}

// Whether every block of the size is aligned as asked, and the size is one that a heap takes.
[[gnu::always_inline]] inline bool is_ordinary_request(uint64_t bytes, uint64_t alignment) {
  const bool odd_alignment =
      alignment != 0 && (alignment > kBlockGranuleBytes || (alignment & (alignment - 1)) != 0);
  return !odd_alignment && bytes - 1 < kMaxBlockBytes - kMaxAlignmentBytes;
}

// INVALID_ARGUMENT unless a block of this size and alignment can be asked for.
inline base::Status check_request(uint64_t bytes, uint64_t alignment) {
  if (bytes == 0) return {GPUSHARE_INVALID_ARGUMENT, "bytes must be above 0"};
  if (bytes > kMaxBlockBytes - kMaxAlignmentBytes)
    return {GPUSHARE_INVALID_ARGUMENT, base::format("bytes is %llu; a block has less than 256 TiB",
                                                    static_cast<unsigned long long>(bytes))};
  if ((alignment & (alignment - 1)) != 0 || alignment > kMaxAlignmentBytes)
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("alignment is %llu; it must be 0 or a power of two up to 2 MiB",
                         static_cast<unsigned long long>(alignment))};
  return {};
}

// Uses of an owner's blocks on other streams, and freed blocks that wait for them. Guarded by the owner's
// lock. Empty in the common case: the hot path then looks at one tag bit.
class UseTable {
 public:
  void add(uint64_t key, const FencePtr& use) {
    FenceList& uses = uses_[key];
    if (std::find(uses.begin(), uses.end(), use) != uses.end()) return;
    if (uses.size() >= 8) prune(uses);
    uses.push_back(use);
  }
  // The block is freed: it waits with the others until take_passed or take_all hands it out.
  void defer(uint64_t key) {
    const auto uses = uses_.find(key);
    FenceList fences;
    if (uses != uses_.end()) {
      fences = std::move(uses->second);
      uses_.erase(uses);
    }
    freed_.push_back({key, std::move(fences)});
  }
  size_t deferred() const { return freed_.size(); }
  bool empty() const { return uses_.empty() && freed_.empty(); }

  // Calls fn(key) for each freed block whose uses have passed. Asks the device.
  template <class Fn>
  bool take_passed(Fn&& fn) {
    const size_t before = freed_.size();
    for (size_t i = 0; i < freed_.size();) {
      if (all_passed(freed_[i].fences)) {
        fn(freed_[i].key);
        if (i + 1 != freed_.size()) freed_[i] = std::move(freed_.back());
        freed_.pop_back();
      } else {
        ++i;
      }
    }
    return freed_.size() != before;
  }
  // Lets `stream` wait for the outstanding fences of each freed block, and calls fn(key). A block whose fences the device
  // does not order on the stream stays. Never waits: owners call it with their locks held.
  template <class Fn>
  bool take_ordered(const device::Stream& stream, Fn&& fn) {
    FenceList ordered;
    const auto order = [&](const FencePtr& fence) {
      if (!fence || std::find(ordered.begin(), ordered.end(), fence) != ordered.end()) return true;
      if (!fence->try_order(stream)) return false;
      ordered.push_back(fence);
      return true;
    };
    return std::erase_if(freed_, [&](const Freed& freed) {
             if (!std::all_of(freed.fences.begin(), freed.fences.end(), order)) return false;
             fn(freed.key);
             return true;
           }) > 0;
  }
  // Every outstanding fence, each once; the table is empty afterwards.
  FenceList drain() {
    FenceList all;
    const auto add_all = [&all](const FenceList& fences) {
      for (const FencePtr& fence : fences)
        if (std::find(all.begin(), all.end(), fence) == all.end()) all.push_back(fence);
    };
    for (auto& [key, uses] : uses_) add_all(uses);
    for (auto& freed : freed_) add_all(freed.fences);
    uses_.clear();
    freed_.clear();
    return all;
  }
  // The outstanding fences, with repetitions; the table keeps them.
  FenceList outstanding() const {
    FenceList all;
    for (const auto& [key, uses] : uses_) all.insert(all.end(), uses.begin(), uses.end());
    for (const auto& freed : freed_) all.insert(all.end(), freed.fences.begin(), freed.fences.end());
    return all;
  }
  void forget(uint64_t key) { uses_.erase(key); }

 private:
  struct Freed {
    uint64_t key;
    FenceList fences;
  };
  base::FlatHashMap<uint64_t, FenceList> uses_;
  std::vector<Freed> freed_;
};

// State that all owners of one device's memory share. The counters are relaxed: each is exact once its writers
// are quiet.
struct Shared {
  explicit Shared(device::Device& the_device)
      : device(the_device), fences(the_device), plans(the_device.can(GPUSHARE_DEVICE_CAP_VIRTUAL_TIME)) {}

  device::Device& device;
  Fences fences;
  AddressIndex index;
  std::unique_ptr<RangeLayout> layout;
  std::unique_ptr<SpillStore> spill;
  std::unique_ptr<GranuleMover> mover;
  EventRecorder recorder;
  std::atomic<uint64_t> persistent_bytes{0};  // live in heaps, as they tell (PersistentHeapImpl::tell_live)
  std::atomic<PersistentHeapImpl*> untold{nullptr};  // the heaps that may have something to tell
  base::Mutex hearing;  // held while heaps tell: a second caller finds what they told the first
  std::atomic<uint64_t> ephemeral_bytes{0};  // live in lanes, as they tell (LaneImpl::tell_live)
  const void* owner = nullptr;               // DeviceMemoryOptions::owner
  std::atomic<uint64_t> peak_bytes{0};
  std::atomic<uint64_t> paged_out_bytes{0};
  std::atomic<uint64_t> paged_in_bytes{0};
  PlanSolver plans;

  // Lets the heaps tell: persistent_bytes is exact once its writers are quiet. persistent_heap.cpp
  void hear_heaps();
  void note_peak() {
    const uint64_t now =
        persistent_bytes.load(std::memory_order_relaxed) + ephemeral_bytes.load(std::memory_order_relaxed);
    uint64_t peak = peak_bytes.load(std::memory_order_relaxed);
    while (now > peak && !peak_bytes.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }
};

}  // namespace gpushare::memory
