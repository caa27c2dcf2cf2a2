// The decision on who gives bytes up, whoever asks (who_gives()), and what follows for the sessions that do.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>
#include <utility>

#include "sched/claims.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
namespace {

// Sorts by the policy's order with a merge sort of our own. The sorts of the standard library need a strict weak order.
// A custom policy's `before` may be none, and must do no harm then.
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

// The most victims of which each is checked for whether it is needed.
constexpr size_t kMostSpared = 256;

// The marks of the candidates, by the index of the claim: sessions, then caches.
class Marks {
 public:
  explicit Marks(Victims& of) {
    for (SessionRecord* each : of.sessions) marks_.push_back(&each->victim);
    for (CacheRecord* each : of.caches) marks_.push_back(&each->victim);
  }
  void all(bool value) {
    for (bool* each : marks_) *each = value;
  }
  bool& operator[](size_t claim) { return *marks_[claim]; }

 private:
  std::vector<bool*> marks_;
};

bool is_same(const SessionRecord& each, const SessionRecord* session) {
  return &each == session;
}
bool is_same(const CacheRecord&, const SessionRecord*) {
  return false;
}

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

// The time to take so many of the session's bytes and to bring them back.
double Scheduler::Impl::price(const SessionRecord& session, uint64_t bytes, uint64_t now_ns) const {
  const double out_ns_per_byte = comes_in(session.bytes) ? 0 : options.page_out_ns_per_byte;
  const uint64_t idle_ns = session.wanted() ? 0 : now_ns - std::min(now_ns, session.last_wanted_ns);
  return price_of(static_cast<double>(bytes) * out_ns_per_byte,
                  static_cast<double>(bytes) * options.page_in_ns_per_byte, static_cast<double>(idle_ns));
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
      if (session.bytes_cls != cls) continue;
      if (spare(session)) {
        claims[i] = {0, 2 * spare_rank(cls), decayed(*session.worth_ns, session.worth_since_ns, now_ns)};
        continue;
      }
      if (worst != nullptr && (worst->bytes_cls != cls || before(session.view, worst->view))) worst = nullptr;
      if (worst == nullptr) {
        worst = &session;
        ++rank;
      }
      claims[i] = {0, rank, price(session, session.persistent_bytes, now_ns)};
    }
  }
  return claims;
}

std::vector<Claim> Scheduler::claims_on(std::span<const Part> parts, uint64_t now_ns) const {
  std::vector<SessionRecord*> sessions;
  for (const Part& part : parts)
    if (SessionRecord* session = impl_->find(part.session)) sessions.push_back(session);
  sort_best_first(*impl_->policy, sessions);
  const std::vector<Claim> claims = impl_->claims_of(sessions, now_ns);
  base::FlatHashMap<SessionId, uint32_t> ranks;
  for (size_t i = 0; i < sessions.size(); ++i) ranks[sessions[i]->view.id] = claims[i].rank;
  std::vector<Claim> out;
  for (const Part& part : parts) {
    const SessionRecord* session = impl_->find(part.session);
    out.push_back({part.bytes, session == nullptr ? 0 : ranks[part.session],
                   session == nullptr ? 0 : impl_->price(*session, part.bytes, now_ns), true});
  }
  return out;
}

// True if `each` gives bytes to an allocation of the session.
bool Scheduler::Impl::yields(const SessionRecord& each, const SessionRecord* session) const {
  return session != nullptr && session->holds_promise() && options.paging && evictable(each) &&
         (session->bytes_cls < each.bytes_cls || gives_way(each, *session) == GivesWay::kAtOnce);
}

bool Scheduler::Impl::may_give(const SessionRecord& each, const Ask& ask) const {
  if (&each == ask.session) return false;
  if (spare(each))
    return ask.why != Why::kPieces &&
           ((ask.why != Why::kAllocation && ask.why != Why::kDrop) || !each.busy());
  switch (ask.why) {
    case Why::kSpares:
    case Why::kDrop:
    case Why::kPieces:
      return false;
    case Why::kAdmission:
      return gives_way_to(each, *ask.session);
    case Why::kStay:
      return may_alternate(each, *ask.session) && stay_left_ns(each, *ask.session, ask.now_ns) == 0;
    case Why::kAllocation:
      return !each.busy() && yields(each, ask.session);
    case Why::kBoundaries:
      return each.busy() && evictable(each) && each.bytes_cls == SessionClass::kOpportunistic;
    case Why::kCapacity:
      return options.paging && evictable(each);
    case Why::kOtherLane:
      return each.lane == ask.session->lane && evictable(each) && !each.busy();
  }
  return false;
}

