// scheduler_impl.hpp: the scheduler's state, shared by scheduler.cpp (events), turns.cpp (picks),
// admission.cpp
// (sessions that get in), eviction.cpp (who gives bytes up), capacity.cpp (limits that change) and merging.cpp (lanes
// that give way). Other folders do not include it. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/flat_hash.hpp"

#include "sched/claim_tree.hpp"
#include "sched/claims.hpp"
#include "sched/lane_ids.hpp"
#include "sched/peers.hpp"
#include "sched/scheduler.hpp"
#include "sched/session_states.hpp"
#include "sched/stays.hpp"
#include "sched/turn_rules.hpp"
#include "sched/waiting_list.hpp"

namespace gpushare::sched {

// The rank of spare sessions and caches. Twice this value is their rank among claims.
inline uint32_t spare_rank(SessionClass cls) {
  return cls == SessionClass::kGuaranteed ? 1 : 0;
}

// Virtual time for `ns` of service. Bounded, so that a very small weight gives no infinity.
inline double virtual_cost(double ns, double weight) {
  return std::clamp(ns / weight, -1e30, 1e30);
}

struct Peers;

struct SessionRecord : ByVirtualHook, ByBegunHook {
  static constexpr size_t kNoSlot = static_cast<size_t>(-1);

  SessionSpec spec;
  SessionView view;
  ClaimNode claim;                // needed: P + E; promised: of P, by Impl::promise()
  Bytes bytes = Bytes::kWaiting;  // written by Impl::change() alone
  SessionClass bytes_cls =
      SessionClass::kGuaranteed;  // the class by which it gets and gives bytes; turns go by view.cls
  LaneId lane = kNoLane;
  size_t member_at = 0;                   // in its lane's members
  Peers* peers = nullptr;                 // the sessions of its rank; null: ranks are not numbers
  double virtual_key = 0, begun_key = 0;  // its keys in the orders of Peers
  bool counted = false;                   // among Peers::in_the_way
  bool stands_wanting = false;            // in Peers::wanting, else in Peers::resting
  bool touched = false;                   // it is in Impl::touched
  uint64_t persistent_bytes = 0;          // rounded to the granularity
  uint64_t gone_bytes = 0;  // the part of persistent_bytes that has left in a page-out; not promised any more
  uint64_t ephemeral_bytes = 0;     // by Impl::set_ephemeral()
  uint32_t compute_units = 0;       // rounded likewise
  size_t slot = kNoSlot;            // in its lane's ready views
  uint64_t declared_ns = kUnknown;  // the declared remaining time, less the service received since
  uint64_t work_ns = kUnknown;      // the remaining time when it was declared, after `work_since` iterations
  uint64_t work_since = 0;
  double expected_in_flight_ns = 0;
  uint64_t last_wanted_ns = 0;  // when it last had an iteration to run
  double lag_ns = 0;            // the virtual time by which it was behind the others at last_wanted_ns
  Pauses pauses;                // between its iterations
  // Since when it has been resident with nothing to run; kUnknown: it is not so.
  uint64_t paused_since_ns = kUnknown;
  uint64_t expected_from_ns = 0;
  uint64_t expected_until_ns = 0;  // its lane may be left idle for it; see Impl::expected()
  uint64_t soon_until_ns =
      0;  // until then nothing is enqueued before its turn; 0: it is not among its lane's paused sessions
  bool returns = false;    // its pauses are so short that it is expected back after each iteration
  bool said_more = false;  // it is expected back because set_worth() has said that more work waits
  // How many more times set_worth() is not believed, because the session did not come back.
  uint32_t unbelieved = 0;
  WaitingList::Chunk* chunk = nullptr;  // its chunk of the list that it is in; null: it is in no list
  uint32_t overtaken = 0;    // its count of overtakings while it is in no list; else the list counts
  bool queued_idle = false;  // the list is `idle`, else `waiting`
  uint64_t since_ns = 0;     // since when it has been resident, ready, in flight or idle
  bool ready = false;
  bool wake = false;
  bool claiming = false;     // waits for page-outs made for it
  bool turned_back = false;  // page-ins of others have turned back for it while it waited for admission
  std::optional<SessionId>
      yields_to;  // paged out for that session's allocation: no other session gets the bytes until room_used()
  bool pinned = false;             // could not be paged out: spared until another session leaves
  bool victim = false;             // used inside who_gives(): it would go
  std::optional<double> worth_ns;  // set: it is spare; the worth as of worth_since_ns
  uint64_t worth_since_ns = 0;
  bool stopped = false;       // the coordinator does not let it run: its bytes go out, and it waits
  bool rigid = false;         // it could not shrink to its limit: it needs all of its bytes
  uint64_t limit_bytes = 0;   // on P + E, by the coordinator; 0 = none
  uint64_t wanted_bytes = 0;  // the bytes that it would have without the limit
  uint64_t above_bytes = 0;   // its bytes above the limit, and since when they have not fallen
  uint64_t above_since_ns = 0;
  bool overdue = false;       // its turn may not have ended
  bool changes_lane = false;  // it is paged out only to come in again in another lane
  bool blocked = false;       // the driver found no place for it: it waits until something is freed
  // Its stay (stays.hpp): when the stay began, the service then, the time without work since, the weighted use of the
  // memory before.
  uint64_t stay_since_ns = 0, stay_service_ns = 0, stay_rest_ns = 0;
  double stay_tag_ns = 0;
  // The times that its last moves count as; 0: no move yet.
  uint64_t out_ns = 0, in_ns = 0, move_since_ns = 0;

