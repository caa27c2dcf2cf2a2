// SPDX-License-Identifier: Apache-2.0
#include "memory/layout_virtual.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/units.hpp"
#include "memory/address_index.hpp"

namespace gpushare::memory {

VirtualLayout::~VirtualLayout() {
  for (auto& region : regions_) {
    const SharedFences* last = nullptr;
    for (const Cell& cell : region->cells) {
      if (cell.fences != nullptr && (last == nullptr || cell.fences != *last)) wait_all(*cell.fences);
      last = &cell.fences;
    }
    base::MutexLock lock(mutex_);
    drop_imported(*region, 0, {}, lock);
    for (size_t i = 0; i < region->cells.size(); ++i) {
      if (region->cells[i].memory != nullptr)
        (void)unmap_cells(*region, i, 1);  // nothing left to do with a lost device
    }
    const base::Status ignored = device_.va_free(region->reserved, region->reserved_bytes);
  }
  if (window_bytes_ > 0) {
    const base::Status ignored = device_.va_free(window_, window_bytes_);
  }
  base::MutexLock lock(mutex_);
  release_pools();
  release_host_pools();
}

base::Status VirtualLayout::take(RangeUse use, uint64_t bytes, Range* out_range, FenceList* out_fences) {
  base::MutexLock lock(mutex_);
  if (bytes > capacity_ - promised_) return no_room(bytes);
  Region* region = nullptr;
  GPUSHARE_RETURN_IF_ERROR(take_region(use == RangeUse::kLane ? Use::kLane : Use::kHeap, bytes, &region));
  if (auto status = commit_cells(*region, 0, region->cell_at(bytes), {}, lock, out_fences, nullptr);
      !status.ok()) {
    retire(*region, region->last);
    return status;
  }
  region->bytes = bytes;
  *out_range = {region->base, bytes, region->slot};
  return {};
}

base::Status VirtualLayout::extend(Range& range, uint64_t bytes, bool may_wait, FenceList* out_fences) {
  base::MutexLock lock(mutex_);
  Region& region = *regions_[range.slot];
  if (bytes > region.limit - region.bytes)
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "the address range reserved for it ends after " +
                                               base::format_bytes(region.limit - region.bytes) + " more"};
  if (region.use == Use::kShared)
    GPUSHARE_RETURN_IF_ERROR(import_up_to(region, region.bytes + bytes));
  else
    GPUSHARE_RETURN_IF_ERROR(commit_cells(region, region.cell_at(region.bytes),
                                          region.cell_at(region.bytes + bytes), {may_wait}, lock, out_fences,
                                          nullptr));
  region.bytes += bytes;
  range.bytes += bytes;
  return {};
}

void VirtualLayout::shrink(Range& range, uint64_t bytes, const FenceList& fences) {
  base::MutexLock lock(mutex_);
  Region& region = *regions_[range.slot];
  if (region.use == Use::kShared)
    drop_imported(region, bytes, fences, lock);
  else
    decommit_cells(region, region.cell_at(bytes), region.cell_at(region.bytes),
                   std::make_shared<FenceList>(fences), true);
  region.bytes = range.bytes = bytes;
}

void VirtualLayout::give(Range& range, const FenceList& fences) {
  base::MutexLock lock(mutex_);
  Region& region = *regions_[range.slot];
  range = {};
  if (region.use == Use::kShared) {
    drop_imported(region, 0, fences, lock);
    region.pieces = nullptr;
    if (region.imported.empty()) retire(region, nullptr);  // else its addresses are lost
    return;
  }
  const auto shared = std::make_shared<FenceList>(fences);
  decommit_cells(region, 0, region.cells.size(), shared, true);
  retire(region, shared);
}

