// Lanes in memory: opens and closes them, and gives them the sizes that the scheduler promises.
// SPDX-License-Identifier: Apache-2.0
#include "executor/lane_set.hpp"

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "base/round_up.hpp"
#include "base/units.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

void LaneSet::want(uint32_t id, uint64_t bytes) {
  if (wants_.size() <= id) wants_.resize(id + 1);
  wants_[id] = bytes;
  if (LaneSlot* const slot = find(id); slot != nullptr)
    slot->want_bytes.store(bytes, std::memory_order_relaxed);
}

void LaneSet::count_flight(LaneSlot& lane, bool begins) {
  if (!begins) {
    if (--lane.in_flight > 0) return;
    flying_.back()->flying_at = lane.flying_at;
    flying_[lane.flying_at] = flying_.back();
    flying_.pop_back();
  } else if (lane.in_flight++ == 0) {
    lane.flying_at = flying_.size();
    flying_.push_back(&lane);
  }
}

base::Result<LaneSlot*> LaneSet::make_slot(uint32_t id) {
  std::vector<InFlight> ring(runtime_.depth_ + 1);
  for (InFlight& entry : ring) {
    GPUSHARE_ASSIGN_OR_RETURN(entry.start, runtime_.device_->create_event(GPUSHARE_EVENT_TIMING));
    GPUSHARE_ASSIGN_OR_RETURN(entry.end, runtime_.device_->create_event(GPUSHARE_EVENT_TIMING));
  }
  auto slot = std::make_unique<LaneSlot>(id, std::move(ring));
  GPUSHARE_ASSIGN_OR_RETURN(slot->anchor, runtime_.device_->create_event(GPUSHARE_EVENT_TIMING));
  LaneSlot* raw = slot.get();
  BooksLock lock(runtime_.mutex_);
  if (slots_.size() <= id) slots_.resize(id + 1);
  slots_[id] = std::move(slot);
  GPUSHARE_RETURN_IF_ERROR(start_threads(*raw));
  return raw;
}

base::Status LaneSet::start_threads(LaneSlot& slot) {
  LaneSlot* const lane = &slot;
  try {
    if (!slot.reaper.joinable())
      slot.reaper = base::ServiceThread([this, lane] { runtime_.reaper_.run(*lane); });
    if (have_workers_ && !slot.worker.joinable())
      slot.worker = base::ServiceThread([this, lane] { runtime_.run_worker(*lane); });
  } catch (const std::system_error& error) {
    return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY,
                        std::string("cannot start a lane's thread: ") + error.what(), error.code().value());
  }
  return {};
}

base::Status LaneSet::start_workers() {
  if (have_workers_) return {};
  have_workers_ = true;
  base::Status status;
  try {
    for (const auto& slot : slots_)
      if (status.ok() && slot != nullptr) status = start_threads(*slot);
  } catch (const std::bad_alloc&) {
    status = base::no_memory();
  }
  have_workers_ = status.ok();
  return status;
}

void LaneSet::set_stream(LaneSlot& slot, std::shared_ptr<StreamImpl> stream) {
  BooksLock lock(runtime_.mutex_);  // adopt_stream() looks at the streams of all slots
  slot.stream.swap(stream);         // the one before goes once the lock is let go
}

base::Status LaneSet::make_stream(LaneSlot& slot, uint32_t compute_units) {
  if (compute_units == 0) {
    GPUSHARE_ASSIGN_OR_RETURN(device::Stream stream, runtime_.device_->create_stream());
    set_stream(slot, std::make_shared<StreamImpl>(runtime_.shared_from_this(), std::move(stream), &slot));
    return {};
  }
  GPUSHARE_ASSIGN_OR_RETURN(const device::Device::Partition partition,
                            runtime_.device_->create_partition(compute_units));
  auto stream = runtime_.device_->create_stream_in(partition.handle);
  if (!stream.ok()) {
    const base::Status ignored = runtime_.device_->destroy_partition(partition.handle);
    return stream.status();
  }
  slot.partition = partition.handle;
  set_stream(slot, std::make_shared<StreamImpl>(runtime_.shared_from_this(), *std::move(stream), &slot));
  return {};
}

