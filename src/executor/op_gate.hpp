// op_gate.hpp: holds launches of opportunistic sessions to what sched::OpController allows. Only c_api includes it
// besides this folder.
//
// The runtime tells when iterations of guaranteed sessions begin and end on the device; an opportunistic session asks
// its LaunchGate before each launch. While no guaranteed session is known a flag says that there is nothing to ask.
//
// On a shared device the daemon has the controller, for the sessions of all processes. A gate with a link reads its terms from memory that
// the daemon writes, and says there what it lets in. The daemon says by a message when launches must begin to ask; until then that memory
// says that they are not seen.
//
// Lock order: the runtime's lock, then OpGate's, then a link's (sched/gate_link.hpp). OpGate's is never held while the device works, a
// stream is used or a bell is waited for.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/role.hpp"
#include "device/device.hpp"
#include "executor/gate.hpp"
#include "sched/gate_link.hpp"
#include "sched/op_controller.hpp"

namespace gpushare::executor {

class LaunchGate;
class Stream;

inline constexpr base::Role has_gates;  // who holds OpGate's mutex: it guards the members of its LaunchGates

// The gates of a runtime, which has one OpGate. Threads: any.
class OpGate {
 public:
  using NowNs = uint64_t (*)();
  explicit OpGate(NowNs now_ns = base::host_now_ns) : now_ns_(now_ns) {}

  // ---- the runtime, with its lock held; guaranteed sessions
  void began(uint64_t session, double target_slowdown);
  void finished(uint64_t session, uint64_t device_ns);
  void left(uint64_t session);  // of any class
  void set_target(uint64_t session, double target_slowdown);
  void set_weight(uint64_t session, double weight);
  // The session counts as one of class `cls` from now on.
  void set_class(uint64_t session, sched::SessionClass cls, double weight);
  void set_default_target(double target_slowdown);

 private:
  friend class LaunchGate;
  void changed() GPUSHARE_REQUIRES(mutex_, has_gates);  // flags and waiting launches follow the controller
  void notify() GPUSHARE_REQUIRES(mutex_, has_gates);   // waiting launches look again

  const NowNs now_ns_;
  base::Mutex mutex_;
  base::ConditionVariable changed_;
  sched::OpController controller_ GPUSHARE_GUARDED_BY(mutex_);
  uint64_t version_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  std::set<uint64_t> guaranteed_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<LaunchGate*> gates_ GPUSHARE_GUARDED_BY(mutex_);
};

struct GateInfo {
  double share = 1;                 // of the time that is allowed now
  uint64_t in_flight_limit_ns = 0;  // UINT64_MAX: none
  uint64_t in_flight_ns = 0;        // entered and not known to be done
  uint64_t entries = 0, waits = 0,
           waited_ns = 0;  // entries that found it closed, those that waited, and how long
  bool open = true;
  // The guaranteed session with the least credit; 0: there is none.
  uint64_t guaranteed_id = 0;
  sched::OpController::Estimate estimate;
};

// The gate of one session. Threads: any. Outlives its session as an object; entering then fails.
class LaunchGate {
 public:
  // `always_open`: of a guaranteed session; OpGate::set_class() changes it. `under_way`: see there. Makes its events on `device`, which
  // outlives shut(). `link`: to what another process decides; null: OpGate does.
  static base::Result<std::shared_ptr<LaunchGate>> make(std::shared_ptr<OpGate> of, device::Device& device,
                                                        uint64_t session, std::string name, double weight,
                                                        bool always_open, bool under_way,
                                                        std::shared_ptr<sched::GateLink> link = nullptr);
  ~LaunchGate();
  LaunchGate(const LaunchGate&) = delete;
  LaunchGate& operator=(const LaunchGate&) = delete;

  // Nonzero: enter() has something to decide.
  const std::atomic<uint32_t>& closed() const { return closed_; }
  // Whether a launch was held up since this was last asked.
  bool was_held_up() { return held_up_.exchange(false, std::memory_order_relaxed); }
  // Returns when work that takes `ns` may be launched. `stream`: where it will be; the gate then finds out by events
  // when it is done. Null: done() says so. Errors: TIMED_OUT, CANCELLED (the session ends), INVALID_STATE (in a
  // NoWaitScope it would wait; the stream is gone), the device's.
  base::Status enter(const Stream* stream, uint64_t ns, uint64_t timeout_ns);
  void done(uint64_t ns);
  // With a link: whether launches ask. Until the first call they do.
  void set_asks(bool asks);
  // Whether iterations of the session are open or on the device. When none is, its work on lanes' streams is done.
  void under_way(bool any);
  GateInfo info();

  // The session ends: waiting calls return. Does not wait.
  void end() noexcept;
  // Waits until nobody is inside, and gives the events back. After end().
  void shut();