// A second range helps only a lane that could not reserve addresses for all of the device. Any other lane lacks memory, and a
// second range would need more of it.
base::Status VirtualLayout::take_ahead(const Range& range, uint64_t bytes, Range* out_ahead,
                                       FenceList* out_fences) {
  {
    base::MutexLock lock(mutex_);
    if (regions_[range.slot]->limit >= capacity_)
      return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
              "the device has no memory for a range of " + base::format_bytes(bytes)};
  }
  return take(RangeUse::kLane, bytes, out_ahead, out_fences);
}

// The granules stay mapped until somebody needs them. The last ones go first.
base::Status VirtualLayout::unback(Range& range, uint64_t from_bytes, uint64_t valid_bytes) {
  base::MutexLock lock(mutex_);
  Region& region = *regions_[range.slot];
  const size_t first = region.cell_at(from_bytes),
               end = region.backed ? region.cell_at(region.bytes) : region.left;
  if (!region.backed && first >= end) return {GPUSHARE_INVALID_STATE, "the range has no memory behind it"};
  decommit_cells(region, first, end, nullptr, false);
  region.backed = false;
  region.left = first;
  region.intact = region.cell_at(valid_bytes);
  return {};
}

base::Status VirtualLayout::back(Range& range, uint64_t* out_valid_bytes) {
  base::MutexLock lock(mutex_);
  Region& region = *regions_[range.slot];
  if (region.backed) return {GPUSHARE_INVALID_STATE, "the range has memory behind it already"};
  std::vector<bool> intact;
  GPUSHARE_RETURN_IF_ERROR(commit_cells(region, 0, region.cell_at(region.bytes), {}, lock, nullptr, &intact));
  region.backed = true;
  size_t valid = 0;
  while (valid < std::min(intact.size(), region.intact) && intact[valid]) ++valid;
  *out_valid_bytes = region.offset_of(valid);
  return {};
}

void VirtualLayout::hollow(const Range& range, const std::vector<size_t>& granules, const FenceList& fences) {
  base::MutexLock lock(mutex_);
  Region& region = *regions_[range.slot];
  const auto shared = std::make_shared<FenceList>(fences);
  for (size_t i = granules.size(); i-- > 0;)
    decommit_cells(region, region.cell_of(granules[i]), region.cell_of(granules[i] + 1), shared, true);
  region.backed = false;
  region.left = region.intact = 0;
}

base::Status VirtualLayout::open_sparse(uint64_t bytes, bool elastic, Range* out_range) {
  base::MutexLock lock(mutex_);
  Region* region = nullptr;
  GPUSHARE_RETURN_IF_ERROR(take_region(elastic ? Use::kElastic : Use::kSparse, bytes, &region));
  *out_range = {region->base, bytes, region->slot};
  return {};
}

base::Status VirtualLayout::commit(const Range& range, size_t first, size_t count, FenceList* out_fences,
                                   std::vector<bool>* out_intact, FenceList* out_busy) {
  base::MutexLock lock(mutex_);
  return commit_cells(*regions_[range.slot], first, first + count, {false, out_busy}, lock, out_fences,
                      out_intact);
}

void VirtualLayout::decommit(const Range& range, size_t first, size_t count, const FenceList& fences) {
  base::MutexLock lock(mutex_);
  decommit_cells(*regions_[range.slot], first, first + count,
                 fences.empty() ? nullptr : std::make_shared<FenceList>(fences), true);
}

void VirtualLayout::close_sparse(Range& range) {
  base::MutexLock lock(mutex_);
  retire(*regions_[range.slot], nullptr);
  range = {};
}

uint64_t VirtualLayout::trim() {
  base::MutexLock lock(mutex_);
  sweep_host();
  release_host_pools();
  (void)reclaim(UINT64_MAX, nullptr);
  const uint64_t before = created_bytes_;
  release_pools();
  return before - created_bytes_;
}

uint64_t VirtualLayout::free_bytes() const {
  base::MutexLock lock(mutex_);
  return capacity_ - promised_;
}

uint64_t VirtualLayout::mapped_bytes() const {
  base::MutexLock lock(mutex_);
  return created_bytes_;
}

