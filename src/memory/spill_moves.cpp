// Moves of a session's blocks between host and device memory, a granule with all its blocks at a time. A granule that
// moves is mapped at two places for a moment: its bytes are copied to the new memory through a window, which then takes
// the old one's place. So a failure at any point leaves the bytes where they were, and the addresses never change.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <mutex>

#include "memory/spill.hpp"

namespace gpushare::memory {

void SpillStore::choose(SpillOwner& tenant, bool home, uint64_t most_bytes,
                        std::vector<MovableGranule>* granules, FenceList* out_uses) {
  for (auto& pool : pools_) {
    if (pool->tenant != &tenant) continue;
    for (size_t i = 0; i < pool->granules.size(); ++i) {
      const Granule& granule = pool->granules[i];
      if (granule.where == (home ? Where::kAway : Where::kHome) && (granule.live_bytes > 0 || !home))
        granules->push_back({pool->range, i, granule.last_use, granule.live_bytes, pool.get()});
    }
  }
  const uint64_t bytes = shared_.layout->granularity_bytes();
  std::sort(granules->begin(), granules->end(),
            [home, bytes](const MovableGranule& a, const MovableGranule& b) {
              if (a.last_use != b.last_use) return home ? a.last_use > b.last_use : a.last_use < b.last_use;
              if (a.live_bytes != b.live_bytes)
                return home ? a.live_bytes > b.live_bytes : a.live_bytes < b.live_bytes;
              return a.range.base + a.granule * bytes < b.range.base + b.granule * bytes;
            });
  granules->resize(std::min(granules->size(), most_bytes / bytes));
  for (const MovableGranule& granule : *granules)
    if (granule.pool != nullptr) granule.pool->moving = true;
  for (const auto& [address, block] : blocks_)
    if (block.pool->moving) out_uses->insert(out_uses->end(), block.uses.begin(), block.uses.end());
  for (const Freed& freed : freed_)
    if (freed.pool->moving) out_uses->insert(out_uses->end(), freed.fences.begin(), freed.fences.end());
}

void SpillStore::moved(const MovableGranule& which, bool home, bool lost) {
  const uint64_t bytes = shared_.layout->granularity_bytes();
  Pool& pool = *which.pool;
  Granule& granule = pool.granules[which.granule];
  SpillOwner& tenant = *pool.tenant;
  (home ? tenant.away_bytes : tenant.home_live_bytes).fetch_sub(granule.live_bytes);
  if (granule.where == Where::kHome) tenant.home_bytes.fetch_sub(bytes);
  granule.where = lost ? Where::kNowhere : home ? Where::kHome : Where::kAway;
  if (lost) return;
  (home ? tenant.home_live_bytes : tenant.away_bytes).fetch_add(granule.live_bytes);
  if (home) tenant.home_bytes.fetch_add(bytes);
}

base::Status SpillStore::move_batch(const MovableGranule* batch, size_t count, MovingHeap* heap, bool home,
                                    const device::Stream& stream, uint64_t* out_bytes) {
  const uint64_t bytes = shared_.layout->granularity_bytes();
  base::Status status, above_limit;
  if (!home) {
    base::MutexLock lock(mutex_);
    for (; count > 0; --count) {
      const base::Status fits = check_limit(count * bytes);
      if (fits.ok()) break;
      above_limit = fits;
    }
    if (count == 0) return above_limit;
  }
  size_t begun = 0;
  base::Status copied;
  for (; begun < count && status.ok() && copied.ok(); ++begun) {
    Address window = 0;
    const MovableGranule& granule = batch[begun];
    status = shared_.layout->begin_move(granule.range, granule.granule, home, begun, &window);
    if (!status.ok()) break;
    if (granule.live_bytes > 0)
      copied = stream.copy(window, granule.range.base + granule.granule * bytes, bytes,
                           GPUSHARE_COPY_DEVICE_TO_DEVICE);
  }
  // Even after a failure: copies enqueued before it still use the windows.
  if (begun > 0) {
    const base::Status finished = stream.synchronize();
    if (copied.ok()) copied = finished;
  }
  for (size_t i = 0; i < begun; ++i) {
    bool lost = false;
    const base::Status ended =
        shared_.layout->end_move(batch[i].range, batch[i].granule, home, i, copied.ok(), &lost);
    if (status.ok()) status = ended;
    if (lost)
      status = {GPUSHARE_INTERNAL, "the device mapped no memory behind a granule: " + ended.message()};
    if (!lost && (!copied.ok() || !ended.ok())) continue;
    if (!lost) *out_bytes += bytes;
    if (batch[i].pool == nullptr) {
      heap->moved(batch[i], home, lost);
    } else {
      base::MutexLock lock(mutex_);
      moved(batch[i], home, lost);
    }
  }
  if (!copied.ok()) return copied;
  return status.ok() ? above_limit : status;
}

base::Status SpillStore::move(SpillOwner& tenant, MovingHeap* heap, bool home, uint64_t most_bytes,
                              uint64_t budget_ns, const FenceList& before, const device::Stream& stream,
                              uint64_t* out_bytes) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  *out_bytes = 0;
  std::unique_lock<base::WorkMutex> alone(move_mutex_, std::defer_lock);
  if (budget_ns == UINT64_MAX)
    alone.lock();
  else if (!alone.try_lock())
    return {};
  std::vector<MovableGranule> chosen;
  FenceList uses = before;
  if (heap != nullptr) heap->begin_moves(home, &chosen, &uses);
  {
    base::MutexLock lock(mutex_);
    sweep();
    choose(tenant, home, most_bytes, &chosen, &uses);
  }
  if (chosen.empty()) return {};
  wait_all(uses);
  base::Status status;
  const uint64_t start_ns = shared_.device.now_ns();
  size_t batch = budget_ns == UINT64_MAX ? RangeLayout::kMoveSlots : 1;
  for (size_t done = 0; done < chosen.size() && batch > 0 && status.ok();) {
    const size_t count = std::min({batch, RangeLayout::kMoveSlots, chosen.size() - done});
    status = move_batch(&chosen[done], count, heap, home, stream, out_bytes);
    done += count;
    if (budget_ns == UINT64_MAX) continue;
    const uint64_t spent_ns = shared_.device.now_ns() - start_ns;
    batch = spent_ns >= budget_ns ? 0 : (budget_ns - spent_ns) / std::max<uint64_t>(1, spent_ns / done);
  }
  base::MutexLock lock(mutex_);
  for (const MovableGranule& granule : chosen)
    if (granule.pool != nullptr) granule.pool->moving = false;
  return status;
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
      if (!block.live) return;
      for (uint64_t at = block.offset_bytes; at < block.offset_bytes + block.size_bytes;) {
        const uint64_t end = std::min(block.offset_bytes + block.size_bytes, (at / bytes + 1) * bytes);
        sums[at / bytes] += end - at;
        at = end;
      }
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
