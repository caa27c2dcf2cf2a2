// A lane's iterations and its blocks. The range that they lie in: lane_range.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#include "memory/lane.hpp"

#include <algorithm>
#include <utility>

#include "base/units.hpp"
#include "memory/door_pool.hpp"
#include "memory/lane_inner.hpp"

namespace gpushare::memory {
namespace {

// A lane reports its live bytes when they differ from the last report by 1 MiB or this part of the lane.
constexpr uint64_t kTellStepBytes = uint64_t{1} << 20, kTellDivisor = 64;

}  // namespace

base::Status LaneImpl::begin_iteration(PersistentHeap& owner, bool use_plan) {
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  PersistentHeapImpl& heap = owner.impl();
  ShortLockGuard lock(door_.lock_);
  if (!is_open()) return {GPUSHARE_INVALID_STATE, "the lane is closed"};
  if (owner_ != nullptr)
    return {GPUSHARE_INVALID_STATE, "lane " + std::to_string(id()) + " runs an iteration already"};
  if (!heap.is_open()) return {GPUSHARE_INVALID_STATE, "the session of the iteration is closed"};
  if (!heap.is_resident()) return {GPUSHARE_INVALID_STATE, "the session of the iteration is paged out"};
  owner_ = &heap;
  spill_owner_.session.store(heap.session());
  // Events of blocks are recorded past the door.
  door_.key_.store(shared_.recorder.enabled() ? 0 : ++door_.last_key_, std::memory_order_relaxed);
  heap_->reset_high_water();
  quiet_width_ = 2 * std::max(kTellStepBytes, range_.bytes / kTellDivisor);
  set_told(0);
  replaying_ = recording_ = false;
  if (use_plan) {
    if (const auto plan = heap.plan().begin(); plan != nullptr) {
      replaying_ = replay_->begin(plan);
      if (!replaying_) heap.plan().end_replay(false);  // no room for the arena in one piece
    }
    recording_ = heap.plan().recording();
  }
  plain_ = !replaying_ && !recording_;
  if (replaying_) tell_live();
  return {};
}

BlockHandle LaneImpl::allocate(uint64_t bytes, uint64_t alignment, uint64_t tag) {
  return replaying_ ? replay_->allocate(bytes, alignment, tag) : heap_->allocate(bytes, alignment, tag);
}

BlockHandle LaneImpl::ordinary_block(Address address) {
  const uint64_t offset = address - range_.base;
  if (offset >= range_.bytes) return {};
  if (HeapBlock planned; on_plan() && replay_->find(offset, &planned) && replay_->leave() != HeapStatus::kOk)
    return {};
  const BlockHandle handle = heap_->find(offset);
  // Tag 0 is the arena of a plan.
  if (!handle || heap_->tag(handle) == 0 || (heap_->tag(handle) & BlockTag::kFreed)) return {};
  return handle;
}

uint64_t LaneImpl::live_bytes() const {
  uint64_t bytes = heap_->live_bytes() - deferred_bytes_;
  if (on_plan()) {
    bytes -= replay_->arena_bytes();
    replay_->for_each_planned(
        [&](const HeapBlock& block) { bytes += round_up(block.size_bytes, kBlockGranuleBytes); });
  }
  return bytes;
}

void LaneImpl::set_told(uint64_t bytes) {
  quiet_from_ = bytes - quiet_width_ / 2;
}

void LaneImpl::tell_now() {
  const uint64_t live = ephemeral_live();
  highest_bytes_ = std::max(highest_bytes_, live);
  note_peak();
  uint64_t told = told_bytes();
  if (highest_bytes_ > told) {
    shared_.ephemeral_bytes.fetch_add(highest_bytes_ - told, std::memory_order_relaxed);
    shared_.note_peak();
    told = highest_bytes_;
  }
  if (told > live) shared_.ephemeral_bytes.fetch_sub(told - live, std::memory_order_relaxed);
  highest_bytes_ = live;
  set_told(live);
}

void LaneImpl::tell() {
  ShortLockGuard lock(door_.lock_);
  if (owner_ != nullptr) tell_now();
}

void LaneImpl::close_door() {
  ShortLockGuard lock(door_.lock_);
  door_.key_.store(0, std::memory_order_relaxed);
}

// On a plan the whole arena counts as live: of its next block there is nothing to tell.
BlockHandle LaneImpl::alloc_here(uint64_t bytes, uint64_t alignment) {
  const uint64_t tag = BlockTag::make(Kind::kEphemeral, bytes);
  uint64_t offset = 0;
  if (!shared_.recorder.enabled() && replay_->allocate_next(bytes, alignment, tag, &offset)) [[likely]]
    return {offset, PlanReplay::kPlannedIndex, HeapStatus::kOk};
  return alloc_and_tell(bytes, alignment, tag);
}

BlockHandle LaneImpl::alloc_and_tell(uint64_t bytes, uint64_t alignment, uint64_t tag) {
  const BlockHandle handle = allocate(bytes, alignment, tag);
  if (!handle) return handle;
  if (recording_ && owner_->plan().recording())
    owner_->plan().allocated(bytes, alignment, handle.offset_bytes);
  tell_live();
  if (shared_.recorder.enabled()) [[unlikely]]
    shared_.recorder.record(AllocationEvent::Action::kAlloc, Kind::kEphemeral,
                            range_.base + handle.offset_bytes, bytes, stream_, owner_->session());
  return handle;
}

bool LaneImpl::free_here(Address address) {
  const uint64_t offset = address - range_.base;
  return replay_->free_next(offset) || free_of_plan(offset);
}

bool LaneImpl::free_of_plan(uint64_t offset) {
  if (offset >= range_.bytes || recording_ || !on_plan()) return false;
  if (!promoted_.empty() || deferred_bytes_ > hollow_bytes_ || replay_->free_at(offset) != HeapStatus::kOk)
    return false;
  tell_freed();
  return true;
}

base::Result<Address> LaneImpl::alloc(uint64_t bytes, uint64_t alignment) {
  GPUSHARE_RETURN_IF_ERROR(check_request(bytes, alignment));
  ShortLockGuard lock(door_.lock_);
  if (owner_ == nullptr)
    return base::Status(GPUSHARE_INVALID_STATE, "lane " + std::to_string(id()) + " runs no iteration");
  BlockHandle handle = alloc_here(bytes, alignment);
  if (!handle && uses_.deferred() > 0) {
    const auto give_back = [this](uint64_t offset) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { release(offset); };
    if (uses_.take_passed(give_back)) handle = alloc_here(bytes, alignment);
    if (!handle && uses_.take_ordered(*stream_, give_back)) handle = alloc_here(bytes, alignment);
  }
  if (!handle) {
    shared_.recorder.record(AllocationEvent::Action::kOutOfMemory, Kind::kEphemeral, 0, bytes, stream_,
                            owner_->session());
    return out_of_memory(bytes, handle.status);
  }
  return range_.base + handle.offset_bytes;
}

base::Status LaneImpl::out_of_memory(uint64_t bytes, HeapStatus status) {
  const std::string who = "session '" + owner_->name() + "', lane " + std::to_string(id());
  if (status == HeapStatus::kNoRecords) return too_many_blocks(who, *heap_);
  return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
          who + ": no room for an ephemeral block of " + base::format_bytes(bytes) + ": " +
              base::format_bytes(heap_->live_bytes() - hollow_bytes_) + " of the lane's " +
              base::format_bytes(range_.bytes - hollow_bytes_) + " live (" +
              base::format_bytes(promoted_bytes_) + " promoted), largest hole " +
              base::format_bytes(heap_->largest_hole_bytes())};
}

