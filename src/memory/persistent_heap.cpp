// SPDX-License-Identifier: Apache-2.0
#include "memory/persistent_heap.hpp"

#include <algorithm>

#include "base/units.hpp"
#include "memory/door_pool.hpp"
#include "memory/elastic_range.hpp"
#include "memory/lane.hpp"
#include "memory/persistent_heap_inner.hpp"

namespace gpushare::memory {
namespace {

// A heap tells its live bytes when they differ from the last report by 1 MiB or this part of its promise.
constexpr uint64_t kTellHeapBytes = uint64_t{1} << 20, kTellHeapDivisor = 64;

}  // namespace

base::Result<std::unique_ptr<Heap>> PersistentHeapImpl::take_heap() {
  if (!spare_heaps_.empty()) {
    std::unique_ptr<Heap> heap = std::move(spare_heaps_.back());
    spare_heaps_.pop_back();
    return heap;
  }
  HeapOptions options;
  options.granule_bytes = kBlockGranuleBytes;
  options.max_blocks = 1u << 20;
  GPUSHARE_ASSIGN_OR_RETURN(Heap heap, Heap::create(options));
  return std::make_unique<Heap>(std::move(heap));
}

std::string PersistentHeapImpl::name() const {
  ShortLockGuard lock(door_.lock_);
  return name_;
}

// With a stream the device waits; without one (before the first iteration) the host does.
void PersistentHeapImpl::await_fences(const FenceList& fences) {
  if (const device::Stream* stream = spill_owner_.stream.load())
    order_all(fences, *stream);
  else
    wait_all(fences);
}

FenceList PersistentHeapImpl::own_fences() const {
  FenceList fences;
  if (const device::Stream* stream = spill_owner_.stream.load())
    fences.push_back(shared_.fences.at_end_of(*stream));
  return fences;
}

base::Status PersistentHeapImpl::open(SessionId session, std::string name, uint64_t promised_bytes) {
  const base::WorkLock control(control_, base::kMustWait);
  spill_owner_.session.store(session);
  spill_owner_.set_stream(nullptr);
  plan_.reset();
  kept_lost_.store(false);
  {
    ShortLockGuard lock(door_.lock_);
    name_ = std::move(name);
    promised_ = lent_ = owed_ = live_ = promoted_ = peak_ = 0;
    away_live_bytes_.store(0);
  }
  const uint64_t bytes = shared_.layout->heap_steps().round_up(promised_bytes);
  before_shrink_ = 0;
  GPUSHARE_RETURN_IF_ERROR(grow(bytes, false));
  {
    ShortLockGuard lock(door_.lock_);
    promised_ = bytes;
  }
  residency_.store(Residency::kResident);
  return {};
}

base::Status PersistentHeapImpl::close(FenceList* out_fences, std::vector<LaneImpl*>* out_borrowers) {
  const base::WorkLock control(control_, base::kMustWait);
  if (!is_open()) return {GPUSHARE_INVALID_STATE, "the persistent heap is closed already"};
  FenceList fences = own_fences();
  std::vector<Extent> extents;
  {
    ShortLockGuard lock(door_.lock_);
    residency_.store(Residency::kClosed);
    for (const FencePtr& fence : uses_.drain()) fences.push_back(fence);
    extents.swap(extents_);
    door_.name_ = nullptr;
    promised_ = lent_ = owed_ = live_ = 0;
    away_live_bytes_.store(0);
    tell_now();
    out_borrowers->swap(borrowers_);
    borrowers_.clear();
  }
  for (Extent& extent : extents) {
    if (shared_.recorder.enabled())  // before somebody else has blocks there
      extent.heap->for_each_block([&](const HeapBlock& block) {
        if (block.live && (block.tag & BlockTag::kFreed) == 0)
          shared_.recorder.record(AllocationEvent::Action::kFree, BlockTag::kind(block.tag),
                                  extent.range.base + block.offset_bytes, BlockTag::bytes(block.tag),
                                  spill_owner_.stream.load(), session());
      });
    for_each_stretch(extent, [this](const Range& part) { shared_.index.clear(part.base, part.bytes); });
    if (extent.hollow.empty() || shared_.layout->kind() == Layout::kVirtual)
      shared_.layout->give(extent.range, fences);
    else
      for_each_stretch(extent, [&](Range part) { shared_.layout->give(part, fences); });
    if (spare_heaps_.empty()) {
      extent.heap->reset();
      extent.heap->resize(0);
      spare_heaps_.push_back(std::move(extent.heap));
    }
  }
  shared_.spill->close(spill_owner_, fences);
  drop_saved();
  valid_.clear();
  coming_in_ = false;
  spill_owner_.set_stream(nullptr);
  *out_fences = std::move(fences);
  return {};
}

base::Status PersistentHeapImpl::add_extent(uint64_t bytes) {
  GPUSHARE_ASSIGN_OR_RETURN(std::unique_ptr<Heap> heap, take_heap());
  heap->resize(bytes);
  Range range;
  FenceList fences;
  base::Status status = shared_.layout->take(RangeUse::kHeap, bytes, &range, &fences);
  if (status.ok()) {
    status = shared_.index.set(range.base, bytes, this);
    if (!status.ok()) shared_.layout->give(range, fences);
  }
  if (!status.ok()) {
    heap->resize(0);
    spare_heaps_.push_back(std::move(heap));
    return status;
  }
  await_fences(fences);
  ShortLockGuard lock(door_.lock_);
  extents_.push_back(Extent{range, std::move(heap), {}, 0, {}});
  size_granules(extents_.back());
  return {};
}

base::Status PersistentHeapImpl::extend(size_t index, uint64_t bytes, bool may_wait) {
  if (!may_wait && stream() == nullptr)
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "no stream to order the bytes on"};
  FenceList fences;
  Range grown = extents()[index].range;
  const Address end = grown.base + grown.bytes;
  GPUSHARE_RETURN_IF_ERROR(shared_.layout->extend(grown, bytes, may_wait, &fences));
  if (auto status = shared_.index.set(end, bytes, this); !status.ok()) {
    shared_.layout->shrink(grown, end - grown.base, fences);
    return status;
  }
  await_fences(fences);
  ShortLockGuard lock(door_.lock_);
  Extent& extent = extents_[index];
  extent.range = grown;
  extent.heap->resize(grown.bytes);
  size_granules(extent);
  return {};
}

