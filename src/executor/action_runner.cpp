// SPDX-License-Identifier: Apache-2.0
#include "executor/action_runner.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include <absl/cleanup/cleanup.h>

#include "base/cancel.hpp"
#include "base/log.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

namespace {

// This driver ignores all other actions. It has no caches, and a session that moves takes the lane to which its next
// iteration is dispatched.
constexpr std::pair<sched::ActionKind, Action::Kind> kActions[] = {
    {sched::ActionKind::kOpenLane, Action::Kind::kOpenLane},
    {sched::ActionKind::kResizeLane, Action::Kind::kResizeLane},
    {sched::ActionKind::kCloseLane, Action::Kind::kCloseLane},
    {sched::ActionKind::kAdmit, Action::Kind::kAdmit},
    {sched::ActionKind::kPageOut, Action::Kind::kPageOut},
    {sched::ActionKind::kPageIn, Action::Kind::kPageIn},
    {sched::ActionKind::kTurnBack, Action::Kind::kTurnBack},
    {sched::ActionKind::kDrop, Action::Kind::kDrop},
    {sched::ActionKind::kTerms, Action::Kind::kLimit},
};

}  // namespace

void ActionRunner::collect() {
  if (runtime_.collapsed_) return;
  for (const sched::Action& decided : runtime_.authority_->take_actions()) {
    const auto* const kind = std::find_if(std::begin(kActions), std::end(kActions),
                                          [&](const auto& each) { return each.first == decided.kind; });
    if (kind == std::end(kActions)) continue;
    Action action{kind->second, decided.lane, decided.bytes, nullptr, decided.compute_units};
    if (action.kind == Action::Kind::kOpenLane || action.kind == Action::Kind::kResizeLane)
      runtime_.lanes_.want(decided.lane, decided.bytes);
    if (action.kind == Action::Kind::kCloseLane)
      if (LaneSlot* const lane = runtime_.lanes_.find(decided.lane); lane != nullptr) ++lane->closes;
    if (decided.session != sched::kNoSession) {
      SessionImpl* const session = runtime_.sessions_.find(decided.session);
      if (session == nullptr) continue;
      if (action.kind == Action::Kind::kLimit) session->set_terms(decided.cls, decided.bytes);
      action.session = session->shared_from_this();
    }
    if (action.kind == Action::Kind::kTurnBack)
      actions_.push_front(std::move(action));  // in front, so that it comes before a queued page-in
    else
      actions_.push_back(std::move(action));
  }
  for (const auto& asked : runtime_.authority_->take_ranges_asked())
    runtime_.ranges_.asked(asked.session, asked.bytes);
}

void ActionRunner::start() {
  service_ = base::ServiceThread([this] { serve(); });
}

void ActionRunner::stop() {
  wakes_.notify_all();
  changed_.notify_all();
}

void ActionRunner::release_device() {
  paging_start_ = {};
  paging_end_ = {};
  paging_stream_ = {};
}

void ActionRunner::tear_down_if_over(SessionImpl& session) {
  if (!session.ended_ || session.open_ || session.in_flight_ > 0 || session.teardown_queued_) return;
  session.teardown_queued_ = true;
  actions_.push_back({Action::Kind::kTeardown, UINT32_MAX, 0, session.shared_from_this()});
}

bool ActionRunner::decided_for(const SessionImpl& session) const {
  const auto of_session = [&](const Action& action) { return action.session.get() == &session; };
  return std::any_of(actions_.begin(), actions_.end(), of_session) ||
         std::any_of(parts_.begin(), parts_.end(), [&](const Action& part) {
           return of_session(part) && part.kind == Action::Kind::kPageIn;
         });
}

void ActionRunner::look_again(const base::Deadline& at) {
  if (at.never()) return;
  if (look_again_at_ && look_again_at_->at() <= at.at()) return;
  look_again_at_ = at;
  wakes_.notify_one();
}

