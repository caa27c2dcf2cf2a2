// Admission: which sessions get in, and to which lane. eviction.cpp decides which sessions are paged out for
// them.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "base/saturate.hpp"
#include "base/units.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
namespace {

// The most waiting sessions that are tried although the policy keeps them out.
constexpr size_t kMostRefused = 64;

// The work that is left in the lane. A session whose remaining time is unknown counts as the longest of the others.
uint64_t backlog_ns(const LaneRecord& lane) {
  uint64_t sum = 0, longest = 1, unknown = 0;
  for (const SessionRecord* member : lane.members) {
    const uint64_t left = member->view.remaining_ns;
    if (left == kUnknown) {
      ++unknown;
    } else {
      sum += left;
      longest = std::max(longest, left);
    }
  }
  return sum + unknown * longest;
}

}  // namespace

WaitingList::Position Scheduler::Impl::enqueue(SessionRecord& session) {
  session.queued_idle = !session.wants_in();
  return (session.queued_idle ? idle : waiting).insert(session, *policy);
}

void Scheduler::Impl::dequeue(SessionRecord& session) {
  if (session.chunk != nullptr) (session.queued_idle ? idle : waiting).erase(session);
}

void Scheduler::Impl::requeue(SessionRecord& session) {
  if (session.chunk == nullptr) return;
  dequeue(session);
  enqueue(session);
}

void Scheduler::Impl::requeue_all() {
  std::vector<SessionRecord*> all = waiting.sessions();
  const std::vector<SessionRecord*> others = idle.sessions();
  all.insert(all.end(), others.begin(), others.end());
  for (SessionRecord* session : all) dequeue(*session);
  for (SessionRecord* session : all) enqueue(*session);
}

void Scheduler::Impl::set_claiming(SessionRecord& session, bool claiming) {
  if (std::exchange(session.claiming, claiming) != claiming && session.chunk != nullptr)
    (session.queued_idle ? idle : waiting).update(session);
}

void Scheduler::Impl::block(SessionRecord& session) {
  session.blocked = true;
  blocked.push_back(session.view.id);
}

bool Scheduler::Impl::may_open_lane(const SessionRecord& session) const {
  if (session.compute_units > options.compute_units - compute_units) return false;
  if (options.shared_lanes)
    return std::none_of(lanes.begin(), lanes.end(), [&](const LaneRecord& lane) {
      return lane.open && suits(lane, session) && !lane.held_up();
    });
  return may_open_another(session.view.share.kind);
}

bool Scheduler::Impl::may_open_another(Share::Kind kind) const {
  if (lanes_open == 0) return true;
  if (kind == Share::Kind::kWhole || whole > 0) return false;
  return options.max_lanes == 0 || lanes_open < options.max_lanes;
}

Placement Scheduler::Impl::placement(const SessionRecord& session) const {
  // Sessions have to go already, so no session joins, not even one without bytes.
  if (promised() > capacity.target_bytes || session.persistent_bytes > free_bytes()) return {};
  const LaneFinderKind finder =
      options.lane_finder.value_or(asks.lane_finder.value_or(LaneFinderKind::kSalus));
  std::vector<LaneView> views;
  views.reserve(lanes_open);
  for (LaneId id = 0; id < lanes.size(); ++id) {
    const LaneRecord& lane = lanes[id];
    if (!lane.open) continue;
    // Admit this session to the lane whose residents were paged out for it; sending it to another lane would
    // put it behind sessions of higher rank.
    if (session.claiming && !runs_next(session, lane)) continue;
    if (!suits(lane, session) || lane.closing || lane.held_up() || lane.is_left()) continue;
    views.push_back({id, lane.held(), finder == LaneFinderKind::kBalanced ? backlog_ns(lane) : 0,
                     static_cast<uint32_t>(lane.members.size())});
  }
  Placement found = find_lane(finder, session.persistent_bytes, session.ephemeral_bytes, free_bytes(), views,
                              may_open_lane(session));
  if ((found.kind == Placement::Kind::kJoin || found.kind == Placement::Kind::kEnlarge) &&
      own_lane_comes(session, lanes[found.lane]))
    return {};
  if (session.spec.profiling && found.kind != Placement::Kind::kNone) {
    // All that is free, on top of what the lane has, in sizes that lanes have.
    const auto in_granules = [granule = std::max<uint64_t>(options.granularity_bytes, 1)](uint64_t bytes) {
      return bytes / granule * granule;
    };
    const uint64_t room = in_granules(free_bytes() - session.persistent_bytes);
    found.bytes = found.kind == Placement::Kind::kOpen ? room : lanes[found.lane].held() + room;
    const uint64_t quota = quota_of(session);
    if (found.kind == Placement::Kind::kOpen)
      found.bytes = std::clamp(in_granules(quota - std::min(quota, session.persistent_bytes)),
                               session.ephemeral_bytes, std::max(found.bytes, session.ephemeral_bytes));
  }
  return found;
}