base::Status PersistentHeapImpl::grow(uint64_t bytes, bool in_pieces) {
  if (bytes == 0) return {};
  if (extend_any(bytes, true).ok()) return {};
  const base::Steps steps = shared_.layout->heap_steps();
  if (!steps.has(bytes)) {
    // Each extent must have such a size: a small one gets the rest, or is made of it.
    const uint64_t rest = bytes % steps.large;
    GPUSHARE_RETURN_IF_ERROR(grow(bytes - rest, in_pieces));
    const base::Status small = grow(rest, in_pieces);
    if (!small.ok()) (void)cut(bytes - rest, Cut::kSome);
    return small;
  }
  const base::Status whole = add_extent(bytes);
  if (whole.ok() || !in_pieces) return whole.with_context("session '" + name() + "'");
  uint64_t added = 0;
  while (added < bytes) {
    const uint64_t piece = steps.round_down(std::min(shared_.layout->largest_hole_bytes(), bytes - added));
    if (piece == 0 || !add_extent(piece).ok()) break;
    added += piece;
  }
  if (added == bytes) return {};
  (void)cut(added, Cut::kSome);
  return whole.with_context("session '" + name() + "'");
}

base::Status PersistentHeapImpl::extend_any(uint64_t bytes, bool may_wait) {
  base::Status status(GPUSHARE_DEVICE_OUT_OF_MEMORY, "");
  for (size_t i = extents().size(); i-- > 0 && !status.ok();) {
    const Extent& extent = extents()[i];
    if (extent.hollow.empty() && shared_.layout->heap_steps().has(extent.range.bytes + bytes))
      status = extend(i, bytes, may_wait);
  }
  return status;
}

