// An iteration's end on the device: who waits for it, and what is accounted when it has passed.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "base/bell.hpp"
#include "base/cancel.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {

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
        const device::Event& before = lane.chained ? lane.at(lane.head - 1).end : lane.anchor;
        const uint64_t before_ns = lane.chained ? lane.last_end_ns : lane.anchor_ns;
        const auto gap = slot.start.elapsed_since(before);
        const uint64_t start_ns =
            std::max(lane.last_end_ns, gap.ok() ? before_ns + *gap : time - std::min(time, device_ns));
        lane.last_end_ns = start_ns + device_ns;
        record({Timeline::Kind::kIteration, lane.id, session.id_, start_ns, lane.last_end_ns,
                session.iterations_done_ + 1});
        outbox.memory_changed = true;
      }
    }
    lane.chained = slot.marked;
    ++lane.head;
    --lane.in_flight;
    --under_way_;
    --session.in_flight_;
    authority_->finished(session.id_, device_ns, time);
    if (op_gate_ != nullptr && session.options_.cls == sched::SessionClass::kGuaranteed)
      op_gate_->finished(session.id_, slot.outcome.ok() ? device_ns : 0, time);
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
        ++staying_;
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

void RuntimeImpl::complete(TicketImpl& ticket, base::Status outcome, Outbox& outbox) {
  if (ticket.done_.load(std::memory_order_relaxed)) return;
  ticket.outcome_ = std::move(outcome);
  ticket.done_.store(true, std::memory_order_release);
  ticket.done_changed_.notify_all();
  outbox.sessions.push_back(std::move(ticket.session_));
}

void RuntimeImpl::poll(Outbox& outbox) {
  // Heads are looked at without the lock: a runtime that closes keeps its lanes until this thread has left.
  const GatePass pass(memory_gate_.mine());
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
      BooksLock lock(mutex_);
      if (!lost_.ok()) return;
      for (LaneSlot* lane : lanes_.opened())
        if (lane->in_flight > 0 && !lane->reaping)
          heads.push_back({lane, &lane->at(lane->head).end, lane->head, {}});
    }
    for (Head& head : heads) head.status = head.end->query();
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

// While one lives a thread waits for the device: somebody looks at what is in flight.
class RuntimeImpl::Demanding {
 public:
  explicit Demanding(RuntimeImpl& runtime) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS : runtime_(runtime) {
    ++runtime_.demand_;
    runtime_.kick_reapers();
  }
  ~Demanding() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { --runtime_.demand_; }
  Demanding(const Demanding&) = delete;
  Demanding& operator=(const Demanding&) = delete;

 private:
  RuntimeImpl& runtime_;
};

GPUSHARE_CATCHES_FORCED_UNWIND
bool RuntimeImpl::wait(base::ConditionVariable& changed, const base::Deadline& deadline, Outbox& outbox) {
  if (!outbox.empty()) {
    const Unlocked unlocked(mutex_);
    outbox.flush();
    return true;
  }
  const Demanding demanding(*this);
  try {
    const base::CancelPoint cancelled_here;
    if (!deadline.never()) return mutex_.wait_until(changed, deadline.at());
    mutex_.wait(changed);
    return true;
  } catch (const base::ForcedUnwind&) {
    mutex_.lock();  // which the unwound wait has let go
    base::thread_ends() = true;
    throw;
  }
}

GPUSHARE_CATCHES_FORCED_UNWIND
void RuntimeImpl::wait_for_bell(base::Bell& bell, uint32_t seen, const base::Deadline& deadline,
                                Outbox& outbox) {
  const Demanding demanding(*this);
  const Unlocked unlocked(mutex_);
  outbox.flush();
  try {
    const base::CancelPoint cancelled_here;
    bell.wait(seen, deadline);
  } catch (const base::ForcedUnwind&) {
    base::thread_ends() = true;
    throw;
  }
}

void RuntimeImpl::reap(LaneSlot& lane, Outbox& outbox) {
  const uint64_t sequence = lane.head;
  const device::Event& end = lane.at(sequence).end;
  struct Reaping {
    Reaping(RuntimeImpl& of, LaneSlot& in) : runtime(of), lane(in) { lane.reaping = true; }
    ~Reaping() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      lane.reaping = false;
      if (runtime.closing_) runtime.actor_done_.notify_all();
    }
    Reaping(const Reaping&) = delete;
    Reaping& operator=(const Reaping&) = delete;
    RuntimeImpl& runtime;
    LaneSlot& lane;
  };
  base::Status status;
  {
    const Reaping reaping(*this, lane);
    const Unlocked unlocked(mutex_);
    outbox.flush();
    status = end.synchronize();
  }
  if (collapsed_) return;
  if (!status.ok())
    lose(status, outbox);
  else if (lane.in_flight > 0 && lane.head == sequence)
    retire(lane, sequence, outbox);
  settle(nullptr, outbox);
}

bool RuntimeImpl::reaper_wanted(const LaneSlot& lane) const {
  return lane.in_flight > 0 && !lane.reaping &&
         (demand_ > 0 || ((on_progress_ || op_gate_ != nullptr) && !virtual_time_) ||
          (shared_ && authority_->wants_drained(lane.id)));
}

void RuntimeImpl::kick_reapers() {
  for (LaneSlot* lane : lanes_.opened())
    if (lane->reaper_sleeps && reaper_wanted(*lane)) lane->reaper_wakes.notify_one();
}

GPUSHARE_CATCHES_FORCED_UNWIND
void RuntimeImpl::run_reaper(LaneSlot& lane) {
  Outbox outbox(*this);
  BooksLock lock(mutex_);
  try {
    reap_lane(lane, outbox);
  } catch (const base::ForcedUnwind&) {
    if (!base::thread_ends()) collapse();  // in a function of the policy
    throw;                                 // a callback ended the thread: another one goes on
  } catch (...) {
    collapse();
  }
}

void RuntimeImpl::reap_lane(LaneSlot& lane, Outbox& outbox) {
  for (;;) {
    while (!stop_threads_ && !reaper_wanted(lane)) {
      lane.reaper_sleeps = true;
      mutex_.wait(lane.reaper_wakes);
      lane.reaper_sleeps = false;
    }
    if (stop_threads_) return;
    reap(lane, outbox);
    const Unlocked unlocked(mutex_);
    outbox.flush();
  }
}

}  // namespace gpushare::executor
