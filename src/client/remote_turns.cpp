// Turns: which sessions want one, leases that come and go, and what the daemon's events ask the executor to do next.
// SPDX-License-Identifier: Apache-2.0
#include "client/remote_authority.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/clock.hpp"

namespace gpushare::client {

using sched::Action;
using sched::ActionKind;
using sched::kNoLane;
using sched::LaneId;
using sched::SessionId;

void RemoteAuthority::mark(Record& record) {
  if (!std::exchange(record.dirty, true)) dirty_.push_back(&record);
}

void RemoteAuthority::unmark(Record& record) {
  if (std::exchange(record.dirty, false)) std::erase(dirty_, &record);
}

void RemoteAuthority::set_turn(Record& record, Turn turn) {
  const bool wanted = record.wants_turn();
  record.turn = turn;
  if (wanted == record.wants_turn()) return;
  if (!wanted) {
    record.wanting_at = wanting_.size();
    wanting_.push_back(&record);
  } else {
    wanting_.back()->wanting_at = record.wanting_at;
    wanting_[record.wanting_at] = wanting_.back();
    wanting_.pop_back();
  }
}

std::optional<std::span<const LaneId>> RemoteAuthority::lanes_to_ask() const {
  asked_lanes_.clear();
  for (const Record* record : wanting_)
    if (record->lane != kNoLane) asked_lanes_.push_back(record->lane);
  return asked_lanes_;
}

void RemoteAuthority::ready(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->wants_turn()) return;
  set_turn(*record, Turn::kWanted);
  if (record->bytes != Bytes::kDropping) record->worth_ns.reset();  // as the daemon's scheduler does
  // With the turn in hand there is nothing to ask for: pick() looks again.
  if (record->epoch == 0 || record->bytes != Bytes::kResident) mark(*record);
}

void RemoteAuthority::not_ready(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || !record->wants_turn()) return;
  const bool asked = record->turn == Turn::kAsked;
  set_turn(*record, Turn::kNone);
  if (asked) tell(MessageType::kNotReady, *record);
  accept_unwanted(*record);
}

// The daemon hears of it with the question for a turn: whoever has the turn in hand tells nothing.
void RemoteAuthority::set_worth(SessionId session, double worth, uint64_t until_ns) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->worth = worth;
  record->worth_until_ns = until_ns;
  if (record->turn == Turn::kAsked && record->is_known()) tell_next_worth(*record);
}

void RemoteAuthority::tell_next_worth(const Record& record) {
  auto message = make_message<MessageType::kSetWorth>();
  message.session = record.spec.id;
  message.worth = record.worth;
  message.until_ns = record.worth_until_ns;
  send(bytes_of(message));
}

// A turn came for an iteration that is not there any more.
void RemoteAuthority::accept_unwanted(Record& record) {
  if (record.wants_turn() || record.in_flight > 0 || !record.is_known() || !gone_.ok()) return;
  const Lease::Word now = lease(record).look();
  if (now.epoch == record.epoch || now.state == LeaseState::kFree || now.state == LeaseState::kIdle) return;
  record.epoch = now.epoch;
  give_back(record);
}

// The daemon wants the turn back. A turn that the daemon took back before this process had seen it is over, and only
// this process can say so.
void RemoteAuthority::say_unseen_returned(Record& record) {
  if (record.in_flight > 0 || !record.is_known() || !gone_.ok()) return;
  const Lease::Word now = lease(record).look();
  if (now.epoch == record.epoch || now.state != LeaseState::kFree) return;
  record.epoch = 0;
  if (record.wants_turn()) record.turn = Turn::kWanted;
  record.returned = true;
  mark(record);
}

void RemoteAuthority::dispatched(SessionId session, LaneId, uint64_t, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  set_turn(*record, Turn::kNone);
  record->worth = 0;
  if (record->in_flight++ == 0) count_shared(*record, true);
  if (record->is_known()) lease(*record).set_looks(true);
}

void RemoteAuthority::finished(SessionId session, uint64_t device_ns, uint64_t, uint64_t iterations) {
  Record* record = find(session);
  if (record == nullptr || record->in_flight == 0) return;
  --record->in_flight;
  if (record->is_known()) lease(*record).account(device_ns, iterations);
  if (record->in_flight > 0) return;
  count_shared(*record, false);
  if (record->bytes == Bytes::kDraining) page_out_when_drained(*record);
  if (record->is_known()) give_back(*record);
}

void RemoteAuthority::note_iteration(SessionId session, uint64_t device_ns, uint64_t waited_ns) {
  if (const Record* record = find(session); record != nullptr && record->is_known())
    lease(*record).histogram().add(device_ns, waited_ns);
}

void RemoteAuthority::note_requests(SessionId session, const base::RequestCounts& counts) {
  if (const Record* record = find(session); record != nullptr && record->is_known())
    lease(*record).requests().set(counts);
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
    if (record.worth == 0) connection_->page->pass_on(mine);  // else the daemon is to know of it first
    break;
  }
  record.epoch = 0;
  record.returned = true;
  mark(record);
}

std::optional<SessionId> RemoteAuthority::pick(LaneId lane, uint64_t) {
  Record* record = lane < lanes_.size() ? lanes_[lane] : nullptr;
  if (record == nullptr || !record->wants_turn() || record->bytes != Bytes::kResident ||
      !record->is_known() || !gone_.ok())
    return std::nullopt;
  Lease& mine = lease(*record);
  const Lease::Word now = mine.look();
  if (now.epoch != record->epoch) {
    if (now.state == LeaseState::kBusy || now.state == LeaseState::kWanted) {
      record->epoch = now.epoch;
      record->turn = Turn::kWanted;
      return record->spec.id;
    }
  } else if (now.state == LeaseState::kBusy) {
    return record->spec.id;  // beside what is in flight
  } else if (now.state == LeaseState::kWanted) {
    return std::nullopt;  // when that has drained, the turn goes back, and this session waits for the next
  } else if (now.state == LeaseState::kIdle && base::host_now_ns() < mine.until_ns() &&
             mine.change(now, LeaseState::kBusy)) {
    record->turn = Turn::kWanted;
    return record->spec.id;
  }
  if (record->turn == Turn::kWanted) mark(*record);
  return std::nullopt;
}

