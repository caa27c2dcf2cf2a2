// The virtual layout: every range has its own reserved addresses, and physical granules of one size are
// mapped behind its first bytes. What a range gives back stays mapped until somebody needs the granules: a
// range taken again soon costs no driver call, and unmapping happens in batches, off the hot path.
//
// One granule size for all, chosen so that a device has some thousands of granules: a size per range would
// save mapping calls, but a shrunk range could then keep part of a large granule that others were promised.
//
// Unmapping needs the device to be done with the bytes. Granules whose fences have passed go first; only when
// all others are taken does the caller wait on the host, without the lock.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <deque>
#include <utility>

#include "base/mutex.hpp"
#include "base/units.hpp"
#include "memory/address_index.hpp"
#include "memory/range_layout.hpp"

namespace gpushare::memory {
namespace {

class VirtualLayout final : public RangeLayout {
 public:
  VirtualLayout(device::Device& device, uint64_t granule, uint64_t capacity)
      : device_(device), granule_(granule), capacity_(capacity) {}

  ~VirtualLayout() override {
    for (auto& region : regions_) {
      wait_all(region->fences);
      base::MutexLock lock(mutex_);
      const base::Status lost = unmap_above(*region, 0);  // nothing left to do with a lost device
      const base::Status ignored = device_.va_free(region->reserved, region->reserved_bytes);
    }
    for (auto& sparse : sparse_) {
      for (Cell& cell : sparse->cells) wait_all(cell.fences);
      base::MutexLock lock(mutex_);
      for (size_t i = 0; i < sparse->cells.size(); ++i) {
        const base::Status lost = unmap_cell(*sparse, i);
      }
      const base::Status ignored = device_.va_free(sparse->reserved, sparse->reserved_bytes);
    }
    if (window_bytes_ > 0) {
      const base::Status ignored = device_.va_free(window_, window_bytes_);
    }
    base::MutexLock lock(mutex_);
    release_pool();
  }

  Layout kind() const override { return Layout::kVirtual; }
  uint64_t granularity_bytes() const override { return granule_; }
  uint64_t capacity_bytes() const override { return capacity_; }
  Range span() const override { return {}; }

  base::Status take(RangeUse use, uint64_t bytes, Range* out_range, FenceList* out_fences) override {
    base::MutexLock lock(mutex_);
    if (bytes > capacity_ - promised_) return no_room(bytes);
    // A lane may grow to the whole device, so it takes no addresses that once were reserved for a heap.
    const uint32_t slot = pick_retired(bytes, use == RangeUse::kLane ? capacity_ : bytes);
    Region* region = nullptr;
    uint32_t index = slot;
    if (slot != kNone) {
      region = regions_[retired_[slot]].get();
      index = retired_[slot];
      retired_.erase(retired_.begin() + slot);
    } else {
      GPUSHARE_RETURN_IF_ERROR(reserve(use, bytes, &index));
      region = regions_[index].get();
    }
    region->taken = true;
    region->backed = true;
    region->bytes = bytes;
    promised_ += bytes;
    if (auto status = map_up_to(*region, true, lock); !status.ok()) {
      promised_ -= bytes;
      region->taken = false;
      region->bytes = 0;
      retired_.push_back(index);
      return status;
    }
    out_fences->insert(out_fences->end(), region->fences.begin(), region->fences.end());
    *out_range = {region->base, bytes, index};
    return {};
  }

  base::Status extend(Range& range, uint64_t bytes, bool may_wait, FenceList* out_fences) override {
    base::MutexLock lock(mutex_);
    Region& region = *regions_[range.slot];
    if (bytes > capacity_ - promised_) return no_room(bytes);
    if (bytes > region.limit - region.bytes)
      return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "the address range reserved for it ends after " +
                                                 base::format_bytes(region.limit - region.bytes) + " more"};
    region.bytes += bytes;
    promised_ += bytes;
    if (auto status = map_up_to(region, may_wait, lock); !status.ok()) {
      region.bytes -= bytes;
      promised_ -= bytes;
      return status;
    }
    out_fences->insert(out_fences->end(), region.fences.begin(), region.fences.end());
    range.bytes += bytes;
    return {};
  }

  void shrink(Range& range, uint64_t bytes, const FenceList& fences) override {
    base::MutexLock lock(mutex_);
    Region& region = *regions_[range.slot];
    promised_ -= region.bytes - bytes;
    region.bytes = bytes;
    add_fences(region, fences);
    range.bytes = bytes;
  }

