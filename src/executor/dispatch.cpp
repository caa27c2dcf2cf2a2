// Turns: from an iteration that is ready to one that has finished on the device.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "base/log.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {
namespace {

thread_local int t_no_wait = 0;
thread_local int t_callbacks = 0;

}  // namespace

NoWaitScope::NoWaitScope() {
  ++t_no_wait;
}
NoWaitScope::~NoWaitScope() {
  --t_no_wait;
}
bool NoWaitScope::active() {
  return t_no_wait > 0;
}

CallbackScope::CallbackScope() {
  ++t_callbacks;
}
CallbackScope::~CallbackScope() {
  --t_callbacks;
}
bool CallbackScope::active() {
  return t_callbacks > 0;
}

std::vector<Binding>& thread_bindings() {
  static thread_local std::vector<Binding> bindings;
  return bindings;
}

namespace {

void complain(const char* what) noexcept {
  try {
    base::log(base::kWarning, std::string("the progress function threw: ") + what);
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for the line
  }
}

}  // namespace

void Outbox::flush() noexcept {
  std::vector<Finished> calls;
  calls.swap(finished);
  for (const Finished& call : calls) {
    const NoWaitScope scope;
    try {
      runtime_.on_progress_(call.progress);
    } catch (const std::exception& error) {
      complain(error.what());
    } catch (...) {
      complain("something that is no std::exception");
    }
  }
  if (!calls.empty()) runtime_.progress_told(calls);
  while (!dropped.empty()) {
    const std::unique_ptr<Work> work = std::move(dropped.back());
    dropped.pop_back();
  }
  sessions.clear();
  tickets.clear();
  try {
    if (std::exchange(memory_changed, false)) runtime_.record_memory();
  } catch (...) {  // NOLINT(bugprone-empty-catch): a gap in the timeline
  }
}

Section::~Section() {
  if (std::uncaught_exceptions() > exceptions_) {
    if (!held_) lock();
    runtime_.collapse();
  }
  if (held_) runtime_.mutex_.unlock();
}

void RuntimeImpl::collapse() noexcept {
  if (collapsed_ || closed_) return;
  collapsed_ = true;
  if (lost_.ok()) lost_ = base::no_memory();
  stop_threads_ = true;
  for (const auto& [id, session] : sessions_) {
    for (PushItem& item : session->pushes_) complete_collapsed(item.ticket);
    if (session->granted_ != nullptr) {  // to a call that has not taken it, and will not
      session->granted_->holder = nullptr;
      session->granted_ = nullptr;
      session->open_ = false;
    }
    session->turn_came_.notify_all();
    session->state_changed_.notify_all();
  }
  for (const auto& lane : slots_) {
    if (lane == nullptr) continue;
    if (lane->pushed != nullptr) {  // granted, and nobody will run it
      lane->holder->open_ = false;
      lane->holder = nullptr;
    }
    // What runs is waited for, even now: its caller may not go away under it.
    const bool running = lane->holder != nullptr;
    for (InFlight& entry : lane->ring)
      if (!running || &entry != &lane->at(lane->next - 1)) complete_collapsed(entry.ticket);
    lane->worker_wakes.notify_all();
    lane->reaper_wakes.notify_all();
  }
  service_wakes_.notify_all();
  actor_done_.notify_all();
  retired_.notify_all();
}

void RuntimeImpl::complete_collapsed(std::shared_ptr<TicketImpl>& ticket) noexcept {
  if (ticket == nullptr || ticket->done_.load(std::memory_order_relaxed)) return;
  ticket->outcome_ = lost_;
  ticket->done_.store(true, std::memory_order_release);
  ticket->done_changed_.notify_all();
}

void RuntimeImpl::progress_told(const std::vector<Outbox::Finished>& calls) {
  base::MutexLock lock(mutex_);
  for (const Outbox::Finished& call : calls)
    if (--call.session->progress_calls_ == 0 && call.session->closed_)
      call.session->state_changed_.notify_all();
}

// Memory has locks of its own, which it may hold while it waits for the device.
void RuntimeImpl::record_memory() {
  const GatePass pass(memory_gate_.mine());
  if (!record_timeline_ || !pass) return;
  const memory::DeviceMemoryStats stats = memory_->stats();
  base::MutexLock lock(mutex_);
  const uint64_t time = now();
  timeline_.add({Timeline::Kind::kMemory, UINT32_MAX, 0, time, time, stats.persistent_bytes,
                 stats.ephemeral_bytes, scheduler_->promised_bytes()});
}

