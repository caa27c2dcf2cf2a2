// scheduler.hpp: one device's admission and turn-taking as a state machine: sessions, lanes, promises, the lane
// finder, the policy, and the choice of sessions that are paged out to host memory. It only decides; a driver
// (executor or simulator) carries out the actions and reports back.
//
// Safety, at every instant (Salus, eq 2.1): sum over resident sessions of P + sum over lanes of their size <=
// capacity (the effective one, where it has been lowered), where a lane's size is at least the largest E of its
// sessions. A decision that would break it is not taken.
//
// One decision says who gives bytes up, whoever asks (claims.hpp): first what stays for speed alone (caches, spare
// sessions), then by class, the policy's order and price. Paging: residents may be paged out for a waiting session that
// the policy ranks above them and above everything that would stay in its lane. Residents of lower class go first, then
// those of lower rank, then those of the least price (claims.hpp), and never more than needed. A resident first
// finishes its iterations in flight. Until its bytes are gone no session behind the waiting one is admitted.
//
// Threads: the driver serialises calls. Cost: pick is O(candidates of the lane), other events O(1) unless
// they free memory or a session arrives: then O(waiting * lanes), and O(residents^2) where paging is
// considered.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "sched/authority.hpp"
#include "sched/lane_finder.hpp"
#include "sched/measured_interference.hpp"
#include "sched/policy.hpp"
#include "sched/stays.hpp"
#include "sched/turn_rules.hpp"
#include "sched/types.hpp"

namespace gpushare::sched {

struct SchedulerOptions {
  uint64_t capacity_bytes = 0;             // at first, and at most
  uint32_t compute_units = 0;              // all units that lanes can have for themselves; 0 = none
  uint32_t granularity_compute_units = 1;  // the units of such a lane are rounded up to it
  uint64_t granularity_bytes = 1;          // lane sizes are rounded up to it, and P from it on
  uint64_t small_granularity_bytes = 0;    // P below it is rounded up to this, which divides it; 0 = to it
  uint32_t max_lanes = 0;                  // open at once; 0 = no limit
  // Link time to move a byte out and back in, until set_link(): the price of paging sessions out. About PCIe 3.
  double page_out_ns_per_byte = 0.1, page_in_ns_per_byte = 0.1;
  uint64_t least_stay_ns = kLeastStayNs;  // the least stay of sessions that alternate
  // A session that pauses for less than this time keeps its lag: the service by which it was behind the others when the
  // pause began. A session that waits for its own work pauses so between two iterations. 0: a pause loses the lag at
  // once.
  uint64_t keeps_lag_ns = 0;
  // True: an iteration that is picked while another iteration of its lane is in flight goes to the device at once, and
  // cannot be taken back. False: it begins when the other has ended.
  bool enqueues = true;
  bool paging = true;  // the driver can page sessions out and keep their addresses
  std::optional<LaneFinderKind> lane_finder =
      std::nullopt;  // nullopt: the finder that the policy names, else kSalus
  // How sessions slow each other is measured where the policy decides by it (Answers::by_interference).
  bool measures = false;
  // True: the driver reports by lane_applied() when a lane has its memory, and no session changes to the lane
  // before that. False: lanes have the decided memory at once.
  bool confirms_lanes = false;
  // Sessions of several processes share lanes. Each trust group (SessionSpec::trust_group) has one lane, and a second
  // one while the first is held up (set_overdue()). One lane at a time has iterations, chosen among the sessions of all
  // lanes. The bytes that lane_applied() reports for a lane count as promised until it reports less.
  bool shared_lanes = false;
};

class Scheduler final : public Authority {
 public:
  Scheduler(SchedulerOptions options, std::unique_ptr<Policy> policy);
  ~Scheduler() override;

