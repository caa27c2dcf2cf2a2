// SPDX-License-Identifier: Apache-2.0
#include "memory/device_memory.hpp"

#include <algorithm>

#include "base/mutex.hpp"
#include "base/units.hpp"
#include "memory/elastic_range.hpp"
#include "memory/lane.hpp"
#include "memory/persistent_heap.hpp"
#include "memory/spill.hpp"

namespace gpushare::memory {
namespace {

// Heaps and lanes are pooled: closed ones wait for the next open, none is destroyed before the DeviceMemory.
// So the number of objects is that of the most ever open together, and an address looked up too late finds an
// object that still exists.
class DeviceMemoryImpl final : public DeviceMemory {
 public:
  explicit DeviceMemoryImpl(device::Device& device) : shared_(device) {}
  ~DeviceMemoryImpl() override {
    for (ElasticRange* range : open_ranges_) range->close();
    for (PersistentHeapImpl* heap : open_heaps_) {
      FenceList ignored_fences;
      std::vector<LaneImpl*> ignored_borrowers;
      heap->set_stream(nullptr);
      const base::Status ignored = heap->close(&ignored_fences, &ignored_borrowers);
    }
  }

  base::Status open(const DeviceMemoryOptions& options);

  Layout layout() const override { return shared_.layout->kind(); }
  bool has_host_tier() const override { return shared_.layout->has_host_tier(); }
  uint64_t capacity_bytes() const override { return shared_.layout->capacity_bytes(); }
  uint64_t granularity_bytes() const override { return shared_.layout->granularity_bytes(); }
  base::Steps persistent_steps() const override { return shared_.layout->heap_steps(); }
  bool can_page() const override { return shared_.layout->can_page(); }

  base::Result<PersistentHeap*> open_heap(SessionId session, std::string name,
                                          uint64_t promised_bytes) override;
  base::Status close_heap(PersistentHeap* heap) override;
  base::Result<Lane*> open_lane(uint32_t id, uint64_t bytes, const device::Stream& stream,
                                std::shared_ptr<base::Pieces> pieces) override;
  base::Status close_lane(Lane* lane) override;
  base::Result<ElasticRange*> open_range(PersistentHeap& heap, std::string name,
                                         uint64_t reserved_bytes) override;
  void close_range(ElasticRange* range) override;

  base::Status free(Address address) override {
    BlockOwner* owner = shared_.index.find(address);
    return owner == nullptr ? no_such_block(address) : owner->free_block(address);
  }
  bool free_at_home(Address address, const void* native, base::Status* out_status) override {
    BlockOwner* owner = shared_.index.find(address);
    if (owner == nullptr || !owner->is_home(native)) return false;
    *out_status = owner->free_block(address);
    return true;
  }
  base::Status record_use(Address address, const device::Stream& stream) override {
    BlockOwner* owner = shared_.index.find(address);
    if (owner == nullptr) return no_such_block(address);
    if (owner->home_stream() == &stream) {
      BlockInfo ignored;
      return owner->find_block(address, &ignored) ? base::Status() : no_such_block(address);
    }
    GPUSHARE_ASSIGN_OR_RETURN(const FencePtr use, shared_.fences.use_of(stream));
    return owner->add_use(address, use);
  }
  base::Result<std::shared_ptr<const void>> pin(Address address) override {
    BlockOwner* owner = shared_.index.find(address);
    if (owner == nullptr) return no_such_block(address);
    const FencePtr use = shared_.fences.pin();
    const std::shared_ptr<const void> pinned(use.get(), [use](const void*) { use->release(); });
    GPUSHARE_RETURN_IF_ERROR(owner->add_use(address, use));
    return pinned;
  }
  base::Result<BlockInfo> find(Address address) const override {
    BlockInfo info;
    if (!look_up(address, &info)) return no_such_block(address);
    return info;
  }
  bool look_up(Address address, BlockInfo* out_info) const override {
    BlockOwner* owner = shared_.index.find(address);
    return owner != nullptr && owner->find_block(address, out_info);
  }

  uint64_t trim() override {
    shared_.fences.trim();
    return shared_.mover->chunks().trim() + shared_.spill->trim() + shared_.layout->trim();
  }
  uint64_t compact() override;
  std::string report(size_t top_holders) const override;
  MemorySnapshot snapshot() const override;
  DeviceMemoryStats stats() const override;
  void reset_peak() override {
    {
      base::MutexLock lock(mutex_);
      for (LaneImpl* lane : open_lanes_) lane->tell();
    }
    shared_.hear_heaps();
    shared_.peak_bytes.store(0, std::memory_order_relaxed);
    shared_.note_peak();
  }
  std::string check() const override;

