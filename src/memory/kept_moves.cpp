// Kept blocks of sessions that are paged out, which lie in lanes. A granule goes to host memory and comes home as those
// of heaps do (granule_mover.hpp), when its session is paged out and in: after the session's own blocks, in parts as these.
// Only granules move whose blocks nobody uses meanwhile: in an open lane, where other sessions place blocks, those that
// such blocks fill; in a closed one, all in which nothing else lies. A closed lane that has no blocks left gives its
// memory back.
//
// A granule that cannot move stays where it is; its session reads and writes it there, and it is tried again at the
// next page-out or page-in.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/log.hpp"
#include "memory/lane.hpp"

namespace gpushare::memory {

std::vector<LaneImpl::Held> LaneImpl::held(const PersistentHeapImpl* heap) const {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  std::vector<Held> granules(range_.bytes / granularity);
  heap_->for_each_block([&](const HeapBlock& block) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    if (!block.live) return;
    const PersistentHeapImpl* of = nullptr;
    if ((block.tag & BlockTag::kPromoted) && !(block.tag & BlockTag::kFreed))
      of = promoted_.find(block.offset_bytes)->second;
    for_each_granule(granularity, block.offset_bytes, block.size_bytes, [&](size_t i, uint64_t bytes) {
      granules[i].live_bytes += bytes;
      granules[i].of_heap |= of != nullptr && of == heap;
      granules[i].of_others |= of == nullptr || (of != heap && !of->own_blocks_out());
    });
  });
  return granules;
}

// With a heap in moves_for_: granules that hold blocks of that heap. While an iteration is open, it may place blocks in
// room beside them, so only granules without room count. Without a heap: granules with room for blocks of iterations.
bool LaneImpl::comes_home(const Held& granule) const {
  const bool has_room = granule.live_bytes < shared_.layout->granularity_bytes();
  if (granule.of_others) return false;
  return moves_for_ == nullptr ? has_room : granule.of_heap && (owner_ == nullptr || !has_room);
}

size_t LaneImpl::coming_home() const {
  if (away_bytes_ == 0) return 0;
  const std::vector<Held> granules = held(moves_for_);
  size_t count = 0;
  for (size_t i = 0; i < std::min(granules.size(), away_.size()); ++i)
    count += away_[i] && comes_home(granules[i]) ? 1 : 0;
  return count;
}

uint64_t LaneImpl::away_of(const PersistentHeapImpl& heap) const {
  ShortLockGuard lock(door_.lock_);
  if (away_bytes_ == 0) return 0;
  const uint64_t granularity = shared_.layout->granularity_bytes();
  uint64_t bytes = 0;
  for (const auto& [offset, of] : promoted_) {
    if (of == &heap)
      for_each_granule(granularity, offset, heap_->size_bytes(heap_->find(offset)),
                       [&](size_t i, uint64_t part) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
                         if (i < away_.size() && away_[i]) bytes += part;
                       });
  }
  return bytes;
}

void LaneImpl::begin_moves(bool home, std::vector<MovableGranule>* out_granules, FenceList* out_uses) {
  std::vector<const device::Stream*> streams;
  begin_moves_of(home, out_granules, out_uses, &streams);
  for (const device::Stream* stream : streams) out_uses->push_back(shared_.fences.at_end_of(*stream));
}

void LaneImpl::begin_moves_of(bool home, std::vector<MovableGranule>* out_granules, FenceList* out_uses,
                              std::vector<const device::Stream*>* out_streams) {
  ShortLockGuard lock(door_.lock_);
  moving_ = true;
  const uint64_t granularity = shared_.layout->granularity_bytes();
  const std::vector<Held> granules = held(moves_for_);
  away_.resize(granules.size(), false);
  for (size_t i = 0; i < granules.size(); ++i) {
    const Held& each = granules[i];
    const bool goes_out =
        !each.of_others && each.live_bytes > 0 && (each.live_bytes == granularity || !is_open());
    if (away_[i] == home && (home ? comes_home(each) : goes_out))
      out_granules->push_back({range_, i, 0, each.live_bytes, this, nullptr});
  }
  const FenceList uses = uses_.outstanding();
  out_uses->insert(out_uses->end(), uses.begin(), uses.end());
  // A session may have used its kept blocks on its own stream since it was paged out, which nobody records.
  for (const auto& [offset, heap] : promoted_) {
    const device::Stream* own = heap == moves_for_ || heap->own_blocks_out() ? heap->stream() : nullptr;
    if (own != nullptr && std::find(out_streams->begin(), out_streams->end(), own) == out_streams->end())
      out_streams->push_back(own);
  }
}

void LaneImpl::moved(const MovableGranule& which, bool home, bool lost) {
  ShortLockGuard lock(door_.lock_);
  const uint64_t granularity = shared_.layout->granularity_bytes();
  const uint64_t begin = which.granule * granularity;
  for (const auto& [offset, heap] : promoted_)
    if (lost && offset < begin + granularity && offset + heap_->size_bytes(heap_->find(offset)) > begin)
      heap->lose_kept();
  const bool away = !home || lost;
  if (away_[which.granule] == away) return;
  away_[which.granule] = away;
  away_bytes_ = away ? away_bytes_ + granularity : away_bytes_ - granularity;
}

void LaneImpl::end_moves() {
  ShortLockGuard lock(door_.lock_);
  moving_ = false;
  moves_for_ = nullptr;
}

