// internal.hpp: the parts of a runtime and the locks that guard them. Other folders do not include it.
//
// One lock, RuntimeImpl::mutex_, orders everything that the scheduler is told or asked: the state of sessions
// and lanes. The fields that it guards lie in many objects, so the annotations name the role `books` of its holder.
// A turn that nobody else wants is lent without the lock (lent_turn.hpp). The lock is held for bookkeeping only, never
// while the device, memory or a function of the caller's works; reading clocks and elapsed times is allowed. Allocation
// does not take it: an iteration or session keeps its memory from going away with a Gate. On a shared device it is let go
// while the daemon's answer is awaited.
//
// WorkMutexes (base/work_mutex.hpp) order what waits for the device: SessionImpl::grow_mutex_, then
// LaneSlot::size_mutex, then those of memory. A thread takes them before any lock. Builds with GPUSHARE_CHECK_WAITS
// prove that a thread holds no lock when it waits.
//
// A decision that changes memory (open a lane, admit, page, close) is queued as an action. Actions are carried out in
// order, one at a time, without the lock, by a caller that may block or by a thread of the runtime's
// (action_runner.hpp).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/bell.hpp"
#include "base/clock.hpp"
#include "base/fork.hpp"
#include "base/move_budget.hpp"
#include "base/mutex.hpp"
#include "base/no_memory.hpp"
#include "base/service_thread.hpp"
#include "base/steps.hpp"
#include "base/work_mutex.hpp"
#include "executor/action_runner.hpp"
#include "executor/binding.hpp"
#include "executor/dependents.hpp"
#include "executor/gate.hpp"
#include "executor/lane_set.hpp"
#include "executor/lent_turn.hpp"
#include "executor/memory_ladder.hpp"
#include "executor/op_gate.hpp"
#include "executor/range.hpp"
#include "executor/range_table.hpp"
#include "executor/reaper.hpp"
#include "executor/runtime.hpp"
#include "executor/session_table.hpp"
#include "executor/side_streams.hpp"
#include "executor/stream.hpp"
#include "executor/timeline.hpp"
#include "sched/authority.hpp"
#include "sched/elastic.hpp"
#include "sched/move_rest.hpp"

namespace gpushare::client {
class Images;
class RemoteAuthority;
}  // namespace gpushare::client
namespace gpushare::sched {
struct SchedulerOptions;
}  // namespace gpushare::sched

namespace gpushare::executor {

class RuntimeImpl;
class SessionImpl;
class Outbox;
class Section;
struct LaneSlot;

// Iterations that are profiled when a session opens without a declared need. They run with the free bytes. Afterwards
// the session is promised what they used, plus a margin.
inline constexpr uint32_t kProfileIterations = 2;
inline constexpr uint64_t kProfileMarginDivisor = 16;
// The time from a failed try to place a session until the next try. The time doubles from the first to the last.
inline constexpr uint64_t kFirstRetryNs = 10'000'000, kLastRetryNs = 1'000'000'000;
// The number of tries, in 0.6 s, to page in a session that waits for no other session's room. After them the session
// fails.
inline constexpr uint32_t kMaxTriesIn = 6;
// Times an out-of-memory function may ask for another try in one allocation.
inline constexpr int kMaxCallbackTries = 4;

class TicketImpl final : public Ticket {
 public:
  TicketImpl(std::shared_ptr<RuntimeImpl> runtime, std::shared_ptr<SessionImpl> session)
      : runtime_(std::move(runtime)), session_(std::move(session)) {}
  base::Status wait(uint64_t timeout_ns) override;
  // Says that the ticket's iteration has run, or never will.
  void complete(base::Status outcome, Outbox& outbox) GPUSHARE_REQUIRES(books);

  // For the runtime and its sessions. With `poll` the call asks the device and does not wait.
  base::Status wait_until(const base::Deadline& deadline, bool poll);

  const std::shared_ptr<RuntimeImpl> runtime_;
  std::shared_ptr<SessionImpl> session_ GPUSHARE_GUARDED_BY(books);  // let go once it is done
  LaneSlot* lane_ GPUSHARE_GUARDED_BY(books) = nullptr;              // from its grant on
  std::atomic<bool> done_{false};
  base::Status outcome_;  // does not change once done_ is set, which publishes it
  base::ConditionVariable done_changed_;
  // The serial of its iteration, once that runs, and what a host function of that iteration threw.
  uint64_t serial_ GPUSHARE_GUARDED_BY(books) = 0;
  base::Status failure_ GPUSHARE_GUARDED_BY(books);
};

// A submitted iteration. `order` ranks it among the session's pushed and pulled ones.
struct PushItem {
  std::unique_ptr<Work> work;
  std::shared_ptr<TicketImpl> ticket;
  uint64_t order = 0;
};

class IterationImpl final : public Iteration {
 public:
  explicit IterationImpl(SessionImpl& session) : session_(session) {}
  uint64_t session_id() const override;
  base::Result<memory::Address> alloc(uint64_t bytes, uint64_t alignment) override;
  base::Status alloc_many(std::span<const uint64_t> bytes, uint64_t alignment, memory::Address* out,
                          size_t served) override;
  base::Status keep(memory::Address address) override;
  base::Result<std::shared_ptr<Stream>> stream() override;
  base::Status end() override;
  base::Status fail(base::Status status) override;
  memory::LanePass pass() const override;

