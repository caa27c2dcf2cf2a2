// The moves of a session that may spill, at its boundaries. Bytes that its quota has no room for, or that a guaranteed
// session asks for, go out to host memory: granules of its heap, and spilled blocks that came home. Spilled blocks come
// home when there is room. The device bytes of spilled blocks that came home are a part of the session's P, beside its
// heap and its elastic ranges. The runtime's settings limit the bytes and the time of the moves at a boundary, because
// other sessions wait for the lane meanwhile.
//
// Two rests keep blocks from moving to and fro. A session that was sent out rests for 8 boundaries, in which the
// session that asked takes the bytes, and until the cost of its earlier moves is paid (sched/move_rest.hpp). A session
// that found no room has asked for it, and tries again after 4 boundaries.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include <absl/cleanup/cleanup.h>

#include "base/log.hpp"
#include "base/round_up.hpp"
#include "executor/internal.hpp"
#include "sched/claims.hpp"

namespace gpushare::executor {
namespace {

constexpr uint32_t kSentOutRest = 8, kNoRoomRest = 4;
// A guaranteed session that waits for others to send bytes out looks again so often. When those it asked have begun no
// iteration for so long, their blocks go out without one.
constexpr uint64_t kLookAgainNs = 1'000'000, kIdleNs = 20'000'000;

// The errors that end the session. Any other error leaves its blocks where they are, and the move is tried again.
base::Status fatal(const base::Status& status) {
  if (status.ok()) return {};
  base::log(base::kInfo, status.to_string());
  return status.code() == GPUSHARE_DEVICE_LOST || status.code() == GPUSHARE_INTERNAL ? status
                                                                                     : base::Status();
}

}  // namespace

bool SessionImpl::may_move() const {
  return options_.allow_spill && runtime_->memory_->has_host_tier();
}

uint64_t SessionImpl::movable_bytes() const {
  if (!may_move() || !placed_) return 0;
  const uint64_t heap = persistent_promise_ - std::min<uint64_t>(persistent_promise_, range_promise_);
  // A granule moves as a whole, and a small heap has none.
  const bool is_small = runtime_->persistent_steps_.round_up(heap) < runtime_->granularity_bytes_;
  return home_promise_ + (is_small ? 0 : heap);
}

base::Status SessionImpl::move_spilled(LaneSlot& lane) {
  if (moves_idle_.load()) const base::WorkLock until_moved(grow_mutex_);
  memory::PersistentHeap& heap = *heap_.load(std::memory_order_relaxed);
  if (home_promise_ == 0 && asked_out_ == 0 && heap.away_bytes() == 0 && spilled_ephemeral_ == 0 &&
      !above_quota_.load(std::memory_order_relaxed))
    return {};
  const std::unique_lock growing(grow_mutex_, std::try_to_lock);
  // Somebody fills its memory between iterations: at the next boundary.
  if (!growing.owns_lock() || !residence_gate_.try_close()) return {};
  const absl::Cleanup moved_on = [this] { residence_gate_.open(); };
  if (home_rest_ > 0) --home_rest_;
  if (out_rest_ > 0) --out_rest_;
  RuntimeImpl& runtime = *runtime_;
  // Blocks were freed, or a page-out sent them out.
  if (heap.release_home() < home_promise_) claim_what_it_has(0);
  uint64_t above = 0;
  {
    BooksLock lock(runtime.mutex_);
    above = std::min(asked_out_.load(), movable_bytes());
    const uint64_t quota =
        sched::quota_in_granules(quota_bytes_.load(std::memory_order_relaxed), runtime.granularity_bytes_);
    const uint64_t promised = persistent_promise_ + ephemeral_promise_;
    above = std::max(above, std::min(movable_bytes(), promised - std::min(promised, quota)));
  }
  if (above > 0) return out_rest_ == 0 ? send_out(lane.stream->device_stream(), above) : base::Status();
  asked_out_ = 0;
  if (const uint64_t missing = spilled_ephemeral_.exchange(0); missing > 0) {
    const uint64_t size =
        base::round_up(lane.applied_bytes.load() + missing, runtime.memory_->granularity_bytes());
    // If there is no room, the iteration spills again.
    (void)promise(0, 0, size, [&] { return runtime.lanes_.ensure_size(lane, size); });
  }
  // Nothing comes home while a guaranteed session waits for what opportunistic ones send out.
  if (home_rest_ > 0 || heap.away_bytes() == 0 || !move_rest_.may_come_home(runtime.now()) ||
      (runtime.askers_ > 0 && !guaranteed()))
    return {};
  return come_home(lane);
}

// P becomes what its heap, what came home and its elastic ranges have; `extra` of range_promise_ is for none of them.
void SessionImpl::claim_what_it_has(uint64_t extra) {
  const memory::HeapStats stats = heap_.load()->stats();
  RuntimeImpl& runtime = *runtime_;
  Outbox outbox(runtime);
  Section lock(runtime);
  if (torn_down_ || runtime.collapsed_) return;
  range_promise_ -= extra + home_promise_ - std::min(home_promise_.load(), stats.home_bytes);
  range_promise_ += stats.home_bytes - std::min(home_promise_.load(), stats.home_bytes);
  home_promise_ = stats.home_bytes;
  const uint64_t persistent = stats.promised_bytes + range_promise_;
  // A need that does not grow is never refused.
  if (persistent < persistent_promise_ &&
      runtime.authority_->set_need(id_, persistent, ephemeral_promise_, runtime.now()).ok())
    persistent_promise_ = persistent;
  runtime.carry_out(nullptr, outbox);
}

base::Status SessionImpl::send_out(const device::Stream& stream, uint64_t bytes) {
  RuntimeImpl& runtime = *runtime_;
  const uint64_t granule = runtime.granularity_bytes_;
  uint64_t moved = 0;
  const uint64_t began_ns = runtime.now();
  const base::Status status = heap_.load()->move_spilled(
      false, std::max(granule, std::min(base::round_up(bytes, granule), runtime.move_budget_.bytes)),
      runtime.move_budget_.ns, stream, &moved);
  if (moved > 0) {
    runtime.ladder_.give_back();
    asked_out_ -= std::min(asked_out_.load(), moved);
    claim_what_it_has(0);
    home_rest_ = kSentOutRest;
    move_rest_.moved_out(began_ns, runtime.now());
  } else {
    out_rest_ = kNoRoomRest;
    asked_out_ = 0;
  }
  return fatal(status);
}

base::Status SessionImpl::come_home(LaneSlot& lane) {
  RuntimeImpl& runtime = *runtime_;
  memory::PersistentHeap& heap = *heap_.load();
  const uint64_t granule = runtime.granularity_bytes_;
  // Blocks of a granule may be small, so the bytes may lie in more granules; those come at the next boundary.
  uint64_t wanted =
      std::max(granule, std::min(heap.away_bytes(), runtime.move_budget_.bytes) / granule * granule);
  if (const uint64_t quota = quota_bytes_.load(std::memory_order_relaxed); quota > 0) {
    // Only what P and E leave of the quota: a promise that passes it would take from E.
    const uint64_t most = sched::quota_in_granules(quota, granule);
    BooksLock lock(runtime.mutex_);
    wanted =
        std::min(wanted, most - std::min(most, persistent_promise_ + ephemeral_promise_)) / granule * granule;
  }
  uint64_t moved = 0;
  const uint64_t began_ns = runtime.now();
  base::Status status, copied;
  for (uint64_t bytes = wanted; bytes > 0; bytes = bytes / 2 / granule * granule) {
    status = promise(0, bytes, 0, [&]() -> base::Status {
      copied = heap.move_spilled(true, bytes, runtime.move_budget_.ns, lane.stream->device_stream(), &moved);
      return moved > 0 ? base::Status() : base::Status(GPUSHARE_NOT_READY, "nothing came home");
    });
    if (status.ok()) {
      claim_what_it_has(bytes);
      move_rest_.moved_home(began_ns, runtime.now());
      return fatal(copied);
    }
    if (status.code() == GPUSHARE_NOT_READY) return fatal(copied);
  }
  home_rest_ = kNoRoomRest;
  if (status.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY) ask_for_home(wanted);
  return {};
}

// At a later boundary the bytes may be there. Spare bytes of this process go, for whoever takes the room first. Else the other
// sessions send bytes out at their next boundaries.
void SessionImpl::ask_for_home(uint64_t bytes) {
  RuntimeImpl& runtime = *runtime_;
  Outbox outbox(runtime);
  Section lock(runtime);
  if (!runtime.check_live(*this).ok()) return;
  const uint64_t missing = bytes - std::min(bytes, runtime.free_bytes());
  const sched::RoomAsk ask{sched::Giver::kSpare, missing};
  if (missing > 0 && runtime.authority_->make_room(sched::kNoSession, ask, runtime.now()))
    runtime.authority_->room_used(sched::kNoSession, runtime.now());  // nobody waits for it
  else if (guaranteed())
    (void)runtime.ask_out(*this, bytes, false);
  runtime.carry_out(nullptr, outbox);
}

// The youngest session is the first, and so gives first among equals.
std::vector<sched::Part> RuntimeImpl::blocks_of_others(const SessionImpl& asker) const {
  std::vector<sched::Part> parts;
  for (const auto& [id, session] : sessions_)
    if (session.get() != &asker && !session->guaranteed() && session->movable_bytes() > 0 &&
        authority_->state(id) == sched::SessionState::kResident)
      parts.push_back({id, session->movable_bytes()});
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.session > b.session; });
  return parts;
}

