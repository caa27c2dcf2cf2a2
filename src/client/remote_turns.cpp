// Turns: which sessions want one, leases that come and go, and what the daemon's events ask the executor to do next.
// SPDX-License-Identifier: Apache-2.0
#include "client/remote_authority.hpp"

#include <optional>
#include <utility>

#include "base/clock.hpp"

namespace gpushare::client {

using sched::Action;
using sched::ActionKind;
using sched::kNoLane;
using sched::LaneId;
using sched::SessionId;
using sched::SessionState;

void RemoteAuthority::mark(Record& record) {
  if (record.dirty) return;
  record.dirty = true;
  dirty_.push_back(&record);
}

void RemoteAuthority::ready(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->ready) return;
  record->ready = true;
  if (!record->dropping) record->worth_ns.reset();  // as the daemon's scheduler does
  // With the turn in hand there is nothing to ask for: pick() looks again.
  if (record->epoch == 0 || record->state != SessionState::kResident) mark(*record);
}

void RemoteAuthority::not_ready(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || !record->ready) return;
  record->ready = false;
  if (record->asked) tell(MessageType::kNotReady, *record);
  record->asked = false;
  accept_unwanted(*record);
}

// A turn came for an iteration that is not there any more.
void RemoteAuthority::accept_unwanted(Record& record) {
  if (record.ready || record.in_flight > 0 || !record.declared || !gone_.ok()) return;
  const Lease::Word now = lease(record).look();
  if (now.epoch == record.epoch || now.state == LeaseState::kFree || now.state == LeaseState::kIdle) return;
  record.epoch = now.epoch;
  record.asked = false;
  give_back(record);
}

// The daemon wants the turn back. A turn that the daemon took back before this process had seen it is over, and only
// this process can say so.
void RemoteAuthority::say_unseen_returned(Record& record) {
  if (record.in_flight > 0 || !record.declared || !gone_.ok()) return;
  const Lease::Word now = lease(record).look();
  if (now.epoch == record.epoch || now.state != LeaseState::kFree) return;
  record.epoch = 0;
  record.asked = false;
  record.returned = true;
  mark(record);
}

void RemoteAuthority::dispatched(SessionId session, LaneId, uint64_t, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->ready = false;
  if (record->in_flight++ == 0) count_shared(*record, true);
  if (record->declared) lease(*record).set_looks(true);
}

void RemoteAuthority::finished(SessionId session, uint64_t device_ns, uint64_t, uint64_t iterations) {
  Record* record = find(session);
  if (record == nullptr || record->in_flight == 0) return;
  --record->in_flight;
  if (record->declared) lease(*record).account(device_ns, iterations);
  if (record->in_flight > 0) return;
  count_shared(*record, false);
  if (record->evict) page_out_when_drained(*record);
  if (record->declared) give_back(*record);
}

// The listening thread looks whether it may connect again.
void RemoteAuthority::count_shared(const Record& record, bool begins) {
  if (record.pieces == nullptr) return;
  if (begins)
    busy_in_shared_.fetch_add(1);
  else if (busy_in_shared_.fetch_sub(1) == 1 && !gone_.ok())
    poke();
}

// Nothing is in flight. Without others that want it the turn stays for the next iteration.
void RemoteAuthority::give_back(Record& record) {
  Lease& mine = lease(record);
  for (;;) {
    const Lease::Word now = mine.look();
    if (now.epoch != record.epoch || now.state == LeaseState::kFree) break;  // it was taken away
    if (now.state == LeaseState::kIdle) return;
    const bool wanted = now.state == LeaseState::kWanted;
    if (!mine.change(now, wanted ? LeaseState::kFree : LeaseState::kIdle)) continue;
    if (!wanted) return;
    connection_->page->pass_on(mine);
    break;
  }
  record.epoch = 0;
  record.returned = true;
  mark(record);
}

std::optional<SessionId> RemoteAuthority::pick(LaneId lane, uint64_t) {
  Record* record = lane < lanes_.size() ? lanes_[lane] : nullptr;
  if (record == nullptr || !record->ready || record->left || record->evict ||
      record->state != SessionState::kResident || !record->declared || !gone_.ok())
    return std::nullopt;
  Lease& mine = lease(*record);
  const Lease::Word now = mine.look();
  if (now.epoch != record->epoch) {
    if (now.state == LeaseState::kBusy || now.state == LeaseState::kWanted) {
      record->epoch = now.epoch;
      record->asked = false;
      return record->spec.id;
    }
  } else if (now.state == LeaseState::kBusy) {
    return record->spec.id;  // beside what is in flight
  } else if (now.state == LeaseState::kWanted) {
    return std::nullopt;  // when that has drained, the turn goes back, and this session waits for the next
  } else if (now.state == LeaseState::kIdle && base::host_now_ns() < mine.until_ns() &&
             mine.change(now, LeaseState::kBusy)) {
    record->asked = false;
    return record->spec.id;
  }
  if (!record->asked) mark(*record);
  return std::nullopt;
}

