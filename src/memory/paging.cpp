// Paging of a persistent heap: its live blocks are copied to chunks of host memory and back; the addresses
// stay reserved.
//
// A page-out and a page-in go in parts, each a call, so that whoever waits meanwhile waits for one part's copy. A page-out
// copies the last bytes first and gives the granules behind them back with each part. A page-in has all memory back
// before its first copy, so that only a failed copy can end it.
//
// While it is out, blocks can be freed but not placed, so the runs of live bytes that were saved cover all
// that must come back. No failure loses a byte: a failed first part leaves the heap resident, a later one leaves it
// where it is, to be tried again, and a failed part of a page-in leaves it paged out with all its bytes in host memory.
// Blocks that it kept lie in lanes; they go and come after its own blocks, in parts as well (kept_moves.cpp). A kept
// block that cannot move stays where it is, so a page-in of which only kept blocks are missing may end at any time.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "base/units.hpp"
#include "memory/lane.hpp"
#include "memory/persistent_heap.hpp"

namespace gpushare::memory {

uint64_t PersistentHeapImpl::saved_bytes() const {
  uint64_t bytes = 0;
  for (const Run& run : saved_runs_) bytes += run.bytes;
  return bytes;
}

base::Result<uint64_t> PersistentHeapImpl::copy_runs(uint64_t from, uint64_t end, uint64_t most_bytes,
                                                     const std::vector<uint64_t>& skip_bytes,
                                                     const device::Stream& stream, bool out) {
  uint64_t at = from, copied = 0, first = 0;  // in the saved chunks
  base::Status status;
  for (const Run& run : saved_runs_) {
    const uint64_t run_end = std::min(end, first + run.bytes);
    const Address begin = extents()[run.extent].range.base + run.offset;
    while (at >= first && at < run_end && copied < most_bytes && status.ok()) {
      const uint64_t done = at - first;
      uint64_t bytes = std::min(HostChunks::kBytes - at % HostChunks::kBytes, run_end - at);
      if (run.offset + done + bytes > skip_bytes[run.extent]) {
        bytes = std::min(bytes, most_bytes - copied);
        copied += bytes;
        const auto host =
            reinterpret_cast<uintptr_t>(saved_chunks_[at / HostChunks::kBytes] + at % HostChunks::kBytes);
        status = out ? stream.copy(host, begin + done, bytes, GPUSHARE_COPY_DEVICE_TO_HOST)
                     : stream.copy(begin + done, host, bytes, GPUSHARE_COPY_HOST_TO_DEVICE);
      }
      at += bytes;
    }
    first += run.bytes;
  }
  // Even after a failure: copies enqueued before it still use the chunks.
  const base::Status finished = stream.synchronize();
  GPUSHARE_RETURN_IF_ERROR(status);
  GPUSHARE_RETURN_IF_ERROR(finished);
  return at;
}

FenceList PersistentHeapImpl::begin_page_out() {
  saved_runs_.clear();
  still_backed_.clear();
  ShortLockGuard lock(door_.lock_);
  residency_.store(Residency::kPaging);
  for (size_t i = 0; i < extents_.size(); ++i) {
    const Extent& extent = extents_[i];
    still_backed_.push_back(extent.range.bytes);
    extent.heap->for_each_block([&](const HeapBlock& block) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      if (!block.live || (block.tag & BlockTag::kFreed)) return;
      const auto save = [&](uint64_t offset, uint64_t size) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
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
  return uses_.outstanding();
}

base::Result<uint64_t> PersistentHeapImpl::give_saved(uint64_t at) {
  // The run with the last byte that is not saved.
  size_t extent = 0;
  uint64_t keep = 0, first = 0;
  for (const Run& run : saved_runs_) {
    if (first >= at) break;
    extent = run.extent;
    keep = round_up(run.offset + std::min(run.bytes, at - first), shared_.layout->granularity_bytes());
    first += run.bytes;
  }
  uint64_t given = 0;
  for (size_t i = extents().size(); i-- > extent;) {
    const Extent& each = extents()[i];
    const uint64_t from = i == extent ? keep : 0;
    if (from >= still_backed_[i]) continue;
    GPUSHARE_RETURN_IF_ERROR(shared_.layout->unback(extents()[i].range, from, extents()[i].range.bytes));
    for_each_granule(from, still_backed_[i] - from, [&](size_t granule, uint64_t bytes) {
      if (each.away == 0 || !each.granules[granule].away) given += bytes;
    });
    still_backed_[i] = from;
  }
  return given;
}

base::Status PersistentHeapImpl::page_out(const device::Stream& stream, uint64_t most_bytes,
                                          uint64_t* out_given_bytes) {
  const base::WorkLock control(control_, base::kMustWait);
  if (!shared_.layout->can_page())
    return {GPUSHARE_UNSUPPORTED, "the contiguous layout cannot page a session out and keep its addresses"};
  most_bytes = std::max(most_bytes, shared_.layout->granularity_bytes());
  const Residency was = residency_.load();
  const bool begins = was == Residency::kResident;
  if (was == Residency::kOut) {
    send_kept_out(stream, most_bytes);
    return {};
  }
  if (!begins && was != Residency::kPaging)
    return {GPUSHARE_INVALID_STATE,
            is_open() ? "the session is paged out already" : "the persistent heap is closed"};
  if (begins && any_hollow())
    return {
        GPUSHARE_UNSUPPORTED,
        "session '" + name() + "' has ended but for blocks between granules that it gave back: these stay"};
  if (begins) {
    FenceList fences = begin_page_out();
    // The promise is not held while it is out, nor what was lent of it: lanes have promoted blocks within their
    // own size meanwhile.
    for (LaneImpl* lane : borrowers()) lane->return_loan(*this);
    if (this->stream() != nullptr && this->stream() != &stream)
      for (const FencePtr& fence : own_fences()) fences.push_back(fence);
    order_all(fences, stream);
    out_from_ = saved_bytes();
  }
  const auto stay = [&](const base::Status& status) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    if (begins) {
      shared_.spill->chunks().give(saved_chunks_);
      saved_runs_.clear();
      residency_.store(Residency::kResident);
    }
    return status.with_context("paging out session '" + name() + "'");
  };
  if (begins) {
    const base::Status room = shared_.spill->chunks().take(out_from_, &saved_chunks_);
    if (!room.ok()) return stay(room);
  }
  const uint64_t from = out_from_ - std::min(out_from_, most_bytes);
  const auto copied =
      copy_runs(from, out_from_, UINT64_MAX, std::vector<uint64_t>(extents().size(), 0), stream, true);
  if (!copied.ok()) return stay(copied.status());
  const auto given = give_saved(from);
  if (!given.ok()) return stay(given.status());  // INVALID_STATE only: a broken invariant
  if (out_given_bytes != nullptr) *out_given_bytes += *given;
  most_bytes -= std::exchange(out_from_, from) - from;
  if (from > 0) return {};
  residency_.store(Residency::kOut);
  shared_.paged_out_bytes.fetch_add(saved_bytes(), std::memory_order_relaxed);
  send_kept_out(stream, most_bytes);
  return {};
}

bool PersistentHeapImpl::move_kept(bool home, const device::Stream& stream, uint64_t most_bytes) {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  for (LaneImpl* lane : borrowers()) {
    if (most_bytes >= granularity)
      most_bytes -= home ? lane->bring_kept_home(*this, stream, most_bytes)
                         : lane->send_kept_out(own_fences(), stream, most_bytes);
    if (most_bytes < granularity) return false;
  }
  return true;
}

// The page-out is made whatever becomes of the kept blocks.
void PersistentHeapImpl::send_kept_out(const device::Stream& stream, uint64_t most_bytes) {
  if (move_kept(false, stream, most_bytes)) residency_.store(Residency::kPagedOut);
}

base::Status PersistentHeapImpl::bring_kept_home(const device::Stream& stream, uint64_t most_bytes) {
  const bool all = move_kept(true, stream, most_bytes);
  if (kept_lost_.load()) return kept_lost();
  if (all) residency_.store(Residency::kResident);
  return {};
}

base::Status PersistentHeapImpl::kept_lost() const {
  return {GPUSHARE_INTERNAL, "session '" + name() + "': the device lost blocks that it kept"};
}

void PersistentHeapImpl::unback_all() {
  for (size_t i = 0; i < valid_.size(); ++i) {
    const base::Status ignored = shared_.layout->unback(extents()[i].range, 0, valid_[i]);
  }
  valid_.clear();
  coming_in_ = false;
}

void PersistentHeapImpl::stop_page_in() {
  const base::WorkLock control(control_, base::kMustWait);
  if (coming_in_) unback_all();
  if (residency_.load() != Residency::kIn || kept_lost_.load()) return;
  // A boundary may still move granules that it chose before the session's own blocks were in.
  for (LaneImpl* lane : borrowers()) lane->await_moves();
  residency_.store(Residency::kResident);
}

base::Status PersistentHeapImpl::page_in(const device::Stream& stream, uint64_t most_bytes) {
  const base::WorkLock control(control_, base::kMustWait);
  if (!paged_out()) return {GPUSHARE_INVALID_STATE, "the session is not paged out"};
  if (kept_lost_.load()) return kept_lost();
  most_bytes = std::max(most_bytes, shared_.layout->granularity_bytes());
  if (residency_.load() == Residency::kIn) return bring_kept_home(stream, most_bytes);
  const auto stay_out = [&](const base::Status& status) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    unback_all();
    return status.with_context("paging in session '" + name() + "'");
  };
  if (!coming_in_) {
    in_until_ = 0;
    for (Extent& extent : extents()) {
      uint64_t valid = 0;
      if (const auto status = shared_.layout->back(extent.range, &valid); !status.ok())
        return stay_out(status);
      valid_.push_back(valid);
    }
    coming_in_ = true;
  }
  const auto copied = copy_runs(in_until_, saved_bytes(), most_bytes, valid_, stream, false);
  if (!copied.ok()) return stay_out(copied.status());
  most_bytes -= std::min(most_bytes, *copied - std::exchange(in_until_, *copied));
  if (in_until_ < saved_bytes()) return {};
  shared_.paged_in_bytes.fetch_add(saved_bytes(), std::memory_order_relaxed);
  shared_.spill->chunks().give(saved_chunks_);
  saved_runs_.clear();
  valid_.clear();
  coming_in_ = false;
  residency_.store(Residency::kIn);
  return bring_kept_home(stream, most_bytes);
}

}  // namespace gpushare::memory
