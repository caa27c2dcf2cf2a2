// The choice of the sessions that are paged out for another one.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>

#include "sched/claims.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
namespace {

// By the policy's order. A merge sort of its own: those of the standard library need a strict weak order,
// which a custom policy's `before` may not be, and must then do no harm.
void sort_best_first(const Policy& policy, std::vector<SessionRecord*>& list) {
  std::vector<SessionRecord*> merged(list.size());
  for (size_t run = 1; run < list.size(); run *= 2) {
    for (size_t begin = 0; begin < list.size(); begin += 2 * run) {
      const size_t middle = std::min(begin + run, list.size()), end = std::min(begin + 2 * run, list.size());
      size_t left = begin, right = middle;
      for (size_t at = begin; at < end; ++at) {
        const bool from_right =
            left == middle || (right < end && goes_before(policy, list[right]->view, list[left]->view));
        merged[at] = list[from_right ? right++ : left++];
      }
    }
    list.swap(merged);
  }
}

// Victims beyond so many are not looked at one by one for whether they are needed.
constexpr size_t kMostSpared = 256;

}  // namespace

std::function<uint64_t(const SessionRecord&)> Scheduler::Impl::gives_back() const {
  struct Largest {
    uint64_t first = 0, second = 0;  // E of the lane's sessions that stay so far
  };
  std::vector<Largest> largest(lanes.size());
  for (size_t id = 0; id < lanes.size(); ++id) {
    for (const SessionRecord* member : lanes[id].members) {
      if (member->goes_out()) continue;
      Largest& of = largest[id];
      of.second = std::max(of.second, std::min(of.first, member->ephemeral_bytes));
      of.first = std::max(of.first, member->ephemeral_bytes);
    }
  }
  return [this, largest = std::move(largest)](const SessionRecord& session) {
    const Largest& of = largest[session.lane];
    const uint64_t others = session.ephemeral_bytes == of.first ? of.second : of.first;
    const uint64_t size = lanes[session.lane].bytes;
    return session.persistent_bytes + size - std::min(size, others);
  };
}

// Spare sessions rank before all others; then class counts, then the policy's order, then price. The policy's order counts only
// where one session outranks the other.
std::vector<Claim> Scheduler::Impl::claims_of(std::span<SessionRecord* const> best_first,
                                              uint64_t now_ns) const {
  std::vector<Claim> claims(best_first.size());
  uint32_t rank = 2 * spare_rank(SessionClass::kGuaranteed) + 1;
  const SessionRecord* worst = nullptr;  // of the rank
  for (const SessionClass cls : {SessionClass::kOpportunistic, SessionClass::kGuaranteed}) {
    for (size_t i = best_first.size(); i-- > 0;) {
      const SessionRecord& session = *best_first[i];
      if (session.view.cls != cls) continue;
      if (spare(session)) {
        claims[i] = {0, 2 * spare_rank(cls), decayed(*session.worth_ns, session.worth_since_ns, now_ns)};
        continue;
      }
      if (worst != nullptr && (worst->view.cls != cls || before(session.view, worst->view))) worst = nullptr;
      if (worst == nullptr) {
        worst = &session;
        ++rank;
      }
      const auto bytes = static_cast<double>(session.persistent_bytes);
      const double out_ns_per_byte = comes_in(session.bytes) ? 0 : options.page_out_ns_per_byte;
      const uint64_t idle_ns = session.wanted() ? 0 : now_ns - std::min(now_ns, session.last_wanted_ns);
      claims[i] = {0, rank,
                   price_of(bytes * out_ns_per_byte, bytes * options.page_in_ns_per_byte,
                            static_cast<double>(idle_ns))};
    }
  }
  return claims;
}

