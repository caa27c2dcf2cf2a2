// range_layout.hpp: gives heaps and lanes their address ranges and the bytes behind them. Two ways:
// layout_contiguous.hpp (one buffer) and layout_virtual.hpp (reserved addresses, physical granules mapped
// behind them). It knows no blocks.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/pieces.hpp"
#include "base/status.hpp"
#include "base/steps.hpp"
#include "device/device.hpp"
#include "memory/device_memory.hpp"
#include "memory/fence.hpp"

namespace gpushare::memory {

// Bytes that one heap or lane has from the layout. base is aligned to 2 MiB, bytes is a multiple of the
// granularity, or a size of heap_steps().
struct Range {
  Address base = 0;
  uint64_t bytes = 0;
  uint32_t slot = UINT32_MAX;  // the layout's
};

enum class RangeUse : uint8_t { kHeap, kLane };

// Thread-safe: each method takes the layout's lock. A Range is changed only by its owner, one call at a time.
// Sizes are multiples of the granularity, those of heaps have heap_steps(). Fences handed out must be ordered before the
// range is used; fences handed in tell when the device is done with the bytes given back.
class RangeLayout {
 public:
  virtual ~RangeLayout() = default;
  virtual Layout kind() const = 0;
  virtual uint64_t granularity_bytes() const = 0;
  // The granularity of elastic ranges and of small heaps: as small as the device maps, 2 MiB at least.
  virtual uint64_t small_granularity_bytes() const { return granularity_bytes(); }
  // The sizes that ranges of heaps have.
  base::Steps heap_steps() const { return {small_granularity_bytes(), granularity_bytes()}; }
  virtual uint64_t capacity_bytes() const = 0;
  // All addresses that ranges will ever have, if that is known from the beginning (else empty).
  virtual Range span() const = 0;

  // bytes > 0. Errors: DEVICE_OUT_OF_MEMORY, naming asked and largest hole; nothing has changed then. So in
  // all that follow.
  virtual base::Status take(RangeUse use, uint64_t bytes, Range* out_range, FenceList* out_fences) = 0;
  // The same for a lane that lies in memory of others: it is mapped from the pieces, whose promise is not counted here.
  // Giving it back waits on the host for the device. UNSUPPORTED unless the layout maps memory. Errors: also
  // DEVICE_OUT_OF_MEMORY (fewer pieces).
  virtual base::Status take_shared(std::shared_ptr<base::Pieces> pieces, uint64_t bytes, Range* out_range);
  // Maps the memory of `own`, a lane's range of as many bytes, behind the addresses of such a range in place of the
  // pieces: from then on
  // `range` is a lane's own, and `own` is empty. The device works in neither. Errors: the device's, after which `range`
  // is of no use.
  virtual base::Status adopt_own(Range& range, Range& own);
  // Adds bytes at the range's end, where it lies. Unless it may wait, it does not wait on the host for device
  // work either: DEVICE_OUT_OF_MEMORY then.
  virtual base::Status extend(Range& range, uint64_t bytes, bool may_wait, FenceList* out_fences) = 0;
  // Gives back all above the first `bytes` (> 0).
  virtual void shrink(Range& range, uint64_t bytes, const FenceList& fences) = 0;
  virtual void give(Range& range, const FenceList& fences) = 0;

  // For a lane that must grow at its next boundary and cannot grow in place: takes the missing bytes now,
  // either directly below the range or as a whole new range, so that the boundary cannot fail.
  virtual base::Status take_ahead(const Range& range, uint64_t bytes, Range* out_ahead,
                                  FenceList* out_fences) = 0;
  // At the boundary, the range being empty: moves it to where it lies best now. False if that is where it is.
  virtual bool would_move_up(const Range& range) const = 0;
  virtual bool move_up(Range& range, const FenceList& fences, FenceList* out_fences) = 0;
  // Changes whenever would_move_up() may answer otherwise than last time.
  uint64_t epoch() const { return epoch_.load(std::memory_order_acquire); }

  // Takes the memory from behind a range whose device work is done, and puts some behind it again; the
  // addresses stay. The first `valid_bytes` hold what the owner wants back: back() tells how many of them
  // nobody has needed meanwhile, so that they need no copy. `from_bytes`, a multiple of the granularity: the memory
  // behind the bytes before it stays until the next unback(), which must come before back(). UNSUPPORTED unless
  // can_page().
  virtual bool can_page() const = 0;
  virtual base::Status unback(Range& range, uint64_t from_bytes, uint64_t valid_bytes) = 0;
  virtual base::Status back(Range& range, uint64_t* out_valid_bytes) = 0;

  // Takes the memory from granules that hold nothing, until the next back() or for good; after `fences` the device is done with
  // them. Virtual: for a lane that is closed, or a heap, and give() takes the whole range all the same. Contiguous: for a heap,
  // whose other granules are then given one stretch at a time.
  virtual void hollow(const Range&, const std::vector<size_t>& /*granules*/, const FenceList&) {}

