// A session's calls: begin, submit, close and what they wait for; tickets.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <absl/cleanup/cleanup.h>

#include "base/cancel.hpp"
#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {
namespace {

base::Status would_wait() {
  return {GPUSHARE_INVALID_STATE,
          "this call would wait for the device inside a function that the device or the runtime waits for "
          "(progress function, "
          "host function): make it from another thread"};
}

}  // namespace

base::Status check_target_slowdown(double target) {
  if (target == 0 || (std::isfinite(target) && target >= 1e-4 && target <= 10)) return {};
  return {GPUSHARE_INVALID_ARGUMENT,
          base::format("target slowdown %g must be 0 (the default) or in [0.0001, 10]", target)};
}

SessionImpl::SessionImpl(std::shared_ptr<RuntimeImpl> runtime, uint64_t id, SessionOptions options)
    : runtime_(std::move(runtime)),
      id_(id),
      options_(std::move(options)),
      move_rest_(runtime_->spill_move_loss_),
      weight_(options_.weight) {}

base::Status RuntimeImpl::check_live(const SessionImpl& session) const {
  if (session.closed_) return {GPUSHARE_INVALID_STATE, "session '" + session.name() + "' is closed"};
  if (!session.ended_ || collapsed_) return check_open();
  if (session.end_state_ == SessionState::kCancelled)
    return {GPUSHARE_CANCELLED, "session '" + session.name() + "' was cancelled"};
  if (session.end_status_.code() == GPUSHARE_DEVICE_LOST) return session.end_status_;
  return {GPUSHARE_INVALID_STATE, "session '" + session.name() + "' has failed: " +
                                      session.end_status_.to_string() + ". Close it and open another"};
}

bool SessionImpl::belongs_to(const Runtime& runtime) const {
  return runtime_.get() == &runtime;
}

base::Status SessionImpl::close() {
  RuntimeImpl& runtime = *runtime_;
  for (const Binding* binding = thread_bindings(); binding != nullptr; binding = binding->outer)
    if (binding->session.get() == this && IterationImpl::is_open(*binding))
      return {
          GPUSHARE_INVALID_STATE,
          "session '" + name() + "' cannot be closed from inside its own iteration: end the iteration first"};
  Outbox outbox(runtime);
  Section lock(runtime);
  if (NoWaitScope::active()) return would_wait();
  const bool first = !closed_;
  closed_ = true;
  runtime.end_session(*this, SessionState::kCancelled,
                      {GPUSHARE_CANCELLED, "session '" + name() + "' was closed"}, outbox);
  runtime.carry_out(nullptr, outbox);
  // Inside the destructor of a work the wait would include that work, so the thread would wait for itself.
  const auto works_left = [&]() GPUSHARE_REQUIRES(books) {
    return works_ > 0 && !runtime.collapsed_ && !CallbackScope::active();
  };
  while ((!torn_down_ && !runtime.collapsed_) || progress_calls_ > 0 || works_left()) {
    if (!runtime.actions_.acting() && runtime.actions_.pending()) {
      runtime.actions_.run(true, outbox);
    } else if (in_flight_ > 0 && lane_->in_flight > 0 && !lane_->reaping) {
      runtime.reaper_.reap(*lane_, outbox);
    } else {
      runtime.reaper_.wait(state_changed_, base::Deadline::after(GPUSHARE_NO_TIMEOUT), outbox);
    }
  }
  runtime.actions_.run(false, outbox);  // its lane is closed, others are admitted
  if (!first) return {GPUSHARE_INVALID_STATE, "session '" + name() + "' is closed already"};
  return {};
}

bool SessionImpl::closed() const {
  BooksLock lock(runtime_->mutex_);
  return closed_ && (torn_down_ || runtime_->collapsed_) && progress_calls_ == 0;
}

base::Status SessionImpl::cancel() {
  Outbox outbox(*runtime_);
  Section lock(*runtime_);
  if (closed_) return {GPUSHARE_INVALID_STATE, "session '" + name() + "' is closed"};
  runtime_->end_session(*this, SessionState::kCancelled,
                        {GPUSHARE_CANCELLED, "session '" + name() + "' was cancelled"}, outbox);
  runtime_->carry_out(nullptr, outbox);
  return {};
}

