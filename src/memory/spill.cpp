// SPDX-License-Identifier: Apache-2.0
#include "memory/spill.hpp"

#include <algorithm>
#include <utility>

#include "base/units.hpp"

namespace gpushare::memory {

SpillStore::~SpillStore() {
  std::vector<FenceList> used;
  {
    base::MutexLock lock(mutex_);
    for (Freed& freed : freed_) used.push_back(std::move(freed.fences));
  }
  for (const FenceList& fences : used) wait_all(fences);
  base::MutexLock lock(mutex_);
  for (auto& pool : pools_) {
    pool->tenant = nullptr;  // a heap that found no memory to close in is gone, and its books with it
    release(*pool, true);
  }
}

base::Status SpillStore::check_limit(uint64_t bytes) {
  const uint64_t limit = limit_bytes_.load(std::memory_order_relaxed);
  if (limit == UINT64_MAX) return {};
  uint64_t pinned = pinned_bytes();
  if (bytes <= limit && pinned > limit - bytes) {
    shared_.layout->trim_host();
    pinned = pinned_bytes();
  }
  if (bytes <= limit && pinned <= limit - bytes) return {};
  return {GPUSHARE_HOST_OUT_OF_MEMORY,
          "spilled blocks have " + base::format_bytes(pinned) + " of host memory, and " +
              base::format_bytes(bytes) + " more would pass spill_limit_bytes, " + base::format_bytes(limit)};
}

size_t SpillStore::granules_within_limit(size_t granules, base::Status* out_status) {
  base::MutexLock lock(mutex_);
  for (; granules > 0; --granules) {
    const base::Status fits = check_limit(granules * shared_.layout->granularity_bytes());
    if (fits.ok()) break;
    *out_status = fits;
  }
  return granules;
}

uint64_t SpillStore::pinned_bytes() const {
  return plain_bytes_ + shared_.layout->host_bytes();
}

base::Result<SpillStore::Pool*> SpillStore::add_pool(SpillOwner& tenant, uint64_t bytes, bool tiered) {
  const uint64_t granule =
      tiered ? shared_.layout->granularity_bytes() : uint64_t{AddressIndex::kGranuleBytes};
  bytes = round_up(std::max(kPoolBytes, bytes), granule);
  if (!tiered) GPUSHARE_RETURN_IF_ERROR(check_limit(bytes));
  Range range;
  if (tiered) GPUSHARE_RETURN_IF_ERROR(shared_.layout->open_sparse(bytes, false, &range));
  if (tiered) bytes = range.bytes;
  HeapOptions options;
  options.capacity_bytes = bytes;
  options.granule_bytes = kBlockGranuleBytes;
  options.max_blocks = 1u << 18;
  auto heap = Heap::create(options);
  if (!heap.ok()) {
    if (tiered) shared_.layout->close_sparse(range);
    return heap.status();
  }
  std::unique_ptr<Pool> pool;
  try {
    pool.reset(
        new Pool{nullptr, range.base, bytes, std::move(*heap), range, tiered ? &tenant : nullptr, {}, false});
    if (tiered) pool->granules.resize(bytes / granule);
    pools_.reserve(pools_.size() + 1);  // a pool is 32 MiB or more: there are few
  } catch (const std::bad_alloc&) {
    if (tiered) shared_.layout->close_sparse(range);
    throw;
  }
  if (!tiered) {
    // Whole granules of the index, so that no granule has two owners.
    auto memory = shared_.device.host_alloc(bytes + AddressIndex::kGranuleBytes);
    if (!memory.ok()) return memory.status().with_context("host memory for spilled blocks");
    pool->memory = *memory;
    pool->base = round_up(reinterpret_cast<uintptr_t>(*memory), AddressIndex::kGranuleBytes);
    plain_bytes_ += bytes;
  }
  if (auto status = shared_.index.set(pool->base, bytes, this); !status.ok()) {
    release(*pool, false);
    if (status.code() == GPUSHARE_HOST_OUT_OF_MEMORY) return status;
    return base::Status(GPUSHARE_UNSUPPORTED,
                        "host memory cannot stand in for device memory here: " + status.message());
  }
  pools_.push_back(std::move(pool));
  return pools_.back().get();
}

void SpillStore::release(Pool& pool, bool indexed) {
  if (indexed) shared_.index.clear(pool.base, pool.bytes);
  if (pool.memory != nullptr) {
    const base::Status ignored = shared_.device.host_free(pool.memory);
    plain_bytes_ -= pool.bytes;
    return;
  }
  const uint64_t granule = shared_.layout->granularity_bytes();
  for (const Granule& part : pool.granules)
    if (part.where == Where::kHome && pool.tenant != nullptr)
      pool.tenant->home_bytes.fetch_sub(granule, std::memory_order_relaxed);
  shared_.layout->decommit(pool.range, 0, pool.granules.size(), {});
  shared_.layout->close_sparse(pool.range);
}

base::Status SpillStore::back(Pool& pool, uint64_t offset, uint64_t bytes, FenceList* out_busy) {
  if (pool.memory != nullptr) return {};
  const uint64_t granule = shared_.layout->granularity_bytes();
  const size_t first = offset / granule, end = (offset + bytes - 1) / granule + 1;
  uint64_t missing = 0;
  for (size_t i = first; i < end; ++i)
    if (pool.granules[i].where == Where::kNowhere) missing += granule;
  if (missing > 0) GPUSHARE_RETURN_IF_ERROR(check_limit(missing));
  for (size_t i = first; i < end; ++i) {
    if (pool.granules[i].where != Where::kNowhere) continue;
    // If the call fails half way, the granules already committed stay for the next block.
    GPUSHARE_RETURN_IF_ERROR(shared_.layout->commit_host(pool.range, i, out_busy));
    pool.granules[i].where = Where::kAway;
  }
  return {};
}

void SpillStore::count(Pool& pool, uint64_t offset, uint64_t bytes, bool lives) {
  if (pool.memory != nullptr) return;
  for_each_granule(shared_.layout->granularity_bytes(), offset, bytes, [&](size_t i, uint64_t in_it) {
    Granule& part = pool.granules[i];
    const uint64_t more = lives ? in_it : 0 - in_it;  // modulo 2^64
    part.live_bytes += more;
    if (pool.tenant != nullptr && part.where != Where::kNowhere)
      (part.where == Where::kHome ? pool.tenant->home_live_bytes : pool.tenant->away_bytes)
          .fetch_add(more, std::memory_order_relaxed);
  });
}

void SpillStore::touch(Pool& pool, uint64_t offset, uint64_t bytes) {
  if (pool.tenant == nullptr) return;
  const uint64_t granule = shared_.layout->granularity_bytes(), now = pool.tenant->tick();
  for (size_t i = offset / granule; i <= (offset + bytes - 1) / granule; ++i) pool.granules[i].last_use = now;
}

base::Result<Address> SpillStore::alloc(SpillOwner& owner, SpillOwner& tenant, Kind kind, uint64_t bytes,
                                        uint64_t alignment) {
  GPUSHARE_RETURN_IF_ERROR(check_request(bytes, alignment));
  for (;;) {
    FenceList busy;
    auto block = try_alloc(owner, tenant, kind, bytes, alignment, &busy);
    if (block.status().code() != GPUSHARE_NOT_READY) return block;
    if (base::may_not_wait()) return base::WorkLock::refused();
    wait_all(busy);
  }
}

base::Result<SpillStore::Pool*> SpillStore::find_place(SpillOwner& tenant, const Request& request,
                                                       bool tiered, BlockHandle* out_handle) {
  for (auto& pool : pools_) {
    if (pool->moving || (pool->memory == nullptr && (!tiered || pool->tenant != &tenant))) continue;
    *out_handle = pool->heap.allocate(request.bytes, request.alignment, request.tag);
    if (*out_handle) return pool.get();
  }
  GPUSHARE_ASSIGN_OR_RETURN(Pool * pool, add_pool(tenant, request.bytes, tiered));
  *out_handle = pool->heap.allocate(request.bytes, request.alignment, request.tag);
  if (*out_handle) return pool;
  return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, "no host memory for the metadata of spilled blocks");
}

