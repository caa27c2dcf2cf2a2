// authority.hpp: the decisions for one device, as a driver (the executor) sees them. The driver reports what
// happened, asks which iteration runs next in a lane, and carries out the actions. Scheduler is the
// implementation for one process, client::RemoteAuthority that for a process of the daemon.
//
// Threads: the driver serialises calls.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/figures.hpp"
#include "base/status.hpp"
#include "sched/claims.hpp"
#include "sched/coordinator.hpp"
#include "sched/policy.hpp"
#include "sched/room.hpp"
#include "sched/types.hpp"

namespace gpushare::base {
class Bell;
class Pieces;
}  // namespace gpushare::base

namespace gpushare::sched {

class GateLink;
class MeasuredInterference;

struct SessionSpec {
  SessionId id = kNoSession;  // chosen by the driver, ascending
  std::string name;
  SessionClass cls = SessionClass::kGuaranteed;
  int32_t priority = 0;
  double weight = 1.0;
  uint64_t persistent_bytes = 0;     // P
  uint64_t ephemeral_bytes = 0;      // E
  bool named = true;                 // false: the name was made up and says nothing about the session's work
  uint64_t remaining_ns = kUnknown;  // declared
  uint64_t iterations_total = 0;     // 0 = unknown; with iteration_ns an estimate of remaining
  uint64_t quota_bytes = 0;          // the most that P + E may be, see set_quota(); 0 = no limit
  // Units that its lane has for itself; 0 = the lane shares the device with all such lanes.
  uint32_t compute_units = 0;
  uint64_t trust_group =
      0;  // its trust group: it shares a lane only with sessions of that group; SchedulerOptions::shared_lanes
  uint64_t group = 0;     // see Scheduler::group_needs(); 0: none
  bool may_queue = true;  // false: arrive() refuses a session that cannot be admitted at once
  bool may_page = true;   // false: the session is not paged out before allow_paging()
  bool may_claim = true;  // false: nothing is dropped or paged out so that it gets in
  // For a coordinator (set_coordination). The bytes of P + E with which the session can still run, the rest being in
  // host memory; 0: all of them.
  uint64_t least_bytes = 0;
  bool may_upgrade = false;  // an opportunistic session counts as guaranteed while there is room
  // True: once its stay is over (stays.hpp), the session is paged out for a session that waits for memory, under every
  // policy.
  bool alternates = false;
  // Used with may_page false: allow_paging() is never called, so the session never pages.
  bool never_pages = false;
  // True: the need is unknown, and persistent_bytes and ephemeral_bytes are the least to start with. Once that much is
  // free, the session is admitted with all free bytes as E, in a lane of its own where one may be opened. set_need()
  // ends profiling.
  bool profiling = false;
};

// kPagedOut from the kPageOut action until kPageIn is reported done.
enum class SessionState : uint32_t { kQueued, kResident, kPagedOut };

enum class ActionKind : uint32_t {
  kOpenLane,    // lane, bytes, compute_units
  kResizeLane,  // lane, bytes: holds for iterations dispatched from now on; a shrink is promised to others
                // only when the iterations dispatched before have finished
  kCloseLane,   // lane: no session of it is left, nothing of it is in flight
  kAdmit,       // session, lane: reserve its P; its iterations may be picked from now on
  kPageOut,     // session: copy persistent bytes to host, then page_done(); it holds no promise afterwards
  kPageIn,      // session, lane: reserve P again, copy back, then page_done()
  kTurnBack,    // session: give its page-in up, then unplaced(); nothing if the page-in is done already
  kMove,  // session, lane: its iterations run in that lane from now on; nothing of it is in flight or being copied
  kDrop,       // session: it is spare; end it without a copy, then leave()
  kFillCache,  // session is the cache's id: its bytes are promised; send them
  kDropCache,  // likewise: give its bytes back, then cache_dropped()
  kTerms  // session, bytes, cls: what the coordinator has decided: it counts as of that class where bytes are asked for, and has at
  // most so many bytes of P + E (0: no such limit), which the driver reaches at boundaries like a quota. In turns and at
  // gates it is of the better of this class and its own.
};

struct Action {
  ActionKind kind;
  LaneId lane = kNoLane;
  SessionId session = kNoSession;
  uint64_t bytes = 0;
  uint32_t compute_units = 0;
  SessionClass cls = SessionClass::kGuaranteed;
};

// Bytes of a session that can leave the device while the rest of the session stays: blocks that may lie in host memory,
// or an elastic range.
struct Part {
  SessionId session = kNoSession;
  uint64_t bytes = 0;
};

class Authority {
 public:
  virtual ~Authority() = default;

