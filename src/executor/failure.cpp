// Failures: of a session, of all sessions when the device is lost, of the runtime when the host has no memory
// for its books.
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "base/log.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

void RuntimeImpl::end_session(SessionImpl& session, SessionState state, base::Status status, Outbox& outbox) {
  if (session.ended_ || collapsed_) return;
  sessions_.ended(session);
  session.end_state_ = state;
  session.end_status_ = std::move(status);
  reaper_.drop_demand(session.pushes_.size() + (std::exchange(session.pull_waits_, false) ? 1 : 0));
  for (PushItem& item : session.pushes_) {
    const bool lost = session.end_status_.code() == GPUSHARE_DEVICE_LOST;
    if (item.ticket != nullptr) {
      item.ticket->complete(lost ? session.end_status_
                                 : base::Status(GPUSHARE_CANCELLED, "session '" + session.name() +
                                                                        "' ended before this iteration"),
                            outbox);
      outbox.tickets.push_back(std::move(item.ticket));
    }
    outbox.dropped.push_back({session.shared_from_this(), std::move(item.work)});
    ++staying_;
  }
  session.pushes_.clear();
  if (session.launch_gate_ != nullptr) session.launch_gate_->end();
  if (op_gate_ != nullptr) op_gate_->left(session.id_);
  reaper_.add_demand();  // until it is torn down
  // A session that its owner closes has just left.
  if (state == SessionState::kFailed || !session.closed_)
    record({state == SessionState::kFailed ? Timeline::Kind::kFailed : Timeline::Kind::kCancelled, UINT32_MAX,
            session.id_, now()});
  sessions_.refresh_ready(session);
  tell_turn(session);
  session.state_changed_.notify_all();
  actions_.tear_down_if_over(session);
}

void RuntimeImpl::fail_session(SessionImpl& session, base::Status status) {
  Outbox outbox(*this);
  Section lock(*this);
  end_session(session, SessionState::kFailed, std::move(status), outbox);
  carry_out(nullptr, outbox);
}

// By default only the iteration fails. Its ticket reports the failure, or the next begin() if there is no ticket. The
// function runs before its iteration's end on the device, so the ticket is still in the lane's ring.
void RuntimeImpl::fail_work(SessionImpl& session, LaneSlot& lane, uint64_t serial, base::Status status) {
  if (session.options_.fail_on_error) return fail_session(session, std::move(status));
  BooksLock lock(mutex_);
  base::Status* failure = &session.failure_;
  for (InFlight& entry : lane.ring)
    if (entry.ticket != nullptr && entry.ticket->session_.get() == &session &&
        entry.ticket->serial_ == serial)
      failure = &entry.ticket->failure_;
  if (failure->ok()) *failure = std::move(status);
  if (failure == &session.failure_) session.has_failure_.store(true, std::memory_order_relaxed);
}

void RuntimeImpl::note(const base::Status& status) {
  if (status.code() != GPUSHARE_DEVICE_LOST) return;
  Outbox outbox(*this);
  Section lock(*this);
  lose(status, outbox);
  carry_out(nullptr, outbox);
}

void RuntimeImpl::lose(const base::Status& status, Outbox& outbox) {
  if (!lost_.ok() || closed_) return;
  lost_ = status.code() == GPUSHARE_DEVICE_LOST
              ? status
              : base::Status(GPUSHARE_DEVICE_LOST, "a lane's stream failed: " + status.to_string(),
                             status.native_code(), status.backend());
  base::log(base::kError, "device " + device_->spec() + ": " + lost_.to_string());
  for (const auto& session : sessions_.all()) end_session(*session, SessionState::kFailed, lost_, outbox);
  for (LaneSlot* lane : lanes_.opened())
    if (lane->in_flight > 0) reaper_.retire(*lane, UINT64_MAX, outbox);
  reaper_.told();
}

void RuntimeImpl::collapse() noexcept {
  if (collapsed_ || closed_) return;
  collapsed_ = true;
  if (lost_.ok()) lost_ = base::no_memory();
  stop_threads_ = true;
  for (const auto& [id, session] : sessions_) {
    for (PushItem& item : session->pushes_) complete_collapsed(item.ticket);
    // Granted to a call that has not taken the turn, and will not.
    if (LaneSlot* const lane = session->granted_.exchange(nullptr); lane != nullptr) {
      lane->holder = nullptr;
      session->open_ = false;
    }
    if (session->launch_gate_ != nullptr) session->launch_gate_->end();
    tell_turn(*session);
    session->state_changed_.notify_all();
  }
  for (const auto& lane : lanes_.all()) {
    if (lane == nullptr) continue;
    if (lane->pushed != nullptr) {  // granted, and no worker will run it
      lane->holder->open_ = false;
      lane->holder = nullptr;
    }
    // Running iterations are waited for even now: their callers' objects must not be destroyed while they run.
    const bool running = lane->holder != nullptr;
    for (InFlight& entry : lane->ring)
      if (!running || &entry != &lane->at(lane->next - 1)) complete_collapsed(entry.ticket);
    lane->worker_wakes.notify_all();
    lane->reaper_wakes.notify_all();
  }
  actions_.stop();
  reaper_.told();
}

void RuntimeImpl::complete_collapsed(std::shared_ptr<TicketImpl>& ticket) noexcept {
  if (ticket == nullptr || ticket->done_.load(std::memory_order_relaxed)) return;
  ticket->outcome_ = lost_;
  ticket->done_.store(true, std::memory_order_release);
  ticket->done_changed_.notify_all();
}

void RuntimeImpl::close_collapsed(const std::vector<std::unique_ptr<LaneSlot>>& slots,
                                  const std::vector<std::weak_ptr<StreamImpl>>& side_streams) {
  // Memory goes when nothing on the device uses it, with all that is in it.
  for (const auto& slot : slots)
    if (slot != nullptr && slot->stream != nullptr) (void)slot->stream->device_stream().synchronize();
  for (const auto& weak : side_streams)
    if (const auto stream = weak.lock(); stream != nullptr) (void)stream->synchronize();
  SessionTable::Map sessions;
  {
    BooksLock lock(mutex_);
    sessions = sessions_.take_all();
    actions_.clear();
  }
  for (const auto& [id, session] : sessions) {
    session->residence_gate_.close();
    session->heap_gate_.close();
    if (memory::PersistentHeap* heap = session->heap_.load()) heap->close_door();
    session->heap_.store(nullptr);
    session->drop_order_event();
    std::shared_ptr<LaunchGate> gate;
    {
      BooksLock lock(mutex_);
      gate = session->launch_gate_;
    }
    if (gate != nullptr) gate->shut();
    for (;;) {  // each is destroyed without the lock
      PushItem item;
      BooksLock lock(mutex_);
      if (session->pushes_.empty()) break;
      item = std::move(session->pushes_.front());
      session->pushes_.pop_front();
    }
    BooksLock lock(mutex_);
    session->ended_ = session->torn_down_ = true;
    session->end_state_ = SessionState::kFailed;
    session->end_status_ = lost_;
    session->state_changed_.notify_all();
  }
  memory_.reset();
}

}  // namespace gpushare::executor