base::Result<Address> LaneImpl::alloc_spilled(uint64_t bytes, uint64_t alignment) {
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  PersistentHeapImpl* owner = nullptr;
  {
    ShortLockGuard lock(door_.lock_);
    owner = owner_;
  }
  if (owner == nullptr)
    return base::Status(GPUSHARE_INVALID_STATE, "lane " + std::to_string(id()) + " runs no iteration");
  return shared_.spill->alloc(spill_owner_, owner->spill_owner(), Kind::kEphemeral, bytes, alignment);
}

base::Status LaneImpl::keep(Address address) {
  if (is_shared()) GPUSHARE_RETURN_IF_ERROR(take_own());
  PersistentHeapImpl* owner = nullptr;
  {
    ShortLockGuard lock(door_.lock_);
    if (owner_ == nullptr)
      return {GPUSHARE_INVALID_STATE, "lane " + std::to_string(id()) + " runs no iteration"};
    owner = owner_;
    if (const BlockHandle handle = ordinary_block(address); handle) {
      const uint64_t tag = heap_->tag(handle);
      if (tag & BlockTag::kPromoted) return {};
      const uint64_t size = heap_->size_bytes(handle);
      // The steps that need host memory come first, so that nothing fails half way.
      promoted_.reserve(promoted_.size() + 1);
      Loan& loan = loans_[owner_];
      loans_changed_ = true;
      // The block counts once: it leaves the lane's bytes before it enters the session's.
      tell_now();
      const uint64_t told = told_bytes(), counted = std::min(size, told);
      shared_.ephemeral_bytes.fetch_sub(counted, std::memory_order_relaxed);
      highest_bytes_ = told - counted;
      set_told(highest_bytes_);
      if (auto status = owner_->add_promoted(size, this); !status.ok()) {
        tell_now();
        return status;
      }
      heap_->set_tag(handle, tag | BlockTag::kPromoted);
      promoted_[handle.offset_bytes] = owner_;
      promoted_bytes_ += size;
      loan.promoted_bytes += size;
      return {};
    }
  }
  if (!shared_.spill->owns(address)) return no_such_block(address);
  return shared_.spill->move(address, spill_owner_, owner->spill_owner());
}

