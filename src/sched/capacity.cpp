// Limits that change at run time: the device's capacity, sessions' quotas, and what gives way when one was lowered.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>

#include "base/saturate.hpp"
#include "base/units.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {

base::Status Scheduler::set_capacity(uint64_t bytes, uint64_t now_ns) {
  const uint64_t most = impl_->options.capacity_bytes;
  if (bytes > most)
    return {GPUSHARE_EXCEEDS_CAPACITY, "a capacity of " + base::format_bytes(bytes) +
                                           " is more than there is: at most " + base::format_bytes(most)};
  const bool raised = bytes > impl_->capacity.target_bytes;
  impl_->capacity = {bytes, std::max(bytes, impl_->promised())};
  if (impl_->coordinator) impl_->coordinator->set_capacity(impl_->beside_contexts(), now_ns);
  if (raised) {  // sessions that were to give way and have not begun to may stay
    for (LaneRecord& lane : impl_->lanes) lane.closing = false;
    for (SessionRecord* session : impl_->waiting.sessions()) impl_->set_claiming(*session, false);
    impl_->cancel_evictions();
  }
  impl_->coordinate(now_ns);
  impl_->freed(now_ns);
  return {};
}

void Scheduler::set_context_bytes(uint64_t bytes, uint64_t now_ns) {
  if (bytes == impl_->tree.contexts.promised()) return;
  impl_->tree.contexts.promise(bytes);
  impl_->capacity.effective_bytes = std::max(impl_->capacity.target_bytes, impl_->promised());
  if (impl_->coordinator) impl_->coordinator->set_capacity(impl_->beside_contexts(), now_ns);
  impl_->coordinate(now_ns);
  impl_->freed(now_ns);
}

Limit Scheduler::capacity() const {
  return impl_->capacity;
}

void Scheduler::set_quota(SessionId id, uint64_t bytes) {
  if (SessionRecord* session = impl_->find(id)) session->spec.quota_bytes = bytes;
}

// The most that P and E can be after rounding, if they were within the quota before.
uint64_t quota_in_granules(uint64_t quota_bytes, uint64_t granule_bytes) {
  if (quota_bytes == 0) return kUnknown;
  if (granule_bytes <= 1 || quota_bytes < 2) return std::max(quota_bytes, granule_bytes);
  return base::add_saturated((quota_bytes - 2) / granule_bytes * granule_bytes,
                             base::add_saturated(granule_bytes, granule_bytes));
}

uint64_t Scheduler::Impl::quota_of(const SessionRecord& session) const {
  const uint64_t quota = quota_in_granules(session.spec.quota_bytes, options.granularity_bytes);
  return session.limit_bytes > 0 ? std::min(quota, session.limit_bytes) : quota;
}

// Merges as many lanes as needed into the largest: first lanes with nothing in flight, then those of the fewest
// sessions. That copies nothing.
void Scheduler::Impl::merge_to_lower(uint64_t now_ns) {
  if (lanes_open < 2) return;
  std::vector<LaneId> candidates;
  for (LaneId id = 0; id < lanes.size(); ++id) {
    const LaneRecord& lane = lanes[id];
    if (!lane.open || lane.closing || lane.compute_units != 0) continue;
    if (std::any_of(lane.members.begin(), lane.members.end(), [this](const SessionRecord* member) {
          return member->spec.profiling || !moves(*member) || !member->resident();
        }))
      continue;
    candidates.push_back(id);
  }
  if (candidates.size() < 2) return;
  const auto largest = std::max_element(candidates.begin(), candidates.end(), [this](LaneId a, LaneId b) {
    return lanes[a].bytes < lanes[b].bytes;
  });
  candidates.erase(largest);
  std::sort(candidates.begin(), candidates.end(), [this](LaneId a, LaneId b) {
    const auto rank = [this](LaneId id) {
      return std::tuple(lanes[id].busy(), lanes[id].members.size(), ~lanes[id].held(), id);
    };
    return rank(a) < rank(b);
  });
  const auto stays = [](const auto&) { return false; };
  std::vector<LaneId> closing;
  for (size_t i = 0; i < candidates.size() && promised_without(stays) > capacity.target_bytes; ++i) {
    if (lanes[candidates[i]].bytes == 0) continue;
    lanes[candidates[i]].closing = true;
    closing.push_back(candidates[i]);
  }
  for (const LaneId id : closing) (void)drain(id, now_ns);
}

void Scheduler::Impl::lower(uint64_t now_ns) {
  if (promised() <= capacity.target_bytes) return;
  // A lane that opens has no memory yet for the sessions of those that close; lane_applied() comes here again.
  if (options.confirms_lanes && std::any_of(lanes.begin(), lanes.end(), [](const LaneRecord& lane) {
        return lane.open && lane.applied == 0 && lane.bytes > 0;
      }))
    return;
  merge_to_lower(now_ns);
  const Ask ask{Why::kCapacity, now_ns};
  if (const auto victims = who_gives(ask, who_may_give(ask))) evict(*victims, now_ns);
}

}  // namespace gpushare::sched
