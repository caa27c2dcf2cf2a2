// Allocation, its owner, and how a session's promise grows and shrinks. memory_ladder.cpp has the further steps for an
// allocation that finds no memory.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <optional>

#include "base/round_up.hpp"
#include "base/units.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {
namespace {

constexpr uint64_t kBlockGranuleBytes = 256;

using base::round_up;

// Upper bound of the bytes that a block takes, at any place.
uint64_t footprint(uint64_t bytes, uint64_t alignment) {
  return round_up(bytes, kBlockGranuleBytes) + (alignment > kBlockGranuleBytes ? alignment : 0);
}

base::Status iteration_ended() {
  return {GPUSHARE_INVALID_STATE, "the iteration has ended"};
}

// The status of a session without a heap: it is queued, or has ended. wait_admitted() tells which.
base::Status away() {
  return {base::kAway, "the session has no memory on the device"};
}

// The bytes to ask for when a session's heap grows, in order of preference: the block and an eighth more, so that
// growth stays rare; the whole block; only what is missing beside the free bytes, which helps if the new bytes join
// them.
std::array<uint64_t, 3> growth_steps(uint64_t size, uint64_t live, uint64_t needed) {
  return {std::max(needed, size / 8), needed, live + needed > size ? live + needed - size : needed};
}

// The same for a lane. A lane grows at its end, so the free bytes at its end are part of the block's place.
std::array<uint64_t, 2> lane_growth_steps(const memory::LaneStats& stats, uint64_t missing) {
  return {std::max(missing, stats.size_bytes / 8), missing};
}

}  // namespace

base::Result<memory::Address> SessionImpl::attempt(const Attempt& wanted) {
  for (;;) {
    auto result = attempt_unmoved(wanted);
    if (result.status().code() != base::kMoving) return result;
    const GatePass pass(heap_gate_);
    if (pass) GPUSHARE_RETURN_IF_ERROR(heap_.load(std::memory_order_relaxed)->await_moves());
  }
}

base::Result<memory::Address> SessionImpl::attempt_unmoved(const Attempt& wanted) {
  if (quota_bytes_.load(std::memory_order_relaxed) == 0) return attempt_within_quota(wanted);
  // The lock is held over the allocation, too, so that two threads cannot exceed the quota together.
  const base::MutexLock lock(quota_mutex_);
  if (base::Status quota = check_quota(wanted.bytes); !quota.ok()) return quota;
  return attempt_within_quota(wanted);
}

base::Result<memory::Address> SessionImpl::attempt_within_quota(const Attempt& wanted) {
  if (wanted.lane == nullptr) {
    const GatePass pass(heap_gate_);
    if (!pass) return away();
    return heap_.load(std::memory_order_relaxed)->alloc(wanted.kind, wanted.bytes, wanted.alignment);
  }
  const GatePass pass(iteration_.gate_);
  if (!pass || iteration_.serial_.load(std::memory_order_relaxed) != wanted.serial) return iteration_ended();
  return wanted.lane->memory.load(std::memory_order_relaxed)->alloc(wanted.bytes, wanted.alignment);
}

base::Result<memory::Address> SessionImpl::attempt_spilled(const Attempt& wanted) {
  if (wanted.lane == nullptr) {
    const GatePass pass(heap_gate_);
    if (!pass) return away();
    return heap_.load(std::memory_order_relaxed)->alloc_spilled(wanted.kind, wanted.bytes, wanted.alignment);
  }
  const GatePass pass(iteration_.gate_);
  if (!pass || iteration_.serial_.load(std::memory_order_relaxed) != wanted.serial) return iteration_ended();
  auto block =
      wanted.lane->memory.load(std::memory_order_relaxed)->alloc_spilled(wanted.bytes, wanted.alignment);
  if (block.ok()) spilled_ephemeral_.fetch_add(footprint(wanted.bytes, wanted.alignment));
  return block;
}

