// Host memory behind granules of the virtual layout, and moves between it and memory of the device. A granule that
// moves has its new memory mapped at a window as well, for the copy; then the new memory takes the addresses.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "memory/layout_virtual.hpp"

namespace gpushare::memory {

base::Status VirtualLayout::commit_host(const Range& range, size_t granule, FenceList* out_busy) {
  base::MutexLock lock(mutex_);
  sweep_host();
  Region& region = *regions_[range.slot];
  if (region.cells.size() <= granule) region.cells.resize(granule + 1);
  Cell& cell = region.cells[granule];
  if (cell.memory != nullptr) {  // left there by a decommit
    if (cell.fences != nullptr && !all_passed(*cell.fences)) {
      *out_busy = *cell.fences;
      return {GPUSHARE_NOT_READY, "the device still uses what was behind a granule"};
    }
    GPUSHARE_RETURN_IF_ERROR(unmap_cell(region, granule));
  }
  GPUSHARE_ASSIGN_OR_RETURN(gpushare_backend_memory * memory, take_host(granule_));
  if (auto status = device_.va_map(region.base + granule * granule_, granule_, memory, 0); !status.ok()) {
    give_host(memory, granule_);
    return status.with_context("mapping host memory");
  }
  cell = {};
  cell.memory = memory;
  cell.committed = cell.on_host = true;
  region.mapped_bytes += granule_;
  host_bytes_ += granule_;
  return {};
}

void VirtualLayout::sweep_host() {
  std::erase_if(unused_host_, [this](const Unused& entry) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    if (!is_unused(entry)) return true;
    return !is_busy(entry, nullptr) && unmap_cell(*regions_[entry.slot], entry.cell).ok();
  });
}

uint64_t VirtualLayout::host_bytes() {
  base::MutexLock lock(mutex_);
  sweep_host();
  return host_bytes_ + pooled_host_bytes();
}

void VirtualLayout::trim_host() {
  base::MutexLock lock(mutex_);
  release_host_pools();
}

void VirtualLayout::release_host_pools() {
  for (Pool* pool : {&host_pool_, &small_host_pool_}) {
    for (gpushare_backend_memory* memory : pool->memories) {
      const base::Status ignored = device_.phys_release(memory);
    }
    pool->memories.clear();
  }
}

base::Result<gpushare_backend_memory*> VirtualLayout::take_host(uint64_t bytes) {
  Memories& kept = (bytes == granule_ ? host_pool_ : small_host_pool_).memories;
  if (kept.empty()) return device_.phys_create_host(bytes);
  gpushare_backend_memory* const memory = kept.back();
  kept.pop_back();
  return memory;
}

void VirtualLayout::give_host(gpushare_backend_memory* memory, uint64_t bytes) {
  if (pooled_host_bytes() + bytes <= kKeptOnHost * granule_) {
    (bytes == granule_ ? host_pool_ : small_host_pool_).memories.push_back(memory);
    return;
  }
  const base::Status ignored = device_.phys_release(memory);
}

// (The analysis cannot follow a scoped lock through a parameter.)
base::Status VirtualLayout::take_for_move(bool device, uint64_t bytes, size_t count, base::MutexLock& lock,
                                          Memories* out_memories) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  out_memories->reserve(count);
  if (!device) {
    while (out_memories->size() < count) {
      auto memory = take_host(bytes);
      if (!memory.ok()) {
        drop_moved(*out_memories, bytes, false);
        return memory.status();
      }
      out_memories->push_back(*memory);
    }
    return {};
  }
  if (count * bytes > capacity_ - promised_) return no_room(count * bytes);
  promised_ += count * bytes;
  Pool& pool = bytes == granule_ ? pool_ : small_pool_;
  base::Status status = fill_pool(pool, count, {false}, lock);
  if (status.ok() && pool.memories.size() < count)
    status = {GPUSHARE_DEVICE_OUT_OF_MEMORY, "the device still uses granules that could be taken"};
  if (!status.ok()) {
    promised_ -= count * bytes;
    return status;
  }
  out_memories->assign(pool.memories.rbegin(), pool.memories.rbegin() + static_cast<ptrdiff_t>(count));
  pool.memories.resize(pool.memories.size() - count);
  return {};
}