  // The iteration that `binding` was made for is still open.
  static bool is_open(const Binding& binding);
  // The iteration's thread exits: ends the iteration as failed, unless another thread ends it.
  static void abandon(const Binding& binding) noexcept;

  // For the runtime and its sessions.
  base::Status end_with(base::Status outcome);

  SessionImpl& session_;
  mutable Gate gate_;  // open while the iteration is
  std::atomic<LaneSlot*> lane_{nullptr};
  InFlight* slot_ = nullptr;  // of the iteration granted or under way: its events
  // The word for LentTurn::give_back() if the iteration began with a lent turn; else 0.
  uint64_t borrowed_word_ = 0;
  std::atomic<uint64_t> serial_{
      0};  // of the iteration under way: rises by one as each begins, and as it ends
  // The serial of a pulled iteration, from its grant to the first end() or fail(), which wins the right to end it; else 0.
  std::atomic<uint64_t> can_end_{0};
};

class SessionImpl final : public Session, public std::enable_shared_from_this<SessionImpl> {
 public:
  SessionImpl(std::shared_ptr<RuntimeImpl> runtime, uint64_t id, SessionOptions options);
  uint64_t id() const override { return id_; }
  const std::string& name() const override { return options_.name; }
  bool belongs_to(const Runtime& runtime) const override;
  base::Status close() override;
  bool closed() const override;
  base::Status cancel() override;
  base::Status wait_admitted(uint64_t timeout_ns) override;
  SessionInfo info() const override;
  std::string explain_wait() const override;
  bool at_rest() const GPUSHARE_REQUIRES(books);  // resident, with no iteration begun or asked for
  base::Status check_wait() const;                // see check_wait_for (waits.hpp)
  base::Status set_quota(uint64_t bytes) override;
  base::Status set_priority(int32_t priority) override;
  base::Status set_weight(double weight) override;
  base::Status set_remaining(uint64_t remaining_ns) override;
  base::Status set_worth(double worth, uint64_t until_ns,
                         std::shared_ptr<const WaitingWork> waiting) override;
  void tell_worth(double worth, uint64_t until_ns) GPUSHARE_REQUIRES(books);
  base::Status set_target_slowdown(double target) override;
  base::Result<std::shared_ptr<LaunchGate>> gate() override;
  base::Status allow_paging() override;
  base::Status set_spare(std::optional<double> worth_ns) override;
  void note_requests(const base::RequestCounts& counts) override;
  bool dropped() const override { return dropped_.load(std::memory_order_acquire); }
  void retire() override;
  base::Result<memory::Address> alloc(memory::Kind kind, uint64_t bytes, uint64_t alignment) override;
  base::Status free(memory::Address address) override;
  base::Result<HeldStream> hold(uint64_t timeout_ns) override;
  base::Result<memory::Address> alloc_ephemeral(uint64_t bytes, uint64_t alignment) override {
    return iteration_.alloc(bytes, alignment);
  }
  uint64_t open_iteration(memory::LanePass* out_pass) const override;
  memory::HeapDoor* open_door(const void* name) override;
  base::Status order_stream(const Stream& stream) override;
  base::Result<std::shared_ptr<Range>> open_range(RangeOptions options) override;
  void reset_peak() override;
  base::Result<std::shared_ptr<SharedImage>> open_image(const SharedImageOptions& options) override;
  const Runtime* runtime() const override;
  base::Result<std::shared_ptr<Iteration>> begin(uint64_t timeout_ns) override;
  base::Result<std::shared_ptr<Ticket>> submit(std::unique_ptr<Work>& work) override;