// A guaranteed session does not take turns with an opportunistic one while others shrink and leave it room for a lane of its own.
bool Scheduler::Impl::own_lane_comes(const SessionRecord& session, const LaneRecord& lane) const {
  if (above_limit_bytes == 0 || session.bytes_cls != SessionClass::kGuaranteed || !may_open_lane(session))
    return false;
  if (std::none_of(lane.members.begin(), lane.members.end(), [](const SessionRecord* member) {
        return member->bytes_cls == SessionClass::kOpportunistic;
      }))
    return false;
  return base::add_saturated(free_bytes(), above_limit_bytes) >=
         base::add_saturated(session.persistent_bytes, session.ephemeral_bytes);
}

bool Scheduler::Impl::place(SessionRecord& session, uint64_t now_ns) {
  // Whether the session passes others is checked where it is chosen.
  if (may_join(session, residents, false) != MayJoin::kYes) return false;
  const Placement found = placement(session);
  if (found.kind == Placement::Kind::kNone) return false;
  LaneId id = found.lane;
  if (found.kind == Placement::Kind::kOpen) {
    id = lane_ids.take();
    if (id == lanes.size()) lanes.emplace_back();
    crowded.reserve(lanes.size());
    LaneRecord& lane = lanes[id];
    lane = LaneRecord{};
    touch(lane);
    lane.open = true;
    lane.bytes = found.bytes;
    lane.claim = ClaimNode(tree.lanes);
    lane.claim.promise(found.bytes);
    lane.compute_units = session.compute_units;
    lane.trust_group = session.spec.trust_group;
    compute_units += lane.compute_units;
    ++lanes_open;
    actions.push_back({ActionKind::kOpenLane, id, kNoSession, lane.bytes, lane.compute_units});
  }
  if (session.spec.profiling) set_ephemeral(session, found.bytes);
  LaneRecord& lane = lanes[id];
  if (session.ephemeral_bytes > lane.bytes) {
    lane.bytes = session.ephemeral_bytes;
    if (lane.bytes > lane.held()) lane.claim.promise(lane.bytes);
    actions.push_back({ActionKind::kResizeLane, id, kNoSession, lane.bytes});
  }
  join(session, id);
  set_claiming(session, false);
  change(session, BytesEvent::kPlaced);
  if (session.bytes == Bytes::kComing) {
    session.move_since_ns = now_ns;
    actions.push_back({ActionKind::kPageIn, id, session.view.id, session.persistent_bytes});
    return true;
  }
  begin_stay(session, now_ns);
  actions.push_back({ActionKind::kAdmit, id, session.view.id, session.persistent_bytes});
  changed(session, now_ns);
  set_ready_slot(session, session.ready);
  return true;
}

void Scheduler::Impl::join(SessionRecord& session, LaneId id) {
  join_lane(session, id);
  session.wake = session.turned_back = false;
  promise(session);
  ++residents;
  if (session.view.share.kind == Share::Kind::kWhole) ++whole;
  start_with_others(session);
}

void Scheduler::Impl::quit(SessionRecord& session) {
  const LaneId id = session.lane;
  set_ready_slot(session, false);
  stop_expecting(session);
  session.paused_since_ns = kUnknown;
  set_overdue(session, false);
  quit_lane(session);
  session.gone_bytes = 0;
  promise(session);
  gave_back();
  --residents;
  if (session.view.share.kind == Share::Kind::kWhole) --whole;
  ++changes;
  if (session.spec.profiling)
    set_ephemeral(session, rounded(session.spec.ephemeral_bytes));  // not the lane it had
  shrink_or_close(id);
}

bool Scheduler::Impl::move(SessionRecord& session, LaneId to, uint64_t now_ns) {
  const LaneId from = session.lane;
  set_ready_slot(session, false);
  stop_expecting(session);
  quit_lane(session);
  join_lane(session, to);
  set_ready_slot(session, session.ready);
  actions.push_back({ActionKind::kMove, to, session.view.id, session.persistent_bytes});
  changed(session, now_ns);
  const uint64_t before = promised();
  shrink_or_close(from);
  return promised() < before;
}