  // ---- what happened ---------------------------------------------------------------------------------------
  // A session asks for admission. OK: it is admitted or queued (see state()). Errors: EXCEEDS_CAPACITY (P + E, or
  // its compute units, above what there is; message has the numbers), DEVICE_OUT_OF_MEMORY (may_queue is false
  // and it does not fit now; the message names need, what can be promised, persistent bytes of n sessions,
  // lanes).
  virtual base::Status arrive(const SessionSpec& spec, uint64_t now_ns) = 0;
  // The session has an iteration to run, until dispatched() hands that iteration to its lane. Allowed in any
  // state; idempotent.
  virtual void ready(SessionId session, uint64_t now_ns) = 0;
  // A paged-out session needs its bytes although it has no iteration ready (an allocation waits).
  virtual void wake(SessionId session, uint64_t now_ns) = 0;
  // The session may be paged out from now on, or at once if that was decided meanwhile. No effect if it could
  // be paged out already.
  virtual void allow_paging(SessionId session, uint64_t now_ns) = 0;
  // The session withdrew its ready iteration (a begin timed out).
  virtual void not_ready(SessionId session, uint64_t now_ns) = 0;
  // The iteration picked last for `session` was handed to its lane (call ready() again if the session has
  // another one). With an enqueue depth above one, several may be dispatched before the first has finished.
  // `iterations` above 1: a run of so many equal ones.
  virtual void dispatched(SessionId session, LaneId lane, uint64_t now_ns, uint64_t iterations = 1) = 0;
  // The device work of the session's oldest dispatched iteration is done: `device_ns` of service.
  // `iterations` above 1: a run of equal iterations dispatched as one. 0: the turn was given back unused.
  virtual void finished(SessionId session, uint64_t device_ns, uint64_t now_ns, uint64_t iterations = 1) = 0;
  // Allowed where may_lend() was true. The session has run `iterations` equal iterations, one after the other, since
  // its last finished(). Has the effect of ready(), dispatched() and finished() for each.
  virtual void ran_alone(SessionId session, LaneId lane, uint64_t device_ns, uint64_t now_ns,
                         uint64_t iterations) = 0;
  // Figures for readers in other processes, which see the sessions of several processes together: the device time of a
  // finished iteration and its wait for the turn; the counts of the request queue that the session serves.
  virtual void note_iteration(SessionId /*session*/, uint64_t /*device_ns*/, uint64_t /*waited_ns*/) {}
  virtual void note_requests(SessionId /*session*/, const base::RequestCounts& /*counts*/) {}
  // The session has ended, with nothing in flight. The actions that follow give its promise to others.
  virtual void leave(SessionId session, uint64_t now_ns) = 0;
  // New promise of a resident session (profiled, grown or shrunk). Errors: DEVICE_OUT_OF_MEMORY when it would
  // break safety (nothing changes), EXCEEDS_CAPACITY, QUOTA_EXCEEDED. A need that does not grow is never
  // refused.
  virtual base::Status set_need(SessionId session, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                                uint64_t now_ns) = 0;
  // Changes how many bytes of the whole device may be promised. A value below the promised bytes is a target:
  // nothing new is promised above it, and promises fall as lanes merge, shrink and close at their boundaries
  // and as sessions are paged out at theirs, lowest class first, whatever the policy. A session that does not
  // fit any more waits until the capacity is raised. Errors: EXCEEDS_CAPACITY (more than there is), UNSUPPORTED
  // (another process decides it).
  virtual base::Status set_capacity(uint64_t bytes, uint64_t now_ns) = 0;
  // Bytes of the device that are used outside of all sessions: contexts, code in them, other libraries. They are those
  // of the process, or those of all processes where the scheduler itself is called. They cannot be refused or taken
  // back, so sessions and caches make room for them at their boundaries, as for a lower capacity.
  virtual void set_context_bytes(uint64_t bytes, uint64_t now_ns) = 0;
  // Changes how many bytes may be promised to the session (P + E, each rounded up); 0: no limit. If the limit
  // is below the session's need, the need does not grow, and the driver gives back free bytes of it at
  // boundaries, by set_need(). Nobody is paged out for it.
  virtual void set_quota(SessionId session, uint64_t bytes) = 0;
  // From now on a coordinator with these options decides which sessions run, in which class and with how many bytes.
  // The capacity in the options is ignored: that of the authority counts. nullopt: no coordinator, as at first. Errors:
  // UNSUPPORTED (another process decides it).
  virtual base::Status set_coordination(const std::optional<CoordinatorOptions>& options,
                                        uint64_t now_ns) = 0;
  virtual void set_priority(SessionId session, int32_t priority, uint64_t now_ns) = 0;
  // Changes the class as which the session counts.
  virtual void set_class(SessionId session, SessionClass cls, uint64_t now_ns) = 0;
  virtual void set_weight(SessionId session, double weight) = 0;  // finite, > 0; else ignored
  // With a worth the session is spare: it runs no iterations, its bytes can be had again, and it stays for speed alone
  // (a model kept for its next request, first layers on standby). Spare sessions make room before all others, by class,
  // then by price; kDrop is the action. The price is `worth_ns`: the time to bring the bytes back times the requests
  // for them; it halves every kRequestHalfLifeNs. Without a worth, or when it becomes ready, the session is an ordinary
  // one again. False: the session is being dropped already.
  virtual bool set_spare(SessionId session, std::optional<double> worth_ns, uint64_t now_ns) = 0;
  // Measured time of the link for a byte: the price of paging.
  virtual void set_link(double ns_per_byte) = 0;
  // Device time still needed from now on (kUnknown: estimate again).
  virtual void set_remaining(SessionId session, uint64_t remaining_ns, uint64_t now_ns) = 0;
  // The session's next iteration wins `worth` (requests served, in their costs) if it begins by `until_ns`, and nothing
  // if it begins later. The session goes first where it would win nothing after a wait for another session of its rank,
  // as long as it has an unused part of the device left (kMostUnusedNs). Of several such sessions the one of the
  // greatest worth goes first. The worth is forgotten when an iteration begins, and at once if a worth comes that is
  // not finite and above 0. A call while an iteration runs is about the iteration after it; the session is then
  // expected back at once. The worth of set_spare() is another thing.
  virtual void set_worth(SessionId session, double worth, uint64_t until_ns) = 0;
  // Changes the policy. Admitted sessions stay admitted, also above the new policy's limits.
  virtual void set_policy(std::unique_ptr<Policy> policy, uint64_t now_ns) = 0;
  // The driver could not place an admitted session's bytes (contiguous layout, fragmented): the session goes
  // back to the queue until something is freed. Caches that nobody uses are dropped for it.
  virtual void unplaced(SessionId session, uint64_t now_ns) = 0;
  // Part of a kPageOut action is done: `bytes` more of P are out, and others may have them. page_done() follows.
  virtual void page_part(SessionId session, uint64_t bytes, uint64_t now_ns) = 0;
  // A kPageOut or kPageIn action has been carried out.
  virtual void page_done(SessionId session, uint64_t now_ns) = 0;
  // A resident session misses bytes. Its driver asks for them by sched::Need, giver by giver; this is the question
  // (room.hpp). False: that giver gives nothing, or kSpare would not be enough. The bytes are promised to no other session
  // until room_used(session); making_room() tells until when they are under way. For kBoundaries all must be enough, and
  // no iteration of theirs begins meanwhile. kNoSession: the device's bytes are in pieces, and only kSpare is asked. For
  // kRanges: true while bytes are on the way; it is called again until they are there; 0 bytes: the wait is over.
  virtual bool make_room(SessionId session, const RoomAsk& ask, uint64_t now_ns) = 0;
  // The session no longer waits for boundaries. Sessions whose boundary has not come yet are not paged out.
  virtual void stop_making_room(SessionId /*session*/) {}
  // True while room that make_room() makes for the session is under way. For a guaranteed
  // session, room for others counts too.
  virtual bool making_room(SessionId session) const = 0;
  // The session for which make_room() made room has taken what it needs, or has given up. What is left, or still on its
  // way, is for every session. A driver also calls it for kNoSession when memory outside of the books may have come
  // free: sessions that found no place are then tried again.
  virtual void room_used(SessionId session, uint64_t now_ns) = 0;
  // No part of a kPageOut action could be carried out (no host memory). The session is resident as before, and is not
  // chosen again until another session leaves.
  virtual void page_out_failed(SessionId session, uint64_t now_ns) = 0;
  // A kOpenLane, kResizeLane or kCloseLane action has been carried out: the lane has `bytes` of device memory, 0 once closed.
  virtual void lane_applied(LaneId lane, uint64_t bytes, uint64_t now_ns) = 0;