  // ---- for the parts of the executor, which alone see this header ----
  // allocation.cpp
  base::Result<memory::Address> attempt(const Attempt& wanted);
  base::Result<memory::Address> attempt_within_quota(const Attempt& wanted);
  base::Result<memory::Address> attempt_spilled(const Attempt& wanted);
  // As attempt(), while the caller keeps the heap's granules from moving.
  base::Result<memory::Address> attempt_unmoved(const Attempt& wanted);
  // OK at once if there is more already than *seen_bytes, what there was when the caller last tried: another
  // thread has grown it.
  base::Status grow_persistent(uint64_t bytes, uint64_t alignment, uint64_t* seen_bytes);
  // `least_ephemeral`: E rises to it in the same step, where a growth of P had lowered it.
  void shrink_persistent(uint64_t persistent_bytes, uint64_t least_ephemeral);
  void shrink_persistent_alone(uint64_t persistent_bytes,
                               uint64_t least_ephemeral = 0);  // for who has grow_mutex_
  base::Status grow_ephemeral(const Attempt& wanted, uint64_t* seen_bytes);
  // While one lives no other thread asks for a larger need of the session: the answer may be waited for without the lock.
  class NeedTurn;
  // The next step when no more can be promised (`why` says so): free bytes of the heap serve the iteration until its
  // end.
  base::Status borrow_free(const Attempt& wanted, const memory::LaneStats& stats, uint64_t missing,
                           base::Status why);
  base::Status trade_for_quota(uint64_t ephemeral_bytes, const std::function<base::Status()>& apply,
                               base::Status why);
  void shrink_ephemeral(uint64_t ephemeral_bytes);
  // Raises the promise: P to at least `heap_bytes` and the bytes of the session's ranges, with `range_bytes` more for a
  // range that grows, and E to at least `ephemeral_bytes`. Then calls `apply`, and takes the raise back if that fails.
  base::Status promise(uint64_t heap_bytes, uint64_t range_bytes, uint64_t ephemeral_bytes,
                       const std::function<base::Status()>& apply);
  // Grows a range. Where a quota leaves no room, free bytes of the heap are given back for that.
  base::Status grow_range(uint64_t bytes, const std::function<base::Status()>& apply);
  void shrink_range(uint64_t bytes);
  // For a guaranteed session: opportunistic sessions that may move send the missing bytes out at their next boundaries.
  // True once they have, or have not begun an iteration for a while.
  bool wait_for_others(uint64_t bytes, const base::Deadline& until);
  // How much more the device has to promise for so many more bytes of P.
  uint64_t room_for(uint64_t bytes) const;
  void ask_for_home(uint64_t bytes);
  base::Status check_quota(uint64_t bytes);
  // Before the first block of a shared lane is kept: the session's E is promised as its own as well, until the
  // iteration's end has moved it.
  base::Status promise_own_lane();
  // spilled.cpp
  bool may_move() const;
  uint64_t movable_bytes() const GPUSHARE_REQUIRES(books);  // device bytes that it could send out
  // Called at a boundary by the thread that is about to begin an iteration. Brings blocks home, or sends them out.
  // Errors: DEVICE_LOST, INTERNAL (bytes of the session are lost); whatever else fails leaves the blocks where they
  // are.
  base::Status move_spilled(LaneSlot& lane);
  base::Status send_out(const device::Stream& stream, uint64_t bytes);
  // True if the session has nothing in flight and nothing to begin.
  bool idle() const GPUSHARE_REQUIRES(books) {
    return !open_ && in_flight_ == 0 && granted_ == nullptr && !pull_waits_ && pushes_.empty();
  }
  base::Status come_home(LaneSlot& lane);
  void claim_what_it_has(uint64_t extra);
  // capacity.cpp. The coordinator's decision about the session.
  void set_terms(sched::SessionClass cls, uint64_t limit_bytes) GPUSHARE_REQUIRES(books);
  void refresh_quota() GPUSHARE_REQUIRES(books);
  bool guaranteed() const {
    return class_.load(std::memory_order_relaxed) == sched::SessionClass::kGuaranteed;
  }
  // The class for turns and launch gates: the better of the session's own class and the class as which its bytes count.
  sched::SessionClass turn_class() const {
    return std::min(class_.load(std::memory_order_relaxed), options_.cls);
  }
  bool guaranteed_in_turns() const { return turn_class() == sched::SessionClass::kGuaranteed; }
  // The quota, or the promise while that is still above the quota; 0 without a quota.
  uint64_t effective_quota_bytes() const GPUSHARE_REQUIRES(books);
  // At a boundary: no iteration of its own is open; `begins`: this thread is about to begin one.
  void give_back_above_quota(bool begins);
  // For a retired session without an iteration, open or to come: gives its promise back, except for its live blocks.
  void give_back_unused();

  // owner.cpp. The stream of the open iteration's lane; without an open iteration, as hold().
  base::Result<HeldStream> hold_home();
  // Work enqueued on `later` from now on runs after the work already on `home`.
  base::Status order_after(const device::Stream& home, const device::Stream& later);
  // Called once the session's gates are closed.
  void drop_order_event() {
    base::MutexLock lock(order_mutex_);
    order_event_ = {};
  }

  const std::shared_ptr<RuntimeImpl> runtime_;
  const uint64_t id_;
  const SessionOptions options_;
  IterationImpl iteration_{*this};

  std::atomic<memory::PersistentHeap*> heap_{nullptr};
  Gate heap_gate_;              // open from placement to teardown: users of heap_
  Gate residence_gate_;         // the same, but closed while paged out
  base::WorkMutex grow_mutex_;  // one growth of its promises, or move of its blocks, at a time
  base::Mutex order_mutex_;     // held for the two calls of order_stream()
  device::Event order_event_ GPUSHARE_GUARDED_BY(order_mutex_);  // until its memory goes
  base::Mutex quota_mutex_;  // with a quota: from the check to the allocation
  std::atomic<uint64_t> quota_bytes_{
      options_.quota_bytes};                              // the quota in force, from the two below; 0 = none
  std::atomic<sched::SessionClass> class_{options_.cls};  // as it counts: a coordinator may change it
  std::atomic<bool> dropped_{false};
  std::atomic<bool> retired_{false};
  std::atomic<bool> above_quota_{false};  // the promise may exceed the quota: the next boundary checks

  // Blocks that move. Written by the thread that begins the session's iteration, but for asked_out_.
  std::atomic<uint64_t> home_promise_{0};  // the part of range_promise_ that is for blocks that came home
  std::atomic<uint64_t> asked_out_{0};     // what a guaranteed session has asked for
  std::atomic<bool> moves_idle_{false};    // another thread moves them, and has grow_mutex_
  std::atomic<uint64_t> spilled_ephemeral_{0};  // what the last iteration spilled, for its lane to grow
  uint32_t home_rest_ = 0, out_rest_ = 0;       // boundaries before it tries to come home, or go out, again
  sched::MoveRest move_rest_;                   // used by the thread that begins the session's iterations