  // ---- Authority: what happened ---------------------------------------------------------------------------
  base::Status arrive(const SessionSpec& spec, uint64_t now_ns) override;
  void ready(SessionId session, uint64_t now_ns) override;
  void wake(SessionId session, uint64_t now_ns) override;
  void allow_paging(SessionId session, uint64_t now_ns) override;
  void not_ready(SessionId session, uint64_t now_ns) override;
  void dispatched(SessionId session, LaneId lane, uint64_t now_ns, uint64_t iterations = 1) override;
  void finished(SessionId session, uint64_t device_ns, uint64_t now_ns, uint64_t iterations = 1) override;
  void ran_alone(SessionId session, LaneId lane, uint64_t device_ns, uint64_t now_ns,
                 uint64_t iterations) override;
  // `iterations` of a run that was dispatched as one are done; `left` more go on in the lane without a boundary.
  void progressed(SessionId session, uint64_t device_ns, uint64_t now_ns, uint64_t iterations, uint64_t left);
  void leave(SessionId session, uint64_t now_ns) override;
  base::Status set_need(SessionId session, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                        uint64_t now_ns) override;
  base::Status set_capacity(uint64_t bytes, uint64_t now_ns) override;
  void set_context_bytes(uint64_t bytes, uint64_t now_ns) override;
  void set_quota(SessionId session, uint64_t bytes) override;
  base::Status set_coordination(const std::optional<CoordinatorOptions>& options, uint64_t now_ns) override;
  std::optional<CoordinatorOptions> coordination() const;
  void set_priority(SessionId session, int32_t priority, uint64_t now_ns) override;
  void set_class(SessionId session, SessionClass cls, uint64_t now_ns) override;
  void set_weight(SessionId session, double weight) override;  // finite, > 0; else ignored
  bool set_spare(SessionId session, std::optional<double> worth_ns, uint64_t now_ns) override;
  void set_link(double ns_per_byte) override;
  void set_remaining(SessionId session, uint64_t remaining_ns, uint64_t now_ns) override;
  void set_worth(SessionId session, double worth, uint64_t until_ns) override;
  void set_policy(std::unique_ptr<Policy> policy, uint64_t now_ns) override;
  void unplaced(SessionId session, uint64_t now_ns) override;
  void page_part(SessionId session, uint64_t bytes, uint64_t now_ns) override;
  void page_done(SessionId session, uint64_t now_ns) override;
  bool make_room(SessionId session, const RoomAsk& ask, uint64_t now_ns) override;
  void stop_making_room(SessionId session) override;
  bool making_room(SessionId session) const override;
  void room_used(SessionId session, uint64_t now_ns) override;
  void page_out_failed(SessionId session, uint64_t now_ns) override;
  void lane_applied(LaneId lane, uint64_t bytes, uint64_t now_ns) override;
  // The session's turn was taken back, but its iteration may not have ended. Until the iteration has ended, or the
  // session has left its lane, the session owes its bytes and is not paged out. If other processes map its lane, too,
  // the lane is held up: none of its sessions is picked. look() then pages out sessions that want a turn in that lane,
  // beginning with the least E that has room in another lane; they come in again in that other lane at once.
  void set_overdue(SessionId session, bool overdue, uint64_t now_ns);
  // ---- bytes that can be had again from host memory: images and first layers of them (caches.cpp) ----
  // A cache is a claim beside the sessions, and its id is of the same numbers. A cache that is held stays while a
  // session wants it. A cache that no session wants stays for speed alone, and is dropped before any session is paged
  // out. Such caches go by the class of the session that wanted each last, then by price: the requests for the cache, a
  // count that halves every minute, times `restore_ns`. `first_part`: the cache with the first layers of the same
  // image, which has no first part itself; 0 = none. The first part is wanted, and stays, whenever this cache is and
  // does. Errors: EXCEEDS_CAPACITY, INVALID_ARGUMENT.
  base::Status add_cache(uint64_t cache, uint64_t bytes, double restore_ns, uint64_t first_part = 0);
  // Forgets the cache. The driver has given its bytes back.
  void remove_cache(uint64_t cache, uint64_t now_ns);
  // `session` wants the cache, and the cache's first part, until unwant_cache(). Unless they are held already, their
  // kFillCache actions follow once there is room. Sessions that make_room() would page out for `session` are paged out
  // for the cache.
  void want_cache(uint64_t cache, SessionId session, uint64_t now_ns);
  void unwant_cache(uint64_t cache, uint64_t now_ns);
  // A kDropCache action was carried out, or the bytes for kFillCache could not be had: those of a cache before those of
  // its first part.
  void cache_dropped(uint64_t cache, uint64_t now_ns);
  bool cache_held(uint64_t cache) const;   // promised, and not to be dropped
  bool cache_going(uint64_t cache) const;  // its kDropCache is under way
  uint64_t cached_bytes() const;           // the part of promised_bytes that caches hold
  // Passes the interference model to the present policy and to every later one; null: nothing is known.
  void set_interference(std::shared_ptr<const Interference> interference, uint64_t now_ns);
  // Measures from now on how sessions slow each other, under any policy. The policy is told, unless set_interference()
  // has told it something else.
  std::shared_ptr<MeasuredInterference> measure() override;
  std::shared_ptr<MeasuredInterference> measured() const override;
  // ---- Authority: what next -------------------------------------------------------------------------------
  std::optional<SessionId> pick(LaneId lane, uint64_t now_ns) override;
  std::optional<std::span<const LaneId>> lanes_to_ask() const override;
  uint64_t look_again_ns() const override;
  void look(uint64_t now_ns) override;
  bool may_lend(SessionId session, LaneId lane) const override;
  std::vector<Action> take_actions() override;
  // True for a session that shares the device by weight if pick() would choose it again, were it ready. Its iterations
  // then keep the lane busy, and it is behind the ready sessions.
  bool would_go_on(SessionId session, LaneId lane, uint64_t now_ns);
  // As would_go_on(), under every policy, and also for a session that has nothing in flight.
  bool would_pick(SessionId session, LaneId lane, uint64_t now_ns);
  // True if the session may begin no further iteration now: one of another lane ranks above it, or is behind it by weight.
  // Lanes that run one at a time (SchedulerOptions::shared_lanes) do not wait for each other.
  bool waits_for_lanes(SessionId session, uint64_t now_ns);
  // False if waits_for_lanes() is never true for the session: the policy has no ranks, and it has no weight.
  bool compares_lanes(SessionId session) const;
  // True if a session ranks higher that waits for its turn in this session's lane, or has work in another one.
  bool outranked(SessionId session, uint64_t now_ns);
  // The next time at which pick() could answer differently, if the session picked last keeps the lane busy and nothing
  // else happens; kUnknown if never. Event loops use it to skip equal decisions.
  uint64_t decision_holds_until(LaneId lane, uint64_t now_ns) const;