  void give(Range& range, const FenceList& fences) override {
    base::MutexLock lock(mutex_);
    Region& region = *regions_[range.slot];
    if (region.backed) promised_ -= region.bytes;
    region.bytes = 0;
    region.taken = false;
    region.backed = true;
    add_fences(region, fences);
    retired_.push_back(range.slot);
    range = {};
  }

  // Where a lane could not reserve addresses for all of the device. One that could was refused memory, and a
  // second range needs more of that.
  base::Status take_ahead(const Range& range, uint64_t bytes, Range* out_ahead,
                          FenceList* out_fences) override {
    {
      base::MutexLock lock(mutex_);
      if (regions_[range.slot]->limit >= capacity_)
        return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
                "the device has no memory for a range of " + base::format_bytes(bytes)};
    }
    return take(RangeUse::kLane, bytes, out_ahead, out_fences);
  }
  bool would_settle(const Range&) const override { return false; }
  bool settle(Range&, const FenceList&, FenceList*) override { return false; }

  bool can_page() const override { return true; }

  // The granules stay where they are until somebody needs them.
  base::Status unback(Range& range, uint64_t valid_bytes) override {
    base::MutexLock lock(mutex_);
    Region& region = *regions_[range.slot];
    if (!region.backed) return {GPUSHARE_INVALID_STATE, "the range has no memory behind it"};
    promised_ -= region.bytes;
    region.backed = false;
    region.intact = std::min(region.pieces.size(), static_cast<size_t>(valid_bytes / granule_));
    return {};
  }

  base::Status back(Range& range, uint64_t* out_valid_bytes) override {
    base::MutexLock lock(mutex_);
    Region& region = *regions_[range.slot];
    if (region.backed) return {GPUSHARE_INVALID_STATE, "the range has memory behind it already"};
    if (region.bytes > capacity_ - promised_) return no_room(region.bytes);
    promised_ += region.bytes;
    region.backed = true;
    auto status = map_up_to(region, true, lock);
    if (!status.ok()) {
      promised_ -= region.bytes;
      region.backed = false;
      return status;
    }
    *out_valid_bytes = std::min(region.bytes, region.intact * granule_);
    return {};
  }

  base::Status open_sparse(uint64_t bytes, Range* out_range) override {
    base::MutexLock lock(mutex_);
    Sparse* found = nullptr;
    for (auto& sparse : sparse_) {
      if (sparse->open || sparse->cells.size() * granule_ < bytes) continue;
      if (found == nullptr || sparse->cells.size() < found->cells.size()) found = sparse.get();
    }
    if (found == nullptr) {
      auto made = std::make_unique<Sparse>();
      made->cells.resize(bytes / granule_);
      GPUSHARE_RETURN_IF_ERROR(reserve_addresses(bytes, &made->reserved, &made->reserved_bytes, &made->base));
      made->slot = static_cast<uint32_t>(sparse_.size());
      found = made.get();
      sparse_.push_back(std::move(made));
    }
    found->open = true;
    *out_range = {found->base, found->cells.size() * granule_, found->slot};
    return {};
  }

  base::Status commit(const Range& range, size_t first, size_t count, FenceList* out_fences,
                      std::vector<bool>* out_intact) override {
    base::MutexLock lock(mutex_);
    Sparse& sparse = *sparse_[range.slot];
    uint64_t bytes = 0;
    std::vector<bool> mapped(count), committed(count);
    for (size_t i = 0; i < count; ++i) {
      const Cell& cell = sparse.cells[first + i];
      mapped[i] = cell.memory != nullptr;
      committed[i] = cell.committed;
      if (!cell.committed) bytes += granule_;
    }
    if (bytes > capacity_ - promised_) return no_room(bytes);
    promised_ += bytes;
    // First those that are mapped, so that they are not taken for the others.
    for (size_t i = 0; i < count; ++i)
      if (mapped[i]) sparse.cells[first + i].committed = true;
    base::Status status;
    for (size_t i = 0; i < count && status.ok(); ++i) {
      if (mapped[i]) continue;
      status = ensure_granule(true, lock);
      if (!status.ok()) break;
      Cell& cell = sparse.cells[first + i];
      gpushare_backend_memory* memory = pool_.back();
      status = device_.va_map(sparse.base + (first + i) * granule_, granule_, memory, 0);
      if (!status.ok()) break;
      pool_.pop_back();
      cell = {memory, true, 0, {}, false};
    }
    if (!status.ok()) {
      for (size_t i = 0; i < count; ++i) {
        if (committed[i]) continue;
        sparse.cells[first + i].committed = false;
        // One that cannot be unmapped stays as if it had been decommitted.
        if (mapped[i] || !unmap_cell(sparse, first + i).ok()) set_unused(sparse, first + i);
      }
      promised_ -= bytes;
      return status.with_context("mapping device memory");
    }
    for (size_t i = 0; i < count; ++i) {
      Cell& cell = sparse.cells[first + i];
      if (!committed[i]) out_fences->insert(out_fences->end(), cell.fences.begin(), cell.fences.end());
      if (!committed[i]) cell.fences.clear();
    }
    if (out_intact != nullptr) *out_intact = std::move(mapped);
    return {};
  }