base::Status SessionImpl::wait_admitted(uint64_t timeout_ns) {
  const base::Deadline deadline = base::Deadline::after(timeout_ns);
  RuntimeImpl& runtime = *runtime_;
  Outbox outbox(runtime);
  Section lock(runtime);
  ++waits_in_;
  const absl::Cleanup waited = [this]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { --waits_in_; };
  for (;;) {
    GPUSHARE_RETURN_IF_ERROR(runtime.check_live(*this));
    const sched::SessionState state = runtime.authority_->state(id_);
    if (placed_ && state == sched::SessionState::kResident) return {};
    if (state == sched::SessionState::kPagedOut) {
      // Later page-outs keep the session in line (ActionRunner::page_out_done), because it may come back and go again
      // before this thread runs.
      runtime.authority_->wake(id_, runtime.now());
      runtime.carry_out(nullptr, outbox);
    }
    if (timeout_ns > 0 && NoWaitScope::active()) return would_wait();
    if (timeout_ns == 0 || deadline.passed()) return {GPUSHARE_TIMED_OUT, runtime.explain_wait(*this)};
    GPUSHARE_RETURN_IF_ERROR(runtime.check_wait(*this));
    runtime.reaper_.wait(state_changed_, deadline, outbox);
  }
}

const Runtime* SessionImpl::runtime() const {
  return runtime_.get();
}

SessionInfo SessionImpl::info() const {
  RuntimeImpl& runtime = *runtime_;
  {
    Outbox outbox(runtime);
    runtime.reaper_.poll(outbox);
  }
  SessionInfo info;
  memory::HeapStats heap;
  memory::LaneStats lane;
  auto& gate = const_cast<Gate&>(heap_gate_);
  if (const GatePass pass(gate); pass) {
    heap = heap_.load()->stats();
    const uint64_t kept_away = heap_.load()->kept_away_bytes();
    heap.spilled_bytes += kept_away;
    heap.live_bytes -= std::min(heap.live_bytes, kept_away);
  }
  auto& iteration_gate = const_cast<Gate&>(iteration_.gate_);
  if (const GatePass pass(iteration_gate); pass) lane = iteration_.lane_.load()->memory.load()->stats();
  BooksLock lock(runtime.mutex_);
  const bool known = !torn_down_ && runtime.authority_ != nullptr;
  info.session_id = id_;
  if (ended_) {
    info.state = end_state_;
    if (end_state_ == SessionState::kFailed) info.status = end_status_;
  } else if (!placed_) {
    info.state = SessionState::kQueued;
  } else {
    info.state = runtime.authority_->state(id_) == sched::SessionState::kPagedOut ? SessionState::kPagedOut
                                                                                  : SessionState::kResident;
  }
  if (known) {
    info.lane = runtime.authority_->lane_of(id_);
    info.compute_units = runtime.authority_->lane_compute_units(info.lane);
    info.remaining_ns = runtime.authority_->view(id_).remaining_ns;
    info.promised_persistent_bytes = persistent_promise_;
    info.promised_ephemeral_bytes = ephemeral_promise_;
  } else {
    info.remaining_ns = remaining_ns_;
  }
  info.quota_bytes = own_quota_bytes_;
  info.cls = class_.load(std::memory_order_relaxed);
  info.limit_bytes = limit_bytes_;
  info.effective_quota_bytes = known ? effective_quota_bytes() : info.quota_bytes;
  info.persistent_bytes = heap.live_bytes;
  info.ephemeral_bytes = lane.live_bytes - std::min(lane.live_bytes, lane.promoted_bytes);
  info.peak_bytes =
      std::max(peak_bytes_, heap.peak_bytes) + std::max(iteration_peak_bytes_, info.ephemeral_bytes);
  info.promoted_bytes = heap.promoted_bytes;
  info.spilled_bytes = heap.spilled_bytes;
  info.home_bytes = heap.home_bytes;
  info.iterations_done = iterations_done_;
  info.iterations_queued = pushes_.size() + (pull_waits_ ? 1 : 0);
  info.service_ns = service_ns_;
  info.queued_ns = placed_ || torn_down_ ? queued_ns_ : known ? runtime.now() - arrived_ns_ : 0;
  info.waited_ns = waited_ns_;
  info.histogram = histogram_.read();
  info.room_waited_ns = room_waited_ns_;
  info.planned_iterations = planned_iterations_;
  return info;
}