void LaneImpl::release(uint64_t offset) {
  const BlockHandle handle = heap_->find(offset);
  deferred_bytes_ -= heap_->size_bytes(handle);
  heap_->free(handle);
}

// Everything but the promoted blocks goes. O(1) when all was freed by its user or none of it is promoted,
// else O(blocks).
void LaneImpl::reclaim_all() {
  if (shared_.recorder.enabled()) {
    const auto record = [&](const HeapBlock& block) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      if (!block.live || block.tag == 0 || (block.tag & (BlockTag::kPromoted | BlockTag::kFreed))) return;
      shared_.recorder.record(AllocationEvent::Action::kFree, Kind::kEphemeral,
                              range_.base + block.offset_bytes, BlockTag::bytes(block.tag), stream_,
                              owner_->session());
    };
    heap_->for_each_block(record);
    if (on_plan()) replay_->for_each_planned(record);
  }
  if (replaying_) replay_->end();
  deferred_bytes_ = hollow_bytes_;
  if (heap_->live_blocks() == promoted_.size() && hollow_bytes_ == 0) return;
  if (promoted_.empty() && hollow_bytes_ == 0) {
    heap_->reset();
    return;
  }
  std::vector<uint64_t> gone;
  heap_->for_each_block([&](const HeapBlock& block) {
    if (!block.live || (block.tag & BlockTag::kHollow)) return;
    if ((block.tag & BlockTag::kPromoted) == 0 || (block.tag & BlockTag::kFreed))
      gone.push_back(block.offset_bytes);
  });
  for (uint64_t offset : gone) heap_->free_at(offset);
}

