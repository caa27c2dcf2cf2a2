// switcher.hpp: one active session and any number on standby, on one device. A member on standby has its
// weights in host memory (an image) and no session with the executor, so it has no device bytes and the
// executor promises nothing to it. It becomes active with its next begin: the active member stops at the
// boundary of its iteration under way, its bytes are dropped or kept (sched::Residency decides, within keep_bytes), a session is
// opened for the new member, and the groups of its image are enqueued. Its first iteration begins at once, and the stream waits
// for the layers that the iteration asks for.
//
// The scheduler decides which member makes room on the device. The session of a kept member is spare
// (executor::Session::set_spare): it is dropped when another member or any other session needs room, unless dropping
// others costs less.
//
// With a budget (standby_bytes) the first layers of members on standby stay on the device (standby.hpp),
// because no grouping can hide their transmission. They are spare likewise.
//
// Calls of begin get the switcher's turn in the order of their arrival; one iteration of a switcher is open at a time.
// The kept bytes of a member stay on the device until the runtime closes. They are loaded again after a failure.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/intrusive/list.hpp>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>

#include "base/clock.hpp"
#include "base/role.hpp"
#include "base/work_mutex.hpp"
#include "executor/runtime.hpp"
#include "loader/loader.hpp"
#include "loader/model.hpp"
#include "loader/standby.hpp"
#include "sched/residency.hpp"

namespace gpushare::loader {

using MemberId = uint64_t;

inline constexpr base::Role
    has_members;  // the role of the holder of a Switcher's mutex, which guards what its members have

struct SwitcherOptions {
  sched::ResidencyPolicy policy = sched::ResidencyPolicy::kLeastRecentlyUsed;
  uint64_t keep_bytes = UINT64_MAX;  // upper limit, in bytes, of the models on the device, the active one
                                     // included; 0 = keep only the active one
  uint64_t standby_bytes = 0;  // upper limit, in bytes and in addition to keep_bytes, for first layers of
                               // members on standby; 0 = none
};

struct MemberOptions {
  // The session's persistent_bytes and ephemeral_bytes are needs beside the image; ephemeral_bytes 0 is profiled.
  executor::SessionOptions session;
  std::shared_ptr<const Image> image;
  LoadOptions load;
};

enum class MemberState : uint32_t { kStandby = 0, kKept = 1, kActive = 2 };

struct MemberInfo {
  MemberState state = MemberState::kStandby;
  uint64_t device_bytes = 0;   // promised persistent bytes of its session; 0 on standby
  uint64_t loads = 0;          // times its image was sent to the device
  uint64_t iterations = 0;     // begun
  uint64_t drops = 0;          // times its bytes were dropped
  uint64_t standby_bytes = 0;  // of its first layers, kept for its next load
  std::string name;
};

struct SwitcherInfo {
  MemberId active = 0;  // 0: none
  uint64_t members = 0;
  uint64_t kept = 0;
  uint64_t switches = 0;       // times another member became active
  uint64_t waiting = 0;        // begins that wait for their turn
  uint64_t switch_ns = 0;      // host time of the last switch: from its turn until its copies were enqueued
  uint64_t standby_bytes = 0;  // first layers of members on the device, at most the budget
};

class Switcher final : public executor::Dependent, public std::enable_shared_from_this<Switcher> {
 public:
  // Errors: INVALID_STATE (the runtime is closed).
  static base::Result<std::shared_ptr<Switcher>> open(std::shared_ptr<Loader> loader,
                                                      SwitcherOptions options);
  Switcher(std::shared_ptr<Loader> loader, SwitcherOptions options);
  ~Switcher() override;

  // A new member, on standby. Errors: INVALID_ARGUMENT, EXCEEDS_CAPACITY (it could not run alone).
  base::Result<MemberId> add(MemberOptions options);
  // Removes a member. Its begins that wait fail with CANCELLED. Blocks until its iteration has ended. Errors:
  // NOT_FOUND, INVALID_STATE (the thread has an iteration of the switcher open).
  base::Status remove(MemberId member);

  struct Turn {
    std::shared_ptr<executor::Iteration> iteration;  // the caller ends it as any pulled iteration
    std::shared_ptr<Model> model;
    bool loaded = false;  // its session is new, so blocks that its iterations kept are gone
  };
  // Waits for the member's turn, switches if another member is active, and begins an iteration. Errors: TIMED_OUT,
  // CANCELLED (removed), NOT_FOUND, DEVICE_OUT_OF_MEMORY (not even with all others dropped), DEVICE_LOST, INVALID_STATE
  // (closed; the thread has one open), and those of loading. After an error the member may be on standby.
  base::Result<Turn> begin(MemberId member, uint64_t timeout_ns);

