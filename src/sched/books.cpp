// The scheduler's answers about its books, and the check of their invariants.
// SPDX-License-Identifier: Apache-2.0
#include "sched/scheduler.hpp"

#include <algorithm>

#include "base/units.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {

SessionState Scheduler::state(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->bytes == Bytes::kWaiting) return SessionState::kQueued;
  return session->out() ? SessionState::kPagedOut : SessionState::kResident;
}
size_t Scheduler::paged_out() const {
  return impl_->paged_out;
}
LaneId Scheduler::lane_of(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session == nullptr ? kNoLane : session->lane;
}
SessionView Scheduler::view(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session == nullptr ? SessionView{} : session->view;
}
bool Scheduler::knows(SessionId id) const {
  return impl_->find(id) != nullptr;
}
bool Scheduler::owes(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session != nullptr && session->overdue;
}
Policy& Scheduler::policy() {
  return *impl_->policy;
}
std::string Scheduler::policy_name() const {
  return std::string(impl_->policy->name());
}
uint64_t Scheduler::promised_bytes() const {
  return impl_->promised();
}
uint64_t Scheduler::context_bytes() const {
  return impl_->context_bytes;
}
uint64_t Scheduler::persistent_bytes() const {
  return impl_->persistent_bytes;
}
uint64_t Scheduler::gone_bytes(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session == nullptr ? 0 : session->gone_bytes;
}
uint32_t Scheduler::lanes_open() const {
  return impl_->lanes_open;
}
uint32_t Scheduler::lane_limit() const {
  return static_cast<uint32_t>(impl_->lanes.size());
}
bool Scheduler::lane_is_open(LaneId lane) const {
  return lane < impl_->lanes.size() && impl_->lanes[lane].open;
}
uint64_t Scheduler::lane_bytes(LaneId lane) const {
  return lane_is_open(lane) ? impl_->lanes[lane].held : 0;
}
uint64_t Scheduler::lane_size(LaneId lane) const {
  return lane_is_open(lane) ? impl_->lanes[lane].bytes : 0;
}
uint32_t Scheduler::lane_compute_units(LaneId lane) const {
  return lane_is_open(lane) ? impl_->lanes[lane].compute_units : 0;
}
uint64_t Scheduler::trust_group_of(LaneId lane) const {
  return lane_is_open(lane) ? impl_->lanes[lane].trust_group : 0;
}
uint32_t Scheduler::promised_compute_units() const {
  return impl_->compute_units;
}
size_t Scheduler::residents() const {
  return impl_->residents;
}
size_t Scheduler::waiting() const {
  return impl_->waiting.size() + impl_->idle.size();
}

uint64_t Scheduler::states_taken() const {
  return impl_->taken;
}

