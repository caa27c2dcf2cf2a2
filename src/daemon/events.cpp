// The events that processes tell of their sessions: one function for each message of kind EVENT (client/wire.hpp).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <utility>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {

using base::host_now_ns;
using client::Lease;
using client::LeaseState;
using client::MessageType;
using client::SessionMessage;

void SharedDevice::handle(RemoteSession& session, MessageType type, std::span<const std::byte> message,
                          const Request& request) {
  take_back_offers();
  switch (type) {
#define GPUSHARE_CASE_CALL(name, fields, handler)
#define GPUSHARE_CASE_ANSWER(name, fields, handler)
#define GPUSHARE_CASE_NEWS(name, fields, handler)
#define GPUSHARE_CASE_EVENT(name, fields, handler) \
  case MessageType::k##name:                       \
    return on_##handler(session, client::fields_of<client::fields>(message), request);
#define GPUSHARE_CASE(name, fields, kind, handler) GPUSHARE_CASE_##kind(name, fields, handler)
    GPUSHARE_MESSAGES(GPUSHARE_CASE)
#undef GPUSHARE_CASE
#undef GPUSHARE_CASE_CALL
#undef GPUSHARE_CASE_ANSWER
#undef GPUSHARE_CASE_NEWS
#undef GPUSHARE_CASE_EVENT
    default:
      return;
  }
}

void SharedDevice::on_need(RemoteSession& session, const client::Need& message, const Request& request) {
  request.answer(need(session, message));
}

void SharedDevice::on_room(RemoteSession& session, const client::Room& message, const Request& request) {
  using sched::Giver;
  const auto from = static_cast<Giver>(std::min(message.from, uint32_t{sched::kGivers}));
  const sched::RoomAsk ask{from, message.bytes, message.elsewhere_bytes, message.commit != 0};
  if (from == Giver::kRanges) return ranges_.ask(session, ask, request);
  // Nobody would give any, and so nobody would end the making of it.
  if (ask.bytes == 0)
    return request.answer({GPUSHARE_INVALID_ARGUMENT, "room of 0 bytes; ask for the bytes that are missing"});
  request.answer(from == Giver::kSpare || from == Giver::kSessions
                     ? make_room(session, ask)
                     : base::Status(GPUSHARE_INVALID_ARGUMENT, "the daemon does not ask such a giver"));
}

void SharedDevice::on_ready(RemoteSession& session, const SessionMessage&, const Request&) {
  const uint64_t now_ns = host_now_ns();
  if (session.leased()) {  // the process let the lease run out, and still has it
    lease(session).extend(now_ns + kLeaseGoodNs);
    tell(session, MessageType::kGranted);
  } else if (!session.overdue()) {
    now_ready(session, now_ns);
  }
}

void SharedDevice::on_not_ready(RemoteSession& session, const SessionMessage&, const Request&) {
  not_ready(session, host_now_ns());
  if (session.leased())
    tell(session, MessageType::kGranted);  // passed to it meanwhile: its process returns it
}

void SharedDevice::on_returned(RemoteSession& session, const SessionMessage& message, const Request&) {
  const uint64_t now_ns = host_now_ns();
  const Lease::Word word = lease(session).look();
  if (session.leased() && (word.epoch != session.epoch || word.state == LeaseState::kFree))
    member_done(session, now_ns);
  if (session.overdue()) {
    set_overdue(session, false);
    images_.let_go(session);
  }
  if (message.value != 0 && !session.leased()) now_ready(session, now_ns);
}

void SharedDevice::on_wake(RemoteSession& session, const SessionMessage&, const Request&) {
  scheduler_.wake(session.claim->id, host_now_ns());
}

void SharedDevice::on_allow_paging(RemoteSession& session, const SessionMessage&, const Request&) {
  scheduler_.allow_paging(session.claim->id, host_now_ns());
}

void SharedDevice::on_leave(RemoteSession& session, const SessionMessage&, const Request&) {
  remove(session);
}

void SharedDevice::on_unplaced(RemoteSession& session, const SessionMessage&, const Request&) {
  Claim& claim = *session.claim;
  if (claim.group != 0) return;  // it has no lane of its own
  unplace(claim, host_now_ns());
  room_part();
  room_step(claim.id);
}

void SharedDevice::on_page_done(RemoteSession& session, const SessionMessage&, const Request&) {
  if (!session.pages()) return;
  session.move = session.claim->goes_out() ? RemoteSession::Move::kOut : RemoteSession::Move::kHere;
  paged(*session.claim, true, host_now_ns());
}

void SharedDevice::on_page_out_failed(RemoteSession& session, const SessionMessage&, const Request&) {
  if (!session.pages()) return;
  session.move = session.begun() ? RemoteSession::Move::kOut : RemoteSession::Move::kHere;
  paged(*session.claim, false, host_now_ns());
}