  bool holds_promise() const { return lane != kNoLane; }
  // Of P.
  uint64_t held_bytes() const { return holds_promise() ? persistent_bytes - gone_bytes : 0; }
  bool wanted() const { return ready || view.in_flight > 0; }
  bool goes_out() const { return sched::goes_out(bytes); }
  // True if its iterations can run.
  bool resident() const { return bytes == Bytes::kResident; }
  bool out() const { return bytes == Bytes::kOut || bytes == Bytes::kGoing || comes_in(bytes); }
  bool wants_in() const { return !stopped && (!out() || ready || wake); }
  // True if its page-in may turn back for `other`. Turning back copies nothing.
  bool may_turn_back_for(const SessionRecord& other) const {
    return bytes == Bytes::kComing && bytes_cls == SessionClass::kOpportunistic &&
           other.bytes_cls == SessionClass::kGuaranteed;
  }
  // True if it cannot be paged out now, only later.
  bool busy() const { return view.in_flight > 0 || overdue || !spec.may_page; }
};

inline void Members::push_back(SessionRecord& session) {
  session.member_at = places_.size();
  places_.push_back(&session);
  ++size_;
}

inline void Members::erase(SessionRecord& session) {
  places_[session.member_at] = nullptr;
  if (2 * --size_ >= places_.size()) return;
  std::erase(places_, nullptr);
  for (size_t at = 0; at < places_.size(); ++at) places_[at]->member_at = at;
}

// The sessions of one rank. Sessions in lanes that share by weight are in order, where they are up to date.
struct Peers {
  struct ByVirtual {
    bool operator()(const SessionRecord& a, const SessionRecord& b) const {
      return a.virtual_key != b.virtual_key ? a.virtual_key < b.virtual_key : a.view.id < b.view.id;
    }
  };
  struct ByBegun {
    bool operator()(const SessionRecord& a, const SessionRecord& b) const {
      return a.begun_key != b.begun_key ? a.begun_key < b.begun_key : a.view.id < b.view.id;
    }
  };
  template <class Hook, class Order>
  using Set =
      boost::intrusive::set<SessionRecord, boost::intrusive::base_hook<Hook>,
                            boost::intrusive::compare<Order>, boost::intrusive::constant_time_size<false>>;
  uint64_t rank = 0;
  size_t sessions = 0;    // all of the rank, in lanes or not
  size_t in_the_way = 0;  // those in lanes that share the device, without spare sessions
  // By virtual time. Sessions that have wanted nothing for so long that their lag is forgotten are left out.
  Set<ByVirtualHook, ByVirtual> recent;
  // Where ranks are numbers, by the virtual time at which the work in flight began. `wanting`: sessions that want the
  // device or are back soon. `resting`: the others.
  Set<ByBegunHook, ByBegun> wanting, resting;
  mutable FirstLanes behind;  // lanes with sessions of the rank, the least virtual time first
  mutable FirstLanes above;   // lanes with sessions of a higher rank, the lowest number first
};

struct LaneRecord {
  bool open = false;
  bool closing = false;        // its sessions go to other lanes at their boundaries, to make room
  uint64_t bytes = 0;          // the bytes that iterations dispatched from now on may use
  ClaimNode claim;             // promised: more than `bytes` until a shrink has settled
  uint64_t applied = 0;        // the bytes that the lane has, as the driver says
  uint32_t compute_units = 0;  // units that the lane has for itself, as each of its sessions asks
  uint64_t trust_group = 0;    // the group of each of its sessions
  uint32_t overdue = 0;        // sessions
  uint64_t dispatched = 0;
  uint64_t completed = 0;
  uint64_t settles_at = 0;   // the completed count at which `held` falls to `bytes`
  double start_tag_ns = 0;   // the virtual time of the session dispatched last, at its dispatch
  uint64_t progress_ns = 0;  // when the empty lane was last dispatched to, or last finished an iteration
  uint64_t held_back_ns = kUnknown;  // pick() left the lane idle for other lanes: until when at most
  SessionId picked = kNoSession;
  Members members;
  std::map<uint64_t, size_t> needs;  // how many members have this E
  Front front;
  std::vector<SessionRecord*> flying;  // those with something in flight
  std::vector<SessionRecord*> paused;  // those that have nothing to run, and usually come back soon
  std::vector<SessionView> ready;
  size_t ready_position = 0;       // in Impl::ready_lanes, while anybody is ready
  uint64_t least_ready_bytes = 0;  // at most the least E of those ready

