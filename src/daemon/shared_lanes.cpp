// Lanes that processes of one device share: the bytes that sessions need of them, the memory that is sent, and lanes
// that are held up.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/saturate.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {

using client::MessageType;

namespace {

constexpr uint64_t kRetryNs = 1'000'000'000;  // after a session found no place on the device

}  // namespace

uint64_t SharedDevice::lane_need(uint64_t ephemeral_bytes) const {
  const uint64_t piece = lanes_->piece_bytes(), rest = ephemeral_bytes % piece;
  return rest == 0 ? ephemeral_bytes : base::add_saturated(ephemeral_bytes, piece - rest);
}

uint64_t SharedDevice::bytes_on_device(const Claim& claim) const {
  return base::add_saturated(claim.persistent_bytes,
                             claim.shares_lane ? lane_need(claim.ephemeral_bytes) : claim.ephemeral_bytes);
}

base::Status SharedDevice::set_need(Claim& claim, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                                    uint64_t now_ns) {
  GPUSHARE_RETURN_IF_ERROR(
      claim.shares_lane
          ? scheduler_.set_need(claim.id, persistent_bytes, lane_need(ephemeral_bytes), now_ns)
          : scheduler_.set_need(claim.id, base::add_saturated(persistent_bytes, ephemeral_bytes), 0, now_ns));
  claim.persistent_bytes = persistent_bytes;
  claim.ephemeral_bytes = ephemeral_bytes;
  if (claim.shares_lane) {  // the process has unmapped what is above
    size_t& pieces = claim.members.front()->pieces;
    pieces = std::min(pieces, static_cast<size_t>(lane_need(ephemeral_bytes) / lanes_->piece_bytes()));
  }
  return {};
}

void SharedDevice::size_lane(sched::LaneId lane, uint64_t bytes) {
  if (lanes_ == nullptr || (bytes == 0 && lanes_->bytes(lane) == 0)) return;
  const base::Status sized = lanes_->resize(lane, bytes, scheduler_.trust_group_of(lane));
  if (!sized.ok()) base::log(base::kWarning, sized.with_context("daemon").to_string());
  scheduler_.lane_applied(lane, lanes_->bytes(lane), base::host_now_ns());
}

bool SharedDevice::send_lane(Claim& claim) {
  if (!claim.shares_lane) return true;
  const uint64_t needed = lane_need(claim.ephemeral_bytes);
  if (lanes_->bytes(claim.lane) < needed) return false;
  RemoteSession& session = *claim.members.front();
  for (; session.pieces * lanes_->piece_bytes() < needed; ++session.pieces) {
    const int descriptor = lanes_->descriptor(claim.lane, session.pieces);
    const auto message =
        client::make_session_message(MessageType::kLaneHere, session.number, lanes_->piece_bytes());
    if (!send_to(*session.process, client::bytes_of(message), std::span<const int>(&descriptor, 1)))
      client::shut(session.process->socket);
  }
  return true;
}

void SharedDevice::leave_lane(Claim& claim) {
  RemoteSession& session = *claim.members.front();
  session.pieces = 0;
  claim.lane = sched::kNoLane;
}

void SharedDevice::unplace(Claim& claim, uint64_t now_ns) {
  leave_lane(claim);
  if (claim.comes_in()) claim.bytes = Claim::Bytes::kOut;
  retry_ns_ = now_ns + kRetryNs;
  scheduler_.unplaced(claim.id, now_ns);
}

void SharedDevice::set_overdue(RemoteSession& session, bool overdue) {
  session.turn = overdue ? RemoteSession::Turn::kOverdue : RemoteSession::Turn::kNone;
  const auto& members = session.claim->members;
  scheduler_.set_overdue(
      session.claim->id,
      std::any_of(members.begin(), members.end(), [](const auto& each) { return each->overdue(); }),
      base::host_now_ns());
}

}  // namespace gpushare::daemon