bool Scheduler::Impl::runs_next(const SessionRecord& session, const LaneRecord& lane) const {
  return std::all_of(lane.members.begin(), lane.members.end(), [&](const SessionRecord* member) {
    return goes_before(*policy, session.view, member->view);
  });
}

void Scheduler::Impl::shrink_or_close(LaneId id) {
  LaneRecord& lane = lanes[id];
  if (lane.members.empty()) {
    hold_back(lane, kUnknown);
    lane.claim.promise(0);
    gave_back();
    compute_units -= lane.compute_units;
    lane.open = false;
    lane.bytes = 0;
    lane.compute_units = 0;
    lane.closing = false;
    --lanes_open;
    lane_ids.give_back(id);
    touch(lane);
    actions.push_back({ActionKind::kCloseLane, id, kNoSession, 0});
    return;
  }
  const uint64_t need = lane.need();
  if (need == lane.bytes) return;
  lane.bytes = need;
  lane.settles_at = lane.dispatched;
  actions.push_back({ActionKind::kResizeLane, id, kNoSession, need});
  boundary(id);
}

bool Scheduler::Impl::boundary(LaneId id) {
  LaneRecord& lane = lanes[id];
  const uint64_t least = options.shared_lanes ? std::max(lane.bytes, lane.applied) : lane.bytes;
  if (!lane.open || lane.held() <= least || lane.completed < lane.settles_at) return false;
  lane.claim.promise(least);
  gave_back();
  return true;
}

WaitingList::Room Scheduler::Impl::room() const {
  if (promised() > capacity.target_bytes) return {};
  bool choice = options.shared_lanes || may_open_another(Share::Kind::kInLine);
  uint64_t largest = 0;
  for (const LaneRecord& lane : lanes) {
    if (!lane.open || lane.closing || lane.compute_units != 0 || lane.held_up()) continue;
    choice = true;
    largest = std::max(largest, lane.held());
  }
  return {choice, free_bytes(), free_bytes() + largest};
}

std::string Scheduler::policy_wait(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->holds_promise()) return {};
  const std::string name(impl_->policy->name());
  if (impl_->may_join(*session, impl_->residents, false) != MayJoin::kYes)
    return base::format("policy '%s' lets it in only when other sessions have left the device", name.c_str());
  if (!impl_->waiting.empty() && &impl_->waiting.at(impl_->waiting.begin()) != session &&
      impl_->may_join(*session, impl_->residents, true) != MayJoin::kYes)
    return base::format("policy '%s' admits sessions in their order, and others are before this one",
                        name.c_str());
  return {};
}

bool Scheduler::Impl::admit_newcomer(SessionRecord& session, uint64_t now_ns) {
  const WaitingList::Position at = enqueue(session);
  if (session.stopped) return false;
  if (place_for != kNoSession || waiting.barred(at, kMostOvertakes)) return false;
  const bool passes = at != waiting.begin();
  const MayJoin may = may_join(session, residents, passes);
  if (may == MayJoin::kNobody && passes) return false;
  if (is_for_one_that_goes_out(session)) return false;
  if (may != MayJoin::kYes || !place(session, now_ns)) {
    if (!claim(session, now_ns)) merge_waiting(now_ns);
    return session.holds_promise();
  }
  admitted_from(at);
  return true;
}

// The session at `position` was placed; the position of what follows.
WaitingList::Position Scheduler::Impl::admitted_from(WaitingList::Position position) {
  SessionRecord& session = waiting.at(position);
  waiting.overtake(position);
  const WaitingList::Position next = waiting.erase(position);
  session.overtaken = 0;
  return next;
}

// The first of [from, end) for which page-outs are decided or under way; false if there is none.
bool Scheduler::Impl::claim_first(WaitingList::Position from, WaitingList::Position end, uint64_t now_ns) {
  if ((!options.paging && !any_spare()) || from >= end) return false;
  if (evicting == 0 && !asks.gives_way && !waiting.any_claims() && !any_spare()) return false;
  // Sessions behind this one may page out no more than it may, and may enter no more lanes. A need of its size that finds no
  // room here therefore finds none further back.
  while (from < end) {
    SessionRecord& session = waiting.at(from);
    if (from != waiting.begin() && may_join(session, residents, true) == MayJoin::kNobody) return false;
    if (!session.blocked && claim(session, now_ns)) return true;
    if (session.compute_units > 0 || several_groups) {
      from = waiting.next(from);
    } else {
      WaitingList::Room room = claimable_room(session);
      if (any_spare()) {
        const WaitingList::Room without_spares = room_without_spares(session);
        room = {room.any || without_spares.any,
                std::max(room.persistent_bytes, without_spares.persistent_bytes),
                std::max(room.total_bytes, without_spares.total_bytes)};
      }
      from = waiting.first_fit(waiting.next(from), room);
    }
  }
  return false;
}

