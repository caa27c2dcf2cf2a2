// The check of the scheduler's invariants: each session against the state of its bytes (session_states.hpp), each lane
// against its sessions, and the running totals. In the library only where tests are built.
// SPDX-License-Identifier: Apache-2.0
#include "sched/scheduler.hpp"

#if defined(GPUSHARE_CHECKS)

#include <algorithm>
#include <map>
#include <utility>

#include "base/units.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
namespace {

struct Totals {
  size_t residents = 0, ready = 0, lanes_ready = 0, waiting = 0, slots = 0, spares = 0, out = 0;
  size_t held_back = 0, with_deadline = 0;
  uint32_t open = 0, units = 0, overdue = 0, evicting = 0;
};

std::string check_members(const auto& of, LaneId id, const LaneRecord& lane) {
  uint32_t overdue = 0;
  for (const SessionRecord* member : lane.members) {
    overdue += member->overdue ? 1 : 0;
    if (member->lane != id) return base::format("lane %u has a session of another lane", id);
    if (member->ephemeral_bytes > lane.bytes)
      return base::format("lane %u is smaller than a session's E", id);
    if (!of.suits(lane, *member))
      return base::format("lane %u has a session of another share of the device, or trust group", id);
  }
  if (lane.overdue != overdue) return base::format("lane %u counts %u overdue sessions", id, lane.overdue);
  return {};
}

std::string check_lane(const auto& of, LaneId id, Totals& totals) {
  const LaneRecord& lane = of.lanes[id];
  totals.held_back += lane.held_back_ns != kUnknown ? 1 : 0;
  if (!lane.ready.empty() &&
      (++totals.lanes_ready > of.ready_lanes.size() || of.ready_lanes[lane.ready_position] != id))
    return base::format("lane %u is not among those with somebody ready", id);
  for (const SessionView& view : lane.ready)
    if (of.find(view.id)->ephemeral_bytes < lane.least_ready_bytes)
      return base::format("a ready session of lane %u needs less than the least", id);
  if (!lane.open) return lane.members.empty() ? "" : base::format("closed lane %u has sessions", id);
  if (lane.members.empty()) return base::format("open lane %u is empty", id);
  if (lane.held() < lane.bytes) return base::format("lane %u holds less than its size", id);
  if (of.options.shared_lanes && lane.held() < lane.applied)
    return base::format("lane %u has more memory than is promised to it", id);
  ++totals.open;
  totals.units += lane.compute_units;
  totals.ready += lane.ready.size();
  totals.residents += lane.members.size();
  totals.overdue += lane.overdue;
  return check_members(of, id, lane);
}

// A session's bytes: all that follows from their state.
std::string check_session(const auto& of, const SessionRecord& session) {
  if (session.bytes == Bytes::kGone) return "a session that has left is in the books";
  if (session.holds_promise() != has_promise(session.bytes))
    return "a session without bytes on the device holds a promise, or the other way round";
  if (session.claim.needed() != session.persistent_bytes + session.ephemeral_bytes ||
      session.claim.promised() != session.held_bytes())
    return "its claim has other bytes than it needs or is promised";
  if (session.gone_bytes > 0 && session.bytes != Bytes::kGoing)
    return "a session that is not being paged out has bytes that are gone";
  const bool candidate = session.slot != SessionRecord::kNoSlot;
  if (candidate && (!on_device(session.bytes) || !session.ready))
    return "a session that cannot run is a candidate";
  if (candidate && of.lanes[session.lane].ready[session.slot].id != session.view.id)
    return "a candidate's slot is another's";
  if (!candidate && session.resident() && session.ready) return "a session that can run is no candidate";
  if (session.holds_promise()) return {};
  if (session.chunk == nullptr) return "a session without a promise is not queued";
  if (session.queued_idle == session.wants_in())
    return "a session that wants in is idle, or the other way round";
  const WaitingList& list = session.queued_idle ? of.idle : of.waiting;
  if (&list.at(list.position_of(session)) != &session) return "a queued session is not in its list";
  return {};
}

struct Sum {
  uint64_t needed = 0, promised = 0;
  void add(const ClaimNode& claim) {
    needed += claim.needed();
    promised += claim.promised();
  }
  bool is(const ClaimNode& claim) const { return needed == claim.needed() && promised == claim.promised(); }
};

// That each node of the tree of claims is the sum of those below it.
std::string check_tree(const auto& of) {
  Sum sessions, lanes, caches, device;
  std::map<uint64_t, std::pair<Sum, size_t>> groups;
  for (const auto& [id, session] : of.sessions) {
    sessions.add(session->claim);
    if (session->spec.group == 0) continue;
    groups[session->spec.group].first.add(session->claim);
    ++groups[session->spec.group].second;
  }
  for (const LaneRecord& lane : of.lanes) lanes.add(lane.claim);
  for (const auto& cache : of.caches) caches.add(cache->claim);
  for (const ClaimNode* each : {&of.tree.sessions, &of.tree.lanes, &of.tree.caches, &of.tree.contexts})
    device.add(*each);
  if (!sessions.is(of.tree.sessions) || !lanes.is(of.tree.lanes) || !caches.is(of.tree.caches) ||
      !device.is(of.tree.device))
    return "a claim is not the sum of those below it";
  if (groups.size() != of.groups.size()) return "a group has no session";
  for (const auto& [id, group] : of.groups)
    if (!groups[id].first.is(group.claim) || groups[id].second != group.sessions)
      return "a group's claim is not the sum of its sessions'";
  return {};
}

std::string check_cache(const auto& of, const CacheRecord& cache) {
  if (cache.claim.promised() != (cache.held ? cache.bytes : 0)) return "a cache's claim has other bytes";
  if (cache.dropping && !cache.held) return "a cache that is not held is being dropped";
  if (cache.waiting && cache.users == 0) return "a cache waits that nobody wants";
  if (cache.waiting && cache.held && !cache.dropping) return "a cache waits that is there";
  if (std::count(of.cache_line.begin(), of.cache_line.end(), &cache) != (cache.waiting ? 1 : 0))
    return "a cache waits and is not in line, or the other way round";
  const CacheRecord* first = of.find_cache(cache.first_part);
  if (first == nullptr) return {};
  if (cache.held && !cache.dropping && (!first->held || first->dropping))
    return "a cache stays without its first part";
  if (first->users < cache.users) return "a cache is wanted without its first part";
  return {};
}

std::string check_totals(const auto& of, const Totals& totals) {
  if (totals.overdue != of.overdue) return "the count of overdue sessions is wrong";
  if (totals.lanes_ready != of.ready_lanes.size()) return "a lane without a ready session counts as one with";
  if (totals.held_back != of.held_back) return "the lanes that are held back are miscounted";
  if (totals.with_deadline != of.with_deadline) return "the sessions with a deadline are miscounted";
  if (totals.out != of.paged_out) return "the sessions that are paged out are miscounted";
  if (totals.residents != of.residents || totals.open != of.lanes_open ||
      totals.waiting != of.waiting.size() + of.idle.size() || totals.slots != totals.ready ||
      totals.evicting != of.evicting || totals.spares != of.spares)
    return "a running total is wrong";
  if (totals.units != of.compute_units || totals.units > of.options.compute_units)
    return base::format("lanes have %u compute units of %u", totals.units, of.options.compute_units);
  const uint64_t promised = of.promised();
  if (promised > of.capacity.effective_bytes)
    return base::format("promised %s of %s", base::format_bytes(promised).c_str(),
                        base::format_bytes(of.capacity.effective_bytes).c_str());
  if (of.capacity.effective_bytes > std::max(of.capacity.target_bytes, promised))
    return "the effective capacity did not fall with the promises";
  return {};
}

}  // namespace

