// Elastic ranges of processes. A session reports the bytes of its ranges that their owner can be asked for; the daemon
// treats them as one range. A session that finds no room and nobody to ask in its own process asks here, and the daemon
// asks other sessions by the rules of sched::ElasticRanges: by class and price, with the owner's own deadline. A
// session that does not answer keeps the bytes and counts as opportunistic until it gives some back. The session that
// asked is told its name. The daemon keeps the bytes that were given for a wait from other sessions with ranges for a
// while, because an owner that wants them back at once is faster than the process that must wake up first.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {

using client::MessageType;

namespace {

constexpr uint64_t kAskAgainNs = 50'000'000;           // those who declined are asked again so long after
constexpr uint64_t kKeptNs = 100'000'000;              // what was given for a wait is kept for it so long
constexpr uint64_t kLongestAnswerNs = 60'000'000'000;  // what a process may take for itself

}  // namespace

void SharedDevice::open_range(RemoteSession& session, const sched::RangeSpec& spec) {
  if (session.range == 0) session.range = next_range_++;
  ranges_[session.range] = &session;
  elastic_.open(session.range, spec);
}

void SharedDevice::set_ranges(RemoteSession& session, const client::RangeHas& message) {
  const double price =
      std::isfinite(message.price_ns_per_byte) ? std::max(0.0, message.price_ns_per_byte) : 0;
  open_range(session, {session.claim->id, session.cls, std::min(message.answer_ns, kLongestAnswerNs), price});
  const uint64_t now_ns = base::host_now_ns();
  std::vector<std::pair<RemoteSession*, uint64_t>> waits;
  for (const auto& [id, other] : ranges_)
    if (other->range_want != 0) waits.emplace_back(other, elastic_.on_the_way_bytes(other->range_want));
  elastic_.set_bytes(session.range, std::min(message.bytes, capacity_bytes_));
  for (const auto& [other, coming] : waits) {
    other->range_room_bytes = std::max(other->range_room_bytes, free_bytes());
    const uint64_t left = elastic_.on_the_way_bytes(other->range_want);
    if (left >= coming) continue;
    if (now_ns >= other->range_kept_until_ns) other->range_kept_bytes = 0;
    other->range_kept_bytes += coming - left;
    other->range_kept_until_ns = now_ns + kKeptNs;
  }
  refresh_class(session, now_ns);
  tell_range_waits();
}

void SharedDevice::ask_ranges(RemoteSession& session, uint64_t bytes, bool lower, const Request& request) {
  if (bytes == 0) {
    end_range_wait(session);
    return request.answer({});
  }
  const uint64_t now_ns = base::host_now_ns();
  if (session.range == 0) open_range(session, {session.claim->id, session.cls, 0, 0});
  (void)expire_ranges(now_ns);
  if (session.range_want == 0 || (now_ns - session.range_asked_ns >= kAskAgainNs &&
                                  elastic_.on_the_way_bytes(session.range_want) == 0)) {
    if (session.range_want == 0) session.range_since = next_want_;
    session.range_want = next_want_++;
    session.range_asked_ns = now_ns;
    session.range_room_bytes = 0;
  }
  // Sessions without ranges have taken room that was there, or it was kept too long.
  if (const uint64_t free = free_bytes(); free < session.range_room_bytes) {
    elastic_.taken(session.range_want);
    session.range_room_bytes = free;
  }
  for (const sched::RangeRequest& asked :
       elastic_.ask(session.range, session.range_want, bytes, now_ns, sched::kNoSession, lower))
    tell(*ranges_.at(asked.range), MessageType::kRangeGive, asked.bytes);
  const bool coming = elastic_.on_the_way_bytes(session.range_want) > 0 || kept_from(session, now_ns) > 0;
  request.answer({}, coming ? 1 : 0, std::exchange(session.range_silent, {}));
}

void SharedDevice::end_range_wait(RemoteSession& session) {
  if (session.range_want != 0) elastic_.withdraw(session.range_want);
  session.range_want = session.range_kept_bytes = 0;
  session.range_silent.clear();
}

void SharedDevice::close_range(RemoteSession& session) {
  if (session.range == 0) return;
  end_range_wait(session);
  elastic_.close(session.range);
  ranges_.erase(session.range);
  session.range = 0;
  tell_range_waits();
}

uint64_t SharedDevice::kept_from(const RemoteSession& session, uint64_t now_ns) const {
  uint64_t kept = 0;
  for (const auto& [id, other] : ranges_) {
    if (other->claim == session.claim || other->range_want == 0 || now_ns >= other->range_kept_until_ns)
      continue;
    const bool same = other->claim->counts_as == session.claim->counts_as;
    if (same ? session.range_want == 0 || other->range_since < session.range_since
             : other->claim->counts_as == sched::SessionClass::kGuaranteed)
      kept = base::add_saturated(kept, other->range_kept_bytes);
  }
  return kept;
}

base::Status SharedDevice::may_grow(const RemoteSession& session, uint64_t bytes, uint64_t now_ns) const {
  if (session.range == 0) return {};
  const uint64_t kept = kept_from(session, now_ns);
  if (kept == 0 || base::add_saturated(kept, bytes) <= free_bytes()) return {};
  return {
      GPUSHARE_DEVICE_OUT_OF_MEMORY,
      base::format("session '%s' needs %s more; others gave %s for sessions that wait", session.name.c_str(),
                   base::format_bytes(bytes).c_str(), base::format_bytes(kept).c_str())};
}

uint64_t SharedDevice::free_bytes() const {
  const uint64_t capacity = scheduler_.capacity().target_bytes;
  return capacity - std::min(capacity, scheduler_.promised_bytes());
}

void SharedDevice::tell_range_waits() {
  for (const auto& [id, session] : ranges_)
    if (session->range_want != 0) tell(*session, MessageType::kRangeGiven);
}

// A group has one class: the one that was told last.
void SharedDevice::refresh_class(RemoteSession& session, uint64_t now_ns) {
  Claim& claim = *session.claim;
  const sched::SessionClass cls =
      elastic_.session_silent(claim.id) ? sched::SessionClass::kOpportunistic : session.cls;
  if (std::exchange(claim.counts_as, cls) != cls) scheduler_.set_class(claim.id, cls, now_ns);
}

bool SharedDevice::expire_ranges(uint64_t now_ns) {
  bool any = false;
  for (const sched::RangeRequest& request : elastic_.expire(now_ns)) {
    const auto owner = ranges_.find(request.range), asker = ranges_.find(request.asker);
    if (owner == ranges_.end()) continue;
    any = true;
    RemoteSession& session = *owner->second;
    const std::string who = base::format(
        "session '%s' of process %d, asked for %s, which counts as opportunistic now", session.name.c_str(),
        session.process->peer.pid, base::format_bytes(request.bytes).c_str());
    log_limit_.warn(session.process->peer.uid, "daemon: elastic ranges: no answer from " + who, now_ns);
    if (asker != ranges_.end())
      asker->second->range_silent += (asker->second->range_silent.empty() ? "" : ", ") + who;
    refresh_class(session, now_ns);
  }
  if (any) tell_range_waits();
  return any;
}

}  // namespace gpushare::daemon
