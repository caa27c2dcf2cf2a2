// Room in one piece beside kept blocks, on the virtual layout. A kept block keeps its addresses, so a block that was kept in the
// middle of the lane cuts the range in two, and no hole may be as large as the lane. The addresses of a lane are more than its
// memory, so the memory behind granules in which no block lies goes to other addresses: into one hole between kept blocks, or
// behind the last of them. The lane's bytes and all promises stay what they are.
//
// A granule without memory is hollow. The heap has a block there, tagged kFreed and kHollow, which nobody can free or name; its
// bytes count as freed blocks that wait (deferred_bytes_). Once no block is kept, and the device has finished, a boundary lets the
// lane have the first of its addresses again.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/waits.hpp"
#include "memory/lane.hpp"

namespace gpushare::memory {

// By granule of the range: it has memory of the device, and no block lies in it.
std::vector<bool> LaneImpl::free_granules() const {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  std::vector<bool> granules(range_.bytes / granularity, true);
  heap_->for_each_block([&](const HeapBlock& block) {
    if (!block.live) return;
    const uint64_t end = block.offset_bytes + block.size_bytes;
    for (uint64_t i = block.offset_bytes / granularity; i * granularity < end; ++i) granules[i] = false;
  });
  for (size_t i = 0; i < std::min(granules.size(), away_.size()); ++i)
    if (away_[i]) granules[i] = false;
  return granules;
}

// Chooses the hole between blocks that needs the fewest granules. False if there is none that the lane's own memory fills, or
// if one is large enough as it is.
bool LaneImpl::plan_gathering(uint64_t bytes, Gathering* out, uint64_t* out_missing) const {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  const std::vector<bool> is_free = free_granules();
  const auto all = static_cast<size_t>(std::count(is_free.begin(), is_free.end(), true));
  size_t fewest = SIZE_MAX, donors = 0;
  const auto look = [&](uint64_t begin, uint64_t end) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    if (end - begin < bytes) return;
    const size_t first = begin / granularity, last = (begin + bytes - 1) / granularity + 1;
    size_t wanted = 0, own = 0;
    for (size_t i = first; i < last; ++i) {
      wanted += i >= is_free.size() || is_hollow(i) ? 1 : 0;
      own += i < is_free.size() && is_free[i] ? 1 : 0;
    }
    if (wanted > all - own)
      *out_missing = std::min<uint64_t>(*out_missing, (wanted - (all - own)) * granularity);
    else if (wanted < fewest)
      fewest = donors = wanted, out->first = first, out->end = last;
  };
  uint64_t begin = 0;
  heap_->for_each_block([&](const HeapBlock& block) {
    if (!block.live || (block.tag & BlockTag::kHollow)) return;
    look(begin, block.offset_bytes);
    begin = block.offset_bytes + block.size_bytes;
  });
  look(begin, UINT64_MAX);
  if (donors == 0) return false;
  size_t end = is_free.size();
  for (size_t i = end; i-- > 0 && donors > 0;) {
    if (!is_free[i] || (i >= out->first && i < out->end)) continue;
    --donors;
    if (i + 1 == end)
      end = i, out->cut_bytes += granularity;
    else
      out->donors.push_back(i);
  }
  return true;
}

bool LaneImpl::make_hollow(const std::vector<size_t>& granules) {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  hollow_.resize(std::max(hollow_.size(), range_.bytes / granularity), false);
  for (size_t done = 0; done < granules.size(); ++done) {
    if (!heap_->allocate_at(granules[done] * granularity, granularity,
                            BlockTag::kFreed | BlockTag::kHollow)) {
      while (done-- > 0) end_hollow(granules[done]);
      return false;
    }
    hollow_[granules[done]] = true;
    hollow_bytes_ += granularity;
    deferred_bytes_ += granularity;
  }
  return true;
}

void LaneImpl::end_hollow(size_t granule) {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  hollow_[granule] = false;
  hollow_bytes_ -= granularity;
  deferred_bytes_ -= granularity;
  heap_->free_at(granule * granularity);
}

// Granules without memory at the end stand in nobody's way: only addresses go with them.
uint64_t LaneImpl::end_without(uint64_t memory_bytes) const {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  uint64_t end = range_.bytes;
  for (; memory_bytes > 0 && end > 0; end -= granularity)
    memory_bytes -= is_hollow(end / granularity - 1) ? 0 : std::min(memory_bytes, granularity);
  return end;
}