base::Status SessionImpl::set_priority(int32_t priority) {
  Outbox outbox(*runtime_);
  Section lock(*runtime_);
  GPUSHARE_RETURN_IF_ERROR(runtime_->check_live(*this));
  runtime_->authority_->set_priority(id_, priority, runtime_->now());
  runtime_->carry_out(nullptr, outbox);
  return {};
}

base::Status SessionImpl::set_weight(double weight) {
  if (!std::isfinite(weight) || weight <= 0)
    return {GPUSHARE_INVALID_ARGUMENT, base::format("weight %g must be finite and above 0", weight)};
  Outbox outbox(*runtime_);
  Section lock(*runtime_);
  GPUSHARE_RETURN_IF_ERROR(runtime_->check_live(*this));
  weight_ = weight;
  runtime_->authority_->set_weight(id_, weight);
  if (runtime_->op_gate_ != nullptr) runtime_->op_gate_->set_weight(id_, weight);
  runtime_->sessions_.divide_weight();
  runtime_->carry_out(nullptr, outbox);
  return {};
}

base::Status SessionImpl::set_remaining(uint64_t remaining_ns) {
  Outbox outbox(*runtime_);
  Section lock(*runtime_);
  GPUSHARE_RETURN_IF_ERROR(runtime_->check_live(*this));
  runtime_->authority_->set_remaining(id_, remaining_ns, runtime_->now());
  runtime_->carry_out(nullptr, outbox);
  return {};
}

base::Status SessionImpl::set_worth(double worth, uint64_t until_ns,
                                    std::shared_ptr<const WaitingWork> waiting) {
  BooksLock lock(runtime_->mutex_);
  GPUSHARE_RETURN_IF_ERROR(runtime_->check_live(*this));
  waiting_work_.swap(waiting);
  tell_worth(worth, until_ns);
  return {};
}

void SessionImpl::tell_worth(double worth, uint64_t until_ns) {
  const uint64_t left_ns = until_ns - std::min(until_ns, base::host_now_ns());
  runtime_->authority_->set_worth(id_, left_ns > 0 ? worth : 0,
                                  base::add_saturated(runtime_->now(), left_ns));
}

base::Status SessionImpl::set_target_slowdown(double target) {
  GPUSHARE_RETURN_IF_ERROR(check_target_slowdown(target));
  if (options_.cls != sched::SessionClass::kGuaranteed)
    return {GPUSHARE_INVALID_ARGUMENT,
            "session '" + name() + "' is opportunistic: a target of slowdown is for guaranteed sessions"};
  BooksLock lock(runtime_->mutex_);
  GPUSHARE_RETURN_IF_ERROR(runtime_->check_live(*this));
  target_slowdown_ = target;
  if (runtime_->op_gate_ != nullptr) runtime_->op_gate_->set_target(id_, target);
  return {};
}

base::Result<std::shared_ptr<LaunchGate>> SessionImpl::gate() {
  RuntimeImpl& runtime = *runtime_;
  std::shared_ptr<OpGate> of;
  std::shared_ptr<sched::GateLink> link;
  double weight = 1;
  bool under_way = false;
  {
    BooksLock lock(runtime.mutex_);
    GPUSHARE_RETURN_IF_ERROR(runtime.check_live(*this));
    if (runtime.virtual_time_)
      return base::Status(GPUSHARE_UNSUPPORTED, "gates need a device whose work takes real time; time on " +
                                                    runtime.device_->spec() +
                                                    " is virtual: use host or cuda");
    if (launch_gate_ != nullptr) return std::shared_ptr<LaunchGate>(launch_gate_);
    if (runtime.op_gate_ == nullptr) {
      auto made = std::make_shared<OpGate>();
      if (runtime.target_slowdown_ > 0) made->set_default_target(runtime.target_slowdown_);
      runtime.op_gate_ = std::move(made);
    }
    of = runtime.op_gate_;
    weight = weight_;
    under_way = open_ || in_flight_ > 0;
    link = runtime.authority_->open_gate(id_);
  }
  const Stay stay(runtime);  // the device stays for the events
  if (!stay) return base::Status(GPUSHARE_INVALID_STATE, "the runtime is closed");
  GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<LaunchGate> made,
                            LaunchGate::make(std::move(of), *runtime.device_, id_, name(), weight,
                                             guaranteed_in_turns(), under_way, link));
  base::Status live;
  {
    BooksLock lock(runtime.mutex_);
    live = runtime.check_live(*this);
    if (live.ok() && launch_gate_ == nullptr) {
      launch_gate_ = made;
      made->under_way(open_ || in_flight_ > 0);
      if (link != nullptr)
        link->listen([gate = std::weak_ptr<LaunchGate>(made)](bool asks) {
          if (const std::shared_ptr<LaunchGate> still = gate.lock()) still->set_asks(asks);
        });
      return made;
    }
  }
  made->shut();
  BooksLock lock(runtime.mutex_);
  if (!live.ok()) {
    runtime.op_gate_->left(id_);
    return live;
  }
  // Another thread asked at the same time, and made the gate.
  return std::shared_ptr<LaunchGate>(launch_gate_);
}