bool RemoteAuthority::wants_drained(LaneId lane) const {
  const Record* record = lane < lanes_.size() ? lanes_[lane] : nullptr;
  if (record == nullptr || record->in_flight == 0) return false;
  if (!gone_.ok()) return record->pieces != nullptr;  // the process connects again once it has ended
  if (!record->is_known()) return false;
  Lease& mine = lease(*record);
  mine.set_looks(
      false);  // the host's part of the iteration is over, so nobody looks at the lease until the device's is, too
  // Under another epoch the turn was taken back, and the daemon waits for the iteration's end.
  const Lease::Word now = mine.look();
  return record->bytes == Bytes::kDraining || now.state == LeaseState::kWanted ||
         now.epoch != record->epoch || record->told_work > 0;  // the daemon is to hear of the end at once
}

std::shared_ptr<base::Bell> RemoteAuthority::bell(SessionId session) const {
  const Record* record = find(session);
  if (record == nullptr || !record->is_known() || !gone_.ok()) return nullptr;
  return {connection_->page, &lease(*record).bell()};
}

void RemoteAuthority::flush() {
  for (size_t i = 0; i < dirty_.size(); ++i) {
    Record& record = *dirty_[i];
    if (!record.is_known()) continue;
    const bool ask = record.turn == Turn::kWanted && record.in_flight == 0;
    if (ask) record.turn = Turn::kAsked;
    if ((ask || record.returned) && record.worth > 0) tell_next_worth(record);
    if (std::exchange(record.returned, false))
      tell(MessageType::kReturned, record, ask ? 1 : 0);
    else if (ask)
      tell(MessageType::kReady, record);
  }
  for (Record* record : dirty_) record->dirty = false;
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
#define GPUSHARE_CASE_CALL(name, handler)
#define GPUSHARE_CASE_EVENT(name, handler)
#define GPUSHARE_CASE_ANSWER(name, handler)
#define GPUSHARE_CASE_NEWS(name, handler) \
  case MessageType::k##name:              \
    return on_##handler(*record, event);
#define GPUSHARE_CASE(name, fields, kind, handler) GPUSHARE_CASE_##kind(name, handler)
    GPUSHARE_MESSAGES(GPUSHARE_CASE)
#undef GPUSHARE_CASE
#undef GPUSHARE_CASE_NEWS
#undef GPUSHARE_CASE_ANSWER
#undef GPUSHARE_CASE_EVENT
#undef GPUSHARE_CASE_CALL
    default:
      return;
  }
}

void RemoteAuthority::on_lane_here(Record& record, Event& event) {
  take_piece(record, std::move(event.descriptors), event.value);
}

void RemoteAuthority::on_admit(Record& record, Event&) {
  if (record.lane != kNoLane) return;  // declared anew: it has kept its place
  if (record.bytes == Bytes::kOut) return start_page_in(record);
  if (record.bytes != Bytes::kWaiting && record.bytes != Bytes::kResident) return;
  open_lane(record);
  record.bytes = Bytes::kResident;
  actions_.push_back({ActionKind::kAdmit, record.lane, record.spec.id, record.spec.persistent_bytes});
  mark(record);
}

void RemoteAuthority::on_page_out(Record& record, Event&) {
  if (record.bytes == Bytes::kResident) page_out_when_drained(record);
}

void RemoteAuthority::on_page_in(Record& record, Event&) {
  if (record.bytes == Bytes::kOut) start_page_in(record);
}

void RemoteAuthority::on_turn_back(Record& record, Event&) {
  if (record.bytes == Bytes::kComing)
    actions_.push_back({ActionKind::kTurnBack, record.lane, record.spec.id, record.spec.persistent_bytes});
}

void RemoteAuthority::on_granted(Record& record, Event&) {
  accept_unwanted(record);
}

void RemoteAuthority::on_wanted(Record& record, Event&) {
  say_unseen_returned(record);  // of a turn under way, wants_drained() sees it in the lease
}

void RemoteAuthority::on_room_made(Record& record, Event&) {
  record.room_pending = false;
  // Members of a group hear of each other's rooms.
  if (record.rooms_coming == 0 || --record.rooms_coming > 0) return;
  // The daemon keeps what it has made until it hears of it.
  if (record.room_users.empty()) tell(MessageType::kRoomUsed, record);
}

void RemoteAuthority::on_range_give(Record& record, Event& event) {
  ranges_asked_.push_back({record.spec.id, event.value});
}

void RemoteAuthority::on_range_given(Record&, Event&) {}  // the driver looks again, as at any news

void RemoteAuthority::on_counts_as(Record& record, Event& event) {
  if (event.value > static_cast<uint64_t>(sched::SessionClass::kOpportunistic)) return;
  set_terms(record, static_cast<sched::SessionClass>(event.value), record.limit_bytes);
}

void RemoteAuthority::on_limit(Record& record, Event& event) {
  set_terms(record, record.counts_as, event.value);
}

std::vector<Action> RemoteAuthority::take_actions() {
  take_events();
  if (!dirty_.empty()) flush();
  return std::exchange(actions_, {});
}

}  // namespace gpushare::client
