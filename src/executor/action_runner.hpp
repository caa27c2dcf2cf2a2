// action_runner.hpp: carries out in memory what the scheduler decides: opens, resizes and closes lanes; places, pages
// and tears down sessions. Other folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "base/service_thread.hpp"
#include "device/device.hpp"
#include "executor/lent_turn.hpp"
#include "memory/device_memory.hpp"

namespace gpushare::executor {

class Outbox;
class RuntimeImpl;
class SessionImpl;
struct LaneSlot;

struct Action {
  enum class Kind : uint8_t {
    kOpenLane,
    kResizeLane,
    kCloseLane,
    kAdmit,
    kPageOut,
    kPageIn,
    kTurnBack,  // a page-in is given up for others
    kDrop,
    kLimit,  // a limit was set: the session gives free bytes back now, the rest at its boundaries
    kSendOut,  // an idle session, which passes no boundaries, sends out bytes that a guaranteed session asked for
    kTeardown
  } kind;
  uint32_t lane = UINT32_MAX;
  uint64_t bytes = 0;
  std::shared_ptr<SessionImpl> session;
  uint32_t compute_units = 0;
  bool pages() const { return kind == Kind::kPageOut || kind == Kind::kPageIn; }
};

// The queue of actions. They run one at a time, in the order of the decisions, without the runtime's lock while memory
// works: by a caller that may block, or by a thread of the runner's. The thread that runs them "acts"; only one thread
// acts at a time.
//
// A page-out or page-in goes in parts. A part is at most what one boundary may move (spill_move_bytes, spill_move_ns).
// The runner's thread moves the parts after all other actions, so that an action waits for one part at most.
class ActionRunner {
 public:
  explicit ActionRunner(RuntimeImpl& runtime) : runtime_(runtime) {}
  void start();                          // its thread. Throws std::system_error
  void stop() GPUSHARE_REQUIRES(books);  // once the runtime's threads are to stop
  void join() { service_.join(); }       // without the lock
  void release_device();                 // nobody acts any more
  void clear() GPUSHARE_REQUIRES(books) {
    actions_.clear();
    parts_.clear();
  }

  // Takes over what the scheduler has decided.
  void collect() GPUSHARE_REQUIRES(books);
  // Tears the session down once it has ended and nothing of it is under way.
  void tear_down_if_over(SessionImpl& session) GPUSHARE_REQUIRES(books);
  // Carries out the queue in order; stops before a paging action unless `may_page`. Releases the lock meanwhile.
  // Returns once no thread acts.
  void run(bool may_page, Outbox& outbox) GPUSHARE_REQUIRES(books);
  // The next part of a page-out or page-in that has begun. False: there is none, or somebody acts.
  bool run_part(Outbox& outbox) GPUSHARE_REQUIRES(books);
  // Blocks of idle sessions that others have asked for bytes go out, within the limits of one boundary for each. False if
  // there are none.
  bool send_out_idle(Outbox& outbox) GPUSHARE_REQUIRES(books);
  // Wakes the runner's thread if actions are left that no thread carries out.
  void hand_over() GPUSHARE_REQUIRES(books) {
    if (busy() && !acting_) wakes_.notify_one();
  }
  void wake() GPUSHARE_REQUIRES(books) { wakes_.notify_one(); }
  // Asks the policy again at `at` about the lanes that the policy holds back.
  void look_again(const base::Deadline& at) GPUSHARE_REQUIRES(books);

  bool pending() const GPUSHARE_REQUIRES(books) { return !actions_.empty(); }
  bool acting() const GPUSHARE_REQUIRES(books) { return acting_; }
  bool busy() const GPUSHARE_REQUIRES(books) { return acting_ || !actions_.empty() || !parts_.empty(); }
  bool decided_for(const SessionImpl& session) const GPUSHARE_REQUIRES(books);
  // True while a session waits that could not be placed although the books have room for it.
  bool retries() const GPUSHARE_REQUIRES(books) { return retry_at_.has_value(); }
  uint64_t paging_ns() const GPUSHARE_REQUIRES(books) { return paging_ns_; }

