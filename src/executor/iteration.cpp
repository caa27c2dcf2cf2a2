// An iteration on the host, from its grant to its end: memory, events, the thread that has it open, and the lane worker
// that runs submitted iterations.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <exception>
#include <utility>

#include <absl/cleanup/cleanup.h>

#include "base/cancel.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

bool RuntimeImpl::binds_lane(const LaneSlot* lane) const {
  for (const Binding* binding = thread_bindings(); binding != nullptr; binding = binding->outer)
    if (IterationImpl::is_open(*binding) &&
        binding->session->iteration_.lane_.load(std::memory_order_relaxed) == lane)
      return true;
  return false;
}

bool IterationImpl::is_open(const Binding& binding) {
  return binding.session->iteration_.serial_.load(std::memory_order_relaxed) == binding.serial;
}

void IterationImpl::abandon(const Binding& binding) noexcept {
  SessionImpl& session = *binding.session;
  IterationImpl& iteration = session.iteration_;
  uint64_t serial = binding.serial;
  if (!iteration.can_end_.compare_exchange_strong(serial, 0)) return;
  base::Status why = base::no_memory();
  try {
    why = {
        GPUSHARE_CALLBACK_FAILED,
        "session '" + session.name() + "': the thread that had its iteration open exited without ending it"};
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the shorter message
  }
  (void)session.runtime_->finish_iteration(session, *iteration.lane_.load(std::memory_order_relaxed), why, {},
                                           true);
}

uint64_t IterationImpl::session_id() const {
  return session_.id_;
}

base::Result<std::shared_ptr<Stream>> IterationImpl::stream() {
  const GatePass pass(gate_);
  if (!pass) return base::Status(GPUSHARE_INVALID_STATE, "the iteration has ended");
  return std::shared_ptr<Stream>(lane_.load(std::memory_order_relaxed)->stream);
}

memory::LanePass IterationImpl::pass() const {
  if (session_.quota_bytes_.load(std::memory_order_relaxed) > 0) return {};
  return lane_.load(std::memory_order_relaxed)->memory.load(std::memory_order_relaxed)->pass();
}

base::Status IterationImpl::end() {
  return end_with({});
}

base::Status IterationImpl::fail(base::Status status) {
  const int32_t group = status.code() / 100;
  if (group < 2 || group > 4)
    status = {GPUSHARE_CALLBACK_FAILED, status.message().empty() ? "the iteration failed" : status.message()};
  return end_with(status.with_context("session '" + session_.name() + "'"));
}

base::Status IterationImpl::end_with(base::Status outcome) {
  const bool fatal = !outcome.ok();
  if (can_end_.exchange(0) == 0)
    return {GPUSHARE_INVALID_STATE,
            "the iteration has ended already, or was submitted and ends when its function returns"};
  return session_.runtime_->finish_iteration(session_, *lane_.load(std::memory_order_relaxed),
                                             std::move(outcome), {}, fatal);
}

GPUSHARE_CATCHES_FORCED_UNWIND
base::Status RuntimeImpl::start_iteration(SessionImpl& session, LaneSlot& lane) {
  try {
    return start_iteration_or_throw(session, lane);
  } catch (const base::ForcedUnwind&) {
    throw;
  } catch (...) {
    BooksLock lock(mutex_);
    collapse();
    return lost_;
  }
}

base::Status RuntimeImpl::start_iteration_or_throw(SessionImpl& session, LaneSlot& lane) {
  if (collapsed_ || !prepare_binding()) return base::no_memory();
  IterationImpl& iteration = session.iteration_;
  memory::PersistentHeap* heap = session.heap_.load(std::memory_order_relaxed);
  if (session.stream_lane_.load(std::memory_order_relaxed) != &lane) {
    session.stream_lane_.store(&lane, std::memory_order_relaxed);
    heap->set_stream(&lane.stream->device_stream());
  }
  if (lane.owner_address.load(std::memory_order_relaxed) != &session)
    lane.set_owner(session.shared_from_this());
  if (lane.profiling.load(std::memory_order_relaxed)) {
    // The thread that begins the iteration asks for the bytes: on a shared device it waits for the daemon's answer.
    Outbox outbox(*this);
    Section lock(*this);
    sessions_.profile_ask(session, lane);
    carry_out(nullptr, outbox);
  }
  // Above its quota, the session gives free memory back first; then blocks go out.
  if (session.above_quota_.load(std::memory_order_relaxed)) session.give_back_above_quota(true);
  base::Status status;
  if (session.options_.allow_spill) status = session.move_spilled(lane);
  if (lane.want_bytes.load(std::memory_order_relaxed) != lane.applied_bytes.load(std::memory_order_relaxed))
    lanes_.fit(lane);
  const uint64_t serial = iteration.serial_.fetch_add(1, std::memory_order_release) + 1;
  if (status.ok())
    status =
        lane.memory.load(std::memory_order_relaxed)->begin_iteration(*heap, session.options_.plan_iterations);
  if (status.ok()) {
    // Nobody else touches the slot's events until the iteration has ended.
    status = lane.stream->device_stream().record(iteration.slot_->start);
    if (!status.ok()) (void)lane.memory.load(std::memory_order_relaxed)->end_iteration(nullptr);
  }
  iteration.lane_.store(&lane, std::memory_order_relaxed);
  if (status.ok()) {
    iteration.gate_.open();
    bind(session.shared_from_this(), serial);
  }
  return status;
}

