// Sessions that alternate: whose stay is over, for whom it ends, and the time at which that must be asked again.
// SPDX-License-Identifier: Apache-2.0
#include "sched/stays.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "base/saturate.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
namespace {

// Only so many waiting sessions are tried as the one that gets the room of sessions whose stays end.
constexpr size_t kMostLookedAt = 64;
// Time between two looks at a stay.
constexpr uint64_t kLeastLookNs = 1'000'000;

uint64_t multiplied(uint64_t value, uint64_t times) {
  return times != 0 && value > UINT64_MAX / times ? UINT64_MAX : value * times;
}

}  // namespace

double tag_of(const Resident& resident) {
  return resident.begun_tag_ns + virtual_cost(static_cast<double>(resident.used_ns), resident.weight);
}

uint64_t stay_left_ns(const Resident& resident, const Newcomer& newcomer, const StayRule& rule) {
  const uint64_t moves_ns = base::add_saturated(resident.out_ns, newcomer.in_ns);
  uint64_t stay_ns = multiplied(std::max(rule.least_ns, multiplied(moves_ns, kHeldPerMove)), rule.factor);
  if (rule.by_weight && newcomer.same_class) {
    const double behind_ns = (newcomer.tag_ns - resident.begun_tag_ns) * resident.weight;
    stay_ns = std::max(stay_ns, base::to_uint64(std::max(behind_ns, 0.0)));
  }
  return stay_ns - std::min(stay_ns, resident.used_ns);
}

uint64_t counted_move_ns(uint64_t took_ns, uint64_t expected_ns, uint64_t least_stay_ns) {
  const uint64_t most_ns = std::max(multiplied(expected_ns, 2), least_stay_ns / (2 * kHeldPerMove));
  return std::clamp<uint64_t>(took_ns, 1, std::max<uint64_t>(most_ns, 1));
}

uint64_t Scheduler::Impl::used_of_stay_ns(const SessionRecord& session, uint64_t now_ns) const {
  const uint64_t since_ns = std::max(session.last_wanted_ns, session.stay_since_ns);
  const uint64_t rests_ns = session.wanted() ? 0 : now_ns - std::min(now_ns, since_ns);
  return session.view.service_ns - session.stay_service_ns + session.stay_rest_ns + rests_ns;
}

uint64_t Scheduler::Impl::expected_out_ns(const SessionRecord& session) const {
  if (session.out_ns != 0) return session.out_ns;
  return base::to_uint64(static_cast<double>(session.persistent_bytes) * options.page_out_ns_per_byte);
}

uint64_t Scheduler::Impl::expected_in_ns(const SessionRecord& session) const {
  if (session.in_ns != 0) return session.in_ns;
  return base::to_uint64(static_cast<double>(session.persistent_bytes) * options.page_in_ns_per_byte);
}

void Scheduler::Impl::moved(SessionRecord& session, bool out, uint64_t now_ns) const {
  const uint64_t took_ns = now_ns - std::min(now_ns, session.move_since_ns);
  const uint64_t expected_ns = out ? expected_out_ns(session) : expected_in_ns(session);
  (out ? session.out_ns : session.in_ns) = counted_move_ns(took_ns, expected_ns, options.least_stay_ns);
}

Resident Scheduler::Impl::stay_of(const SessionRecord& session, uint64_t now_ns) const {
  return {used_of_stay_ns(session, now_ns), expected_out_ns(session), session.view.share.weight,
          session.stay_tag_ns};
}

uint64_t Scheduler::Impl::stay_left_ns(const SessionRecord& resident, const SessionRecord& session,
                                       uint64_t now_ns) const {
  const Newcomer newcomer{expected_in_ns(session), session.stay_tag_ns,
                          session.bytes_cls == resident.bytes_cls};
  const uint32_t stays = gives_way(resident, session) == GivesWay::kAfterLongStay ? kLongStays : 1;
  return sched::stay_left_ns(stay_of(resident, now_ns), newcomer,
                             {options.least_stay_ns, stays, weighted(resident)});
}

void Scheduler::Impl::begin_stay(SessionRecord& session, uint64_t now_ns) {
  session.stay_since_ns = now_ns;
  session.stay_service_ns = session.view.service_ns;
  session.stay_rest_ns = 0;
}