uint64_t LaneImpl::move_kept(bool home, const PersistentHeapImpl* heap, uint64_t most_bytes,
                             const FenceList& before, const device::Stream& stream) {
  {
    ShortLockGuard lock(door_.lock_);
    moves_for_ = heap;
  }
  uint64_t bytes = 0;
  const base::Status status =
      shared_.mover->move({this}, home, {most_bytes, base::MoveBudget::kUnlimited}, before, stream, &bytes);
  if (!status.ok())
    base::log(base::kInfo,
              status.with_context("moving kept blocks of lane " + std::to_string(id())).to_string());
  return bytes;
}

uint64_t LaneImpl::send_kept_out(const FenceList& before, const device::Stream& stream, uint64_t most_bytes) {
  const base::WorkLock control(control_, base::kMustWait);
  return send_kept_out_here(before, stream, most_bytes);
}

void LaneImpl::send_closed_out(const device::Stream& stream) {
  const base::WorkLock control(control_, base::kMustWait);
  if (!is_open()) (void)send_kept_out_here({}, stream, UINT64_MAX);
}

uint64_t LaneImpl::send_kept_out_here(const FenceList& before, const device::Stream& stream,
                                      uint64_t most_bytes) {
  if (!shared_.layout->has_host_tier() || is_shared() || range().bytes == 0) return 0;
  {
    ShortLockGuard lock(door_.lock_);
    if (promoted_.empty()) return 0;
  }
  FenceList fences = before;
  if (!is_open()) fences.insert(fences.end(), closing_fences_.begin(), closing_fences_.end());
  const uint64_t moved = move_kept(false, nullptr, most_bytes, fences, stream);
  if (moved > 0) extend_to_target();
  return moved;
}

// Until all have come home the heap lends nothing at boundaries, so the lane has of it what has come and no more.
uint64_t LaneImpl::bring_kept_home(PersistentHeapImpl& heap, const device::Stream& stream,
                                   uint64_t most_bytes) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  const base::WorkLock control(control_, base::kMustWait);
  const uint64_t granularity = shared_.layout->granularity_bytes();
  uint64_t bytes = 0;
  {
    ShortLockGuard lock(door_.lock_);
    moves_for_ = &heap;
    bytes = std::min<uint64_t>(coming_home(), most_bytes / granularity) * granularity;
    moves_for_ = nullptr;
  }
  if (bytes == 0) return 0;
  // The heap lends what the lane needs for them. Without that they come if the device has room all the same.
  const uint64_t lent = heap.lend_now(bytes);
  const auto add = [&](uint64_t more) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {  // modulo 2^64
    ShortLockGuard lock(door_.lock_);
    loans_[&heap].lent_bytes += more;
    lent_bytes_ += more;
    loans_changed_ = true;
  };
  add(lent);
  const uint64_t moved = move_kept(true, &heap, bytes, is_open() ? own_fence() : closing_fences_, stream);
  if (moved < lent) {
    add(moved - lent);
    heap.take_back(lent - moved);
  }
  return moved;
}

bool LaneImpl::fits(uint64_t bytes) const {
  ShortLockGuard lock(door_.lock_);
  return hollow_bytes_ == 0 || range_.bytes <= bytes + lent_bytes_ + away_bytes_;
}

void LaneImpl::hollow_out() {
  if (range().bytes == 0 || !shared_.layout->can_page()) return;
  std::vector<size_t> empty;
  {
    ShortLockGuard lock(door_.lock_);
    const std::vector<Held> granules = held(nullptr);
    away_.resize(granules.size(), false);
    for (size_t i = 0; i < granules.size(); ++i)
      if (granules[i].live_bytes == 0 && !away_[i]) empty.push_back(i);
    hollow_bytes_ = empty.size() * shared_.layout->granularity_bytes();
  }
  if (!empty.empty()) shared_.layout->hollow(range(), empty, closing_fences_);
}

base::Status LaneImpl::fill_hollows() {
  {
    ShortLockGuard lock(door_.lock_);
    if (hollow_bytes_ == 0) return {};
  }
  uint64_t ignored = 0;
  GPUSHARE_RETURN_IF_ERROR(shared_.layout->back(range(), &ignored));
  ShortLockGuard lock(door_.lock_);
  hollow_bytes_ = 0;
  return {};
}

// Waits for the lane's stream, since iterations may have used the granules. It is rare: such granules went out while the lane was
// closed, or a block was freed while it was away.
void LaneImpl::renew_away() {
  uint64_t bytes = 0, end = 0;
  {
    ShortLockGuard lock(door_.lock_);
    bytes = coming_home() * shared_.layout->granularity_bytes();
    end = end_without(bytes);
  }
  // As many granules go off the range's end as get memory of the device.
  if (bytes > 0 && end > 0 && shrink(end)) (void)move_kept(true, nullptr, UINT64_MAX, own_fence(), *stream_);
  extend_to_target();
}

// If the device has no room, the lane is short of what kept blocks hold, and grows at a later boundary.
void LaneImpl::extend_to_target() {
  if (!is_open() || ahead_.bytes > 0 || own_.bytes > 0 || target() <= range().bytes) return;
  (void)add_to_end(target() - range().bytes, false);
}

base::Status LaneImpl::add_to_end(uint64_t bytes, bool may_wait) {
  Range grown = range();
  FenceList fences;
  GPUSHARE_RETURN_IF_ERROR(shared_.layout->extend(grown, bytes, may_wait, &fences));
  if (auto status = shared_.index.set(grown.base + range().bytes, bytes, this); !status.ok()) {
    shared_.layout->shrink(grown, range().bytes, fences);
    return status;
  }
  order_all(fences, *stream_);
  ShortLockGuard lock(door_.lock_);
  range_ = grown;
  heap_->resize(grown.bytes);
  return {};
}

}  // namespace gpushare::memory