void ActionRunner::run(bool may_page, Outbox& outbox) {
  // Actions wait for the device, which may be waiting for this very function: the runtime's thread carries them out.
  if (NoWaitScope::active()) {
    collect();  // lanes' new sizes hold at once
    hand_over();
    return;
  }
  while (acting_ && !runtime_.collapsed_) {
    ++waiting_;
    const absl::Cleanup waited = [this]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { --waiting_; };
    runtime_.mutex_.wait(changed_);
  }
  if (runtime_.closed_ || runtime_.collapsed_) return;
  acting_ = true;
  absl::Cleanup acted = [this]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    acting_ = false;
    changed_.notify_all();
  };
  collect();
  while (!runtime_.collapsed_ && !actions_.empty() && (may_page || !actions_.front().pages())) {
    const Action action = std::move(actions_.front());
    actions_.pop_front();
    carry_out(action, outbox);
    collect();
    runtime_.dispatch_all(nullptr, outbox);
    collect();
    if (runtime_.reaper_.demand() > 0) runtime_.reaper_.wake();
    if (action.session != nullptr) outbox.sessions.push_back(action.session);
  }
  std::move(acted).Invoke();
  hand_over();
}

bool ActionRunner::run_part(Outbox& outbox) {
  if (parts_.empty() || acting_ || runtime_.closed_ || runtime_.collapsed_) return false;
  actions_.push_back(std::move(parts_.front()));
  parts_.pop_front();
  run(true, outbox);
  return true;
}

void ActionRunner::carry_out(const Action& action, Outbox& outbox) {
  LaneSlot* lane = runtime_.lanes_.find(action.lane);
  switch (action.kind) {
    case Action::Kind::kOpenLane: {
      const base::Status status = runtime_.lanes_.open(action.lane, action.bytes, action.compute_units);
      runtime_.authority_->lane_applied(action.lane, status.ok() ? action.bytes : 0, runtime_.now());
      if (!status.ok() && status.code() == GPUSHARE_DEVICE_LOST) runtime_.lose(status, outbox);
      break;
    }
    case Action::Kind::kResizeLane:
      if (lane != nullptr && lane->memory.load() != nullptr) resize(*lane);
      break;
    case Action::Kind::kCloseLane:
      if (lane != nullptr) runtime_.lanes_.close(*lane, outbox);
      runtime_.authority_->lane_applied(action.lane, 0, runtime_.now());
      break;
    case Action::Kind::kAdmit:
      admit(*action.session, action.bytes, outbox);
      break;
    case Action::Kind::kPageOut:
    case Action::Kind::kPageIn:
      page(action, lane, outbox);
      break;
    case Action::Kind::kTurnBack:
      turn_back(*action.session, outbox);
      break;
    case Action::Kind::kDrop:
      action.session->dropped_.store(true, std::memory_order_release);
      runtime_.end_session(
          *action.session, SessionState::kCancelled,
          {GPUSHARE_CANCELLED,
           "session '" + action.session->name() + "' was kept for speed alone, and others needed its memory"},
          outbox);
      break;
    case Action::Kind::kLimit: {
      const Unlocked unlocked(runtime_.mutex_);
      action.session->give_back_above_quota(false);
      if (action.session->retired_) action.session->give_back_unused();
      break;
    }
    case Action::Kind::kSendOut:
      send_out(*action.session, outbox);
      break;
    case Action::Kind::kTeardown:
      tear_down(*action.session, outbox);
      break;
  }
}

void ActionRunner::resize(LaneSlot& lane) {
  base::Status status;
  {
    const Unlocked unlocked(runtime_.mutex_);
    status = runtime_.lanes_.apply_size(lane, true);
    runtime_.ladder_.give_back();
  }
  lane.place_status = std::move(status);
  runtime_.authority_->lane_applied(lane.id, lane.applied_bytes.load(), runtime_.now());
}

// The session may have changed lanes since the decision.
void ActionRunner::admit(SessionImpl& session, uint64_t bytes, Outbox& outbox) {
  const uint32_t id = runtime_.authority_->lane_of(session.id_);
  if (id == sched::kNoLane) return;  // it has no lane any more, and is admitted anew
  LaneSlot* const lane = runtime_.lanes_.find(id);
  if (session.heap_.load() != nullptr) {  // it has its place, and another lane now
    if (lane != nullptr && lane->memory.load() == nullptr) not_placed(session, lane->place_status, outbox);
    runtime_.sessions_.refresh_ready(session);
  } else if (lane == nullptr) {
    not_placed(session, runtime_.lanes_.failure(), outbox);
  } else {
    admit_to(*lane, session, bytes, outbox);
  }
}