std::optional<Scheduler::Impl::Victims> Scheduler::Impl::choose_victims(
    Victims candidates, uint64_t bytes, uint64_t now_ns,
    const std::function<uint64_t(const SessionRecord&)>& bytes_of,
    const std::function<bool()>& enough) const {
  if (enough()) return Victims{};
  auto& [candidate_sessions, candidate_caches] = candidates;
  sort_best_first(*policy, candidate_sessions);
  // The candidates' marks, by the index of the claim: sessions, then caches.
  std::vector<bool*> victim;
  for (SessionRecord* each : candidate_sessions) victim.push_back(&each->victim);
  for (CacheRecord* each : candidate_caches) victim.push_back(&each->victim);
  const auto mark_all = [&](bool value) {
    for (bool* each : victim) *each = value;
  };
  mark_all(true);
  const bool all_would_do = enough();
  mark_all(false);
  if (!all_would_do) return std::nullopt;
  std::vector<Claim> claims = claims_of(candidate_sessions, now_ns);
  for (size_t i = 0; i < claims.size(); ++i) claims[i].bytes = bytes_of(*candidate_sessions[i]);
  for (const CacheRecord* each : candidate_caches) claims.push_back(claim_of(*each, now_ns));
  std::vector<size_t> order(claims.size());  // worst ranked first, then the cheapest a byte
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (claims[a].rank != claims[b].rank) return claims[a].rank < claims[b].rank;
    return claims[a].price_ns * static_cast<double>(claims[b].bytes) <
           claims[b].price_ns * static_cast<double>(claims[a].bytes);
  });
  const std::vector<size_t> chosen = choose_claims(claims, bytes);
  const auto mark = [&](size_t first_of_order) {
    mark_all(false);
    for (const size_t index : chosen) *victim[index] = true;
    for (size_t i = 0; i < first_of_order; ++i) *victim[order[i]] = true;
  };
  // The bytes that a lane gives back depend on all of its sessions, so the choice may fall short.
  size_t too_few = 0, do_do = order.size();
  mark(0);
  if (enough()) {
    do_do = 0;
  } else {
    while (do_do > too_few + 1) {
      const size_t middle = too_few + (do_do - too_few) / 2;
      mark(middle);
      (enough() ? do_do : too_few) = middle;
    }
    mark(do_do);
  }
  size_t looked_at = 0;
  for (size_t i = order.size(); i-- > 0 && looked_at < kMostSpared;) {
    bool& mark_of = *victim[order[i]];
    if (!mark_of) continue;
    ++looked_at;
    mark_of = false;
    if (!enough()) mark_of = true;
  }
  // First layers take what rests on them along.
  for (CacheRecord* each : candidate_caches)
    if (const CacheRecord* first = find_cache(each->first_part); first != nullptr && first->victim)
      each->victim = true;
  std::erase_if(candidate_sessions, [](SessionRecord* each) { return !std::exchange(each->victim, false); });
  std::erase_if(candidate_caches, [](CacheRecord* each) { return !std::exchange(each->victim, false); });
  return candidates;
}

void Scheduler::Impl::evict(const Victims& victims, uint64_t now_ns) {
  for (CacheRecord* cache : victims.caches) {
    cache->dropping = true;
    ++evicting;
    actions.push_back({ActionKind::kDropCache, kNoLane, cache->id, cache->bytes});
  }
  for (SessionRecord* victim : victims.sessions) {
    if (victim->bytes == Bytes::kComing) {
      start_turn_back(*victim);
      continue;
    }
    change(*victim, BytesEvent::kChosen);
    set_ready_slot(*victim, false);
    if (!victim->busy()) start_page_out(*victim, now_ns);
  }
}

// A session that waits for admission has page-ins turned back once. A policy whose order contradicts itself could let a session in again
// at once, before the waiting one, without end.
bool Scheduler::Impl::gives_way_to(const SessionRecord& each, const SessionRecord& waits) const {
  return (evictable(each) || (!waits.turned_back && each.may_turn_back_for(waits.view))) &&
         gives_way(each, waits) == GivesWay::kAtOnce;
}

WaitingList::Room Scheduler::Impl::claimable_room(const SessionRecord& session) const {
  return room_without(session, Lanes::kWhereItRunsNext, [&](const auto& each) {
    if constexpr (std::is_same_v<std::decay_t<decltype(each)>, CacheRecord>)
      return spare(each);
    else
      return spare(each) || gives_way_to(each, session);
  });
}