std::string Scheduler::check() const {
  const Impl& state = *impl_;
  if (!state.unlisted.empty()) return state.unlisted;
  uint64_t persistent = 0, lanes = 0;
  size_t residents = 0, ready = 0;
  uint32_t open = 0, units = 0, overdue = 0;
  size_t lanes_ready = 0;
  for (LaneId id = 0; id < state.lanes.size(); ++id) {
    const LaneRecord& lane = state.lanes[id];
    if (!lane.ready.empty() &&
        (++lanes_ready > state.ready_lanes.size() || state.ready_lanes[lane.ready_position] != id))
      return base::format("lane %u is not among those with somebody ready", id);
    for (const SessionView& view : lane.ready)
      if (state.find(view.id)->ephemeral_bytes < lane.least_ready_bytes)
        return base::format("a ready session of lane %u needs less than the least", id);
    if (!lane.open) {
      if (!lane.members.empty()) return base::format("closed lane %u has sessions", id);
      continue;
    }
    ++open;
    if (lane.members.empty()) return base::format("open lane %u is empty", id);
    if (lane.held < lane.bytes) return base::format("lane %u holds less than its size", id);
    if (state.options.shared_lanes && lane.held < lane.applied)
      return base::format("lane %u has more memory than is promised to it", id);
    lanes += lane.held;
    units += lane.compute_units;
    ready += lane.ready.size();
    for (const SessionRecord* member : lane.members) {
      if (member->lane != id) return base::format("lane %u has a session of another lane", id);
      if (member->ephemeral_bytes > lane.bytes)
        return base::format("lane %u is smaller than a session's E", id);
      if (!Impl::suits(lane, *member))
        return base::format("lane %u has a session of another share of the device, or trust group", id);
    }
    residents += lane.members.size();
    overdue += lane.overdue;
    if (lane.overdue != static_cast<size_t>(std::count_if(lane.members.begin(), lane.members.end(),
                                                          [](const auto* each) { return each->overdue; })))
      return base::format("lane %u counts %u overdue sessions", id, lane.overdue);
  }
  if (overdue != state.overdue) return "the count of overdue sessions is wrong";
  if (lanes_ready != state.ready_lanes.size()) return "a lane without a ready session counts as one with";
  size_t waiting = 0, slots = 0, spares = 0, out = 0;
  uint32_t evicting = 0;
  for (const auto& [id, session] : state.sessions) {
    if (session->holds_promise()) persistent += session->held_bytes();
    if (session->gone_bytes > 0 && session->bytes != Bytes::kGoing)
      return "a session that is not being paged out has bytes that are gone";
    if (session->goes_out()) ++evicting;
    if (session->out()) ++out;
    if (session->worth_ns) ++spares;
    if (session->holds_promise() == (session->bytes == Bytes::kWaiting || session->bytes == Bytes::kOut))
      return "a session without bytes on the device holds a promise, or the other way round";
    if (!session->holds_promise()) {
      ++waiting;
      if (session->chunk == nullptr) return "a session without a promise is not queued";
      if (session->queued_idle == session->wants_in())
        return "a session that wants in is idle, or the other way round";
      const WaitingList& list = session->queued_idle ? state.idle : state.waiting;
      if (&list.at(list.position_of(*session)) != session.get()) return "a queued session is not in its list";
    }
    if (session->slot != SessionRecord::kNoSlot) {
      ++slots;
      if (!on_device(session->bytes) || !session->ready) return "a session that cannot run is a candidate";
      if (state.lanes[session->lane].ready[session->slot].id != id) return "a candidate's slot is another's";
    } else if (session->resident() && session->ready) {
      return "a session that can run is no candidate";
    }
  }
  uint64_t cached = 0;
  for (const auto& cache : state.caches) {
    if (cache->held) cached += cache->bytes;
    if (cache->dropping) ++evicting;
    if (cache->dropping && !cache->held) return "a cache that is not held is being dropped";
    if (cache->waiting && cache->users == 0) return "a cache waits that nobody wants";
    const CacheRecord* first = state.find_cache(cache->first_part);
    if (first != nullptr && first->dropping && cache->held && !cache->dropping)
      return "first layers go before the rest";
  }
  if (out != state.paged_out) return "the sessions that are paged out are miscounted";
  if (cached != state.cache_bytes) return "the bytes of caches are miscounted";
  if (persistent != state.persistent_bytes || lanes != state.lane_bytes || residents != state.residents ||
      open != state.lanes_open || waiting != this->waiting() || slots != ready ||
      evicting != state.evicting || spares != state.spares)
    return "a running total is wrong";
  if (units != state.compute_units || units > state.options.compute_units)
    return base::format("lanes have %u compute units of %u", units, state.options.compute_units);
  const uint64_t promised = persistent + lanes + cached + state.context_bytes;
  if (promised > state.capacity.effective_bytes)
    return base::format("promised %s of %s", base::format_bytes(promised).c_str(),
                        base::format_bytes(state.capacity.effective_bytes).c_str());
  if (state.capacity.effective_bytes > std::max(state.capacity.target_bytes, promised))
    return "the effective capacity did not fall with the promises";
  return impl_->check_peers();
}

}  // namespace gpushare::sched
