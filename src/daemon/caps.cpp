// Caps: the most of a device's time that the sessions of a group, or of a process, get, also while no other session
// wants the device. A session whose cap has a debt is not announced to the scheduler, so other sessions see it as one
// without work.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "daemon/service.hpp"

namespace gpushare::daemon {

namespace {

// The number of the group with which the claim shares limits; 0: none.
uint64_t group_of(const Claim& claim) {
  return claim.limits != nullptr ? claim.limits->group : claim.group;
}

}  // namespace

std::shared_ptr<sched::TimeCap> SharedDevice::cap_of(Process& process, uint64_t group, double share,
                                                     uint64_t now_ns) {
  if (group == 0) {
    if (process.cap == nullptr && share != 0) process.cap = std::make_shared<sched::TimeCap>(share, now_ns);
    return process.cap;
  }
  std::erase_if(caps_, [](const auto& entry) { return entry.second.expired(); });
  const auto found = caps_.find(group);
  if (found != caps_.end()) return found->second.lock();
  if (share == 0) return nullptr;
  auto cap = std::make_shared<sched::TimeCap>(share, now_ns);
  caps_[group] = cap;
  return cap;
}

void SharedDevice::set_cap(RemoteSession& session, double share, uint64_t now_ns) {
  const uint64_t group = group_of(*session.claim);
  const std::shared_ptr<sched::TimeCap> cap = cap_of(*session.process, group, share, now_ns);
  cap->set_share(share, now_ns);
  for (const auto& [id, claim] : claims_)
    if (group != 0 ? group_of(*claim) == group : claim->members.front()->process == session.process)
      claim->cap = cap;
}

bool SharedDevice::announce_repaid(uint64_t now_ns) {
  const std::vector<Claim*> waited = std::exchange(in_debt_, {});
  for (Claim* claim : waited) announce(*claim, now_ns);  // those that still have a debt come back
  return in_debt_.size() != waited.size();
}

}  // namespace gpushare::daemon