  // Notified when a thread stops acting, and when something has happened for which a closing runtime waits.
  base::ConditionVariable& changed() { return changed_; }

  // While one lives nobody acts and, since memory is being looked at, nothing is granted.
  class Pause {
   public:
    explicit Pause(ActionRunner& runner) GPUSHARE_REQUIRES(books) : runner_(runner) {
      runner_.acting_ = runner_.paused_ = true;
    }
    ~Pause() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      runner_.acting_ = runner_.paused_ = false;
      runner_.changed_.notify_all();
    }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    ActionRunner& runner_;
  };
  bool paused() const GPUSHARE_REQUIRES(books) { return paused_; }

 private:
  void carry_out(const Action& action, Outbox& outbox) GPUSHARE_REQUIRES(books);
  void resize(LaneSlot& lane) GPUSHARE_REQUIRES(books);
  void admit(SessionImpl& session, uint64_t bytes, Outbox& outbox) GPUSHARE_REQUIRES(books);
  void admit_to(LaneSlot& lane, SessionImpl& session, uint64_t bytes, Outbox& outbox)
      GPUSHARE_REQUIRES(books);
  void page(const Action& action, LaneSlot* lane, Outbox& outbox) GPUSHARE_REQUIRES(books);
  void page_nothing(SessionImpl& session, LaneSlot* lane, bool out, Outbox& outbox) GPUSHARE_REQUIRES(books);
  struct Part {
    base::Status status;
    bool done = false;
    uint64_t device_ns = 0, given = 0;  // given: bytes that have left P
  };
  void move_timed(SessionImpl& session, memory::PersistentHeap& heap, bool out, Part& part);
  bool part_failed(SessionImpl& session, bool out, const base::Status& status, Outbox& outbox)
      GPUSHARE_REQUIRES(books);
  void moved(SessionImpl& session, LaneSlot* lane, bool out, Outbox& outbox) GPUSHARE_REQUIRES(books);
  void page_out_done(const SessionImpl& session) GPUSHARE_REQUIRES(books);
  void turn_back(SessionImpl& session, Outbox& outbox) GPUSHARE_REQUIRES(books);
  void send_out(SessionImpl& session, Outbox& outbox) GPUSHARE_REQUIRES(books);
  void not_placed(SessionImpl& session, const base::Status& status, Outbox& outbox) GPUSHARE_REQUIRES(books);
  void tear_down(SessionImpl& session, Outbox& outbox) GPUSHARE_REQUIRES(books);
  // Called by the thread that acts, without the lock.
  base::Status make_paging_stream();
  // Moves as much as a boundary may, in steps.
  base::Status move_part(SessionImpl& session, memory::PersistentHeap& heap, bool out, Part& part);
  void serve();
  void serve_until_stopped(Outbox& outbox) GPUSHARE_REQUIRES(books);

  RuntimeImpl& runtime_;
  std::deque<Action> actions_ GPUSHARE_GUARDED_BY(books);
  std::deque<Action> parts_
      GPUSHARE_GUARDED_BY(books);  // page-outs and page-ins that have begun and not ended
  bool acting_ GPUSHARE_GUARDED_BY(books) = false;
  uint32_t waiting_ GPUSHARE_GUARDED_BY(books) = 0;  // threads that wait in run() for who acts
  bool paused_ GPUSHARE_GUARDED_BY(books) = false;
  std::optional<base::Deadline> retry_at_ GPUSHARE_GUARDED_BY(books);
  std::optional<base::Deadline> look_again_at_ GPUSHARE_GUARDED_BY(books);
  uint64_t retry_ns_ GPUSHARE_GUARDED_BY(books) = 0;
  uint64_t paging_ns_ GPUSHARE_GUARDED_BY(books) = 0;
  base::ConditionVariable changed_, wakes_;
  // Used by the thread that acts.
  device::Stream paging_stream_;
  device::Event paging_start_, paging_end_;
  base::ServiceThread service_;
};

}  // namespace gpushare::executor