  uint64_t own_quota_bytes_ GPUSHARE_GUARDED_BY(books) = options_.quota_bytes;
  uint64_t limit_bytes_ GPUSHARE_GUARDED_BY(books) = 0;  // by the coordinator, in whole granules
  bool closed_ GPUSHARE_GUARDED_BY(books) = false;       // by its owner
  bool ended_ GPUSHARE_GUARDED_BY(books) = false;        // cancelled, failed or closed: no new iterations
  bool torn_down_ GPUSHARE_GUARDED_BY(books) = false;    // memory returned, unknown to the scheduler
  bool teardown_queued_ GPUSHARE_GUARDED_BY(books) = false;
  SessionState end_state_ GPUSHARE_GUARDED_BY(books) = SessionState::kCancelled;
  base::Status end_status_ GPUSHARE_GUARDED_BY(books);
  // The failure of a host function whose iteration has no ticket. The next begin() reports it. has_failure_ says
  // whether there is one.
  base::Status failure_ GPUSHARE_GUARDED_BY(books);
  std::atomic<bool> has_failure_{false};
  bool placed_ GPUSHARE_GUARDED_BY(books) = false;        // its heap exists; by SessionTable::placed()
  bool out_unplaced_ GPUSHARE_GUARDED_BY(books) = false;  // it was paged out before it had a heap
  bool asks_need_ GPUSHARE_GUARDED_BY(books) = false;     // a NeedTurn lives
  base::ConditionVariable need_asked_;
  // One of its ranges is silent: the scheduler counts the session as opportunistic.
  bool silent_ GPUSHARE_GUARDED_BY(books) = false;
  uint32_t tries_in_ GPUSHARE_GUARDED_BY(books) = 0;    // to page it in, without waiting for others' room
  uint32_t waits_in_ GPUSHARE_GUARDED_BY(books) = 0;    // threads that wait until it is on the device
  bool told_ready_ GPUSHARE_GUARDED_BY(books) = false;  // the scheduler knows of an iteration
  bool open_ GPUSHARE_GUARDED_BY(books) = false;        // an iteration is between grant and end
  // The serial of the iteration before the session's lent turn, and that of its last one for which a lent turn was taken
  // back: its thread may not have begun it yet.
  uint64_t lent_serial_ GPUSHARE_GUARDED_BY(books) = 0, begun_serial_ GPUSHARE_GUARDED_BY(books) = 0;
  bool pull_waits_ GPUSHARE_GUARDED_BY(books) = false;
  uint64_t pull_order_ GPUSHARE_GUARDED_BY(books) = 0;
  // Granted to the pull that waits. Set under the lock, after all that the grant changes. Whoever takes the lane out
  // has the turn, and needs no lock for that.
  std::atomic<LaneSlot*> granted_{nullptr};
  LaneSlot* lane_ GPUSHARE_GUARDED_BY(books) = nullptr;  // of the iteration under way, or the last one
  // The lane whose stream orders the heap. Written by the thread of the iteration, or without one by the thread that acts.
  std::atomic<LaneSlot*> stream_lane_{nullptr};
  std::deque<PushItem> pushes_ GPUSHARE_GUARDED_BY(books);
  // Pushes run in order, so all are done once this one is done. The queue of pushes owns the ticket, and the ticket
  // owns the session.
  std::weak_ptr<TicketImpl> last_submitted_ GPUSHARE_GUARDED_BY(books);
  uint64_t next_order_ GPUSHARE_GUARDED_BY(books) = 0;
  uint32_t in_flight_ GPUSHARE_GUARDED_BY(books) = 0;
  // P and E as the scheduler has them.
  uint64_t persistent_promise_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t ephemeral_promise_ GPUSHARE_GUARDED_BY(books) = 0;
  std::atomic<uint64_t> range_promise_{
      0};  // the part of P that the session's elastic ranges have; written under the lock
  uint32_t profile_left_ GPUSHARE_GUARDED_BY(books) = 0;  // iterations yet to be profiled
  uint64_t profile_peak_bytes_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t iterations_done_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t planned_iterations_ GPUSHARE_GUARDED_BY(books) = 0;
  bool leaves_shared_lane_ GPUSHARE_GUARDED_BY(books) =
      false;  // promise_own_lane() was called in the iteration under way
  uint64_t service_ns_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t waited_ns_ GPUSHARE_GUARDED_BY(books) = 0;
  base::IterationHistogram
      histogram_;  // of iterations that are done; with a lent turn the iteration's thread writes without the lock
  uint64_t room_waited_ns_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t queued_ns_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t arrived_ns_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t waiting_since_ns_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t resident_since_ns_ GPUSHARE_GUARDED_BY(books) = 0;
  // A page-out or page-in that goes in parts: when it began, and its bytes.
  enum class Moving : uint8_t { kNot, kOut, kIn } moving_ GPUSHARE_GUARDED_BY(books) = Moving::kNot;
  uint32_t tries_out_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t moving_since_ns_ GPUSHARE_GUARDED_BY(books) = 0, moving_bytes_ GPUSHARE_GUARDED_BY(books) = 0;
  double weight_ GPUSHARE_GUARDED_BY(books);            // as the program said
  uint64_t peak_bytes_ GPUSHARE_GUARDED_BY(books) = 0;  // of its persistent blocks, known at its end
  uint64_t iteration_peak_bytes_ GPUSHARE_GUARDED_BY(books) = 0;                // its largest iteration
  uint64_t remaining_ns_ GPUSHARE_GUARDED_BY(books) = UINT64_MAX;               // as of its end
  std::shared_ptr<LaunchGate> launch_gate_ GPUSHARE_GUARDED_BY(books);          // null: never asked for
  std::shared_ptr<const WaitingWork> waiting_work_ GPUSHARE_GUARDED_BY(books);  // see set_worth()
  double target_slowdown_ GPUSHARE_GUARDED_BY(books) = 0;                       // 0: the runtime's
  uint32_t progress_calls_ GPUSHARE_GUARDED_BY(books) = 0;  // in outboxes; close waits for them
  uint64_t works_ GPUSHARE_GUARDED_BY(books) = 0;  // submitted and not destroyed yet; close waits for them
  base::LocalBell turn_bell_;                      // for the pull that waits
  // The bell on which that pull waits instead while another process decides; null: the pull waits on turn_bell_.
  std::shared_ptr<base::Bell> bell_ GPUSHARE_GUARDED_BY(books);
  base::ConditionVariable state_changed_;  // admitted, paged, ended, torn down
};

class SessionImpl::NeedTurn {
 public:
  explicit NeedTurn(SessionImpl& session) GPUSHARE_REQUIRES(books);
  ~NeedTurn() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    session_.asks_need_ = false;
    session_.need_asked_.notify_all();
  }
  NeedTurn(const NeedTurn&) = delete;
  NeedTurn& operator=(const NeedTurn&) = delete;

