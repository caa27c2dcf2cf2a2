// Spilled blocks of a session at its boundaries: what its quota has no room for, or a guaranteed session asks for, goes out to host
// memory; what has room comes home. The device bytes of blocks that came home are a part of the session's P, beside its heap and its
// elastic ranges. A boundary moves no more bytes and for no longer than the runtime's settings say, so whoever waits for the lane waits
// no longer than that.
//
// Against going to and fro: a session that was sent out rests for 8 boundaries before it comes home, twice as many each time it happens
// again, up to 256; 256 boundaries without it count as calm. One that found no room tries again after 4.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>

#include "base/log.hpp"
#include "base/round_up.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {
namespace {

constexpr uint32_t kFirstRest = 8, kLongestRest = 256, kCalmBoundaries = 256, kNoRoomRest = 4;

// What the session cannot live with; anything else leaves its blocks where they are, and is tried again.
base::Status fatal(const base::Status& status) {
  if (status.ok()) return {};
  base::log(base::kInfo, status.to_string());
  return status.code() == GPUSHARE_DEVICE_LOST || status.code() == GPUSHARE_INTERNAL ? status
                                                                                     : base::Status();
}

}  // namespace

base::Status SessionImpl::settle_spilled(LaneSlot& lane) {
  memory::PersistentHeap& heap = *heap_.load(std::memory_order_relaxed);
  if (home_promise_ == 0 && heap.away_bytes() == 0 && spilled_ephemeral_ == 0) return {};
  const std::unique_lock growing(grow_mutex_, std::try_to_lock);
  // Somebody fills its memory between iterations: at the next boundary.
  if (!growing.owns_lock() || !residence_gate_.try_close()) return {};
  struct Reopen {
    ~Reopen() { gate.open(); }
    Gate& gate;
  };
  const Reopen reopening{residence_gate_};
  if (home_rest_ > 0) --home_rest_;
  if (sent_out_ > 0 && ++calm_ > kCalmBoundaries) sent_out_ = 0;
  RuntimeImpl& runtime = *runtime_;
  // Blocks were freed, or a page-out sent them out.
  if (const uint64_t home = heap.settle_home(); home < home_promise_) {
    shrink_range(home_promise_ - home);
    home_promise_ = home;
  }
  uint64_t above = asked_home_;
  if (const uint64_t quota = quota_bytes_.load(std::memory_order_relaxed); quota > 0) {
    const memory::HeapStats stats = heap.stats();
    const uint64_t unused = stats.promised_bytes - std::min(stats.promised_bytes, stats.live_bytes);
    BooksLock lock(runtime.mutex_);
    const uint64_t promised = persistent_promise_ + ephemeral_promise_;
    const uint64_t allowed = sched::quota_in_granules(quota, runtime.granularity_bytes_) + unused;
    above = std::max(above, promised - std::min(promised, allowed));
  }
  if (above > 0 && home_promise_ > 0) return send_out(lane, above);
  asked_home_ = 0;
  if (const uint64_t missing = spilled_ephemeral_.exchange(0); missing > 0) {
    const uint64_t size =
        base::round_up(lane.applied_bytes.load() + missing, runtime.memory_->granularity_bytes());
    // If there is no room, the iteration spills again.
    (void)promise(0, 0, size, [&] { return runtime.lanes_.ensure_size(lane, size); });
  }
  return home_rest_ == 0 && heap.away_bytes() > 0 ? come_home(lane) : base::Status();
}

base::Status SessionImpl::send_out(LaneSlot& lane, uint64_t bytes) {
  RuntimeImpl& runtime = *runtime_;
  const uint64_t granule = runtime.granularity_bytes_;
  uint64_t moved = 0;
  const base::Status status = heap_.load()->move_spilled(
      false, std::max(granule, std::min(base::round_up(bytes, granule), runtime.spill_move_bytes_)),
      runtime.spill_move_ns_, lane.stream->device_stream(), &moved);
  if (moved > 0) {
    runtime.ladder_.give_back();
    shrink_range(moved);
    home_promise_ -= moved;
    asked_home_ -= std::min(asked_home_.load(), moved);
    home_rest_ = std::min(kLongestRest, kFirstRest << std::min(sent_out_, 5u));
    ++sent_out_;
    calm_ = 0;
  }
  return fatal(status);
}

base::Status SessionImpl::come_home(LaneSlot& lane) {
  RuntimeImpl& runtime = *runtime_;
  memory::PersistentHeap& heap = *heap_.load();
  const uint64_t granule = runtime.granularity_bytes_;
  // Blocks of a granule may be small, so the bytes may lie in more granules; those come at the next boundary.
  uint64_t wanted =
      std::max(granule, std::min(heap.away_bytes(), runtime.spill_move_bytes_) / granule * granule);
  if (const uint64_t quota = quota_bytes_.load(std::memory_order_relaxed); quota > 0) {
    // Only what P and E leave of the quota: a promise that passes it would take from E.
    const uint64_t most = sched::quota_in_granules(quota, granule);
    BooksLock lock(runtime.mutex_);
    wanted =
        std::min(wanted, most - std::min(most, persistent_promise_ + ephemeral_promise_)) / granule * granule;
  }
  uint64_t moved = 0;
  base::Status status, copied;
  for (uint64_t bytes = wanted; bytes > 0; bytes = bytes / 2 / granule * granule) {
    status = promise(0, bytes, 0, [&]() -> base::Status {
      copied = heap.move_spilled(true, bytes, runtime.spill_move_ns_, lane.stream->device_stream(), &moved);
      return moved > 0 ? base::Status() : base::Status(GPUSHARE_NOT_READY, "nothing came home");
    });
    if (status.ok()) {
      home_promise_ += moved;
      if (moved < bytes) shrink_range(bytes - moved);
      return fatal(copied);
    }
    if (status.code() == GPUSHARE_NOT_READY) return fatal(copied);
  }
  home_rest_ = kNoRoomRest;
  if (status.code() != GPUSHARE_DEVICE_OUT_OF_MEMORY || options_.cls != sched::SessionClass::kGuaranteed)
    return {};
  // Opportunistic sessions have what this one misses: they send it out at their next boundary.
  uint64_t missing = wanted;
  BooksLock lock(runtime.mutex_);
  for (const auto& [id, session] : runtime.sessions_) {
    if (missing == 0) break;
    if (session->options_.cls != sched::SessionClass::kOpportunistic) continue;
    const uint64_t share = std::min(missing, session->home_promise_.load());
    if (share > session->asked_home_) session->asked_home_ = share;
    missing -= share;
  }
  return {};
}

}  // namespace gpushare::executor