void ActionRunner::admit_to(LaneSlot& lane, SessionImpl& session, uint64_t bytes, Outbox& outbox) {
  if (lane.memory.load() == nullptr) {
    not_placed(session, lane.place_status, outbox);
    return;
  }
  const uint64_t needed = session.ephemeral_promise_;
  memory::PersistentHeap* heap = nullptr;
  base::Status status;
  {
    const Unlocked unlocked(runtime_.mutex_);
    status = runtime_.lanes_.ensure_size(lane, needed);
    if (status.ok())
      status = runtime_.ladder_.place([&]() -> base::Status {
        GPUSHARE_ASSIGN_OR_RETURN(heap, runtime_.memory_->open_heap(session.id_, session.name(), bytes));
        return {};
      });
  }
  if (runtime_.collapsed_) return;
  if (!status.ok()) {
    // The session may have changed lanes meanwhile.
    LaneSlot* const other = runtime_.lanes_.find(runtime_.authority_->lane_of(session.id_));
    if (other != nullptr && other != &lane)
      admit_to(*other, session, bytes, outbox);
    else
      not_placed(session, status, outbox);
    return;
  }
  heap->set_stream(&lane.stream->device_stream());
  session.stream_lane_.store(&lane);
  session.heap_.store(heap);
  retry_ns_ = 0;
  runtime_.sessions_.placed(session);
  session.persistent_promise_ = bytes;
  session.lane_ = &lane;
  session.heap_gate_.open();
  session.residence_gate_.open();
  const uint64_t time = runtime_.now();
  session.queued_ns_ = time - std::min(time, session.arrived_ns_);
  session.resident_since_ns_ = time;
  runtime_.record({Timeline::Kind::kQueued, UINT32_MAX, session.id_, session.arrived_ns_, time});
  runtime_.record({Timeline::Kind::kAdmitted, lane.id, session.id_, time});
  outbox.memory_changed = true;
  runtime_.sessions_.refresh_ready(session);
  session.state_changed_.notify_all();
}

// Waiting for room helps only if another session or block may leave the device. Other programs on the device may also
// hold the missing memory, and they send no notice when they free it; therefore the placement is tried again from time
// to time. A session whose page-in met any other failure is tried again too: its bytes are in host memory still.
void ActionRunner::not_placed(SessionImpl& session, const base::Status& status, Outbox& outbox) {
  if (status.code() == GPUSHARE_DEVICE_LOST) {
    runtime_.lose(status, outbox);
    return;
  }
  bool may_come = status.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY && runtime_.sessions_.size() > 1;
  if (!may_come && session.placed_) {
    // No event says that the failure is over, or that it never will be. A session that is alone fits by the books, so
    // the missing bytes are those of other programs on the device, or those of closed lanes that are pinned by blocks
    // which the session kept and may free. A lane that opens takes over one such lane.
    may_come = session.tries_in_ < kMaxTriesIn;
    ++session.tries_in_;
  }
  if ((session.options_.allow_queueing || session.placed_) && may_come) {
    base::log(base::kInfo, status.with_context("session '" + session.name() + "' waits").to_string());
    runtime_.authority_->unplaced(session.id_, runtime_.now());
    runtime_.sessions_.refresh_ready(session);
    retry_ns_ = std::clamp(2 * retry_ns_, kFirstRetryNs, kLastRetryNs);
    if (!retry_at_) retry_at_ = base::Deadline::after(retry_ns_);
    wakes_.notify_one();
    return;
  }
  runtime_.end_session(
      session, SessionState::kFailed,
      status.with_context("session '" + session.name() + "' cannot be placed in device memory"), outbox);
}

// For a session that is paged out or in before it has a heap: there is nothing to move.
void ActionRunner::page_nothing(SessionImpl& session, LaneSlot* lane, bool out, Outbox& outbox) {
  if (!out) admit_to(*lane, session, session.persistent_promise_, outbox);
  if (out) {
    runtime_.sessions_.out_unplaced(session);
    page_out_done(session);
  } else if (session.placed_) {
    runtime_.authority_->page_done(session.id_, runtime_.now());
  }
  runtime_.sessions_.refresh_ready(session);
  session.state_changed_.notify_all();
}

