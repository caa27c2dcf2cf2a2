// The sessions of this process as the daemon knows them.
// SPDX-License-Identifier: Apache-2.0
#include "client/remote_authority.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace gpushare::client {

using sched::Action;
using sched::kNoLane;
using sched::LaneId;
using sched::SessionId;
using sched::SessionSpec;
using sched::SessionState;
using sched::SessionView;

RemoteAuthority::~RemoteAuthority() {
  stop();
  images_->connected({});  // the images hold the connection open for as long as they have it
}

RemoteAuthority::Record* RemoteAuthority::find(SessionId session) {
  const auto found = sessions_.find(session);
  return found == sessions_.end() || found->second->bytes == Bytes::kEnding ? nullptr : found->second.get();
}

const RemoteAuthority::Record* RemoteAuthority::find(SessionId session) const {
  const auto found = sessions_.find(session);
  return found == sessions_.end() || found->second->bytes == Bytes::kEnding ? nullptr : found->second.get();
}

base::Status RemoteAuthority::arrive(const SessionSpec& spec, uint64_t) {
  GPUSHARE_RETURN_IF_ERROR(await_daemon(nullptr));
  if (spec.compute_units > 0)
    return {GPUSHARE_UNSUPPORTED,
            "session '" + spec.name +
                "': sessions of a shared device have no compute units of their own: leave "
                "compute_units 0"};
  for (;;) {
    auto record = std::make_shared<Record>();
    record->spec = spec;
    record->spec.persistent_bytes = steps_.round_up(spec.persistent_bytes);
    record->spec.ephemeral_bytes = rounded_ephemeral(spec.ephemeral_bytes);
    record->counts_as = spec.cls;
    sessions_.emplace(spec.id, record);
    const base::Status answer =
        await(declare(*record, spec.may_queue, [this, of = record.get()](const base::Status& declared) {
          if (declared.ok() || of->bytes == Bytes::kEnding) return;
          forget(*of);
        }));
    if (answer.ok() || gone_.ok()) return answer;
    GPUSHARE_RETURN_IF_ERROR(await_daemon(nullptr));
  }
}

void RemoteAuthority::wake(SessionId session, uint64_t) {
  if (Record* record = find(session)) tell(MessageType::kWake, *record);
}

void RemoteAuthority::allow_paging(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->spec.may_page = true;
  tell(MessageType::kAllowPaging, *record);
}

void RemoteAuthority::forget(Record& record) {
  if (record.gate != nullptr) record.gate->set(nullptr);
  unmark(record);
  set_turn(record, Turn::kNone);
  sessions_.erase(record.spec.id);
}

void RemoteAuthority::leave(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  set_turn(*record, Turn::kNone);
  if (record->gate != nullptr) record->gate->set(nullptr);  // its slot will be another session's
  (void)end_page_in(*record);
  std::erase_if(actions_, [session](const Action& action) { return action.session == session; });
  close_lane(*record, Bytes::kEnding);
}

void RemoteAuthority::set_priority(SessionId session, int32_t priority, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->spec.priority = priority;
  tell(MessageType::kSetPriority, *record, static_cast<uint64_t>(static_cast<int64_t>(priority)));
}

void RemoteAuthority::set_class(SessionId session, sched::SessionClass cls, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->spec.cls == cls) return;
  record->spec.cls = record->counts_as = cls;
  tell(MessageType::kSetClass, *record, static_cast<uint64_t>(cls));
  tell_gate(*record);
}

void RemoteAuthority::set_terms(Record& record, sched::SessionClass cls, uint64_t limit_bytes) {
  limit_bytes = limit_bytes > 0 ? std::max(limit_bytes / steps_.large, uint64_t{1}) * steps_.large : 0;
  if (record.counts_as == cls && record.limit_bytes == limit_bytes) return;
  record.counts_as = cls;
  record.limit_bytes = limit_bytes;
  actions_.push_back({sched::ActionKind::kTerms, kNoLane, record.spec.id, limit_bytes, 0, cls});
  tell_gate(record);
}

std::shared_ptr<sched::GateLink> RemoteAuthority::open_gate(SessionId session) {
  Record* record = find(session);
  if (record == nullptr) return std::make_shared<sched::GateLink>();
  if (record->gate == nullptr) record->gate = std::make_shared<sched::GateLink>();
  tell_gate(*record);
  return record->gate;
}

void RemoteAuthority::tell_gate(Record& record) {
  const bool guaranteed = record.spec.cls == sched::SessionClass::kGuaranteed ||
                          record.counts_as == sched::SessionClass::kGuaranteed;
  if (record.gate == nullptr || guaranteed || !record.is_known() || !gone_.ok()) return;
  // The gate says first what it knows of its launches. Until the daemon answers they ask, and find no limit.
  record.gate->set({connection_->page, &lease(record).gate()});
  record.gate->set_asks(true);
  tell(MessageType::kGateOpen, record);
}