  void decommit(const Range& range, size_t first, size_t count, const FenceList& fences) override {
    base::MutexLock lock(mutex_);
    Sparse& sparse = *sparse_[range.slot];
    for (size_t i = first; i < first + count; ++i) {
      Cell& cell = sparse.cells[i];
      if (!cell.committed) continue;
      cell.committed = false;
      cell.fences = fences;
      set_unused(sparse, i);
      promised_ -= granule_;
    }
    if (unused_.size() > 2 * created_ + 64)  // most are stale
      std::erase_if(unused_, [this](const Unused& entry)
                                 GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { return !is_unused(entry); });
  }

  void close_sparse(Range& range) override {
    base::MutexLock lock(mutex_);
    sparse_[range.slot]->open = false;
    range = {};
  }

  bool has_host_tier() const override { return device_.can(GPUSHARE_DEVICE_CAP_HOST_PHYSICAL); }

  base::Status commit_host(const Range& range, size_t granule) override {
    base::MutexLock lock(mutex_);
    Sparse& sparse = *sparse_[range.slot];
    if (sparse.cells[granule].memory != nullptr) {  // left there by a decommit
      wait_all(sparse.cells[granule].fences);
      GPUSHARE_RETURN_IF_ERROR(unmap_cell(sparse, granule));
    }
    GPUSHARE_ASSIGN_OR_RETURN(gpushare_backend_memory * memory, device_.phys_create_host(granule_));
    if (auto status = device_.va_map(sparse.base + granule * granule_, granule_, memory, 0); !status.ok()) {
      const base::Status ignored = device_.phys_release(memory);
      return status.with_context("mapping host memory");
    }
    sparse.cells[granule] = {memory, true, 0, {}, true};
    ++host_granules_;
    return {};
  }

  void release_host(const Range& range, size_t granule) override {
    base::MutexLock lock(mutex_);
    sparse_[range.slot]->cells[granule].committed = false;
    const base::Status lost = unmap_cell(*sparse_[range.slot], granule);
  }

  base::Status begin_move(const Range& range, size_t, bool home, size_t slot, Address* out_window) override {
    (void)range;
    base::MutexLock lock(mutex_);
    if (window_bytes_ == 0)
      GPUSHARE_RETURN_IF_ERROR(
          reserve_addresses(kMoveSlots * granule_, &window_, &window_bytes_, &window_base_));
    gpushare_backend_memory* memory = nullptr;
    if (home) {
      if (granule_ > capacity_ - promised_) return no_room(granule_);
      promised_ += granule_;
      if (auto status = ensure_granule(false, lock); !status.ok()) {
        promised_ -= granule_;
        return status;
      }
      memory = pool_.back();
      pool_.pop_back();
    } else {
      GPUSHARE_ASSIGN_OR_RETURN(memory, device_.phys_create_host(granule_));
    }
    const Address window = window_base_ + slot * granule_;
    if (auto status = device_.va_map(window, granule_, memory, 0); !status.ok()) {
      drop_moved(memory, home);
      return status.with_context("mapping memory to move to");
    }
    moving_[slot] = memory;
    moving_home_ = home;
    *out_window = window;
    return {};
  }

