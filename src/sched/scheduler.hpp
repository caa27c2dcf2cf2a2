// scheduler.hpp: one device's admission and turn-taking as a state machine: sessions, lanes, promises, the
// lane finder, the policy, and who is paged out to host memory. It decides; a driver (executor or simulator)
// carries out the actions and reports back.
//
// Safety, at every instant (Salus, eq 2.1): sum over resident sessions of P + sum over lanes of their size <=
// capacity, where a lane's size is at least the largest E of its sessions. A decision that would break it is
// not taken.
//
// Paging: a waiting session that the policy ranks above residents, and above everything that would stay in
// its lane, may have them paged out, worst ranked first, never more than needed. A victim finishes what it
// has in flight first. Until its bytes are gone nobody behind the waiting session is admitted.
//
// Threads: the driver serialises calls. Cost: pick is O(candidates of the lane), other events O(1) unless
// they free memory or a session arrives: then O(waiting * lanes), and O(residents^2) where paging is
// considered.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "sched/lane_finder.hpp"
#include "sched/policy.hpp"
#include "sched/types.hpp"

namespace gpushare::sched {

struct SessionSpec {
  SessionId id = kNoSession;  // chosen by the driver, ascending
  std::string name;
  SessionClass cls = SessionClass::kGuaranteed;
  int32_t priority = 0;
  double weight = 1.0;
  uint64_t persistent_bytes = 0;     // P
  uint64_t ephemeral_bytes = 0;      // E
  uint64_t remaining_ns = kUnknown;  // declared
  uint64_t iterations_total = 0;     // 0 = unknown; with iteration_ns an estimate of remaining
  uint32_t compute_units = 0;  // its lane has so many for itself; 0 = shares the device with all such lanes
  bool may_queue = true;       // else arrive() refuses what cannot be admitted at once
  bool may_page = true;        // else it is not paged out before allow_paging()
  // Need unknown: admitted with all that is free as E, in a lane of its own where one may be opened, once at
  // least persistent_bytes + ephemeral_bytes (then the least worth starting with) are free. set_need() ends
  // it.
  bool profiling = false;
};

// kPagedOut from the kPageOut action until kPageIn is reported done.
enum class SessionState : uint32_t { kQueued, kResident, kPagedOut };

enum class ActionKind : uint32_t {
  kOpenLane,    // lane, bytes, compute_units
  kResizeLane,  // lane, bytes: holds for iterations dispatched from now on; a shrink is promised to others
                // only when those dispatched before have finished
  kCloseLane,   // lane: no session of it is left, nothing of it is in flight
  kAdmit,       // session, lane: reserve its P; its iterations may be picked from now on
  kPageOut,     // session: copy persistent bytes to host, then page_done(); it holds no promise afterwards
  kPageIn       // session, lane: reserve P again, copy back, then page_done()
};

struct Action {
  ActionKind kind;
  LaneId lane = kNoLane;
  SessionId session = kNoSession;
  uint64_t bytes = 0;
  uint32_t compute_units = 0;
};

struct SchedulerOptions {
  uint64_t capacity_bytes = 0;
  uint32_t compute_units = 0;              // that lanes can have for themselves, together; 0 = none
  uint32_t granularity_compute_units = 1;  // such a lane's share is rounded up to it
  uint64_t granularity_bytes = 1;          // P and lane sizes are rounded up to it
  uint32_t max_lanes = 0;                  // on top of the policy's own limit; 0 = no limit
  bool paging = true;                      // the driver can page sessions out and keep their addresses
  LaneFinderKind lane_finder = LaneFinderKind::kSalus;
};

class Scheduler {
 public:
  Scheduler(SchedulerOptions options, std::unique_ptr<Policy> policy);
  ~Scheduler();