std::string VirtualLayout::check() const {
  base::MutexLock lock(mutex_);
  uint64_t pieces = 0, bytes = 0, promised = 0, on_host = 0;
  for (const auto& region : regions_) {
    uint64_t mapped = 0, committed = 0;
    if (region->offset_of(region->cells.size()) > region->limit)
      return "a range has memory mapped beyond its addresses";
    for (size_t i = 0; i < region->cells.size(); ++i) {
      const Cell& cell = region->cells[i];
      const uint64_t size = region->bytes_of(i);
      if (cell.memory != nullptr) mapped += size;
      if (cell.memory != nullptr && !cell.on_host) ++pieces, bytes += size;
      if (cell.memory != nullptr && cell.on_host) on_host += size;
      if (!cell.committed) continue;
      if (!region->taken || (cell.memory == nullptr && !cell.lost))
        return "a granule is promised without memory";
      if (!cell.on_host) promised += size;
      if (region->offset_of(i) < region->bytes) committed += size;
    }
    if (mapped != region->mapped_bytes) return "mapped granules of a range do not add up";
    if (region->taken && region->use == Use::kShared && region->imported_bytes < region->bytes)
      return "a shared range has less memory behind it than its bytes";
    if (region->taken && region->backed && region->use <= Use::kLane && committed != region->bytes)
      return "a range has less memory behind it than promised";
  }
  for (const auto& moving : moving_) {
    if (moving.empty() || !moving_home_) continue;
    pieces += moving.size();
    bytes += granule_;
    promised += granule_;
  }
  if (on_host != host_bytes_) return "granules of host memory do not add up";
  for (const Pool* pool : {&pool_, &small_pool_}) {
    pieces += pool->memories.size();
    bytes += pool->memories.size() * pool->granule;
  }
  if (pieces != created_ || bytes != created_bytes_) return "physical granules do not add up";
  if (created_bytes_ > capacity_) return "more physical memory than the capacity";
  if (promised != promised_) return "promised bytes do not add up";
  if (promised_ > capacity_) return "more promised than the capacity";
  return {};
}

base::Status VirtualLayout::no_room(uint64_t bytes) const {
  return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "no room for a range of " + base::format_bytes(bytes) + ": " +
                                             base::format_bytes(capacity_ - promised_) + " of " +
                                             base::format_bytes(capacity_) + " not promised"};
}

// Index into retired_ of the range to use again: nobody's work outstanding first, then the fewest granules to map, then
// the fewest to spare. kNone when no reservation is long enough. A lane may grow to the whole device, so it takes no
// addresses that once were reserved for a heap.
size_t VirtualLayout::pick_retired(Use use, uint64_t bytes) {
  size_t best = kNone;
  uint64_t best_cost[3] = {};
  for (size_t i = 0; i < retired_.size(); ++i) {
    Region& region = *retired_[i];
    if (region.limit < (use == Use::kLane || use == Use::kShared ? capacity_ : bytes)) continue;
    if (std::max(region.use, Use::kLane) != std::max(use, Use::kLane)) continue;  // a kind of its own
    if (region.small_cells != small_cells(use)) continue;
    if (region.last != nullptr) prune(*region.last);
    const uint64_t mapped = region.mapped_bytes, wanted = use > Use::kLane ? 0 : bytes;
    const uint64_t cost[3] = {region.last == nullptr || region.last->empty() ? 0u : 1u,
                              mapped < wanted ? wanted - mapped : 0, mapped + region.limit / 1024};
    if (best != kNone && !std::lexicographical_compare(cost, cost + 3, best_cost, best_cost + 3)) continue;
    best = i;
    std::copy(cost, cost + 3, best_cost);
  }
  return best;
}