void ActionRunner::page(const Action& action, LaneSlot* lane, Outbox& outbox) {
  SessionImpl& session = *action.session;
  const bool out = action.kind == Action::Kind::kPageOut;
  if (!out && (lane == nullptr || lane->memory.load() == nullptr))
    return not_placed(session, lane == nullptr ? runtime_.lanes_.failure() : lane->place_status, outbox);
  memory::PersistentHeap* heap = session.heap_.load();
  if (heap == nullptr) return page_nothing(session, lane, out, outbox);
  const bool begins = session.moving_ == SessionImpl::Moving::kNot;
  if (begins) {
    session.moving_ = out ? SessionImpl::Moving::kOut : SessionImpl::Moving::kIn;
    session.moving_since_ns_ = runtime_.now();
    session.moving_bytes_ = heap->stats().live_bytes;
    session.tries_out_ = 0;
  }
  Part part;
  {
    const Unlocked unlocked(runtime_.mutex_);
    part.status = make_paging_stream();
    if (out && begins) session.residence_gate_.close();
    if (part.status.ok()) move_timed(session, *heap, out, part);
    if (part.done && !out && lane != nullptr) heap->set_stream(&lane->stream->device_stream());
  }
  if (runtime_.collapsed_) return;
  paging_ns_ += part.device_ns;
  if (!part.status.ok() && part_failed(session, out, part.status, outbox)) return;
  if (part.done) return moved(session, lane, out, outbox);
  if (part.given > 0) {
    runtime_.authority_->page_part(session.id_, part.given, runtime_.now());
    outbox.memory_changed = true;
  }
  collect();  // what may go on now comes before the rest
  parts_.push_back(action);
}

// A part of the session's bytes, with the device's time for it. Without the lock.
void ActionRunner::move_timed(SessionImpl& session, memory::PersistentHeap& heap, bool out, Part& part) {
  const bool timed = paging_stream_.record(paging_start_).ok();
  part.status = move_part(session, heap, out, part);
  if (timed && part.status.ok() && paging_stream_.record(paging_end_).ok() &&
      paging_end_.synchronize().ok()) {
    const auto elapsed = paging_end_.elapsed_since(paging_start_);
    if (elapsed.ok()) part.device_ns = *elapsed;
  }
  if (part.given > 0) runtime_.ladder_.give_back();
}

// Handles a part that failed. False: the session is out in part, and the move goes on.
bool ActionRunner::part_failed(SessionImpl& session, bool out, const base::Status& status, Outbox& outbox) {
  base::log(base::kWarning, status.to_string());
  if (status.code() == GPUSHARE_DEVICE_LOST) {
    runtime_.lose(status, outbox);
    return true;
  }
  if (out && !session.heap_.load()->is_resident()) {
    if (++session.tries_out_ <= kMaxTriesIn) return false;
    runtime_.end_session(
        session, SessionState::kFailed,
        status.with_context("session '" + session.name() + "' is out in part, and the rest cannot follow"),
        outbox);
    return true;
  }
  session.moving_ = SessionImpl::Moving::kNot;
  if (!out) {
    not_placed(session, status, outbox);
    return true;
  }
  session.residence_gate_.open();
  runtime_.authority_->page_out_failed(session.id_, runtime_.now());
  runtime_.sessions_.refresh_ready(session);
  return true;
}

void ActionRunner::moved(SessionImpl& session, LaneSlot* lane, bool out, Outbox& outbox) {
  const uint64_t time = runtime_.now();
  session.moving_ = SessionImpl::Moving::kNot;
  runtime_.record({out ? Timeline::Kind::kPageOut : Timeline::Kind::kPageIn, UINT32_MAX, session.id_,
                   session.moving_since_ns_, time, session.moving_bytes_});
  if (out) {
    runtime_.record({Timeline::Kind::kResident, UINT32_MAX, session.id_, session.resident_since_ns_,
                     session.moving_since_ns_});
    page_out_done(session);
  } else {
    session.residence_gate_.open();
    retry_ns_ = 0;
    session.tries_in_ = 0;
    session.resident_since_ns_ = time;
    session.stream_lane_.store(lane);
    session.lane_ = lane;
    runtime_.authority_->page_done(session.id_, time);
    // Blocks of it were freed meanwhile, or it was retired.
    if (session.retired_)
      actions_.push_back({Action::Kind::kLimit, UINT32_MAX, 0, session.shared_from_this()});
  }
  runtime_.sessions_.refresh_ready(session);
  outbox.memory_changed = true;
  session.state_changed_.notify_all();
}

// A session that threads wait for joins the line again before anybody else gets the room.
void ActionRunner::page_out_done(const SessionImpl& session) {
  const uint64_t time = runtime_.now();
  if (session.waits_in_ > 0) runtime_.authority_->wake(session.id_, time);
  runtime_.authority_->page_done(session.id_, time);
}