uint64_t LaneImpl::floor_bytes() const {
  if (hollow_bytes_ == 0) return heap_->floor_bytes();
  uint64_t floor = 0;
  heap_->for_each_block([&](const HeapBlock& block) {
    if (block.live && !(block.tag & BlockTag::kHollow)) floor = block.offset_bytes + block.size_bytes;
  });
  return floor;
}

uint64_t LaneImpl::loose_bytes() const {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  const uint64_t floor = round_up(floor_bytes(), granularity);
  uint64_t bytes = range_.bytes - std::min(range_.bytes, floor);
  for (size_t i = floor / granularity; i < hollow_.size(); ++i) bytes -= hollow_[i] ? granularity : 0;
  return bytes;
}

void LaneImpl::end_hollows() {
  for (size_t i = 0; i < hollow_.size(); ++i)
    if (hollow_[i]) end_hollow(i);
}

// For a hollow granule.
base::Status LaneImpl::put_memory(size_t granule, bool may_wait) {
  FenceList fences;
  for (;;) {
    FenceList busy;
    const base::Status status = shared_.layout->commit(range(), granule, 1, &fences, nullptr, &busy);
    if (status.ok()) break;
    // In a function that the device calls: the device's work may be behind that very function.
    if (status.code() != GPUSHARE_NOT_READY || !may_wait || base::may_not_wait()) return status;
    wait_all(busy);
  }
  order_all(fences, *stream_);
  ShortLockGuard lock(door_.lock_);
  end_hollow(granule);
  return {};
}

// The donors are hollow blocks of the heap already. If the device refuses memory, the lane has what it gave again where that can
// be had at once; else the lane is short of it, and grows at a later boundary.
bool LaneImpl::carry_out(const Gathering& plan, bool may_wait) {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  if (plan.cut_bytes > 0 &&
      !shrink(range().bytes - plan.cut_bytes)) {  // another thread has placed a block there
    ShortLockGuard lock(door_.lock_);
    for (const size_t i : plan.donors) end_hollow(i);
    return false;
  }
  if (!plan.donors.empty()) shared_.layout->hollow(range(), plan.donors, own_fence());
  std::vector<size_t> wanted;
  {
    ShortLockGuard lock(door_.lock_);
    for (size_t i = plan.first; i < plan.end; ++i)
      if (is_hollow(i)) wanted.push_back(i);
  }
  base::Status status;
  for (size_t i = 0; i < wanted.size() && status.ok(); ++i) status = put_memory(wanted[i], may_wait);
  if (status.ok() && plan.end * granularity > range().bytes)
    status = add_to_end(plan.end * granularity - range().bytes, may_wait);
  if (status.ok()) return true;
  // Not more than the lane had: some of those that wanted memory may have it.
  for (size_t i = 0; i < plan.donors.size() && target() > range().bytes; ++i)
    (void)put_memory(plan.donors[i], false);
  extend_to_target();
  return false;
}

bool LaneImpl::gather(PersistentHeap& owner, uint64_t bytes, uint64_t* out_missing) {
  const base::WorkLock control(control_);
  if (!control || shared_.layout->kind() != Layout::kVirtual || is_shared()) return false;
  if (bytes > shared_.layout->capacity_bytes()) return false;
  {
    ShortLockGuard lock(door_.lock_);
    if (owner_ != &owner.impl() || range_.bytes == 0 || (promoted_.empty() && hollow_bytes_ == 0))
      return false;
  }
  // While the stream captures a graph, and in a function that it calls, nothing can tell when it is done with the granules.
  if (!shared_.fences.mark(*stream_).ok()) return false;
  Gathering plan;
  {
    ShortLockGuard lock(door_.lock_);
    if (!plan_gathering(bytes, &plan, out_missing) || !make_hollow(plan.donors)) return false;
  }
  return carry_out(plan, true);
}

void LaneImpl::fill_gathered() {
  {
    ShortLockGuard lock(door_.lock_);
    if (hollow_bytes_ == 0 || !promoted_.empty() || deferred_bytes_ > hollow_bytes_) return;
  }
  if (!all_passed(own_fence())) return;
  Gathering plan;
  {
    ShortLockGuard lock(door_.lock_);
    plan.cut_bytes = hollow_bytes_;
    plan.end = (range_.bytes - hollow_bytes_) / shared_.layout->granularity_bytes();
  }
  (void)carry_out(plan, false);
}

}  // namespace gpushare::memory