WaitingList::Room Scheduler::Impl::room_without_spares(const SessionRecord& session) const {
  return room_without(session, Lanes::kAny, [this](const auto& each) { return spare(each); });
}

bool Scheduler::Impl::claim_spares(const SessionRecord& session, uint64_t now_ns) {
  const uint64_t p = session.persistent_bytes, total = p + session.ephemeral_bytes;
  if (!room_without_spares(session).holds(p, total)) return false;
  const WaitingList::Room now = room_without(session, Lanes::kAny, [](const auto&) { return false; });
  if (now.holds(p, total)) return evicting > 0;  // what is on its way out makes the room
  Victims candidates{{}, droppable()};
  for (const LaneRecord& lane : lanes)
    for (SessionRecord* member : lane.members)
      if (spare(*member)) candidates.sessions.push_back(member);
  const uint64_t missing =
      !now.any ? 0
               : std::max(p - std::min(p, now.persistent_bytes), total - std::min(total, now.total_bytes));
  const auto victims = choose_victims(std::move(candidates), missing, now_ns, gives_back(), [&] {
    return room_without(session, Lanes::kAny, [](const auto& each) { return each.victim; }).holds(p, total);
  });
  if (!victims) return false;
  evict(*victims, now_ns);
  return true;
}

bool Scheduler::Impl::claim(SessionRecord& session, uint64_t now_ns) {
  if (!session.spec.may_claim) return false;
  if (any_spare() && claim_spares(session, now_ns)) return true;
  if (!options.paging) return false;
  // The coordinator makes room for it: others shrink to their limits, or have been stopped.
  if (above_limit_bytes > 0 && session.view.cls == SessionClass::kGuaranteed) return true;
  // Merging lanes copies nothing.
  const uint64_t p = session.persistent_bytes, total = p + session.ephemeral_bytes;
  if (!session.claiming && mergeable_room(session).holds(p, total) &&
      may_join(session, residents, false) == MayJoin::kYes)
    return false;
  Victims candidates{{}, droppable()};
  std::vector<SessionRecord*>& outranked = candidates.sessions;
  for (const LaneRecord& lane : lanes) {
    if (!lane.open) continue;
    for (SessionRecord* member : lane.members)
      if (spare(*member) || gives_way_to(*member, session)) outranked.push_back(member);
  }
  if (candidates.empty() && evicting == 0 && !session.claiming) return false;
  const WaitingList::Room now =
      room_without(session, Lanes::kWhereItRunsNext, [](const auto&) { return false; });
  const uint64_t missing =
      !now.any ? 0
               : std::max(p - std::min(p, now.persistent_bytes), total - std::min(total, now.total_bytes));
  const auto victims = choose_victims(std::move(candidates), missing, now_ns, gives_back(), [&] {
    return fits_without(session, Lanes::kWhereItRunsNext, [](const auto& each) { return each.victim; });
  });
  if (!victims) {
    set_claiming(session, false);
    return false;
  }
  if (victims->empty() && evicting == 0) {
    // Nothing to page out: either a shrink has yet to settle, or it fits only in a way that place() does not
    // take.
    const bool settling = std::any_of(lanes.begin(), lanes.end(), [](const LaneRecord& lane) {
      return lane.open && lane.held != lane.bytes;
    });
    set_claiming(session, settling);
    return settling;
  }
  set_claiming(session, true);
  for (const SessionRecord* victim : victims->sessions)
    session.turned_back = session.turned_back || victim->bytes == Bytes::kComing;
  evict(*victims, now_ns);
  return true;
}

void Scheduler::Impl::start_page_out(SessionRecord& session, uint64_t now_ns) {
  end_stay(session, now_ns);
  change(session, BytesEvent::kStarted);
  session.move_since_ns = now_ns;
  ++changes;
  const ActionKind kind = session.worth_ns ? ActionKind::kDrop : ActionKind::kPageOut;
  actions.push_back({kind, session.lane, session.view.id, session.persistent_bytes});
}

bool Scheduler::make_room(SessionId id, uint64_t bytes, uint64_t now_ns) {
  if (id == kNoSession) return impl_->make_room(nullptr, bytes, id, now_ns);
  const SessionRecord* session = impl_->find(id);
  return session != nullptr && session->holds_promise() && impl_->make_room(session, bytes, id, now_ns);
}