base::Status LaneImpl::end_iteration(bool* out_planned, uint64_t* out_peak_bytes) {
  const base::WorkLock control(control_, base::kMustWait);
  FenceList fences;
  bool planned = false, replayed = false, recorded = false, loans_changed = false;
  PersistentHeapImpl* owner = nullptr;
  {
    ShortLockGuard lock(door_.lock_);
    if (owner_ == nullptr)
      return {GPUSHARE_INVALID_STATE, "lane " + std::to_string(id()) + " runs no iteration"};
    iteration_peak_ = arena_needed();
    if (out_peak_bytes != nullptr) *out_peak_bytes = iteration_peak_;
    door_.key_.store(0, std::memory_order_relaxed);
    door_.journal_ = nullptr;
    tell_now();
    loans_changed = loans_changed_;
    if (!uses_.empty()) fences = uses_.drain();
    planned = on_plan();
    replayed = replaying_;
    recorded = recording_;
    reclaim_all();
    shared_.ephemeral_bytes.fetch_sub(told_bytes(), std::memory_order_relaxed);
    set_told(0);
    highest_bytes_ = 0;
    owner = owner_;
    owner_ = nullptr;
    replaying_ = recording_ = false;
  }
  // Without the lock: no block can be placed before the next iteration begins, and that waits for control_.
  if (replayed) owner->plan().end_replay(planned);
  if (recorded && owner->plan().recording()) owner->plan().end_recording(shared_.plans);
  if (out_planned != nullptr) *out_planned = planned;
  // Another process does not wait for this lane's stream: the next process in the lane may use the bytes at once.
  if (!fences.empty() && pieces_ != nullptr)
    wait_all(fences);
  else if (!fences.empty())
    order_all(fences, *stream_);
  if (spill_owner_.spilled_bytes.load(std::memory_order_relaxed) > 0)
    shared_.spill->free_all(spill_owner_, own_fence());
  if (own_.bytes > 0) GPUSHARE_RETURN_IF_ERROR(leave_shared());
  if (loans_changed || ahead_.bytes > 0 || target() != range().bytes ||
      shared_.layout->epoch() != seen_epoch_)
    boundary();
  return {};
}

SessionId LaneImpl::session_of(uint64_t offset, uint64_t tag) const {
  if (tag & BlockTag::kPromoted) {
    const auto found = promoted_.find(offset);
    return found == promoted_.end() ? 0 : found->second->session();
  }
  return owner_ == nullptr ? 0 : owner_->session();
}

// On a plan, and no promoted block: planned blocks have no uses on other streams.
base::Status LaneImpl::free_planned(uint64_t offset) {
  HeapBlock block{};
  if (shared_.recorder.enabled()) replay_->find(offset, &block);
  if (replay_->free_at(offset) != HeapStatus::kOk) return no_such_block(range_.base + offset);
  if (block.live)
    shared_.recorder.record(AllocationEvent::Action::kFree, Kind::kEphemeral, range_.base + offset,
                            BlockTag::bytes(block.tag), stream_, owner_->session());
  return {};
}

base::Status LaneImpl::free_block(Address address) {
  Mark mark;
  for (;;) {
    Hindrance hindrance;
    base::Status status = try_free(address, mark, &hindrance);
    if (hindrance.moves) {
      const base::WorkLock until_moved(control_);
      if (!until_moved) return base::WorkLock::refused();
    } else if (hindrance.unmarked != nullptr) {
      // Without the lock: a device that has no event left is waited for.
      GPUSHARE_ASSIGN_OR_RETURN(mark.fence, shared_.fences.mark(*hindrance.unmarked));
      mark.stream = hindrance.unmarked;
    } else {
      return status;
    }
  }
}

