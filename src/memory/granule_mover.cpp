// SPDX-License-Identifier: Apache-2.0
#include "memory/granule_mover.hpp"

#include <algorithm>
#include <mutex>

#include <absl/cleanup/cleanup.h>

#include "base/units.hpp"
#include "memory/spill.hpp"

namespace gpushare::memory {

base::Status HostChunks::take(uint64_t bytes, std::vector<uint8_t*>* out_chunks) {
  std::vector<uint8_t*> taken;
  const uint64_t count = (bytes + kBytes - 1) / kBytes;
  {
    base::MutexLock lock(mutex_);
    while (taken.size() < count && !free_.empty()) {
      taken.push_back(free_.back());
      free_.pop_back();
    }
  }
  while (taken.size() < count) {
    auto memory = device_.host_alloc(kBytes);
    if (!memory.ok()) {
      give(taken);
      return memory.status().with_context(base::format_bytes(bytes) + " of host memory to page out to");
    }
    taken.push_back(static_cast<uint8_t*>(*memory));
  }
  *out_chunks = std::move(taken);
  return {};
}

void HostChunks::give(std::vector<uint8_t*>& chunks) {
  base::MutexLock lock(mutex_);
  free_.insert(free_.end(), chunks.begin(), chunks.end());
  chunks.clear();
}

uint64_t HostChunks::trim() {
  std::vector<uint8_t*> dropped;
  {
    base::MutexLock lock(mutex_);
    dropped.swap(free_);
  }
  for (uint8_t* chunk : dropped) {
    const base::Status ignored = device_.host_free(chunk);
  }
  return dropped.size() * kBytes;
}

base::Status HostChunks::copy(const std::vector<uint8_t*>& chunks, uint64_t at, Address device,
                              uint64_t bytes, const device::Stream& stream, bool out) {
  for (const uint64_t end = at + bytes; at < end;) {
    const uint64_t part = std::min(kBytes - at % kBytes, end - at);
    const auto host = reinterpret_cast<uintptr_t>(chunks[at / kBytes] + at % kBytes);
    GPUSHARE_RETURN_IF_ERROR(out ? stream.copy(host, device, part, GPUSHARE_COPY_DEVICE_TO_HOST)
                                 : stream.copy(device, host, part, GPUSHARE_COPY_HOST_TO_DEVICE));
    at += part;
    device += part;
  }
  return {};
}

base::Status GranuleMover::move(std::initializer_list<MovingBlocks*> owners, bool home,
                                const base::MoveBudget& budget, const FenceList& before,
                                const device::Stream& stream,
                                uint64_t* out_bytes) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  *out_bytes = 0;
  std::unique_lock<base::WorkMutex> alone(mutex_, std::defer_lock);
  if (budget.ns == base::MoveBudget::kUnlimited)
    alone.lock();
  else if (!alone.try_lock())
    return {};
  std::vector<MovableGranule> chosen;
  FenceList uses = before;
  const absl::Cleanup moved = [&owners] {
    for (MovingBlocks* owner : owners) owner->end_moves();
  };
  for (MovingBlocks* owner : owners) owner->begin_moves(home, &chosen, &uses);
  const uint64_t granule = shared_.layout->granularity_bytes();
  std::sort(chosen.begin(), chosen.end(), [home, granule](const MovableGranule& a, const MovableGranule& b) {
    if (a.last_use != b.last_use) return home ? a.last_use > b.last_use : a.last_use < b.last_use;
    if (a.live_bytes != b.live_bytes) return home ? a.live_bytes > b.live_bytes : a.live_bytes < b.live_bytes;
    return a.range.base + a.granule * granule < b.range.base + b.granule * granule;
  });
  chosen.resize(std::min(chosen.size(), budget.bytes / granule));
  if (chosen.empty()) return {};
  wait_all(uses);
  base::MovePart part(budget, shared_.device.now_ns());
  base::Status status;
  for (size_t done = 0; done < chosen.size() && status.ok();) {
    const uint64_t fits = part.next(shared_.device.now_ns(), granule) / granule;
    const size_t count = std::min({fits, RangeLayout::kMoveSlots, chosen.size() - done});
    if (count == 0) break;
    status = move_batch(&chosen[done], count, home, stream, out_bytes);
    part.moved(count * granule);
    done += count;
  }
  return status;
}

base::Status GranuleMover::begin_batch(const MovableGranule* batch, size_t count, bool home,
                                       const device::Stream& stream, size_t* out_begun,
                                       base::Status* out_copied) {
  const uint64_t bytes = shared_.layout->granularity_bytes();
  for (size_t i = 0; i < count && out_copied->ok(); ++i) {
    Address window = 0;
    const MovableGranule& granule = batch[i];
    GPUSHARE_RETURN_IF_ERROR(shared_.layout->begin_move(granule.range, granule.granule, home, i, &window));
    *out_begun = i + 1;
    if (granule.live_bytes > 0)
      *out_copied = stream.copy(window, granule.range.base + granule.granule * bytes, bytes,
                                GPUSHARE_COPY_DEVICE_TO_DEVICE);
  }
  return {};
}

base::Status GranuleMover::move_batch(const MovableGranule* batch, size_t count, bool home,
                                      const device::Stream& stream, uint64_t* out_bytes) {
  const uint64_t bytes = shared_.layout->granularity_bytes();
  base::Status above_limit;
  if (!home) count = shared_.spill->granules_within_limit(count, &above_limit);
  if (count == 0) return above_limit;
  size_t begun = 0;
  base::Status copied;
  base::Status status = begin_batch(batch, count, home, stream, &begun, &copied);
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
    batch[i].of->moved(batch[i], home, lost);
  }
  if (!copied.ok()) return copied;
  return status.ok() ? above_limit : status;
}

}  // namespace gpushare::memory