// Takes `bytes` off the ends of the extents, or, unless kAll, as much of it as blocks let go. Returns how much. Only what must
// all go may wait on the host.
uint64_t PersistentHeapImpl::cut(uint64_t bytes, Cut how) {
  const bool all = how == Cut::kAll;
  const base::Steps steps = shared_.layout->heap_steps();
  std::vector<uint64_t> cuts(extents().size(), 0);
  std::vector<Range> cut_ranges;  // as they were
  std::vector<uint64_t> kept;
  // Freed blocks that wait for other streams are free for this: the ranges that go are fenced with the
  // session's own stream, which waits for those, or has none and lets the host wait.
  FenceList waits;
  {
    ShortLockGuard lock(door_.lock_);
    if (uses_.deferred() > 0) waits = uses_.outstanding();
  }
  if (!waits.empty() && !all && stream() == nullptr) return 0;
  if (!waits.empty()) await_fences(waits);
  uint64_t surplus = bytes;
  {
    // No block may be placed in a part that goes, so the heaps shrink first, under the lock; the ranges go
    // back after it.
    ShortLockGuard lock(door_.lock_);
    const auto give_back = [this](uint64_t address) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { release(address); };
    if (const device::Stream* own = stream())
      uses_.take_ordered(*own, give_back);
    else
      uses_.take_passed(give_back);
    for (size_t i = extents_.size(); i-- > 0 && surplus > 0;) {
      const Extent& extent = extents_[i];
      if (!extent.hollow.empty()) continue;
      const uint64_t floor = steps.round_up(extent.heap->floor_bytes());
      uint64_t end = extent.range.bytes;
      while (end > floor && surplus > 0) {
        const bool away = extent.away > 0 && extent.granules[(end - 1) / steps.large].away;
        // A granule goes as a whole, but for the first, which is made of small ones.
        const uint64_t step = end > steps.large || away ? steps.large : std::min(end - floor, surplus);
        if (step > end - floor || (step > surplus && !away) || (step < steps.large && how == Cut::kGranules))
          break;
        end -= step;
        if (!away) surplus -= step;  // what is away is nothing of what is asked for
      }
      cuts[i] = extent.range.bytes - end;
    }
    if ((all && surplus > 0) || surplus == bytes) return 0;
    for (size_t i = extents_.size(); i-- > 0;) {
      if (cuts[i] == 0) continue;
      Extent& extent = extents_[i];
      cut_ranges.push_back(extent.range);
      extent.range.bytes -= cuts[i];
      kept.push_back(extent.range.bytes);
      extent.heap->resize(extent.range.bytes);
      size_granules(extent);
      if (extent.range.bytes > 0) continue;
      spare_heaps_.push_back(std::move(extent.heap));
      extents_.erase(extents_.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  const FenceList fences = own_fences();
  for (size_t i = 0; i < cut_ranges.size(); ++i) {
    Range& range = cut_ranges[i];
    shared_.index.clear(range.base + kept[i], range.bytes - kept[i]);
    if (kept[i] > 0)
      shared_.layout->shrink(range, kept[i], fences);
    else
      shared_.layout->give(range, fences);
  }
  return bytes - surplus;
}

base::Status PersistentHeapImpl::shrink(uint64_t promised_bytes) {
  uint64_t before = 0, forgone = 0;
  {
    ShortLockGuard lock(door_.lock_);
    if (promised_bytes < device_live() + promoted_)
      return {GPUSHARE_INVALID_STATE, "session '" + name_ + "': the promise cannot shrink to " +
                                          base::format_bytes(promised_bytes) + ": " +
                                          base::format_bytes(device_live() + promoted_) + " are live"};
    before = std::exchange(promised_, promised_bytes);  // so that no block is placed beyond it from here on
    forgone = std::min(before - promised_bytes, owed_);
    owed_ -= forgone;
    lent_ -= forgone;
  }
  const uint64_t surplus = before - promised_bytes - forgone;
  if (surplus == 0 || cut(surplus, Cut::kAll) > 0) return {};
  ShortLockGuard lock(door_.lock_);
  promised_ = before;
  owed_ += forgone;
  lent_ += forgone;
  return {GPUSHARE_INVALID_STATE,
          "session '" + name_ + "': the promise cannot shrink to " + base::format_bytes(promised_bytes) +
              ": live blocks lie at the end (fragmentation)" +
              (lent_ > owed_ ? ", or lanes hold until their next boundary what was lent to them" : "")};
}

base::Status PersistentHeapImpl::resize(uint64_t promised_bytes) {
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  if (!is_open()) return {GPUSHARE_INVALID_STATE, "the persistent heap is closed"};
  if (!is_resident()) return {base::kAway, "the session is paged out: page it in before its promise changes"};
  uint64_t wanted = shared_.layout->heap_steps().round_up(promised_bytes);
  for (LaneImpl* lane : borrowers()) lane->return_surplus();
  restore(true);
  uint64_t promised = 0;
  {
    ShortLockGuard lock(door_.lock_);
    promised = promised_;
  }
  // Beside a granule that came home there may be small ones: the promise has no such size then, and does not grow unasked.
  if (promised_bytes <= promised) wanted = std::min(wanted, promised);
  if (wanted < promised) {
    const base::Status shrunk = shrink(wanted);
    if (shrunk.ok()) before_shrink_ = promised;
    return shrunk;
  }
  GPUSHARE_RETURN_IF_ERROR(grow(wanted - promised, wanted == before_shrink_));
  ShortLockGuard lock(door_.lock_);
  promised_ = wanted;
  return {};
}

base::Status PersistentHeapImpl::give_back_free() {
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  if (residency_.load() != Residency::kResident)
    return {GPUSHARE_INVALID_STATE, "the session is paged out, or closed"};
  for (LaneImpl* lane : borrowers()) lane->return_surplus();
  uint64_t surplus = 0;
  {
    ShortLockGuard lock(door_.lock_);
    const uint64_t least = shared_.layout->heap_steps().round_up(device_live() + promoted_);
    if (promised_ <= least) return {};
    surplus = promised_ - least;
    promised_ = least;  // no block is placed beyond it from here on
    const uint64_t forgone = std::min(surplus, owed_);
    owed_ -= forgone;
    lent_ -= forgone;
    surplus -= forgone;
  }
  if (surplus > 0) surplus -= cut(surplus, Cut::kSome);
  if (surplus > 0) surplus -= hollow_out(surplus);
  ShortLockGuard lock(door_.lock_);
  promised_ += surplus;  // the free bytes of granules in which blocks lie
  return {};
}

uint64_t PersistentHeapImpl::hollow_out(uint64_t bytes) {
  const uint64_t granularity = shared_.layout->granularity_bytes();
  uint64_t left = bytes;
  std::vector<std::pair<Range, std::vector<size_t>>> taken;
  {
    ShortLockGuard lock(door_.lock_);
    for (Extent& extent : extents_) {
      if (extent.range.bytes < granularity) continue;
      std::vector<bool> used(extent.range.bytes / granularity);
      extent.heap->for_each_block([&](const HeapBlock& block) {
        if (block.live)
          for_each_granule(block.offset_bytes, block.size_bytes, [&](size_t i, uint64_t) { used[i] = true; });
      });
      std::vector<size_t> granules;
      for (size_t i = 0; i < used.size() && left >= granularity; ++i) {
        if (used[i] || extent.is_hollow(i) || (extent.away > 0 && extent.granules[i].away)) continue;
        granules.push_back(i);
        left -= granularity;
      }
      if (granules.empty()) continue;
      extent.hollow.resize(used.size());
      for (const size_t i : granules) extent.hollow[i] = true;
      taken.emplace_back(extent.range, std::move(granules));
    }
  }
  const FenceList fences = own_fences();
  for (const auto& [range, granules] : taken) {
    for (const size_t i : granules) shared_.index.clear(range.base + i * granularity, granularity);
    shared_.layout->hollow(range, granules, fences);
  }
  return bytes - left;
}

PersistentHeapImpl::Extent* PersistentHeapImpl::extent_of(Address address) {
  for (Extent& extent : extents_) {
    const uint64_t offset = address - extent.range.base;
    // Another extent may lie in hollow granules of this one.
    if (offset < extent.range.bytes && !extent.is_hollow(offset / shared_.layout->granularity_bytes()))
      return &extent;
  }
  return nullptr;
}

BlockHandle PersistentHeapImpl::allocate(uint64_t bytes, uint64_t alignment, uint64_t tag,
                                         Address* out_address) {
  BlockHandle handle;
  handle.status = HeapStatus::kNoSpace;
  const uint64_t size = round_up(bytes, kBlockGranuleBytes);
  if (device_live() + promoted_ + size > promised_) return handle;
  for (Extent& extent : extents_) {
    if (!extent.hollow.empty()) continue;
    handle = extent.heap->allocate(bytes, alignment, tag);
    if (handle) {
      *out_address = extent.range.base + handle.offset_bytes;
      touch(extent, handle.offset_bytes, size);
      count_live(size, away_part(extent, handle.offset_bytes, size));
      peak_ = std::max(peak_, device_live() + promoted_);
      break;
    }
  }
  return handle;
}

void PersistentHeapImpl::release(Address address) {
  Extent* extent = extent_of(address);
  if (extent != nullptr) extent->heap->free_at(address - extent->range.base);
}

base::Result<Address> PersistentHeapImpl::alloc(Kind kind, uint64_t bytes, uint64_t alignment) {
  GPUSHARE_RETURN_IF_ERROR(check_request(bytes, alignment));
  if (kind != Kind::kModel && kind != Kind::kFramework)
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "a persistent block is of kind model or framework");
  Address address = 0;
  ShortLockGuard lock(door_.lock_);
  if (moving_) return base::Status(base::kMoving, "granules of session '" + name_ + "' move");
  GPUSHARE_RETURN_IF_ERROR(place(kind, bytes, alignment, &address));
  return address;
}

base::Status PersistentHeapImpl::await_moves() {
  const base::WorkLock until_moved(control_);
  return until_moved ? base::Status() : base::WorkLock::refused();
}

base::Status PersistentHeapImpl::place(Kind kind, uint64_t bytes, uint64_t alignment, Address* out_address) {
  if (!is_open())
    return {GPUSHARE_INVALID_STATE, "session '" + name_ + "' is closed: no block can be placed"};
  if (!is_resident()) return {base::kAway, "session '" + name_ + "' is paged out: no block can be placed"};
  const uint64_t tag = BlockTag::make(kind, bytes);
  BlockHandle handle = allocate(bytes, alignment, tag, out_address);
  if (!handle && uses_.deferred() > 0) {
    const auto give_back = [this](uint64_t a) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { release(a); };
    if (uses_.take_passed(give_back)) handle = allocate(bytes, alignment, tag, out_address);
    const device::Stream* stream = spill_owner_.stream.load();
    if (!handle && stream != nullptr && uses_.take_ordered(*stream, give_back))
      handle = allocate(bytes, alignment, tag, out_address);
  }
  shared_.recorder.record(handle ? AllocationEvent::Action::kAlloc : AllocationEvent::Action::kOutOfMemory,
                          kind, handle ? *out_address : 0, bytes, spill_owner_.stream.load(), session());
  return handle ? base::Status() : out_of_memory(bytes, handle.status);
}

base::Status PersistentHeapImpl::out_of_memory(uint64_t bytes, HeapStatus status) {
  if (status == HeapStatus::kNoRecords) {
    const auto full = std::find_if(extents_.begin(), extents_.end(),
                                   [](const Extent& extent) { return extent.heap->at_record_limit(); });
    return too_many_blocks("session '" + name_ + "'",
                           full == extents_.end() ? *extents_[0].heap : *full->heap);
  }
  uint64_t hole = 0;
  for (Extent& extent : extents_)
    if (extent.hollow.empty()) hole = std::max(hole, extent.heap->largest_hole_bytes());
  return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
          "session '" + name_ + "': no room for a persistent block of " + base::format_bytes(bytes) + ": " +
              base::format_bytes(device_live() + promoted_) + " of the promised " +
              base::format_bytes(promised_) + " live (" + base::format_bytes(promoted_) +
              " promoted), largest hole " + base::format_bytes(hole) +
              (uses_.deferred() > 0 ? ", freed blocks wait for other streams" : "")};
}

base::Result<Address> PersistentHeapImpl::alloc_spilled(Kind kind, uint64_t bytes, uint64_t alignment) {
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  if (!is_open()) return base::Status(GPUSHARE_INVALID_STATE, "the persistent heap is closed");
  return shared_.spill->alloc(spill_owner_, spill_owner_, kind, bytes, alignment);
}

base::Status PersistentHeapImpl::move_spilled(bool home, uint64_t most_bytes, uint64_t budget_ns,
                                              const device::Stream& stream, uint64_t* out_bytes) {
  *out_bytes = 0;
  if (!shared_.layout->has_host_tier())
    return {GPUSHARE_UNSUPPORTED, "blocks stay where they are on this layout or device"};
  const base::WorkLock control(control_);
  if (!control) return base::WorkLock::refused();
  if (!is_open()) return {GPUSHARE_INVALID_STATE, "the persistent heap is closed"};
  SpillStore::Granules spilled(*shared_.spill, spill_owner_);
  const base::MoveBudget budget{most_bytes, budget_ns};
  const base::Status status =
      is_resident() ? shared_.mover->move({this, &spilled}, home, budget, own_fences(), stream, out_bytes)
                    : shared_.mover->move({&spilled}, home, budget, own_fences(), stream, out_bytes);
  return status.with_context("session '" + name() + "': moving its blocks");
}

base::Status PersistentHeapImpl::open_range(ElasticRange& range, std::string name, uint64_t bytes) {
  const base::WorkLock lock(ranges_mutex_);
  if (!lock) return base::WorkLock::refused();
  ranges_.reserve(ranges_.size() + 1);
  GPUSHARE_RETURN_IF_ERROR(range.open(*this, std::move(name), bytes));
  ranges_.push_back(&range);
  return {};
}

void PersistentHeapImpl::close_range(ElasticRange& range) {
  const base::WorkLock lock(ranges_mutex_, base::kMustWait);
  std::erase(ranges_, &range);
  range.close();
}

std::vector<ElasticRange*> PersistentHeapImpl::ranges() const {
  const base::WorkLock lock(ranges_mutex_, base::kMustWait);
  return ranges_;
}

uint64_t PersistentHeapImpl::release_home() {
  shared_.spill->drop_empty(spill_owner_);
  return spill_owner_.home_bytes.load(std::memory_order_relaxed);
}

base::Status PersistentHeapImpl::free_block(Address address) {
  ShortLockGuard lock(door_.lock_);
  Extent* extent = extent_of(address);
  if (extent == nullptr) return no_such_block(address);
  const BlockHandle handle = extent->heap->find(address - extent->range.base);
  if (!handle) return no_such_block(address);
  const uint64_t tag = extent->heap->tag(handle);
  if (tag & BlockTag::kFreed) return no_such_block(address);
  const uint64_t size = extent->heap->size_bytes(handle);
  const uint64_t away = away_part(*extent, handle.offset_bytes, size);
  if (moving_)
    for_each_granule(handle.offset_bytes, size,
                     [&](size_t i, uint64_t part) { extent->granules[i].live_bytes -= part; });
  if (tag & BlockTag::kUsed) {
    extent->heap->set_tag(handle, tag | BlockTag::kFreed);
    uses_.defer(address);
    // Bounds the list even if nobody ever runs out of memory.
    if (uses_.deferred() % 64 == 0)
      uses_.take_passed([this](uint64_t a) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { release(a); });
  } else {
    extent->heap->free(handle);
  }
  count_live(0 - size, 0 - away);
  shared_.recorder.record(AllocationEvent::Action::kFree, BlockTag::kind(tag), address, BlockTag::bytes(tag),
                          spill_owner_.stream.load(), session());
  return {};
}

base::Status PersistentHeapImpl::add_use(Address address, const FencePtr& use) {
  ShortLockGuard lock(door_.lock_);
  Extent* extent = extent_of(address);
  if (extent == nullptr) return no_such_block(address);
  const BlockHandle handle = extent->heap->find(address - extent->range.base);
  if (!handle || (extent->heap->tag(handle) & BlockTag::kFreed)) return no_such_block(address);
  extent->heap->set_tag(handle, extent->heap->tag(handle) | BlockTag::kUsed);
  uses_.add(address, use);
  touch(*extent, handle.offset_bytes, extent->heap->size_bytes(handle));
  return {};
}

void PersistentHeapImpl::size_granules(Extent& extent) {
  touched_ = {};
  if (!shared_.layout->has_host_tier()) return;
  const uint64_t granularity = shared_.layout->granularity_bytes();
  extent.granules.resize(round_up(extent.range.bytes, granularity) / granularity);
  if (extent.away == 0) return;
  extent.away = static_cast<size_t>(std::count_if(extent.granules.begin(), extent.granules.end(),
                                                  [](const Granule& each) { return each.away; }));
}

void PersistentHeapImpl::touch(Extent& extent, uint64_t offset, uint64_t bytes) {
  if (extent.granules.empty()) return;
  const uint64_t now = spill_owner_.tick();
  const uint64_t granularity = shared_.layout->granularity_bytes();
  const uint64_t first = offset / granularity, last = (offset + bytes - 1) / granularity;
  for (uint64_t i = first; i <= last; ++i) extent.granules[i].last_use = now;
  if (first == last)
    touched_ = {extent.range.base + first * granularity, granularity, 0};
  else
    touched_ = {};
  touched_tick_ = now;
}

uint64_t PersistentHeapImpl::away_part(const Extent& extent, uint64_t offset, uint64_t bytes) const {
  uint64_t away = 0;
  if (extent.away > 0)
    for_each_granule(offset, bytes,
                     [&](size_t i, uint64_t part) { away += extent.granules[i].away ? part : 0; });
  return away;
}

void PersistentHeapImpl::count_live(uint64_t bytes, uint64_t away_bytes) {
  live_ += bytes;
  if (away_bytes != 0) away_live_bytes_.fetch_add(away_bytes, std::memory_order_relaxed);
  tell_now();
}

void PersistentHeapImpl::tell_now() {
  const uint64_t live = device_live();
  highest_ = std::max(highest_, live);
  if (highest_ > told_) {
    shared_.persistent_bytes.fetch_add(highest_ - told_, std::memory_order_relaxed);
    shared_.note_peak();
    told_ = highest_;
  }
  if (told_ > live) shared_.persistent_bytes.fetch_sub(told_ - live, std::memory_order_relaxed);
  highest_ = told_ = live;
  quiet_from_ = live - quiet_width_ / 2;
}

void PersistentHeapImpl::leave_quiet() {
  if (untold_) return tell_now();
  // From now on it may know what Shared does not.
  untold_ = true;
  quiet_width_ = 2 * std::max(kTellHeapBytes, promised_ / kTellHeapDivisor);
  quiet_from_ = told_ - quiet_width_ / 2;
  next_untold_ = shared_.untold.load(std::memory_order_relaxed);
  while (!shared_.untold.compare_exchange_weak(next_untold_, this, std::memory_order_release,
                                               std::memory_order_relaxed)) {
  }
  if (device_live() - quiet_from_ > quiet_width_) tell_now();
}

void PersistentHeapImpl::tell() {
  ShortLockGuard lock(door_.lock_);
  untold_ = false;
  quiet_width_ = 0;
  tell_now();
}

void Shared::hear_heaps() {
  base::MutexLock alone(hearing);
  for (PersistentHeapImpl* heap = untold.exchange(nullptr, std::memory_order_acquire); heap != nullptr;) {
    PersistentHeapImpl* const next = heap->next_untold_;  // once it has told, it may come in again
    heap->tell();
    heap = next;
  }
}

HeapDoor* PersistentHeapImpl::open_door(const void* name) {
  if (shared_.recorder.enabled()) return nullptr;
  ShortLockGuard lock(door_.lock_);
  if (!is_resident()) return nullptr;
  door_.name_ = name;
  return &door_;
}

void PersistentHeapImpl::close_door() {
  ShortLockGuard lock(door_.lock_);
  door_.name_ = nullptr;
}

HeapDoor& HeapDoor::take(PersistentHeapImpl& heap, const void* owner) {
  HeapDoor& door = DoorPool<HeapDoor>::instance().take();
  ShortLockGuard lock(door.lock_);
  door.heap_ = &heap;
  door.owner_ = owner;
  return door;
}

void HeapDoor::give_back() noexcept {
  {
    ShortLockGuard lock(lock_);
    name_ = nullptr;
    heap_ = nullptr;
  }
  DoorPool<HeapDoor>::instance().give_back(*this);
}

void PersistentHeapImpl::begin_moves(bool home, std::vector<MovableGranule>* out_granules,
                                     FenceList* out_uses) {
  ShortLockGuard lock(door_.lock_);
  moving_ = true;
  for (Extent& extent : extents_) {
    for (Granule& granule : extent.granules) granule.live_bytes = 0;
    extent.heap->for_each_block([&](const HeapBlock& block) {
      if (block.live && !(block.tag & BlockTag::kFreed))
        for_each_granule(block.offset_bytes, block.size_bytes,
                         [&](size_t i, uint64_t bytes) { extent.granules[i].live_bytes += bytes; });
    });
    if (extent.range.bytes < shared_.layout->granularity_bytes()) continue;  // a granule moves as a whole
    for (size_t i = 0; i < extent.granules.size(); ++i) {
      const Granule& granule = extent.granules[i];
      if (!extent.is_hollow(i) && !granule.lost && granule.away == home && (granule.live_bytes > 0 || !home))
        // A granule without live blocks goes out before all others: nothing is copied.
        out_granules->push_back({extent.range, i, granule.live_bytes > 0 ? granule.last_use : 0,
                                 granule.live_bytes, this, nullptr});
    }
  }
  // The promise also covers promoted blocks, so only so many free bytes may go with what goes out.
  if (!home && promoted_ > lent_) {
    const uint64_t granularity = shared_.layout->granularity_bytes();
    uint64_t spare = promised_ - device_live() - promoted_;
    std::sort(out_granules->begin(), out_granules->end(),
              [](const MovableGranule& a, const MovableGranule& b) { return a.live_bytes > b.live_bytes; });
    size_t kept = 0;
    for (const MovableGranule& granule : *out_granules) {
      const uint64_t free_bytes = granularity - granule.live_bytes;
      if (free_bytes > spare) break;
      spare -= free_bytes;
      ++kept;
    }
    out_granules->resize(kept);
  }
  const FenceList uses = uses_.outstanding();
  out_uses->insert(out_uses->end(), uses.begin(), uses.end());
}

void PersistentHeapImpl::moved(const MovableGranule& which, bool home, bool lost) {
  ShortLockGuard lock(door_.lock_);
  // Not extent_of(): the extent's first granule may be hollow.
  const auto extent = std::find_if(extents_.begin(), extents_.end(),
                                   [&](const Extent& each) { return each.range.base == which.range.base; });
  extent->granules[which.granule].lost |= lost;
  if (home && lost) return;  // it stays away, and holds nothing of the promise
  extent->granules[which.granule].away = !home;
  home ? --extent->away : ++extent->away;
  const uint64_t granularity = shared_.layout->granularity_bytes();
  promised_ = home ? promised_ + granularity : promised_ - granularity;
  const uint64_t live = extent->granules[which.granule].live_bytes;
  count_live(0, home ? 0 - live : live);
}

void PersistentHeapImpl::end_moves() {
  ShortLockGuard lock(door_.lock_);
  moving_ = false;
}

bool PersistentHeapImpl::find_block(Address address, BlockInfo* out_info) {
  ShortLockGuard lock(door_.lock_);
  Extent* extent = extent_of(address);
  if (extent == nullptr) return false;
  const BlockHandle handle = extent->heap->find(address - extent->range.base);
  if (!handle || (extent->heap->tag(handle) & BlockTag::kFreed)) return false;
  const uint64_t tag = extent->heap->tag(handle);
  const bool away = away_part(*extent, handle.offset_bytes, BlockTag::bytes(tag)) > 0;
  *out_info = {address, BlockTag::bytes(tag),    BlockTag::kind(tag), session(), UINT32_MAX,
               false,   away || own_blocks_out()};
  return true;
}

void PersistentHeapImpl::lends_to(LaneImpl* lane) {
  ShortLockGuard lock(door_.lock_);
  add_borrower(lane);
}

void PersistentHeapImpl::add_borrower(LaneImpl* lane) {
  if (std::find(borrowers_.begin(), borrowers_.end(), lane) == borrowers_.end()) borrowers_.push_back(lane);
}

base::Status PersistentHeapImpl::add_promoted(uint64_t bytes, LaneImpl* in) {
  ShortLockGuard lock(door_.lock_);
  if (!is_open()) return {GPUSHARE_INVALID_STATE, "the persistent heap is closed"};
  if (device_live() + promoted_ + bytes > promised_)
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "session '" + name_ + "': cannot keep a block of " +
                                               base::format_bytes(bytes) + ": " +
                                               base::format_bytes(device_live() + promoted_) +
                                               " of the promised " + base::format_bytes(promised_) + " live"};
  add_borrower(in);
  promoted_ += bytes;
  peak_ = std::max(peak_, device_live() + promoted_);
  shared_.persistent_bytes.fetch_add(bytes, std::memory_order_relaxed);
  return {};
}