  uint64_t held() const { return claim.promised(); }
  bool busy() const { return dispatched != completed; }
  void forget_need(uint64_t ephemeral_bytes) {
    if (const auto found = needs.find(ephemeral_bytes); --found->second == 0) needs.erase(found);
  }
  uint64_t need() const { return needs.empty() ? 0 : needs.rbegin()->first; }  // the largest E
  // The largest E of the members without one session whose E is `ephemeral_bytes`.
  uint64_t need_without(uint64_t ephemeral_bytes) const {
    for (auto each = needs.rbegin(); each != needs.rend(); ++each)
      if (each->first != ephemeral_bytes || each->second > 1) return each->first;
    return 0;
  }
  // True if the iteration in flight is so long that it costs little to enqueue the next one only at its end.
  bool long_in_flight() const {
    return std::any_of(flying.begin(), flying.end(),
                       [](const SessionRecord* each) { return each->view.iteration_ns >= kLongNs; });
  }
  // True if no session of the lane is picked, because an overdue turn may still use memory that other processes map,
  // too.
  bool held_up() const { return overdue > 0 && trust_group != 0; }
  // True if each of its sessions is on its way to another lane.
  bool is_left() const {
    return !members.empty() &&
           std::all_of(members.begin(), members.end(), [](const auto* each) { return each->changes_lane; });
  }
};

struct CacheRecord {
  ClaimNode claim;  // promised: `bytes` while it is held
  uint64_t id = 0, bytes = 0, first_part = 0;
  SessionClass cls = SessionClass::kGuaranteed;  // of `wanted_by`, when it wanted the cache
  double restore_ns = 0;
  double requests = 0;  // halved every half-life up to requested_ns
  uint64_t requested_ns = 0;
  uint32_t users = 0;
  SessionId wanted_by = kNoSession;  // who wanted it last; while it waits, the best class comes first
  std::vector<SessionId> wanters;    // those that wanted it, each once, until nobody wants it
  bool held = false;
  bool dropping = false;  // kDropCache is under way
  bool waiting = false;   // in cache_line
  bool victim = false;    // inside who_gives()

  bool droppable() const { return held && !dropping && users == 0; }
};

// Sessions that arrived with one group (SessionSpec::group).
struct GroupRecord {
  explicit GroupRecord(ClaimNode& above) : claim(above) {}
  ClaimNode claim;
  size_t sessions = 0;
};

// Who goes.
struct Victims {
  std::vector<SessionRecord*> sessions;
  std::vector<CacheRecord*> caches;
  bool empty() const { return sessions.empty() && caches.empty(); }
};

// The purpose for which bytes are asked. It says who may have to give bytes (Impl::may_give) and when there are enough
// (Impl::missing). Caches and spare sessions may always have to.
enum class Why : uint8_t {
  kSpares,      // a session waits for admission: only caches and spare sessions give
  kAdmission,   // a session waits for admission: those that give way to it
  kStay,        // a session waits for admission: those whose stays in memory are over
  kAllocation,  // a resident session, now: those that it outranks, with nothing in flight
  kDrop,        // a resident session, now: only caches and spare sessions give
  kBoundaries,  // a resident session: busy opportunistic ones, at their next boundaries
  kPieces,      // a session found no place in the free bytes: only caches give
  kCapacity,    // more is promised than the device's capacity
  kOtherLane    // a session that is to leave a lane which is held up: the others of that lane
};

struct Ask {
  Why why;
  uint64_t now_ns = 0;
  const SessionRecord* session = nullptr;
  uint64_t bytes = 0;  // for kAllocation, kDrop, kBoundaries and kPieces; the others ask for what is missing
  uint64_t elsewhere_bytes = 0;  // the bytes that the asker can get in other ways
  // True if the asker takes what there is when all together leave `left` missing.
  bool takes_less(uint64_t left) const {
    return why == Why::kAllocation || why == Why::kPieces || why == Why::kCapacity || left <= elsewhere_bytes;
  }
};

// An allocation that waits for the bytes of a session whose page-in turns back for it.
struct ComingBack {
  SessionId of = kNoSession;
  SessionId waits = kNoSession;
  uint64_t bytes = 0;
};

// peers.cpp: the session's virtual time without what it has in flight, and whether it wants the device or is soon back.
double begun_ns(const SessionRecord& session);
bool wants_or_returns(const SessionRecord& session);

struct Scheduler::Impl {
  // The device as a policy sees it.
  struct Device final : DeviceView {
    explicit Device(const Impl* impl) : of(impl) {}
    std::span<const ResidentView> residents() const override;
    uint64_t changes() const override { return of->changes; }
    const Interference* interference() const override { return of->interference.get(); }
    const Impl* of;
    mutable std::vector<ResidentView> list;
  };