  // Sparse ranges: addresses with granules mapped anywhere behind them, for elastic ranges (elastic_range.hpp). UNSUPPORTED
  // unless the layout maps granules. A sparse range's memory counts as promised from commit to decommit; decommitted granules
  // stay mapped until others need them. One call at a time for each range; granules are counted from its start.
  // Its granules are small_granularity_bytes() large if it is elastic, else granularity_bytes(); only these move to host memory.
  virtual base::Status open_sparse(uint64_t bytes, bool elastic, Range* out_range);
  // Puts memory behind the granules that have none. *out_fences must be passed before the bytes are used;
  // (*out_intact)[i], if given: granule first + i was mapped all the time since it was decommitted, so its content is intact.
  // Never waits for device work. Errors: NOT_READY (all other granules are in use by device work: try again once *out_busy
  // has passed), DEVICE_OUT_OF_MEMORY, the device's own: nothing has changed then.
  virtual base::Status commit(const Range& range, size_t first, size_t count, FenceList* out_fences,
                              std::vector<bool>* out_intact, FenceList* out_busy);
  // Takes the memory back from granules that have some; after `fences` the device is done with it. Never waits, never fails.
  virtual void decommit(const Range& range, size_t first, size_t count, const FenceList& fences);
  // All of it must be decommitted.
  virtual void close_sparse(Range& range);

  // Host memory behind granules (GPUSHARE_DEVICE_CAP_HOST_PHYSICAL), which is not promised to anybody, and moves
  // between host and device memory. The blocks in a granule keep their addresses. Granules of any range can move.
  // unback() and back() do not touch granules in host memory; shrink(), give() and decommit() release them. One thread
  // moves at a time.
  static constexpr size_t kMoveSlots = 16;  // moves that may be under way together
  virtual bool has_host_tier() const { return false; }
  // Puts host memory behind a granule of a sparse range that is not committed. Never waits for device work. Errors: NOT_READY
  // (device work of an earlier owner uses what was there: try again once *out_busy has passed), HOST_OUT_OF_MEMORY, the
  // device's.
  virtual base::Status commit_host(const Range& range, size_t granule, FenceList* out_busy);
  // Host memory behind granules, less what the device is done with, plus a little that is kept for the next moves.
  virtual uint64_t host_bytes() { return 0; }
  // Gives back what is kept for the next moves.
  virtual void trim_host() {}
  // Takes memory of the other kind for the granule and maps it at *out_window as well, for the caller to copy to. Never waits for
  // device work. Errors: DEVICE_OUT_OF_MEMORY, HOST_OUT_OF_MEMORY, the device's: nothing has changed then.
  virtual base::Status begin_move(const Range& range, size_t granule, bool home, size_t slot,
                                  Address* out_window);
  // After the copy. keep: the new memory takes the place of the old one, else it goes. Errors: the device's; the
  // granule is as it was before the move then, or, with *out_lost, has neither memory.
  virtual base::Status end_move(const Range& range, size_t granule, bool home, size_t slot, bool keep,
                                bool* out_lost);

  // Gives cached memory back to the system; returns the bytes.
  virtual uint64_t trim() = 0;
  virtual uint64_t free_bytes() const = 0;
  virtual uint64_t largest_hole_bytes() const = 0;
  virtual uint64_t mapped_bytes() const = 0;
  // Checks the layout's own invariants; empty when they hold.
  virtual std::string check() const = 0;

 protected:
  std::atomic<uint64_t> epoch_{1};
};

inline base::Status RangeLayout::take_shared(std::shared_ptr<base::Pieces>, uint64_t, Range*) {
  return {GPUSHARE_UNSUPPORTED, "lanes are shared between processes on the virtual layout alone"};
}
inline base::Status RangeLayout::adopt_own(Range&, Range&) {
  return take_shared(nullptr, 0, nullptr);
}
inline base::Status RangeLayout::open_sparse(uint64_t, bool, Range*) {
  return {GPUSHARE_UNSUPPORTED,
          "elastic ranges need the virtual layout: open the runtime with GPUSHARE_LAYOUT_VIRTUAL on a device "
          "with virtual memory"};
}
inline base::Status RangeLayout::commit(const Range&, size_t, size_t, FenceList*, std::vector<bool>*,
                                        FenceList*) {
  return open_sparse(0, false, nullptr);
}
inline base::Status RangeLayout::commit_host(const Range&, size_t, FenceList*) {
  return open_sparse(0, false, nullptr);
}
inline base::Status RangeLayout::begin_move(const Range&, size_t, bool, size_t, Address*) {
  return open_sparse(0, false, nullptr);
}
inline base::Status RangeLayout::end_move(const Range&, size_t, bool, size_t, bool, bool*) {
  return open_sparse(0, false, nullptr);
}
inline void RangeLayout::decommit(const Range&, size_t, size_t, const FenceList&) {}
inline void RangeLayout::close_sparse(Range&) {}

// Capacity is rounded down to the granularity; it must hold at least one. Errors: DEVICE_OUT_OF_MEMORY (the
// buffer), UNSUPPORTED.
base::Result<std::unique_ptr<RangeLayout>> make_contiguous_layout(device::Device& device,
                                                                  uint64_t capacity_bytes);
base::Result<std::unique_ptr<RangeLayout>> make_virtual_layout(device::Device& device,
                                                               uint64_t capacity_bytes, uint64_t granule);
// 2 MiB up to 8 GiB of capacity, then a 4096th of it up to 64 MiB; at least what the device maps.
uint64_t virtual_granule(const device::Device& device, uint64_t capacity_bytes);

}  // namespace gpushare::memory
