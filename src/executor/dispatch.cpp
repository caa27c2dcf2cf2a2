// Grants: which sessions are ready, whom the scheduler picks for a lane, and the first iterations of those of unknown need.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include "base/round_up.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

void RuntimeImpl::refresh_ready(SessionImpl& session) {
  if (collapsed_) return;
  // Not before it has memory: the scheduler would pick it. Paged out, the scheduler must know, to bring it
  // back.
  bool wanted = !session.ended_ && !session.open_ && (session.pull_waits_ || !session.pushes_.empty());
  if (wanted && !session.placed_) wanted = authority_->state(session.id_) == sched::SessionState::kPagedOut;
  if (wanted && session.profile_left_ > 0 && profiled_ != nullptr && profiled_ != &session) wanted = false;
  if (wanted == session.told_ready_) return;
  session.told_ready_ = wanted;
  wanted ? ++ready_sessions_ : --ready_sessions_;
  if (wanted)
    authority_->ready(session.id_, now());
  else
    authority_->not_ready(session.id_, now());
}

void RuntimeImpl::dispatch_all(const SessionImpl* current, Outbox& outbox) {
  if (!lost_.ok() || paused_ || (ready_sessions_ == 0 && !shared_)) return;
  std::optional<uint64_t> time;  // one reading for all lanes
  bool dispatched = true, on_device = false;
  uint64_t look_again_ns = sched::kUnknown, ask_at_ns = 0;
  // A dispatch in one lane may release another lane that was held back for it.
  while (dispatched) {
    dispatched = on_device = false;
    for (LaneSlot* lane : lanes_.opened()) {
      on_device = on_device || lane->in_flight > 0;
      if (lane->holder != nullptr || lane->in_flight >= depth_ || lane->closes > 0 ||
          lane->memory.load(std::memory_order_relaxed) == nullptr)
        continue;
      if (!time) time = now();
      if (dispatch(*lane, current, *time, std::max(*time, ask_at_ns))) dispatched = true;
    }
    look_again_ns = time ? authority_->look_again_ns() : sched::kUnknown;
    if (look_again_ns == sched::kUnknown) return;
    // A virtual clock stands still while all that is under way is held open by its host.
    if (virtual_time_ && !dispatched && !on_device && ask_at_ns < look_again_ns) {
      ask_at_ns = look_again_ns;
      dispatched = true;
    }
  }
  if (virtual_time_) return;
  const base::Deadline at = base::Deadline::after(look_again_ns - std::min(look_again_ns, *time));
  if (look_again_at_ && look_again_at_->at() <= at.at()) return;
  look_again_at_ = at;
  service_wakes_.notify_one();
}

bool RuntimeImpl::dispatch(LaneSlot& lane, const SessionImpl* current, uint64_t time, uint64_t ask_at_ns) {
  const auto picked = authority_->pick(lane.id, ask_at_ns);
  if (!picked) return false;
  SessionImpl* session = find_session(*picked);
  if (session == nullptr) return false;
  authority_->dispatched(session->id_, lane.id, time);
  // After that: a change of needs may page out whoever has nothing in flight.
  if (session->profile_left_ > 0) profile_begin(*session, lane);
  ++under_way_;
  if (op_gate_ != nullptr && session->options_.cls == sched::SessionClass::kGuaranteed)
    op_gate_->began(session->id_, session->target_slowdown_, time);
  if (std::exchange(session->told_ready_, false)) --ready_sessions_;
  session->open_ = true;
  session->lane_ = &lane;
  lane.holder = session;
  if (lane.last_session_id != 0 && lane.last_session_id != session->id_) ++switches_;
  lane.last_session_id = session->id_;
  InFlight& slot = lane.at(lane.next++);
  slot.session = session;
  const bool push = !session->pushes_.empty() &&
                    (!session->pull_waits_ || session->pushes_.front().order < session->pull_order_);
  --demand_;
  if (time > session->waiting_since_ns_) {
    session->waited_ns_ += time - session->waiting_since_ns_;
    record({Timeline::Kind::kTurn, lane.id, session->id_, session->waiting_since_ns_, time});
  }
  if (push) {
    PushItem item = std::move(session->pushes_.front());
    session->pushes_.pop_front();
    if (item.ticket != nullptr) item.ticket->lane_ = &lane;
    slot.ticket = std::move(item.ticket);
    lane.pushed = std::move(item.work);
    lane.worker_wakes.notify_one();
  } else {
    session->pull_waits_ = false;
    session->granted_ = &lane;
    if (session != current) {
      if (session->bell_ != nullptr) {
        tell_turn(*session);
      } else {
        mutex_.wake_later(session->shared_from_this());
      }
    }
  }
  return true;
}