base::Status SessionImpl::check_quota(uint64_t bytes) {
  uint64_t used = range_promise_.load(std::memory_order_relaxed);
  if (const GatePass pass(heap_gate_); pass)
    used += heap_.load(std::memory_order_relaxed)->stats().live_bytes;
  if (const GatePass pass(iteration_.gate_); pass) {
    const memory::LaneStats lane =
        iteration_.lane_.load(std::memory_order_relaxed)->memory.load(std::memory_order_relaxed)->stats();
    used += lane.live_bytes - std::min(lane.live_bytes, lane.promoted_bytes);
  }
  const uint64_t quota = quota_bytes_.load(std::memory_order_relaxed);
  if (quota == 0 || (bytes <= quota && used <= quota - bytes)) return {};
  return {GPUSHARE_QUOTA_EXCEEDED, "session '" + name() + "' asked for " + base::format_bytes(bytes) +
                                       " and has " + base::format_bytes(used) + " of its quota of " +
                                       base::format_bytes(quota) + ". Free something, or raise quota_bytes"};
}

base::Result<memory::Address> SessionImpl::alloc(memory::Kind kind, uint64_t bytes, uint64_t alignment) {
  if (kind != memory::Kind::kModel && kind != memory::Kind::kFramework)
    return base::Status(
        GPUSHARE_INVALID_ARGUMENT,
        "a session's block is of kind model or framework; ephemeral blocks come from an iteration");
  const Attempt wanted{kind, nullptr, 0, bytes, alignment};
  for (;;) {
    auto result = attempt(wanted);
    if (result.ok()) return result;
    if (result.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY) {
      result = runtime_->ladder_.climb(*this, wanted, result.status());
    } else if (result.status().code() == GPUSHARE_QUOTA_EXCEEDED && options_.allow_spill) {
      auto spilled = attempt_spilled(wanted);
      if (spilled.ok() || spilled.status().code() == base::kAway) result = std::move(spilled);
    }
    if (result.status().code() != base::kAway) {
      runtime_->note(result.status());
      return result;
    }
    // Another try helps once the session is resident. If the session has ended, wait_admitted() says so.
    GPUSHARE_RETURN_IF_ERROR(wait_admitted(GPUSHARE_NO_TIMEOUT));
  }
}

base::Status SessionImpl::free(memory::Address address) {
  const GatePass pass(heap_gate_);
  if (!pass) return {GPUSHARE_INVALID_STATE, "session '" + name() + "' has no memory on the device"};
  return runtime_->memory_->free(address);
}

base::Result<HeldStream> SessionImpl::hold(uint64_t timeout_ns) {
  for (;;) {
    if (GatePass pass(residence_gate_); pass) {
      BooksLock lock(runtime_->mutex_);
      return HeldStream(std::move(pass), lane_->stream->device_stream());
    }
    GPUSHARE_RETURN_IF_ERROR(wait_admitted(timeout_ns));
    const base::WorkLock moved(grow_mutex_);  // a boundary that moves spilled blocks holds it
    if (!moved) return base::WorkLock::refused();
  }
}

base::Result<memory::Address> IterationImpl::alloc(uint64_t bytes, uint64_t alignment) {
  base::Result<memory::Address> result = base::Status();
  LaneSlot* lane = nullptr;
  uint64_t serial = 0;
  bool quota = false;
  {
    const GatePass pass(gate_);
    if (!pass) return iteration_ended();
    lane = lane_.load(std::memory_order_relaxed);
    serial = serial_.load(std::memory_order_relaxed);
    quota = session_.quota_bytes_.load(std::memory_order_relaxed) > 0;
    if (!quota) result = lane->memory.load(std::memory_order_relaxed)->alloc(bytes, alignment);
  }
  const Attempt wanted{memory::Kind::kEphemeral, lane, serial, bytes, alignment};
  if (quota) result = session_.attempt(wanted);
  if (result.ok()) return result;
  if (result.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY)
    return session_.runtime_->ladder_.climb(session_, wanted, result.status());
  if (result.status().code() == GPUSHARE_QUOTA_EXCEEDED && session_.options_.allow_spill)
    if (auto spilled = session_.attempt_spilled(wanted); spilled.ok()) return spilled;
  session_.runtime_->note(result.status());
  return result;
}

