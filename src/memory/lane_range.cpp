// The range under a lane: opened, grown, shrunk, moved at a boundary, closed. lane.cpp has the lane's blocks, loans.cpp the bytes
// that sessions lend to the lane.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>
#include <utility>

#include "memory/lane.hpp"

namespace gpushare::memory {

FenceList LaneImpl::own_fence() const {
  return {shared_.fences.at_end_of(*stream_)};
}

base::Status LaneImpl::open(uint32_t id, uint64_t bytes, const device::Stream& stream,
                            std::shared_ptr<base::Pieces> pieces) {
  const base::WorkLock control(control_, base::kMustWait);
  pieces_ = std::move(pieces);
  shared_memory_.store(pieces_ != nullptr, std::memory_order_relaxed);
  bool first = false;
  {
    ShortLockGuard lock(door_.lock_);
    first = !heap_;
    stream_ = &stream;
    peak_ = iteration_peak_ = 0;
  }
  if (first) {
    HeapOptions options;
    options.granule_bytes = kBlockGranuleBytes;
    options.max_blocks = 1u << 20;
    GPUSHARE_ASSIGN_OR_RETURN(Heap heap, Heap::create(options));
    ShortLockGuard lock(door_.lock_);
    heap_ = std::move(heap);
    replay_.emplace(&*heap_);
  }
  seen_epoch_ = shared_.layout->epoch();
  const bool pinned = range().bytes > 0;  // by blocks kept before it was closed
  order_all(closing_fences_, stream);
  const uint64_t size = round_up(bytes, shared_.layout->granularity_bytes());
  base::Status status = fill_hollows();
  if (status.ok()) status = grow(size + beyond());
  if (status.ok() && ahead_.bytes > 0) {
    drop_ahead();
    status = {GPUSHARE_DEVICE_OUT_OF_MEMORY, "its kept blocks pin it where it cannot grow"};
  }
  if (!status.ok()) {
    hollow_out();
    return status.with_context("lane " + std::to_string(id));
  }
  size_bytes_ = size;
  closing_fences_.clear();
  id_.store(id);
  spill_owner_.lane = id;
  spill_owner_.set_stream(&stream);
  {
    ShortLockGuard lock(door_.lock_);
    loans_changed_ = pinned;
    open_.store(true);
  }
  if (pinned) boundary();
  return {};
}

base::Status LaneImpl::close() {
  const base::WorkLock control(control_, base::kMustWait);
  if (!is_open()) return {GPUSHARE_INVALID_STATE, "the lane is closed already"};
  {
    ShortLockGuard lock(door_.lock_);
    if (owner_ != nullptr)
      return {GPUSHARE_INVALID_STATE,
              "lane " + std::to_string(id()) + " runs an iteration: end it before closing the lane"};
    open_.store(false);
  }
  spill_owner_.set_stream(nullptr);
  drop_ahead();
  if (own_.bytes > 0) shared_.layout->give(own_, own_fence());
  size_bytes_ = 0;
  {
    ShortLockGuard lock(door_.lock_);
    end_hollows();
  }
  balance_loans(Balance::kAll);
  uint64_t floor = 0;
  {
    ShortLockGuard lock(door_.lock_);
    floor = heap_->floor_bytes();
  }
  // The lane's stream may be gone when the last promoted block is.
  if (floor > 0) closing_fences_ = own_fence();
  shrink(round_up(floor, shared_.layout->granularity_bytes()));
  pieces_ = nullptr;
  hollow_out();
  return {};
}

bool LaneImpl::reclaim_closed(bool* out_gone) {
  const base::WorkLock control(control_);
  if (!control) return false;
  if (is_open()) return true;
  FenceList fences;
  Range range;
  std::vector<std::pair<PersistentHeapImpl*, uint64_t>> lenders;
  {
    ShortLockGuard lock(door_.lock_);
    if (!promoted_.empty()) return true;
    for (const auto& [heap, loan] : loans_) lenders.emplace_back(heap, loan.lent_bytes);
    loans_.clear();
    loans_changed_ = false;
    lent_bytes_ = 0;
    // Whatever used the blocks since the lane was closed left its fence with them.
    fences = uses_.drain();
    deferred_bytes_ = 0;
    heap_->reset();
    heap_->resize(0);
    std::swap(range, range_);
    away_.clear();
    away_bytes_ = hollow_bytes_ = 0;
  }
  if (range.bytes > 0) {
    for (const FencePtr& fence : closing_fences_) fences.push_back(fence);
    shared_.index.clear(range.base, range.bytes);
    shared_.layout->give(range, fences);
  }
  closing_fences_.clear();
  for (const auto& [heap, bytes] : lenders) {
    heap->take_back(bytes);
    heap->try_restore();
  }
  *out_gone = true;
  return true;
}

// Gives a lane that processes share memory of its own, as large as the lane. The caller has promised the bytes.
base::Status LaneImpl::take_own() {
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  if (pieces_ == nullptr || own_.bytes > 0) return {};
  FenceList fences;
  if (auto status = shared_.layout->take(RangeUse::kLane, range().bytes, &own_, &fences); !status.ok())
    return status.with_context("lane " + std::to_string(id()) +
                               " is shared with other processes; keeping a block of it");
  order_all(fences, *stream_);
  return {};
}

// At the end of an iteration: the lane has memory of its own from here on, with the promoted blocks in it. Waits for
// the lane's stream.
base::Status LaneImpl::leave_shared() {
  if (own_.bytes > range().bytes) shared_.layout->shrink(own_, range().bytes, {});
  {
    ShortLockGuard lock(door_.lock_);
    for (const auto& [offset, heap] : promoted_)
      GPUSHARE_RETURN_IF_ERROR(stream_->copy(own_.base + offset, range_.base + offset,
                                             heap_->size_bytes(heap_->find(offset)),
                                             GPUSHARE_COPY_DEVICE_TO_DEVICE));
  }
  GPUSHARE_RETURN_IF_ERROR(stream_->synchronize());
  GPUSHARE_RETURN_IF_ERROR(shared_.layout->adopt_own(range(), own_));
  pieces_ = nullptr;
  shared_memory_.store(false, std::memory_order_relaxed);
  return {};
}

base::Status LaneImpl::grow(uint64_t bytes) {
  if (bytes <= range().bytes) return {};
  FenceList fences;
  Range grown = range();
  const uint64_t missing = bytes - range().bytes;
  if (own_.bytes > 0 && bytes > own_.bytes)
    GPUSHARE_RETURN_IF_ERROR(shared_.layout->extend(own_, bytes - own_.bytes, true, &fences));
  if (range().bytes == 0 && pieces_ != nullptr)
    GPUSHARE_RETURN_IF_ERROR(shared_.layout->take_shared(pieces_, bytes, &grown));
  else if (range().bytes == 0)
    GPUSHARE_RETURN_IF_ERROR(shared_.layout->take(RangeUse::kLane, bytes, &grown, &fences));
  else if (!shared_.layout->extend(grown, missing, true, &fences).ok()) {
    // Without what is lent or away: it is gone over to only when nothing is pinned here.
    GPUSHARE_RETURN_IF_ERROR(shared_.layout->take_ahead(range(), bytes - beyond(), &ahead_, &ahead_fences_));
    if (auto status = shared_.index.set(ahead_.base, ahead_.bytes, this); !status.ok()) {
      shared_.layout->give(ahead_, ahead_fences_);
      ahead_fences_.clear();
      return status;
    }
    return {};
  }
  if (auto status = shared_.index.set(grown.base + range().bytes, missing, this); !status.ok()) {
    if (range().bytes == 0)
      shared_.layout->give(grown, fences);
    else
      shared_.layout->shrink(grown, range().bytes, fences);
    return status;
  }
  order_all(fences, *stream_);
  ShortLockGuard lock(door_.lock_);
  range_ = grown;
  heap_->resize(grown.bytes);
  return {};
}

// False, and nothing changes, if a block lies above `bytes`, or in an iteration whose stream captures a graph: nothing can tell
// then when the device is done with what goes.
bool LaneImpl::shrink(uint64_t bytes) {
  if (runs_iteration() && !shared_.fences.mark(*stream_).ok()) return false;
  Range before;
  {
    ShortLockGuard lock(door_.lock_);
    if (bytes >= range_.bytes) return true;
    if (hollow_bytes_ > 0 && floor_bytes() > bytes) return false;
    const uint64_t granularity = shared_.layout->granularity_bytes();
    for (size_t i = bytes / granularity; i < hollow_.size(); ++i)
      if (hollow_[i]) end_hollow(i);
    if (heap_->resize(bytes) != HeapStatus::kOk) return false;
    before = range_;
    range_.bytes = bytes;
    for (; away_.size() > bytes / granularity; away_.pop_back())
      away_bytes_ -= away_.back() ? granularity : 0;
    if (bytes == 0) range_ = {};
  }
  shared_.index.clear(before.base + bytes, before.bytes - bytes);
  if (bytes > 0)
    shared_.layout->shrink(before, bytes, own_fence());
  else
    shared_.layout->give(before, own_fence());
  return true;
}

void LaneImpl::drop_ahead() {
  if (ahead_.bytes == 0) return;
  shared_.index.clear(ahead_.base, ahead_.bytes);
  shared_.layout->give(ahead_, ahead_fences_);
  ahead_fences_.clear();
}

// Goes over to what grow() took ahead, unless a block lies in the range: blocks do not move.
bool LaneImpl::adopt_ahead() {
  order_all(ahead_fences_, *stream_);
  Range before;
  const bool joins = ahead_.base + ahead_.bytes == range().base;
  {
    // From here on blocks are placed in the new range: nothing of the old one may be live.
    ShortLockGuard lock(door_.lock_);
    const uint64_t hollows = hollow_bytes_ / shared_.layout->granularity_bytes();
    if (heap_->live_blocks() > hollows || replaying_ || lent_bytes_ > 0 || away_bytes_ > 0) return false;
    end_hollows();
    before = range_;
    range_ = ahead_;
    if (joins) range_.bytes += before.bytes;
    heap_->resize(range_.bytes);
  }
  size_bytes_ = range().bytes;
  if (!joins) {
    shared_.index.clear(before.base, before.bytes);
    shared_.layout->give(before, own_fence());
  }
  ahead_ = {};
  ahead_fences_.clear();
  return true;
}

// No iteration is under way; only promoted blocks are left. A new size takes effect and the range moves to
// where it lies best.
void LaneImpl::boundary() {
  bool is_pinned = false;
  {
    // Promoted blocks freed since the last iteration: what the lane gives back now must come after their
    // other uses.
    ShortLockGuard lock(door_.lock_);
    uses_.take_ordered(*stream_,
                       [this](uint64_t offset) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { release(offset); });
    is_pinned = !promoted_.empty();
    if (loans_changed_)
      for (auto& [heap, loan] : loans_) loan.borrowed_bytes = 0;
  }
  balance_loans(Balance::kAll);
  if (ahead_.bytes > 0) adopt_ahead();
  renew_away();
  fill_gathered();
  shrink_to_target();
  const uint64_t epoch = shared_.layout->epoch();
  if (is_pinned || epoch == seen_epoch_) return;
  seen_epoch_ = epoch;
  move_up();
}

// Nothing is live in the range.
void LaneImpl::move_up() {
  if (range().bytes == 0 || !shared_.layout->would_move_up(range())) return;
  Range moved = range();
  FenceList fences;
  shared_.index.clear(range().base, range().bytes);
  shared_.layout->move_up(moved, own_fence(), &fences);
  // Cannot fail: the index has room for the whole buffer, and the place was free.
  const base::Status ignored = shared_.index.set(moved.base, moved.bytes, this);
  order_all(fences, *stream_);
  ShortLockGuard lock(door_.lock_);
  range_ = moved;
}

bool LaneImpl::runs_iteration() const {
  ShortLockGuard lock(door_.lock_);
  return owner_ != nullptr;
}

bool LaneImpl::is_idle() const {
  ShortLockGuard lock(door_.lock_);
  return is_open() && owner_ == nullptr && promoted_.empty();
}

void LaneImpl::resize_unpinned() {
  const std::unique_lock<base::WorkMutex> control(control_, std::try_to_lock);
  if (!control || (ahead_.bytes == 0 && target() == range_.bytes) || !is_idle()) return;
  boundary();
}

void LaneImpl::move_up_if_idle() {
  const std::unique_lock<base::WorkMutex> control(control_, std::try_to_lock);
  if (!control || !is_idle()) return;
  boundary();
  if (ahead_.bytes == 0) move_up();
}

Address LaneImpl::base() const {
  ShortLockGuard lock(door_.lock_);
  return range_.base;
}

void LaneImpl::shrink_to_target() {
  if (target() >= range().bytes) return;
  uint64_t bytes = 0, floor = 0;
  {
    ShortLockGuard lock(door_.lock_);
    bytes = end_without(range_.bytes - target());
    floor = floor_bytes();
  }
  shrink(std::max(bytes, round_up(floor, shared_.layout->granularity_bytes())));
}

base::Status LaneImpl::set_size(uint64_t bytes) {
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  if (!is_open()) return {GPUSHARE_INVALID_STATE, "the lane is closed"};
  bytes = round_up(bytes, shared_.layout->granularity_bytes());
  drop_ahead();
  // Until a lane has grown it has the size it had: what was lent and goes back now must not stay in it.
  size_bytes_ = std::min(bytes, range().bytes - std::min(range().bytes, beyond()));
  balance_loans(Balance::kAllAndWait);
  const bool idle = !runs_iteration();
  if (bytes + beyond() > range().bytes) {
    if (auto status = grow(bytes + beyond()); !status.ok())
      return status.with_context("lane " + std::to_string(id()));
    if (ahead_.bytes == 0) size_bytes_ = bytes;
  } else {
    size_bytes_ = bytes;
    shrink_to_target();
  }
  if (idle)
    boundary();
  else if (ahead_.bytes > 0)
    adopt_ahead();  // in the middle of an iteration that has no block yet
  return {};
}

}  // namespace gpushare::memory