Victims Scheduler::Impl::who_may_give(const Ask& ask) const {
  Victims all{{}, droppable()};
  for (const LaneRecord& lane : lanes)
    for (SessionRecord* member : lane.members)
      if (may_give(*member, ask)) all.sessions.push_back(member);
  return all;
}

// The bytes that are missing although those marked as victims go.
uint64_t Scheduler::Impl::missing(const Ask& ask, const Victims& from) const {
  switch (ask.why) {
    case Why::kAllocation:
    case Why::kDrop:
    case Why::kBoundaries:
    case Why::kPieces:
      return ask.bytes - std::min(ask.bytes, victim_bytes(from));
    case Why::kCapacity: {
      const uint64_t used = promised_without([](const auto& each) { return each.victim; });
      return used - std::min(used, capacity.target_bytes);
    }
    default:
      break;
  }
  const WaitingList::Room room =
      room_without(*ask.session, ask.why == Why::kAdmission ? Lanes::kWhereItRunsNext : Lanes::kAny,
                   [&](const auto& each) { return each.victim || is_same(each, ask.session); });
  const uint64_t p = ask.session->persistent_bytes, total = p + ask.session->ephemeral_bytes;
  if (!room.any) return kUnknown;
  return std::max(p - std::min(p, room.persistent_bytes), total - std::min(total, room.total_bytes));
}

std::optional<Victims> Scheduler::Impl::who_gives(const Ask& ask, Victims from) const {
  const uint64_t bytes = missing(ask, from);
  if (bytes == 0) return Victims{};
  sort_best_first(*policy, from.sessions);
  Marks marks(from);
  marks.all(true);
  if (const uint64_t left = missing(ask, from); left > 0) {
    marks.all(false);
    // An asker with other ways to get the rest takes what there is.
    if (!ask.takes_less(left) || left >= bytes) return std::nullopt;
    return from;
  }
  const std::function<uint64_t(const SessionRecord&)> bytes_of = gives_back();
  std::vector<Claim> claims = claims_of(from.sessions, ask.now_ns);
  for (size_t i = 0; i < claims.size(); ++i) claims[i].bytes = bytes_of(*from.sessions[i]);
  for (const CacheRecord* each : from.caches) claims.push_back(claim_of(*each, ask.now_ns));
  const std::vector<size_t> order = giving_order(claims);
  const std::vector<uint64_t> chosen = give_up(claims, bytes == kUnknown ? 0 : bytes);
  const auto enough = [&](size_t first_of_order) {
    marks.all(false);
    for (size_t i = 0; i < chosen.size(); ++i) marks[i] = chosen[i] > 0;
    for (size_t i = 0; i < first_of_order; ++i) marks[order[i]] = true;
    return missing(ask, from) == 0;
  };
  // The bytes that a lane gives back depend on all of its sessions, so the choice may fall short.
  if (!enough(0)) {
    size_t too_few = 0, do_do = order.size();
    while (do_do > too_few + 1) {
      const size_t middle = too_few + (do_do - too_few) / 2;
      (enough(middle) ? do_do : too_few) = middle;
    }
    (void)enough(do_do);
  }
  size_t looked_at = 0;
  for (size_t i = order.size(); i-- > 0 && looked_at < kMostSpared;) {
    if (!marks[order[i]]) continue;
    ++looked_at;
    marks[order[i]] = false;
    if (missing(ask, from) > 0) marks[order[i]] = true;
  }
  // The caches that rest on first layers go with them.
  for (CacheRecord* each : from.caches)
    if (const CacheRecord* first = find_cache(each->first_part); first != nullptr && first->victim)
      each->victim = true;
  std::erase_if(from.sessions, [](const SessionRecord* each) { return !each->victim; });
  std::erase_if(from.caches, [](const CacheRecord* each) { return !each->victim; });
  marks.all(false);
  return from;
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
  return (evictable(each) || (!waits.turned_back && each.may_turn_back_for(waits))) &&
         gives_way(each, waits) == GivesWay::kAtOnce;
}