base::Status VirtualLayout::take_region(Use use, uint64_t bytes, Region** out_region) {
  const size_t index = pick_retired(use, bytes);
  if (index == kNone) {
    GPUSHARE_RETURN_IF_ERROR(reserve(use, bytes, out_region));
  } else {
    *out_region = retired_[index];
    retired_.erase(retired_.begin() + static_cast<ptrdiff_t>(index));
  }
  (*out_region)->taken = (*out_region)->backed = true;
  return {};
}

void VirtualLayout::retire(Region& region, SharedFences fences) {
  region.taken = false;
  region.backed = true;
  region.bytes = 0;
  region.last = std::move(fences);
  retired_.push_back(&region);
}

// Addresses are plentiful but not endless: a lane may grow to the whole device, and beside kept blocks its memory may lie
// behind other addresses; a heap may grow to four times what it begins with before it needs a second range.
base::Status VirtualLayout::reserve(Use use, uint64_t bytes, Region** out_region) {
  uint64_t limit = use == Use::kLane ? 4 * capacity_ : bytes;
  if (use == Use::kShared) limit = 2 * capacity_;  // the last piece may be larger than what is left
  if (use == Use::kHeap) limit = std::min(capacity_, std::bit_ceil(std::max(4 * bytes, 32 * granule_)));
  auto region = std::make_unique<Region>();
  base::Status status = reserve_addresses(limit, &region->reserved, &region->reserved_bytes, &region->base);
  for (const uint64_t less : {use == Use::kLane ? capacity_ : bytes, bytes}) {
    if (status.ok() || limit <= less) continue;
    limit = less;
    status = reserve_addresses(limit, &region->reserved, &region->reserved_bytes, &region->base);
  }
  GPUSHARE_RETURN_IF_ERROR(status);
  region->use = use;
  region->granule = use == Use::kElastic ? small_granule_ : granule_;
  region->small_granule = small_granule_;
  region->small_cells = small_cells(use);
  region->limit = limit;
  region->slot = static_cast<uint32_t>(regions_.size());
  *out_region = region.get();
  regions_.push_back(std::move(region));
  return {};
}

// *out_base: the first address in it that begins a granule of the index.
base::Status VirtualLayout::reserve_addresses(uint64_t bytes, Address* out_reserved,
                                              uint64_t* out_reserved_bytes, Address* out_base) {
  const uint64_t alignment = AddressIndex::kGranuleBytes;
  const uint64_t slack = device_.info().mapping_granularity_bytes % alignment == 0 ? 0 : alignment;
  auto reserved = device_.va_reserve(bytes + slack);
  if (!reserved.ok())
    return reserved.status().with_context("reserving " + base::format_bytes(bytes) + " of device addresses");
  *out_reserved = *reserved;
  *out_reserved_bytes = bytes + slack;
  *out_base = (*reserved + alignment - 1) / alignment * alignment;
  return {};
}

base::Status VirtualLayout::wait_for(FenceList fences, const Patience& patience,
                                     base::MutexLock& lock) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  if (patience.may_wait && !base::may_not_wait()) {
    lock.unlock();
    wait_all(fences);
    lock.lock();
    return {};
  }
  const char* const why = "the device still uses every granule that could be taken";
  if (patience.busy == nullptr) return {GPUSHARE_DEVICE_OUT_OF_MEMORY, why};
  *patience.busy = std::move(fences);
  return {GPUSHARE_NOT_READY, why};
}