void RemoteAuthority::on_gate_asks(Record& record, Event& event) {
  if (record.gate != nullptr) record.gate->set_asks(event.value != 0);
}

void RemoteAuthority::tell_work(MessageType type, const Record& record, uint64_t device_ns, double target) {
  auto message = make_message<MessageType::kWorkBegan>();
  message.header.type = static_cast<uint16_t>(type);
  message.session = record.spec.id;
  message.at_ns = base::host_now_ns();
  message.device_ns = device_ns;
  message.target = target;
  send(bytes_of(message));
}

void RemoteAuthority::work_began(SessionId session, bool guaranteed, double target) {
  Record* record = find(session);
  if (record == nullptr) return;
  const bool watched = guaranteed && record->is_known() && gone_.ok() && connection_->page->watched();
  if (watched && record->later_untold_work == 0) {
    ++record->told_work;
    return tell_work(MessageType::kWorkBegan, *record, 0, target);
  }
  ++(record->told_work == 0 ? record->untold_work : record->later_untold_work);
}

void RemoteAuthority::work_ended(SessionId session, uint64_t device_ns) {
  Record* record = find(session);
  if (record == nullptr) return;
  if (record->untold_work > 0) {
    --record->untold_work;
  } else if (record->told_work > 0) {
    if (--record->told_work == 0) record->untold_work = std::exchange(record->later_untold_work, 0);
    tell_work(MessageType::kWorkEnded, *record, device_ns, 0);
  }
}

void RemoteAuthority::set_weight(SessionId session, double weight) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->spec.weight = weight;
  tell(MessageType::kSetWeight, *record, std::bit_cast<uint64_t>(weight));
}

void RemoteAuthority::set_remaining(SessionId session, uint64_t remaining_ns, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  record->spec.remaining_ns = remaining_ns;
  tell(MessageType::kSetRemaining, *record, remaining_ns);
}

SessionState RemoteAuthority::state(SessionId session) const {
  const Record* record = find(session);
  return record == nullptr ? SessionState::kQueued : state_of(*record);
}

SessionState RemoteAuthority::state_of(const Record& record) {
  switch (record.bytes) {
    case Bytes::kWaiting:
    case Bytes::kUnplaced:
    case Bytes::kEnding:
      return SessionState::kQueued;
    case Bytes::kResident:
    case Bytes::kDraining:
      return SessionState::kResident;
    default:
      return SessionState::kPagedOut;
  }
}

size_t RemoteAuthority::paged_out() const {
  return static_cast<size_t>(std::count_if(sessions_.begin(), sessions_.end(), [](const auto& each) {
    return state_of(*each.second) == SessionState::kPagedOut;
  }));
}

LaneId RemoteAuthority::lane_of(SessionId session) const {
  const Record* record = find(session);
  return record == nullptr || record->closes() ? kNoLane : record->lane;
}

SessionView RemoteAuthority::view(SessionId session) const {
  SessionView view;
  const Record* record = find(session);
  if (record == nullptr) return view;
  view.id = session;
  view.cls = record->counts_as;
  view.priority = record->spec.priority;
  view.weight = record->spec.weight;
  view.remaining_ns = record->spec.remaining_ns;
  view.persistent_bytes = record->spec.persistent_bytes;
  view.ephemeral_bytes = record->spec.ephemeral_bytes;
  view.in_flight = record->in_flight;
  return view;
}

// The policy is the daemon's, so the order within the process goes by class and priority.
std::vector<sched::Claim> RemoteAuthority::claims_on(std::span<const sched::Part> parts, uint64_t) const {
  std::vector<std::pair<bool, int32_t>> order;
  for (const sched::Part& part : parts) {
    const SessionView view = this->view(part.session);
    order.emplace_back(view.cls == sched::SessionClass::kGuaranteed, view.priority);
  }
  auto ranks = order;
  std::sort(ranks.begin(), ranks.end());
  std::vector<sched::Claim> claims;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto rank = std::lower_bound(ranks.begin(), ranks.end(), order[i]) - ranks.begin();
    claims.push_back({parts[i].bytes, static_cast<uint32_t>(rank),
                      2 * link_ns_per_byte_ * static_cast<double>(parts[i].bytes), true});
  }
  return claims;
}

std::string RemoteAuthority::coordinated_wait(SessionId) const {
  return gone_.message();
}

std::string RemoteAuthority::check() const {
  for (LaneId lane = 0; lane < lanes_.size(); ++lane)
    if (lanes_[lane] != nullptr && lanes_[lane] != &given_up_ && lanes_[lane]->lane != lane)
      return "a lane and its session disagree";
  return {};
}

}  // namespace gpushare::client