  SchedulerOptions options;
  std::unique_ptr<Policy> policy;
  Answers asks;  // the policy's
  Device device{this};
  uint64_t changes = 0;
  ClaimTree tree;
  std::map<uint64_t, GroupRecord> groups;  // by number, while they have sessions
  size_t whole = 0;                        // sessions that hold a promise and are to have the whole device
  std::shared_ptr<const Interference> interference;
  std::shared_ptr<MeasuredInterference> measured;  // null: interference is not measured
  base::FlatHashMap<SessionId, std::unique_ptr<SessionRecord>> sessions;
  std::map<uint64_t, Peers> peers;  // by rank
  std::vector<LaneRecord> lanes;
  LaneIds lane_ids;
  std::vector<LaneId> ready_lanes;  // lanes with a ready session, in no order
  // Sessions whose place among their peers is out of date; and a count of changes that matter for turns.
  std::vector<SessionRecord*> touched;
  uint64_t turn_version = 1;
  std::vector<LaneId> crowded;  // busy lanes with a ready session, as of crowded_version
  uint64_t crowded_version = 0;
  WaitingList waiting;  // sessions that want to be admitted
  WaitingList idle;     // paged-out sessions without work, and those that the coordinator has stopped
  std::vector<SessionId> blocked;  // sessions blocked since something was last freed; some may have left
  std::vector<SessionId> pinned;   // sessions pinned since a session last left; some may have left
  std::vector<Action> actions;
  Limit capacity;
  uint32_t compute_units = 0;  // over lanes
  size_t residents = 0;        // sessions holding a promise
  uint32_t lanes_open = 0;
  // Start-time fair queueing over the whole device: the least start tag of a busy lane, never falling.
  double virtual_ns = 0;
  uint64_t longest_ns = 0;              // iteration
  size_t held_back = 0;                 // lanes that pick() left idle for other lanes
  std::vector<SessionView> movable;     // scratch for pick()
  uint32_t overdue = 0;                 // overdue sessions in lanes
  uint32_t evicting = 0;                // sessions marked evicting or being paged out, caches being dropped
  std::vector<ComingBack> coming_back;  // longest waiting first
  std::vector<std::unique_ptr<CacheRecord>> caches;
  size_t spares = 0;                     // spare sessions
  size_t with_deadline = 0;              // sessions whose next iteration has a worth (set_worth)
  bool several_groups = false;           // sessions of more than one trust group have arrived
  double link_ns_per_byte = 0;           // 0: not measured
  std::vector<CacheRecord*> cache_line;  // wanted and not held, by served_before()
  std::optional<Coordinator> coordinator;
  uint64_t coordinate_at_ns = kUnknown;  // when it is to look again
  uint64_t above_limit_bytes = 0;        // the sum of what sessions have above their limits
  size_t alternating = 0;                // sessions that do
  size_t paged_out = 0;                  // sessions that are paged out, or on their way
  SessionId place_for = kNoSession;      // the session that gets the place of those whose stays are over
  uint64_t stays_end_ns = kUnknown;      // when place_for is to be chosen again
  uint64_t last_in_line = 0;
  uint64_t taken = 0;    // states_taken()
  std::string unlisted;  // the first change of state that was asked for and is not in the table

  SessionRecord* find(SessionId id) const {
    const auto found = sessions.find(id);
    return found == sessions.end() ? nullptr : found->second.get();
  }
  uint64_t promised() const { return tree.device.promised(); }
  uint64_t free_bytes() const { return capacity.target_bytes - std::min(capacity.target_bytes, promised()); }
  uint64_t beside_contexts() const {
    return capacity.target_bytes - std::min(capacity.target_bytes, tree.contexts.promised());
  }
  void gave_back() {  // called after promises fell
    capacity.effective_bytes =
        std::max(capacity.target_bytes, std::min(capacity.effective_bytes, promised()));
  }
  uint64_t rounded(uint64_t bytes) const;
  uint64_t rounded_persistent(uint64_t bytes) const;
  uint64_t rounded_units(uint32_t units) const;
  // True if the session could be in the lane, were there room.
  static bool suits(const LaneRecord& lane, const SessionRecord& session) {
    return lane.compute_units == session.compute_units && lane.trust_group == session.spec.trust_group;
  }
  // True if the session may change to the lane.
  bool takes(const LaneRecord& lane, const SessionRecord& session) const {
    return lane.open && !lane.closing && suits(lane, session) && session.ephemeral_bytes <= lane.bytes &&
           (!options.confirms_lanes || (lane.applied > 0 && session.ephemeral_bytes <= lane.applied));
  }
  bool evictable(const SessionRecord& session) const {
    return session.resident() && !session.pinned && !session.spec.never_pages && !session.overdue;
  }
  // True if the session is spare and can go. Spare sessions go before all others.
  bool spare(const SessionRecord& session) const { return session.worth_ns && evictable(session); }
  static bool spare(const CacheRecord& cache) { return cache.droppable(); }
  bool any_spare() const { return spares > 0 || !caches.empty(); }