void PersistentHeapImpl::remove_promoted(uint64_t bytes) {
  ShortLockGuard lock(door_.lock_);
  promoted_ -= bytes;
  shared_.persistent_bytes.fetch_sub(bytes, std::memory_order_relaxed);
}

void PersistentHeapImpl::reset_peak() {
  ShortLockGuard lock(door_.lock_);
  peak_ = device_live() + promoted_;
}

uint64_t PersistentHeapImpl::kept_away_bytes() const {
  uint64_t bytes = 0;
  for (const LaneImpl* lane : borrowers()) bytes += lane->away_of(*this);
  return bytes;
}

HeapStats PersistentHeapImpl::stats() const {
  ShortLockGuard lock(door_.lock_);
  HeapStats stats;
  stats.promised_bytes = promised_;
  stats.live_bytes = device_live() + promoted_;
  stats.peak_bytes = peak_;
  stats.promoted_bytes = promoted_;
  stats.lent_bytes = lent_;
  const uint64_t spilled = spill_owner_.spilled_bytes.load(std::memory_order_relaxed);
  stats.spilled_bytes = spilled -
                        std::min(spilled, spill_owner_.home_live_bytes.load(std::memory_order_relaxed)) +
                        away_live_bytes_.load(std::memory_order_relaxed);
  stats.home_bytes = spill_owner_.home_bytes.load(std::memory_order_relaxed);
  for (const Extent& extent : extents_)
    if (extent.hollow.empty())
      stats.largest_hole_bytes = std::max(stats.largest_hole_bytes, extent.heap->largest_hole_bytes());
  return stats;
}

