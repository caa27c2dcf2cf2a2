// layout_virtual.hpp: the virtual layout. Every range has its own reserved addresses, and physical granules are mapped
// behind them: of one size, but for a heap's first granule, which is made of small ones. A granule of addresses that has
// memory is a cell. A cell is committed (promised to the range's owner) or unused. Unused cells stay mapped until
// somebody needs their granules: a range that is taken again soon costs no driver call, and unmapping happens in batches,
// off the hot path.
//
// Heaps, lanes and spilled blocks have granules of one size, chosen so that a device has some thousands of them. A size for
// each range would save mapping calls, but a shrunk range could then keep a part of a large granule that others were
// promised. Elastic ranges, which give and take anywhere, have the smallest granules that the device maps. The first
// granule of every heap is made of such small ones, so that a small session takes little (heap_steps()). Memory that is
// behind no promise passes from one size to the other by being released and created anew.
//
// Unmapping needs the device to be done with the bytes. Unused granules whose fences have passed go first, those given
// back longest ago before others; only when all others are taken does the caller wait on the host, without the lock.
//
// Heaps and lanes have all cells of the first bytes of a range; sparse ranges have any. A cell may have host memory
// behind it, which is promised to nobody (layout_moves.cpp). A shared range has no cells: its memory is that of others,
// mapped piece by piece (layout_shared.cpp).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "base/mutex.hpp"
#include "memory/range_layout.hpp"

namespace gpushare::memory {

class VirtualLayout final : public RangeLayout {
 public:
  // small_granule: divides granule, which divides capacity.
  VirtualLayout(device::Device& device, uint64_t granule, uint64_t small_granule, uint64_t capacity)
      : device_(device), granule_(granule), small_granule_(small_granule), capacity_(capacity) {}
  ~VirtualLayout() override;

  Layout kind() const override { return Layout::kVirtual; }
  uint64_t granularity_bytes() const override { return granule_; }
  uint64_t small_granularity_bytes() const override { return small_granule_; }
  uint64_t capacity_bytes() const override { return capacity_; }
  Range span() const override { return {}; }

  base::Status take(RangeUse use, uint64_t bytes, Range* out_range, FenceList* out_fences) override;
  base::Status take_shared(std::shared_ptr<base::Pieces> pieces, uint64_t bytes, Range* out_range) override;
  base::Status adopt_own(Range& range, Range& own) override;
  base::Status extend(Range& range, uint64_t bytes, bool may_wait, FenceList* out_fences) override;
  void shrink(Range& range, uint64_t bytes, const FenceList& fences) override;
  void give(Range& range, const FenceList& fences) override;
  base::Status take_ahead(const Range& range, uint64_t bytes, Range* out_ahead,
                          FenceList* out_fences) override;
  bool would_move_up(const Range&) const override { return false; }
  bool move_up(Range&, const FenceList&, FenceList*) override { return false; }

  bool can_page() const override { return true; }
  base::Status unback(Range& range, uint64_t from_bytes, uint64_t valid_bytes) override;
  base::Status back(Range& range, uint64_t* out_valid_bytes) override;
  void hollow(const Range& range, const std::vector<size_t>& granules, const FenceList& fences) override;

  base::Status open_sparse(uint64_t bytes, bool elastic, Range* out_range) override;
  base::Status commit(const Range& range, size_t first, size_t count, FenceList* out_fences,
                      std::vector<bool>* out_intact, FenceList* out_busy) override;
  void decommit(const Range& range, size_t first, size_t count, const FenceList& fences) override;
  void close_sparse(Range& range) override;

  // layout_moves.cpp
  bool has_host_tier() const override { return device_.can(GPUSHARE_DEVICE_CAP_HOST_PHYSICAL); }
  base::Status commit_host(const Range& range, size_t granule, FenceList* out_busy) override;
  uint64_t host_bytes() override;
  void trim_host() override;
  base::Status begin_move(const Range& range, size_t granule, bool home, size_t slot,
                          Address* out_window) override;
  base::Status end_move(const Range& range, size_t granule, bool home, size_t slot, bool keep,
                        bool* out_lost) override;

  uint64_t trim() override;
  uint64_t free_bytes() const override;
  uint64_t largest_hole_bytes() const override { return free_bytes(); }
  uint64_t mapped_bytes() const override;
  std::string check() const override;

 private:
  static constexpr size_t kNone = SIZE_MAX;
  static constexpr size_t kBatch = 16;  // unmapped together at least, where they are there
  enum class Use : uint8_t { kHeap, kLane, kSparse, kElastic, kShared };
  using SharedFences = std::shared_ptr<FenceList>;  // one list for all granules that were given back together