  // scheduler.cpp
  // The session's bytes change as the table of states says (session_states.hpp). False: not listed; check() tells.
  bool change(SessionRecord& session, BytesEvent event);
  static void promise(SessionRecord& session) { session.claim.promise(session.held_bytes()); }
  void join_group(SessionRecord& session);
  void forget(SessionRecord& session);  // it is in the books no more
  // Called when `view` changed: refreshes its copy among the lane's ready views.
  void show(SessionRecord& session);
  void set_ready_slot(SessionRecord& session, bool present);
  void pause(SessionRecord& session, uint64_t now_ns);  // the session has nothing to run from now on
  void stop_expecting(SessionRecord& session);
  void make_places(LaneRecord& lane);  // makes places for one more member
  // True while the session's thread is about to begin its next iteration. The session then keeps its rank, its weight
  // and its lag, and a lane in which it would have the next turn is left idle for it.
  static bool expected(const SessionRecord& session, uint64_t now_ns) {
    return now_ns >= session.expected_from_ns && now_ns < session.expected_until_ns && may_return(session);
  }
  static bool may_return(const SessionRecord& session) {
    return session.resident() && !session.stopped && !session.overdue;
  }
  // The candidates for pick(): sessions that are ready or expected, of the lane, or of all lanes that are not held up.
  // Work that is enqueued behind an iteration cannot be taken back. So in a busy lane the candidates include sessions
  // that run and are expected back, and sessions that usually come back soon: no session of lower rank is enqueued
  // before them.
  std::span<const SessionView> with_expected(std::span<const SessionView> ready, LaneId lane, uint64_t now_ns,
                                             SessionId except = kNoSession);
  // `picked` is not ready yet: nothing is dispatched in the lane before it is ready.
  bool waits_for(LaneRecord& lane, const SessionView& picked, uint64_t now_ns);
  // True if a resident session ranks above this one, so that work enqueued in advance for this one would be in the
  // other's way.
  bool runs_ahead(const LaneRecord& lane, const SessionView& view);
  void advance(uint64_t now_ns);  // the device's virtual time
  // By the policy's order. before(): `a` ranks above `b`. equal(): neither ranks above the other.
  bool before(const SessionView& a, const SessionView& b) const {
    return asks.before && (asks.ranks ? a.rank < b.rank : policy->before(a, b));
  }
  bool equal(const SessionView& a, const SessionView& b) const { return !before(a, b) && !before(b, a); }
  bool runs_before(const SessionView& a, const SessionView& b) const;
  GivesWay gives_way(const SessionRecord& victim, const SessionRecord& other) const {
    return asks.gives_way ? policy->gives_way(victim.view, other.view) : GivesWay::kNever;
  }
  // `there`: the number of other sessions on the device. A session that passes no other joins an empty device whatever
  // the policy says.
  MayJoin may_join(const SessionRecord& session, size_t there, bool passes) const {
    if (!asks.may_join) return MayJoin::kYes;
    const MayJoin answer = policy->may_join(session.view, {there, passes, &device});
    return there == 0 && (answer == MayJoin::kNo || !passes) ? MayJoin::kYes : answer;
  }
  bool weighted(const SessionRecord& session) const {
    return session.view.share.kind == Share::Kind::kWeighted;
  }
  // True if the session may change lanes.
  bool moves(const SessionRecord& session) const { return weighted(session) && !options.shared_lanes; }
  void set_share(SessionRecord& session);  // asks the policy
  // Asks the policy; the session's virtual time begins where that of its new rank is.
  void rank_changed(SessionRecord& session);
  void changed(SessionRecord& session, uint64_t now_ns) {  // what policies see of the session has changed
    session.since_ns = now_ns;
    ++changes;
  }
  // The index of the candidate that runs next. If none may run now: the number of candidates, and `until` is when to
  // ask again.
  size_t first_of(std::span<const SessionView> candidates, uint64_t now_ns, uint64_t& until) const;
  // With deadlines counted: `first`, or the candidate that goes before it by set_worth().
  size_t urgent_of(std::span<const SessionView> candidates, size_t first, uint64_t now_ns) const;
  bool lost_by_waiting(const SessionView& view, const SessionView& other, uint64_t now_ns) const;
  bool allowed_now(const SessionView& view, uint64_t now_ns, uint64_t& until) const;  // by Policy::may_run
  void set_worth(SessionRecord& session, double worth, uint64_t until_ns);
  void use_worth(SessionRecord& session);  // called when its next iteration begins
  static bool believes_more(SessionRecord& session, uint64_t now_ns);
  double shared_virtual_ns(const SessionRecord& session);
  void catch_up(SessionRecord& session, double lag_ns);
  void start_with_others(SessionRecord& session);
  // Called when the session wants nothing from now on.
  void note_lag(SessionRecord& session, uint64_t now_ns);
  void rebase();
  uint64_t patience_ends_ns(uint64_t ready_since_ns) const;
  // peers.cpp
  // Notes a change of the session or of its lane that matters for turns.
  void touch(SessionRecord& session);
  void touch(LaneRecord& lane) {
    lane.front.stale = true;
    ++turn_version;
  }
  void settle();  // brings the touched sessions' places among their peers up to date
  void take_place(SessionRecord& session, Peers* among);
  void set_rank(SessionRecord& session);                  // asks the policy
  void join_peers(SessionRecord& session, Peers* among);  // null: leaves them
  void set_ephemeral(SessionRecord& session, uint64_t bytes);
  void join_lane(SessionRecord& session, LaneId id);
  void quit_lane(SessionRecord& session);
  static uint64_t overdue_ns(const LaneRecord& lane);
  Front front_of(const LaneRecord& lane) const;
  const Front& front(LaneRecord& lane);
  // The least virtual time of the rank's sessions in the lane for which other lanes wait, and until when they wait.
  // Infinity: there is no such session.
  FirstLanes::Of behind_in(LaneId id, uint64_t rank, uint64_t now_ns);
  const FirstLanes& lanes_behind(const Peers& among, uint64_t now_ns);
  const FirstLanes& lanes_above(const Peers& below, uint64_t now_ns);
  FirstLanes::Of above_in(LaneId id, uint64_t rank, uint64_t now_ns);
  const std::vector<LaneId>& crowded_lanes();
  std::string check_peers();
  std::string check_place(const SessionRecord& session);
  std::string check_first_lanes(const Peers& among);
  // The least virtual time of the backlogged sessions in lanes other than `own` that share the device with `view`. If
  // `view` is ahead of that time, `own` waits, until `until` at most.
  double others_virtual_ns(LaneId own, const SessionView& view, uint64_t now_ns, uint64_t& until);
  void hold_back(LaneRecord& lane, uint64_t until_ns);
  // False: the lane is held back.
  bool may_start(LaneId id, const SessionView& view, uint64_t now_ns);
  // True if the session may begin nothing in `own`, because a session of another lane ranks above it, or is behind it.
  // `until`: until when at most.
  bool waits_for_lanes(LaneId own, const SessionView& view, uint64_t now_ns, uint64_t& until);
  bool outranked(LaneId own, const SessionView& view, uint64_t now_ns, uint64_t& until);
  std::optional<SessionId> pick_in(LaneId id, uint64_t now_ns);
  // Moves a session of another lane into this one.
  std::optional<SessionId> move_in(LaneId id, uint64_t now_ns);
  // For schedulers in which one lane at a time has iterations: the next session of the device, if it is in lane `id`.
  std::optional<SessionId> pick_of_all(LaneId id, uint64_t now_ns);
  std::span<const SessionView> ready_of_all();
  void take_policy(std::unique_ptr<Policy> asked);
  void estimate_remaining(SessionRecord& session);
  base::Status validate(const SessionSpec& spec) const;

