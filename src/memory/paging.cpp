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
// The session's elastic ranges go after its own blocks and come before them (elastic_range.hpp). Blocks that it kept lie in
// lanes; they go and come last, in parts as well (kept_moves.cpp). A kept block that cannot move stays where it is, so a
// page-in of which only kept blocks are missing may end at any time.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "memory/elastic_range.hpp"
#include "memory/lane.hpp"
#include "memory/persistent_heap.hpp"

namespace gpushare::memory {

uint64_t PersistentHeapImpl::saved_bytes() const {
  uint64_t bytes = 0;
  for (const Run& run : saved_runs_) bytes += run.bytes;
  return bytes;
}

base::Result<uint64_t> PersistentHeapImpl::copy_runs(uint64_t from, uint64_t end, uint64_t most_bytes,
                                                     const device::Stream& stream, bool out) {
  uint64_t at = from, first = 0;  // in the saved chunks
  base::Status status;
  for (const Run& run : saved_runs_) {
    const uint64_t run_end = first + run.bytes;
    if (at < run_end && at < end && most_bytes > 0 && status.ok()) {
      uint64_t offset = run.offset + (at - first);
      if (!out && valid_[run.extent] > offset) {
        offset = std::min(valid_[run.extent], run.offset + run.bytes);
        at = first + (offset - run.offset);
      }
      const uint64_t bytes = std::min({run_end - at, end - std::min(end, at), most_bytes});
      status =
          HostChunks::copy(saved_chunks_, at, extents()[run.extent].range.base + offset, bytes, stream, out);
      at += bytes;
      most_bytes -= bytes;
    }
    first = run_end;
  }
  // Even after a failure: copies enqueued before it still use the chunks.
  const base::Status finished = stream.synchronize();
  GPUSHARE_RETURN_IF_ERROR(status);
  GPUSHARE_RETURN_IF_ERROR(finished);
  return at;
}

FenceList PersistentHeapImpl::choose_runs() {
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

base::Status PersistentHeapImpl::give_saved(uint64_t at, uint64_t* out_given_bytes) {
  // The run with the last byte that is not saved.
  size_t extent = 0;
  uint64_t keep = 0, first = 0;
  for (const Run& run : saved_runs_) {
    if (first >= at) break;
    extent = run.extent;
    keep = round_up(run.offset + std::min(run.bytes, at - first), shared_.layout->granularity_bytes());
    first += run.bytes;
  }
  for (size_t i = extents().size(); i-- > extent;) {
    const Extent& each = extents()[i];
    const uint64_t from = i == extent ? keep : 0;
    if (from >= still_backed_[i]) continue;
    GPUSHARE_RETURN_IF_ERROR(shared_.layout->unback(extents()[i].range, from, extents()[i].range.bytes));
    for_each_granule(from, still_backed_[i] - from, [&](size_t granule, uint64_t bytes) {
      if (each.away == 0 || !each.granules[granule].away) *out_given_bytes += bytes;
    });
    still_backed_[i] = from;
  }
  return {};
}

base::Status PersistentHeapImpl::may_page_out() {
  if (!shared_.layout->can_page())
    return {GPUSHARE_UNSUPPORTED, "the contiguous layout cannot page a session out and keep its addresses"};
  if (paged_out() || !is_open())
    return {GPUSHARE_INVALID_STATE,
            is_open() ? "the session is paged out already" : "the persistent heap is closed"};
  if (is_resident() && any_hollow())
    return {
        GPUSHARE_UNSUPPORTED,
        "session '" + name() + "' has ended but for blocks between granules that it gave back: these stay"};
  return {};
}

base::Status PersistentHeapImpl::begin_page_out(const device::Stream& stream) {
  FenceList fences = choose_runs();
  // The promise is not held while it is out, nor what was lent of it: lanes have promoted blocks within their
  // own size meanwhile.
  for (LaneImpl* lane : borrowers()) lane->return_loan(*this);
  if (this->stream() != nullptr && this->stream() != &stream)
    for (const FencePtr& fence : own_fences()) fences.push_back(fence);
  order_all(fences, stream);
  out_from_ = saved_bytes();
  GPUSHARE_RETURN_IF_ERROR(shared_.mover->chunks().take(out_from_, &saved_chunks_));
  const base::WorkLock lock(ranges_mutex_, base::kMustWait);
  for (ElasticRange* range : ranges_) GPUSHARE_RETURN_IF_ERROR(range->save());
  return {};
}

base::Status PersistentHeapImpl::page_out(const device::Stream& stream, uint64_t most_bytes,
                                          uint64_t* out_given_bytes) {
  const base::WorkLock control(control_, base::kMustWait);
  GPUSHARE_RETURN_IF_ERROR(may_page_out());
  const uint64_t granule = shared_.layout->granularity_bytes();
  most_bytes = std::max(most_bytes, granule);
  uint64_t ignored = 0;
  if (out_given_bytes == nullptr) out_given_bytes = &ignored;
  if (residency_.load() == Residency::kOut) return send_rest_out(stream, most_bytes, out_given_bytes);
  const bool begins = is_resident();
  // Spilled blocks that came home go out again; they come back at boundaries after the page-in.
  if (begins && release_home() > 0) {
    SpillStore::Granules spilled(*shared_.spill, spill_owner_);
    uint64_t moved = 0;
    GPUSHARE_RETURN_IF_ERROR(shared_.mover
                                 ->move({&spilled}, false, {most_bytes, base::MoveBudget::kUnlimited},
                                        own_fences(), stream, &moved)
                                 .with_context("session '" + name() + "': moving its spilled blocks"));
    most_bytes -= moved;
    if (most_bytes < granule || release_home() > 0) return {};
  }
  base::Status status;
  if (begins) status = begin_page_out(stream);
  const uint64_t from = out_from_ - std::min(out_from_, most_bytes);
  if (status.ok()) status = copy_runs(from, out_from_, UINT64_MAX, stream, true).status();
  if (!status.ok()) {
    if (begins) {
      drop_saved();
      residency_.store(Residency::kResident);
      forget_ranges();
    }
    return status.with_context("paging out session '" + name() + "'");
  }
  GPUSHARE_RETURN_IF_ERROR(give_saved(from, out_given_bytes));  // INVALID_STATE only: a broken invariant
  most_bytes -= std::exchange(out_from_, from) - from;
  if (from > 0) return {};
  residency_.store(Residency::kOut);
  shared_.paged_out_bytes.fetch_add(saved_bytes(), std::memory_order_relaxed);
  return send_rest_out(stream, most_bytes, out_given_bytes);
}

base::Status PersistentHeapImpl::send_rest_out(const device::Stream& stream, uint64_t most_bytes,
                                               uint64_t* out_given_bytes) {
  {
    const base::WorkLock lock(ranges_mutex_, base::kMustWait);
    for (ElasticRange* range : ranges_) {
      if (!range->is_going()) continue;
      if (most_bytes < shared_.layout->granularity_bytes()) return {};
      uint64_t given = 0;
      GPUSHARE_RETURN_IF_ERROR(range->drop(stream, most_bytes, &given));
      *out_given_bytes += given;
      most_bytes -= std::min(most_bytes, given);
      if (range->is_going()) return {};
    }
  }
  // The page-out is made whatever becomes of the kept blocks.
  if (move_kept(false, stream, most_bytes)) residency_.store(Residency::kPagedOut);
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

void PersistentHeapImpl::drop_saved() {
  shared_.mover->chunks().give(saved_chunks_);
  saved_runs_.clear();
}

void PersistentHeapImpl::forget_ranges() {
  const base::WorkLock lock(ranges_mutex_, base::kMustWait);
  for (ElasticRange* range : ranges_) range->forget();
}

void PersistentHeapImpl::leave_out() {
  for (size_t i = 0; i < valid_.size(); ++i) {
    const base::Status ignored = shared_.layout->unback(extents()[i].range, 0, valid_[i]);
  }
  valid_.clear();
  coming_in_ = false;
  const base::WorkLock lock(ranges_mutex_, base::kMustWait);
  for (ElasticRange* range : ranges_) range->leave_out();
}

void PersistentHeapImpl::stop_page_in() {
  const base::WorkLock control(control_, base::kMustWait);
  if (residency_.load() != Residency::kIn) return leave_out();
  if (kept_lost_.load()) return;
  // A boundary may still move granules that it chose before the session's own blocks were in.
  for (LaneImpl* lane : borrowers()) lane->await_moves();
  forget_ranges();
  residency_.store(Residency::kResident);
}

base::Status PersistentHeapImpl::page_in(const device::Stream& stream, uint64_t most_bytes) {
  const base::WorkLock control(control_, base::kMustWait);
  if (!paged_out()) return {GPUSHARE_INVALID_STATE, "the session is not paged out"};
  if (kept_lost_.load()) return kept_lost();
  most_bytes = std::max(most_bytes, shared_.layout->granularity_bytes());
  if (residency_.load() != Residency::kIn) {
    const auto left = bring_in(stream, most_bytes);
    if (!left.ok()) {
      leave_out();
      return left.status().with_context("paging in session '" + name() + "'");
    }
    if (residency_.load() != Residency::kIn) return {};
    most_bytes = *left;
  }
  const bool all = move_kept(true, stream, most_bytes);
  if (kept_lost_.load()) {
    leave_out();
    return kept_lost();
  }
  if (!all) return {};
  forget_ranges();
  residency_.store(Residency::kResident);
  return {};
}

base::Result<uint64_t> PersistentHeapImpl::bring_in(const device::Stream& stream, uint64_t most_bytes) {
  {
    const base::WorkLock lock(ranges_mutex_, base::kMustWait);
    for (ElasticRange* range : ranges_) {
      uint64_t moved = 0;
      GPUSHARE_RETURN_IF_ERROR(range->restore(stream, most_bytes, &moved));
      most_bytes -= std::min(most_bytes, moved);
      if (most_bytes < shared_.layout->granularity_bytes()) return most_bytes;
    }
  }
  if (!coming_in_) {
    in_until_ = 0;
    for (Extent& extent : extents()) {
      uint64_t valid = 0;
      GPUSHARE_RETURN_IF_ERROR(shared_.layout->back(extent.range, &valid));
      valid_.push_back(valid);
    }
    coming_in_ = true;
  }
  GPUSHARE_ASSIGN_OR_RETURN(const uint64_t copied,
                            copy_runs(in_until_, saved_bytes(), most_bytes, stream, false));
  most_bytes -= std::min(most_bytes, copied - std::exchange(in_until_, copied));
  if (in_until_ < saved_bytes()) return most_bytes;
  shared_.paged_in_bytes.fetch_add(saved_bytes(), std::memory_order_relaxed);
  drop_saved();
  valid_.clear();
  coming_in_ = false;
  residency_.store(Residency::kIn);
  return most_bytes;
}

base::Status PersistentHeapImpl::kept_lost() const {
  return {GPUSHARE_INTERNAL, "session '" + name() + "': the device lost blocks that it kept"};
}

}  // namespace gpushare::memory