bool RuntimeImpl::binds_lane(const LaneSlot* lane) const {
  const std::vector<Binding>& bindings = thread_bindings();
  return std::any_of(bindings.begin(), bindings.end(), [lane](const Binding& binding) {
    const IterationImpl& iteration = binding.session->iteration_;
    return iteration.serial_.load(std::memory_order_relaxed) == binding.serial &&
           iteration.lane_.load(std::memory_order_relaxed) == lane;
  });
}

void RuntimeImpl::refresh_ready(SessionImpl& session) {
  if (collapsed_) return;
  // Not before it has memory: the scheduler would pick it. Paged out, the scheduler must know, to bring it
  // back.
  bool wanted = !session.ended_ && !session.open_ && (session.pull_waits_ || !session.pushes_.empty());
  if (wanted && !session.placed_) wanted = scheduler_->state(session.id_) == sched::SessionState::kPagedOut;
  if (wanted && session.profile_left_ > 0 && profiled_ != nullptr && profiled_ != &session) wanted = false;
  if (wanted == session.told_ready_) return;
  session.told_ready_ = wanted;
  if (wanted)
    scheduler_->ready(session.id_, now());
  else
    scheduler_->not_ready(session.id_, now());
}

void RuntimeImpl::dispatch_all(const SessionImpl* current, Outbox& outbox) {
  if (!lost_.ok() || paused_) return;
  std::optional<uint64_t> time;  // one reading for all lanes
  for (LaneSlot* lane : open_slots_) {
    if (lane->holder != nullptr || lane->in_flight >= depth_ ||
        lane->memory.load(std::memory_order_relaxed) == nullptr)
      continue;
    if (!time) time = now();
    dispatch(*lane, current, *time);
  }
}

void RuntimeImpl::dispatch(LaneSlot& lane, const SessionImpl* current, uint64_t time) {
  const auto picked = scheduler_->pick(lane.id, time);
  if (!picked) return;
  SessionImpl* session = find_session(*picked);
  if (session == nullptr) return;
  scheduler_->dispatched(session->id_, lane.id, time);
  // After that: a change of needs may page out whoever has nothing in flight.
  if (session->profile_left_ > 0) profile_begin(*session, lane);
  session->told_ready_ = false;
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
    if (session != current) session->turn_came_.notify_one();
  }
}

void RuntimeImpl::settle(const SessionImpl* current, Outbox& outbox) {
  if (closed_ || collapsed_) return;
  collect_actions();
  dispatch_all(current, outbox);
  collect_actions();  // profiling changes needs
  if (!actions_.empty() && !acting_) service_wakes_.notify_one();
  if (demand_ > 0 || on_progress_) kick_reapers();
}

bool RuntimeImpl::reaper_wanted(const LaneSlot& lane) const {
  return lane.in_flight > 0 && !lane.reaping && (demand_ > 0 || (on_progress_ && !virtual_time_));
}

void RuntimeImpl::kick_reapers() {
  for (LaneSlot* lane : open_slots_)
    if (lane->reaper_sleeps && reaper_wanted(*lane)) lane->reaper_wakes.notify_one();
}

bool RuntimeImpl::wait(base::ConditionVariable& changed, const base::Deadline& deadline, Outbox& outbox) {
  if (!outbox.empty()) {
    const Unlocked unlocked(mutex_);
    outbox.flush();
    return true;
  }
  ++demand_;
  kick_reapers();
  bool in_time = true;
  if (deadline.never())
    changed.wait(mutex_);
  else
    in_time = changed.wait_until(mutex_, deadline.at());
  --demand_;
  return in_time;
}

base::Status RuntimeImpl::start_iteration(SessionImpl& session, LaneSlot& lane) {
  try {
    return start_iteration_or_throw(session, lane);
  } catch (...) {
    base::MutexLock lock(mutex_);
    collapse();
    return lost_;
  }
}

