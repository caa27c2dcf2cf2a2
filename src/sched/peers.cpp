// Figures for turns that are kept up to date instead of looked up, see peers.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "sched/peers.hpp"

#include <algorithm>
#include <utility>

#include "base/saturate.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
// The virtual time of the session without what it has in flight.
double begun_ns(const SessionRecord& session) {
  return session.view.virtual_ns - virtual_cost(session.expected_in_flight_ns, session.view.share.weight);
}

bool wants_or_returns(const SessionRecord& session) {
  return session.wanted() || session.soon_until_ns != 0;
}

namespace {

void take_in(FirstLanes& lanes, const FirstLanes::Of& lane) {
  if (lane.virtual_ns < lanes.first.virtual_ns)
    lanes.second = std::exchange(lanes.first, lane);
  else if (lane.virtual_ns < lanes.second.virtual_ns)
    lanes.second = lane;
}

}  // namespace

void Scheduler::Impl::touch(SessionRecord& session) {
  ++turn_version;
  if (session.lane != kNoLane) lanes[session.lane].front.stale = true;
  if (session.peers != nullptr && !std::exchange(session.touched, true)) touched.push_back(&session);
}

void Scheduler::Impl::settle() {
  for (SessionRecord* session : touched) {
    session->touched = false;
    take_place(*session, session->peers);
  }
  touched.clear();
}

// Takes the session out of its old place and puts it into its present one.
void Scheduler::Impl::take_place(SessionRecord& session, Peers* among) {
  Peers* const left = session.peers;
  if (session.ByVirtualHook::is_linked()) left->recent.erase(left->recent.iterator_to(session));
  if (session.ByBegunHook::is_linked()) {
    auto& set = session.stands_wanting ? left->wanting : left->resting;
    set.erase(set.iterator_to(session));
  }
  if (std::exchange(session.counted, false)) --left->in_the_way;
  session.peers = among;
  if (among == nullptr || session.lane == kNoLane) return;
  session.counted = !session.worth_ns && lanes[session.lane].compute_units == 0;
  if (session.counted) ++among->in_the_way;
  if (!weighted(session)) return;
  if (options.keeps_lag_ns > 0) {
    session.virtual_key = session.view.virtual_ns;
    among->recent.insert(session);
  }
  if (!asks.before) return;
  session.begun_key = begun_ns(session);
  session.stands_wanting = wants_or_returns(session);
  (session.stands_wanting ? among->wanting : among->resting).insert(session);
}

void Scheduler::Impl::set_rank(SessionRecord& session) {
  const bool ranked = !asks.before || asks.ranks;
  session.view.rank = asks.ranks ? policy->rank(session.view) : 0;
  if (session.peers != nullptr && ranked && session.peers->rank == session.view.rank) return;
  Peers* among = nullptr;
  if (ranked) {
    among = &peers[session.view.rank];
    among->rank = session.view.rank;
  }
  if (among != session.peers) join_peers(session, among);
  touch(session);
}

void Scheduler::Impl::join_peers(SessionRecord& session, Peers* among) {
  Peers* const left = session.peers;
  take_place(session, among);
  if (among != nullptr) ++among->sessions;
  if (left != nullptr && --left->sessions == 0) peers.erase(left->rank);
  if (among == nullptr && session.touched) settle();  // the record may be gone after this
}

void Scheduler::Impl::set_ephemeral(SessionRecord& session, uint64_t bytes) {
  if (session.lane != kNoLane) {
    LaneRecord& lane = lanes[session.lane];
    ++lane.needs[bytes];
    lane.forget_need(session.ephemeral_bytes);
  }
  session.ephemeral_bytes = bytes;
  session.claim.need(base::add_saturated(session.persistent_bytes, bytes));
}

void Scheduler::Impl::join_lane(SessionRecord& session, LaneId id) {
  LaneRecord& lane = lanes[id];
  ++lane.needs[session.ephemeral_bytes];
  lane.members.push_back(session);
  make_places(lane);
  session.lane = id;
  touch(session);
}

void Scheduler::Impl::quit_lane(SessionRecord& session) {
  LaneRecord& lane = lanes[session.lane];
  touch(session);
  lane.members.erase(session);
  lane.forget_need(session.ephemeral_bytes);
  session.lane = kNoLane;
}

// When what is in flight in the lane has taken so much longer than expected that others need not wait for it:
// its host may be holding it open.
uint64_t Scheduler::Impl::overdue_ns(const LaneRecord& lane) {
  double expected = 0;
  for (const SessionRecord* member : lane.flying)
    expected = std::max(expected, member->expected_in_flight_ns);
  return base::add_saturated(lane.progress_ns, base::to_uint64(2 * expected + kPatienceNs));
}