 private:
  SessionImpl& session_;
};

base::Status check_target_slowdown(double target);  // session.cpp

// Work that must be done without the lock, after a section that held it. Declare it before the lock.
class Outbox {
 public:
  explicit Outbox(RuntimeImpl& runtime) : runtime_(runtime) {}
  // May throw: a progress function that ends the thread unwinds through it.
  ~Outbox() noexcept(false) { flush(); }
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;
  void flush();

  struct Finished {
    std::shared_ptr<SessionImpl> session;
    Progress progress;
  };
  std::vector<Finished> finished;
  struct Dropped {
    std::shared_ptr<SessionImpl> session;
    std::unique_ptr<Work> work;
  };
  std::vector<Dropped> dropped;                        // each counts in RuntimeImpl::staying_
  std::vector<std::shared_ptr<SessionImpl>> sessions;  // last pointers, perhaps
  std::vector<std::shared_ptr<TicketImpl>> tickets;
  bool memory_changed = false;  // a point for the timeline
  bool empty() const { return finished.empty() && dropped.empty() && !memory_changed; }

 private:
  void tell_progress();
  void flush_rest() noexcept;

  RuntimeImpl& runtime_;
};

// While one lives, the calling thread runs a callback of a runtime. The callback may not close that runtime.
class CallbackScope {
 public:
  CallbackScope();
  ~CallbackScope();
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;
  static bool active();
};

class RuntimeImpl final : public Runtime, public std::enable_shared_from_this<RuntimeImpl> {
 public:
  RuntimeImpl() = default;
  ~RuntimeImpl() override;
  base::Status open(RuntimeOptions options);
  // True in a process that was forked from the one that opened the runtime.
  bool inherited() const { return fork_depth_ != base::fork_depth(); }
  // The last pointer handed out goes: ends what this thread has open, and closes.
  void drop();

  base::Status close() override;
  base::Result<std::shared_ptr<Session>> open_session(const SessionOptions& options) override;
  base::Result<RuntimeInfo> info() override;
  base::Result<std::vector<sched::MeasuredInterference::Entry>> interference() override;
  base::Status set_policy(std::unique_ptr<sched::Policy> policy) override;
  base::Status set_capacity(uint64_t bytes) override;
  base::Status set_coordination(const std::optional<sched::CoordinatorOptions>& options) override;
  void set_link(double ns_per_byte) override;
  base::Status set_target_slowdown(double target) override;
  base::Status synchronize(uint64_t timeout_ns) override;
  base::Status drain(uint64_t timeout_ns) override;
  base::Result<memory::Address> alloc(const Stream* stream, memory::Kind kind, uint64_t bytes,
                                      uint64_t alignment) override;
  std::shared_ptr<Session> owner(const Stream* stream) override;
  base::Status free(memory::Address address) override;
  base::Status record_use(memory::Address address, const Stream& stream) override;
  base::Result<std::shared_ptr<const void>> pin(memory::Address address) override;
  base::Result<memory::BlockInfo> find(memory::Address address) override;
  bool free_at_home(memory::Address address, const void* native, base::Status* out_status) override;
  bool look_up(memory::Address address, memory::BlockInfo* out_info) override;
  base::Status set_out_of_memory_function(OutOfMemoryFunction function) override;
  base::Result<std::shared_ptr<Stream>> create_stream(int32_t priority) override;
  base::Result<std::shared_ptr<Stream>> adopt_stream(void* native) override;
  base::Result<uint64_t> trim() override;
  void reset_peak() override;
  base::Status attach(std::weak_ptr<Dependent> dependent) override;
  void destroy_later(std::unique_ptr<Dependent> dependent) noexcept override;
  base::Status write_timeline(const std::string& path) override;
  base::Result<memory::MemorySnapshot> snapshot() override;
  bool records_allocations() const override { return record_allocations_; }
  device::Device& device() override { return *device_; }
  std::string check() override;