base::Status RuntimeImpl::start_iteration_or_throw(SessionImpl& session, LaneSlot& lane) {
  if (collapsed_) return base::no_memory();
  std::vector<Binding>& bindings = thread_bindings();
  bindings.reserve(bindings.size() + 1);
  IterationImpl& iteration = session.iteration_;
  memory::PersistentHeap* heap = session.heap_.load(std::memory_order_relaxed);
  if (session.stream_lane_ != &lane) {
    session.stream_lane_ = &lane;
    heap->set_stream(&lane.stream->device_stream());
  }
  if (lane.current_owner().get() != &session) lane.set_owner(session.shared_from_this());
  if (lane.want_bytes.load(std::memory_order_relaxed) != lane.applied_bytes.load(std::memory_order_relaxed))
    fit_lane(lane);
  const uint64_t serial = iteration.serial_.fetch_add(1, std::memory_order_relaxed) + 1;
  base::Status status =
      lane.memory.load(std::memory_order_relaxed)->begin_iteration(*heap, session.options_.plan_iterations);
  if (status.ok()) {
    // Nobody else touches the slot's events until the iteration has ended.
    InFlight* slot = nullptr;
    slot = &lane.at(lane.next - 1);
    status = lane.stream->device_stream().record(slot->start);
    if (!status.ok()) (void)lane.memory.load(std::memory_order_relaxed)->end_iteration(nullptr);
  }
  iteration.lane_.store(&lane, std::memory_order_relaxed);
  if (status.ok()) {
    iteration.gate_.open();
    bindings.push_back({session.shared_from_this(), serial});
  }
  return status;
}

base::Status RuntimeImpl::finish_iteration(SessionImpl& session, LaneSlot& lane, base::Status outcome,
                                           const base::Status& begun) {
  const std::shared_ptr<SessionImpl> keep = session.shared_from_this();
  base::Status status;
  try {
    if (!collapsed_) status = finish_iteration_or_throw(session, lane, std::move(outcome), begun);
  } catch (...) {
    base::MutexLock lock(mutex_);
    collapse();
  }
  if (!collapsed_) return status;
  session.iteration_.gate_.close();
  session.iteration_.serial_.fetch_add(1, std::memory_order_relaxed);
  std::erase_if(thread_bindings(), [&keep](const Binding& binding) { return binding.session == keep; });
  base::MutexLock lock(mutex_);
  if (lane.holder == &session) {
    complete_collapsed(lane.at(lane.next - 1).ticket);
    lane.holder = nullptr;
    session.open_ = false;
  }
  actor_done_.notify_all();
  return lost_;
}