  // ---- what is: unknown sessions are kQueued, on kNoLane, with an empty view -----------------------------------
  SessionState state(SessionId session) const override;
  size_t paged_out() const override;
  LaneId lane_of(SessionId session) const override;  // also while its page-in is under way
  SessionView view(SessionId session) const override;
  SessionClass class_for_bytes(SessionId session) const;  // the class as which its bytes count (kTerms)
  bool knows(SessionId session) const;
  bool owes(SessionId session) const;  // set_overdue()
  bool is_spare(SessionId session) const;
  std::string policy_name() const override;
  std::string coordinated_wait(SessionId session) const override;
  std::string policy_wait(SessionId session) const override;
  std::vector<SessionId> dropping() const override;
  std::vector<Claim> claims_on(std::span<const Part> parts, uint64_t now_ns) const override;
  double link_ns_per_byte() const override;
  uint64_t promised_bytes() const override;
  Limit capacity() const override;
  // Bytes that have left during the page-out under way, by page_part().
  uint64_t gone_bytes(SessionId session) const;
  uint64_t context_bytes() const;     // of promised_bytes
  uint64_t persistent_bytes() const;  // likewise, the sum of P
  // The sum of P + E over the sessions that arrived with the group, whether they are promised or not.
  uint64_t group_needs(uint64_t group) const;
  uint32_t lanes_open() const;
  uint32_t lane_limit() const;  // lane ids are below this
  bool lane_is_open(LaneId lane) const;
  uint64_t lane_bytes(LaneId lane) const override;
  uint64_t lane_size(LaneId lane) const;  // the part of lane_bytes() that iterations may use from now on
  uint32_t lane_compute_units(LaneId lane) const override;  // for itself; 0 = shares the device
  uint64_t trust_group_of(LaneId lane) const;
  uint32_t promised_compute_units() const override;  // sum over lanes
  size_t residents() const;  // sessions that hold a promise, with those that are being paged out or in
  size_t waiting() const;    // queued or paged out, holding none
  // Checks the invariants (safety, each resident in one lane, lane size >= max E); empty when they hold. For
  // tests.
  std::string check() const override;
  // The rows of the table of states (session_states.hpp) that have been used, as bits. For tests.
  uint64_t states_taken() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gpushare::sched