  // capacity.cpp
  uint64_t quota_of(const SessionRecord& session)
      const;  // the quota in whole granules, as promises count it; UINT64_MAX without a quota
  // The promises that are left once all decisions are carried out and the sessions and caches that `is_gone` names have
  // gone as well.
  template <class IsGone>
  uint64_t promised_without(IsGone is_gone) const;
  void lower(uint64_t now_ns);  // decides what gives way while the promises exceed the capacity
  void merge_to_lower(uint64_t now_ns);

  // coordination.cpp
  void coordinate_anew(const std::optional<CoordinatorOptions>& asked, uint64_t now_ns);
  CoordinatedJob job_of(SessionRecord& session) const;
  void job_changed(SessionRecord& session, uint64_t now_ns);  // tells the coordinator
  void want(SessionRecord& session, uint64_t need_bytes, uint64_t now_ns);
  void coordinate(uint64_t now_ns);  // carries out what it has decided
  void look_at_limits(uint64_t now_ns);
  void watch_limit(SessionRecord& session, uint64_t now_ns);
  void stop(SessionRecord& session, uint64_t now_ns);
  void release(SessionRecord& session);
  void set_terms(SessionRecord& session, SessionClass cls, uint64_t limit_bytes);

  // eviction.cpp
  // The one decision on who gives bytes up: the least of `from`, by class, rank and price, that together make the bytes
  // asked for. An empty list if nothing is missing; nullopt if all of them would not do and the asker takes no less.
  std::optional<Victims> who_gives(const Ask& ask, Victims from) const;
  bool may_give(const SessionRecord& each, const Ask& ask) const;
  bool yields(const SessionRecord& each, const SessionRecord* session) const;
  static bool may_give(const CacheRecord& each, const Ask&) { return spare(each); }
  Victims who_may_give(const Ask& ask) const;
  uint64_t missing(const Ask& ask, const Victims& from)
      const;  // the missing bytes once the marked ones of `from` have gone; kUnknown: there is no place
  double price(const SessionRecord& session, uint64_t bytes, uint64_t now_ns) const;
  // The sessions' ranks and prices; the caller fills in the bytes. Spare sessions rank with the caches.
  std::vector<Claim> claims_of(std::span<SessionRecord* const> best_first, uint64_t now_ns) const;
  // The bytes that a resident session gives back alone: P, and the part of its lane that only it needs. As of now.
  std::function<uint64_t(const SessionRecord&)> gives_back() const;
  void evict(const Victims& victims, uint64_t now_ns);
  // `yields_to`: the session whose allocation keeps the bytes until room_used(). nullopt for a cache, which takes what it
  // is promised and may be let go earlier.
  bool make_room(Ask ask, std::optional<SessionId> yields_to);
  // Turns page-ins back for an allocation of the session that misses `bytes`. Returns how many bytes come back by that.
  // No other allocation counts on them.
  uint64_t turn_back(const SessionRecord& session, uint64_t bytes, uint64_t now_ns);
  void start_turn_back(SessionRecord& session);
  // The bytes that the victims marked by who_gives() give back: P, caches, and what their lanes need no more.
  uint64_t victim_bytes(const Victims& candidates) const;
  void stop_yielding(SessionId to);  // no session keeps bytes for it any more
  // It has come back, or is in after all: no allocation waits for its page-in's bytes any more.
  void came_back(SessionId id);
  // True if `each` has to go for `waits`, which waits for admission, if the room is needed.
  bool gives_way_to(const SessionRecord& each, const SessionRecord& waits) const;
  bool make_room_at_boundaries(const SessionRecord& session, uint64_t bytes, uint64_t now_ns);
  void stay(SessionRecord& session);  // called when it was to be paged out, and is not
  void leave_held_up(uint64_t now_ns);
  // Makes room so that `session` can go on in another lane.
  void make_room_to_leave(const SessionRecord& session, uint64_t now_ns);
  void join_lanes(uint64_t now_ns);