  base::Status end_move(const Range& range, size_t granule, bool home, size_t slot, bool keep,
                        bool* out_lost) override {
    base::MutexLock lock(mutex_);
    Sparse& sparse = *sparse_[range.slot];
    Cell& cell = sparse.cells[granule];
    const Address address = sparse.base + granule * granule_;
    gpushare_backend_memory* const memory = std::exchange(moving_[slot], nullptr);
    base::Status status;
    if (keep) {
      status = device_.va_unmap(address, granule_);
      if (status.ok()) {
        status = device_.va_map(address, granule_, memory, 0);
        *out_lost = !status.ok() && !device_.va_map(address, granule_, cell.memory, 0).ok();
      }
    }
    // A window that stays mapped refuses later moves, and no more.
    const base::Status ignored = device_.va_unmap(window_base_ + slot * granule_, granule_);
    if (!keep || !status.ok()) {
      drop_moved(memory, home);
      if (*out_lost) {
        drop_moved(cell.memory, !home);
        if (home) --host_granules_;
        cell = {};
      }
      return status;
    }
    drop_moved(cell.memory, !home);
    home ? --host_granules_ : ++host_granules_;
    cell = {memory, true, 0, {}, !home};
    return {};
  }

  uint64_t trim() override {
    base::MutexLock lock(mutex_);
    std::deque<Unused> busy;
    for (; !unused_.empty(); unused_.pop_front())
      if (!take_unused(unused_.front(), nullptr) && is_unused(unused_.front()))
        busy.push_back(unused_.front());
    unused_.swap(busy);
    for (auto& region : regions_) {
      prune(region->fences);
      if (region->fences.empty() && region->surplus(granule_) > 0) {
        const base::Status ignored = unmap_above(*region, region->wanted());
      }
    }
    const uint64_t before = created_;
    release_pool();
    return (before - created_) * granule_;
  }

  uint64_t free_bytes() const override {
    base::MutexLock lock(mutex_);
    return capacity_ - promised_;
  }
  uint64_t largest_hole_bytes() const override { return free_bytes(); }
  uint64_t mapped_bytes() const override {
    base::MutexLock lock(mutex_);
    return created_ * granule_;
  }