base::Result<Address> SpillStore::try_alloc(SpillOwner& owner, SpillOwner& tenant, Kind kind, uint64_t bytes,
                                            uint64_t alignment, FenceList* out_busy) {
  base::MutexLock lock(mutex_);
  sweep();
  Pool* found = nullptr;
  BlockHandle handle;
  uint64_t size = 0;
  base::Status refused;  // the driver's answer when it refused to put host memory behind device addresses
  for (bool tiered = shared_.layout->has_host_tier();; tiered = false) {
    const auto place = find_place(tenant, {bytes, alignment, BlockTag::make(kind, bytes)}, tiered, &handle);
    if (!place.ok()) return refused.ok() ? place.status() : refused;
    found = *place;
    size = found->heap.size_bytes(handle);
    base::Status status = back(*found, handle.offset_bytes, size, out_busy);
    if (status.ok()) break;
    found->heap.free(handle);
    release_empty(false);
    // A driver may give such memory at first and refuse it later, and a node may be full: pinned memory does as well.
    const bool is_refusal =
        status.code() == GPUSHARE_UNSUPPORTED || status.code() == GPUSHARE_HOST_OUT_OF_MEMORY;
    if (!tiered || !is_refusal) return refused.ok() ? status : refused;
    refused = std::move(status);
  }
  const Address address = found->base + handle.offset_bytes;
  try {
    blocks_[address] = Block{found, &owner, bytes, kind, false, {}};
    of_owner_[&owner].insert(address);
  } catch (const std::bad_alloc&) {
    blocks_.erase(address);
    found->heap.free(handle);
    throw;
  }
  count(*found, handle.offset_bytes, size, true);
  touch(*found, handle.offset_bytes, size);
  owner.spilled_bytes.fetch_add(size, std::memory_order_relaxed);
  shared_.recorder.record(AllocationEvent::Action::kAlloc, kind, address, bytes, owner.stream.load(),
                          owner.session.load());
  return address;
}