void LaneSet::drop_stream(LaneSlot& slot) {
  // Sessions that were paged out from this lane freed their blocks in the order of its stream. From now on they do not
  // use the stream, and all its work must be done first.
  (void)slot.stream->device_stream().synchronize();
  std::vector<std::shared_ptr<SessionImpl>> users;
  {
    BooksLock lock(runtime_.mutex_);
    for (const auto& [id, session] : runtime_.sessions_) {
      if (session->stream_lane_.load() != &slot) continue;
      session->stream_lane_.store(nullptr);
      users.push_back(session);
    }
  }
  for (const auto& session : users) {
    const GatePass pass(session->heap_gate_);
    if (pass) session->heap_.load()->set_stream(nullptr);
  }
  for (const auto& session : users) session->heap_gate_.drain();
  runtime_.memory_gate_.drain();
  slot.stream->shut();
  set_stream(slot, nullptr);
  if (slot.partition == nullptr) return;
  const base::Status status = runtime_.device_->destroy_partition(std::exchange(slot.partition, nullptr));
  if (!status.ok()) base::log(base::kError, status.with_context("closing a lane's partition").to_string());
}

base::Status LaneSet::open(uint32_t id, uint64_t bytes, uint32_t compute_units) {
  LaneSlot* slot = find(id);
  const bool complete_slot = slot != nullptr && has_threads(*slot);
  base::Status status;
  memory::Lane* opened = nullptr;
  const std::shared_ptr<base::Pieces> pieces = runtime_.authority_->lane_pieces(id);
  {
    const Unlocked unlocked(runtime_.mutex_);
    if (!complete_slot) {
      if (slot != nullptr) {
        status = {GPUSHARE_HOST_OUT_OF_MEMORY, "the lane has no threads"};
      } else if (auto made = make_slot(id); made.ok()) {
        slot = *made;
      } else {
        status = made.status();
      }
    }
    // A slot keeps the stream of the whole device; that of a partition went when the lane closed.
    if (status.ok() && slot->stream != nullptr && compute_units > 0) drop_stream(*slot);
    if (status.ok() && slot->stream == nullptr) status = make_stream(*slot, compute_units);
    if (status.ok()) {
      status = runtime_.ladder_.place([&]() -> base::Status {
        GPUSHARE_ASSIGN_OR_RETURN(
            opened, runtime_.memory_->open_lane(id, bytes, slot->stream->device_stream(), pieces));
        return {};
      });
    }
    if (status.ok() && runtime_.record_timeline_) status = slot->stream->device_stream().record(slot->anchor);
  }
  if (slot == nullptr) {
    failure_ = status;  // for the sessions that were to be admitted to the lane
    return status;
  }
  slot->place_status = status;
  slot->chained = false;
  slot->anchor_ns = runtime_.now();
  if (!status.ok()) {
    if (opened != nullptr) {
      const Unlocked unlocked(runtime_.mutex_);
      (void)runtime_.memory_->close_lane(opened);
    }
    return status;
  }
  slot->want_bytes.store(wants_[id]);
  slot->applied_bytes.store(base::round_up(bytes, runtime_.memory_->granularity_bytes()));
  slot->memory.store(opened);
  open_.push_back(slot);
  flying_.reserve(open_.capacity());  // the end of an iteration needs no memory
  slot->opened_at = ++openings_;
  return {};
}

void LaneSet::close(LaneSlot& lane, Outbox& outbox) {
  if (lane.closes > 0) --lane.closes;
  memory::Lane* closing = lane.memory.exchange(nullptr);
  open_.erase(std::remove(open_.begin(), open_.end(), &lane), open_.end());
  lane.applied_bytes.store(0);
  outbox.sessions.push_back(lane.set_owner(nullptr));
  base::Status status;
  {
    const Unlocked unlocked(runtime_.mutex_);
    if (closing != nullptr) status = runtime_.memory_->close_lane(closing);
    if (lane.partition != nullptr) drop_stream(lane);
    runtime_.ladder_.give_back();
  }
  if (!status.ok()) base::log(base::kError, status.with_context("closing a lane").to_string());
}