  std::string check() const override {
    base::MutexLock lock(mutex_);
    uint64_t pieces = 0, promised = 0, on_host = 0;
    for (const auto& region : regions_) {
      pieces += region->pieces.size();
      promised += region->wanted();
      if (region->wanted() > region->pieces.size() * granule_)
        return "a range has less memory behind it than promised";
      if (region->pieces.size() * granule_ > region->limit)
        return "a range has memory mapped beyond its addresses";
    }
    for (const auto& sparse : sparse_) {
      for (const Cell& cell : sparse->cells) {
        if (cell.memory != nullptr && !cell.on_host) ++pieces;
        if (cell.on_host) ++on_host;
        if (cell.committed && !cell.on_host) promised += granule_;
        if (cell.committed && (!sparse->open || cell.memory == nullptr))
          return "a granule of a sparse range is promised without memory";
      }
    }
    for (gpushare_backend_memory* memory : moving_) {
      if (memory == nullptr || !moving_home_) continue;
      ++pieces;
      promised += granule_;
    }
    if (on_host != host_granules_) return "granules of host memory do not add up";
    if (pieces + pool_.size() != created_) return "physical granules do not add up";
    if (created_ * granule_ > capacity_) return "more physical memory than the capacity";
    if (promised != promised_) return "promised bytes do not add up";
    if (promised_ > capacity_) return "more promised than the capacity";
    return {};
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  struct Region {
    Address reserved = 0;
    uint64_t reserved_bytes = 0;
    Address base = 0;    // reserved, aligned to the index's granule
    uint64_t limit = 0;  // addresses from base on
    uint64_t bytes = 0;  // promised to whoever has taken it
    bool taken = false;
    bool backed = true;                            // not paged out
    std::vector<gpushare_backend_memory*> pieces;  // mapped, a granule each, from base on
    size_t intact = 0;  // while not backed: the first pieces that were never unmapped
    FenceList fences;   // before these, pieces above `bytes` may be in use

    uint64_t wanted() const { return taken && backed ? bytes : 0; }
    uint64_t surplus(uint64_t granule) const {
      const uint64_t mapped = pieces.size() * granule;
      return mapped > wanted() ? mapped - wanted() : 0;  // below while it is being mapped
    }
  };

  // A granule of addresses of a sparse range.
  struct Cell {
    gpushare_backend_memory* memory = nullptr;  // mapped there
    bool committed = false;
    uint64_t stamp = 0;  // of the decommit
    FenceList fences;    // while not committed: before these it may be in use
    bool on_host = false;
  };
  struct Sparse {
    Address reserved = 0;
    uint64_t reserved_bytes = 0;
    Address base = 0;
    uint32_t slot = 0;
    bool open = false;
    std::vector<Cell> cells;
  };
  // A granule that is mapped and not committed, if its stamp is still the cell's.
  struct Unused {
    uint32_t slot;
    uint32_t cell;
    uint64_t stamp;
  };

  bool is_unused(const Unused& entry) const GPUSHARE_REQUIRES(mutex_) {
    const Cell& cell = sparse_[entry.slot]->cells[entry.cell];
    return cell.memory != nullptr && !cell.committed && cell.stamp == entry.stamp;
  }

  void set_unused(Sparse& sparse, size_t index) GPUSHARE_REQUIRES(mutex_) {
    sparse.cells[index].stamp = ++stamp_;
    unused_.push_back({sparse.slot, static_cast<uint32_t>(index), stamp_});
  }

  // The granule goes to the pool.
  base::Status unmap_cell(Sparse& sparse, size_t index) GPUSHARE_REQUIRES(mutex_) {
    Cell& cell = sparse.cells[index];
    if (cell.memory == nullptr) return {};
    GPUSHARE_RETURN_IF_ERROR(device_.va_unmap(sparse.base + index * granule_, granule_));
    if (cell.on_host) {
      const base::Status ignored = device_.phys_release(cell.memory);
      --host_granules_;
    } else {
      pool_.push_back(cell.memory);
    }
    cell = {};
    return {};
  }

  // Memory that a move does not need, or no longer; `device`: it was promised.
  void drop_moved(gpushare_backend_memory* memory, bool device) GPUSHARE_REQUIRES(mutex_) {
    if (device) {
      pool_.push_back(memory);
      promised_ -= granule_;
    } else {
      const base::Status ignored = device_.phys_release(memory);
    }
  }

  // False if it is no longer unused, cannot be unmapped, or the device still works on it: *out_busy is then what must pass.
  bool take_unused(const Unused& entry, FenceList* out_busy) GPUSHARE_REQUIRES(mutex_) {
    if (!is_unused(entry)) return false;
    Cell& cell = sparse_[entry.slot]->cells[entry.cell];
    prune(cell.fences);
    if (!cell.fences.empty()) {
      if (out_busy != nullptr && out_busy->empty()) *out_busy = cell.fences;
      return false;
    }
    return unmap_cell(*sparse_[entry.slot], entry.cell).ok();
  }

  base::Status no_room(uint64_t bytes) const GPUSHARE_REQUIRES(mutex_) {
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "no room for a range of " + base::format_bytes(bytes) + ": " +
                                               base::format_bytes(capacity_ - promised_) + " of " +
                                               base::format_bytes(capacity_) + " not promised"};
  }

  static void add_fences(Region& region, const FenceList& fences) {
    region.fences.insert(region.fences.end(), fences.begin(), fences.end());
    prune(region.fences);
  }

  // Index into retired_ of the range to use again: nobody's work outstanding first, then the fewest granules
  // to map, then the fewest to spare. kNone when no reservation is long enough.
  uint32_t pick_retired(uint64_t bytes, uint64_t least_limit) GPUSHARE_REQUIRES(mutex_) {
    uint32_t best = kNone;
    uint64_t best_cost[3] = {};
    for (uint32_t i = 0; i < retired_.size(); ++i) {
      Region& region = *regions_[retired_[i]];
      if (region.limit < least_limit) continue;
      prune(region.fences);
      const uint64_t mapped = region.pieces.size() * granule_;
      const uint64_t cost[3] = {region.fences.empty() ? 0u : 1u, mapped < bytes ? bytes - mapped : 0,
                                mapped + region.limit / 1024};
      if (best != kNone && !std::lexicographical_compare(cost, cost + 3, best_cost, best_cost + 3)) continue;
      best = i;
      std::copy(cost, cost + 3, best_cost);
    }
    return best;
  }