void RuntimeImpl::lend_turn(SessionImpl& session, LaneSlot& lane) {
  // With no demand no session has an iteration to run, no thread waits, and no session that ends waits for the device. Actions and
  // sessions that wait for memory act at boundaries, which a lent turn does not have.
  if (under_way_ > 0 || demand_ > 0 || virtual_time_ || shared_ || on_progress_ || record_timeline_ ||
      paused_ || acting_ || closing_ || op_gate_ != nullptr || collapsed_ || !lost_.ok() ||
      !actions_.empty() || retry_at_ || session.ended_ || session.torn_down_ || session.profile_left_ > 0 ||
      profiled_ != nullptr || lane.closes > 0 || lane.memory.load(std::memory_order_relaxed) == nullptr ||
      !authority_->may_lend(session.id_, lane.id))
    return;
  mutex_.turn().lend(session, lane, lane.at(lane.next));
}

void Books::wake(SessionImpl& session) noexcept {
  session.turn_came_.notify_one();
}

void Books::settle_turn() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  runtime_.settle_turn(turn_.take_back());
}

void RuntimeImpl::settle_turn(const LentTurn::Ended& ended) noexcept {
  if (collapsed_) return;
  SessionImpl& session = *ended.session;
  LaneSlot& lane = *ended.lane;
  try {
    const uint64_t time = now();
    if (ended.iterations > 0) {
      authority_->ready(session.id_, time);
      authority_->dispatched(session.id_, lane.id, time, ended.iterations);
      authority_->finished(session.id_, ended.totals.service_ns, time, ended.iterations);
      session.iterations_done_ += ended.iterations;
      session.service_ns_ += ended.totals.service_ns;
      session.planned_iterations_ += ended.totals.planned;
      session.iteration_peak_bytes_ = std::max(session.iteration_peak_bytes_, ended.totals.peak_bytes);
      iterations_done_ += ended.iterations;
      busy_ns_ += ended.totals.service_ns;
    }
    if (!ended.busy) return;
    authority_->ready(session.id_, time);
    authority_->dispatched(session.id_, lane.id, time);
    ++under_way_;
    session.open_ = true;
    lane.holder = &session;
    lane.at(lane.next++).session = &session;
  } catch (...) {
    collapse();
  }
}

void RuntimeImpl::settle(const SessionImpl* current, Outbox& outbox) {
  if (closed_ || collapsed_) return;
  collect_actions();
  dispatch_all(current, outbox);
  collect_actions();  // profiling changes needs
  if (!actions_.empty() && !acting_) service_wakes_.notify_one();
  if (demand_ > 0 || on_progress_ || shared_ || op_gate_ != nullptr) kick_reapers();
}

void RuntimeImpl::profile_begin(SessionImpl& session, LaneSlot& lane) {
  profiled_ = &session;
  lane.profiling = true;
  // Others may have become ready together with it, for lanes of their own.
  for (const auto& [id, other] : sessions_)
    if (other.get() != &session && other->profile_left_ > 0) refresh_ready(*other);
  // A quarter stays for persistent blocks that first iterations make (optimizer state).
  const uint64_t granule = memory_->granularity_bytes();
  const uint64_t extra = free_bytes() / 4 * 3 / granule * granule;
  const uint64_t quota =
      sched::quota_in_granules(session.quota_bytes_.load(std::memory_order_relaxed), granule);
  const uint64_t within_quota = quota - std::min(quota, base::round_up(session.persistent_promise_, granule));
  const uint64_t wanted =
      std::max(std::min(authority_->lane_bytes(lane.id) + extra, within_quota), session.ephemeral_promise_);
  if (authority_->set_need(session.id_, session.persistent_promise_, wanted, now()).ok())
    session.ephemeral_promise_ = wanted;
}

void RuntimeImpl::profile_end(SessionImpl& session, LaneSlot& lane, uint64_t peak_bytes) {
  profiled_ = nullptr;
  lane.profiling = false;
  --session.profile_left_;
  const auto with_margin = [](uint64_t bytes) { return bytes + bytes / kProfileMarginDivisor; };
  // Blocks of a later iteration may lie in the margin although they would fit below it: that is no larger need.
  if (peak_bytes > with_margin(session.profile_peak_bytes_)) session.profile_peak_bytes_ = peak_bytes;
  const uint64_t wanted = std::min(with_margin(session.profile_peak_bytes_), session.ephemeral_promise_);
  if (authority_->set_need(session.id_, session.persistent_promise_, wanted, now()).ok())
    session.ephemeral_promise_ = wanted;
  for (const auto& [id, other] : sessions_)
    if (other->profile_left_ > 0) refresh_ready(*other);
}

}  // namespace gpushare::executor
