// Lanes that give way: when a session waits, lanes merge, which costs no copy. The sessions of a lane that closes go
// to other lanes that are large enough, each once it has nothing in flight.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>

#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {

// A lane with a session that outranks the waiting one does not give way, because that session would have to share its turns.
bool Scheduler::Impl::may_merge(const LaneRecord& lane, const SessionRecord& session) const {
  if (!lane.open || !suits(lane, session)) return false;
  return std::none_of(lane.members.begin(), lane.members.end(), [&](const SessionRecord* member) {
    return member->spec.profiling || !moves(*member) || !member->resident() || member->overdue ||
           before(member->view, session.view);
  });
}

// The largest lane that is not closing: the sessions of the other lanes have room in it.
LaneId Scheduler::Impl::largest_that_gives_way(const SessionRecord& session) const {
  LaneId largest = kNoLane;
  for (LaneId id = 0; id < lanes.size(); ++id)
    if (!lanes[id].closing && may_merge(lanes[id], session) &&
        (largest == kNoLane || lanes[id].bytes > lanes[largest].bytes))
      largest = id;
  return largest;
}

WaitingList::Room Scheduler::Impl::mergeable_room(const SessionRecord& session) const {
  if (!moves(session) || lanes_open < 2 || session.spec.profiling) return {};
  const LaneId kept = largest_that_gives_way(session);
  if (kept == kNoLane) return {};
  uint64_t bytes = free_bytes();
  for (LaneId id = 0; id < lanes.size(); ++id)
    if (id != kept && (lanes[id].closing || may_merge(lanes[id], session))) bytes += lanes[id].held();
  return {true, bytes, bytes + lanes[kept].bytes};
}

void Scheduler::Impl::merge_waiting(uint64_t now_ns) {
  if (options.shared_lanes) return;
  if (waiting.empty()) {
    if (promised() <= capacity.target_bytes)
      for (LaneRecord& lane : lanes) lane.closing = false;
    return;
  }
  if (lanes_open < 2 || evicting > 0) return;
  // Sessions behind this one may merge no more lanes than it may.
  for (WaitingList::Position at = waiting.begin(); at < waiting.end();) {
    const SessionRecord& session = waiting.at(at);
    const WaitingList::Room merged = mergeable_room(session);
    if (!session.blocked && session.wants_in() &&
        may_join(session, residents, at != waiting.begin()) == MayJoin::kYes &&
        merged.holds(session.persistent_bytes, session.persistent_bytes + session.ephemeral_bytes)) {
      merge(session, now_ns);
      return;
    }
    if (!merged.any) return;
    at = waiting.first_fit(waiting.next(at), merged);
  }
}

// Closes as few lanes as it takes to let the session in: first those with nothing in flight, then those of the fewest
// sessions.
void Scheduler::Impl::merge(const SessionRecord& session, uint64_t now_ns) {
  const LaneId kept = largest_that_gives_way(session);
  if (kept == kNoLane) return;  // the policy was asked again, and said otherwise
  const uint64_t largest = lanes[kept].bytes;
  const uint64_t need =
      session.persistent_bytes + (session.ephemeral_bytes > largest ? session.ephemeral_bytes - largest : 0);
  uint64_t room = free_bytes();
  std::vector<LaneId> candidates;
  for (LaneId id = 0; id < lanes.size(); ++id) {
    if (id == kept || !lanes[id].open) continue;
    if (lanes[id].closing)
      room += lanes[id].held();
    else if (may_merge(lanes[id], session))
      candidates.push_back(id);
  }
  std::sort(candidates.begin(), candidates.end(), [this](LaneId a, LaneId b) {
    const auto rank = [this](LaneId id) {
      return std::tuple(lanes[id].busy(), lanes[id].members.size(), ~lanes[id].held(), id);
    };
    return rank(a) < rank(b);
  });
  std::vector<LaneId> closing;
  for (size_t i = 0; i < candidates.size() && room < need; ++i) {
    lanes[candidates[i]].closing = true;
    closing.push_back(candidates[i]);
    room += lanes[candidates[i]].held();
  }
  bool came_back = false;
  for (const LaneId id : closing) came_back = drain(id, now_ns) || came_back;
  // Sessions that found no place on the device stay blocked: these lanes give back promises. A session that was tried again
  // for them would fail, lanes would merge for the next one, and so on without end.
  if (came_back) admit_waiting(now_ns);
}

bool Scheduler::Impl::drain(LaneId from, uint64_t now_ns) {
  const std::vector<SessionRecord*> members = lanes[from].members.all();
  const uint64_t before = promised();
  for (SessionRecord* session : members) {
    if (session->view.in_flight > 0 || session->overdue || !session->resident()) continue;
    LaneId to = kNoLane;
    for (LaneId id = 0; id < lanes.size(); ++id) {
      if (id == from || !takes(lanes[id], *session)) continue;
      if (to == kNoLane || lanes[id].members.size() < lanes[to].members.size()) to = id;
    }
    if (to == kNoLane) {  // the large ones shrank meanwhile, or are not there yet
      lanes[from].closing = false;
      break;
    }
    move(*session, to, now_ns);
  }
  return promised() < before;
}

}  // namespace gpushare::sched