uint64_t Scheduler::Impl::victim_bytes(const Victims& candidates) const {
  uint64_t bytes = 0;
  for (const CacheRecord* each : candidates.caches) bytes += each->victim ? each->bytes : 0;
  if (candidates.sessions.empty()) return bytes;
  for (const LaneRecord& lane : lanes) {
    uint64_t before = 0, after = 0;  // the largest E
    bool stays_busy = false, stays = false, goes = false;
    for (const SessionRecord* member : lane.members) {
      if (member->goes_out()) continue;
      before = std::max(before, member->ephemeral_bytes);
      if (member->victim) {
        goes = true;
        bytes += member->persistent_bytes;
        continue;
      }
      stays = true;
      stays_busy = stays_busy || member->view.in_flight > 0;
      after = std::max(after, member->ephemeral_bytes);
    }
    // A lane in use gets smaller at a boundary; one that several processes map, when all have said so.
    if (goes && !stays_busy && !(options.shared_lanes && stays)) bytes += before - after;
  }
  return bytes;
}

bool Scheduler::Impl::make_room(const SessionRecord* session, uint64_t bytes,
                                std::optional<SessionId> yields_to, uint64_t now_ns) {
  Victims lower{{}, droppable()};
  const bool pages = session != nullptr && session->holds_promise() && options.paging;
  const uint64_t coming = pages && yields_to ? turn_back(*session, bytes) : 0;
  if (coming >= bytes) return true;
  bytes -= coming;
  for (const LaneRecord& lane : lanes) {
    if (!pages && spares == 0) break;
    for (SessionRecord* member : lane.members) {
      if (member == session || !evictable(*member) || member->busy()) continue;
      const bool outranked = pages && ((session->view.cls == SessionClass::kGuaranteed &&
                                        member->view.cls == SessionClass::kOpportunistic) ||
                                       gives_way(*member, *session) == GivesWay::kAtOnce);
      if (outranked || spare(*member)) lower.sessions.push_back(member);
    }
  }
  uint64_t all_bytes = 0;
  const auto enough = [&] {
    const uint64_t given = victim_bytes(lower);
    all_bytes = std::max(all_bytes, given);
    return given >= bytes;
  };
  // If all victims together are not enough, all of them go: the caller has other ways to get the rest.
  const auto chosen = choose_victims(lower, bytes, now_ns, gives_back(), enough);
  if (all_bytes == 0) return coming > 0;
  const Victims& victims = chosen ? *chosen : lower;
  for (SessionRecord* victim : victims.sessions)
    if (yields_to) victim->yields_to = yields_to;
  evict(victims, now_ns);
  return coming > 0 || !victims.empty();
}

// First those that turn back already: also for a session that waits for admission, which would have the bytes later.
uint64_t Scheduler::Impl::turn_back(const SessionRecord& session, uint64_t bytes) {
  if (session.view.cls != SessionClass::kGuaranteed) return 0;
  uint64_t missing = bytes;
  for (const bool turns : {true, false}) {
    for (const LaneRecord& lane : lanes) {
      for (SessionRecord* member : lane.members) {
        const bool turning = member->bytes == Bytes::kTurningBack;
        if (missing == 0 || (turns ? !turning : !member->may_turn_back_for(session.view))) continue;
        uint64_t spoken_for = 0;
        for (const ComingBack& each : coming_back)
          if (each.of == member->view.id) spoken_for += each.bytes;
        const uint64_t has = member->persistent_bytes;
        const uint64_t takes = std::min(missing, has - std::min(has, spoken_for));
        if (takes == 0) continue;
        missing -= takes;
        coming_back.push_back({member->view.id, session.view.id, takes});
        if (!member->yields_to) member->yields_to = session.view.id;
        if (!turns) start_turn_back(*member);
      }
    }
  }
  return bytes - missing;
}

void Scheduler::Impl::start_turn_back(SessionRecord& session) {
  change(session, BytesEvent::kChosen);
  actions.push_back({ActionKind::kTurnBack, session.lane, session.view.id, session.persistent_bytes});
}