base::Status SessionImpl::allow_paging() {
  Outbox outbox(*runtime_);
  Section lock(*runtime_);
  GPUSHARE_RETURN_IF_ERROR(runtime_->check_live(*this));
  runtime_->authority_->allow_paging(id_, runtime_->now());
  runtime_->carry_out(nullptr, outbox);
  return {};
}

base::Status SessionImpl::set_spare(std::optional<double> worth_ns) {
  Outbox outbox(*runtime_);
  Section lock(*runtime_);
  GPUSHARE_RETURN_IF_ERROR(runtime_->check_live(*this));
  const bool done = runtime_->authority_->set_spare(id_, worth_ns, runtime_->now());
  state_changed_.notify_all();  // for threads that wait until it is dropped
  runtime_->carry_out(nullptr, outbox);
  if (done) return {};
  return {GPUSHARE_CANCELLED, "session '" + name() + "' is being dropped: others need its memory"};
}

void SessionImpl::note_requests(const base::RequestCounts& counts) {
  BooksLock lock(runtime_->mutex_);
  if (!runtime_->collapsed_ && !torn_down_) runtime_->authority_->note_requests(id_, counts);
}

GPUSHARE_CATCHES_FORCED_UNWIND
base::Result<std::shared_ptr<Iteration>> SessionImpl::begin(uint64_t timeout_ns) {
  RuntimeImpl& runtime = *runtime_;
  LaneSlot* lane = nullptr;
  const bool failed = has_failure_.load(std::memory_order_relaxed);  // a lent turn would not tell of it
  if (const auto borrowed = failed ? std::nullopt : runtime.mutex_.turn().borrow(*this); borrowed) {
    lane = borrowed->lane;
    iteration_.slot_ = borrowed->slot;
    iteration_.borrowed_word_ = borrowed->word;
    iteration_.can_end_.store(iteration_.serial_.load(std::memory_order_relaxed) + 1);
  } else {
    Outbox outbox(runtime);
    Section lock(runtime);
    GPUSHARE_RETURN_IF_ERROR(runtime.check_live(*this));
    if (has_failure_.exchange(false, std::memory_order_relaxed)) return std::exchange(failure_, {});
    // The thread that has borrowed a turn may not have begun its iteration yet.
    const bool begins = iteration_.serial_.load(std::memory_order_acquire) < begun_serial_;
    if (pull_waits_ || (open_ && (begins || iteration_.can_end_.load() != 0)))
      return base::Status(
          GPUSHARE_INVALID_STATE,
          "session '" + name() + "' has an iteration open already, or another thread waits to begin one");
    pull_waits_ = true;
    pull_order_ = next_order_++;
    runtime.reaper_.add_demand();
    if (pushes_.empty() && !open_) waiting_since_ns_ = runtime.now();
    runtime.sessions_.refresh_ready(*this);
    runtime.look_for_turn(*this, outbox);
    // Also when the thread is cancelled.
    absl::Cleanup withdrawing = [&]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { runtime.withdraw(*this, outbox); };
    lane = granted_.exchange(nullptr);
    if (lane == nullptr)
      GPUSHARE_RETURN_IF_ERROR(runtime.wait_for_turn(*this, timeout_ns, outbox, lock, lane));
    std::move(withdrawing).Cancel();
    iteration_.slot_ = &lane->at(lane->next - 1);
    iteration_.can_end_.store(iteration_.serial_.load(std::memory_order_relaxed) + 1);  // as it starts
  }
  base::Status begun = base::no_memory();  // until it has begun
  try {
    begun = runtime.start_iteration(*this, *lane);
  } catch (const base::ForcedUnwind&) {  // a progress function ends the thread
    iteration_.can_end_.store(0);
    (void)runtime.finish_iteration(*this, *lane, {}, begun, true);
    throw;
  }
  if (!begun.ok()) {
    iteration_.can_end_.store(0);
    const base::Status finished = runtime.finish_iteration(*this, *lane, {}, begun, true);
    return finished.ok() ? begun : finished;
  }
  return std::shared_ptr<Iteration>(shared_from_this(), &iteration_);
}