  // caches.cpp
  CacheRecord* find_cache(uint64_t id) const;
  std::vector<CacheRecord*> droppable() const;
  Claim claim_of(const CacheRecord& cache, uint64_t now_ns) const;
  // The bytes of caches that stay: those that are held, not being dropped, and not `is_gone`.
  template <class IsGone>
  uint64_t cache_bytes_without(IsGone is_gone) const {
    uint64_t bytes = 0;
    for (const auto& cache : caches)
      if (cache->held && !cache->dropping && !is_gone(*cache)) bytes += cache->bytes;
    return bytes;
  }
  // The room that place() would have for the session without spare sessions and caches.
  WaitingList::Room room_without_spares(const SessionRecord& session) const;
  // Drops spare sessions and caches if that makes room for the session. True if some are being dropped.
  bool claim_spares(const SessionRecord& session, uint64_t now_ns);
  void forget_worth(SessionRecord& session);
  // want_cache() and unwant_cache() without the first part. True if the cache has a new place in line, and if nobody
  // wants the cache any more.
  bool add_user(CacheRecord& cache, SessionId session, uint64_t now_ns);
  bool remove_user(CacheRecord& cache);
  void stand_in_line(CacheRecord& cache);
  // Promises the free bytes to waiting caches, and makes room for the first; true if room is being made for it.
  const SessionRecord* wanter(CacheRecord& cache);
  bool hold_waiting(uint64_t now_ns);
  void drop_caches(uint64_t bytes, uint64_t now_ns);  // drops unused caches of so many bytes, or all of them

  // admission.cpp
  // Puts the session into `waiting` or `idle`, in the policy's order. Returns its place.
  WaitingList::Position enqueue(SessionRecord& session);
  void dequeue(SessionRecord& session);
  // Called when its wish to be admitted, its need or its rank has changed.
  void requeue(SessionRecord& session);
  void requeue_all();  // called when the policy has changed
  void set_claiming(SessionRecord& session, bool claiming);
  void block(SessionRecord& session);
  bool place(SessionRecord& session, uint64_t now_ns);  // admits or starts its page-in if it fits now
  void join(SessionRecord& session, LaneId lane);
  void quit(SessionRecord& session);                       // gives its promise back
  void set_overdue(SessionRecord& session, bool overdue);  // of a lane
  // The bytes, in addition to room(), that lanes could give back by merging for the session.
  WaitingList::Room mergeable_room(const SessionRecord& session) const;
  bool may_merge(const LaneRecord& lane, const SessionRecord& session) const;
  LaneId largest_that_gives_way(const SessionRecord& session) const;
  void merge_waiting(uint64_t now_ns);  // starts to close lanes for the first session that this lets in
  void merge(const SessionRecord& session, uint64_t now_ns);
  bool drain(LaneId lane, uint64_t now_ns);  // of a closing lane; true if memory came back
  void shrink_or_close(LaneId lane);         // shrinks or closes the lane after its members or needs changed
  bool boundary(LaneId lane);                // true if a shrink settled
  bool move(SessionRecord& session, LaneId to, uint64_t now_ns);  // true if memory came back
  bool claim(SessionRecord& session,
             uint64_t now_ns);  // decides page-outs for the session; true if some are under way
  void start_page_out(SessionRecord& session, uint64_t now_ns);
  void cancel_evictions();
  bool admit_newcomer(SessionRecord& session, uint64_t now_ns);
  bool is_for_one_that_goes_out(const SessionRecord& waits) const;
  void admit_waiting(uint64_t now_ns);
  void admit_in_line(uint64_t now_ns);
  void freed(uint64_t now_ns);  // called when memory came back: unblocks and admits
  bool may_open_lane(const SessionRecord& session) const;
  bool may_open_another(Share::Kind kind) const;
  Placement placement(const SessionRecord& session) const;
  bool own_lane_comes(const SessionRecord& session, const LaneRecord& lane) const;
  WaitingList::Room room() const;  // what place() has for a session that shares the device
  // The bytes that claim() would have for the session. For sessions behind it claim() has at most these.
  WaitingList::Room claimable_room(const SessionRecord& session) const;
  enum class Lanes : uint8_t { kWhereItRunsNext, kAny };
  template <class IsGone>
  WaitingList::Room room_without(const SessionRecord& session, Lanes which, IsGone is_gone) const;
  WaitingList::Position admitted_from(WaitingList::Position position);
  bool claim_first(WaitingList::Position from, WaitingList::Position end, uint64_t now_ns);
  // True if the session would run next in that lane.
  bool runs_next(const SessionRecord& session, const LaneRecord& lane) const;
  template <class IsGone>
  bool fits_without(const SessionRecord& session, Lanes which, IsGone is_gone) const {
    return room_without(session, which, is_gone)
        .holds(session.persistent_bytes, session.persistent_bytes + session.ephemeral_bytes);
  }
  std::string shortage(const SessionRecord& session) const;