  // ---- what happened --------------------------------------------------------------------------------------
  // A session asks in. OK: admitted or queued (see state()). Errors: EXCEEDS_CAPACITY (P + E, or its compute
  // units, above what there is; message has the numbers), DEVICE_OUT_OF_MEMORY (may_queue is false and it does not fit now; the message
  // names need, what can be promised, persistent bytes of n sessions, lanes).
  base::Status arrive(const SessionSpec& spec, uint64_t now_ns);
  // It has an iteration to run; dispatched() uses that up. In any state; idempotent.
  void ready(SessionId session, uint64_t now_ns);
  // A paged-out session needs its bytes although it has no iteration ready (an allocation waits).
  void wake(SessionId session, uint64_t now_ns);
  // It may be paged out from now on: at once, if that was decided meanwhile. Has no effect on one that may already.
  void allow_paging(SessionId session, uint64_t now_ns);
  // It withdrew its ready iteration (a begin timed out).
  void not_ready(SessionId session, uint64_t now_ns);
  // The iteration picked last for `session` was handed to its lane (its turn is used up: call ready() again
  // if it has another). With an enqueue depth above one, several may be dispatched before the first has
  // finished.
  void dispatched(SessionId session, LaneId lane, uint64_t now_ns);
  // The device work of the session's oldest dispatched iteration is done: `device_ns` of service.
  // `iterations` above 1: a run of equal iterations dispatched as one.
  void finished(SessionId session, uint64_t device_ns, uint64_t now_ns, uint64_t iterations = 1);
  // It is gone, with nothing in flight: its promise is given to others by the actions that follow.
  void leave(SessionId session, uint64_t now_ns);
  // New promise of a resident session (profiled, grown or shrunk). Errors: DEVICE_OUT_OF_MEMORY when it would
  // break safety (nothing changes), EXCEEDS_CAPACITY.
  base::Status set_need(SessionId session, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                        uint64_t now_ns);
  void set_priority(SessionId session, int32_t priority, uint64_t now_ns);
  void set_weight(SessionId session, double weight);  // finite, > 0; else ignored
  // Device time still needed from now on (kUnknown: estimate again).
  void set_remaining(SessionId session, uint64_t remaining_ns, uint64_t now_ns);
  // Sessions admitted stay admitted, also above the new policy's limits.
  void set_policy(std::unique_ptr<Policy> policy, uint64_t now_ns);
  // Passed on to the policy, and to every later one; null: nothing is known.
  void set_interference(std::shared_ptr<const Interference> interference, uint64_t now_ns);
  // The driver could not place an admitted session's bytes (contiguous layout, fragmented): back to the queue
  // until something leaves.
  void unplaced(SessionId session, uint64_t now_ns);
  // A kPageOut or kPageIn action has been carried out.
  void page_done(SessionId session, uint64_t now_ns);
  // A resident session needs `bytes` more than can be promised: starts paging out sessions of a lower class,
  // or that the policy ranks below it, with nothing in flight, worst ranked first. False if there is none.
  // What they held is promised to nobody until room_used().
  bool make_room(SessionId session, uint64_t bytes, uint64_t now_ns);
  // The session that make_room() worked for has taken what it needs, or has given up.
  void room_used(uint64_t now_ns);
  // A kPageOut action could not be carried out (no host memory): the session is resident as before, and is
  // not chosen again until another leaves.
  void page_out_failed(SessionId session, uint64_t now_ns);

  // ---- what next ------------------------------------------------------------------------------------------
  // The session whose iteration runs next in `lane`; nullopt leaves it idle. Ask every lane that is free
  // again after any event: what one session does may let another lane run.
  std::optional<SessionId> pick(LaneId lane, uint64_t now_ns);
  // Actions decided since the last call, in the order to carry out.
  std::vector<Action> take_actions();
  // The next time at which pick could answer otherwise although nothing happens but that the session picked
  // last keeps the lane busy; kUnknown if never. For event loops that skip over equal decisions.
  uint64_t decision_holds_until(LaneId lane, uint64_t now_ns) const;

  // ---- what is
  // --------------------------------------------------------------------------------------------- Unknown
  // sessions: kQueued, kNoLane, an empty view.
  SessionState state(SessionId session) const;
  LaneId lane_of(SessionId session) const;  // also while its page-in is under way
  SessionView view(SessionId session) const;
  bool knows(SessionId session) const;
  Policy& policy();
  uint64_t promised_bytes() const;
  uint64_t persistent_bytes() const;  // of promised_bytes, the sum of P
  uint32_t lanes_open() const;
  uint32_t lane_limit() const;  // lane ids are below this
  bool lane_is_open(LaneId lane) const;
  uint64_t lane_bytes(LaneId lane) const;
  uint32_t lane_compute_units(LaneId lane) const;  // for itself; 0 = shares the device
  uint32_t promised_compute_units() const;         // sum over lanes
  size_t residents() const;  // sessions that hold a promise, those being paged either way included
  size_t waiting() const;    // queued or paged out, holding none
  // Checks the invariants (safety, each resident in one lane, lane size >= max E); empty when they hold. For
  // tests.
  std::string check() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gpushare::sched
