// SPDX-License-Identifier: Apache-2.0
#include "executor/reaper.hpp"

#include <algorithm>
#include <utility>

#include <absl/cleanup/cleanup.h>

#include "base/cancel.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

void Reaper::retire(LaneSlot& lane, uint64_t sequence, Outbox& outbox) {
  if (runtime_.collapsed_) return;
  const uint64_t time = runtime_.now();
  while (lane.in_flight > 0 && lane.head <= sequence) retire_head(lane, time, outbox);
  if (sync_waiters_ > 0) told();
}

void Reaper::retire_head(LaneSlot& lane, uint64_t time, Outbox& outbox) {
  InFlight& slot = lane.at(lane.head);
  SessionImpl& session = *slot.session;
  const uint64_t device_ns = device_time(lane, slot, time, outbox);
  lane.chained = slot.marked;
  ++lane.head;
  runtime_.lanes_.count_flight(lane, false);
  --under_way_;
  --session.in_flight_;
  tell_finished(session, slot, device_ns, time);
  session.service_ns_ += device_ns;
  busy_ns_ += device_ns;
  if (slot.ticket != nullptr && slot.outcome.ok()) slot.outcome = std::move(slot.ticket->failure_);
  const base::Status outcome = slot.outcome.ok() ? runtime_.lost_ : slot.outcome;
  if (outcome.ok()) count_done(lane, slot, device_ns, outbox);
  slot.outcome = {};
  slot.session = nullptr;
  if (slot.ticket != nullptr) {
    slot.ticket->complete(outcome, outbox);
    outbox.tickets.push_back(std::move(slot.ticket));
  }
  runtime_.actions_.tear_down_if_over(session);
}

// The device time of the lane's head, which also goes to the timeline; 0: unknown.
uint64_t Reaper::device_time(LaneSlot& lane, const InFlight& slot, uint64_t time, Outbox& outbox) {
  if (!runtime_.lost_.ok() || !slot.marked) return 0;
  const auto elapsed = slot.end.elapsed_since(slot.start);
  const uint64_t device_ns = elapsed.ok() ? *elapsed : 0;
  if (!runtime_.record_timeline_) return device_ns;
  const device::Event& before = lane.chained ? lane.at(lane.head - 1).end : lane.anchor;
  const uint64_t before_ns = lane.chained ? lane.last_end_ns : lane.anchor_ns;
  const auto gap = slot.start.elapsed_since(before);
  const uint64_t start_ns =
      std::max(lane.last_end_ns, gap.ok() ? before_ns + *gap : time - std::min(time, device_ns));
  lane.last_end_ns = start_ns + device_ns;
  runtime_.record({Timeline::Kind::kIteration, lane.id, slot.session->id_, start_ns, lane.last_end_ns,
                   slot.session->iterations_done_ + 1, slot.peak_bytes});
  outbox.memory_changed = true;
  return device_ns;
}

// Tells the launch gates and the scheduler.
void Reaper::tell_finished(SessionImpl& session, const InFlight& slot, uint64_t device_ns, uint64_t time) {
  if (session.launch_gate_ != nullptr) {
    if (session.in_flight_ == 0 && !session.open_) session.launch_gate_->under_way(false);
    if (session.launch_gate_->was_held_up())
      if (const auto measured = runtime_.authority_->measured()) measured->held_up(session.id_);
  }
  // Not while another one is open: that one's function may still be saying what comes after it.
  if (const auto& waits = session.waiting_work_;
      waits != nullptr && session.in_flight_ == 0 && !session.open_) {
    const WaitingWork::Worth next = waits->worth();
    session.tell_worth(next.cost, next.until_ns);
  }
  runtime_.authority_->finished(session.id_, device_ns, time);
  const uint64_t measured_ns = slot.outcome.ok() ? device_ns : 0;
  if (runtime_.shared_)
    runtime_.authority_->work_ended(session.id_, measured_ns);
  else if (runtime_.op_gate_ != nullptr && session.guaranteed_in_turns())
    runtime_.op_gate_->finished(session.id_, measured_ns);
}