 private:
  friend class OpGate;
  struct Mark {
    device::Event event;
    uint64_t ns = 0;  // of work that is done when the event has passed
  };
  LaunchGate(std::shared_ptr<OpGate> of, uint64_t session, std::string name, bool always_open, bool under_way,
             std::shared_ptr<sched::GateLink> link)
      : of_(std::move(of)),
        session_(session),
        name_(std::move(name)),
        link_(std::move(link)),
        always_open_(always_open),
        under_way_(under_way) {}
  struct Answer {
    bool in = false;
    bool full = false;                    // the work in flight is as much as it may be
    bool drains = false;                  // and is waited for
    uint64_t again_ns = sched::kUnknown;  // when to look again though nothing has changed
  };
  Answer ask(const sched::OpController::Allowance& allowed, const Stream* stream, uint64_t ns,
             uint64_t now_ns) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  // `rings`: of the bell, when the terms were read.
  void wait(base::RoleLock& lock, uint32_t rings, uint64_t again_ns, uint64_t now_ns,
            const base::Deadline& deadline) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  // With a link: goes over to the slot where it leads now. Returns how often the slot's bell has rung.
  uint32_t follow_link() GPUSHARE_REQUIRES(has_gates);
  // With a link: reads the terms anew. Returns how often the bell has rung before.
  uint32_t read_terms(uint64_t now_ns) GPUSHARE_REQUIRES(has_gates);
  // With a link: the flag follows from the state.
  void refresh_flag() GPUSHARE_REQUIRES(has_gates);
  sched::OpController::Allowance allowance(uint64_t now_ns,
                                           uint64_t work_ns = 0) const GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  uint64_t admits_at(uint64_t ns, uint64_t now_ns) const GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  // The session asks its gate, for the first time since a guaranteed iteration ended perhaps.
  void asks() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  // A call begins or ends to wait.
  void starts_to_wait() GPUSHARE_REQUIRES(has_gates);
  void waited(uint64_t since_ns) GPUSHARE_REQUIRES(has_gates);
  void let_in(const Stream* stream, uint64_t ns, uint64_t now_ns) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  // The flag says from now on that launches ask, and those that an open gate did not see may be on the device.
  void close_flag() GPUSHARE_REQUIRES(has_gates);
  // The work that events tell about is done.
  void streams_done() GPUSHARE_REQUIRES(has_gates);
  // Tells the controller whether work of the session may be on the device.
  void tell() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  bool mark_due(const sched::OpController::Allowance& allowed, uint64_t ns) const
      GPUSHARE_REQUIRES(has_gates);
  // Records an event behind the work that no event follows yet. Releases the lock meanwhile.
  base::Status mark(base::RoleLock& lock, const Stream* stream) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  // Waits for the oldest work in flight, marking it first if need be. Releases the lock meanwhile.
  // NOT_READY with `poll`, which does not wait.
  base::Status drain(base::RoleLock& lock, const Stream* stream,
                     bool poll) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS;
  base::Status timed_out(const sched::OpController::Allowance& allowed) const;

  const std::shared_ptr<OpGate> of_;
  const uint64_t session_;
  const std::string name_;
  const std::shared_ptr<sched::GateLink> link_;  // null: the controller is OpGate's
  std::shared_ptr<base::GateSlot> slot_
      GPUSHARE_GUARDED_BY(has_gates);                     // where the link led last; null: nowhere
  base::GateTerms terms_ GPUSHARE_GUARDED_BY(has_gates);  // as they were read there
  bool must_ask_ GPUSHARE_GUARDED_BY(has_gates) = true;   // with a link: see set_asks()
  bool always_open_ GPUSHARE_GUARDED_BY(has_gates);
  std::atomic<uint32_t> closed_{0};
  std::atomic<bool> held_up_{false};
  Gate users_;  // of the events
  static constexpr size_t kMarks = 4;
  std::array<Mark, kMarks> marks_ GPUSHARE_GUARDED_BY(has_gates);
  size_t first_mark_ GPUSHARE_GUARDED_BY(has_gates) = 0, marked_ GPUSHARE_GUARDED_BY(has_gates) = 0;
  bool draining_ GPUSHARE_GUARDED_BY(has_gates) = false;  // a thread is in drain()
  bool ended_ GPUSHARE_GUARDED_BY(has_gates) = false;
  bool shut_ GPUSHARE_GUARDED_BY(has_gates) = false;  // the slot may be another session's from now on
  // Entered and not known to be done: all of it, the part that no event follows yet, the part that done() tells about.
  uint64_t in_flight_ns_ GPUSHARE_GUARDED_BY(has_gates) = 0, unmarked_ns_ GPUSHARE_GUARDED_BY(has_gates) = 0;
  uint64_t by_call_ns_ GPUSHARE_GUARDED_BY(has_gates) = 0;
  bool unmarked_ GPUSHARE_GUARDED_BY(has_gates) = false;      // work on streams that no event follows yet
  bool side_ GPUSHARE_GUARDED_BY(has_gates) = false;          // some of it on streams that belong to no lane
  bool under_way_ GPUSHARE_GUARDED_BY(has_gates) = false;     // see under_way()
  uint64_t let_in_at_ns_ GPUSHARE_GUARDED_BY(has_gates) = 0;  // the last
  double debt_ns_ GPUSHARE_GUARDED_BY(has_gates) = 0;  // work let in that the share has not paid for yet
  uint64_t paid_at_ns_ GPUSHARE_GUARDED_BY(has_gates) = 0;
  uint64_t entries_ GPUSHARE_GUARDED_BY(has_gates) = 0, waits_ GPUSHARE_GUARDED_BY(has_gates) = 0;
  uint64_t waited_ns_ GPUSHARE_GUARDED_BY(has_gates) = 0;
  bool used_ GPUSHARE_GUARDED_BY(has_gates) = false;  // since a guaranteed iteration ended
  uint32_t waiting_ GPUSHARE_GUARDED_BY(has_gates) = 0;
};

}  // namespace gpushare::executor