base::Status VirtualLayout::commit_cells(Region& region, size_t first, size_t end, const Patience& patience,
                                         base::MutexLock& lock, FenceList* out_fences,
                                         std::vector<bool>* out_intact) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  const size_t count = end - first;
  if (region.cells.size() < end) region.cells.resize(end);
  GPUSHARE_RETURN_IF_ERROR(drop_unused_host(region, first, count, patience, lock));
  uint64_t bytes = 0;
  std::vector<bool> mapped(count), committed(count);
  for (size_t i = 0; i < count; ++i) {
    const Cell& cell = region.cells[first + i];
    mapped[i] = cell.memory != nullptr || cell.committed;
    committed[i] = cell.committed;
    if (!cell.committed) bytes += region.bytes_of(first + i);
  }
  if (bytes > capacity_ - promised_) return no_room(bytes);
  promised_ += bytes;
  // First those that are mapped, so that they are not taken for the others.
  for (size_t i = 0; i < count; ++i)
    if (mapped[i]) region.cells[first + i].committed = true;
  base::Status status;
  for (size_t i = 0; i < count && status.ok();) {
    if (mapped[i]) {
      ++i;
      continue;
    }
    Pool& pool = pool_of(region, first + i);
    size_t run = 1;
    while (i + run < count && !mapped[i + run] &&
           region.is_small(first + i + run) == region.is_small(first + i))
      ++run;
    status = fill_pool(pool, run, patience, lock);
    if (!status.ok()) break;
    run = std::min(run, pool.memories.size());
    status = map_cells(region, first + i, run);
    i += run;
  }
  if (!status.ok()) {
    for (size_t i = 0; i < count; ++i) {
      if (committed[i]) continue;
      Cell& cell = region.cells[first + i];
      cell.committed = false;
      // A cell that cannot be unmapped stays as if it had been decommitted.
      if (cell.memory != nullptr && (mapped[i] || unmap_cells(region, first + i, 1) == 0))
        set_unused(region, first + i);
    }
    promised_ -= bytes;
    return status.code() == GPUSHARE_NOT_READY ? status : status.with_context("mapping device memory");
  }
  const FenceList* seen = nullptr;
  for (size_t i = 0; i < count; ++i) {
    Cell& cell = region.cells[first + i];
    if (committed[i] || cell.fences == nullptr) continue;
    if (out_fences != nullptr && cell.fences.get() != seen)
      out_fences->insert(out_fences->end(), cell.fences->begin(), cell.fences->end());
    seen = cell.fences.get();  // compared only: another cell, or `last`, may hold it still
    cell.fences = nullptr;
  }
  if (out_intact != nullptr) *out_intact = std::move(mapped);
  return {};
}

// Host memory that the last owner left behind these cells. (The analysis cannot follow a scoped lock through a parameter.)
base::Status VirtualLayout::drop_unused_host(Region& region, size_t first, size_t count,
                                             const Patience& patience,
                                             base::MutexLock& lock) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  if (unused_host_.empty()) return {};
  for (size_t i = first; i < first + count; ++i) {
    while (region.cells[i].memory != nullptr && region.cells[i].on_host && !region.cells[i].committed) {
      const FenceList busy = region.cells[i].fences == nullptr ? FenceList{} : *region.cells[i].fences;
      if (all_passed(busy)) {
        GPUSHARE_RETURN_IF_ERROR(unmap_cell(region, i));
        break;
      }
      GPUSHARE_RETURN_IF_ERROR(wait_for(busy, patience, lock));
    }
  }
  return {};
}

void VirtualLayout::decommit_cells(Region& region, size_t first, size_t end, const SharedFences& fences,
                                   bool with_host) {
  for (size_t i = std::min(region.cells.size(), end); i-- > first;) {
    Cell& cell = region.cells[i];
    if (!cell.committed || (cell.on_host && !with_host)) continue;
    if (cell.lost) {
      cell = {};
      continue;
    }
    cell.committed = false;
    cell.fences = fences;
    set_unused(region, i);
    if (!cell.on_host) promised_ -= region.bytes_of(i);
  }
  if (unused_.size() > 2 * created_ + 64)  // most are stale
    std::erase_if(unused_, [this](const Unused& entry)
                               GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { return !is_unused(entry); });
}