void PersistentHeapImpl::snapshot(std::vector<SegmentSnapshot>* out_segments) const {
  ShortLockGuard lock(door_.lock_);
  const bool out = own_blocks_out();
  for (const Extent& extent : extents_) {
    SegmentSnapshot segment;
    segment.address = extent.range.base;
    segment.bytes = extent.range.bytes;
    segment.session = session();
    segment.name = "session " + name_;
    extent.heap->for_each_block([&](const HeapBlock& block) {
      if (!block.live || (block.tag & BlockTag::kFreed)) return;
      const bool away = away_part(extent, block.offset_bytes, block.size_bytes) > 0;
      segment.blocks.push_back({extent.range.base + block.offset_bytes, BlockTag::bytes(block.tag),
                                BlockTag::kind(block.tag), session(), UINT32_MAX, false, away || out});
    });
    out_segments->push_back(std::move(segment));
  }
}

std::string PersistentHeapImpl::check(std::vector<Range>* out_ranges) const {
  const base::WorkLock control(control_, base::kMustWait);
  ShortLockGuard lock(door_.lock_);
  uint64_t bytes = 0, live = 0, away = 0;
  for (const Extent& extent : extents_) {
    if (auto status = extent.heap->check(); !status.ok()) return "session " + name_ + ": " + status.message();
    if (extent.heap->capacity_bytes() != extent.range.bytes)
      return "session " + name_ + ": heap and range differ in size";
    for_each_stretch(extent, [&](const Range& part) { bytes += part.bytes; });
    bytes -= extent.away * shared_.layout->granularity_bytes();
    extent.heap->for_each_block([&](const HeapBlock& block) {
      if (!block.live || (block.tag & BlockTag::kFreed)) return;
      live += block.size_bytes;
      away += away_part(extent, block.offset_bytes, block.size_bytes);
    });
    if (static_cast<size_t>(std::count_if(extent.granules.begin(), extent.granules.end(),
                                          [](const Granule& each) { return each.away; })) != extent.away)
      return "session " + name_ + ": granules that are away do not add up";
    bool indexed = true;
    for_each_stretch(extent, [&](const Range& part) {
      for (uint64_t at = 0; at < part.bytes; at += AddressIndex::kGranuleBytes)
        indexed = indexed && shared_.index.find(part.base + at) == this;
      out_ranges->push_back(part);
    });
    if (!indexed) return "session " + name_ + ": not in the address index";
  }
  if (bytes + lent_ != promised_) return "session " + name_ + ": extents and promise differ";
  if (owed_ > lent_) return "session " + name_ + ": more owed than lent";
  if (live != live_) return "session " + name_ + ": live bytes do not add up";
  if (away != away_live_bytes_.load()) return "session " + name_ + ": bytes that are away do not add up";
  if (device_live() + promoted_ > promised_) return "session " + name_ + ": more live than promised";
  return {};
}

}  // namespace gpushare::memory