  // ---- what next ------------------------------------------------------------------------------------------
  // The session whose iteration runs next in `lane`; nullopt leaves it idle. After any event, ask again for
  // every free lane, because an event of one session may let another lane run.
  virtual std::optional<SessionId> pick(LaneId lane, uint64_t now_ns) = 0;
  // The lanes in which pick() could name a session now, in no order, valid until the next call; nullopt: any lane. A
  // driver with many lanes calls pick() for these lanes alone.
  virtual std::optional<std::span<const LaneId>> lanes_to_ask() const { return std::nullopt; }
  // The time at which to call pick() again even if nothing happens; kUnknown: none. pick() may leave a lane idle for
  // sessions that are behind in service, and an iteration of such a session may take longer than expected because its
  // host holds it open.
  virtual uint64_t look_again_ns() const = 0;
  // To be called at the time of look_again_ns().
  virtual void look(uint64_t /*now_ns*/) {}
  // True if the driver may run iterations of the session in its lane, one after the other, and report them together by
  // ran_alone() before it reports or asks anything else. This holds while no other session is ready, pick() would
  // always choose this session, and nothing waits for a boundary of the lane.
  virtual bool may_lend(SessionId /*session*/, LaneId /*lane*/) const { return false; }
  // The actions decided since the last call, in the order in which to carry them out. pick() decides some, too.
  virtual std::vector<Action> take_actions() = 0;