bool RemoteAuthority::wants_drained(LaneId lane) const {
  const Record* record = lane < lanes_.size() ? lanes_[lane] : nullptr;
  if (record == nullptr || record->in_flight == 0) return false;
  if (!gone_.ok()) return record->pieces != nullptr;  // the process connects again once it has ended
  if (!record->declared) return false;
  Lease& mine = lease(*record);
  mine.set_looks(
      false);  // the host's part of the iteration is over, so nobody looks at the lease until the device's is, too
  // Under another epoch the turn was taken back, and the daemon waits for the iteration's end.
  const Lease::Word now = mine.look();
  return record->evict || now.state == LeaseState::kWanted || now.epoch != record->epoch;
}

std::shared_ptr<base::Bell> RemoteAuthority::bell(SessionId session) const {
  const Record* record = find(session);
  if (record == nullptr || !record->declared || !gone_.ok()) return nullptr;
  return {connection_->page, &lease(*record).bell()};
}

void RemoteAuthority::flush() {
  for (size_t i = 0; i < dirty_.size(); ++i) {
    Record& record = *dirty_[i];
    record.dirty = false;
    if (!record.declared) continue;
    const bool ask = record.ready && !record.asked && record.in_flight == 0;
    if (std::exchange(record.returned, false)) {
      tell(MessageType::kReturned, record, ask ? 1 : 0);
      record.asked = record.asked || ask;
    } else if (ask) {
      record.asked = true;
      tell(MessageType::kReady, record);
    }
  }
  dirty_.clear();
}

void RemoteAuthority::take_events() {
  if (has_backlog_.load()) send_backlog();
  if (!inbox_full_.load(std::memory_order_acquire)) return;
  std::deque<Event> events;
  base::Status lost;
  std::shared_ptr<Connection> fresh;
  {
    base::MutexLock lock(inbox_mutex_);
    inbox_full_.store(false);
    events.swap(events_);
    lost = std::exchange(lost_, {});
    fresh = std::exchange(fresh_, nullptr);
  }
  if (fresh != nullptr) {
    events.clear();  // of the daemon before
    lose(lost.ok() ? base::Status(GPUSHARE_UNAVAILABLE, "the daemon was replaced") : lost);
    adopt(std::move(fresh));
  } else if (!lost.ok()) {
    lose(std::move(lost));
    return;
  }
  for (Event& event : events) handle(std::move(event));
}

void RemoteAuthority::handle(Event event) {
  if (event.reply != nullptr) return take_answer(*event.reply);
  Record* record = find(event.session);
  if (record == nullptr) return;
  if (record->questions > 0) {
    record->early.push_back(std::move(event));
    return;
  }
  switch (event.type) {
    case MessageType::kLaneHere:
      take_piece(*record, std::move(event.descriptors), event.value);
      return;
    case MessageType::kAdmit:
      if (std::exchange(record->declared_anew, false) && record->lane == kNoLane &&
          record->state == SessionState::kResident) {  // it gave its lane up, and has kept its place
        open_lane(*record);
        actions_.push_back(
            {ActionKind::kAdmit, record->lane, record->spec.id, record->spec.persistent_bytes});
        if (record->ready) mark(*record);
        return;
      }
      if (record->lane != kNoLane) return;
      if (record->state == SessionState::kPagedOut) return start_page_in(*record);
      open_lane(*record);
      record->state = SessionState::kResident;
      actions_.push_back({ActionKind::kAdmit, record->lane, record->spec.id, record->spec.persistent_bytes});
      return;
    case MessageType::kPageOut:
      if (record->state != SessionState::kResident || record->closing != Closing::kNone) return;
      page_out_when_drained(*record);
      return;
    case MessageType::kPageIn:
      if (record->lane == kNoLane && record->state == SessionState::kPagedOut) start_page_in(*record);
      return;
    case MessageType::kTurnBack:
      if (record->move == Move::kIn)
        actions_.push_back(
            {ActionKind::kTurnBack, record->lane, record->spec.id, record->spec.persistent_bytes});
      return;
    case MessageType::kGranted:
      accept_unwanted(*record);
      return;
    case MessageType::kWanted:
      say_unseen_returned(*record);  // of a turn under way, wants_drained() sees it in the lease
      return;
    case MessageType::kRoomMade:
      record->room_pending = false;
      return;
    case MessageType::kRangeGive:
      ranges_asked_.push_back({record->spec.id, event.value});
      return;
    case MessageType::kCountsAs:
      if (event.value > static_cast<uint64_t>(sched::SessionClass::kOpportunistic)) return;
      set_terms(*record, static_cast<sched::SessionClass>(event.value), record->limit_bytes);
      return;
    case MessageType::kLimit:
      set_terms(*record, record->counts_as, event.value);
      return;
    default:
      return;
  }
}

std::vector<Action> RemoteAuthority::take_actions() {
  take_events();
  if (!dirty_.empty()) flush();
  return std::exchange(actions_, {});
}

}  // namespace gpushare::client