  // ---- for the parts of the executor, which alone see this header ----
  // The owner of an allocation for `stream`; null without one. INVALID_STATE: the stream's runtime is closed.
  base::Result<std::shared_ptr<Session>> find_owner(const Stream* stream) const;
  base::Result<std::shared_ptr<Session>> place_session(const SessionOptions& options, bool may_wait);
  base::Status arrive(const std::shared_ptr<SessionImpl>& session, const sched::SessionSpec& spec,
                      uint64_t time, bool may_wait, Outbox& outbox) GPUSHARE_REQUIRES(books);
  // Waits until the spare sessions that are to go have left. False: there are none.
  bool wait_for_drops(Outbox& outbox) GPUSHARE_REQUIRES(books);
  // Drops spare sessions of `bytes` or more where enough bytes are free, but in pieces that are too small. False: there
  // are no such sessions.
  bool drop_to_join(uint64_t bytes);
  uint64_t now() const { return device_->now_ns(); }
  bool virtual_time() const { return virtual_time_; }
  // Called by a thread of the authority's when the authority has news.
  void authority_changed();
  // Connects to the daemon and puts its choices into the options.
  static base::Result<std::unique_ptr<client::RemoteAuthority>> open_shared(RuntimeOptions* options,
                                                                            const EnvironmentLimits& limits);
  base::Status open_memory(RuntimeOptions& options);
  base::Result<sched::SchedulerOptions> scheduling(const RuntimeOptions& options);
  base::Status make_authority(RuntimeOptions& options, std::unique_ptr<client::RemoteAuthority> remote);
  base::Status check_options(const SessionOptions& options) const;
  // A session as the scheduler is told of it. `complete`: the options with what the environment adds.
  sched::SessionSpec spec_of(const SessionOptions& options, const SessionOptions& complete, uint64_t id,
                             bool may_wait) const GPUSHARE_REQUIRES(books);
  base::Status check_close() const;
  void end_all(Outbox& outbox) GPUSHARE_REQUIRES(books);
  void give_back(std::vector<std::unique_ptr<LaneSlot>> slots);
  base::Status check_open() const GPUSHARE_REQUIRES(books);
  std::string check_memory() GPUSHARE_REQUIRES(books);
  std::string check_sessions() const GPUSHARE_REQUIRES(books);
  std::string check_lanes() const GPUSHARE_REQUIRES(books);
  // OK, or why the session takes no more calls.
  base::Status check_live(const SessionImpl& session) const GPUSHARE_REQUIRES(books);
  // Waits until the session has a turn, and sets `granted` to its lane. The lock may be let go then; with an error it is held.
  base::Status wait_for_turn(SessionImpl& session, uint64_t timeout_ns, Outbox& outbox, Section& lock,
                             LaneSlot*& granted) GPUSHARE_REQUIRES(books);
  // The session's lane, if the lane has as much in flight as it may have; else null.
  LaneSlot* full_lane(const SessionImpl& session) const GPUSHARE_REQUIRES(books);

  // Called when the thread that waits to begin an iteration of the session gives up. A turn that was granted meanwhile
  // goes back, as if the session had never been picked.
  void withdraw(SessionImpl& session, Outbox& outbox) noexcept GPUSHARE_REQUIRES(books);

  // ---- waits.cpp: what waiting calls wait for ----
  // One sentence, without a full stop: what the session's next iteration waits for, or that it waits for nothing.
  std::string explain_wait(const SessionImpl& session) const GPUSHARE_REQUIRES(books);
  // Refuses a wait for the session's next iteration that could never end, because iterations that the calling thread
  // has open hold the lane or the memory. OK if the wait may end, as far as that is known.
  base::Status check_wait(const SessionImpl& session) const GPUSHARE_REQUIRES(books);
  base::Status check_lane_wait(const SessionImpl& session) const GPUSHARE_REQUIRES(books);
  base::Status check_memory_wait(const SessionImpl& session) const GPUSHARE_REQUIRES(books);
  std::string holders(const SessionImpl& waiting) const GPUSHARE_REQUIRES(books);
  uint64_t free_bytes() const GPUSHARE_REQUIRES(books);  // that could still be promised
  // The most E beside P under a quota of whole granules. P may be a part of one, and lanes have whole granules.
  uint64_t lane_beside(uint64_t quota_bytes, uint64_t persistent_bytes) const {
    const uint64_t promised = persistent_steps_.round_up(persistent_bytes);
    return (quota_bytes - std::min(quota_bytes, promised)) / granularity_bytes_ * granularity_bytes_;
  }