Front Scheduler::Impl::front_of(const LaneRecord& lane) const {
  Front front;
  front.stale = false;
  const auto take = [&](const SessionView& view) {
    if (front.virtual_ns == INFINITY) front.rank = view.rank;
    front.mixed = front.mixed || front.rank != view.rank;
    front.virtual_ns = std::min(front.virtual_ns, view.virtual_ns);
  };
  for (const SessionView& view : lane.ready) {
    front.best_rank = std::min(front.best_rank, view.rank);
    if (view.share.kind != Share::Kind::kWeighted) continue;
    take(view);
    front.any_ready = true;
    front.ready_since_ns = std::max(front.ready_since_ns, view.ready_since_ns);
  }
  for (const SessionRecord* member : lane.flying) {
    front.best_rank = std::min(front.best_rank, member->view.rank);
    // An iteration of unknown length says nothing yet.
    if (member->expected_in_flight_ns > 0 && weighted(*member)) take(member->view);
  }
  front.overdue_ns = overdue_ns(lane);
  return front;
}

const Front& Scheduler::Impl::front(LaneRecord& lane) {
  if (lane.front.stale) lane.front = front_of(lane);
  return lane.front;
}

FirstLanes::Of Scheduler::Impl::behind_in(LaneId id, uint64_t rank, uint64_t now_ns) {
  LaneRecord& lane = lanes[id];
  const Front& front = this->front(lane);
  double least = INFINITY;
  uint64_t ends_ns = 0;
  if (!front.mixed) {
    if (front.rank == rank) least = front.virtual_ns;
    if (front.any_ready) ends_ns = patience_ends_ns(front.ready_since_ns);
  } else {
    for (const SessionView& view : lane.ready) {
      if (view.share.kind != Share::Kind::kWeighted || view.rank != rank) continue;
      least = std::min(least, view.virtual_ns);
      ends_ns = std::max(ends_ns, patience_ends_ns(view.ready_since_ns));
    }
    for (const SessionRecord* member : lane.flying)
      if (member->expected_in_flight_ns > 0 && weighted(*member) && member->view.rank == rank)
        least = std::min(least, member->view.virtual_ns);
  }
  if (lane.busy()) ends_ns = front.overdue_ns;
  FirstLanes::Of found{id, INFINITY, kUnknown};
  if (least < INFINITY && now_ns < ends_ns) found = {id, least, ends_ns};
  for (const SessionRecord* back : lane.paused)
    if (back->view.virtual_ns < found.virtual_ns && weighted(*back) && back->view.rank == rank &&
        expected(*back, now_ns))
      found = {id, back->view.virtual_ns, back->expected_until_ns};
  return found;
}

const FirstLanes& Scheduler::Impl::lanes_behind(const Peers& among, uint64_t now_ns) {
  FirstLanes& lanes_of = among.behind;
  if (lanes_of.holds(turn_version, now_ns)) return lanes_of;
  lanes_of = {turn_version, now_ns, {}, {}};
  for (LaneId id = 0; id < lanes.size(); ++id) {
    LaneRecord& lane = lanes[id];
    if (!lane.open) continue;
    // With many lanes most are neither the first nor the second: what they show says so.
    const Front& front = this->front(lane);
    if (!front.mixed && lane.paused.empty() && front.virtual_ns >= lanes_of.second.virtual_ns) continue;
    take_in(lanes_of, behind_in(id, among.rank, now_ns));
  }
  return lanes_of;
}

FirstLanes::Of Scheduler::Impl::above_in(LaneId id, uint64_t rank, uint64_t now_ns) {
  LaneRecord& lane = lanes[id];
  const Front& front = this->front(lane);
  uint64_t ends_ns = 0;
  if (front.best_rank < rank) {
    for (const SessionRecord* member : lane.flying)
      if (member->view.rank < rank) ends_ns = front.overdue_ns;
    for (const SessionView& view : lane.ready)
      if (view.rank < rank)
        ends_ns = std::max(ends_ns, lane.busy() ? front.overdue_ns : patience_ends_ns(view.ready_since_ns));
  }
  for (const SessionRecord* back : lane.paused)
    if (back->view.rank < rank && expected(*back, now_ns))
      ends_ns = std::max(ends_ns, back->expected_until_ns);
  return now_ns < ends_ns ? FirstLanes::Of{id, 0, ends_ns} : FirstLanes::Of{};
}

const FirstLanes& Scheduler::Impl::lanes_above(const Peers& below, uint64_t now_ns) {
  FirstLanes& lanes_of = below.above;
  if (lanes_of.holds(turn_version, now_ns)) return lanes_of;
  lanes_of = {turn_version, now_ns, {}, {}};
  for (LaneId id = 0; id < lanes.size() && lanes_of.second.lane == kNoLane; ++id) {
    if (!lanes[id].open || lanes[id].compute_units != 0) continue;
    const FirstLanes::Of found = above_in(id, below.rank, now_ns);
    if (found.lane != kNoLane) (lanes_of.first.lane == kNoLane ? lanes_of.first : lanes_of.second) = found;
  }
  return lanes_of;
}

const std::vector<LaneId>& Scheduler::Impl::crowded_lanes() {
  if (std::exchange(crowded_version, turn_version) == turn_version) return crowded;
  crowded.clear();
  for (const LaneId id : ready_lanes)
    if (lanes[id].busy()) crowded.push_back(id);
  return crowded;
}

}  // namespace gpushare::sched
