// SPDX-License-Identifier: Apache-2.0
#include "daemon/ranges.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {

using client::MessageType;

namespace {

constexpr uint64_t kAskAgainNs = 50'000'000;  // owners that declined are asked again after this time
constexpr uint64_t kKeptNs = 100'000'000;     // how long bytes given for a wait are kept for it
// The longest time to answer that a process may ask for.
constexpr uint64_t kLongestAnswerNs = 60'000'000'000;

}  // namespace

Ranges::Ranges(sched::Scheduler& scheduler, LogLimit& log_limit, uint64_t capacity_bytes)
    : scheduler_(scheduler),
      log_limit_(log_limit),
      capacity_bytes_(capacity_bytes),
      elastic_([&scheduler](std::span<const sched::Part> parts) {
        return scheduler.claims_on(parts, base::host_now_ns());
      }) {}

Ranges::Range& Ranges::open(RemoteSession& session, uint64_t answer_ns, double price_ns_per_byte) {
  if (session.range == 0) session.range = next_range_++;
  elastic_.open(session.range, {session.claim->id, session.cls, answer_ns, price_ns_per_byte});
  Range& range = ranges_[session.range];
  range.session = &session;
  return range;
}

void Ranges::set(RemoteSession& session, const client::RangeHas& message) {
  const double price =
      std::isfinite(message.price_ns_per_byte) ? std::max(0.0, message.price_ns_per_byte) : 0;
  (void)open(session, std::min(message.answer_ns, kLongestAnswerNs), price);
  const uint64_t now_ns = base::host_now_ns();
  std::vector<std::pair<Range*, uint64_t>> waits;
  for (auto& [id, other] : ranges_)
    if (other.want != 0) waits.emplace_back(&other, elastic_.on_the_way_bytes(other.want));
  elastic_.set_bytes(session.range, std::min(message.bytes, capacity_bytes_));
  for (const auto& [other, coming] : waits) {
    other->room_bytes = std::max(other->room_bytes, free_bytes(scheduler_));
    const uint64_t left = elastic_.on_the_way_bytes(other->want);
    if (left >= coming) continue;
    if (now_ns >= other->kept_until_ns) other->kept_bytes = 0;
    other->kept_bytes += coming - left;
    other->kept_until_ns = now_ns + kKeptNs;
  }
  (void)refresh_class(*session.claim, now_ns);
  tell_waits();
}

uint64_t Ranges::can_give(const RemoteSession& session, bool commit) const {
  return elastic_.can_give(session.claim->id,
                           commit ? session.claim->counts_as : sched::SessionClass::kOpportunistic);
}

void Ranges::ask(RemoteSession& session, const sched::RoomAsk& ask, const Request& request) {
  if (ask.bytes == 0) {
    if (session.range != 0) end_wait(ranges_.at(session.range));
    return request.answer({});
  }
  const uint64_t now_ns = base::host_now_ns();
  Range& range = session.range == 0 ? open(session, 0, 0) : ranges_.at(session.range);
  range.commit = ask.commit;
  (void)expire(now_ns);
  if (range.want == 0 ||
      (now_ns - range.asked_ns >= kAskAgainNs && elastic_.on_the_way_bytes(range.want) == 0)) {
    if (range.want == 0) range.since = next_want_;
    range.want = next_want_++;
    range.asked_ns = now_ns;
    range.room_bytes = 0;
  }
  // Sessions without ranges have taken room that was there, or it was kept too long.
  if (const uint64_t free = free_bytes(scheduler_); free < range.room_bytes) {
    elastic_.taken(range.want);
    range.room_bytes = free;
  }
  for (const sched::RangeRequest& asked :
       elastic_.ask(session.range, range.want, ask.bytes, now_ns, sched::kNoSession, !ask.commit))
    tell(*ranges_.at(asked.range).session, MessageType::kRangeGive, asked.bytes);
  const bool coming = elastic_.on_the_way_bytes(range.want) > 0 || kept_from(range, now_ns) > 0;
  request.answer({}, coming ? 1 : 0, std::exchange(range.silent, {}));
}

void Ranges::answer(const RemoteSession& session, uint64_t bytes) {
  if (session.range != 0) elastic_.answer(session.range, bytes);
  if (expire(base::host_now_ns())) return;  // it said that it gives nothing, for it cannot
  tell_waits();
}