base::Status LaneImpl::try_free(Address address, const Mark& mark, Hindrance* out_hindrance) {
  bool drained = false, unpinned = false;
  {
    ShortLockGuard lock(door_.lock_);
    const uint64_t offset = address - range_.base;
    if (offset >= range_.bytes) return no_such_block(address);
    // On a plan, only promoted blocks are the heap's own.
    const bool may_be_ordinary = !on_plan() || !promoted_.empty() || deferred_bytes_ > 0;
    const BlockHandle handle = may_be_ordinary ? heap_->find(offset) : BlockHandle{};
    if (on_plan() && (!handle || heap_->tag(handle) == 0)) return free_planned(offset);
    if (!handle) return no_such_block(address);
    const uint64_t tag = heap_->tag(handle);
    if (tag & BlockTag::kFreed) return no_such_block(address);
    const bool promoted = (tag & BlockTag::kPromoted) != 0;
    out_hindrance->moves = moving_ && promoted;
    if (out_hindrance->moves) return {};
    // The session may have moved to another lane since: its own stream is what the free is ordered on.
    const device::Stream* const own = promoted ? promoted_.find(offset)->second->stream() : stream_;
    const bool marks = promoted && own != nullptr && (own != stream_ || !is_open());
    if (marks && mark.stream != own) {
      out_hindrance->unmarked = own;
      return {};
    }
    if (recording_ && owner_->plan().recording()) owner_->plan().freed(offset);
    bool wait = (tag & BlockTag::kUsed) != 0;
    SessionId session = 0;
    if (shared_.recorder.enabled()) session = session_of(offset, tag);
    if (promoted) {
      const auto found = promoted_.find(offset);
      PersistentHeapImpl* heap = found->second;
      if (marks) {
        uses_.add(offset, mark.fence);
        wait = true;
      }
      promoted_.erase(found);
      const uint64_t size = heap_->size_bytes(handle);
      note_peak();
      promoted_bytes_ -= size;
      loans_[heap].promoted_bytes -= size;
      loans_changed_ = true;
      heap->remove_promoted(size);
      drained = promoted_.empty() && !is_open();
      unpinned = promoted_.empty() && is_open() && owner_ == nullptr;
    }
    if (wait) {
      heap_->set_tag(handle, tag | BlockTag::kFreed);
      deferred_bytes_ += heap_->size_bytes(handle);
      uses_.defer(offset);
      if (uses_.deferred() % 64 == 0 && !drained)
        uses_.take_passed([this](uint64_t o) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { release(o); });
    } else {
      heap_->free(handle);
    }
    if (owner_ != nullptr) tell_freed();
    if (shared_.recorder.enabled())
      shared_.recorder.record(AllocationEvent::Action::kFree, Kind::kEphemeral, address, BlockTag::bytes(tag),
                              own, session);
  }
  if (drained) drained_(this);
  if (unpinned) resize_unpinned();
  return {};
}

void LaneImpl::free_promoted_of(PersistentHeapImpl& heap, const FenceList& fences) {
  bool drained = false;
  {
    const base::WorkLock control(control_, base::kMustWait);  // no block of it moves
    ShortLockGuard lock(door_.lock_);
    if (promoted_.empty()) return;
    for (auto it = promoted_.begin(); it != promoted_.end();) {
      if (it->second != &heap) {
        ++it;
        continue;
      }
      const uint64_t offset = it->first;
      promoted_.erase(it++);
      const BlockHandle handle = heap_->find(offset);
      const uint64_t size = heap_->size_bytes(handle);
      note_peak();
      promoted_bytes_ -= size;
      loans_[&heap].promoted_bytes -= size;
      loans_changed_ = true;
      heap.remove_promoted(size);
      const uint64_t tag = heap_->tag(handle);
      for (const FencePtr& fence : fences)
        if (fence) uses_.add(offset, fence);
      heap_->set_tag(handle, tag | BlockTag::kFreed);
      deferred_bytes_ += size;
      uses_.defer(offset);
      shared_.recorder.record(AllocationEvent::Action::kFree, Kind::kEphemeral, range_.base + offset,
                              BlockTag::bytes(tag), heap.stream(), heap.session());
    }
    drained = promoted_.empty() && !is_open();
  }
  if (drained) drained_(this);
}