  // Addresses are plentiful but not endless: a lane may grow to the whole device, a heap to four times what
  // it begins with before it needs a second range.
  base::Status reserve(RangeUse use, uint64_t bytes, uint32_t* out_index) GPUSHARE_REQUIRES(mutex_) {
    const uint64_t whole = capacity_;
    uint64_t limit = whole;
    if (use == RangeUse::kHeap) limit = std::min(whole, std::bit_ceil(std::max(4 * bytes, 32 * granule_)));
    auto region = std::make_unique<Region>();
    base::Status status = reserve_addresses(limit, &region->reserved, &region->reserved_bytes, &region->base);
    if (!status.ok() && limit > bytes) {
      limit = bytes;
      status = reserve_addresses(limit, &region->reserved, &region->reserved_bytes, &region->base);
    }
    GPUSHARE_RETURN_IF_ERROR(status);
    region->limit = limit;
    *out_index = static_cast<uint32_t>(regions_.size());
    regions_.push_back(std::move(region));
    return {};
  }

  // *out_base: the first address in it that begins a granule of the index.
  base::Status reserve_addresses(uint64_t bytes, Address* out_reserved, uint64_t* out_reserved_bytes,
                                 Address* out_base) {
    const uint64_t alignment = AddressIndex::kGranuleBytes;
    const uint64_t slack = device_.info().mapping_granularity_bytes % alignment == 0 ? 0 : alignment;
    auto reserved = device_.va_reserve(bytes + slack);
    if (!reserved.ok())
      return reserved.status().with_context("reserving " + base::format_bytes(bytes) +
                                            " of device addresses");
    *out_reserved = *reserved;
    *out_reserved_bytes = bytes + slack;
    *out_base = (*reserved + alignment - 1) / alignment * alignment;
    return {};
  }

  // Unmaps the pieces above the first `bytes`; they go to the pool.
  base::Status unmap_above(Region& region, uint64_t bytes) GPUSHARE_REQUIRES(mutex_) {
    while (region.pieces.size() * granule_ > bytes) {
      const uint64_t offset = (region.pieces.size() - 1) * granule_;
      GPUSHARE_RETURN_IF_ERROR(device_.va_unmap(region.base + offset, granule_));
      pool_.push_back(region.pieces.back());
      region.pieces.pop_back();
      region.intact = std::min(region.intact, region.pieces.size());
    }
    return {};
  }

  // Puts granules behind the region's first `bytes`. On failure none of those stays that were not there
  // before. Lets go of `lock` while it waits for the device.
  base::Status map_up_to(Region& region, bool may_wait, base::MutexLock& lock) GPUSHARE_REQUIRES(mutex_) {
    const size_t before = region.pieces.size();
    base::Status status;
    while (region.pieces.size() * granule_ < region.bytes && status.ok()) {
      status = ensure_granule(may_wait, lock);
      if (!status.ok()) break;
      // Another thread may have emptied the pool while this one waited; ensure_granule returns with the lock
      // held and one in it.
      gpushare_backend_memory* memory = pool_.back();
      status = device_.va_map(region.base + region.pieces.size() * granule_, granule_, memory, 0);
      if (!status.ok()) break;
      pool_.pop_back();
      region.pieces.push_back(memory);
    }
    if (!status.ok()) {
      const base::Status ignored = unmap_above(region, before * granule_);
      return status.with_context("mapping device memory");
    }
    return {};
  }

