// Limits that change at run time. The scheduler's decisions about the capacity are carried out as any other action. A
// session gives bytes above its quota back here, at its boundaries.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>

#include "base/round_up.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"
#include "client/status.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

base::Status RuntimeImpl::set_capacity(uint64_t bytes) {
  const GatePass pass(memory_gate_.mine());
  if (!pass) return {GPUSHARE_INVALID_STATE, "the runtime is closed"};
  if (shared_) return client::set_service_capacity(socket_, shared_device_, bytes);
  const uint64_t most = memory_->capacity_bytes();
  if (bytes == 0) bytes = most;
  {
    Outbox outbox(*this);
    Section lock(*this);
    GPUSHARE_RETURN_IF_ERROR(check_open());
    GPUSHARE_RETURN_IF_ERROR(authority_->set_capacity(bytes, now()));
    // Bytes above the capacity are for other programs on the device.
    ladder_.set_gives_back(bytes < most);
    outbox.memory_changed = true;
    carry_out(nullptr, outbox);
  }
  ladder_.give_back();
  return {};
}

base::Status RuntimeImpl::set_target_slowdown(double target) {
  GPUSHARE_RETURN_IF_ERROR(check_target_slowdown(target));
  BooksLock lock(mutex_);
  GPUSHARE_RETURN_IF_ERROR(check_open());
  target_slowdown_ = target;
  if (op_gate_ != nullptr)
    op_gate_->set_default_target(target > 0 ? target : sched::OpControllerOptions{}.target_slowdown);
  return {};
}

base::Status SessionImpl::set_quota(uint64_t bytes) {
  {
    BooksLock lock(runtime_->mutex_);
    GPUSHARE_RETURN_IF_ERROR(runtime_->check_live(*this));
    if (const uint64_t left = runtime_->sessions_.memory_left(this); left != UINT64_MAX) {
      if (bytes > left || left == 0)
        return {GPUSHARE_QUOTA_EXCEEDED,
                "session '" + name() + "': a quota of " + base::format_bytes(bytes) +
                    " is above what the quotas of other sessions leave of GPUSHARE_MEMORY, " +
                    base::format_bytes(left)};
      if (bytes == 0) bytes = left;
    }
    runtime_->authority_->set_quota(id_, bytes);
    own_quota_bytes_ = bytes;
    refresh_quota();
  }
  give_back_above_quota(false);
  return {};
}

// The lower of the owner's quota and the coordinator's limit.
void SessionImpl::refresh_quota() {
  uint64_t quota = own_quota_bytes_;
  if (limit_bytes_ > 0) {
    // The quota below which P and E, in whole granules, are within the limit.
    const uint64_t granule = runtime_->granularity_bytes_;
    const uint64_t below = std::max<uint64_t>(limit_bytes_ - std::min(limit_bytes_, granule), 1);
    quota = quota > 0 ? std::min(quota, below) : below;
  }
  quota_bytes_.store(quota);
  // Allocations are checked from now on, those of an open iteration too.
  if (quota > 0) {
    if (const GatePass pass(heap_gate_); pass) heap_.load()->close_door();
    if (const GatePass pass(iteration_.gate_); pass)
      iteration_.lane_.load(std::memory_order_relaxed)->memory.load(std::memory_order_relaxed)->close_door();
  }
  above_quota_.store(quota > 0, std::memory_order_relaxed);
}

void SessionImpl::set_terms(sched::SessionClass cls, uint64_t limit_bytes) {
  limit_bytes_ = limit_bytes;
  refresh_quota();
  const sched::SessionClass before = turn_class();
  class_.store(cls, std::memory_order_relaxed);
  if (runtime_->op_gate_ != nullptr && turn_class() != before)
    runtime_->op_gate_->set_class(id_, turn_class(), weight_);
}

base::Status RuntimeImpl::set_coordination(const std::optional<sched::CoordinatorOptions>& options) {
  Outbox outbox(*this);
  Section lock(*this);
  GPUSHARE_RETURN_IF_ERROR(check_open());
  GPUSHARE_RETURN_IF_ERROR(authority_->set_coordination(options, now()));
  coordinated_ = options.has_value();
  carry_out(nullptr, outbox);
  return {};
}

uint64_t SessionImpl::effective_quota_bytes() const {
  const uint64_t quota = quota_bytes_.load(std::memory_order_relaxed);
  const uint64_t promised = persistent_promise_ + ephemeral_promise_;
  return promised > sched::quota_in_granules(quota, runtime_->granularity_bytes_) ? promised : quota;
}

uint64_t SessionImpl::room_for(uint64_t bytes) const {
  const base::Steps& steps = runtime_->persistent_steps_;
  BooksLock lock(runtime_->mutex_);
  const uint64_t ranges = range_promise_,
                 heap_bytes = persistent_promise_ - std::min(persistent_promise_, ranges);
  const uint64_t grown = steps.round_up(steps.round_up(heap_bytes + bytes) + ranges);
  return grown - std::min(grown, steps.round_up(persistent_promise_));
}