base::Status IterationImpl::alloc_many(std::span<const uint64_t> bytes, uint64_t alignment,
                                       memory::Address* out, size_t served) {
  for (size_t i = served; i < bytes.size(); ++i) {
    const auto block = alloc(bytes[i], alignment);
    if (block.ok()) {
      out[i] = *block;
      continue;
    }
    while (i > 0) (void)session_.runtime_->free(out[--i]);
    return block.status();
  }
  return {};
}

base::Status IterationImpl::keep(memory::Address address) {
  {
    const GatePass pass(gate_);
    if (!pass) return iteration_ended();
    LaneSlot& lane = *lane_.load(std::memory_order_relaxed);
    if (lane.memory.load(std::memory_order_relaxed)->is_shared())
      GPUSHARE_RETURN_IF_ERROR(session_.promise_own_lane());
  }
  for (bool grown = false;; grown = true) {
    base::Status status;
    {
      const GatePass pass(gate_);
      if (!pass) return iteration_ended();
      status = lane_.load(std::memory_order_relaxed)->memory.load(std::memory_order_relaxed)->keep(address);
    }
    if (status.code() != GPUSHARE_DEVICE_OUT_OF_MEMORY || grown) return status;
    const auto block = session_.runtime_->find(address);
    if (!block.ok()) return block.status();
    uint64_t seen_bytes = UINT64_MAX;  // so that the first call grows in any case
    const Stay stay(*session_.runtime_);
    if (!stay || !session_.grow_persistent(block->bytes, 0, &seen_bytes).ok()) return status;
  }
}

SessionImpl::NeedTurn::NeedTurn(SessionImpl& session) : session_(session) {
  while (session.asks_need_) session.runtime_->mutex_.wait(session.need_asked_);
  session.asks_need_ = true;
}

base::Status SessionImpl::promise(uint64_t heap_bytes, uint64_t range_bytes, uint64_t ephemeral_bytes,
                                  const std::function<base::Status()>& apply) {
  RuntimeImpl& runtime = *runtime_;
  Outbox outbox(runtime);
  Section lock(runtime);
  std::optional<NeedTurn> alone(*this);
  GPUSHARE_RETURN_IF_ERROR(runtime.check_live(*this));
  const uint64_t before_p = persistent_promise_, before_e = ephemeral_promise_;
  const uint64_t persistent_bytes = std::max(heap_bytes + range_promise_, before_p) + range_bytes;
  ephemeral_bytes = std::max(ephemeral_bytes, before_e);
  const uint64_t quota =
      sched::quota_in_granules(quota_bytes_.load(std::memory_order_relaxed), runtime.granularity_bytes_);
  // Under a quota, E falls when P grows: iterations could not use those bytes beside the larger P.
  if (persistent_bytes > before_p && persistent_bytes <= quota)
    ephemeral_bytes = std::min(ephemeral_bytes, runtime.lane_beside(quota, persistent_bytes));
  if (persistent_bytes != before_p || ephemeral_bytes != before_e) {
    GPUSHARE_RETURN_IF_ERROR(
        runtime.authority_->set_need(id_, persistent_bytes, ephemeral_bytes, runtime.now()));
    // The answer may have been waited for without the lock.
    if (torn_down_ || runtime.collapsed_) return runtime.check_live(*this);
    if (ephemeral_promise_ < before_e && ephemeral_bytes == before_e) {  // E has fallen meanwhile
      ephemeral_bytes = ephemeral_promise_;
      (void)runtime.authority_->set_need(id_, persistent_bytes, ephemeral_bytes, runtime.now());
    }
  }
  persistent_promise_ = persistent_bytes;
  ephemeral_promise_ = ephemeral_bytes;
  alone.reset();
  // Promised bytes may be on their way back from others.
  runtime.actions_.run(true, outbox);
  GPUSHARE_RETURN_IF_ERROR(runtime.check_live(*this));  // others may have ended it meanwhile
  lock.unlock();
  base::Status status = apply();
  lock.lock();
  if (status.ok())
    range_promise_ += torn_down_ ? 0 : range_bytes;
  else if (!torn_down_ && !runtime.collapsed_ &&
           runtime.authority_->set_need(id_, before_p, std::min(before_e, ephemeral_promise_), runtime.now())
               .ok()) {
    persistent_promise_ = before_p;
    ephemeral_promise_ = std::min(before_e, ephemeral_promise_);
  }
  runtime.carry_out(nullptr, outbox);
  return status;
}