GPUSHARE_CATCHES_FORCED_UNWIND
base::Status RuntimeImpl::finish_iteration(SessionImpl& session, LaneSlot& lane, base::Status outcome,
                                           const base::Status& begun, bool fatal) {
  const std::shared_ptr<SessionImpl> keep = session.shared_from_this();
  base::Status status;
  try {
    if (!collapsed_) status = finish_iteration_or_throw(session, lane, std::move(outcome), begun, fatal);
  } catch (const base::ForcedUnwind&) {
    throw;  // by a progress function, once the books are done
  } catch (...) {
    BooksLock lock(mutex_);
    collapse();
  }
  if (!collapsed_) {
    if (session.above_quota_.load(std::memory_order_relaxed)) session.give_back_above_quota(false);
    if (session.retired_.load(std::memory_order_relaxed)) session.give_back_unused();
    return status;
  }
  session.iteration_.gate_.close();
  session.iteration_.serial_.fetch_add(1, std::memory_order_relaxed);
  unbind_all(session);
  BooksLock lock(mutex_);
  if (lane.holder == &session) {
    complete_collapsed(lane.at(lane.next - 1).ticket);
    lane.holder = nullptr;
    session.open_ = false;
  }
  actions_.changed().notify_all();
  return lost_;
}

// Marks the end of the session's iteration in its stream, or waits for the device where that cannot be marked.
void RuntimeImpl::mark_end(const SessionImpl& session, const device::Stream& stream, InFlight& slot,
                           base::Status& outcome, HostEnd& end) {
  end.device = stream.record(slot.end);
  if (end.device.code() == GPUSHARE_INVALID_STATE) {
    // A graph's capture was never ended, for example because of an exception. Only this session fails.
    const auto dropped = stream.drop_capture();
    if (dropped.ok() && *dropped) {
      if (outcome.ok())
        outcome = {
            GPUSHARE_INVALID_STATE,
            "session '" + session.name() +
                "': its iteration ended while its stream captured a CUDA graph, which is dropped; end the "
                "capture before the iteration"};
      end.device = stream.record(slot.end);
    }
  }
  end.marked = end.device.ok();
  if (!end.marked && end.device.code() != GPUSHARE_DEVICE_LOST) {
    // The iteration's end cannot be marked, so the call waits for the device here. If the stream is
    // sound otherwise, this is the session's own failure.
    base::Status refused = stream.synchronize();
    std::swap(end.device, refused);
    end.passed = end.device.ok();
    if (end.passed && outcome.ok())
      outcome = refused.with_context("session '" + session.name() + "': the end of its iteration");
  }
}

// The end of an iteration on the host that had begun: marks it in the lane's stream and gives the lane's memory back. `borrowed`: the word
// of a lent turn, 0 without one.
void RuntimeImpl::end_on_host(SessionImpl& session, LaneSlot& lane, uint64_t borrowed, base::Status& outcome,
                              HostEnd& end) {
  IterationImpl& iteration = session.iteration_;
  InFlight& slot = *iteration.slot_;
  iteration.gate_.close();
  const uint64_t serial = iteration.serial_.fetch_add(1, std::memory_order_relaxed);
  unbind(session, serial);
  mark_end(session, lane.stream->device_stream(), slot, outcome, end);
  const base::Status reclaimed =
      lane.memory.load(std::memory_order_relaxed)->end_iteration(&end.planned, &end.peak);
  if (end.device.ok()) end.device = reclaimed;
  if (borrowed != 0 && end.marked && end.device.ok() && outcome.ok()) {
    const auto elapsed_ns = slot.end.elapsed_since(slot.start);
    end.lent =
        elapsed_ns.ok() && mutex_.turn().give_back(borrowed, {*elapsed_ns, end.planned ? 1u : 0u, end.peak});
    if (end.lent) return session.histogram_.add_time(*elapsed_ns);
  }
  if (!end.marked || !end.device.ok()) return;
  const base::Status query = slot.end.query();
  end.passed = query.ok();
  if (!end.passed && query.code() != GPUSHARE_NOT_READY) end.device = query;
}

