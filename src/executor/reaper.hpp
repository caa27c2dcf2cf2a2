// reaper.hpp: the end of iterations on the device: which threads wait for the end, and what is entered in the books
// after it. Other folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/bell.hpp"
#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "executor/lent_turn.hpp"
#include "executor/runtime.hpp"

namespace gpushare::executor {

class Outbox;
class RuntimeImpl;
class Section;
class SessionImpl;
struct InFlight;
struct LaneSlot;

// A thread that waits for something of the runtime's waits for the device itself where it can. A lane's own thread
// waits for the device only while there is demand, so a virtual clock moves only then.
class Reaper {
 public:
  explicit Reaper(RuntimeImpl& runtime) : runtime_(runtime) {}

  // ---- demand: reasons to wait for the device on somebody's behalf: iterations queued, threads waiting, sessions ending
  void add_demand() GPUSHARE_REQUIRES(books) { ++demand_; }
  void drop_demand(uint64_t reasons = 1) GPUSHARE_REQUIRES(books) { demand_ -= reasons; }
  uint64_t demand() const GPUSHARE_REQUIRES(books) { return demand_ + looking_; }
  // The demand of sessions: iterations queued, threads that wait for a turn, sessions that end.
  uint64_t demand_of_sessions() const GPUSHARE_REQUIRES(books) { return demand_; }
  void wake() GPUSHARE_REQUIRES(books);  // wakes the lanes' threads that the demand needs

  // ---- accounts
  void granted() GPUSHARE_REQUIRES(books) { ++under_way_; }
  bool any_under_way() const GPUSHARE_REQUIRES(books) { return under_way_ > 0; }
  // Enters iterations that were begun and ended with a lent turn.
  void account(uint64_t iterations, uint64_t device_ns) GPUSHARE_REQUIRES(books) {
    iterations_done_ += iterations;
    busy_ns_ += device_ns;
  }
  uint64_t iterations_done() const GPUSHARE_REQUIRES(books) { return iterations_done_; }
  uint64_t busy_ns() const GPUSHARE_REQUIRES(books) { return busy_ns_; }

  // ---- ends
  // Retires the lane's iterations up to `sequence`, whose end events have passed.
  void retire(LaneSlot& lane, uint64_t sequence, Outbox& outbox) GPUSHARE_REQUIRES(books);
  // Retires the iterations that have finished, without waiting.
  void poll(Outbox& outbox) GPUSHARE_EXCLUDES(books);
  // Waits for the head of the lane and retires it. Releases the lock meanwhile. The lane must have something in flight,
  // and no other thread may be reaping it.
  void reap(LaneSlot& lane, Outbox& outbox) GPUSHARE_REQUIRES(books);
  // Waits until all iterations that the lanes have now have finished. Errors: TIMED_OUT, DEVICE_LOST, INVALID_STATE.
  base::Status synchronize(const base::Deadline& deadline, bool poll_only) GPUSHARE_EXCLUDES(books);
  // Some thread is between synchronize()'s waits.
  bool anybody_synchronizes() const GPUSHARE_REQUIRES(books) { return sync_waiters_ > 0; }
  void told() GPUSHARE_REQUIRES(books) { retired_.notify_all(); }  // wakes the threads that synchronize

  // ---- waits, with demand
  // Waits on `changed` once, or flushes the outbox. May return without a reason. False if `deadline` has passed.
  bool wait(base::ConditionVariable& changed, const base::Deadline& deadline, Outbox& outbox)
      GPUSHARE_REQUIRES(books);
  void wait(base::Bell& bell, uint32_t seen, const base::Deadline& deadline, Outbox& outbox)
      GPUSHARE_REQUIRES(books);
  // Waits once until the session's turn_bell_ rings, and returns the lane that was granted to the session, else null. The
  // lock is let go and, with a lane, not taken again: the thread that granted the turn has done all that needs the lock.
  // The caller is a pull, whose demand counts already.
  LaneSlot* wait_for_grant(SessionImpl& session, const base::Deadline& deadline, Outbox& outbox,
                           Section& lock) GPUSHARE_REQUIRES(books);

  void run(LaneSlot& lane);  // the lane's thread

 private:
  class Demanding;
  bool wanted(const LaneSlot& lane) const GPUSHARE_REQUIRES(books);
  void run_until_stopped(LaneSlot& lane, Outbox& outbox) GPUSHARE_REQUIRES(books);
  void retire_head(LaneSlot& lane, uint64_t time, Outbox& outbox) GPUSHARE_REQUIRES(books);
  uint64_t device_time(LaneSlot& lane, const InFlight& slot, uint64_t time, Outbox& outbox)
      GPUSHARE_REQUIRES(books);
  void tell_finished(SessionImpl& session, const InFlight& slot, uint64_t device_ns, uint64_t time)
      GPUSHARE_REQUIRES(books);
  void count_done(const LaneSlot& lane, const InFlight& slot, uint64_t device_ns, Outbox& outbox)
      GPUSHARE_REQUIRES(books);

  RuntimeImpl& runtime_;
  uint64_t demand_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t looking_ GPUSHARE_GUARDED_BY(books) = 0;    // threads that look at what is in flight
  uint64_t under_way_ GPUSHARE_GUARDED_BY(books) = 0;  // iterations granted and not retired
  uint64_t iterations_done_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t busy_ns_ GPUSHARE_GUARDED_BY(books) = 0;
  uint32_t sync_waiters_ GPUSHARE_GUARDED_BY(books) = 0;
  base::ConditionVariable retired_;
};

}  // namespace gpushare::executor