base::Status SessionImpl::promise_own_lane() {
  RuntimeImpl& runtime = *runtime_;
  base::Status status;
  for (bool made_room = false;; made_room = true) {
    uint64_t bytes = 0;
    {
      Outbox outbox(runtime);
      Section lock(runtime);
      GPUSHARE_RETURN_IF_ERROR(runtime.check_live(*this));
      bytes = ephemeral_promise_;
      const NeedTurn alone(*this);
      status = runtime.authority_->needs_own_lane(id_, runtime.now());
      if (status.ok()) leaves_shared_lane_ = true;
      if (made_room) runtime.authority_->room_used(id_, runtime.now());
      runtime.carry_out(nullptr, outbox);
    }
    if (status.code() != GPUSHARE_DEVICE_OUT_OF_MEMORY || made_room ||
        !runtime.ladder_.make_room(*this, {options_.cls, false, false}, sched::Giver::kSessions,
                                   base::round_up(bytes, runtime.granularity_bytes_),
                                   base::Deadline::after(GPUSHARE_NO_TIMEOUT)))
      break;
  }
  return status.with_context("session '" + name() +
                             "' shares its lane with other processes; keeping a block of it");
}

base::Status SessionImpl::grow_persistent(uint64_t bytes, uint64_t alignment, uint64_t* seen_bytes) {
  const base::WorkLock growing(grow_mutex_);
  if (!growing) return base::WorkLock::refused();
  memory::HeapStats stats;
  {
    const GatePass pass(heap_gate_);
    if (!pass) return {GPUSHARE_INVALID_STATE, "session '" + name() + "' has no memory on the device"};
    stats = heap_.load()->stats();
  }
  if (stats.promised_bytes > std::exchange(*seen_bytes, stats.promised_bytes)) return {};
  if (stats.lent_bytes > stats.promoted_bytes) {
    // Lanes still hold bytes that were lent for kept blocks which are gone. They are fetched before more is promised.
    const GatePass pass(heap_gate_);
    if (pass && heap_.load()->resize(stats.promised_bytes).ok() &&
        heap_.load()->stats().lent_bytes < stats.lent_bytes)
      return {};
  }
  base::Status status;
  const uint64_t needed = footprint(bytes, alignment);
  for (const uint64_t step : growth_steps(stats.promised_bytes, stats.live_bytes, needed)) {
    if (step > runtime_->memory_->capacity_bytes())
      return {GPUSHARE_EXCEEDS_CAPACITY, "it would not fit an empty device"};
    const uint64_t wanted = runtime_->persistent_steps_.round_up(stats.promised_bytes + step);
    status = promise(wanted, 0, 0, [&]() -> base::Status {
      const GatePass pass(heap_gate_);
      if (!pass) return {GPUSHARE_INVALID_STATE, "session '" + name() + "' has ended"};
      // Free bytes at the end go first, so that what comes back in their place is one piece.
      if (step < needed) (void)heap_.load()->resize(stats.live_bytes);
      base::Status resized = runtime_->ladder_.place([&] { return heap_.load()->resize(wanted); });
      if (!resized.ok() && step < needed) (void)heap_.load()->resize(stats.promised_bytes);
      return resized;
    });
    if (status.ok()) {
      *seen_bytes = wanted;
      return status;
    }
  }
  return status;
}