base::Status RuntimeImpl::finish_iteration_or_throw(SessionImpl& session, LaneSlot& lane,
                                                    base::Status outcome, const base::Status& begun) {
  IterationImpl& iteration = session.iteration_;
  memory::Lane* lane_memory = lane.memory.load(std::memory_order_relaxed);
  InFlight& slot = lane.at(lane.next - 1);
  const std::shared_ptr<SessionImpl> keep = session.shared_from_this();
  base::Status device = begun;
  bool passed = false, planned = false, marked = false;
  uint64_t peak = 0;
  if (begun.ok()) {
    iteration.gate_.close();
    const uint64_t serial = iteration.serial_.fetch_add(1, std::memory_order_relaxed);
    std::vector<Binding>& bindings = thread_bindings();
    for (size_t i = bindings.size(); i-- > 0;) {
      if (bindings[i].session != keep || bindings[i].serial != serial) continue;
      bindings.erase(bindings.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    const device::Stream& stream = lane.stream->device_stream();
    device = stream.record(slot.end);
    if (device.code() == GPUSHARE_INVALID_STATE) {
      // A graph whose capture was never ended, say because an exception passed by: this session's failure alone.
      const auto dropped = stream.drop_capture();
      if (dropped.ok() && *dropped) {
        if (outcome.ok())
          outcome = {
              GPUSHARE_INVALID_STATE,
              "session '" + session.name() +
                  "': its iteration ended while its stream captured a CUDA graph, which is dropped; end the "
                  "capture before the iteration"};
        device = stream.record(slot.end);
      }
    }
    marked = device.ok();
    if (!marked && device.code() != GPUSHARE_DEVICE_LOST) {
      // Its end cannot be marked, so nobody can be told when it passes: wait for it here. If the stream is
      // sound otherwise, this is the session's own failure.
      base::Status refused = stream.synchronize();
      std::swap(device, refused);
      passed = device.ok();
      if (passed && outcome.ok())
        outcome = refused.with_context("session '" + session.name() + "': the end of its iteration");
    }
    const base::Status reclaimed = lane_memory->end_iteration(&planned);
    if (device.ok()) device = reclaimed;
    peak = lane_memory->stats().iteration_peak_bytes;
    if (marked && device.ok()) {
      const base::Status query = slot.end.query();
      passed = query.ok();
      if (!passed && query.code() != GPUSHARE_NOT_READY) device = query;
    }
  } else if (outcome.ok()) {
    outcome = begun;
  }
  Outbox outbox(*this);
  Section lock(*this);
  if (collapsed_) return lost_;
  const uint64_t sequence = lane.next - 1;
  slot.outcome = outcome;
  slot.marked = marked;
  lane.holder = nullptr;
  session.open_ = false;
  if (planned) ++session.planned_iterations_;
  session.iteration_peak_bytes_ = std::max(session.iteration_peak_bytes_, peak);
  if (session.profile_left_ > 0 && profiled_ == &session) profile_end(session, lane, peak);
  ++lane.in_flight;
  ++session.in_flight_;
  if (!outcome.ok()) end_session(session, SessionState::kFailed, outcome, outbox);
  if (!lost_.ok()) {
    device = lost_;
    retire(lane, sequence, outbox);
  } else if (!begun.ok() && begun.code() != GPUSHARE_DEVICE_LOST) {
    // Nothing was enqueued: it is over, once those before it are.
    device = {};
    if (lane.in_flight == 1) retire(lane, sequence, outbox);
  } else if (!device.ok()) {
    lose(device, outbox);
    device = lost_;
  } else if (passed && !lane.reaping) {
    retire(lane, sequence, outbox);
  }
  maybe_tear_down(session);
  if (session.pull_waits_ || !session.pushes_.empty()) session.waiting_since_ns_ = now();
  refresh_ready(session);
  settle(nullptr, outbox);
  return device;
}

void RuntimeImpl::retire(LaneSlot& lane, uint64_t sequence, Outbox& outbox) {
  if (collapsed_) return;
  const uint64_t time = now();
  while (lane.in_flight > 0 && lane.head <= sequence) {
    InFlight& slot = lane.at(lane.head);
    SessionImpl& session = *slot.session;
    uint64_t device_ns = 0;
    if (lost_.ok() && slot.marked) {
      const auto elapsed = slot.end.elapsed_since(slot.start);
      if (elapsed.ok()) device_ns = *elapsed;
      if (record_timeline_) {
        const device::Event& before =
            lane.head == 0 || !lane.anchored ? lane.anchor : lane.at(lane.head - 1).end;
        const auto gap = slot.start.elapsed_since(before);
        const uint64_t start_ns = gap.ok() ? lane.last_end_ns + *gap : time - std::min(time, device_ns);
        lane.last_end_ns = start_ns + device_ns;
        lane.anchored = true;
        record({Timeline::Kind::kIteration, lane.id, session.id_, start_ns, lane.last_end_ns,
                session.iterations_done_ + 1});
        outbox.memory_changed = true;
      }
    }
    ++lane.head;
    --lane.in_flight;
    --session.in_flight_;
    scheduler_->finished(session.id_, device_ns, time);
    session.service_ns_ += device_ns;
    busy_ns_ += device_ns;
    const base::Status outcome = slot.outcome.ok() ? lost_ : slot.outcome;
    if (outcome.ok()) {
      ++session.iterations_done_;
      ++iterations_done_;
      if (on_progress_) {
        outbox.finished.push_back({session.shared_from_this(),
                                   {lane.id, session.id_, session.name().c_str(), session.iterations_done_,
                                    session.service_ns_, device_ns}});
        ++session.progress_calls_;
      }
    }
    slot.outcome = {};
    slot.session = nullptr;
    if (slot.ticket != nullptr) {
      complete(*slot.ticket, outcome, outbox);
      outbox.tickets.push_back(std::move(slot.ticket));
    }
    maybe_tear_down(session);
  }
  if (sync_waiters_ > 0) retired_.notify_all();
}

void RuntimeImpl::reap(LaneSlot& lane, Outbox& outbox) {
  const uint64_t sequence = lane.head;
  const device::Event& end = lane.at(sequence).end;
  lane.reaping = true;
  base::Status status;
  {
    const Unlocked unlocked(mutex_);
    outbox.flush();
    status = end.synchronize();
  }
  lane.reaping = false;
  if (collapsed_) return;
  if (!status.ok())
    lose(status, outbox);
  else if (lane.in_flight > 0 && lane.head == sequence)
    retire(lane, sequence, outbox);
  settle(nullptr, outbox);
}

void RuntimeImpl::poll(Outbox& outbox) {
  struct Head {
    LaneSlot* lane;
    uint64_t sequence;
    base::Status status;
  };
  for (bool moved = true; moved;) {
    moved = false;
    std::vector<Head> heads;
    {
      base::MutexLock lock(mutex_);
      if (!lost_.ok()) return;
      for (LaneSlot* lane : open_slots_)
        if (lane->in_flight > 0 && !lane->reaping) heads.push_back({lane, lane->head, {}});
    }
    for (Head& head : heads) head.status = head.lane->at(head.sequence).end.query();
    Section lock(*this);
    for (const Head& head : heads) {
      // If the head is still the same, the event was not recorded anew meanwhile.
      if (head.status.code() == GPUSHARE_NOT_READY || head.lane->reaping || head.lane->in_flight == 0 ||
          head.lane->head != head.sequence || !lost_.ok())
        continue;
      if (head.status.ok())
        retire(*head.lane, head.sequence, outbox);
      else
        lose(head.status, outbox);
      moved = true;
    }
    if (moved) settle(nullptr, outbox);
  }
}

void RuntimeImpl::complete(TicketImpl& ticket, base::Status outcome, Outbox& outbox) {
  if (ticket.done_.load(std::memory_order_relaxed)) return;
  ticket.outcome_ = std::move(outcome);
  ticket.done_.store(true, std::memory_order_release);
  ticket.done_changed_.notify_all();
  outbox.sessions.push_back(std::move(ticket.session_));
}

void RuntimeImpl::end_session(SessionImpl& session, SessionState state, base::Status status, Outbox& outbox) {
  if (session.ended_ || collapsed_) return;
  session.ended_ = true;
  session.end_state_ = state;
  session.end_status_ = std::move(status);
  demand_ -= session.pushes_.size();
  for (PushItem& item : session.pushes_) {
    const bool lost = session.end_status_.code() == GPUSHARE_DEVICE_LOST;
    if (item.ticket != nullptr) {
      complete(*item.ticket,
               lost ? session.end_status_
                    : base::Status(GPUSHARE_CANCELLED,
                                   "session '" + session.name() + "' ended before this iteration"),
               outbox);
      outbox.tickets.push_back(std::move(item.ticket));
    }
    outbox.dropped.push_back(std::move(item.work));
  }
  session.pushes_.clear();
  ++demand_;  // until it is torn down
  record({state == SessionState::kFailed ? Timeline::Kind::kFailed : Timeline::Kind::kCancelled, UINT32_MAX,
          session.id_, now()});
  refresh_ready(session);
  session.turn_came_.notify_all();
  session.state_changed_.notify_all();
  maybe_tear_down(session);
}

void RuntimeImpl::maybe_tear_down(SessionImpl& session) {
  if (!session.ended_ || session.open_ || session.in_flight_ > 0 || session.teardown_queued_) return;
  session.teardown_queued_ = true;
  actions_.push_back({Action::Kind::kTeardown, UINT32_MAX, 0, session.shared_from_this()});
}

void RuntimeImpl::fail_session(SessionImpl& session, base::Status status) {
  Outbox outbox(*this);
  Section lock(*this);
  end_session(session, SessionState::kFailed, std::move(status), outbox);
  settle(nullptr, outbox);
}

void RuntimeImpl::note(const base::Status& status) {
  if (status.code() != GPUSHARE_DEVICE_LOST) return;
  Outbox outbox(*this);
  Section lock(*this);
  lose(status, outbox);
  settle(nullptr, outbox);
}

void RuntimeImpl::lose(const base::Status& status, Outbox& outbox) {
  if (!lost_.ok() || closed_) return;
  lost_ = status.code() == GPUSHARE_DEVICE_LOST
              ? status
              : base::Status(GPUSHARE_DEVICE_LOST, "a lane's stream failed: " + status.to_string(),
                             status.native_code(), status.backend());
  base::log(base::kError, "device " + device_->spec() + ": " + lost_.to_string());
  std::vector<std::shared_ptr<SessionImpl>> all;
  for (const auto& [id, session] : sessions_) all.push_back(session);
  for (const auto& session : all) end_session(*session, SessionState::kFailed, lost_, outbox);
  for (LaneSlot* lane : open_slots_)
    if (lane->in_flight > 0) retire(*lane, UINT64_MAX, outbox);
  retired_.notify_all();
}

void RuntimeImpl::profile_begin(SessionImpl& session, LaneSlot& lane) {
  profiled_ = &session;
  lane.profiling = true;
  // Others may have become ready together with it, for lanes of their own.
  for (const auto& [id, other] : sessions_)
    if (other.get() != &session && other->profile_left_ > 0) refresh_ready(*other);
  // A quarter stays for persistent blocks that first iterations make (optimizer state).
  const uint64_t free = memory_->capacity_bytes() - scheduler_->promised_bytes();
  const uint64_t granule = memory_->granularity_bytes();
  const uint64_t extra = free / 4 * 3 / granule * granule;
  const uint64_t wanted = scheduler_->lane_bytes(lane.id) + extra;
  if (scheduler_->set_need(session.id_, session.persistent_promise_, wanted, now()).ok())
    session.ephemeral_promise_ = wanted;
}

void RuntimeImpl::profile_end(SessionImpl& session, LaneSlot& lane, uint64_t peak_bytes) {
  profiled_ = nullptr;
  lane.profiling = false;
  --session.profile_left_;
  session.profile_peak_bytes_ = std::max(session.profile_peak_bytes_, peak_bytes);
  const uint64_t wanted =
      std::min(session.profile_peak_bytes_ + session.profile_peak_bytes_ / kProfileMarginDivisor,
               session.ephemeral_promise_);
  if (scheduler_->set_need(session.id_, session.persistent_promise_, wanted, now()).ok())
    session.ephemeral_promise_ = wanted;
  for (const auto& [id, other] : sessions_)
    if (other->profile_left_ > 0) refresh_ready(*other);
}

void RuntimeImpl::run_worker(LaneSlot& lane) {
  for (;;) {
    std::unique_ptr<Work> work;
    std::shared_ptr<SessionImpl> session;
    {
      base::MutexLock lock(mutex_);
      while (lane.pushed == nullptr && !stop_threads_) lane.worker_wakes.wait(mutex_);
      if (lane.pushed == nullptr || collapsed_) return;
      work = std::move(lane.pushed);
      session = lane.holder->shared_from_this();
    }
    const base::Status begun = start_iteration(*session, lane);
    base::Status outcome;
    if (begun.ok()) {
      const auto threw = [&session](const char* what) {
        try {
          return base::Status(GPUSHARE_CALLBACK_FAILED,
                              "session '" + session->name() + "': its iteration threw" + what);
        } catch (...) {
          return base::no_memory();
        }
      };
      try {
        outcome = work->run(std::shared_ptr<Iteration>(session, &session->iteration_));
      } catch (const std::bad_alloc&) {
        outcome = base::no_memory();
      } catch (const std::exception& error) {
        outcome = threw(error.what());
      } catch (...) {
        outcome = threw("");
      }
    }
    const base::Status ignored = finish_iteration(*session, lane, std::move(outcome), begun);
    work.reset();
  }
}

void RuntimeImpl::run_reaper(LaneSlot& lane) {
  Outbox outbox(*this);
  base::MutexLock lock(mutex_);
  try {
    reap_lane(lane, outbox);
  } catch (...) {
    collapse();
  }
}

void RuntimeImpl::reap_lane(LaneSlot& lane, Outbox& outbox) {
  for (;;) {
    while (!stop_threads_ && !reaper_wanted(lane)) {
      lane.reaper_sleeps = true;
      lane.reaper_wakes.wait(mutex_);
      lane.reaper_sleeps = false;
    }
    if (stop_threads_) return;
    reap(lane, outbox);
    const Unlocked unlocked(mutex_);
    outbox.flush();
  }
}

}  // namespace gpushare::executor