bool Scheduler::make_room_at_boundaries(SessionId id, uint64_t bytes, uint64_t now_ns) {
  const SessionRecord* session = impl_->find(id);
  return session != nullptr && session->holds_promise() &&
         impl_->make_room_at_boundaries(*session, bytes, now_ns);
}

bool Scheduler::Impl::make_room_at_boundaries(const SessionRecord& session, uint64_t bytes, uint64_t now_ns) {
  if (session.view.cls != SessionClass::kGuaranteed || !options.paging) return false;
  Victims candidates{};
  for (const LaneRecord& lane : lanes) {
    for (SessionRecord* member : lane.members) {
      // Room on its way for another session may be enough for both. If not, the session asks again.
      if (member->yields_to && member->goes_out()) return true;
      if (member != &session && evictable(*member) && member->busy() &&
          member->view.cls == SessionClass::kOpportunistic)
        candidates.sessions.push_back(member);
    }
  }
  const uint64_t missing = bytes - std::min(bytes, free_bytes());
  const auto chosen = choose_victims(candidates, missing, now_ns, gives_back(),
                                     [&] { return victim_bytes(candidates) >= missing; });
  if (!chosen || chosen->empty()) return false;
  for (SessionRecord* victim : chosen->sessions) victim->yields_to = session.view.id;
  evict(*chosen, now_ns);
  return true;
}

// The price of changing lanes is P, out and in again: a session maps its lane once, when it is admitted or paged in.
// Nobody goes who would not come in again at once: when the lane is no longer held up, all have the memory that they
// had. So those of the largest E stay where they are if the device has no room for another lane of that size. If there
// is no room for anybody's, sessions go out until there is: they would have found no place from the start if each had an
// E of its own. They come in again when the lanes are one (join_lanes).
void Scheduler::Impl::leave_held_up(uint64_t now_ns) {
  if (overdue == 0 || !options.paging) return;
  for (const LaneRecord& lane : lanes) {
    if (!lane.open || !lane.held_up()) continue;
    // A member that is on its way out for good makes the room.
    if (std::any_of(lane.members.begin(), lane.members.end(),
                    [](const SessionRecord* member) { return member->goes_out() && !member->changes_lane; }))
      continue;
    Victims leaving{};
    SessionRecord* least = nullptr;
    uint64_t persistent = 0;
    for (SessionRecord* member : lane.members) {
      if (!member->ready || member->busy() || !evictable(*member)) continue;
      member->victim = true;
      leaving.sessions.push_back(member);
      persistent += member->persistent_bytes;
    }
    std::sort(
        leaving.sessions.begin(), leaving.sessions.end(), [](const SessionRecord* a, const SessionRecord* b) {
          return std::tuple(a->ephemeral_bytes, a->view.id) < std::tuple(b->ephemeral_bytes, b->view.id);
        });
    if (!leaving.sessions.empty()) least = leaving.sessions.front();
    while (!leaving.sessions.empty()) {
      SessionRecord& largest = *leaving.sessions.back();
      if (room_without(largest, Lanes::kAny, [](const auto& each) {
            return each.victim;
          }).holds(persistent, persistent + largest.ephemeral_bytes))
        break;
      largest.victim = false;
      persistent -= largest.persistent_bytes;
      leaving.sessions.pop_back();
    }
    for (SessionRecord* member : leaving.sessions) {
      member->victim = false;
      member->changes_lane = true;
    }
    evict(leaving, now_ns);
    if (leaving.sessions.empty() && least != nullptr && evicting == 0)
      make_room_to_leave(lane, *least, now_ns);
  }
}