  // stays.cpp
  uint64_t used_of_stay_ns(const SessionRecord& session, uint64_t now_ns) const;
  uint64_t expected_out_ns(const SessionRecord& session) const;
  uint64_t expected_in_ns(const SessionRecord& session) const;
  void moved(SessionRecord& session, bool out, uint64_t now_ns) const;  // notes how long the move took
  Resident stay_of(const SessionRecord& session, uint64_t now_ns) const;
  uint64_t stay_left_ns(const SessionRecord& resident, const SessionRecord& session, uint64_t now_ns) const;
  void begin_stay(SessionRecord& session, uint64_t now_ns);
  void end_stay(SessionRecord& session, uint64_t now_ns);
  void join_line(SessionRecord& session, uint64_t now_ns);
  bool may_alternate(const SessionRecord& resident, const SessionRecord& session) const;
  void alternate(uint64_t now_ns);
  bool alternate_for(SessionRecord& session, uint64_t now_ns);
  bool give_place(uint64_t now_ns);
};

// The needs of a lane that are still to be met.
struct LaneRest {
  size_t members = 0;
  uint64_t persistent_bytes = 0, ephemeral_bytes = 0;
  bool whole = false;  // a session of the lane is to have the whole device
};

// What a lane still needs without the sessions that are on their way out and those that `is_gone` names. `each` is called
// with the sessions that stay.
template <class IsGone, class Each>
LaneRest rest_of(const LaneRecord& lane, IsGone is_gone, Each each) {
  LaneRest rest;
  for (const SessionRecord* member : lane.members) {
    if (member->goes_out() || is_gone(*member)) continue;
    ++rest.members;
    rest.persistent_bytes += member->persistent_bytes;
    rest.ephemeral_bytes = std::max(rest.ephemeral_bytes, member->ephemeral_bytes);
    rest.whole = rest.whole || member->view.share.kind == Share::Kind::kWhole;
    each(*member);
  }
  return rest;
}

// The room for `session` to run next in its lane, if the sessions that `is_gone` names were gone and all shrinks had
// settled.
template <class IsGone>
WaitingList::Room Scheduler::Impl::room_without(const SessionRecord& session, Lanes which,
                                                IsGone is_gone) const {
  uint64_t used = tree.contexts.promised() + cache_bytes_without(is_gone), largest = 0;
  uint32_t units = 0, staying_lanes = 0;
  size_t staying = 0;
  bool choice = false, one_lane = options.shared_lanes || session.view.share.kind == Share::Kind::kWhole;
  for (const LaneRecord& lane : lanes) {
    const bool suits_it = suits(lane, session) && !lane.held_up();
    bool runs_next = suits_it && (which == Lanes::kWhereItRunsNext || !lane.closing);
    const LaneRest rest = rest_of(lane, is_gone, [&](const SessionRecord& member) {
      runs_next = runs_next && (which == Lanes::kAny || goes_before(*policy, session.view, member.view));
    });
    if (rest.members == 0) continue;
    staying += rest.members;
    used += rest.persistent_bytes + rest.ephemeral_bytes;
    units += lane.compute_units;
    one_lane = one_lane || rest.whole;
    if (!options.shared_lanes || suits_it) ++staying_lanes;
    choice = choice || runs_next;
    if (runs_next) largest = std::max(largest, rest.ephemeral_bytes);
  }
  if (used > capacity.target_bytes || may_join(session, staying, false) != MayJoin::kYes) return {};
  const uint32_t limit = one_lane ? 1 : options.max_lanes;
  if ((limit == 0 || staying_lanes < limit) && session.compute_units <= options.compute_units - units)
    choice = true;
  const uint64_t free = capacity.target_bytes - used;
  return {choice, free, free + largest};
}

template <class IsGone>
uint64_t Scheduler::Impl::promised_without(IsGone is_gone) const {
  uint64_t bytes = tree.contexts.promised() + cache_bytes_without(is_gone);
  for (const LaneRecord& lane : lanes) {
    if (!lane.open) continue;
    const LaneRest rest = rest_of(lane, is_gone, [](const SessionRecord&) {});
    bytes += rest.persistent_bytes + (lane.closing ? 0 : rest.ephemeral_bytes);
  }
  return bytes;
}

}  // namespace gpushare::sched