// Gives free bytes of P back first, because nothing uses them; then the bytes of E that iterations cannot use any more.
void SessionImpl::give_back_above_quota(bool begins) {
  RuntimeImpl& runtime = *runtime_;
  const Stay stay(runtime);  // the iteration may have ended, so close() does not wait for it
  if (!stay) return;
  const std::unique_lock growing(grow_mutex_, std::try_to_lock);
  if (!growing.owns_lock()) return;  // at the next boundary
  const uint64_t granule = runtime.granularity_bytes_;
  uint64_t quota = 0, persistent = 0, ephemeral = 0;
  bool unplaced = false;
  const auto look = [&]() GPUSHARE_REQUIRES(books) {
    if (!runtime.check_live(*this).ok() || (open_ && !begins) || runtime.sessions_.profiled() == this)
      return false;
    // Read with the books held: a lower one that comes meanwhile sets above_quota_ again.
    quota = sched::quota_in_granules(quota_bytes_.load(std::memory_order_relaxed), granule);
    persistent = runtime.persistent_steps_.round_up(persistent_promise_);
    ephemeral = base::round_up(ephemeral_promise_, granule);
    // A session that waits has allocated nothing: its declared need is a hint and may be cut.
    unplaced = !placed_ && runtime.authority_->state(id_) == sched::SessionState::kQueued &&
               runtime.authority_->lane_of(id_) == sched::kNoLane;
    return placed_ || unplaced;
  };
  {
    BooksLock lock(runtime.mutex_);
    if (!look()) return;
    if (persistent + ephemeral <= quota) return above_quota_.store(false, std::memory_order_relaxed);
  }
  if (const GatePass pass(heap_gate_); pass) {
    memory::PersistentHeap& heap = *heap_.load();
    const uint64_t ranges = range_promise_, others = base::add_saturated(ephemeral, ranges);
    const uint64_t least = runtime.persistent_steps_.round_up(
        std::max(heap.stats().live_bytes, quota - std::min(quota, others)));
    if (least < persistent - ranges && heap.resize(least).ok()) persistent = least + ranges;
  }
  runtime.ladder_.give_back();
  const uint64_t resized = persistent;
  Outbox outbox(runtime);
  Section lock(runtime);
  if (!look()) return;
  persistent = unplaced ? std::min(persistent, quota) : resized;
  // Blocks that may move go out at boundaries; iterations need not make way for them.
  ephemeral =
      std::min(ephemeral, runtime.lane_beside(quota, persistent - std::min(persistent, movable_bytes())));
  if (runtime.authority_->set_need(id_, persistent, ephemeral, runtime.now()).ok()) {
    persistent_promise_ = persistent;
    ephemeral_promise_ = ephemeral;
    if (persistent + ephemeral <= quota) above_quota_.store(false, std::memory_order_relaxed);
  }
  runtime.carry_out(nullptr, outbox);
}

void SessionImpl::retire() {
  retired_.store(true);
  give_back_unused();
}

bool SessionImpl::at_rest() const {
  return runtime_->check_live(*this).ok() && placed_ && !open_ && granted_ == nullptr && !pull_waits_ &&
         pushes_.empty() && runtime_->authority_->state(id_) == sched::SessionState::kResident;
}

void SessionImpl::give_back_unused() {
  RuntimeImpl& runtime = *runtime_;
  const Stay stay(runtime);
  if (!stay) return;
  const std::unique_lock growing(grow_mutex_, std::try_to_lock);
  if (!growing.owns_lock()) return;  // its holder comes here afterwards
  const uint64_t granule = runtime.granularity_bytes_;
  LaneSlot* lane = nullptr;
  {
    BooksLock lock(runtime.mutex_);
    if (!at_rest()) return;
    lane = runtime.lanes_.find(runtime.authority_->lane_of(id_));
  }
  uint64_t persistent = 0, ephemeral = 0;
  if (const GatePass pass(heap_gate_); pass) {
    memory::PersistentHeap& heap = *heap_.load();
    if (!heap.give_back_free().ok()) return;  // at the end of its page-in
    const memory::HeapStats stats = heap.stats();
    persistent = stats.promised_bytes;
    // The session's kept blocks pin the lane up to the last of them, less what the session lends for them.
    memory::Lane* const lane_memory = lane != nullptr ? lane->memory.load() : nullptr;
    if (stats.promoted_bytes > 0 && lane_memory != nullptr) {
      const memory::LaneStats pinned = lane_memory->stats();
      ephemeral = base::round_up(pinned.size_bytes - std::min(pinned.size_bytes, pinned.tail_bytes), granule);
    }
  } else {
    return;
  }
  runtime.ladder_.give_back();
  Outbox outbox(runtime);
  Section lock(runtime);
  if (!runtime.check_live(*this).ok() || open_) return;
  persistent += range_promise_;
  ephemeral = std::min(ephemeral, ephemeral_promise_);
  if (persistent > persistent_promise_ ||
      (persistent == persistent_promise_ && ephemeral == ephemeral_promise_))
    return;
  // A need that does not grow is never refused.
  if (runtime.authority_->set_need(id_, persistent, ephemeral, runtime.now()).ok()) {
    persistent_promise_ = persistent;
    ephemeral_promise_ = ephemeral;
  }
  outbox.memory_changed = true;
  runtime.carry_out(nullptr, outbox);
}

}  // namespace gpushare::executor