// Gives a page-in up. Nothing is copied, because host memory still has the bytes that have come in. If only kept blocks
// are missing, host memory does not have the others any more, and the page-in ends at once.
void ActionRunner::turn_back(SessionImpl& session, Outbox& outbox) {
  const auto is_page_in = [&](const Action& action) {
    return action.session.get() == &session && action.kind == Action::Kind::kPageIn;
  };
  if (session.ended_) return;
  memory::PersistentHeap* const heap = session.heap_.load();
  const auto part = std::find_if(parts_.begin(), parts_.end(), is_page_in);
  if (part != parts_.end() && heap != nullptr && !heap->own_blocks_out()) {
    const Action last = std::move(*part);
    parts_.erase(part);
    {
      const Unlocked unlocked(runtime_.mutex_);
      heap->stop_page_in();
    }
    if (!runtime_.collapsed_) carry_out(last, outbox);
    return;
  }
  if (std::erase_if(parts_, is_page_in) + std::erase_if(actions_, is_page_in) == 0) return;
  if (heap != nullptr) {
    const Unlocked unlocked(runtime_.mutex_);
    heap->stop_page_in();
    runtime_.ladder_.give_back();
  }
  if (runtime_.collapsed_) return;
  session.moving_ = SessionImpl::Moving::kNot;
  runtime_.authority_->unplaced(session.id_, runtime_.now());
  runtime_.sessions_.refresh_ready(session);
}

bool ActionRunner::send_out_idle(Outbox& outbox) {
  bool any = false;
  for (const auto& [id, session] : runtime_.sessions_) {
    if (session->asked_out_ == 0 || !session->idle()) continue;
    actions_.push_back({Action::Kind::kSendOut, UINT32_MAX, 0, session->shared_from_this()});
    any = true;
  }
  run(true, outbox);
  return any;
}

// Moves blocks out as at a boundary of the session. An iteration that begins meanwhile waits for the end of the move.
void ActionRunner::send_out(SessionImpl& session, Outbox& outbox) {
  if (session.asked_out_ == 0 || !session.idle()) return;
  if (runtime_.authority_->state(session.id_) != sched::SessionState::kResident) {
    session.asked_out_ = 0;
    return;
  }
  const uint64_t bytes = std::min(session.asked_out_.load(), session.movable_bytes());
  std::unique_lock growing(session.grow_mutex_, std::try_to_lock);
  if (!growing.owns_lock() || !session.residence_gate_.try_close()) {
    session.asked_out_ = 0;  // it is not idle, so its own boundaries do it
    return;
  }
  session.moves_idle_.store(true);
  base::Status status;
  {
    const Unlocked unlocked(runtime_.mutex_);
    if (make_paging_stream().ok())
      status = session.send_out(paging_stream_, bytes);
    else
      session.asked_out_ = 0;
    session.residence_gate_.open();
    session.moves_idle_.store(false);
    growing.unlock();
  }
  if (!status.ok() && !runtime_.collapsed_)
    runtime_.end_session(session, SessionState::kFailed, status, outbox);
}

base::Status ActionRunner::make_paging_stream() {
  if (paging_stream_) return {};
  device::Device& device = *runtime_.device_;
  GPUSHARE_ASSIGN_OR_RETURN(device::Stream stream, device.create_stream());
  GPUSHARE_ASSIGN_OR_RETURN(paging_start_, device.create_event(GPUSHARE_EVENT_TIMING));
  GPUSHARE_ASSIGN_OR_RETURN(paging_end_, device.create_event(GPUSHARE_EVENT_TIMING));
  paging_stream_ = std::move(stream);
  return {};
}

base::Status ActionRunner::move_part(SessionImpl& session, memory::PersistentHeap& heap, bool out,
                                     Part& part) {
  base::MovePart moves(runtime_.move_budget_, runtime_.now());
  for (;;) {
    const uint64_t step = moves.next(runtime_.now(), runtime_.granularity_bytes_);
    if (step == 0) return {};
    if (heap.paged_out() != out)
      GPUSHARE_RETURN_IF_ERROR(out ? heap.page_out(paging_stream_, step, &part.given)
                                   : heap.page_in(paging_stream_, step));
    // Spilled blocks that came home have gone out again.
    if (out && heap.release_home() < session.home_promise_) session.claim_what_it_has(0);
    part.done = heap.paged_out() == out;
    if (part.done) return {};
    moves.moved(step);
  }
}