// The last of the pool go to the first cells: granules that were neighbours become neighbours again, which the host
// device maps with one call.
base::Status VirtualLayout::map_cells(Region& region, size_t first, size_t count) {
  std::vector<gpushare_backend_memory*>& pool = pool_of(region, first).memories;
  const std::vector<gpushare_backend_memory*> memories(pool.rbegin(),
                                                       pool.rbegin() + static_cast<ptrdiff_t>(count));
  GPUSHARE_RETURN_IF_ERROR(
      device_.va_map_run(region.address_of(first), region.bytes_of(first), memories.data(), count));
  pool.resize(pool.size() - count);
  for (size_t i = 0; i < count; ++i) {
    Cell& cell = region.cells[first + i];
    cell = {};
    cell.memory = memories[i];
    cell.committed = true;
  }
  region.mapped_bytes += count * region.bytes_of(first);
  return {};
}

// The granules go to the pool, or back to the host.
size_t VirtualLayout::unmap_cells(Region& region, size_t first, size_t count, base::Status* out_status) {
  uint64_t done = 0;
  base::Status status = device_.va_unmap_run(region.address_of(first), region.bytes_of(first), count, &done);
  for (size_t i = first + done; i-- > first;) {
    Cell& cell = region.cells[i];
    if (cell.on_host) {
      give_host(cell.memory, region.bytes_of(i));
      host_bytes_ -= region.bytes_of(i);
    } else {
      pool_of(region, i).memories.push_back(cell.memory);
    }
    cell = {};
  }
  region.mapped_bytes -= done * region.bytes_of(first);
  if (out_status != nullptr) *out_status = std::move(status);
  return done;
}

base::Status VirtualLayout::unmap_cell(Region& region, size_t index) {
  base::Status status;
  (void)unmap_cells(region, index, 1, &status);
  return status;
}

bool VirtualLayout::is_unused(const Unused& entry) const {
  const Cell& cell = regions_[entry.slot]->cells[entry.cell];
  return cell.memory != nullptr && !cell.committed && cell.stamp == entry.stamp;
}

void VirtualLayout::set_unused(Region& region, size_t index) {
  Cell& cell = region.cells[index];
  cell.stamp = ++stamp_;
  const Unused entry{region.slot, static_cast<uint32_t>(index), stamp_};
  if (cell.on_host)
    unused_host_.push_back(entry);
  else
    unused_.push_back(entry);
}

bool VirtualLayout::is_busy(const Unused& entry, FenceList* out_busy) {
  const Cell& cell = regions_[entry.slot]->cells[entry.cell];
  if (cell.fences == nullptr) return false;
  prune(*cell.fences);
  if (cell.fences->empty()) return false;
  if (out_busy != nullptr && out_busy->empty()) *out_busy = *cell.fences;
  return true;
}

base::Status VirtualLayout::fill_pool(Pool& pool, size_t wanted, const Patience& patience,
                                      base::MutexLock& lock) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  base::Status refused;
  // Another thread may empty the pool while this one waits.
  while (pool.memories.size() < wanted) {
    // Others use the device too: if it refuses, this takes from what is cached here.
    if (refused.ok()) refused = create(pool, wanted);
    if (pool.memories.size() >= wanted) break;
    const uint64_t missing_bytes = (wanted - pool.memories.size()) * pool.granule;
    if (Pool& other = other_pool(pool); !other.memories.empty()) {
      release_from(other, missing_bytes);
      refused = {};
      continue;
    }
    FenceList busy;
    if (reclaim(std::max(missing_bytes, kBatch * pool.granule), &busy)) continue;
    if (!pool.memories.empty()) return {};
    if (busy.empty())
      return refused.ok() ? base::Status(GPUSHARE_DEVICE_OUT_OF_MEMORY, "every physical granule is in use")
                          : refused;
    GPUSHARE_RETURN_IF_ERROR(wait_for(std::move(busy), patience, lock));
  }
  return {};
}