void Ranges::end_wait(Range& range) {
  if (range.want != 0) elastic_.withdraw(range.want);
  range.want = range.kept_bytes = 0;
  range.commit = true;
  range.silent.clear();
}

void Ranges::close(RemoteSession& session, bool leaves) {
  if (session.range == 0) return;
  end_wait(ranges_.at(session.range));
  const bool was_silent = elastic_.silent(session.range);
  elastic_.close(session.range);
  ranges_.erase(std::exchange(session.range, 0));
  if (was_silent && !leaves) (void)refresh_class(*session.claim, base::host_now_ns());
  tell_waits();
}

uint64_t Ranges::kept_from(const Range& range, uint64_t now_ns) const {
  uint64_t kept = 0;
  const auto in_line = [](const Range& of) {
    return sched::InLine{of.session->claim->counts_as,
                         of.commit ? sched::Use::kCommit : sched::Use::kAllocation,
                         of.want == 0 ? sched::InLine::kNowhere : of.since};
  };
  for (const auto& [id, other] : ranges_)
    if (other.session->claim != range.session->claim && other.want != 0 && now_ns < other.kept_until_ns &&
        sched::served_before(in_line(other), in_line(range)))
      kept = base::add_saturated(kept, other.kept_bytes);
  return kept;
}

base::Status Ranges::may_grow(const RemoteSession& session, uint64_t bytes, uint64_t now_ns) const {
  if (session.range == 0) return {};
  const uint64_t kept = kept_from(ranges_.at(session.range), now_ns);
  if (kept == 0 || base::add_saturated(kept, bytes) <= free_bytes(scheduler_)) return {};
  return {
      GPUSHARE_DEVICE_OUT_OF_MEMORY,
      base::format("session '%s' needs %s more; others gave %s for sessions that wait", session.name.c_str(),
                   base::format_bytes(bytes).c_str(), base::format_bytes(kept).c_str())};
}

void Ranges::grew(const RemoteSession& session, uint64_t bytes) {
  if (session.range == 0) return;
  uint64_t& kept = ranges_.at(session.range).kept_bytes;
  kept -= std::min(kept, bytes);
}

void Ranges::tell_waits() const {
  for (const auto& [id, range] : ranges_)
    if (range.want != 0) tell(*range.session, MessageType::kRangeGiven);
}

bool Ranges::refresh_class(Claim& claim, uint64_t now_ns) {
  bool changed = false;
  // A program that is stopped cannot tell the class that its group was given.
  if (const auto given = claim.page != nullptr ? claim.page->cls() : std::nullopt; given)
    for (const auto& member : claim.members)
      changed = std::exchange(member->cls, *given) != *given || changed;
  const bool guaranteed = !elastic_.session_silent(claim.id) &&
                          std::any_of(claim.members.begin(), claim.members.end(), [](const auto& member) {
                            return member->cls == sched::SessionClass::kGuaranteed;
                          });
  const auto cls = guaranteed ? sched::SessionClass::kGuaranteed : sched::SessionClass::kOpportunistic;
  if (std::exchange(claim.counts_as, cls) == cls) return changed;
  scheduler_.set_class(claim.id, cls, now_ns);
  return true;
}

bool Ranges::expire(uint64_t now_ns) {
  bool any = false;
  for (const sched::RangeRequest& request : elastic_.expire(now_ns)) {
    const auto owner = ranges_.find(request.range), asker = ranges_.find(request.asker);
    if (owner == ranges_.end()) continue;
    any = true;
    RemoteSession& session = *owner->second.session;
    const std::string who = base::format(
        "session '%s' of process %d, asked for %s, which counts as opportunistic now", session.name.c_str(),
        session.process->peer.pid, base::format_bytes(request.bytes).c_str());
    log_limit_.warn(session.process->peer.uid, "daemon: elastic ranges: no answer from " + who, now_ns);
    if (asker != ranges_.end()) asker->second.silent += (asker->second.silent.empty() ? "" : ", ") + who;
    (void)refresh_class(*session.claim, now_ns);
  }
  if (any) tell_waits();
  return any;
}

}  // namespace gpushare::daemon