base::Status VirtualLayout::begin_move(const Range& range, size_t granule, bool home, size_t slot,
                                       Address* out_window) {
  base::MutexLock lock(mutex_);
  if (window_bytes_ == 0)
    GPUSHARE_RETURN_IF_ERROR(
        reserve_addresses(kMoveSlots * granule_, &window_, &window_bytes_, &window_base_));
  const Region& region = *regions_[range.slot];
  const size_t first = region.cell_of(granule), count = region.cell_of(granule + 1) - first;
  const uint64_t bytes = region.bytes_of(first);
  Memories memories;
  GPUSHARE_RETURN_IF_ERROR(take_for_move(home, bytes, count, lock, &memories));
  const Address window = window_base_ + slot * granule_;
  if (auto status = device_.va_map_run(window, bytes, memories.data(), count); !status.ok()) {
    drop_moved(memories, bytes, home);
    return status.with_context("mapping memory to move to");
  }
  moving_[slot] = std::move(memories);
  moving_home_ = home;
  *out_window = window;
  return {};
}

base::Status VirtualLayout::exchange_cells(Region& region, size_t first, const Memories& to, bool* out_lost) {
  const uint64_t bytes = region.bytes_of(first);
  const Address address = region.address_of(first);
  Memories from;
  for (size_t i = 0; i < to.size(); ++i) from.push_back(region.cells[first + i].memory);
  uint64_t unmapped = 0;
  base::Status status = device_.va_unmap_run(address, bytes, to.size(), &unmapped);
  if (status.ok()) status = device_.va_map_run(address, bytes, to.data(), to.size());
  if (status.ok() || unmapped == 0 || device_.va_map_run(address, bytes, from.data(), unmapped).ok())
    return status;
  // The rest goes as well, because half of a granule is of no use.
  *out_lost = true;
  uint64_t more = 0;
  if (unmapped < to.size()) {
    const base::Status ignored =
        device_.va_unmap_run(address + unmapped * bytes, bytes, to.size() - unmapped, &more);
  }
  return status;
}

base::Status VirtualLayout::end_move(const Range& range, size_t granule, bool home, size_t slot, bool keep,
                                     bool* out_lost) {
  *out_lost = false;
  base::MutexLock lock(mutex_);
  Region& region = *regions_[range.slot];
  const size_t first = region.cell_of(granule);
  const uint64_t bytes = region.bytes_of(first);
  const Memories memories = std::exchange(moving_[slot], {});
  base::Status status;
  if (keep) status = exchange_cells(region, first, memories, out_lost);
  // A window that stays mapped refuses later moves, and no more.
  uint64_t unmapped = 0;
  const base::Status ignored =
      device_.va_unmap_run(window_base_ + slot * granule_, bytes, memories.size(), &unmapped);
  const bool moves = keep && status.ok();
  if (!moves) drop_moved(memories, bytes, home);
  if (!moves && !*out_lost) return status;
  Memories left;
  for (size_t i = 0; i < memories.size(); ++i) left.push_back(region.cells[first + i].memory);
  drop_moved(left, bytes, !home);
  if (home) host_bytes_ -= granule_;
  if (*out_lost) region.mapped_bytes -= granule_;
  if (moves && !home) host_bytes_ += granule_;
  for (size_t i = 0; i < memories.size(); ++i) {
    Cell& cell = region.cells[first + i];
    cell = {};
    cell.committed = true;
    cell.memory = *out_lost ? nullptr : memories[i];
    cell.on_host = !home || *out_lost;
    cell.lost = *out_lost;
  }
  return status;
}

void VirtualLayout::drop_moved(const Memories& memories, uint64_t bytes, bool device) {
  for (gpushare_backend_memory* const memory : memories) {
    if (device) {
      (bytes == granule_ ? pool_ : small_pool_).memories.push_back(memory);
      promised_ -= bytes;
    } else {
      give_host(memory, bytes);
    }
  }
}

}  // namespace gpushare::memory