void SessionImpl::shrink_persistent(uint64_t persistent_bytes, uint64_t least_ephemeral) {
  if (const base::WorkLock growing(grow_mutex_); growing)
    shrink_persistent_alone(persistent_bytes, least_ephemeral);
}

void SessionImpl::shrink_persistent_alone(uint64_t persistent_bytes, uint64_t least_ephemeral) {
  {
    const GatePass pass(heap_gate_);
    if (!pass) return;
    memory::PersistentHeap& heap = *heap_.load();
    if (heap.stats().promised_bytes > persistent_bytes && !heap.resize(persistent_bytes).ok()) return;
    // A boundary may have sent granules out meanwhile.
    persistent_bytes = std::min(persistent_bytes, heap.stats().promised_bytes);
  }
  runtime_->ladder_.give_back();
  Outbox outbox(*runtime_);
  Section lock(*runtime_);
  if (!runtime_->check_live(*this).ok()) return;
  persistent_bytes += range_promise_;
  const uint64_t ephemeral_bytes = std::max(ephemeral_promise_, least_ephemeral);
  if (runtime_->authority_->set_need(id_, persistent_bytes, ephemeral_bytes, runtime_->now()).ok()) {
    persistent_promise_ = persistent_bytes;
    ephemeral_promise_ = ephemeral_bytes;
  }
  runtime_->carry_out(nullptr, outbox);
}

base::Status SessionImpl::grow_range(uint64_t bytes, const std::function<base::Status()>& apply) {
  base::Status status = promise(0, bytes, 0, apply);
  if (status.code() != GPUSHARE_QUOTA_EXCEEDED) return status;
  uint64_t live_bytes = 0;
  {
    const GatePass pass(heap_gate_);
    if (!pass) return status;
    live_bytes = heap_.load()->stats().live_bytes;
  }
  shrink_persistent_alone(runtime_->persistent_steps_.round_up(live_bytes));
  return promise(0, bytes, 0, apply);
}

void SessionImpl::shrink_range(uint64_t bytes) {
  RuntimeImpl& runtime = *runtime_;
  Outbox outbox(runtime);
  Section lock(runtime);
  if (torn_down_ || runtime.collapsed_) return;
  range_promise_ -= bytes;
  // A need that does not grow is never refused.
  if (runtime.authority_->set_need(id_, persistent_promise_ - bytes, ephemeral_promise_, runtime.now()).ok())
    persistent_promise_ -= bytes;
  runtime.carry_out(nullptr, outbox);
}