  base::Result<MemberInfo> info(MemberId member) const;
  SwitcherInfo info() const;

  // Begins that wait fail with INVALID_STATE; blocks until the iteration under way has ended; drops all. Errors:
  // INVALID_STATE (closed already, the thread has an iteration of it open).
  base::Status close();
  bool closed() const;  // by close(), or with its runtime
  void runtime_closing() override;

 private:
  struct Member {
    MemberOptions options;
    MemberId id = 0;
    uint64_t persistent_bytes = 0;  // P
    bool removed GPUSHARE_GUARDED_BY(has_members) = false;
    // Null: the member is on standby. The thread that has the turn changes the session and the model.
    std::shared_ptr<executor::Session> session GPUSHARE_GUARDED_BY(has_members);
    std::shared_ptr<Model> model GPUSHARE_GUARDED_BY(has_members);
    uint64_t ephemeral_bytes GPUSHARE_GUARDED_BY(has_members) =
        0;  // E: given, or learned by the session that had it last
    uint64_t loads GPUSHARE_GUARDED_BY(has_members) = 0;
    uint64_t iterations GPUSHARE_GUARDED_BY(has_members) = 0;
    uint64_t drops GPUSHARE_GUARDED_BY(has_members) = 0;
  };
  using Members = std::unordered_map<MemberId, std::shared_ptr<Member>>;
  class SwitchedIteration;
  class Inside;
  // A thread that waits for the turn, in the thread's own memory.
  struct Waiter : boost::intrusive::list_base_hook<> {};

  // The reason why nothing can be begun for `member` any more. Null: the caller removes a member.
  base::Status stopped(const Member* member) const GPUSHARE_REQUIRES(mutex_, has_members);
  // Takes the switcher's turn: no other thread switches or has an iteration open. Needs the lock.
  base::Status take_turn(const Member* member, const base::Deadline& deadline, uint64_t timeout_ns)
      GPUSHARE_REQUIRES(mutex_, has_members);
  void give_turn() noexcept;
  // The functions below are for the thread that has the turn, without the lock. Functions that change the device's
  // contents need switching_.
  base::Result<Turn> begin_in_turn(Member& member, const base::Deadline& deadline, uint64_t timeout_ns);
  base::Status make_active(Member& member);
  base::Status load(Member& member);
  // `held`: the member's first layers make no room for others. It is false afterwards if they had to.
  base::Status load_from_first_layers(Member& member, bool& held);
  base::Result<std::shared_ptr<executor::Session>> open_session(Member& member, bool& held);
  // Lets go of members that the scheduler has dropped.
  void take_leave();
  // Makes the sessions of kept members spare, except that of `active`.
  void tell_worths(MemberId active);
  void learn_need(Member& member, const executor::Session& session);
  bool usable(const Member& member) const;
  void update_standby();
  // Needs no memory.
  void drop(Member& member) noexcept;
  void drop_all(const std::vector<sched::ModelId>& members);
  std::shared_ptr<Member> find(MemberId member) const;
  std::shared_ptr<executor::Session> session_of(const Member& member) const;

  const std::shared_ptr<Loader> loader_;
  const SwitcherOptions options_;
  Standby standby_;

  // Held while the members' sessions change. Lock order: before mutex_.
  base::WorkMutex switching_;
  mutable base::Mutex mutex_;
  base::ConditionVariable changed_;
  bool closed_ GPUSHARE_GUARDED_BY(mutex_) = false;
  bool taken_ GPUSHARE_GUARDED_BY(mutex_) = false;      // a thread has the turn
  std::thread::id holder_ GPUSHARE_GUARDED_BY(mutex_);  // who
  uint64_t users_ GPUSHARE_GUARDED_BY(mutex_) = 0;      // threads inside
  // The session whose begin is under way, set by the thread that has the turn. That begin may wait until the
  // session is paged in.
  std::shared_ptr<executor::Session> beginning_ GPUSHARE_GUARDED_BY(mutex_);
  boost::intrusive::list<Waiter> line_ GPUSHARE_GUARDED_BY(mutex_);
  MemberId next_member_ GPUSHARE_GUARDED_BY(mutex_) = 1;
  Members members_ GPUSHARE_GUARDED_BY(mutex_);
  sched::Residency residency_ GPUSHARE_GUARDED_BY(mutex_);
  MemberId active_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  MemberId last_active_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t switches_ GPUSHARE_GUARDED_BY(mutex_) = 0;
  uint64_t switch_ns_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

}  // namespace gpushare::loader
