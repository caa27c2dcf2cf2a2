// The scheduler's answers about its books.
// SPDX-License-Identifier: Apache-2.0
#include "sched/scheduler.hpp"

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
SessionClass Scheduler::class_for_bytes(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session == nullptr ? SessionClass::kGuaranteed : session->bytes_cls;
}
bool Scheduler::knows(SessionId id) const {
  return impl_->find(id) != nullptr;
}
bool Scheduler::owes(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session != nullptr && session->overdue;
}
std::string Scheduler::policy_name() const {
  return std::string(impl_->policy->name());
}
uint64_t Scheduler::promised_bytes() const {
  return impl_->promised();
}
uint64_t Scheduler::context_bytes() const {
  return impl_->tree.contexts.promised();
}
uint64_t Scheduler::persistent_bytes() const {
  return impl_->tree.sessions.promised();
}
uint64_t Scheduler::group_needs(uint64_t group) const {
  const auto found = impl_->groups.find(group);
  return found == impl_->groups.end() ? 0 : found->second.claim.needed();
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
  return lane_is_open(lane) ? impl_->lanes[lane].held() : 0;
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

}  // namespace gpushare::sched