// An iteration that did not fail.
void Reaper::count_done(const LaneSlot& lane, const InFlight& slot, uint64_t device_ns, Outbox& outbox) {
  SessionImpl& session = *slot.session;
  ++session.iterations_done_;
  ++iterations_done_;
  session.histogram_.add(device_ns, slot.waited_ns);
  runtime_.authority_->note_iteration(session.id_, device_ns, slot.waited_ns);
  if (!runtime_.on_progress_) return;
  outbox.finished.push_back({session.shared_from_this(),
                             {lane.id, session.id_, session.name().c_str(), session.iterations_done_,
                              session.service_ns_, device_ns}});
  ++session.progress_calls_;
  ++runtime_.staying_;
}

void Reaper::poll(Outbox& outbox) {
  // Heads are looked at without the lock: a runtime that closes keeps its lanes until this thread has left.
  const GatePass pass(runtime_.memory_gate_.mine());
  if (!pass) return;
  struct Head {
    LaneSlot* lane;
    const device::Event* end;
    uint64_t sequence;
    base::Status status;
  };
  for (bool moved = true; moved;) {
    moved = false;
    std::vector<Head> heads;
    {
      BooksLock lock(runtime_.mutex_);
      if (!runtime_.lost_.ok()) return;
      for (LaneSlot* lane : runtime_.lanes_.flying())
        if (!lane->reaping) heads.push_back({lane, &lane->at(lane->head).end, lane->head, {}});
      std::sort(heads.begin(), heads.end(),
                [](const Head& a, const Head& b)
                    GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { return a.lane->opened_at < b.lane->opened_at; });
    }
    for (Head& head : heads) head.status = head.end->query();
    Section lock(runtime_);
    for (const Head& head : heads) {
      // If the head is still the same, the event was not recorded anew meanwhile.
      if (head.status.code() == GPUSHARE_NOT_READY || head.lane->reaping || head.lane->in_flight == 0 ||
          head.lane->head != head.sequence || !runtime_.lost_.ok())
        continue;
      if (head.status.ok())
        retire(*head.lane, head.sequence, outbox);
      else
        runtime_.lose(head.status, outbox);
      moved = true;
    }
    if (moved) runtime_.carry_out(nullptr, outbox);
  }
}

// While one lives there is demand: a thread looks at what is in flight.
class Reaper::Demanding {
 public:
  explicit Demanding(Reaper& reaper) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS : reaper_(reaper) {
    ++reaper_.looking_;
    reaper_.wake();
  }
  ~Demanding() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { --reaper_.looking_; }
  Demanding(const Demanding&) = delete;
  Demanding& operator=(const Demanding&) = delete;

 private:
  Reaper& reaper_;
};

GPUSHARE_CATCHES_FORCED_UNWIND
bool Reaper::wait(base::ConditionVariable& changed, const base::Deadline& deadline, Outbox& outbox) {
  Books& mutex = runtime_.mutex_;
  if (!outbox.empty()) {
    const Unlocked unlocked(mutex);
    outbox.flush();
    return true;
  }
  const Demanding demanding(*this);
  try {
    const base::CancelPoint cancelled_here;
    return mutex.wait(changed, deadline);
  } catch (const base::ForcedUnwind&) {
    mutex.lock();  // which the unwound wait has let go
    base::thread_ends() = true;
    throw;
  }
}

GPUSHARE_CATCHES_FORCED_UNWIND
void Reaper::wait(base::Bell& bell, uint32_t seen, const base::Deadline& deadline, Outbox& outbox) {
  const Demanding demanding(*this);
  const Unlocked unlocked(runtime_.mutex_);
  outbox.flush();
  try {
    const base::CancelPoint cancelled_here;
    bell.wait(seen, deadline);
  } catch (const base::ForcedUnwind&) {
    base::thread_ends() = true;
    throw;
  }
}

GPUSHARE_CATCHES_FORCED_UNWIND
LaneSlot* Reaper::wait_for_grant(SessionImpl& session, const base::Deadline& deadline, Outbox& outbox,
                                 Section& lock) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  wake();
  const uint32_t seen = session.turn_bell_.look();
  lock.unlock();
  try {
    outbox.flush();
    const base::CancelPoint cancelled_here;
    session.turn_bell_.wait(seen, deadline);
  } catch (const base::ForcedUnwind&) {
    base::thread_ends() = true;
    lock.lock();
    throw;
  } catch (...) {
    lock.lock();
    throw;
  }
  LaneSlot* const lane = session.granted_.exchange(nullptr);
  if (lane == nullptr) lock.lock();
  return lane;
}