  // Leaves at least one granule in the pool. (The analysis cannot follow a scoped lock through a parameter.)
  base::Status ensure_granule(bool may_wait, base::MutexLock& lock)
      GPUSHARE_REQUIRES(mutex_) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    base::Status refused;
    while (pool_.empty()) {
      if ((created_ + 1) * granule_ <= capacity_ && refused.ok()) {
        auto memory = device_.phys_create(granule_);
        if (memory.ok()) {
          pool_.push_back(*memory);
          ++created_;
          return {};
        }
        refused = memory.status();  // others use the device too: take from what is cached here
      }
      FenceList busy;
      if (reclaim(&busy)) continue;
      if (busy.empty())
        return refused.ok() ? base::Status(GPUSHARE_DEVICE_OUT_OF_MEMORY, "every physical granule is in use")
                            : refused;
      if (!may_wait)
        return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "the device still uses every granule that could be taken"};
      lock.unlock();
      wait_all(busy);
      lock.lock();
    }
    return {};
  }

  // Unmaps a batch of granules nobody is promised. False if there is none that the device is done with;
  // *out_busy are then fences of one that it still works on, if any.
  bool reclaim(FenceList* out_busy) GPUSHARE_REQUIRES(mutex_) {
    constexpr uint64_t kBatch = 16;
    auto try_region = [&](Region& region) GPUSHARE_REQUIRES(mutex_) {
      const uint64_t surplus = region.surplus(granule_);
      if (surplus == 0) return false;
      prune(region.fences);
      if (!region.fences.empty()) {
        if (out_busy->empty()) *out_busy = region.fences;
        return false;
      }
      const uint64_t mapped = region.pieces.size() * granule_;
      return unmap_above(region, mapped - std::min(surplus, kBatch * granule_)).ok();
    };
    for (uint32_t index : retired_)  // longest given back first
      if (try_region(*regions_[index])) return true;
    for (auto& region : regions_)
      if (region->taken && try_region(*region)) return true;
    // Decommitted longest ago first, since streams pass their fences in that order.
    uint64_t taken = 0;
    for (auto entry = unused_.begin(); entry != unused_.end() && taken < kBatch;) {
      const bool took = take_unused(*entry, out_busy);
      taken += took ? 1 : 0;
      entry = took || !is_unused(*entry) ? unused_.erase(entry) : entry + 1;
    }
    return taken > 0;
  }

  void release_pool() GPUSHARE_REQUIRES(mutex_) {
    for (gpushare_backend_memory* memory : pool_) {
      const base::Status ignored = device_.phys_release(memory);
      --created_;
    }
    pool_.clear();
  }

  device::Device& device_;
  const uint64_t granule_;
  const uint64_t capacity_;
  mutable base::Mutex mutex_;
  // Never removed: a slot is an index.
  std::vector<std::unique_ptr<Region>> regions_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<uint32_t> retired_ GPUSHARE_GUARDED_BY(mutex_);                // not taken, longest first
  std::vector<std::unique_ptr<Sparse>> sparse_ GPUSHARE_GUARDED_BY(mutex_);  // never removed either
  std::deque<Unused> unused_ GPUSHARE_GUARDED_BY(mutex_);  // decommitted longest ago first; some are stale
  uint64_t stamp_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  std::vector<gpushare_backend_memory*> pool_ GPUSHARE_GUARDED_BY(mutex_);
  uint64_t created_ GPUSHARE_GUARDED_BY(mutex_) = 0;   // granules, mapped and pooled
  uint64_t promised_ GPUSHARE_GUARDED_BY(mutex_) = 0;  // sum of bytes of the ranges taken and backed
  uint64_t host_granules_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  // Where memory that a granule moves to is mapped as well during the copy.
  Address window_ = 0, window_base_ = 0;
  uint64_t window_bytes_ = 0;
  gpushare_backend_memory* moving_[kMoveSlots] GPUSHARE_GUARDED_BY(mutex_) = {};
  bool moving_home_ GPUSHARE_GUARDED_BY(mutex_) = false;
};

}  // namespace

uint64_t virtual_granule(const device::Device& device, uint64_t capacity_bytes) {
  const uint64_t smallest =
      std::max<uint64_t>(AddressIndex::kGranuleBytes, device.info().mapping_granularity_bytes);
  const uint64_t wanted = std::bit_ceil(std::max<uint64_t>(capacity_bytes / 4096, 1));
  return std::clamp(wanted, smallest, std::max<uint64_t>(smallest, uint64_t{64} << 20));
}

base::Result<std::unique_ptr<RangeLayout>> make_virtual_layout(device::Device& device,
                                                               uint64_t capacity_bytes) {
  const uint64_t mapping = device.info().mapping_granularity_bytes;
  if (!device.can(GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY))
    return base::Status(GPUSHARE_UNSUPPORTED,
                        "device " + device.spec() + " has no virtual memory; use the contiguous layout");
  if (!std::has_single_bit(mapping))
    return base::Status(GPUSHARE_UNSUPPORTED, "the mapping granularity of device " + device.spec() +
                                                  " is no power of two; use the contiguous layout");
  const uint64_t granule = virtual_granule(device, capacity_bytes);
  const uint64_t capacity = capacity_bytes / granule * granule;
  return std::unique_ptr<RangeLayout>(new VirtualLayout(device, granule, capacity));
}

}  // namespace gpushare::memory