// That the peers of each rank, and what lanes show others, are as the sessions say.
std::string Scheduler::Impl::check_peers() {
  for (LaneId id = 0; id < lanes.size(); ++id) {
    const LaneRecord& lane = lanes[id];
    std::map<uint64_t, size_t> needs;
    for (const SessionRecord* member : lane.members) ++needs[member->ephemeral_bytes];
    if (needs != lane.needs) return base::format("lane %u miscounts what its sessions need", id);
    if (!lane.front.stale && lane.front != front_of(lane))
      return base::format("lane %u shows others what it was", id);
  }
  std::map<uint64_t, size_t> of_rank;
  const bool ranked = !asks.before || asks.ranks;
  for (const auto& [id, session] : sessions) {
    if (ranked != (session->peers != nullptr))
      return "a session has peers though there are no ranks, or none though there are";
    if (!ranked) continue;
    ++of_rank[session->view.rank];
    if (session->peers->rank != session->view.rank) return "a session is among peers of another rank";
    if (std::string wrong = check_place(*session); !wrong.empty()) return wrong;
  }
  if (of_rank.size() != peers.size()) return "a rank has no session";
  for (const auto& [rank, among] : peers) {
    if (of_rank[rank] != among.sessions) return "the sessions of a rank are miscounted";
    if (std::string wrong = check_first_lanes(among); !wrong.empty()) return wrong;
  }
  return {};
}