WaitingList::Room Scheduler::Impl::claimable_room(const SessionRecord& session) const {
  const Ask ask{Why::kAdmission, 0, &session};
  return room_without(session, Lanes::kWhereItRunsNext,
                      [&](const auto& each) { return may_give(each, ask); });
}

WaitingList::Room Scheduler::Impl::room_without_spares(const SessionRecord& session) const {
  return room_without(session, Lanes::kAny, [&](const auto& each) { return spare(each); });
}

bool Scheduler::Impl::claim_spares(const SessionRecord& session, uint64_t now_ns) {
  const Ask ask{Why::kSpares, now_ns, &session};
  const auto victims = who_gives(ask, who_may_give(ask));
  if (!victims) return false;
  evict(*victims, now_ns);
  return evicting > 0;  // what is on its way out may make the room
}

bool Scheduler::Impl::claim(SessionRecord& session, uint64_t now_ns) {
  if (!session.spec.may_claim) return false;
  if (any_spare() && claim_spares(session, now_ns)) return true;
  if (!options.paging) return false;
  // The coordinator makes room for it: others shrink to their limits, or have been stopped.
  if (above_limit_bytes > 0 && session.bytes_cls == SessionClass::kGuaranteed) return true;
  // Merging lanes copies nothing.
  if (!session.claiming &&
      mergeable_room(session).holds(session.persistent_bytes,
                                    session.persistent_bytes + session.ephemeral_bytes) &&
      may_join(session, residents, false) == MayJoin::kYes)
    return false;
  const Ask ask{Why::kAdmission, now_ns, &session};
  Victims candidates = who_may_give(ask);
  if (candidates.empty() && evicting == 0 && !session.claiming) return false;
  const auto victims = who_gives(ask, std::move(candidates));
  bool waits = victims.has_value();
  // There is nothing to page out: either a shrink has yet to settle, or the session fits only in a way that place()
  // does not take.
  if (waits && victims->empty() && evicting == 0)
    waits = std::any_of(lanes.begin(), lanes.end(),
                        [](const LaneRecord& lane) { return lane.open && lane.held() != lane.bytes; });
  set_claiming(session, waits);
  if (!waits) return false;
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

bool Scheduler::make_room(SessionId id, const RoomAsk& ask, uint64_t now_ns) {
  const SessionRecord* session = impl_->find(id);
  const bool none = session == nullptr || !session->holds_promise();
  if (none && id != kNoSession) return false;
  switch (ask.from) {
    case Giver::kSpare:
      return impl_->any_spare() &&
             impl_->make_room({Why::kDrop, now_ns, session, ask.bytes, ask.elsewhere_bytes}, id);
    case Giver::kSessions:
      return !none && impl_->make_room({Why::kAllocation, now_ns, session, ask.bytes}, id);
    case Giver::kBoundaries:
      return !none && impl_->make_room_at_boundaries(*session, ask.bytes, now_ns);
    default:
      return false;  // the driver has them
  }
}

uint64_t Scheduler::Impl::victim_bytes(const Victims& candidates) const {
  uint64_t bytes = 0;
  for (const CacheRecord* each : candidates.caches) bytes += each->victim ? each->bytes : 0;
  if (candidates.sessions.empty()) return bytes;
  const auto none = [](const SessionRecord&) { return false; };
  for (const LaneRecord& lane : lanes) {
    bool busy = false;
    const LaneRest before = rest_of(lane, none, [](const SessionRecord&) {});
    const LaneRest after = rest_of(
        lane, [](const SessionRecord& each) { return each.victim; },
        [&](const SessionRecord& each) { busy = busy || each.view.in_flight > 0; });
    bytes += before.persistent_bytes - after.persistent_bytes;
    // A lane in use gets smaller at a boundary; one that several processes map, when all have said so.
    if (!busy && !(options.shared_lanes && after.members > 0))
      bytes += before.ephemeral_bytes - after.ephemeral_bytes;
  }
  return bytes;
}

bool Scheduler::Impl::make_room(Ask ask, std::optional<SessionId> yields_to) {
  const bool pages = ask.why == Why::kAllocation && options.paging && yields_to;
  const uint64_t coming = pages ? turn_back(*ask.session, ask.bytes, ask.now_ns) : 0;
  if (coming >= ask.bytes) return true;
  ask.bytes -= coming;
  const auto victims = who_gives(ask, who_may_give(ask));
  if (!victims) return coming > 0;
  for (SessionRecord* victim : victims->sessions)
    if (yields_to) victim->yields_to = yields_to;
  evict(*victims, ask.now_ns);
  return coming > 0 || !victims->empty();
}

// Sessions that turn back already, also for a session that waits for admission, give the bytes that no allocation
// counts on yet; the waiting session gets its bytes later. Others turn back whole.
uint64_t Scheduler::Impl::turn_back(const SessionRecord& session, uint64_t bytes, uint64_t now_ns) {
  if (session.bytes_cls != SessionClass::kGuaranteed) return 0;
  std::vector<SessionRecord*> coming;
  for (const LaneRecord& lane : lanes)
    for (SessionRecord* member : lane.members)
      if (member->bytes == Bytes::kTurningBack || member->may_turn_back_for(session))
        coming.push_back(member);
  sort_best_first(*policy, coming);
  std::vector<Claim> claims = claims_of(coming, now_ns);
  for (size_t i = 0; i < coming.size(); ++i) {
    uint64_t spoken_for = 0;
    for (const ComingBack& each : coming_back)
      if (each.of == coming[i]->view.id) spoken_for += each.bytes;
    claims[i].bytes = coming[i]->persistent_bytes - std::min(coming[i]->persistent_bytes, spoken_for);
    if (coming[i]->bytes == Bytes::kTurningBack) claims[i] = {claims[i].bytes, 0, 0, true};
  }
  const std::vector<uint64_t> given = give_up(claims, bytes);
  uint64_t missing = bytes;
  for (const size_t i : giving_order(claims)) {
    const uint64_t takes = std::min(missing, given[i]);
    if (takes == 0) continue;
    SessionRecord& member = *coming[i];
    missing -= takes;
    coming_back.push_back({member.view.id, session.view.id, takes});
    if (!member.yields_to) member.yields_to = session.view.id;
    if (member.bytes == Bytes::kComing) start_turn_back(member);
  }
  return bytes - missing;
}

void Scheduler::Impl::start_turn_back(SessionRecord& session) {
  change(session, BytesEvent::kChosen);
  actions.push_back({ActionKind::kTurnBack, session.lane, session.view.id, session.persistent_bytes});
}

bool Scheduler::Impl::make_room_at_boundaries(const SessionRecord& session, uint64_t bytes, uint64_t now_ns) {
  if (session.bytes_cls != SessionClass::kGuaranteed || !options.paging) return false;
  // Room on its way for another session may be enough for both. If not, the session asks again.
  for (const LaneRecord& lane : lanes)
    for (const SessionRecord* member : lane.members)
      if (member->yields_to && member->goes_out()) return true;
  const Ask ask{Why::kBoundaries, now_ns, &session, bytes - std::min(bytes, free_bytes())};
  const auto victims = who_gives(ask, who_may_give(ask));
  if (!victims || victims->empty()) return false;
  for (SessionRecord* victim : victims->sessions) victim->yields_to = session.view.id;
  evict(*victims, now_ns);
  return true;
}

// The price of changing lanes is P, out and in again: a session maps its lane once, when it is admitted or paged in. No
// session goes that would not come in again at once, so that all have their memory when the lane is no longer held up.
// So sessions of the largest E stay if the device has no room for another lane of that size. If there is no room for
// any lane, sessions go out until there is; with an E of its own each, they would have found no place from the start.
// They come in again when the lanes are one (join_lanes).
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
    if (leaving.sessions.empty() && least != nullptr && evicting == 0) make_room_to_leave(*least, now_ns);
  }
}

void Scheduler::Impl::make_room_to_leave(const SessionRecord& session, uint64_t now_ns) {
  const bool others_go_on = std::any_of(lanes.begin(), lanes.end(), [&](const LaneRecord& other) {
    return other.open && suits(other, session) && !other.held_up();
  });
  if (others_go_on) return;
  const Ask ask{Why::kOtherLane, now_ns, &session};
  if (const auto victims = who_gives(ask, who_may_give(ask))) evict(*victims, now_ns);
}

// Joins the lanes that a trust group has after a hang. Each lane except the largest closes when its E lets a waiting
// session in. Its sessions change lanes as in leave_held_up().
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
    const uint64_t room = free_bytes() + lane.held();
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
  const bool guaranteed = session->bytes_cls == SessionClass::kGuaranteed;
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