base::Status SpillStore::drop(Address address, const FenceList& fences) {
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return no_such_block(address);
  found->second.uses.insert(found->second.uses.end(), fences.begin(), fences.end());
  Freed& freed = freed_.emplace_back();  // what may find no memory comes first, while the block is whole
  Block block = std::move(found->second);
  blocks_.erase(found);
  const auto owned = of_owner_.find(block.owner);
  owned->second.erase(address);
  if (owned->second.empty()) of_owner_.erase(owned);
  const uint64_t offset = address - block.pool->base;
  block.owner->spilled_bytes.fetch_sub(block.pool->heap.size_bytes(block.pool->heap.find(offset)),
                                       std::memory_order_relaxed);
  freed = {block.pool, offset, std::move(block.uses)};
  shared_.recorder.record(AllocationEvent::Action::kFree, block.kind, address, block.bytes,
                          block.owner->stream.load(), block.owner->session.load());
  return {};
}

base::Status SpillStore::free_block(Address address) {
  const device::Stream* stream = nullptr;
  {
    base::MutexLock lock(mutex_);
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return no_such_block(address);
    stream = found->second.owner->stream.load();
  }
  FenceList fences;
  if (stream != nullptr) {
    // Without the lock: a device that has no event left is waited for.
    GPUSHARE_ASSIGN_OR_RETURN(FencePtr fence, shared_.fences.mark(*stream));
    fences.push_back(std::move(fence));
  }
  base::MutexLock lock(mutex_);
  return drop(address, fences);
}

void SpillStore::free_all(SpillOwner& owner, const FenceList& fences) {
  if (owner.spilled_bytes.load(std::memory_order_relaxed) == 0) return;
  base::MutexLock lock(mutex_);
  const auto owned = of_owner_.find(&owner);
  if (owned == of_owner_.end()) return;
  const std::vector<Address> addresses(owned->second.begin(), owned->second.end());
  for (Address address : addresses) {
    const base::Status ignored = drop(address, fences);  // found: it is in the set
  }
}

void SpillStore::close(SpillOwner& tenant, const FenceList& fences) {
  free_all(tenant, fences);
  if (!shared_.layout->has_host_tier()) return;
  base::MutexLock lock(mutex_);
  for (auto& pool : pools_) {
    if (pool->tenant != &tenant) continue;
    // The bytes are promised to nobody from now on; the layout waits for the fences before others have them.
    FenceList last = fences;
    for (const Freed& freed : freed_)
      if (freed.pool == pool.get()) last.insert(last.end(), freed.fences.begin(), freed.fences.end());
    for (size_t i = 0; i < pool->granules.size(); ++i) {
      if (pool->granules[i].where != Where::kHome) continue;
      shared_.layout->decommit(pool->range, i, 1, last);
      pool->granules[i].where = Where::kNowhere;
    }
    pool->tenant = nullptr;
  }
  tenant.away_bytes.store(0);
  tenant.home_bytes.store(0);
  tenant.home_live_bytes.store(0);
  sweep();
}

