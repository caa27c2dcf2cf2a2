// Grants: which sessions are ready, which session the scheduler picks for a lane, and the first iterations of sessions
// of unknown need.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include "executor/internal.hpp"

namespace gpushare::executor {
namespace {

constexpr uint32_t kMostAskedAhead = 64;  // how often later times are tried on a clock that stands still

bool takes_an_iteration(const LaneSlot& lane, uint32_t depth) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  return lane.holder == nullptr && lane.in_flight < depth && lane.closes == 0 &&
         lane.memory.load(std::memory_order_relaxed) != nullptr;
}

}  // namespace

// In the order in which the lanes opened.
const std::vector<LaneSlot*>& RuntimeImpl::lanes_to_ask() {
  const auto ids = authority_->lanes_to_ask();
  if (!ids || 2 * ids->size() >= lanes_.opened().size()) return lanes_.opened();
  asked_lanes_.clear();
  for (const uint32_t id : *ids)
    if (LaneSlot* lane = lanes_.find(id);
        lane != nullptr && lane->memory.load(std::memory_order_relaxed) != nullptr)
      asked_lanes_.push_back(lane);
  std::sort(asked_lanes_.begin(), asked_lanes_.end(),
            [](const LaneSlot* a, const LaneSlot* b)
                GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { return a->opened_at < b->opened_at; });
  return asked_lanes_;
}

void RuntimeImpl::dispatch_all(const SessionImpl* current, Outbox& outbox) {
  if (!lost_.ok() || actions_.paused() || (!sessions_.any_ready() && !shared_)) return;
  std::optional<uint64_t> time;  // one reading for all lanes
  bool dispatched = true;
  uint64_t look_again_ns = sched::kUnknown, ask_at_ns = 0;
  uint32_t asked_ahead = 0;
  // A dispatch in one lane may release another lane that was held back for it.
  while (dispatched) {
    dispatched = false;
    const bool on_device = !lanes_.flying().empty();
    for (LaneSlot* lane : lanes_to_ask()) {
      if (!takes_an_iteration(*lane, depth_)) continue;
      if (!time) time = now();
      if (dispatch(*lane, current, *time, std::max(*time, ask_at_ns))) dispatched = true;
    }
    look_again_ns = time ? authority_->look_again_ns() : sched::kUnknown;
    if (look_again_ns == sched::kUnknown) return;
    // A virtual clock stands still while the host holds all iterations under way open. A policy that chooses a lane
    // which cannot run now would name a later time for ever; the end of an open iteration asks again.
    if (virtual_time_ && !dispatched && !on_device && ask_at_ns < look_again_ns &&
        asked_ahead < kMostAskedAhead) {
      ++asked_ahead;
      ask_at_ns = look_again_ns;
      dispatched = true;
    }
  }
  if (virtual_time_) return;
  actions_.look_again(base::Deadline::after(look_again_ns - std::min(look_again_ns, *time)));
}