  // ---- dispatch.cpp: who is granted a lane ----
  // Grants what can be granted. `current`: a session whose waiting thread is the caller.
  void dispatch_all(const SessionImpl* current, Outbox& outbox) GPUSHARE_REQUIRES(books);
  const std::vector<LaneSlot*>& lanes_to_ask() GPUSHARE_REQUIRES(books);
  // The lane's next iteration, if the policy has one as of `ask_at_ns`. True if it was dispatched.
  bool dispatch(LaneSlot& lane, const SessionImpl* current, uint64_t time, uint64_t ask_at_ns)
      GPUSHARE_REQUIRES(books);
  void look_at_coordinator() GPUSHARE_REQUIRES(books);
  // Carries out new actions and new grants. Called after each change that the scheduler was told of.
  void carry_out(const SessionImpl* current, Outbox& outbox) GPUSHARE_REQUIRES(books);
  // Lends the session the turn in `lane` that it has just given back, if nobody else could want that turn now.
  void lend_turn(SessionImpl& session, LaneSlot& lane) GPUSHARE_REQUIRES(books);
  bool nobody_else_acts() const GPUSHARE_REQUIRES(books);
  // Called when a lent turn was taken back. Enters the iterations that have run, and one still under way, into the
  // books.
  void account_turn(const LentTurn::Ended& ended) noexcept GPUSHARE_REQUIRES(books);

  // ---- iteration.cpp: an iteration on the host, from its grant to its end ----
  // Begins the iteration granted to `session`: gives it memory and events. Called without the lock.
  base::Status start_iteration(SessionImpl& session, LaneSlot& lane);
  base::Status start_iteration_or_throw(SessionImpl& session, LaneSlot& lane);
  // The iteration ends with `outcome`; `begun` is the result of start_iteration. `fatal`: a bad outcome ends the session,
  // whatever its options say.
  base::Status finish_iteration(SessionImpl& session, LaneSlot& lane, base::Status outcome,
                                const base::Status& begun, bool fatal);
  base::Status finish_iteration_or_throw(SessionImpl& session, LaneSlot& lane, base::Status outcome,
                                         const base::Status& begun, bool fatal);
  struct HostEnd {
    base::Status device;
    bool passed = false, planned = false, marked = false;
    bool lent = false;  // the turn stays lent, and nothing else is to be done
    uint64_t peak = 0;
  };
  void end_on_host(SessionImpl& session, LaneSlot& lane, uint64_t borrowed, base::Status& outcome,
                   HostEnd& end);
  void mark_end(const SessionImpl& session, const device::Stream& stream, InFlight& slot,
                base::Status& outcome, HostEnd& end);
  void retire_ended(LaneSlot& lane, const base::Status& begun, bool passed, base::Status& device,
                    Outbox& outbox) GPUSHARE_REQUIRES(books);
  void run_worker(LaneSlot& lane);
  void run_pushed(SessionImpl& session, LaneSlot& lane, std::unique_ptr<Work> work);
  bool binds_lane(const LaneSlot* lane) const;  // the calling thread has an iteration open there

  // ---- session.cpp: a turn that somebody waits for ----
  // Wakes the pull that waits.
  static void tell_turn(SessionImpl& session) GPUSHARE_REQUIRES(books);
  // Takes the session's turn if it has come.
  void look_for_turn(const SessionImpl& session, Outbox& outbox) GPUSHARE_REQUIRES(books);

  // ---- failure.cpp: what ends before its time ----
  void end_session(SessionImpl& session, SessionState state, base::Status status, Outbox& outbox)
      GPUSHARE_REQUIRES(books);
  void fail_session(SessionImpl& session, base::Status status);
  // A host function of the session's iteration `serial`, in this lane, threw.
  void fail_work(SessionImpl& session, LaneSlot& lane, uint64_t serial, base::Status status);
  // Called when the device is gone: ends all sessions, once.
  void lose(const base::Status& status, Outbox& outbox) GPUSHARE_REQUIRES(books);
  // Calls lose() if `status` says that the device is lost; without the lock.
  void note(const base::Status& status);
  // Called when the host had no memory for a step of the books. The step is half done, so the books are not touched
  // again. Every call fails from now on, waiting calls return, and close() gives everything back. Allocates nothing.
  void collapse() noexcept GPUSHARE_REQUIRES(books);
  void complete_collapsed(std::shared_ptr<TicketImpl>& ticket) noexcept GPUSHARE_REQUIRES(books);
  void left() GPUSHARE_REQUIRES(books);  // one of staying_ has left
  // True while threads are inside that will use, after their wait, what close() gives back.
  bool has_users() const GPUSHARE_REQUIRES(books);
  // close() for a runtime that collapsed: waits for running iterations, and gives their memory back.
  void close_collapsed(const std::vector<std::unique_ptr<LaneSlot>>& slots,
                       const std::vector<std::weak_ptr<StreamImpl>>& side_streams);

  // ---- section.cpp: for the outbox, once the lock is let go ----
  static void tell(const Outbox::Finished& call);
  static void told(const Outbox::Finished& call) noexcept;
  // Destroys `work` without a lock of the runtime's, and tells a close() that waits for that.
  static void destroy(SessionImpl& session, std::unique_ptr<Work> work, bool stays) noexcept;
  void record_memory() GPUSHARE_EXCLUDES(books);

