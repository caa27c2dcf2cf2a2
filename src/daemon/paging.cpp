// Page-outs and page-ins: what the sessions of a claim are told and answer, in parts, and groups that went out in part.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {

using client::MessageType;

void SharedDevice::page_out(Claim& claim) {
  if (RemoteSession& session = *claim.members.front(); !session.leased() && !session.overdue()) {
    const bool waited = session.image_state == RemoteSession::ImageState::kWaits;
    images_.let_go(session);
    if (waited) scheduler_.ready(claim.id, base::host_now_ns());  // it waits for its memory first
  }
  if (claim.bytes == Claim::Bytes::kHoming)
    claim.bytes = Claim::Bytes::kHomingThenOut;
  else
    start_paging(claim, Claim::Bytes::kGoing);
}

void SharedDevice::page_in(Claim& claim, uint64_t now_ns) {
  if (!send_lane(claim)) return unplace(claim, now_ns);
  if (claim.short_bytes == 0 || regrow(claim, now_ns)) return start_paging(claim, Claim::Bytes::kComing);
  claim.bytes = Claim::Bytes::kHere;
  scheduler_.page_done(claim.id, now_ns);
  tell_out(claim, MessageType::kAdmit);
}

void SharedDevice::start_paging(Claim& claim, Claim::Bytes to) {
  claim.bytes = to;
  ++(claim.goes_out() ? page_outs_ : page_ins_);
  claim.part_bytes = 0;
  for (const auto& member : claim.members) {
    if (!member->pages()) ++claim.pages;
    member->move = RemoteSession::Move::kTold;
    if (member->process->socket)
      tell(*member, claim.goes_out() ? MessageType::kPageOut : MessageType::kPageIn);
    else
      silent_.push_back(claim.id);
  }
}

bool SharedDevice::answer_for_silent() {
  const std::vector<uint64_t> silent = std::exchange(silent_, {});
  for (const uint64_t id : silent) {
    const auto found = claims_.find(id);
    if (found == claims_.end()) continue;
    Claim& claim = *found->second;
    for (const auto& member : claim.members) {
      if (member->process->socket || !member->pages()) continue;
      member->move = member->begun() ? RemoteSession::Move::kOut : RemoteSession::Move::kHere;
      paged(claim, !claim.goes_out(), base::host_now_ns());
    }
  }
  return !silent.empty();
}

// A group is out, or in again, when all of its members are. If one member cannot go out, none goes, unless parts have
// been promised to others already.
void SharedDevice::paged(Claim& claim, bool done, uint64_t now_ns) {
  using Bytes = Claim::Bytes;
  if (claim.bytes == Bytes::kGoing && !done) claim.bytes = Bytes::kFailing;
  if (--claim.pages > 0) return give_parts(claim, now_ns);
  switch (claim.bytes) {
    case Bytes::kHoming:
      claim.bytes = Bytes::kHere;
      return tell(claim, MessageType::kAdmit);  // members that came meanwhile
    case Bytes::kHomingThenOut:
      return start_paging(claim, Bytes::kGoing);
    case Bytes::kFailing:
      if (claim.group != 0 && (claim.short_bytes > 0 || scheduler_.gone_bytes(claim.id) > 0))
        return end_in_part(claim, now_ns);
      if (claim.group != 0 && (claim.members.size() > 1 || claim.members.front()->begun()))
        return start_paging(claim, Bytes::kReturning);
      [[fallthrough]];
    case Bytes::kReturning:
      claim.bytes = Bytes::kHere;
      scheduler_.page_out_failed(claim.id, now_ns);
      break;
    default: {
      const bool out = claim.bytes == Bytes::kGoing;
      claim.bytes = out ? Bytes::kOut : Bytes::kHere;
      scheduler_.page_done(claim.id, now_ns);
      // A process that is out has no piece of any lane, also where its session has a place in another lane at once.
      if (out) leave_lane(claim);
      claim.lane = scheduler_.lane_of(claim.id);
      if (claim.group != 0 && !out) tell(claim, MessageType::kAdmit);  // members that came meanwhile
      break;
    }
  }
  room_step(claim.id);
}