  // ---- what is: unknown sessions are kQueued, on kNoLane, with an empty view -----------------------------------
  virtual SessionState state(SessionId session) const = 0;
  virtual size_t paged_out() const = 0;                 // sessions in the state kPagedOut
  virtual LaneId lane_of(SessionId session) const = 0;  // also while its page-in is under way
  virtual SessionView view(SessionId session) const = 0;
  virtual std::string policy_name() const = 0;
  // Why the coordinator does not let the session run; empty: it does, or there is no coordinator.
  virtual std::string coordinated_wait(SessionId /*session*/) const { return {}; }
  // Why the policy does not admit the session, whatever memory is free; empty: the session waits for something else.
  virtual std::string policy_wait(SessionId /*session*/) const { return {}; }
  virtual std::vector<SessionId> dropping() const = 0;  // spare sessions that are to go and have not left
  virtual double link_ns_per_byte() const = 0;          // 0: not measured
  virtual uint64_t promised_bytes() const = 0;          // of the whole device
  virtual Limit capacity() const = 0;                   // of the whole device
  virtual uint64_t lane_bytes(LaneId lane) const = 0;
  virtual uint32_t lane_compute_units(LaneId lane) const = 0;  // for itself; 0 = shares the device
  virtual uint32_t promised_compute_units() const = 0;         // sum over lanes
  // The claims that the parts make among all that may give bytes up (give_up() in claims.hpp): ranked by class, then by
  // the policy, and priced by the time to move the bytes out and back.
  virtual std::vector<Claim> claims_on(std::span<const Part> parts, uint64_t now_ns) const = 0;
  // Checks the invariants; empty when they hold. For tests.
  virtual std::string check() const = 0;