base::Status SpillStore::move(Address address, SpillOwner& from, SpillOwner& to) {
  base::MutexLock lock(mutex_);
  const auto found = blocks_.find(address);
  if (found == blocks_.end() || found->second.owner != &from) return no_such_block(address);
  Block& block = found->second;
  const uint64_t size = block.pool->heap.size_bytes(block.pool->heap.find(address - block.pool->base));
  from.spilled_bytes.fetch_sub(size, std::memory_order_relaxed);
  to.spilled_bytes.fetch_add(size, std::memory_order_relaxed);
  const auto owned = of_owner_.find(&from);
  owned->second.erase(address);
  if (owned->second.empty()) of_owner_.erase(owned);
  of_owner_[&to].insert(address);
  block.owner = &to;
  block.promoted = true;
  return {};
}

base::Status SpillStore::add_use(Address address, const FencePtr& use) {
  base::MutexLock lock(mutex_);
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return no_such_block(address);
  Block& block = found->second;
  prune(block.uses);
  block.uses.push_back(use);
  touch(*block.pool, address - block.pool->base, block.bytes);
  return {};
}

bool SpillStore::find_block(Address address, BlockInfo* out_info) {
  base::MutexLock lock(mutex_);
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return false;
  const Block& block = found->second;
  *out_info = {address,
               block.bytes,
               block.kind,
               block.owner->session.load(),
               block.owner->lane,
               block.promoted,
               is_away(found->first, block)};
  return true;
}

bool SpillStore::is_away(Address address, const Block& block) const {
  if (block.pool->memory != nullptr) return true;
  const uint64_t granule = shared_.layout->granularity_bytes(), offset = address - block.pool->base;
  for (size_t i = offset / granule; i <= (offset + block.bytes - 1) / granule; ++i)
    if (block.pool->granules[i].where != Where::kHome) return true;
  return false;
}

void SpillStore::Granules::begin_moves(bool home, std::vector<MovableGranule>* out_granules,
                                       FenceList* out_uses) {
  base::MutexLock lock(store_.mutex_);
  store_.sweep();
  for (auto& pool : store_.pools_) {
    if (pool->tenant != &tenant_) continue;
    for (size_t i = 0; i < pool->granules.size(); ++i) {
      const Granule& granule = pool->granules[i];
      if (granule.where != (home ? Where::kAway : Where::kHome) || (granule.live_bytes == 0 && home))
        continue;
      out_granules->push_back({pool->range, i, granule.last_use, granule.live_bytes, this, pool.get()});
      pool->moving = true;
    }
  }
  for (const auto& [address, block] : store_.blocks_)
    if (block.pool->moving) out_uses->insert(out_uses->end(), block.uses.begin(), block.uses.end());
  for (const auto& freed : store_.freed_)
    if (freed.pool->moving) out_uses->insert(out_uses->end(), freed.fences.begin(), freed.fences.end());
}

void SpillStore::Granules::moved(const MovableGranule& which, bool home, bool lost) {
  base::MutexLock lock(store_.mutex_);
  const uint64_t bytes = store_.shared_.layout->granularity_bytes();
  Granule& granule = which.pool->granules[which.granule];
  (home ? tenant_.away_bytes : tenant_.home_live_bytes).fetch_sub(granule.live_bytes);
  if (granule.where == Where::kHome) tenant_.home_bytes.fetch_sub(bytes);
  granule.where = lost ? Where::kNowhere : home ? Where::kHome : Where::kAway;
  if (lost) return;
  (home ? tenant_.home_live_bytes : tenant_.away_bytes).fetch_add(granule.live_bytes);
  if (home) tenant_.home_bytes.fetch_add(bytes);
}

void SpillStore::Granules::end_moves() {
  base::MutexLock lock(store_.mutex_);
  for (auto& pool : store_.pools_) pool->moving = pool->moving && pool->tenant != &tenant_;
}