// The limit holds for what the group has on the device and on the host. So what it has on the device is at most the limit less
// the parts that are out, once no member gets blocks there that takes the place of a block which went and was freed.
void SharedDevice::give_parts(Claim& claim, uint64_t now_ns) {
  if (claim.bytes != Claim::Bytes::kGoing || claim.part_bytes == 0 ||
      std::any_of(claim.members.begin(), claim.members.end(),
                  [](const auto& member) { return member->move == RemoteSession::Move::kTold; }))
    return;
  scheduler_.page_part(claim.id, std::exchange(claim.part_bytes, 0), now_ns);
  room_part();
}

void SharedDevice::end_in_part(Claim& claim, uint64_t now_ns) {
  const uint64_t gone = scheduler_.gone_bytes(claim.id);
  claim.bytes = Claim::Bytes::kHere;
  claim.short_bytes += gone;
  const uint64_t of_p = std::min(gone, claim.persistent_bytes);
  claim.persistent_bytes -= of_p;
  claim.ephemeral_bytes -= std::min(claim.ephemeral_bytes, gone - of_p);
  owe(claim);
  // This order makes sure that no bytes count as gone any more when the page-out ends.
  (void)set_need(claim, claim.persistent_bytes, claim.ephemeral_bytes, now_ns);  // less is never refused
  scheduler_.page_out_failed(claim.id, now_ns);
  tell_out(claim, MessageType::kAdmit);
  room_step(claim.id);
}

void SharedDevice::tell_out(const Claim& claim, MessageType type) {
  for (const auto& member : claim.members)
    if (member->begun()) tell(*member, type);
}

bool SharedDevice::regrow(Claim& claim, uint64_t now_ns) {
  const uint64_t bytes = claim.short_bytes, all = base::add_saturated(claim.persistent_bytes, bytes);
  if (free_bytes(scheduler_) < bytes ||
      !within(claim.limits.get(), &claim, claim.members.front()->name, bytes, now_ns).ok() ||
      !set_need(claim, all, claim.ephemeral_bytes, now_ns).ok())
    return false;
  come_home(claim);
  return true;
}

void SharedDevice::come_home(Claim& claim) {
  claim.short_bytes = 0;
  // Otherwise all of the claim is to come in.
  if (claim.pages_now() || scheduler_.state(claim.id) != sched::SessionState::kResident) return;
  start_paging(claim, Claim::Bytes::kHoming);
}

void SharedDevice::owe(Claim& claim) {
  if (std::find(owed_.begin(), owed_.end(), &claim) == owed_.end()) owed_.push_back(&claim);
}

void SharedDevice::owe_loans(const GroupLimits* limits) {
  if (limits == nullptr) return;
  for (Claim* claim : limits->claims)
    if (claim->lends()) owe(*claim);
}

uint64_t SharedDevice::owed_bytes(const Claim& claim) const {
  if (claim.short_bytes == 0) return loan_to_take_back(claim);
  return claim.pages_now() || scheduler_.state(claim.id) != sched::SessionState::kResident
             ? 0
             : claim.short_bytes;
}

// Bytes that are kept for who waits for room are not free for this. Nobody passes a claim that misses free bytes.
bool SharedDevice::give_back(uint64_t now_ns) {
  if (owed_.empty() || room_for_ != nullptr) return false;
  std::stable_sort(owed_.begin(), owed_.end(), [](const Claim* a, const Claim* b) {
    return sched::served_before({a->counts_as, sched::Use::kReturn}, {b->counts_as, sched::Use::kReturn});
  });
  bool any = false;
  for (Claim* claim : std::vector<Claim*>(owed_)) {
    const uint64_t bytes = owed_bytes(*claim);
    if (bytes == 0) continue;
    if ((scheduler_.lane_of(claim->id) != sched::kNoLane && bytes > free_bytes(scheduler_)) ||
        has_room(now_ns))
      break;
    any = (claim->short_bytes > 0 ? regrow(*claim, now_ns) : take_back_loan(*claim, bytes, now_ns)) || any;
  }
  std::erase_if(owed_, [](const Claim* claim) { return claim->short_bytes == 0 && !claim->lends(); });
  return any;
}

// A process that never says that it has used its room holds nobody up for longer than others wait for room.
bool SharedDevice::has_room(uint64_t now_ns) const {
  return std::any_of(claims_.begin(), claims_.end(), [now_ns](const auto& each) {
    const auto& members = each.second->members;
    return std::any_of(members.begin(), members.end(), [now_ns](const auto& member) {
      return member->has_room && now_ns - member->room_told_ns < sched::kRoomWaitNs;
    });
  });
}

}  // namespace gpushare::daemon