void RuntimeImpl::withdraw(SessionImpl& session, Outbox& outbox) noexcept {
  if (collapsed_) return;
  try {
    LaneSlot* const lane = session.granted_.exchange(nullptr);
    if (lane != nullptr) {
      const uint64_t sequence = lane->next - 1;
      InFlight& slot = lane->at(sequence);
      slot.outcome = base::no_memory();  // any failure serves: the iteration does not count as done
      slot.marked = false;
      lane->holder = nullptr;
      session.open_ = false;
      if (session.profile_left_ > 0 && sessions_.profiled() == &session) {
        sessions_.profile_end(session, *lane, 0);
        ++session.profile_left_;
      }
      lanes_.count_flight(*lane, true);
      ++session.in_flight_;
      if (lane->in_flight == 1) reaper_.retire(*lane, sequence, outbox);
      actions_.tear_down_if_over(session);
    } else {
      if (session.pull_waits_) reaper_.drop_demand();
      session.pull_waits_ = false;
    }
    sessions_.refresh_ready(session);
    carry_out(nullptr, outbox);
  } catch (...) {
    collapse();
  }
}

void RuntimeImpl::tell_turn(SessionImpl& session) {
  session.turn_bell_.ring();
  if (session.bell_ != nullptr) session.bell_->ring();
}

void RuntimeImpl::look_for_turn(const SessionImpl& session, Outbox& outbox) {
  dispatch_all(&session, outbox);
  actions_.collect();
  actions_.hand_over();
}

namespace {

// The bell that a session's wait for its turn expects. Made with the lock held, and destroyed with it where it has set a bell.
struct Expecting {
  ~Expecting() {
    if (own) expect(nullptr);
  }
  void expect(std::shared_ptr<base::Bell> bell) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    if (bell == session.bell_) return;
    if (session.bell_ != nullptr) session.bell_->expect(false);
    session.bell_ = std::move(bell);
    if (session.bell_ != nullptr) session.bell_->expect(true);
    own = session.bell_ != nullptr;
  }
  SessionImpl& session;
  bool own = false;
};

}  // namespace

LaneSlot* RuntimeImpl::full_lane(const SessionImpl& session) const {
  if (!session.placed_ || authority_->state(session.id_) != sched::SessionState::kResident) return nullptr;
  LaneSlot* lane = lanes_.find(authority_->lane_of(session.id_));
  return lane != nullptr && lane->in_flight >= depth_ ? lane : nullptr;
}

base::Status RuntimeImpl::wait_for_turn(SessionImpl& session, uint64_t timeout_ns, Outbox& outbox,
                                        Section& lock, LaneSlot*& granted) {
  const base::Deadline deadline = base::Deadline::after(timeout_ns);
  Expecting expecting{session};
  for (bool polled = false;; polled = true) {
    uint32_t rung = 0;
    if (shared_ && session.granted_ == nullptr && timeout_ns != 0 && !collapsed_) {
      expecting.expect(authority_->bell(session.id_));  // another one once the daemon was replaced
      if (session.bell_ != nullptr) {
        rung = session.bell_->look();
        look_for_turn(session, outbox);
      }
    }
    granted = session.granted_.exchange(nullptr);
    if (granted != nullptr) return {};
    GPUSHARE_RETURN_IF_ERROR(check_live(session));
    LaneSlot* full = full_lane(session);
    if (full != nullptr && !polled && timeout_ns != GPUSHARE_NO_TIMEOUT) {
      const Unlocked unlocked(mutex_);
      outbox.flush();
      reaper_.poll(outbox);
      continue;
    }
    if (timeout_ns > 0 && NoWaitScope::active()) return would_wait();
    if (timeout_ns == 0 || deadline.passed()) return {GPUSHARE_TIMED_OUT, explain_wait(session)};
    GPUSHARE_RETURN_IF_ERROR(check_wait(session));
    // This thread waits anyway, so it waits for the device itself.
    if (full != nullptr && !full->reaping && (deadline.never() || virtual_time()))
      reaper_.reap(*full, outbox);
    else if (session.bell_ != nullptr)
      reaper_.wait(*session.bell_, rung, deadline, outbox);
    else if (granted = reaper_.wait_for_grant(session, deadline, outbox, lock); granted != nullptr)
      return {};
  }
}