bool RuntimeImpl::dispatch(LaneSlot& lane, const SessionImpl* current, uint64_t time, uint64_t ask_at_ns) {
  const auto picked = authority_->pick(lane.id, ask_at_ns);
  if (!picked) return false;
  SessionImpl* session = sessions_.find(*picked);
  if (session == nullptr) return false;
  authority_->dispatched(session->id_, lane.id, time);
  // Profiling begins after dispatched(), because a change of needs may page out sessions with nothing in flight.
  if (session->profile_left_ > 0) sessions_.profile_begin(*session, lane);
  reaper_.granted();
  if (shared_)
    authority_->work_began(session->id_, session->guaranteed_in_turns(),
                           session->target_slowdown_ > 0 ? session->target_slowdown_ : target_slowdown_);
  else if (op_gate_ != nullptr && session->guaranteed_in_turns())
    op_gate_->began(session->id_, session->target_slowdown_);
  if (session->launch_gate_ != nullptr) session->launch_gate_->under_way(true);
  sessions_.picked(*session);
  session->open_ = true;
  session->lane_ = &lane;
  lane.holder = session;
  if (lane.last_session_id != 0 && lane.last_session_id != session->id_) ++switches_;
  lane.last_session_id = session->id_;
  InFlight& slot = lane.at(lane.next++);
  slot.session = session;
  const bool push = !session->pushes_.empty() &&
                    (!session->pull_waits_ || session->pushes_.front().order < session->pull_order_);
  reaper_.drop_demand();
  slot.waited_ns = time - std::min(time, session->waiting_since_ns_);
  if (slot.waited_ns > 0) {
    session->waited_ns_ += slot.waited_ns;
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

// With no demand no session has an iteration to run, no thread waits, and no session that ends waits for the device.
// Actions and sessions that wait for memory act at boundaries, which a lent turn does not have.
bool RuntimeImpl::nobody_else_acts() const {
  return !reaper_.any_under_way() && reaper_.demand() == 0 && !actions_.paused() && !actions_.busy() &&
         !actions_.retries() && !closing_ && !collapsed_ && lost_.ok() && sessions_.profiled() == nullptr;
}

void RuntimeImpl::lend_turn(SessionImpl& session, LaneSlot& lane) {
  const bool seen_by_others =
      virtual_time_ || shared_ || on_progress_ || record_timeline_ || op_gate_ != nullptr;
  if (seen_by_others || !nobody_else_acts() || session.ended_ || session.torn_down_ ||
      session.profile_left_ > 0 || lane.closes > 0 ||
      lane.memory.load(std::memory_order_relaxed) == nullptr || !authority_->may_lend(session.id_, lane.id))
    return;
  session.lent_serial_ = session.iteration_.serial_.load(std::memory_order_relaxed);
  mutex_.turn().lend(session, lane, lane.at(lane.next));
}

void Books::wake(SessionImpl& session) noexcept {
  session.turn_bell_.ring();
}

void Books::account_turn() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  runtime_.account_turn(turn_.take_back());
}

void RuntimeImpl::account_turn(const LentTurn::Ended& ended) noexcept {
  if (collapsed_) return;
  SessionImpl& session = *ended.session;
  LaneSlot& lane = *ended.lane;
  try {
    const uint64_t time = now();
    if (ended.iterations > 0) {
      authority_->ran_alone(session.id_, lane.id, ended.totals.service_ns, time, ended.iterations);
      session.iterations_done_ += ended.iterations;
      session.service_ns_ += ended.totals.service_ns;
      session.histogram_.add_sums(ended.totals.service_ns, base::IterationHistogram::slowdown_of(1, 0),
                                  ended.iterations);
      session.planned_iterations_ += ended.totals.planned;
      session.iteration_peak_bytes_ = std::max(session.iteration_peak_bytes_, ended.totals.peak_bytes);
      reaper_.account(ended.iterations, ended.totals.service_ns);
    }
    if (!ended.busy) return;
    authority_->ready(session.id_, time);
    authority_->dispatched(session.id_, lane.id, time);
    reaper_.granted();
    session.open_ = true;
    session.begun_serial_ = session.lent_serial_ + 2 * ended.iterations + 1;
    lane.holder = &session;
    InFlight& slot = lane.at(lane.next++);
    slot.session = &session;
    slot.waited_ns = 0;
  } catch (...) {
    collapse();
  }
}

// Looks now if it is time, else sets the time of the next look. A virtual clock moves only at events, and every event
// calls this function.
void RuntimeImpl::look_at_coordinator() {
  uint64_t time = now();
  if (authority_->look_again_ns() <= time) authority_->look(time);
  const uint64_t at_ns = authority_->look_again_ns();
  if (at_ns == sched::kUnknown || virtual_time_) return;
  time = now();
  actions_.look_again(base::Deadline::after(at_ns - std::min(at_ns, time)));
}

void RuntimeImpl::carry_out(const SessionImpl* current, Outbox& outbox) {
  if (closed_ || collapsed_) return;
  if (coordinated_) look_at_coordinator();
  actions_.collect();
  dispatch_all(current, outbox);
  actions_.collect();  // profiling changes needs
  actions_.hand_over();
  if (reaper_.demand() > 0 || on_progress_ || shared_ || op_gate_ != nullptr) reaper_.wake();
}

}  // namespace gpushare::executor