  std::atomic<uint32_t> askers_{
      0};  // guaranteed sessions that wait for others to send blocks out: nothing comes home meanwhile
  // spilled.cpp. Opportunistic sessions have this for another one: blocks that may lie on the host.
  std::vector<sched::Part> blocks_of_others(const SessionImpl& asker) const GPUSHARE_REQUIRES(books);
  // The most that blocks and ranges of others give; of ranges on a shared device the daemon knows.
  uint64_t parts_of_others(const SessionImpl& asker, const sched::Need& need) const GPUSHARE_REQUIRES(books);
  // Asks opportunistic sessions to send `bytes` out at their next boundaries. Returns how many of these
  // bytes they have; `all`: nobody is asked unless they have all.
  uint64_t ask_out(const SessionImpl& asker, uint64_t bytes, bool all) GPUSHARE_REQUIRES(books);
  void record(const Timeline::Record& record) GPUSHARE_REQUIRES(books);

  std::unique_ptr<device::Device> device_;
  std::unique_ptr<memory::DeviceMemory> memory_;
  WideGate memory_gate_;  // for calls into memory_ that belong to no session or iteration
  bool virtual_time_ = false;
  uint32_t fork_depth_ = 0;  // of the process that opened it
  bool record_timeline_ = false;
  bool record_allocations_ = false;
  bool shared_ = false;                     // the authority is the daemon's
  std::string socket_, shared_device_;      // if shared_: the daemon's socket, and its name for the device
  std::string interference_file_;           // written when the runtime closes; empty: none
  std::shared_ptr<client::Images> images_;  // the daemon's; set when the runtime opens
  uint32_t depth_ = 2;
  base::MoveBudget move_budget_;
  double spill_move_loss_ = kSpillMoveLoss;
  // Of memory: lanes have whole granules, the P of sessions these steps. Known also after memory has gone.
  uint64_t granularity_bytes_ = 1;
  base::Steps persistent_steps_;
  // The compute units that lanes can have for themselves, and in what steps; zeros without partitions.
  uint32_t partitionable_units_ = 0, granularity_units_ = 0;
  ProgressFunction on_progress_;

  mutable Books mutex_{*this};
  std::unique_ptr<sched::Authority> authority_ GPUSHARE_GUARDED_BY(books);
  bool coordinated_ GPUSHARE_GUARDED_BY(books) = false;  // by a coordinator in this process
  bool closing_ GPUSHARE_GUARDED_BY(books) = false;
  bool closed_ GPUSHARE_GUARDED_BY(books) = false;
  bool stop_threads_ GPUSHARE_GUARDED_BY(books) = false;
  base::Status lost_ GPUSHARE_GUARDED_BY(books);
  std::atomic<bool> collapsed_{false};  // set under the lock
  SessionTable sessions_{*this};
  LaneSet lanes_{*this};
  ActionRunner actions_{*this};
  Reaper reaper_{*this};
  MemoryLadder ladder_{*this};
  uint64_t switches_ GPUSHARE_GUARDED_BY(books) = 0;
  std::vector<LaneSlot*> asked_lanes_ GPUSHARE_GUARDED_BY(books);  // room for lanes_to_ask()
  RangeTable ranges_{*this};
  // The Stays that live, and the progress calls that are due or under way.
  uint32_t staying_ GPUSHARE_GUARDED_BY(books) = 0;
  SideStreams side_streams_;
  Dependents dependents_;
  Timeline timeline_ GPUSHARE_GUARDED_BY(books);
  // Null until a session has asked for its launch gate. Nothing is measured before that.
  std::shared_ptr<OpGate> op_gate_ GPUSHARE_GUARDED_BY(books);
  double target_slowdown_ GPUSHARE_GUARDED_BY(books) = 0;  // 0: the controller's default
};

// While one lives, close() waits. Made by a thread that runs a function of the caller's, or that uses, outside of all
// gates, what close() gives back. False if the runtime closes already.
class Stay {
 public:
  explicit Stay(RuntimeImpl& runtime);
  ~Stay();
  Stay(const Stay&) = delete;
  Stay& operator=(const Stay&) = delete;
  explicit operator bool() const { return entered_; }

 private:
  RuntimeImpl& runtime_;
  bool entered_ = false;
};

// The runtime's lock, held to change the books. If an exception leaves the section, the runtime collapses.
class GPUSHARE_SCOPED_CAPABILITY Section {
 public:
  explicit Section(RuntimeImpl& runtime) GPUSHARE_ACQUIRE(books) : runtime_(runtime) {
    runtime_.mutex_.lock();
  }
  ~Section() GPUSHARE_RELEASE();
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;
  void unlock() GPUSHARE_RELEASE() {
    held_ = false;
    runtime_.mutex_.unlock();
  }
  void lock() GPUSHARE_ACQUIRE() {
    runtime_.mutex_.lock();
    held_ = true;
  }

 private:
  RuntimeImpl& runtime_;
  const int exceptions_ = std::uncaught_exceptions();
  bool held_ = true;
};

// While one lives, a lock is let go; it is taken again at the end, also after an exception.
class GPUSHARE_SCOPED_CAPABILITY Unlocked {
 public:
  explicit Unlocked(Books& mutex) GPUSHARE_RELEASE(books) : mutex_(mutex) { mutex_.unlock(); }
  ~Unlocked() GPUSHARE_RELEASE() { mutex_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Books& mutex_;
};

}  // namespace gpushare::executor