  // ---- how sessions slow each other ------------------------------------------------------------------------------
  // Measures interference from now on, under any policy. Null where another process measures it.
  virtual std::shared_ptr<MeasuredInterference> measure() { return nullptr; }
  virtual std::shared_ptr<MeasuredInterference> measured() const { return nullptr; }  // null: nobody measures

  // ---- gates before launches (op-gates.md), where they are decided elsewhere ------------------------------------------
  // An iteration of the session begins on the device; not `guaranteed`: nobody minds what runs beside it. `target`: the slowdown
  // that it accepts; 0 = the default. Iterations of a session end in their order. device_ns 0: not measured, or it failed.
  virtual void work_began(SessionId /*session*/, bool /*guaranteed*/, double /*target*/) {}
  virtual void work_ended(SessionId /*session*/, uint64_t /*device_ns*/) {}
  // Launches of the session go through a gate from now on. Null: this process decides what it lets in.
  virtual std::shared_ptr<GateLink> open_gate(SessionId /*session*/) { return nullptr; }

  // ---- where the decisions are made elsewhere; an authority in this process decides at once ---------------------
  // OK, or the reason why no decisions come now. Sessions keep their memory and turns in that time.
  virtual base::Status standing() const { return {}; }
  // `changed` is called on a thread of the authority's when there may be new actions or picks although the driver has
  // told nothing. Set before the first event. After stop() it is not called again; stop() waits for a call under way.
  virtual void set_on_change(std::function<void()> /*changed*/) {}
  virtual void stop() {}
  // True if other sessions want the turn of the lane's session. The driver then finishes the iterations in flight and
  // reports them.
  virtual bool wants_drained(LaneId /*lane*/) const { return false; }
  // The bell on which a thread waits for the session's turn. The thread calls pick() again each time the bell rings.
  // Null: there is no bell, and `changed` is called.
  virtual std::shared_ptr<base::Bell> bell(SessionId /*session*/) const { return nullptr; }
  // The source of the lane's memory if processes share the lane; null: the driver makes the memory.
  virtual std::shared_ptr<base::Pieces> lane_pieces(LaneId /*lane*/) const { return nullptr; }
  // The session needs memory of its own in place of a lane that processes share. Its E is promised a second time, as
  // its own, until has_own_lane() reports the outcome. `has` true: the session does not use the shared lane any more,
  // and its E is its own for good. False: all is as before. Errors of needs_own_lane(): as set_need().
  virtual base::Status needs_own_lane(SessionId /*session*/, uint64_t /*now_ns*/) { return {}; }
  virtual void has_own_lane(SessionId /*session*/, bool /*has*/, uint64_t /*now_ns*/) {}

  // ---- elastic ranges of other processes (elastic.hpp) -----------------------------------------------------------
  // The session's ranges have `bytes` for which their owner can be asked. The owner has `answer_ns` to answer.
  virtual void set_ranges(SessionId /*session*/, uint64_t /*bytes*/, uint64_t /*answer_ns*/,
                          double /*price_ns_per_byte*/) {}
  // The bytes for which others ask a session's ranges. Call take_ranges_asked() after take_actions().
  struct RangesAsked {
    SessionId session;
    uint64_t bytes;
  };
  virtual std::vector<RangesAsked> take_ranges_asked() { return {}; }
  // The answer: the bytes that the session's ranges give in all, or UINT64_MAX if no range can give any.
  virtual void answer_ranges(SessionId /*session*/, uint64_t /*bytes*/) {}
};

}  // namespace gpushare::sched
