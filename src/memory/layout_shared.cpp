// Shared ranges: lanes in memory that another process made and several have mapped.
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "base/log.hpp"
#include "base/units.hpp"
#include "memory/layout_virtual.hpp"

namespace gpushare::memory {

base::Status VirtualLayout::take_shared(std::shared_ptr<base::Pieces> pieces, uint64_t bytes,
                                        Range* out_range) {
  base::MutexLock lock(mutex_);
  Region* region = nullptr;
  GPUSHARE_RETURN_IF_ERROR(take_region(Use::kShared, bytes, &region));
  region->pieces = std::move(pieces);
  if (auto status = import_up_to(*region, bytes); !status.ok()) {
    drop_imported(*region, 0, {}, lock);
    region->pieces = nullptr;
    if (region->imported.empty()) retire(*region, nullptr);
    return status;
  }
  region->bytes = bytes;
  *out_range = {region->base, bytes, region->slot};
  return {};
}

base::Status VirtualLayout::adopt_own(Range& range, Range& own) {
  base::MutexLock lock(mutex_);
  Region& to = *regions_[range.slot];
  Region& from = *regions_[own.slot];
  drop_imported(to, 0, {}, lock);
  if (!to.imported.empty()) return {GPUSHARE_INTERNAL, "a shared lane could not be unmapped"};
  to.pieces = nullptr;
  to.use = Use::kLane;
  const size_t count = to.bytes / granule_;
  to.cells.resize(count);
  base::Status status;
  for (size_t i = 0; i < count && status.ok(); ++i) {
    Cell& cell = from.cells[i];
    status = device_.va_unmap(from.base + i * granule_, granule_);
    if (!status.ok()) break;
    status = device_.va_map(to.base + i * granule_, granule_, cell.memory, 0);
    from.mapped_bytes -= granule_;
    if (status.ok()) {
      to.cells[i] = std::move(cell);
      to.mapped_bytes += granule_;
    } else {
      pool_.memories.push_back(cell.memory);
      promised_ -= granule_;
    }
    cell = {};
  }
  own = {};
  // After an error some cells of `from` may still be committed.
  decommit_cells(from, 0, from.cells.size(), nullptr, true);
  retire(from, nullptr);
  return status.with_context("mapping memory of its own into a shared lane");
}

base::Status VirtualLayout::import_up_to(Region& region, uint64_t bytes) {
  while (region.imported_bytes < bytes) {
    base::Pieces::Piece piece{};
    if (!region.pieces->get(region.imported.size(), &piece) || piece.offset_bytes != region.imported_bytes ||
        piece.bytes > region.limit - region.imported_bytes)
      return {GPUSHARE_DEVICE_OUT_OF_MEMORY, base::format("%s of the shared lane are here, %s are needed",
                                                          base::format_bytes(region.imported_bytes).c_str(),
                                                          base::format_bytes(bytes).c_str())};
    GPUSHARE_ASSIGN_OR_RETURN(gpushare_backend_memory* const memory,
                              device_.phys_import(piece.descriptor, piece.bytes, GPUSHARE_ACCESS_READ_WRITE));
    if (auto status = device_.va_map(region.base + region.imported_bytes, piece.bytes, memory, 0);
        !status.ok()) {
      const base::Status ignored = device_.phys_release(memory);
      return status.with_context("mapping a shared lane");
    }
    region.imported.push_back({memory, piece.bytes});
    region.imported_bytes += piece.bytes;
  }
  return {};
}

// (The analysis cannot follow a scoped lock through a parameter.)
void VirtualLayout::drop_imported(Region& region, uint64_t bytes, const FenceList& fences,
                                  base::MutexLock& lock) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  const auto last_begins = [&region] { return region.imported_bytes - region.imported.back().bytes; };
  if (region.imported.empty() || last_begins() < bytes) return;
  lock.unlock();
  wait_all(fences);
  lock.lock();
  while (!region.imported.empty() && last_begins() >= bytes) {
    const Imported last = region.imported.back();
    if (const auto status = device_.va_unmap(region.base + last_begins(), last.bytes); !status.ok()) {
      base::log(base::kError, status.with_context("unmapping a shared lane").to_string());
      return;
    }
    const base::Status ignored = device_.phys_release(last.memory);
    region.imported.pop_back();
    region.imported_bytes -= last.bytes;
  }
}

}  // namespace gpushare::memory