uint64_t RuntimeImpl::parts_of_others(const SessionImpl& asker, const sched::Need& need) const {
  uint64_t sum = 0;
  if (need.asks(sched::Giver::kRanges) && !shared_) sum = ranges_.can_give(asker, need.commit());
  if (need.asks(sched::Giver::kBlocks))
    for (const sched::Part& part : blocks_of_others(asker)) sum += part.bytes;
  return sum;
}

uint64_t RuntimeImpl::ask_out(const SessionImpl& asker, uint64_t bytes, bool all) {
  const std::vector<sched::Part> parts = blocks_of_others(asker);
  uint64_t sum = 0;
  for (const sched::Part& part : parts) sum += part.bytes;
  if (all && sum < bytes) return sum;
  const std::vector<uint64_t> given = sched::give_up(authority_->claims_on(parts, now()), bytes);
  for (size_t i = 0; i < given.size(); ++i) {
    SessionImpl& giver = *sessions_.find(parts[i].session);
    if (given[i] > giver.asked_out_) giver.asked_out_ = given[i];
  }
  return std::min(sum, bytes);
}

bool SessionImpl::wait_for_others(uint64_t bytes, const base::Deadline& until) {
  RuntimeImpl& runtime = *runtime_;
  Outbox outbox(runtime);
  Section lock(runtime);
  // A caller with an open iteration must not wait: the others' boundary may wait for that iteration.
  if (!runtime.check_live(*this).ok() || open_ || NoWaitScope::active() || CallbackScope::active())
    return false;
  const uint64_t missing = bytes - std::min(bytes, runtime.free_bytes());
  if (missing == 0 || runtime.ask_out(*this, missing, true) < missing) return false;
  uint64_t left = UINT64_MAX, since_ns = base::host_now_ns();
  bool idle = false;
  for (;;) {
    uint64_t asked = 0;
    bool busy = false;
    for (const auto& [id, session] : runtime.sessions_) {
      if (session->asked_out_ == 0) continue;
      asked += session->asked_out_;
      busy |= session->open_ || session->in_flight_ > 0;
    }
    if (asked == 0 || !runtime.check_live(*this).ok()) return true;
    const uint64_t now_ns = base::host_now_ns();
    if (busy || (asked < left && !idle)) since_ns = now_ns;
    left = std::min(left, asked);
    idle = now_ns - since_ns > kIdleNs;
    if (until.passed()) break;
    if (idle && runtime.actions_.send_out_idle(outbox)) continue;
    if (idle) break;
    runtime.reaper_.wait(state_changed_, base::Deadline::after(kLookAgainNs), outbox);
  }
  for (const auto& [id, session] : runtime.sessions_) session->asked_out_ = 0;
  return true;
}

}  // namespace gpushare::executor
