// Room for a session that needs bytes which sessions of lower rank have: who is asked for them, for whom they are kept, and who waits
// in line.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {

using client::MessageType;

base::Status SharedDevice::make_room(RemoteSession& session, sched::RoomAsk ask) {
  if (ask.from == sched::Giver::kSpare)
    ask.elsewhere_bytes = base::add_saturated(ask.elsewhere_bytes, ranges_.can_give(session, ask.commit));
  if (room_for_ == 0) return make_room(*session.claim, ask, base::host_now_ns());
  const sched::SessionClass cls = session.claim->counts_as;
  if (cls != sched::SessionClass::kGuaranteed)
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "room is being made for another session already"};
  // In line as they came.
  const auto at = std::find_if(room_line_.begin(), room_line_.end(), [&](const auto& other) {
    const auto use = [](bool commit) { return commit ? sched::Use::kCommit : sched::Use::kAllocation; };
    return sched::served_before({cls, use(ask.commit)}, {cls, use(other.second.commit)});
  });
  room_line_.emplace(at, session.claim->id, ask);
  return {};
}

void SharedDevice::tell_room(Claim& claim) {
  claim.has_room = true;
  tell(claim, MessageType::kRoomMade);
}

void SharedDevice::give_up_room(Claim& claim, uint64_t now_ns) {
  std::erase_if(room_line_, [&](const auto& waits) { return waits.first == claim.id; });
  if (room_for_ == claim.id) {
    room_for_ = room_until_ns_ = 0;
    room_victims_.clear();
  } else if (!claim.has_room) {
    return;
  }
  claim.has_room = false;
  scheduler_.room_used(claim.id, now_ns);
  next_room(now_ns);
}

void SharedDevice::next_room(uint64_t now_ns) {
  while (room_for_ == 0 && !room_line_.empty()) {
    const auto [id, ask] = room_line_.front();
    room_line_.pop_front();
    const auto found = claims_.find(id);
    // Without room it asks again, and is refused.
    if (found != claims_.end() && !make_room(*found->second, ask, now_ns).ok()) tell_room(*found->second);
  }
}

base::Status SharedDevice::make_room(const Claim& claim, const sched::RoomAsk& ask, uint64_t now_ns) {
  take_back_offers();
  // A session that keeps its lease counts as running for the scheduler, and would give nothing. A process whose work is done
  // may not have looked, and says so when its turn is wanted.
  bool drains = false, lower_drain = false;
  for (Claim* holder : std::vector<Claim*>(holders_)) {
    if (holder == nullptr || holder == &claim || !may_give(*holder, ask)) continue;
    const bool asked_before = holder->wanted_since_ns != 0, given = want_back(*holder, now_ns);
    drains = (!given && !asked_before) || drains;
    lower_drain = (!given && holder->counts_as == sched::SessionClass::kOpportunistic) || lower_drain;
  }
  room_for_lower_ = lower_drain && claim.counts_as == sched::SessionClass::kGuaranteed &&
                    ask.from == sched::Giver::kSessions;
  if (!drains && !room_for_lower_) return start_room(claim, ask, now_ns);
  room_for_ = claim.id;
  room_ask_ = ask;
  room_until_ns_ = now_ns + (room_for_lower_ ? sched::kBoundaryWaitNs : sched::kRoomWaitNs);
  return {};
}

base::Status SharedDevice::start_room(const Claim& claim, const sched::RoomAsk& ask, uint64_t now_ns) {
  room_free_bytes_ = base::add_saturated(free_bytes(scheduler_), ask.bytes);
  if (!scheduler_.make_room(claim.id, ask, now_ns)) {
    // Sessions on their way out give more than whoever had them paged out has waited for.
    if (ask.from == sched::Giver::kSessions)
      for (const auto& [id, other] : claims_)
        if (other->goes_out()) room_victims_.push_back(id);
    if (room_victims_.empty())
      return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "no session may be paged out for this one"};
  }
  room_for_ = claim.id;
  for (const sched::Action& action : scheduler_.take_actions()) {
    if (action.kind == sched::ActionKind::kPageOut || action.kind == sched::ActionKind::kTurnBack ||
        action.kind == sched::ActionKind::kDrop || action.kind == sched::ActionKind::kDropCache)
      room_victims_.push_back(action.session);
    carry_out(action);
  }
  // Page-ins that turn back already, for a session that waits for admission, may be enough.
  if (room_victims_.empty())
    for (const auto& [id, other] : claims_)
      if (other->comes_in() && other->counts_as == sched::SessionClass::kOpportunistic)
        room_victims_.push_back(id);
  return {};
}

void SharedDevice::room_drained(uint64_t now_ns) {
  if (room_until_ns_ == 0) return;
  const auto found = claims_.find(room_for_);
  if (now_ns < room_until_ns_ && std::any_of(holders_.begin(), holders_.end(), [&](const Claim* holder) {
        return holder != nullptr && holder->id != room_for_ && holder->wanted_since_ns != 0 &&
               may_give(*holder, room_ask_) &&
               (!room_for_lower_ || holder->counts_as == sched::SessionClass::kOpportunistic);
      }))
    return;
  room_until_ns_ = 0;
  room_for_ = 0;
  // Without room it asks again, and is refused.
  if (found != claims_.end() && !start_room(*found->second, room_ask_, now_ns).ok())
    tell_room(*found->second);
  next_room(now_ns);
}

// Page-outs may go on when there is enough: what they give after that is for others.
void SharedDevice::room_part() {
  if (room_for_ == 0 || room_until_ns_ != 0 || free_bytes(scheduler_) < room_free_bytes_) return;
  room_victims_.clear();
  room_step(0);
}

void SharedDevice::room_step(uint64_t victim) {
  std::erase(room_victims_, victim);
  if (room_for_ == 0 || room_until_ns_ != 0 || !room_victims_.empty()) return;
  const auto found = claims_.find(room_for_);
  if (found != claims_.end()) tell_room(*found->second);
  room_for_ = 0;
  next_room(base::host_now_ns());
}

}  // namespace gpushare::daemon