void SharedDevice::on_page_part(RemoteSession& session, const SessionMessage& message, const Request&) {
  Claim& claim = *session.claim;
  if (!session.pages() || !claim.goes_out()) return;
  session.move = RemoteSession::Move::kParts;
  claim.part_bytes = base::add_saturated(claim.part_bytes, message.value);
  give_parts(claim, host_now_ns());
}

void SharedDevice::on_room_used(RemoteSession& session, const SessionMessage&, const Request&) {
  room_used(session, host_now_ns());
}

void SharedDevice::on_set_priority(RemoteSession& session, const SessionMessage& message, const Request&) {
  const auto priority = static_cast<int32_t>(static_cast<int64_t>(message.value));
  scheduler_.set_priority(session.claim->id, options_.ranks.priority(priority), host_now_ns());
}

void SharedDevice::on_set_class(RemoteSession& session, const SessionMessage& message, const Request&) {
  if (message.value > static_cast<uint64_t>(sched::SessionClass::kOpportunistic)) return;
  session.cls = static_cast<sched::SessionClass>(message.value);
  refresh_class(*session.claim, host_now_ns());
  gates_.set_class(session.at_gates, guaranteed_at_gates(session), host_now_ns());
  tell_gates();
}

void SharedDevice::on_set_weight(RemoteSession& session, const SessionMessage& message, const Request&) {
  Claim& claim = *session.claim;
  const double weight = options_.ranks.weight(std::bit_cast<double>(message.value));
  if (!std::isfinite(weight) || weight <= 0) return;
  claim.weight = weight;
  gates_.set_weight(session.at_gates, weight);
  if (claim.limits != nullptr && claim.limits->weight > 0)
    divide_weight(claim.limits.get(), host_now_ns());
  else
    scheduler_.set_weight(claim.id, weight);
}

void SharedDevice::on_set_cap(RemoteSession& session, const SessionMessage& message, const Request&) {
  const auto share = std::bit_cast<double>(message.value);
  if (sched::TimeCap::valid(share)) set_cap(session, share, host_now_ns());
}

void SharedDevice::on_set_remaining(RemoteSession& session, const SessionMessage& message, const Request&) {
  scheduler_.set_remaining(session.claim->id, message.value, host_now_ns());
}

void SharedDevice::on_set_worth(RemoteSession& session, const client::Worth& message, const Request&) {
  scheduler_.set_worth(session.claim->id, message.worth, message.until_ns);
}

void SharedDevice::on_set_spare(RemoteSession& session, const SessionMessage& message, const Request&) {
  const auto worth_ns = std::bit_cast<double>(message.value);
  if (session.claim->group == 0)
    (void)scheduler_.set_spare(session.claim->id, worth_ns >= 0 ? std::optional(worth_ns) : std::nullopt,
                               host_now_ns());
}

void SharedDevice::on_set_link(RemoteSession&, const SessionMessage& message, const Request&) {
  if (!images_.link_measured()) scheduler_.set_link(std::bit_cast<double>(message.value));
}

void SharedDevice::on_gate_open(RemoteSession& session, const SessionMessage&, const Request&) {
  if (guaranteed_at_gates(session)) return;  // it has not heard yet of what it counts as
  gates_.open(session.at_gates, lease(session).gate(), session.claim->weight, host_now_ns());
  tell_gates();
  tell(session, MessageType::kGateAsks, gates_.asks() ? 1 : 0);
}

// A session is of the better of its own class and of that as which it counts.
bool SharedDevice::guaranteed_at_gates(const RemoteSession& session) const {
  return session.cls == sched::SessionClass::kGuaranteed ||
         scheduler_.class_for_bytes(session.claim->id) == sched::SessionClass::kGuaranteed;
}

// Only the iterations of a guaranteed session that has a turn hold others up.
void SharedDevice::on_work_began(RemoteSession& session, const client::Work& message, const Request&) {
  if (!guaranteed_at_gates(session) || !session.leased()) return;
  gates_.began(session.at_gates, message.target, message.at_ns, host_now_ns());
  tell_gates();
}

void SharedDevice::on_work_ended(RemoteSession& session, const client::Work& message, const Request&) {
  gates_.ended(session.at_gates, message.device_ns, message.at_ns, host_now_ns());
}

void SharedDevice::on_image_open(RemoteSession& session, const client::ImageOpen& message,
                                 const Request& request) {
  images_.open(request.process, session, message);
}

void SharedDevice::on_range_has(RemoteSession& session, const client::RangeHas& message, const Request&) {
  ranges_.set(session, message);
}

void SharedDevice::on_range_answer(RemoteSession& session, const SessionMessage& message, const Request&) {
  ranges_.answer(session, message.value);
}

}  // namespace gpushare::daemon
