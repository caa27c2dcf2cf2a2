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
  GPUSHARE_ASSIGN_OR_RETURN(gpushare_backend_memory * memory, take_host());
  if (auto status = device_.va_map(region.base + granule * granule_, granule_, memory, 0); !status.ok()) {
    give_host(memory);
    return status.with_context("mapping host memory");
  }
  cell = {};
  cell.memory = memory;
  cell.committed = cell.on_host = true;
  ++region.mapped;
  ++host_granules_;
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
  return (host_granules_ + host_pool_.size()) * granule_;
}

void VirtualLayout::trim_host() {
  base::MutexLock lock(mutex_);
  release_host_pool();
}

void VirtualLayout::release_host_pool() {
  for (gpushare_backend_memory* memory : host_pool_) {
    const base::Status ignored = device_.phys_release(memory);
  }
  host_pool_.clear();
}

base::Result<gpushare_backend_memory*> VirtualLayout::take_host() {
  if (host_pool_.empty()) return device_.phys_create_host(granule_);
  gpushare_backend_memory* const memory = host_pool_.back();
  host_pool_.pop_back();
  return memory;
}

void VirtualLayout::give_host(gpushare_backend_memory* memory) {
  if (host_pool_.size() < kKeptOnHost) {
    host_pool_.push_back(memory);
    return;
  }
  const base::Status ignored = device_.phys_release(memory);
}

base::Status VirtualLayout::begin_move(const Range&, size_t, bool home, size_t slot, Address* out_window) {
  base::MutexLock lock(mutex_);
  if (window_bytes_ == 0)
    GPUSHARE_RETURN_IF_ERROR(
        reserve_addresses(kMoveSlots * granule_, &window_, &window_bytes_, &window_base_));
  gpushare_backend_memory* memory = nullptr;
  if (home) {
    if (granule_ > capacity_ - promised_) return no_room(granule_);
    promised_ += granule_;
    if (auto status = fill_pool(pool_, 1, {false}, lock); !status.ok()) {
      promised_ -= granule_;
      return status;
    }
    memory = pool_.memories.back();
    pool_.memories.pop_back();
  } else {
    GPUSHARE_ASSIGN_OR_RETURN(memory, take_host());
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

base::Status VirtualLayout::end_move(const Range& range, size_t granule, bool home, size_t slot, bool keep,
                                     bool* out_lost) {
  *out_lost = false;
  base::MutexLock lock(mutex_);
  Region& region = *regions_[range.slot];
  Cell& cell = region.cells[granule];
  const Address address = region.base + granule * granule_;
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
  const bool moves = keep && status.ok();
  if (!moves) drop_moved(memory, home);
  if (!moves && !*out_lost) return status;
  drop_moved(cell.memory, !home);
  if (home) --host_granules_;
  if (*out_lost) {
    cell = {};
    cell.committed = cell.on_host = cell.lost = true;
    --region.mapped;
    return status;
  }
  if (!home) ++host_granules_;
  cell = {};
  cell.memory = memory;
  cell.committed = true;
  cell.on_host = !home;
  return {};
}

void VirtualLayout::drop_moved(gpushare_backend_memory* memory, bool device) {
  if (device) {
    pool_.memories.push_back(memory);
    promised_ -= granule_;
  } else {
    give_host(memory);
  }
}

}  // namespace gpushare::memory
