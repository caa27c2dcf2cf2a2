// Paging of a persistent heap: its live blocks are copied to chunks of host memory and back; the addresses
// stay reserved.
//
// While it is out, blocks can be freed but not placed, so the runs of live bytes that were saved cover all
// that must come back. Every failure leaves the heap as it was: resident with all its bytes, or paged out
// with all its bytes in host memory. Blocks that it kept lie in lanes; they go and come after it (kept_moves.cpp).
//
// SPDX-License-Identifier: Apache-2.0
#include "base/units.hpp"
#include "memory/lane.hpp"
#include "memory/persistent_heap.hpp"

namespace gpushare::memory {

// Copies the runs to (`out`) or from the saved chunks, in order; of each extent the first skip_bytes need no
// copy.
base::Status PersistentHeapImpl::copy_runs(const std::vector<Run>& runs,
                                           const std::vector<uint64_t>& skip_bytes,
                                           const device::Stream& stream, bool out) {
  uint64_t at = 0;  // in the saved chunks
  for (const Run& run : runs) {
    const Address begin = extents()[run.extent].range.base + run.offset;
    for (uint64_t done = 0; done < run.bytes;) {
      const uint64_t room = HostChunks::kBytes - at % HostChunks::kBytes;
      const uint64_t bytes = std::min(room, run.bytes - done);
      if (run.offset + done + bytes > skip_bytes[run.extent]) {
        const auto host =
            reinterpret_cast<uintptr_t>(saved_chunks_[at / HostChunks::kBytes] + at % HostChunks::kBytes);
        GPUSHARE_RETURN_IF_ERROR(out ? stream.copy(host, begin + done, bytes, GPUSHARE_COPY_DEVICE_TO_HOST)
                                     : stream.copy(begin + done, host, bytes, GPUSHARE_COPY_HOST_TO_DEVICE));
      }
      at += bytes;
      done += bytes;
    }
  }
  return {};
}

base::Status PersistentHeapImpl::page_out(const device::Stream& stream) {
  base::MutexLock control(control_);
  if (!shared_.layout->can_page())
    return {GPUSHARE_UNSUPPORTED, "the contiguous layout cannot page a session out and keep its addresses"};
  if (residency_.load() != Residency::kResident)
    return {GPUSHARE_INVALID_STATE,
            is_open() ? "the session is paged out already" : "the persistent heap is closed"};
  FenceList fences;
  uint64_t bytes = 0;
  saved_runs_.clear();
  {
    ShortLockGuard lock(lock_);
    residency_.store(Residency::kPaging);
    for (size_t i = 0; i < extents_.size(); ++i) {
      const Extent& extent = extents_[i];
      extent.heap->for_each_block([&](const HeapBlock& block) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
        if (!block.live || (block.tag & BlockTag::kFreed)) return;
        const auto save = [&](uint64_t offset, uint64_t size) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
          bytes += size;
          if (!saved_runs_.empty() && saved_runs_.back().extent == i &&
              saved_runs_.back().offset + saved_runs_.back().bytes == offset)
            saved_runs_.back().bytes += size;
          else
            saved_runs_.push_back({i, offset, size});
        };
        if (extent.away == 0) return save(block.offset_bytes, block.size_bytes);
        // Granules in host memory stay where they are.
        uint64_t at = block.offset_bytes;
        for_each_granule(block.offset_bytes, block.size_bytes, [&](size_t granule, uint64_t size) {
          if (!extent.granules[granule].away) save(at, size);
          at += size;
        });
      });
    }
    fences = uses_.outstanding();
  }
  // The promise is not held while it is out, nor what was lent of it: lanes have promoted blocks within their
  // own size meanwhile.
  for (LaneImpl* lane : borrowers()) lane->return_loan(*this);
  if (this->stream() != nullptr && this->stream() != &stream)
    for (const FencePtr& fence : own_fences()) fences.push_back(fence);
  const auto stay = [&](const base::Status& status) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    shared_.spill->chunks().give(saved_chunks_);
    saved_runs_.clear();
    residency_.store(Residency::kResident);
    return status.with_context("paging out session '" + name() + "'");
  };
  order_all(fences, stream);
  if (auto status = shared_.spill->chunks().take(bytes, &saved_chunks_); !status.ok()) return stay(status);
  auto status = copy_runs(saved_runs_, std::vector<uint64_t>(extents().size(), 0), stream, true);
  // Even after a failure: copies enqueued before it still write to the chunks.
  const auto finished = stream.synchronize();
  if (status.ok()) status = finished;
  if (!status.ok()) return stay(status);
  for (Extent& extent : extents()) {
    status = shared_.layout->unback(extent.range, extent.range.bytes);
    if (!status.ok()) return stay(status);  // INVALID_STATE only: a broken invariant
  }
  residency_.store(Residency::kPagedOut);
  shared_.paged_out_bytes.fetch_add(bytes, std::memory_order_relaxed);
  // The page-out is made whatever becomes of the kept blocks.
  for (LaneImpl* lane : borrowers()) lane->send_kept_out(own_fences(), stream);
  return {};
}

base::Status PersistentHeapImpl::page_in(const device::Stream& stream) {
  base::MutexLock control(control_);
  if (residency_.load() != Residency::kPagedOut)
    return {GPUSHARE_INVALID_STATE, "the session is not paged out"};
  const auto lost = [this] {
    return base::Status(GPUSHARE_INTERNAL, "session '" + name() + "': the device lost blocks that it kept");
  };
  if (kept_lost_.load()) return lost();
  std::vector<Extent>& extents = this->extents();
  std::vector<uint64_t> valid(extents.size(), 0);
  size_t backed = 0;
  base::Status status;
  for (; backed < extents.size() && status.ok(); ++backed)
    status = shared_.layout->back(extents[backed].range, &valid[backed]);
  const auto stay_out = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const base::Status ignored = shared_.layout->unback(extents[i].range, valid[i]);
    }
    return status.with_context("paging in session '" + name() + "'");
  };
  if (!status.ok()) return stay_out(backed - 1);
  status = copy_runs(saved_runs_, valid, stream, false);
  const auto finished = stream.synchronize();
  if (status.ok()) status = finished;
  if (!status.ok()) return stay_out(extents.size());
  uint64_t bytes = 0;
  for (const Run& run : saved_runs_) bytes += run.bytes;
  shared_.spill->chunks().give(saved_chunks_);
  saved_runs_.clear();
  residency_.store(Residency::kResident);
  shared_.paged_in_bytes.fetch_add(bytes, std::memory_order_relaxed);
  for (LaneImpl* lane : borrowers()) lane->bring_kept_home(*this, stream);
  return kept_lost_.load() ? lost() : base::Status();
}

}  // namespace gpushare::memory