base::Status LaneImpl::add_use(Address address, const FencePtr& use) {
  ShortLockGuard lock(door_.lock_);
  const BlockHandle handle = ordinary_block(address);
  if (!handle) return no_such_block(address);
  heap_->set_tag(handle, heap_->tag(handle) | BlockTag::kUsed);
  uses_.add(handle.offset_bytes, use);
  return {};
}

bool LaneImpl::find_block(Address address, BlockInfo* out_info) {
  ShortLockGuard lock(door_.lock_);
  const uint64_t offset = address - range_.base;
  if (offset >= range_.bytes) return false;
  uint64_t tag = 0;
  if (HeapBlock planned; on_plan() && replay_->find(offset, &planned))
    tag = planned.tag;
  else if (const BlockHandle handle = heap_->find(offset); handle)
    tag = heap_->tag(handle);
  if (tag == 0 || (tag & BlockTag::kFreed)) return false;
  const uint64_t granularity = shared_.layout->granularity_bytes();
  const size_t first = offset / granularity, last = (offset + BlockTag::bytes(tag) - 1) / granularity;
  bool away = false;
  for (size_t i = first; away_bytes_ > 0 && i <= last && i < away_.size(); ++i) away |= away_[i];
  *out_info = {address,
               BlockTag::bytes(tag),
               Kind::kEphemeral,
               session_of(offset, tag),
               id(),
               (tag & BlockTag::kPromoted) != 0,
               away};
  return true;
}

LaneStats LaneImpl::stats() const {
  ShortLockGuard lock(door_.lock_);
  LaneStats stats;
  stats.size_bytes = range_.bytes - std::min(range_.bytes, lent_bytes_ + away_bytes_ + hollow_bytes_);
  stats.lent_bytes = lent_bytes_;
  stats.tail_bytes = heap_->capacity_bytes() - heap_->floor_bytes();
  stats.live_bytes = live_bytes();
  stats.planned_allocs = replay_->planned_allocations();
  stats.peak_bytes = std::max(peak_, highest_bytes_ + promoted_bytes_);
  stats.iteration_peak_bytes = owner_ != nullptr ? arena_needed() : iteration_peak_;
  stats.promoted_bytes = promoted_bytes_;
  return stats;
}

void LaneImpl::snapshot(std::vector<SegmentSnapshot>* out_segments) const {
  ShortLockGuard lock(door_.lock_);
  if (range_.bytes == 0) return;
  SegmentSnapshot segment;
  segment.address = range_.base;
  segment.bytes = range_.bytes;
  if (is_open()) segment.stream = reinterpret_cast<uintptr_t>(stream_->native());
  segment.name = (is_open() ? "lane " : "closed lane ") + std::to_string(id());
  heap_->for_each_block([&](const HeapBlock& block) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    if (!block.live || block.tag == 0 || (block.tag & BlockTag::kFreed)) return;
    segment.blocks.push_back({range_.base + block.offset_bytes, BlockTag::bytes(block.tag), Kind::kEphemeral,
                              session_of(block.offset_bytes, block.tag), id(),
                              (block.tag & BlockTag::kPromoted) != 0, false});
  });
  if (on_plan())
    replay_->for_each_planned([&](const HeapBlock& block) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      segment.blocks.push_back({range_.base + block.offset_bytes, BlockTag::bytes(block.tag),
                                Kind::kEphemeral, owner_->session(), id(), false, false});
    });
  out_segments->push_back(std::move(segment));
}