  struct Cell {
    gpushare_backend_memory* memory = nullptr;  // mapped there
    uint64_t stamp = 0;                         // of the decommit
    SharedFences fences;                        // while not committed: before these it may be in use
    bool committed = false;
    bool on_host = false;
    bool lost = false;  // committed, but a move has left no memory there
  };
  // Physical memory of one size that is behind no addresses.
  struct Pool {
    uint64_t granule;
    std::vector<gpushare_backend_memory*> memories;
  };
  struct Imported {
    gpushare_backend_memory* memory;
    uint64_t bytes;
  };
  struct Region {
    Use use = Use::kHeap;
    uint32_t slot = 0;
    uint64_t granule = 0;
    uint64_t small_granule = 0;
    size_t small_cells = 0;  // the first cells, which are small; together a granule, or none
    Address reserved = 0;
    uint64_t reserved_bytes = 0;
    Address base = 0;    // reserved, aligned to the index's granule
    uint64_t limit = 0;  // addresses from base on
    uint64_t bytes = 0;  // that whoever has taken it has; not of a sparse one
    bool taken = false;
    bool backed = true;         // not paged out, and not hollow
    size_t left = 0;            // while not backed: so many cells from the first still have memory
    size_t intact = 0;          // while not backed: more than these cells hold nothing of use
    uint64_t mapped_bytes = 0;  // of cells with memory
    std::vector<Cell> cells;    // as many as were ever used
    SharedFences last;          // of the last owner
    // For a shared region: the source of its memory, and the pieces mapped so far, one behind the other.
    std::shared_ptr<base::Pieces> pieces;
    std::vector<Imported> imported;
    uint64_t imported_bytes = 0;

    bool is_small(size_t cell) const { return cell < small_cells; }
    uint64_t bytes_of(size_t cell) const { return is_small(cell) ? small_granule : granule; }
    uint64_t offset_of(size_t cell) const {
      const size_t small = std::min(cell, small_cells);
      return small * small_granule + (cell - small) * granule;
    }
    Address address_of(size_t cell) const { return base + offset_of(cell); }
    // The cell that begins at `offset`.
    size_t cell_at(uint64_t offset) const {
      const uint64_t small = small_cells * small_granule;
      return offset < small ? offset / small_granule : small_cells + (offset - small) / granule;
    }
    // The first cell of a granule of the range.
    size_t cell_of(size_t index) const { return cell_at(index * granule); }
  };
  // A cell that is mapped and not committed, if its stamp is still the cell's.
  struct Unused {
    uint32_t slot;
    uint32_t cell;
    uint64_t stamp;
  };

  base::Status no_room(uint64_t bytes) const GPUSHARE_REQUIRES(mutex_);
  size_t pick_retired(Use use, uint64_t bytes) GPUSHARE_REQUIRES(mutex_);
  base::Status take_region(Use use, uint64_t bytes, Region** out_region) GPUSHARE_REQUIRES(mutex_);
  base::Status reserve(Use use, uint64_t bytes, Region** out_region) GPUSHARE_REQUIRES(mutex_);
  base::Status reserve_addresses(uint64_t bytes, Address* out_reserved, uint64_t* out_reserved_bytes,
                                 Address* out_base);
  // layout_shared.cpp
  base::Status import_up_to(Region& region, uint64_t bytes) GPUSHARE_REQUIRES(mutex_);
  // Drops the imported pieces that begin at `bytes` or above. Lets go of `lock` while it waits.
  void drop_imported(Region& region, uint64_t bytes, const FenceList& fences, base::MutexLock& lock);
  void retire(Region& region, SharedFences fences) GPUSHARE_REQUIRES(mutex_);