base::Status SessionImpl::grow_ephemeral(const Attempt& wanted, uint64_t* seen_bytes) {
  const base::WorkLock growing(grow_mutex_);
  if (!growing) return base::WorkLock::refused();
  RuntimeImpl& runtime = *runtime_;
  LaneSlot& lane = *wanted.lane;
  const uint64_t granularity = runtime.memory_->granularity_bytes();
  memory::LaneStats stats;
  const auto measure = [&]() -> base::Status {
    const GatePass pass(iteration_.gate_);
    if (!pass || iteration_.serial_.load() != wanted.serial) return iteration_ended();
    stats = lane.memory.load()->stats();
    return {};
  };
  GPUSHARE_RETURN_IF_ERROR(measure());
  if (stats.size_bytes > std::exchange(*seen_bytes, stats.size_bytes)) return {};
  if (const uint64_t lent = stats.lent_bytes; stats.promoted_bytes >= lent + granularity) {
    // Room beside kept blocks that the last boundary could not add without waiting for the device.
    GPUSHARE_RETURN_IF_ERROR(runtime.lanes_.reapply_size(lane));
    GPUSHARE_RETURN_IF_ERROR(measure());
    if (stats.lent_bytes > lent) return {};
  }
  const uint64_t needed = footprint(wanted.bytes, wanted.alignment);
  uint64_t missing = std::max<uint64_t>(needed - std::min(needed, stats.tail_bytes), 1);
  {
    const GatePass pass(iteration_.gate_), heap(heap_gate_);
    if (pass && heap && iteration_.serial_.load() == wanted.serial &&
        lane.memory.load()->gather(*heap_.load(), needed, &missing))
      return {};
  }
  base::Status status;
  for (const uint64_t step : lane_growth_steps(stats, missing)) {
    if (step > runtime.memory_->capacity_bytes())
      return {GPUSHARE_EXCEEDS_CAPACITY, "it would not fit an empty device"};
    const uint64_t size = round_up(stats.size_bytes + step, granularity);
    const auto apply = [&]() -> base::Status {
      GPUSHARE_RETURN_IF_ERROR(runtime.lanes_.ensure_size(lane, size));
      GPUSHARE_RETURN_IF_ERROR(measure());
      if (stats.size_bytes >= size) return {};
      return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
              base::format("lane %u cannot grow where it lies while an iteration runs", lane.id)};
    };
    status = promise(0, 0, size, apply);
    if (status.code() == GPUSHARE_QUOTA_EXCEEDED) status = trade_for_quota(size, apply, std::move(status));
    *seen_bytes = stats.size_bytes;
    if (status.ok() || status.code() == GPUSHARE_INVALID_STATE) return status;
  }
  return borrow_free(wanted, stats, missing, std::move(status));
}

// On the contiguous layout, where nothing can be borrowed, free bytes of P that are in the way of the quota become E.
base::Status SessionImpl::trade_for_quota(uint64_t ephemeral_bytes,
                                          const std::function<base::Status()>& apply, base::Status why) {
  if (runtime_->memory_->layout() == memory::Layout::kVirtual) return why;
  const uint64_t granule = runtime_->granularity_bytes_;
  const uint64_t quota = sched::quota_in_granules(quota_bytes_.load(std::memory_order_relaxed), granule);
  memory::HeapStats stats;
  {
    const GatePass pass(heap_gate_);
    if (!pass) return why;
    stats = heap_.load()->stats();
  }
  const uint64_t others = ephemeral_bytes + range_promise_;
  const uint64_t leaves = (quota - std::min(quota, others)) / granule * granule;
  if (leaves < stats.live_bytes || leaves >= stats.promised_bytes) return why;
  uint64_t before = 0;
  {
    BooksLock lock(runtime_->mutex_);
    before = persistent_promise_ - range_promise_;
    // If the lane cannot grow, its bytes stay promised to it until the iteration ends, and P must fit beside them.
    const uint64_t lane_bytes = runtime_->authority_->lane_bytes(lane_->id);
    if (runtime_->free_bytes() < ephemeral_bytes - std::min(ephemeral_bytes, lane_bytes)) return why;
  }
  shrink_persistent_alone(leaves);
  const base::Status traded = promise(0, 0, ephemeral_bytes, apply);
  if (traded.ok()) return traded;
  (void)promise(before, 0, 0, [&]() -> base::Status {
    const GatePass pass(heap_gate_);
    if (!pass) return why;
    return runtime_->ladder_.place([&] { return heap_.load()->resize(stats.promised_bytes); });
  });
  return traded;
}