std::string LaneImpl::check(std::vector<Range>* out_ranges) const {
  const base::WorkLock control(control_, base::kMustWait);
  ShortLockGuard lock(door_.lock_);
  const std::string who = "lane " + std::to_string(id());
  if (!heap_) return {};
  if (auto status = heap_->check(); !status.ok()) return who + ": " + status.message();
  if (heap_->capacity_bytes() != range_.bytes) return who + ": heap and range differ in size";
  uint64_t promoted = 0, deferred = 0, ephemeral = 0;
  heap_->for_each_block([&](const HeapBlock& block) {
    if (!block.live) return;
    if (block.tag & BlockTag::kFreed)
      deferred += block.size_bytes;
    else if (block.tag & BlockTag::kPromoted)
      promoted += block.size_bytes;
    else
      ephemeral += block.size_bytes;
  });
  uint64_t loaned = 0, lent = 0;
  for (const auto& [heap, loan] : loans_) {
    loaned += loan.promoted_bytes;
    lent += loan.lent_bytes;
  }
  const auto away = static_cast<uint64_t>(std::count(away_.begin(), away_.end(), true));
  if (away * shared_.layout->granularity_bytes() != away_bytes_)
    return who + ": what is away does not add up";
  const auto hollow = static_cast<uint64_t>(std::count(hollow_.begin(), hollow_.end(), true));
  if (is_open() && hollow * shared_.layout->granularity_bytes() != hollow_bytes_)
    return who + ": what has no memory does not add up";
  if (loaned != promoted_bytes_ || lent != lent_bytes_) return who + ": loans do not add up";
  if (promoted != promoted_bytes_) return who + ": promoted bytes do not add up";
  if (deferred != deferred_bytes_) return who + ": bytes waiting for other streams do not add up";
  if (owner_ == nullptr && ephemeral != 0) return who + ": ephemeral bytes between iterations";
  for (const Range& range : {range_, ahead_}) {
    if (range.bytes == 0) continue;
    for (uint64_t at = 0; at < range.bytes; at += AddressIndex::kGranuleBytes)
      if (shared_.index.find(range.base + at) != this) return who + ": not in the address index";
    out_ranges->push_back(range);
  }
  return {};
}

// ---- the door ----

LaneDoor& LaneDoor::take(LaneImpl& lane, const void* owner) {
  LaneDoor& door = DoorPool<LaneDoor>::instance().take();
  ShortLockGuard lock(door.lock_);
  door.lane_ = &lane;
  door.owner_ = owner;
  return door;
}

void LaneDoor::give_back() noexcept {
  {
    ShortLockGuard lock(lock_);
    key_.store(0, std::memory_order_relaxed);
    lane_ = nullptr;
    journal_ = nullptr;
  }
  DoorPool<LaneDoor>::instance().give_back(*this);
}

bool LaneDoor::lend(uint64_t key, Journal& journal) {
  const ShortLockGuard lock(lock_);
  if (key == 0 || key_.load(std::memory_order_relaxed) != key || journal_ != nullptr) return false;
  journal.most = std::min(journal.most, journal.entries.size());
  journal_ = &journal;
  return true;
}

void LaneDoor::take_back(const Journal& journal) {
  const ShortLockGuard lock(lock_);
  if (journal_ == &journal) journal_ = nullptr;
}

size_t LaneDoor::skip_dead(uint64_t key, const Journal::Entry* entries,
                           size_t count) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  constexpr size_t kUnderOneLock = 256;
  while (count > 0) {
    const size_t until = count - std::min(count, kUnderOneLock);
    const ShortLockGuard lock(lock_);
    if (key_.load(std::memory_order_relaxed) != key || lane_->on_plan()) return count;
    const LaneImpl& lane = *lane_;
    const bool empty = lane.heap_->live_blocks() == lane.promoted_.size();
    for (; count > until; --count) {
      const uint64_t offset = entries[count - 1].address - lane.range_.base;
      if (offset >= lane.range_.bytes) return count;
      if (empty) continue;
      if (const BlockHandle block = lane.heap_->find(offset);
          block && (lane.heap_->tag(block) & (BlockTag::kPromoted | BlockTag::kHollow)) == 0)
        return count;
    }
  }
  return 0;
}

bool LaneDoor::belongs_to(uint64_t key, const void* owner) {
  const ShortLockGuard lock(lock_);
  return key_.load(std::memory_order_relaxed) == key && owner_ == owner;
}

}  // namespace gpushare::memory