base::Result<std::shared_ptr<Ticket>> SessionImpl::submit(std::unique_ptr<Work>& work) {
  if (work == nullptr) return base::Status(GPUSHARE_INVALID_ARGUMENT, "the work is null");
  RuntimeImpl& runtime = *runtime_;
  auto ticket = std::make_shared<TicketImpl>(runtime_, shared_from_this());
  Outbox outbox(runtime);
  Section lock(runtime);
  GPUSHARE_RETURN_IF_ERROR(runtime.check_live(*this));
  if (pushes_.size() >= kMaxQueuedIterations)
    return base::Status(GPUSHARE_QUEUE_FULL,
                        base::format("session '%s' has %u iterations queued, which is the limit",
                                     name().c_str(), kMaxQueuedIterations));
  GPUSHARE_RETURN_IF_ERROR(runtime.lanes_.start_workers());
  if (pushes_.empty() && !open_ && !pull_waits_) waiting_since_ns_ = runtime.now();
  pushes_.push_back({std::move(work), ticket, next_order_++});
  last_submitted_ = ticket;
  ++works_;
  runtime.reaper_.add_demand();
  if (told_ready_ || open_) {
    runtime.reaper_.wake();
  } else {
    runtime.sessions_.refresh_ready(*this);
    runtime.carry_out(nullptr, outbox);
  }
  return std::shared_ptr<Ticket>(std::move(ticket));
}

void TicketImpl::complete(base::Status outcome, Outbox& outbox) {
  if (done_.load(std::memory_order_relaxed)) return;
  outcome_ = std::move(outcome);
  done_.store(true, std::memory_order_release);
  done_changed_.notify_all();
  outbox.sessions.push_back(std::move(session_));
}

base::Status TicketImpl::wait(uint64_t timeout_ns) {
  return wait_until(base::Deadline::after(timeout_ns), timeout_ns == 0);
}

base::Status TicketImpl::wait_until(const base::Deadline& deadline, bool poll) {
  if (done_.load(std::memory_order_acquire)) return outcome_;
  RuntimeImpl& runtime = *runtime_;
  Outbox outbox(runtime);
  if (poll) runtime.reaper_.poll(outbox);
  Section lock(runtime);
  while (!done_.load(std::memory_order_relaxed)) {
    LaneSlot* lane = lane_;
    if (!poll && NoWaitScope::active()) return would_wait();
    if (poll || deadline.passed())
      return {GPUSHARE_TIMED_OUT,
              lane != nullptr ? base::format("the iteration of session '%s' has not finished in lane %u",
                                             session_->name().c_str(), lane->id)
                              : "the iteration has not started: " + runtime.explain_wait(*session_)};
    if (lane == nullptr) GPUSHARE_RETURN_IF_ERROR(runtime.check_wait(*session_));
    if (lane == nullptr) {
      const sched::LaneId id = runtime.authority_->lane_of(session_->id_);
      lane = runtime.lanes_.find(id);
    }
    if (lane != nullptr && runtime.binds_lane(lane))
      return {
          GPUSHARE_INVALID_STATE,
          base::format("an iteration of lane %u waits for another of the same lane: it would wait for itself",
                       lane->id)};
    if (lane != nullptr && lane->in_flight > 0 && !lane->reaping && !runtime.collapsed_ &&
        (deadline.never() || runtime.virtual_time()))
      runtime.reaper_.reap(*lane, outbox);
    else
      runtime.reaper_.wait(done_changed_, deadline, outbox);
  }
  return outcome_;
}

}  // namespace gpushare::executor