// That a session stands where its times put it, in the lists of its peers.
std::string Scheduler::Impl::check_place(const SessionRecord& session) {
  if (session.touched) return {};
  const bool in_lane = session.lane != kNoLane, placed = in_lane && weighted(session);
  if (session.counted != (in_lane && !session.worth_ns && lanes[session.lane].compute_units == 0))
    return "a session is in the way of lower ranks and not counted, or the other way round";
  const bool recent = placed && options.keeps_lag_ns > 0, listed = session.ByVirtualHook::is_linked();
  if (listed ? !recent || session.virtual_key != session.view.virtual_ns : recent && session.wanted())
    return "a session has another's place by virtual time";
  const bool begins = placed && asks.before;
  if (session.ByBegunHook::is_linked() != begins ||
      (begins &&
       (session.begun_key != begun_ns(session) || session.stands_wanting != wants_or_returns(session))))
    return "a session has another's place among those that want the device";
  return {};
}

// That the lanes which were found first among the peers are still the first.
std::string Scheduler::Impl::check_first_lanes(const Peers& among) {
  const FirstLanes behind = among.behind, above = among.above;
  if (behind.version == turn_version) {
    among.behind.version = 0;
    const FirstLanes& now = lanes_behind(among, behind.now_ns);
    if (now.first != behind.first || now.second != behind.second)
      return "another lane is behind than was said";
  }
  if (above.version == turn_version) {
    among.above.version = 0;
    const FirstLanes& now = lanes_above(among, above.now_ns);
    if (now.first != above.first || now.second != above.second) return "another lane is above than was said";
  }
  return {};
}

std::string Scheduler::check() const {
  const Impl& of = *impl_;
  if (!of.unlisted.empty()) return of.unlisted;
  Totals totals;
  for (LaneId id = 0; id < of.lanes.size(); ++id)
    if (std::string wrong = check_lane(of, id, totals); !wrong.empty()) return wrong;
  for (const auto& [id, session] : of.sessions) {
    if (std::string wrong = check_session(of, *session); !wrong.empty())
      return base::format("session %llu, %s: ", static_cast<unsigned long long>(id),
                          kBytesNames[static_cast<size_t>(session->bytes)]) +
             wrong;
    totals.waiting += session->holds_promise() ? 0 : 1;
    totals.slots += session->slot != SessionRecord::kNoSlot ? 1 : 0;
    totals.evicting += session->goes_out() ? 1 : 0;
    totals.spares += session->worth_ns ? 1 : 0;
    totals.with_deadline += session->view.worth > 0 ? 1 : 0;
    totals.out += session->out() ? 1 : 0;
  }
  for (const auto& cache : of.caches) {
    if (std::string wrong = check_cache(of, *cache); !wrong.empty()) return wrong;
    totals.evicting += cache->dropping ? 1 : 0;
  }
  if (!std::is_sorted(of.cache_line.begin(), of.cache_line.end(),
                      [](const auto* a, const auto* b) { return a->cls < b->cls; }))
    return "caches are not in line by class";
  if (std::string wrong = check_totals(of, totals); !wrong.empty()) return wrong;
  if (std::string wrong = check_tree(of); !wrong.empty()) return wrong;
  return impl_->check_peers();
}

}  // namespace gpushare::sched

#else

std::string gpushare::sched::Scheduler::check() const {
  return {};
}

#endif