void SpillStore::drop_empty(SpillOwner& tenant) {
  if (tenant.home_bytes.load(std::memory_order_relaxed) == 0) return;
  base::MutexLock lock(mutex_);
  sweep();
  for (auto& pool : pools_) {
    if (pool->tenant != &tenant || pool->moving) continue;
    for (size_t i = 0; i < pool->granules.size(); ++i) {
      Granule& granule = pool->granules[i];
      if (granule.where != Where::kHome || granule.live_bytes > 0) continue;
      shared_.layout->decommit(pool->range, i, 1, {});
      granule.where = Where::kNowhere;
      tenant.home_bytes.fetch_sub(shared_.layout->granularity_bytes());
    }
  }
}

void SpillStore::sweep() {
  for (size_t i = 0; i < freed_.size();) {
    if (all_passed(freed_[i].fences)) {
      Pool& pool = *freed_[i].pool;
      count(pool, freed_[i].offset, pool.heap.size_bytes(pool.heap.find(freed_[i].offset)), false);
      pool.heap.free_at(freed_[i].offset);
      if (i + 1 != freed_.size()) freed_[i] = std::move(freed_.back());
      freed_.pop_back();
    } else {
      ++i;
    }
  }
  release_empty(false);
}

// Pools made for one large block go as soon as it does; ordinary ones stay for the next.
uint64_t SpillStore::release_empty(bool all) {
  uint64_t released = 0;
  for (size_t i = 0; i < pools_.size();) {
    Pool& pool = *pools_[i];
    const bool closed = pool.memory == nullptr && pool.tenant == nullptr;
    if (pool.heap.live_blocks() == 0 && !pool.moving && (all || closed || pool.bytes > kPoolBytes)) {
      const uint64_t before = pinned_bytes();
      const std::unique_ptr<Pool> empty = std::move(pools_[i]);
      pools_.erase(pools_.begin() + static_cast<ptrdiff_t>(i));  // first, so that no pool is released twice
      release(*empty, true);
      released += before - pinned_bytes();
    } else {
      ++i;
    }
  }
  return released;
}

uint64_t SpillStore::trim() {
  base::MutexLock lock(mutex_);
  sweep();
  return release_empty(true);
}

uint64_t SpillStore::host_bytes() const {
  base::MutexLock lock(mutex_);
  return pinned_bytes();
}

void SpillStore::snapshot(std::vector<SegmentSnapshot>* out_segments) const {
  base::MutexLock lock(mutex_);
  for (const auto& pool : pools_) {
    SegmentSnapshot segment;
    segment.address = pool->base;
    segment.bytes = pool->bytes;
    segment.name = "host memory";
    pool->heap.for_each_block([&](const HeapBlock& block) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      const auto found = blocks_.find(pool->base + block.offset_bytes);
      if (!block.live || found == blocks_.end()) return;
      const Block& b = found->second;
      segment.blocks.push_back({found->first, b.bytes, b.kind, b.owner->session.load(), b.owner->lane,
                                b.promoted, is_away(found->first, b)});
    });
    out_segments->push_back(std::move(segment));
  }
}

std::string SpillStore::check() const {
  base::MutexLock lock(mutex_);
  size_t live = 0;
  for (const auto& pool : pools_) {
    if (auto status = pool->heap.check(); !status.ok()) return "host memory: " + status.message();
    live += pool->heap.live_blocks();
  }
  if (live != blocks_.size() + freed_.size()) return "host memory: blocks do not add up";
  for (const auto& [address, block] : blocks_)
    if (!block.pool->heap.find(address - block.pool->base)) return "host memory: a block is not in its pool";
  return check_granules();
}

std::string SpillStore::check_granules() const {
  uint64_t plain = 0;
  const uint64_t bytes = shared_.layout->granularity_bytes();
  for (const auto& pool : pools_) {
    if (pool->memory != nullptr) {
      plain += pool->bytes;
      continue;
    }
    std::vector<uint64_t> sums(pool->granules.size(), 0);
    pool->heap.for_each_block([&](const HeapBlock& block) {
      if (block.live)
        for_each_granule(bytes, block.offset_bytes, block.size_bytes,
                         [&](size_t i, uint64_t in_it) { sums[i] += in_it; });
    });
    for (size_t i = 0; i < pool->granules.size(); ++i) {
      if (pool->granules[i].live_bytes != sums[i])
        return "host memory: live bytes of a granule do not add up";
      if (pool->tenant != nullptr && sums[i] > 0 && pool->granules[i].where == Where::kNowhere)
        return "host memory: a block has no memory";
    }
  }
  if (plain != plain_bytes_) return "host memory: pinned bytes do not add up";
  return {};
}

}  // namespace gpushare::memory