  // How a call treats granules that the device still uses. It lets go of the lock and waits; or it fails: with NOT_READY and
  // the fences in *busy, where `busy` is given, else with DEVICE_OUT_OF_MEMORY.
  struct Patience {
    bool may_wait = true;
    FenceList* busy = nullptr;
  };
  base::Status wait_for(FenceList fences, const Patience& patience, base::MutexLock& lock);
  // Puts device memory behind those of the cells [first, end) that have none; the promise grows by it. On failure nothing has
  // changed.
  base::Status commit_cells(Region& region, size_t first, size_t end, const Patience& patience,
                            base::MutexLock& lock, FenceList* out_fences, std::vector<bool>* out_intact);
  base::Status drop_unused_host(Region& region, size_t first, size_t count, const Patience& patience,
                                base::MutexLock& lock);
  // Makes the committed ones of the cells [first, end) unused, the last first. with_host: also the cells in host memory.
  void decommit_cells(Region& region, size_t first, size_t end, const SharedFences& fences, bool with_host)
      GPUSHARE_REQUIRES(mutex_);
  // Cells of one size side by side without memory, from as many granules of the pool.
  base::Status map_cells(Region& region, size_t first, size_t count) GPUSHARE_REQUIRES(mutex_);
  // Cells of one size side by side that have memory. Returns how many are unmapped now, from the first on.
  size_t unmap_cells(Region& region, size_t first, size_t count, base::Status* out_status = nullptr)
      GPUSHARE_REQUIRES(mutex_);
  base::Status unmap_cell(Region& region, size_t index) GPUSHARE_REQUIRES(mutex_);
  bool is_unused(const Unused& entry) const GPUSHARE_REQUIRES(mutex_);
  void set_unused(Region& region, size_t index) GPUSHARE_REQUIRES(mutex_);
  // True if the device still works on an unused cell. Writes the fences that must pass to *out_busy if that is empty.
  bool is_busy(const Unused& entry, FenceList* out_busy) GPUSHARE_REQUIRES(mutex_);
  // Fills the pool to `wanted` granules; to fewer, but at least one, where the call would have to wait for more.
  base::Status fill_pool(Pool& pool, size_t wanted, const Patience& patience, base::MutexLock& lock);
  Pool& pool_of(const Region& region, size_t cell) GPUSHARE_REQUIRES(mutex_) {
    return region.bytes_of(cell) == granule_ ? pool_ : small_pool_;
  }
  // Heaps alone begin with small cells.
  size_t small_cells(Use use) const {
    return use == Use::kHeap && small_granule_ < granule_ ? granule_ / small_granule_ : 0;
  }
  Pool& other_pool(const Pool& pool) GPUSHARE_REQUIRES(mutex_) {
    return &pool == &pool_ ? small_pool_ : pool_;
  }
  // Makes granules until the pool has `wanted`, the capacity is used up, or the device refuses. Takes time in proportion to
  // the granules made: a range may want tens of thousands in one call.
  base::Status create(Pool& pool, size_t wanted) GPUSHARE_REQUIRES(mutex_);
  // Releases up to `bytes` of it.
  void release_from(Pool& pool, uint64_t bytes) GPUSHARE_REQUIRES(mutex_);
  // Unmaps granules that nobody is promised, those given back longest ago first, since streams pass their fences in that
  // order. False if there is none that the device is done with; *out_busy are then fences of one that it still works on, if any.
  bool reclaim(uint64_t wanted_bytes, FenceList* out_busy) GPUSHARE_REQUIRES(mutex_);
  void sweep_host() GPUSHARE_REQUIRES(mutex_);
  using Memories = std::vector<gpushare_backend_memory*>;
  // Memory for `count` cells of `bytes` that move, of the device or the host.
  base::Status take_for_move(bool device, uint64_t bytes, size_t count, base::MutexLock& lock,
                             Memories* out_memories);
  // Memory that a move does not need, or no longer; `device`: it was promised.
  void drop_moved(const Memories& memories, uint64_t bytes, bool device) GPUSHARE_REQUIRES(mutex_);
  // Maps `to` in place of what is behind these cells. On failure all is as before, or, with *out_lost, nothing is behind them.
  base::Status exchange_cells(Region& region, size_t first, const Memories& to, bool* out_lost)
      GPUSHARE_REQUIRES(mutex_);
  void release_pools() GPUSHARE_REQUIRES(mutex_);
  base::Result<gpushare_backend_memory*> take_host(uint64_t bytes) GPUSHARE_REQUIRES(mutex_);
  void give_host(gpushare_backend_memory* memory, uint64_t bytes) GPUSHARE_REQUIRES(mutex_);
  void release_host_pools() GPUSHARE_REQUIRES(mutex_);
  uint64_t pooled_host_bytes() const GPUSHARE_REQUIRES(mutex_) {
    return host_pool_.memories.size() * granule_ + small_host_pool_.memories.size() * small_granule_;
  }

  device::Device& device_;
  const uint64_t granule_;
  const uint64_t small_granule_;
  const uint64_t capacity_;
  mutable base::Mutex mutex_;
  std::vector<std::unique_ptr<Region>> regions_
      GPUSHARE_GUARDED_BY(mutex_);                            // never removed: a slot is an index
  std::vector<Region*> retired_ GPUSHARE_GUARDED_BY(mutex_);  // not taken, longest first
  std::deque<Unused> unused_ GPUSHARE_GUARDED_BY(mutex_);     // decommitted longest ago first; some are stale
  std::vector<Unused> unused_host_ GPUSHARE_GUARDED_BY(mutex_);  // the same of host memory, which goes soon
  uint64_t stamp_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  Pool pool_ GPUSHARE_GUARDED_BY(mutex_){granule_, {}};
  Pool small_pool_ GPUSHARE_GUARDED_BY(mutex_){small_granule_, {}};
  size_t created_ GPUSHARE_GUARDED_BY(mutex_) = 0;          // granules of the device, mapped and pooled
  uint64_t created_bytes_ GPUSHARE_GUARDED_BY(mutex_) = 0;  // of them
  uint64_t promised_ GPUSHARE_GUARDED_BY(mutex_) = 0;       // bytes of committed cells of the device
  uint64_t host_bytes_ GPUSHARE_GUARDED_BY(mutex_) = 0;     // of host memory, mapped
  // Host memory of granules that came home, for those that go out next: making it anew costs more than the copy.
  static constexpr size_t kKeptOnHost = 64;  // large granules, or as many bytes
  Pool host_pool_ GPUSHARE_GUARDED_BY(mutex_){granule_, {}};
  Pool small_host_pool_ GPUSHARE_GUARDED_BY(mutex_){small_granule_, {}};
  // During a copy, the memory that a granule moves to is also mapped here.
  Address window_ = 0, window_base_ = 0;
  uint64_t window_bytes_ = 0;
  Memories moving_[kMoveSlots] GPUSHARE_GUARDED_BY(mutex_);
  bool moving_home_ GPUSHARE_GUARDED_BY(mutex_) = false;
};

}  // namespace gpushare::memory