// The borrowed bytes of P stay promised, and are the heap's again at the iteration's end. If P were lowered for a
// larger E instead, they would be lost for good.
base::Status SessionImpl::borrow_free(const Attempt& wanted, const memory::LaneStats& stats, uint64_t missing,
                                      base::Status why) {
  if ((why.code() != GPUSHARE_QUOTA_EXCEEDED && why.code() != GPUSHARE_DEVICE_OUT_OF_MEMORY) ||
      runtime_->memory_->layout() != memory::Layout::kVirtual)
    return why;
  const uint64_t granule = runtime_->granularity_bytes_;
  missing = round_up(missing, granule);
  uint64_t promised = 0;  // what the device can promise in addition to the free bytes of P
  if (why.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY) {
    BooksLock lock(runtime_->mutex_);
    promised = std::min(missing, runtime_->free_bytes() / granule * granule);
  }
  {
    const GatePass pass(iteration_.gate_), heap(heap_gate_);
    if (!pass || !heap || iteration_.serial_.load() != wanted.serial) return iteration_ended();
    if (wanted.lane->memory.load()->borrow_free(*heap_.load(), missing - promised) < missing - promised)
      return why;
  }
  if (promised == 0) return {};
  const uint64_t size = stats.size_bytes + promised;
  return promise(0, 0, size, [&] { return runtime_->lanes_.ensure_size(*wanted.lane, size); });
}

void SessionImpl::shrink_ephemeral(uint64_t ephemeral_bytes) {
  const base::WorkLock growing(grow_mutex_);
  if (!growing) return;
  RuntimeImpl& runtime = *runtime_;
  Outbox outbox(runtime);
  Section lock(runtime);
  if (!runtime.check_live(*this).ok() || ephemeral_promise_ <= ephemeral_bytes ||
      runtime.sessions_.profiled() == this)
    return;
  if (runtime.authority_->set_need(id_, persistent_promise_, ephemeral_bytes, runtime.now()).ok())
    ephemeral_promise_ = ephemeral_bytes;
  runtime.carry_out(nullptr, outbox);
}

base::Result<memory::Address> RuntimeImpl::alloc(const Stream* stream, memory::Kind kind, uint64_t bytes,
                                                 uint64_t alignment) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<Session> owner, find_owner(stream));
  if (owner == nullptr)
    return base::Status(GPUSHARE_NOT_FOUND,
                        "the allocation has no owner: the stream is no lane's with a session, and this "
                        "thread has no iteration "
                        "open. Pass the lane's stream, or begin an iteration on this thread");
  if (kind == memory::Kind::kEphemeral) {
    auto result = owner->alloc_ephemeral(bytes, alignment);
    if (result.ok() || result.status().code() != GPUSHARE_INVALID_STATE) return result;
    kind = memory::Kind::kFramework;  // between iterations
  }
  return owner->alloc(kind, bytes, alignment);
}

base::Status RuntimeImpl::free(memory::Address address) {
  const GatePass pass(memory_gate_.mine());
  if (!pass) return {GPUSHARE_INVALID_STATE, "the runtime is closed"};
  return memory_->free(address);
}

bool RuntimeImpl::free_at_home(memory::Address address, const void* native, base::Status* out_status) {
  const GatePass pass(memory_gate_.mine());
  return pass && memory_->free_at_home(address, native, out_status);
}

base::Status RuntimeImpl::record_use(memory::Address address, const Stream& stream) {
  base::Status status;
  {
    GPUSHARE_ASSIGN_OR_RETURN(const HeldStream used, stream.hold());
    const GatePass pass(memory_gate_.mine());
    if (!pass) return {GPUSHARE_INVALID_STATE, "the runtime is closed"};
    status = memory_->record_use(address, *used);
  }
  note(status);
  return status;
}

base::Result<std::shared_ptr<const void>> RuntimeImpl::pin(memory::Address address) {
  const GatePass pass(memory_gate_.mine());
  if (!pass) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  return memory_->pin(address);
}

base::Result<memory::BlockInfo> RuntimeImpl::find(memory::Address address) {
  const GatePass pass(memory_gate_.mine());
  if (!pass) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  return memory_->find(address);
}

bool RuntimeImpl::look_up(memory::Address address, memory::BlockInfo* out_info) {
  const GatePass pass(memory_gate_.mine());
  return pass && memory_->look_up(address, out_info);
}

}  // namespace gpushare::executor