void Scheduler::Impl::make_room_to_leave(const LaneRecord& lane, SessionRecord& session, uint64_t now_ns) {
  const bool others_go_on = std::any_of(lanes.begin(), lanes.end(), [&](const LaneRecord& other) {
    return other.open && suits(other, session) && !other.held_up();
  });
  if (others_go_on) return;
  Victims candidates{{}, droppable()};
  for (SessionRecord* member : lane.members)
    if (member != &session && evictable(*member) && !member->busy()) candidates.sessions.push_back(member);
  session.victim = true;
  const auto room = [&] {
    return room_without(session, Lanes::kAny, [](const auto& each) { return each.victim; });
  };
  const uint64_t total = session.persistent_bytes + session.ephemeral_bytes;
  const auto chosen =
      choose_victims(std::move(candidates), total - std::min(total, room().total_bytes), now_ns, gives_back(),
                     [&] { return room().holds(session.persistent_bytes, total); });
  session.victim = false;
  if (chosen) evict(*chosen, now_ns);
}

// The lanes that a trust group has after a hang: each but the largest closes when its E lets somebody in who waits. Its
// sessions change lanes as those above.
void Scheduler::Impl::join_lanes(uint64_t now_ns) {
  if (!options.shared_lanes || !options.paging || lanes_open < 2 || waiting.empty() || evicting > 0) return;
  const auto may_go = [&](const LaneRecord& lane) {
    return lane.open && lane.trust_group != 0 && !lane.held_up() &&
           std::all_of(lane.members.begin(), lane.members.end(),
                       [this](const SessionRecord* member) { return evictable(*member); });
  };
  for (const LaneRecord& lane : lanes) {
    if (!may_go(lane)) continue;
    const auto kept = std::find_if(lanes.begin(), lanes.end(), [&](const LaneRecord& other) {
      return &other != &lane && other.open && other.trust_group == lane.trust_group && !other.held_up() &&
             other.bytes >= lane.bytes;
    });
    if (kept == lanes.end()) continue;
    const uint64_t room = free_bytes() + lane.held;
    const auto all = waiting.sessions();
    if (std::none_of(all.begin(), all.end(), [&](const SessionRecord* waits) {
          const uint64_t there = suits(lane, *waits) ? std::min(kept->bytes, waits->ephemeral_bytes) : 0;
          return waits->wants_in() && waits->persistent_bytes + waits->ephemeral_bytes - there <= room;
        }))
      continue;
    const Victims leaving{lane.members.all(), {}};
    for (SessionRecord* member : leaving.sessions) member->changes_lane = true;
    evict(leaving, now_ns);
    return;
  }
}

bool Scheduler::making_room(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  if (session == nullptr) return false;
  const bool guaranteed = session->view.cls == SessionClass::kGuaranteed;
  for (const LaneRecord& lane : impl_->lanes)
    for (const SessionRecord* member : lane.members)
      if (member->yields_to && member->goes_out() &&
          (guaranteed || (member->yields_to == id && member->bytes == Bytes::kGoing)))
        return true;
  return false;
}

void Scheduler::stop_making_room(SessionId id) {
  for (const LaneRecord& lane : impl_->lanes) {
    for (SessionRecord* member : lane.members) {
      if (member->yields_to != id || member->stopped || member->bytes != Bytes::kLeaving) continue;
      member->yields_to.reset();
      impl_->stay(*member);
    }
  }
}

void Scheduler::Impl::stay(SessionRecord& session) {
  change(session, BytesEvent::kSpared);
  session.changes_lane = false;
  set_ready_slot(session, session.ready);
}

void Scheduler::Impl::stop_yielding(SessionId to) {
  if (evicting == 0) return;
  std::erase_if(coming_back, [to](const ComingBack& each) { return each.waits == to; });
  for (const LaneRecord& lane : lanes) {
    for (SessionRecord* member : lane.members) {
      if (member->yields_to != to) continue;
      member->yields_to.reset();
      for (const ComingBack& each : coming_back)
        if (each.of == member->view.id && !member->yields_to) member->yields_to = each.waits;
    }
  }
}

void Scheduler::Impl::came_back(SessionId id) {
  std::erase_if(coming_back, [id](const ComingBack& each) { return each.of == id; });
}

// Cancels the evictions that have not begun. A copy under way is carried through.
void Scheduler::Impl::cancel_evictions() {
  place_for = kNoSession;
  for (const LaneRecord& lane : lanes)
    for (SessionRecord* member : lane.members)
      if (member->bytes == Bytes::kLeaving && !member->stopped && !member->yields_to) stay(*member);
}

}  // namespace gpushare::sched