// A session whose page-out has moved a part, and that wants to be in, cannot turn back. A session that it outranks
// waits until it is out, and then it comes in first. Otherwise it would have the other session paged out again.
bool Scheduler::Impl::is_for_one_that_goes_out(const SessionRecord& waits) const {
  if (evicting == 0) return false;
  for (const LaneRecord& lane : lanes)
    for (const SessionRecord* member : lane.members)
      if (member->gone_bytes > 0 && !member->yields_to && member->wants_in() &&
          gives_way(waits, *member) == GivesWay::kAtOnce)
        return true;
  return false;
}

void Scheduler::Impl::admit_waiting(uint64_t now_ns) {
  lower(now_ns);
  stays_end_ns = kUnknown;
  if (!cache_line.empty() && hold_waiting(now_ns))
    return;  // bytes that come back meanwhile are for the cache
  if (place_for != kNoSession && give_place(now_ns)) return;
  admit_in_line(now_ns);
  merge_waiting(now_ns);
  alternate(now_ns);
  if (!waiting.empty() || evicting > 0) return;
  // Idle paged-out sessions come back only into room that no other session wants.
  for (WaitingList::Position at = idle.first_fit(idle.begin(), room()); at < idle.end();
       at = idle.first_fit(at, room()))
    at = place(idle.at(at), now_ns) ? idle.erase(at) : idle.next(at);
}

void Scheduler::Impl::admit_in_line(uint64_t now_ns) {
  size_t refused = 0;
  for (WaitingList::Position at = waiting.begin(); at < waiting.end() && refused < kMostRefused;) {
    const WaitingList::Position fit = waiting.first_fit(at, room());
    const WaitingList::Position barrier = waiting.first_overtaken(at, kMostOvertakes);
    const WaitingList::Position last = barrier < fit ? waiting.next(barrier) : fit;
    if (claim_first(at, last, now_ns) || barrier < fit || fit == waiting.end()) break;
    SessionRecord& session = waiting.at(fit);
    if (is_for_one_that_goes_out(session)) break;
    const bool passes = fit != waiting.begin();
    const MayJoin may = may_join(session, residents, passes);
    if (may == MayJoin::kNobody && passes) break;
    if (may == MayJoin::kNo) ++refused;
    if (may == MayJoin::kYes && place(session, now_ns)) {
      at = admitted_from(fit);
      continue;
    }
    if (claim(session, now_ns) || barrier == fit || may == MayJoin::kNobody) break;
    at = waiting.next(fit);
  }
}

void Scheduler::Impl::freed(uint64_t now_ns) {
  for (const SessionId id : std::exchange(blocked, {})) {
    SessionRecord* session = find(id);
    if (session == nullptr) continue;
    session->blocked = false;
    if (session->chunk != nullptr) (session->queued_idle ? idle : waiting).update(*session);
  }
  admit_waiting(now_ns);
}

std::string Scheduler::Impl::shortage(const SessionRecord& session) const {
  const SessionSpec& spec = session.spec;
  if (session.compute_units > options.compute_units - compute_units)
    return base::format(
        "session '%s' needs %u compute units for itself; %u of %u can be promised, other lanes have the "
        "rest. "
        "Lower compute_units, close a session, or allow queueing",
        spec.name.c_str(), session.compute_units, options.compute_units - compute_units,
        options.compute_units);
  return base::format(
      "session '%s' needs %s (persistent %s, ephemeral %s); %s of %s can be promised: persistent %s of %zu "
      "sessions, lanes %s "
      "(%u). Lower ephemeral_bytes, close a session, or allow queueing",
      spec.name.c_str(), base::format_bytes(session.persistent_bytes + session.ephemeral_bytes).c_str(),
      base::format_bytes(session.persistent_bytes).c_str(),
      base::format_bytes(session.ephemeral_bytes).c_str(), base::format_bytes(free_bytes()).c_str(),
      base::format_bytes(capacity.target_bytes).c_str(), base::format_bytes(tree.sessions.promised()).c_str(),
      residents, base::format_bytes(tree.lanes.promised()).c_str(), lanes_open);
}

}  // namespace gpushare::sched