// The use of this stay counts when the session waits for its next one.
void Scheduler::Impl::end_stay(SessionRecord& session, uint64_t now_ns) {
  session.stay_tag_ns = tag_of(stay_of(session, now_ns));
  begin_stay(session, now_ns);
  if (place_for != kNoSession) session.view.in_line = ++last_in_line;
}

// The session wanted nothing until now, so it has nothing to make up for.
void Scheduler::Impl::join_line(SessionRecord& session, uint64_t now_ns) {
  session.view.in_line = ++last_in_line;
  if (alternating == 0) return;
  double least = INFINITY;
  for (const LaneRecord& lane : lanes)
    for (const SessionRecord* member : lane.members)
      if (member->spec.alternates && on_device(member->bytes))
        least = std::min(least, tag_of(stay_of(*member, now_ns)));
  if (least < INFINITY) session.stay_tag_ns = std::max(session.stay_tag_ns, least);
}

bool Scheduler::Impl::may_alternate(const SessionRecord& resident, const SessionRecord& session) const {
  return resident.spec.alternates && resident.spec.may_page && resident.resident() && !resident.overdue &&
         resident.bytes_cls >= session.bytes_cls && gives_way(resident, session) != GivesWay::kNever;
}

// The first waiting session that would fit without the alternating ones gets the place of some whose stays are over, as
// soon as these are enough. No session behind it is tried, because small sessions would keep it waiting for ever. A
// coordinator decides by itself who waits.
void Scheduler::Impl::alternate(uint64_t now_ns) {
  stays_end_ns = kUnknown;
  if (alternating == 0 || coordinator || !options.paging || !asks.gives_way || waiting.empty() ||
      evicting > 0 || place_for != kNoSession || waiting.any_claims())
    return;
  if (std::any_of(lanes.begin(), lanes.end(), [](const LaneRecord& lane) { return lane.closing; }))
    return;  // merging makes room for somebody
  size_t looked_at = 0;
  for (WaitingList::Position at = waiting.begin(); at < waiting.end() && looked_at < kMostLookedAt;
       at = waiting.next(at), ++looked_at) {
    SessionRecord& session = waiting.at(at);
    if (!session.blocked && session.spec.may_claim && alternate_for(session, now_ns)) return;
    const WaitingList::Position behind = waiting.next(at);
    if (asks.may_join && behind < waiting.end() && may_join(waiting.at(behind), 0, true) == MayJoin::kNobody)
      return;
  }
}

// False: the alternating sessions have no room for it.
bool Scheduler::Impl::alternate_for(SessionRecord& session, uint64_t now_ns) {
  uint64_t least_left_ns = kUnknown;
  bool any = false;
  for (const LaneRecord& lane : lanes) {
    for (const SessionRecord* member : lane.members) {
      if (!may_alternate(*member, session)) continue;
      any = true;
      if (const uint64_t left_ns = stay_left_ns(*member, session, now_ns); left_ns > 0)
        least_left_ns = std::min(least_left_ns, left_ns);
    }
  }
  const bool would_do = fits_without(session, Lanes::kAny, [&](const auto& each) {
    if constexpr (std::is_same_v<std::decay_t<decltype(each)>, SessionRecord>)
      return spare(each) || may_alternate(each, session);
    else
      return spare(each);
  });
  if (!any || !would_do) return false;
  const Ask ask{Why::kStay, now_ns, &session};
  const auto victims = who_gives(ask, who_may_give(ask));
  if (!victims || victims->empty()) {
    stays_end_ns = base::add_saturated(now_ns, std::max(least_left_ns, kLeastLookNs));
    return true;
  }
  place_for = session.view.id;
  for (SessionRecord* victim : victims->sessions) victim->pinned = false;
  evict(*victims, now_ns);
  return true;
}

// True while the place for the first in line is being made: what comes back meanwhile is for it.
bool Scheduler::Impl::give_place(uint64_t now_ns) {
  SessionRecord* session = find(place_for);
  const bool waits =
      session != nullptr && session->chunk != nullptr && !session->queued_idle && !session->blocked;
  if (waits && place(*session, now_ns))
    admitted_from(waiting.position_of(*session));
  else if (waits && evicting > 0)
    return true;
  place_for = kNoSession;
  return false;
}

}  // namespace gpushare::sched