base::Status LaneSet::ensure_size(LaneSlot& lane, uint64_t bytes) {
  bytes =
      base::round_up(bytes, runtime_.memory_->granularity_bytes());  // as memory and the scheduler round it
  const base::WorkLock lock(lane.size_mutex);
  if (!lock) return base::WorkLock::refused();
  memory::Lane* lane_memory = lane.memory.load();
  if (lane_memory == nullptr) return {GPUSHARE_INVALID_STATE, "the lane is closed"};
  // The promise may have been lowered since it was made: the session was cancelled or closed by another thread.
  if (bytes > lane.want_bytes.load())
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, base::format("lane %u is promised %s meanwhile, not %s", lane.id,
                                                        base::format_bytes(lane.want_bytes.load()).c_str(),
                                                        base::format_bytes(bytes).c_str())};
  if (bytes <= lane.applied_bytes.load()) return {};
  return set_size(lane, *lane_memory, bytes);
}

base::Status LaneSet::reapply_size(LaneSlot& lane) {
  const base::WorkLock lock(lane.size_mutex);
  if (!lock) return base::WorkLock::refused();
  memory::Lane* lane_memory = lane.memory.load();
  if (lane_memory == nullptr) return {GPUSHARE_INVALID_STATE, "the lane is closed"};
  return set_size(lane, *lane_memory, lane.applied_bytes.load());
}

base::Status LaneSet::set_size(LaneSlot& lane, memory::Lane& lane_memory, uint64_t bytes) {
  base::Status status = runtime_.ladder_.place([&] { return lane_memory.set_size(bytes); });
  // A size that was still to come at a boundary is gone too when the next one fails.
  lane.applied_bytes.store(status.ok() ? bytes : lane_memory.stats().size_bytes);
  return status;
}

base::Status LaneSet::apply_size(LaneSlot& lane, bool grow_on_demand) {
  const base::WorkLock lock(lane.size_mutex);
  if (!lock) return base::WorkLock::refused();
  memory::Lane* lane_memory = lane.memory.load();
  const uint64_t wanted = lane.want_bytes.load(), applied = lane.applied_bytes.load();
  if (lane_memory == nullptr || wanted == applied) return {};
  // While profiling, the promise is all that is free. Where growing is a driver's work it is done as needed,
  // elsewhere it costs nothing.
  if (grow_on_demand && wanted > applied && lane.profiling.load() &&
      runtime_.memory_->layout() == memory::Layout::kVirtual)
    return {};
  return set_size(lane, *lane_memory, wanted);
}

// Errors are ignored: if bytes are still missing, the allocation that needs them reports it.
void LaneSet::fit(LaneSlot& lane) {
  if (apply_size(lane, true).code() != GPUSHARE_DEVICE_OUT_OF_MEMORY) return;
  {
    // The bytes are promised already, but other sessions have yet to give them back.
    Outbox outbox(runtime_);
    Section lock(runtime_);
    runtime_.actions_.run(true, outbox);
  }
  if (apply_size(lane, true).code() != GPUSHARE_DEVICE_OUT_OF_MEMORY || !lane.profiling.load()) return;
  // All free bytes were promised for profiling. Where they lie in pieces (contiguous layout), only the largest piece
  // serves. The search counts whole granules and halves the range in each step, so it ends whatever the sizes are.
  const uint64_t granule = runtime_.memory_->granularity_bytes();
  const uint64_t applied = lane.applied_bytes.load(), wanted = lane.want_bytes.load();
  uint64_t fits = applied / granule, too_many = base::round_up(wanted, granule) / granule;
  while (too_many > fits + 1) {
    const uint64_t middle = fits + (too_many - fits) / 2;
    const base::Status status = ensure_size(lane, middle * granule);
    if (status.ok())
      fits = middle;
    else if (status.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY)
      too_many = middle;
    else
      return;
  }
}

}  // namespace gpushare::executor