 private:
  LaneImpl* reopen_lane(uint32_t id, uint64_t bytes, const device::Stream& stream);
  void keep_closed(LaneImpl* lane);
  void drained(LaneImpl* lane);
  bool is_closed(const LaneImpl& lane) const GPUSHARE_REQUIRES(mutex_);
  static void remove(std::vector<LaneImpl*>& list, LaneImpl* lane);

  mutable Shared shared_;      // heaps and lanes tell it what they hold when somebody asks
  mutable base::Mutex mutex_;  // the lists; taken before any lock of a heap or lane
  std::vector<std::unique_ptr<PersistentHeapImpl>> heaps_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<PersistentHeapImpl*> open_heaps_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<PersistentHeapImpl*> spare_heaps_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<ElasticRange>> ranges_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<ElasticRange*> open_ranges_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<ElasticRange*> spare_ranges_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<LaneImpl>> lanes_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<LaneImpl*> open_lanes_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<LaneImpl*> closed_lanes_ GPUSHARE_GUARDED_BY(mutex_);  // with promoted blocks in them
  std::vector<LaneImpl*> spare_lanes_ GPUSHARE_GUARDED_BY(mutex_);
};

base::Status DeviceMemoryImpl::open(const DeviceMemoryOptions& options) {
  device::Device& device = shared_.device;
  const bool has_virtual = device.can(GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY);
  Layout layout = options.layout;
  if (layout == Layout::kAuto) layout = has_virtual ? Layout::kVirtual : Layout::kContiguous;
  uint64_t capacity = options.capacity_bytes;
  if (capacity == 0) {
    GPUSHARE_ASSIGN_OR_RETURN(const auto info, device.refresh_info());
    // A 64th stays free for what the driver and libraries allocate beside us.
    capacity = info.free_bytes - info.free_bytes / 64;
    if (layout == Layout::kContiguous) capacity -= std::min(capacity, AddressIndex::kGranuleBytes);
  }
  if (capacity > device.info().total_bytes)
    return {GPUSHARE_INVALID_ARGUMENT, "capacity is " + base::format_bytes(capacity) + "; device " +
                                           device.spec() + " has " +
                                           base::format_bytes(device.info().total_bytes)};
  uint64_t granule = AddressIndex::kGranuleBytes;
  if (layout == Layout::kVirtual)
    granule = std::max(options.granularity_bytes,
                       virtual_granule(device, options.granularity_bytes > 0 ? 0 : capacity));
  capacity = capacity / granule * granule;
  if (capacity == 0)
    return {GPUSHARE_INVALID_ARGUMENT,
            "capacity must be at least " + base::format_bytes(granule) + " on device " + device.spec()};
  GPUSHARE_ASSIGN_OR_RETURN(shared_.layout, layout == Layout::kVirtual
                                                ? make_virtual_layout(device, capacity, granule)
                                                : make_contiguous_layout(device, capacity));
  const Range span = shared_.layout->span();
  GPUSHARE_RETURN_IF_ERROR(shared_.index.prepare(span.base, span.bytes));
  shared_.owner = options.owner;
  shared_.mover = std::make_unique<GranuleMover>(shared_);
  shared_.spill = std::make_unique<SpillStore>(shared_);
  shared_.spill->set_limit(options.spill_limit_bytes);
  if (options.record_allocations) shared_.recorder.enable(device, options.max_recorded_events);
  return {};
}

base::Result<PersistentHeap*> DeviceMemoryImpl::open_heap(SessionId session, std::string name,
                                                          uint64_t promised_bytes) {
  PersistentHeapImpl* heap = nullptr;
  {
    base::MutexLock lock(mutex_);
    if (spare_heaps_.empty()) {
      heaps_.push_back(std::make_unique<PersistentHeapImpl>(shared_));
      spare_heaps_.push_back(heaps_.back().get());
    }
    heap = spare_heaps_.back();
    spare_heaps_.pop_back();
  }
  // Without the lock: it may call the driver, and wait for it.
  auto status = heap->open(session, std::move(name), promised_bytes);
  base::MutexLock lock(mutex_);
  if (!status.ok()) {
    spare_heaps_.push_back(heap);
    return status;
  }
  heap->position = open_heaps_.size();
  open_heaps_.push_back(heap);
  return static_cast<PersistentHeap*>(heap);
}

base::Status DeviceMemoryImpl::close_heap(PersistentHeap* heap) {
  if (heap == nullptr) return {GPUSHARE_INVALID_HANDLE, "the persistent heap is null"};
  PersistentHeapImpl* const closing = &heap->impl();
  FenceList fences;
  std::vector<LaneImpl*> lanes, borrowers;
  const bool promoted = closing->stats().promoted_bytes > 0;
  for (ElasticRange* range : closing->ranges()) close_range(range);
  GPUSHARE_RETURN_IF_ERROR(closing->close(&fences, &borrowers));
  if (promoted) {  // else no lane has blocks of it
    base::MutexLock lock(mutex_);
    lanes = open_lanes_;
    lanes.insert(lanes.end(), closed_lanes_.begin(), closed_lanes_.end());
  }
  for (LaneImpl* lane : lanes) lane->free_promoted_of(*closing, fences);
  for (LaneImpl* lane : borrowers) lane->return_loan(*closing, true);
  for (LaneImpl* lane : lanes) lane->resize_unpinned();
  base::MutexLock lock(mutex_);
  open_heaps_[closing->position] = open_heaps_.back();
  open_heaps_[closing->position]->position = closing->position;
  open_heaps_.pop_back();
  spare_heaps_.push_back(closing);
  return {};
}

void DeviceMemoryImpl::remove(std::vector<LaneImpl*>& list, LaneImpl* lane) {
  list[lane->position] = list.back();
  list[lane->position]->position = lane->position;
  list.pop_back();
}

base::Result<Lane*> DeviceMemoryImpl::open_lane(uint32_t id, uint64_t bytes, const device::Stream& stream,
                                                std::shared_ptr<base::Pieces> pieces) {
  if (pieces == nullptr)
    if (LaneImpl* reopened = reopen_lane(id, bytes, stream)) return static_cast<Lane*>(reopened);
  LaneImpl* lane = nullptr;
  {
    base::MutexLock lock(mutex_);
    if (spare_lanes_.empty()) {
      lanes_.push_back(std::make_unique<LaneImpl>(shared_, [this](LaneImpl* l) { drained(l); }));
      spare_lanes_.push_back(lanes_.back().get());
    }
    lane = spare_lanes_.back();
    spare_lanes_.pop_back();
  }
  auto status = lane->open(id, bytes, stream, std::move(pieces));
  base::MutexLock lock(mutex_);
  if (!status.ok()) {
    spare_lanes_.push_back(lane);
    return status;
  }
  lane->position = open_lanes_.size();
  open_lanes_.push_back(lane);
  return static_cast<Lane*>(lane);
}

// The bytes of a closed lane that kept blocks pin are promised to nobody, and a new lane may need them: the new
// lane takes the range over, with its blocks. Null if there is no such range, or it cannot grow to `bytes`.
LaneImpl* DeviceMemoryImpl::reopen_lane(uint32_t id, uint64_t bytes, const device::Stream& stream) {
  if (layout() != Layout::kVirtual) return nullptr;  // elsewhere a pinned lane has no room to grow
  LaneImpl* lane = nullptr;
  {
    base::MutexLock lock(mutex_);
    for (LaneImpl* closed : closed_lanes_)
      if (!closed->reclaiming && closed->fits(bytes) &&
          (lane == nullptr || closed->pinned_bytes() > lane->pinned_bytes()))
        lane = closed;
    if (lane == nullptr) return nullptr;
    remove(closed_lanes_, lane);
    // The lane is in one of the two lists at all times, because its sessions may close while the lock is not held.
    lane->position = open_lanes_.size();
    open_lanes_.push_back(lane);
  }
  if (lane->open(id, bytes, stream, nullptr).ok()) return lane;
  keep_closed(lane);
  return nullptr;
}

void DeviceMemoryImpl::keep_closed(LaneImpl* lane) {
  {
    base::MutexLock lock(mutex_);
    remove(open_lanes_, lane);
    lane->position = closed_lanes_.size();
    closed_lanes_.push_back(lane);
  }
  drained(lane);  // at once, if it holds no block
}

base::Status DeviceMemoryImpl::close_lane(Lane* lane) {
  if (lane == nullptr) return {GPUSHARE_INVALID_HANDLE, "the lane is null"};
  LaneImpl* const closing = &lane->impl();
  const device::Stream* const stream = closing->home_stream();
  // Without the lock, since both wait for the device, and others open and close heaps and lanes meanwhile.
  GPUSHARE_RETURN_IF_ERROR(closing->close());
  keep_closed(closing);
  closing->send_closed_out(*stream);
  drained(closing);  // a function that the device waited for may have freed the last block meanwhile
  return {};
}

// A single thread takes the lane apart, without the lock, because that may wait for the device. If the lane's last block is
// freed meanwhile, the same thread looks at the lane again.
void DeviceMemoryImpl::drained(LaneImpl* lane) {
  {
    base::MutexLock lock(mutex_);
    if (!is_closed(*lane) || lane->reclaiming) return;
    lane->reclaiming = true;
  }
  for (bool gone = false;;) {
    const bool tried = lane->reclaim_closed(&gone);
    base::MutexLock lock(mutex_);
    if (tried && !gone && lane->is_drained()) continue;
    lane->reclaiming = false;
    if (!gone) return;
    remove(closed_lanes_, lane);
    lane->position = SIZE_MAX;
    spare_lanes_.push_back(lane);
    return;
  }
}

bool DeviceMemoryImpl::is_closed(const LaneImpl& lane) const {
  return lane.position < closed_lanes_.size() && closed_lanes_[lane.position] == &lane;
}

base::Result<ElasticRange*> DeviceMemoryImpl::open_range(PersistentHeap& heap, std::string name,
                                                         uint64_t reserved_bytes) {
  ElasticRange* range = nullptr;
  {
    base::MutexLock lock(mutex_);
    if (spare_ranges_.empty()) {
      ranges_.push_back(std::make_unique<ElasticRange>(shared_));
      spare_ranges_.push_back(ranges_.back().get());
    }
    range = spare_ranges_.back();
    spare_ranges_.pop_back();
  }
  const auto status = heap.impl().open_range(*range, std::move(name), reserved_bytes);
  base::MutexLock lock(mutex_);
  (status.ok() ? open_ranges_ : spare_ranges_).push_back(range);
  if (!status.ok()) return status;
  return range;
}

void DeviceMemoryImpl::close_range(ElasticRange* range) {
  range->heap().close_range(*range);
  base::MutexLock lock(mutex_);
  std::erase(open_ranges_, range);
  spare_ranges_.push_back(range);
}

uint64_t DeviceMemoryImpl::compact() {
  if (layout() != Layout::kContiguous) return 0;
  const uint64_t before = shared_.layout->largest_hole_bytes();
  std::vector<LaneImpl*> lanes;  // objects are never destroyed while there are users
  {
    base::MutexLock lock(mutex_);
    lanes = open_lanes_;
  }
  // The highest first: each lane then finds the holes above it where they are to stay.
  std::vector<std::pair<Address, LaneImpl*>> by_base;
  for (LaneImpl* lane : lanes) by_base.emplace_back(lane->base(), lane);
  std::sort(by_base.rbegin(), by_base.rend());
  for (const auto& [base, lane] : by_base) lane->move_up_if_idle();
  const uint64_t now = shared_.layout->largest_hole_bytes();
  return now - std::min(now, before);
}

std::string DeviceMemoryImpl::report(size_t top_holders) const {
  struct Holder {
    std::string name;
    uint64_t bytes;
    uint64_t promised;
    bool out;
  };
  std::vector<Holder> holders;
  std::string text;
  base::MutexLock lock(mutex_);
  text = "free " + base::format_bytes(shared_.layout->free_bytes()) + " of " +
         base::format_bytes(capacity_bytes()) + ", largest hole " +
         base::format_bytes(shared_.layout->largest_hole_bytes());
  holders.reserve(open_heaps_.size());
  for (const PersistentHeapImpl* heap : open_heaps_) {
    const HeapStats stats = heap->stats();
    holders.push_back({heap->name(), stats.live_bytes, stats.promised_bytes, heap->own_blocks_out()});
  }
  const size_t shown = std::min(top_holders, holders.size());
  std::partial_sort(holders.begin(), holders.begin() + static_cast<ptrdiff_t>(shown), holders.end(),
                    [](const Holder& a, const Holder& b) { return a.promised > b.promised; });
  if (shown > 0) text += "; sessions: ";
  for (size_t i = 0; i < shown; ++i)
    text += (i > 0 ? ", " : "") + holders[i].name + " " + base::format_bytes(holders[i].bytes) + " of " +
            base::format_bytes(holders[i].promised) + (holders[i].out ? " (paged out)" : "");
  if (holders.size() > shown) text += base::format(" and %zu more", holders.size() - shown);
  for (const ElasticRange* range : open_ranges_)
    if (const uint64_t committed = range->committed_bytes(); committed > 0)
      text += "; elastic range " + range->name() + " " + base::format_bytes(committed);
  uint64_t lane_bytes = 0;
  for (const LaneImpl* lane : open_lanes_) lane_bytes += lane->stats().size_bytes;
  for (const LaneImpl* lane : closed_lanes_) lane_bytes += lane->stats().size_bytes;
  if (lane_bytes > 0)
    text += base::format("; %zu lane%s with ", open_lanes_.size(), open_lanes_.size() == 1 ? "" : "s") +
            base::format_bytes(lane_bytes) +
            (closed_lanes_.empty()
                 ? ""
                 : base::format(" and %zu closed that promoted blocks pin", closed_lanes_.size()));
  if (const uint64_t host = shared_.spill->host_bytes(); host > 0)
    text += "; spilled to host memory " + base::format_bytes(host);
  return text;
}

MemorySnapshot DeviceMemoryImpl::snapshot() const {
  MemorySnapshot snapshot;
  snapshot.capacity_bytes = capacity_bytes();
  snapshot.layout = layout();
  {
    base::MutexLock lock(mutex_);
    for (const PersistentHeapImpl* heap : open_heaps_) heap->snapshot(&snapshot.segments);
    for (const LaneImpl* lane : open_lanes_) lane->snapshot(&snapshot.segments);
    for (const LaneImpl* lane : closed_lanes_) lane->snapshot(&snapshot.segments);
    for (const ElasticRange* range : open_ranges_) range->snapshot(&snapshot.segments);
  }
  shared_.spill->snapshot(&snapshot.segments);
  snapshot.events = shared_.recorder.events();
  return snapshot;
}

DeviceMemoryStats DeviceMemoryImpl::stats() const {
  shared_.hear_heaps();
  DeviceMemoryStats stats;
  stats.capacity_bytes = capacity_bytes();
  stats.persistent_bytes = shared_.persistent_bytes.load(std::memory_order_relaxed);
  stats.paged_out_bytes_total = shared_.paged_out_bytes.load(std::memory_order_relaxed);
  stats.paged_in_bytes_total = shared_.paged_in_bytes.load(std::memory_order_relaxed);
  stats.free_bytes = shared_.layout->free_bytes();
  stats.mapped_bytes = shared_.layout->mapped_bytes();
  base::MutexLock lock(mutex_);
  for (LaneImpl* lane : open_lanes_) {
    lane->tell();
    const LaneStats lane_stats = lane->stats();
    stats.ephemeral_bytes += lane_stats.live_bytes - lane_stats.promoted_bytes;
  }
  for (const LaneImpl* lane : closed_lanes_) stats.pinned_bytes += lane->pinned_bytes();
  stats.peak_bytes = shared_.peak_bytes.load(std::memory_order_relaxed);
  return stats;
}

std::string DeviceMemoryImpl::check() const {
  std::vector<Range> ranges;
  // Objects are never destroyed while there are users, and each is looked at without the lock, since it may be in work.
  std::vector<PersistentHeapImpl*> heaps;
  std::vector<LaneImpl*> lanes;
  std::vector<ElasticRange*> elastic;
  {
    base::MutexLock lock(mutex_);
    heaps = open_heaps_;
    lanes = open_lanes_;
    lanes.insert(lanes.end(), closed_lanes_.begin(), closed_lanes_.end());
    elastic = open_ranges_;
  }
  uint64_t lent = 0, borrowed = 0;
  for (const PersistentHeapImpl* heap : heaps) {
    if (std::string wrong = heap->check(&ranges); !wrong.empty()) return wrong;
    lent += heap->on_loan();
  }
  for (const LaneImpl* lane : lanes) {
    if (std::string wrong = lane->check(&ranges); !wrong.empty()) return wrong;
    borrowed += lane->lent_bytes();
  }
  for (const ElasticRange* range : elastic)
    if (std::string wrong = range->check(); !wrong.empty()) return wrong;
  if (lent != borrowed) return "what sessions lent is not what lanes borrowed";
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.base < b.base; });
  const Range span = shared_.layout->span();
  uint64_t sum = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    sum += ranges[i].bytes;
    if (i > 0 && ranges[i - 1].base + ranges[i - 1].bytes > ranges[i].base) return "two ranges overlap";
    if (span.bytes > 0 &&
        (ranges[i].base < span.base || ranges[i].base + ranges[i].bytes > span.base + span.bytes))
      return "a range lies outside the buffer";
  }
  if (std::string wrong = shared_.layout->check(); !wrong.empty()) return "layout: " + wrong;
  if (span.bytes > 0 && sum + shared_.layout->free_bytes() != capacity_bytes())
    return "ranges and holes do not add up";
  return shared_.spill->check();
}

}  // namespace

base::Result<std::unique_ptr<DeviceMemory>> DeviceMemory::open(device::Device& device,
                                                               const DeviceMemoryOptions& options) {
  auto memory = std::make_unique<DeviceMemoryImpl>(device);
  GPUSHARE_RETURN_IF_ERROR(memory->open(options));
  return std::unique_ptr<DeviceMemory>(std::move(memory));
}

}  // namespace gpushare::memory
