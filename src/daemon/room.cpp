// Room for a session that needs bytes which sessions of lower rank have: who is asked for them, for whom they are kept, and who waits
// in line.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {

using client::MessageType;

namespace {

constexpr ptrdiff_t kMostRoomWaits = 256;  // of one session at a time: one for each thread that misses bytes

}  // namespace

base::Status SharedDevice::make_room(RemoteSession& session, sched::RoomAsk ask) {
  if (ask.from == sched::Giver::kSpare)
    ask.elsewhere_bytes = base::add_saturated(ask.elsewhere_bytes, ranges_.can_give(session, ask.commit));
  if (room_for_ == nullptr) return make_room(session, ask, base::host_now_ns());
  const sched::SessionClass cls = session.claim->counts_as;
  if (cls != sched::SessionClass::kGuaranteed)
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "room is being made for another session already"};
  const auto mine = std::count_if(room_line_.begin(), room_line_.end(),
                                  [&](const RoomWait& other) { return other.session == &session; });
  if (mine >= kMostRoomWaits)
    return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
            base::format("session '%s' waits for room %zd times already", session.name.c_str(), mine)};
  const auto in_line = [](const RoomWait& wait) {
    return sched::InLine{wait.session->claim->counts_as,
                         wait.ask.commit ? sched::Use::kCommit : sched::Use::kAllocation};
  };
  const RoomWait wait{&session, ask};
  room_line_.insert(std::find_if(room_line_.begin(), room_line_.end(),
                                 [&](const RoomWait& other) {
                                   return sched::served_before(in_line(wait), in_line(other));
                                 }),
                    wait);
  return {};
}

void SharedDevice::tell_room(RemoteSession& session) {
  session.has_room = true;
  session.room_told_ns = base::host_now_ns();
  tell(session, MessageType::kRoomMade);
}

void SharedDevice::room_used(RemoteSession& session, uint64_t now_ns) {
  session.has_room = false;
  if (room_for_ != nullptr && room_for_->claim == session.claim)
    return;  // it is being made for another member
  const auto& members = session.claim->members;
  // The scheduler keeps room for the claim, and so for each of its members.
  if (std::none_of(members.begin(), members.end(), [](const auto& member) { return member->has_room; }))
    scheduler_.room_used(session.claim->id, now_ns);
}

void SharedDevice::give_up_room(RemoteSession& session, uint64_t now_ns) {
  std::erase_if(room_line_, [&](const RoomWait& wait) { return wait.session == &session; });
  const bool is_made = room_for_ == &session;
  if (!is_made && !session.has_room) return;
  if (is_made) {
    room_for_ = nullptr;
    room_until_ns_ = 0;
    room_victims_.clear();
  }
  room_used(session, now_ns);
  next_room(now_ns);
}

void SharedDevice::next_room(uint64_t now_ns) {
  while (room_for_ == nullptr && !room_line_.empty()) {
    const RoomWait first = room_line_.front();
    room_line_.pop_front();
    // Without room it asks again, and is refused.
    if (!make_room(*first.session, first.ask, now_ns).ok()) tell_room(*first.session);
  }
}

base::Status SharedDevice::make_room(RemoteSession& session, const sched::RoomAsk& ask, uint64_t now_ns) {
  take_back_offers();
  const Claim& claim = *session.claim;
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
  if (!drains && !room_for_lower_) return start_room(session, ask, now_ns);
  room_for_ = &session;
  room_ask_ = ask;
  room_until_ns_ = now_ns + (room_for_lower_ ? sched::kBoundaryWaitNs : sched::kRoomWaitNs);
  return {};
}

base::Status SharedDevice::start_room(RemoteSession& session, const sched::RoomAsk& ask, uint64_t now_ns) {
  room_free_bytes_ = base::add_saturated(free_bytes(scheduler_), ask.bytes);
  if (!scheduler_.make_room(session.claim->id, ask, now_ns)) {
    // Sessions on their way out give more than whoever had them paged out has waited for.
    if (ask.from == sched::Giver::kSessions)
      for (const auto& [id, other] : claims_)
        if (other->goes_out()) room_victims_.push_back(id);
    if (room_victims_.empty())
      return {GPUSHARE_DEVICE_OUT_OF_MEMORY, "no session may be paged out for this one"};
  }
  room_for_ = &session;
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
  if (now_ns < room_until_ns_ && std::any_of(holders_.begin(), holders_.end(), [&](const Claim* holder) {
        return holder != nullptr && holder != room_for_->claim && holder->wanted_since_ns != 0 &&
               may_give(*holder, room_ask_) &&
               (!room_for_lower_ || holder->counts_as == sched::SessionClass::kOpportunistic);
      }))
    return;
  room_until_ns_ = 0;
  RemoteSession& session = *std::exchange(room_for_, nullptr);
  // Without room it asks again, and is refused.
  if (!start_room(session, room_ask_, now_ns).ok()) tell_room(session);
  next_room(now_ns);
}

// Page-outs may go on when there is enough: what they give after that is for others.
void SharedDevice::room_part() {
  if (room_for_ == nullptr || room_until_ns_ != 0 || free_bytes(scheduler_) < room_free_bytes_) return;
  room_victims_.clear();
  room_step(0);
}

void SharedDevice::room_step(uint64_t victim) {
  std::erase(room_victims_, victim);
  if (room_for_ == nullptr || room_until_ns_ != 0 || !room_victims_.empty()) return;
  tell_room(*std::exchange(room_for_, nullptr));
  next_room(base::host_now_ns());
}

}  // namespace gpushare::daemon