base::Status VirtualLayout::create(Pool& pool, size_t wanted) {
  const size_t most = std::min<uint64_t>(wanted - std::min(wanted, pool.memories.size()),
                                         (capacity_ - created_bytes_) / pool.granule);
  std::vector<gpushare_backend_memory*> made;
  made.reserve(most);  // what is made is counted, so nothing may throw after it
  pool.memories.reserve(pool.memories.size() + most);
  base::Status status;
  while (pool.memories.size() + made.size() < wanted && pool.granule <= capacity_ - created_bytes_) {
    auto memory = device_.phys_create(pool.granule);
    if (!memory.ok()) {
      status = memory.status();
      break;
    }
    made.push_back(*memory);
    ++created_;
    created_bytes_ += pool.granule;
  }
  // Below the others, as the last are mapped to the first cells.
  pool.memories.insert(pool.memories.begin(), made.rbegin(), made.rend());
  return status;
}

bool VirtualLayout::reclaim(uint64_t wanted_bytes, FenceList* out_busy) {
  uint64_t taken_bytes = 0;
  for (auto entry = unused_.begin(); entry != unused_.end() && taken_bytes < wanted_bytes;) {
    if (!is_unused(*entry)) {
      entry = unused_.erase(entry);
      continue;
    }
    if (is_busy(*entry, out_busy)) {
      ++entry;
      continue;
    }
    Region& region = *regions_[entry->slot];
    const uint64_t size = region.bytes_of(entry->cell), wanted = (wanted_bytes - taken_bytes - 1) / size + 1;
    // A decommit makes cells unused from the last to the first.
    auto end = entry + 1;
    while (end != unused_.end() && static_cast<uint64_t>(end - entry) < wanted && end->slot == entry->slot &&
           end->cell + 1 == std::prev(end)->cell && region.bytes_of(end->cell) == size && is_unused(*end) &&
           !is_busy(*end, nullptr))
      ++end;
    const auto count = static_cast<size_t>(end - entry);
    const size_t done = unmap_cells(region, std::prev(end)->cell, count);
    taken_bytes += done * size;
    // The others, which cannot be unmapped, come first.
    entry = unused_.erase(end - static_cast<ptrdiff_t>(done), end);
  }
  return taken_bytes > 0;
}

void VirtualLayout::release_from(Pool& pool, uint64_t bytes) {
  for (uint64_t released = 0; released < bytes && !pool.memories.empty(); released += pool.granule) {
    const base::Status ignored = device_.phys_release(pool.memories.back());
    pool.memories.pop_back();
    --created_;
    created_bytes_ -= pool.granule;
  }
}

void VirtualLayout::release_pools() {
  release_from(pool_, UINT64_MAX);
  release_from(small_pool_, UINT64_MAX);
}

namespace {

uint64_t smallest_granule(const device::Device& device) {
  return std::max<uint64_t>(AddressIndex::kGranuleBytes, device.info().mapping_granularity_bytes);
}

}  // namespace

uint64_t virtual_granule(const device::Device& device, uint64_t capacity_bytes) {
  const uint64_t smallest = smallest_granule(device);
  const uint64_t wanted = std::bit_ceil(std::max<uint64_t>(capacity_bytes / 4096, 1));
  return std::clamp(wanted, smallest, std::max<uint64_t>(smallest, uint64_t{64} << 20));
}

base::Result<std::unique_ptr<RangeLayout>> make_virtual_layout(device::Device& device,
                                                               uint64_t capacity_bytes, uint64_t granule) {
  const uint64_t mapping = device.info().mapping_granularity_bytes;
  if (!device.can(GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY))
    return base::Status(GPUSHARE_UNSUPPORTED,
                        "device " + device.spec() + " has no virtual memory; use the contiguous layout");
  if (!std::has_single_bit(mapping))
    return base::Status(GPUSHARE_UNSUPPORTED, "the mapping granularity of device " + device.spec() +
                                                  " is no power of two; use the contiguous layout");
  const uint64_t capacity = capacity_bytes / granule * granule;
  return std::unique_ptr<RangeLayout>(new VirtualLayout(device, granule, smallest_granule(device), capacity));
}

}  // namespace gpushare::memory