// Enters the end on the host into the lane's iterations in flight. `device` becomes the call's result.
void RuntimeImpl::retire_ended(LaneSlot& lane, const base::Status& begun, bool passed, base::Status& device,
                               Outbox& outbox) {
  const uint64_t sequence = lane.next - 1;
  if (!lost_.ok()) {
    device = lost_;
    reaper_.retire(lane, sequence, outbox);
  } else if (!begun.ok() && begun.code() != GPUSHARE_DEVICE_LOST) {
    // Nothing was enqueued, so the iteration is over once those before it are over.
    device = {};
    if (lane.in_flight == 1) reaper_.retire(lane, sequence, outbox);
  } else if (!device.ok()) {
    lose(device, outbox);
    device = lost_;
  } else if (passed && !lane.reaping) {
    reaper_.retire(lane, sequence, outbox);
  }
}

base::Status RuntimeImpl::finish_iteration_or_throw(SessionImpl& session, LaneSlot& lane,
                                                    base::Status outcome, const base::Status& begun,
                                                    bool fatal) {
  InFlight& slot = *session.iteration_.slot_;
  const uint64_t borrowed = std::exchange(session.iteration_.borrowed_word_, 0);
  HostEnd end;
  end.device = begun;
  if (begun.ok())
    end_on_host(session, lane, borrowed, outcome, end);
  else if (outcome.ok())
    outcome = begun;
  if (end.lent) return {};
  Outbox outbox(*this);
  Section lock(*this);
  if (collapsed_) return lost_;
  slot.outcome = outcome;
  slot.marked = end.marked;
  slot.peak_bytes = end.peak;
  lane.holder = nullptr;
  session.open_ = false;
  if (end.planned) ++session.planned_iterations_;
  if (std::exchange(session.leaves_shared_lane_, false))
    authority_->has_own_lane(session.id_, !lane.memory.load(std::memory_order_relaxed)->is_shared(), now());
  session.iteration_peak_bytes_ = std::max(session.iteration_peak_bytes_, end.peak);
  if (session.profile_left_ > 0 && sessions_.profiled() == &session)
    sessions_.profile_end(session, lane, end.peak);
  lanes_.count_flight(lane, true);
  ++session.in_flight_;
  const bool ends = !outcome.ok() && (fatal || !begun.ok() || session.options_.fail_on_error);
  if (ends) end_session(session, SessionState::kFailed, outcome, outbox);
  retire_ended(lane, begun, end.passed, end.device, outbox);
  actions_.tear_down_if_over(session);
  if (session.pull_waits_ || !session.pushes_.empty()) session.waiting_since_ns_ = now();
  sessions_.refresh_ready(session);
  carry_out(nullptr, outbox);
  if (end.device.ok() && end.passed) lend_turn(session, lane);
  return end.device.ok() && !ends ? outcome : end.device;
}

void RuntimeImpl::run_worker(LaneSlot& lane) {
  for (;;) {
    std::unique_ptr<Work> work;
    std::shared_ptr<SessionImpl> session;
    {
      BooksLock lock(mutex_);
      while (lane.pushed == nullptr && !stop_threads_) mutex_.wait(lane.worker_wakes);
      if (lane.pushed == nullptr || collapsed_) return;
      work = std::move(lane.pushed);
      session = lane.holder->shared_from_this();
      session->iteration_.slot_ = &lane.at(lane.next - 1);
      if (const auto& ticket = session->iteration_.slot_->ticket; ticket != nullptr)
        ticket->serial_ = session->iteration_.serial_.load(std::memory_order_relaxed) + 1;  // as it starts
    }
    run_pushed(*session, lane, std::move(work));
  }
}

GPUSHARE_CATCHES_FORCED_UNWIND
void RuntimeImpl::run_pushed(SessionImpl& session, LaneSlot& lane, std::unique_ptr<Work> work) {
  const absl::Cleanup over = [&] { destroy(session, std::move(work), false); };
  const auto failed = [&session](const char* what, const char* message) {
    try {
      return base::Status(GPUSHARE_CALLBACK_FAILED, "session '" + session.name() + "': its iteration " +
                                                        what + (*message == 0 ? "" : ": ") + message);
    } catch (...) {
      return base::no_memory();
    }
  };
  base::Status begun = base::no_memory();  // until it has begun
  base::Status outcome;
  try {
    begun = start_iteration(session, lane);
    if (begun.ok())
      outcome = work->run(std::shared_ptr<Iteration>(session.shared_from_this(), &session.iteration_));
  } catch (const std::bad_alloc&) {
    outcome = base::no_memory();
  } catch (const std::exception& error) {
    outcome = failed("threw", error.what());
  } catch (const base::ForcedUnwind&) {
    base::thread_ends() = true;
    (void)finish_iteration(session, lane, failed("ended its thread (pthread_exit)", ""), begun, true);
    throw;
  } catch (...) {
    outcome = failed("threw", "");
  }
  (void)finish_iteration(session, lane, std::move(outcome), begun, false);
}

}  // namespace gpushare::executor