void Reaper::reap(LaneSlot& lane, Outbox& outbox) {
  const uint64_t sequence = lane.head;
  const device::Event& end = lane.at(sequence).end;
  base::Status status;
  {
    lane.reaping = true;
    const absl::Cleanup reaped = [&]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      lane.reaping = false;
      if (runtime_.closing_) runtime_.actions_.changed().notify_all();  // close() waits for this thread
    };
    const Unlocked unlocked(runtime_.mutex_);
    outbox.flush();
    status = end.synchronize();
  }
  if (runtime_.collapsed_) return;
  if (!status.ok())
    runtime_.lose(status, outbox);
  else if (lane.in_flight > 0 && lane.head == sequence)
    retire(lane, sequence, outbox);
  runtime_.carry_out(nullptr, outbox);
}

base::Status Reaper::synchronize(const base::Deadline& deadline, bool poll_only) {
  Outbox outbox(runtime_);
  if (poll_only) poll(outbox);
  Section lock(runtime_);
  GPUSHARE_RETURN_IF_ERROR(runtime_.check_open());
  std::vector<std::pair<LaneSlot*, uint64_t>> targets;  // lane, and what its head must reach
  for (LaneSlot* lane : runtime_.lanes_.opened()) targets.emplace_back(lane, lane->head + lane->in_flight);
  for (const auto& [lane, target] : targets) {
    while (lane->head < target && lane->in_flight > 0) {
      if (runtime_.collapsed_) return runtime_.lost_;
      if (!poll_only && NoWaitScope::active())  // also if the time is over already
        return {GPUSHARE_INVALID_STATE, "a function that the runtime waits for cannot wait for the runtime"};
      if (poll_only || deadline.passed())
        return {GPUSHARE_TIMED_OUT, "work enqueued on the lanes has not finished"};
      if (!lane->reaping && (deadline.never() || runtime_.virtual_time_)) {
        reap(*lane, outbox);
      } else {
        ++sync_waiters_;
        const absl::Cleanup waited = [this]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
          --sync_waiters_;
          if (runtime_.closing_) runtime_.actions_.changed().notify_all();
        };
        wait(retired_, deadline, outbox);
      }
    }
    GPUSHARE_RETURN_IF_ERROR(runtime_.lost_);
    if (runtime_.closing_) break;
  }
  return runtime_.lost_;
}

bool Reaper::wanted(const LaneSlot& lane) const {
  return lane.in_flight > 0 && !lane.reaping &&
         (demand() > 0 ||
          ((runtime_.on_progress_ || runtime_.op_gate_ != nullptr) && !runtime_.virtual_time_) ||
          (runtime_.shared_ && runtime_.authority_->wants_drained(lane.id)));
}

void Reaper::wake() {
  for (LaneSlot* lane : runtime_.lanes_.flying())
    if (lane->reaper_sleeps && wanted(*lane)) lane->reaper_wakes.notify_one();
}

GPUSHARE_CATCHES_FORCED_UNWIND
void Reaper::run(LaneSlot& lane) {
  Outbox outbox(runtime_);
  BooksLock lock(runtime_.mutex_);
  try {
    run_until_stopped(lane, outbox);
  } catch (const base::ForcedUnwind&) {
    if (!base::thread_ends()) runtime_.collapse();  // in a function of the policy
    throw;                                          // a callback ended the thread: another one goes on
  } catch (...) {
    runtime_.collapse();
  }
}

void Reaper::run_until_stopped(LaneSlot& lane, Outbox& outbox) {
  for (;;) {
    while (!runtime_.stop_threads_ && !wanted(lane)) {
      lane.reaper_sleeps = true;
      runtime_.mutex_.wait(lane.reaper_wakes);
      lane.reaper_sleeps = false;
    }
    if (runtime_.stop_threads_) return;
    reap(lane, outbox);
    const Unlocked unlocked(runtime_.mutex_);
    outbox.flush();
  }
}

}  // namespace gpushare::executor