void ActionRunner::tear_down(SessionImpl& session, Outbox& outbox) {
  memory::PersistentHeap* heap = session.heap_.load();
  const bool paged_out =
      session.placed_ && runtime_.authority_->state(session.id_) == sched::SessionState::kPagedOut;
  uint64_t peak = 0;
  if (const std::shared_ptr<LaunchGate> gate = session.launch_gate_; gate != nullptr) {
    const Unlocked unlocked(runtime_.mutex_);
    gate->shut();
  }
  if (heap != nullptr) {
    const Unlocked unlocked(runtime_.mutex_);
    session.residence_gate_.close();
    session.heap_gate_.close();
    heap->close_door();
    session.heap_.store(nullptr);
    session.drop_order_event();
    peak = heap->stats().peak_bytes;
    const base::Status status = runtime_.memory_->close_heap(heap);
    if (!status.ok()) base::log(base::kError, status.with_context("closing a session").to_string());
  }
  if (runtime_.collapsed_) return;
  session.peak_bytes_ = std::max(session.peak_bytes_, peak);
  const uint64_t time = runtime_.now();
  if (session.placed_ && (!paged_out || session.moving_ == SessionImpl::Moving::kOut))
    runtime_.record({Timeline::Kind::kResident, UINT32_MAX, session.id_, session.resident_since_ns_, time});
  if (!session.placed_) session.queued_ns_ = time - std::min(time, session.arrived_ns_);
  runtime_.record({Timeline::Kind::kLeft, UINT32_MAX, session.id_, time});
  session.placed_ = false;
  const sched::SessionView view = runtime_.authority_->view(session.id_);
  session.remaining_ns_ = view.remaining_ns;
  runtime_.ranges_.forget(session);
  runtime_.authority_->leave(session.id_, time);
  for (LaneSlot* lane : runtime_.lanes_.opened())
    if (lane->current_owner().get() == &session) outbox.sessions.push_back(lane->set_owner(nullptr));
  collect();
  const auto of_session = [&](const Action& action) { return action.session.get() == &session; };
  std::erase_if(actions_, of_session);
  std::erase_if(parts_, of_session);
  session.torn_down_ = true;
  runtime_.reaper_.drop_demand();
  outbox.memory_changed = true;
  runtime_.sessions_.erase(session);
  session.state_changed_.notify_all();
}

GPUSHARE_CATCHES_FORCED_UNWIND
void ActionRunner::serve() {
  Outbox outbox(runtime_);
  BooksLock lock(runtime_.mutex_);
  try {
    serve_until_stopped(outbox);
  } catch (const base::ForcedUnwind&) {
    if (!base::thread_ends()) runtime_.collapse();  // in a function of the policy
    throw;                                          // a callback ended the thread: another one goes on
  } catch (...) {
    runtime_.collapse();
  }
}

void ActionRunner::serve_until_stopped(Outbox& outbox) {
  const bool& stop = runtime_.stop_threads_;
  Dependents& dependents = runtime_.dependents_;
  for (;;) {
    // The thread that waits for room runs the parts, and stops when there is enough. Other actions come first.
    const auto leaves_parts = [&]() GPUSHARE_REQUIRES(books) {
      return parts_.empty() || waiting_ > 0 || (!runtime_.shared_ && runtime_.ladder_.anybody_waits());
    };
    while (!stop && !dependents.any_let_go() && ((actions_.empty() && leaves_parts()) || acting_)) {
      const bool look = look_again_at_ && (!retry_at_ || look_again_at_->at() < retry_at_->at());
      std::optional<base::Deadline>& next = look ? look_again_at_ : retry_at_;
      if (!next) {
        runtime_.mutex_.wait(wakes_);
      } else if (!runtime_.mutex_.wait(wakes_, *next) && !stop) {
        next.reset();
        if (!look) runtime_.authority_->room_used(sched::kNoSession, runtime_.now());
        runtime_.carry_out(nullptr, outbox);
      }
    }
    if (stop) return;
    if (dependents.any_let_go()) {
      const Unlocked unlocked(runtime_.mutex_);
      dependents.destroy_let_go();
    }
    run(true, outbox);
    if (!leaves_parts()) (void)run_part(outbox);
    const Unlocked unlocked(runtime_.mutex_);
    outbox.flush();
  }
}

}  // namespace gpushare::executor
