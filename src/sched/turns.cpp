// Turns: picks, virtual time over the lanes of the device, and sessions that are held back for others.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/saturate.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
namespace {

// Virtual time of the device, as far as it is kept: beyond it a double loses iterations.
constexpr double kMostVirtualNs = 0x1p50;

}  // namespace

std::span<const ResidentView> Scheduler::Impl::Device::residents() const {
  list.clear();
  for (LaneId id = 0; id < of->lanes.size(); ++id)
    for (const SessionRecord* member : of->lanes[id].members)
      if (on_device(member->bytes))
        list.push_back({&member->view, id, member->ready, member->since_ns, member->expected_in_flight_ns});
  return list;
}

// Only differences count, so the device's virtual time begins at 0 again.
void Scheduler::Impl::rebase() {
  for (LaneRecord& lane : lanes) {
    lane.start_tag_ns -= virtual_ns;
    for (SessionRecord* member : lane.members) {
      member->view.virtual_ns -= virtual_ns;
      touch(*member);
      show(*member);
    }
  }
  virtual_ns = 0;
}

// When others no longer wait for a session that is ready, in a lane with nothing in flight: its driver does not
// run it.
uint64_t Scheduler::Impl::patience_ends_ns(uint64_t ready_since_ns) const {
  return base::add_saturated(ready_since_ns, base::add_saturated(longest_ns, longest_ns) + kPatienceNs);
}

void Scheduler::Impl::advance(uint64_t now_ns) {
  double least = INFINITY;
  for (const LaneRecord& lane : lanes) {
    if (!lane.open) continue;
    if (lane.busy()) {
      // With many lanes most change nothing: what costs more is asked last.
      if (lane.start_tag_ns < least && (lanes_open == 1 || now_ns < overdue_ns(lane)))
        least = lane.start_tag_ns;
      continue;
    }
    // The lane's sessions are about to run, and keep the time by which they are behind.
    for (const SessionView& view : lane.ready)
      if (view.virtual_ns < least && now_ns < patience_ends_ns(view.ready_since_ns)) least = view.virtual_ns;
    for (const SessionRecord* back : lane.paused)
      if (expected(*back, now_ns)) least = std::min(least, back->view.virtual_ns);
  }
  if (least < INFINITY) virtual_ns = std::max(virtual_ns, least);
  if (virtual_ns > kMostVirtualNs) rebase();
}

// Whole devices first, then weights, then lines: one order whatever mixture a policy answers.
bool Scheduler::Impl::runs_before(const SessionView& a, const SessionView& b) const {
  if (before(a, b)) return true;
  if (before(b, a)) return false;
  if (a.share.kind != b.share.kind) return a.share.kind > b.share.kind;
  if (a.share.kind != Share::Kind::kWeighted) return ahead_in_line(a, b);
  if (a.virtual_ns != b.virtual_ns) return a.virtual_ns < b.virtual_ns;
  return std::pair(a.in_flight, a.id) < std::pair(b.in_flight, b.id);
}

size_t Scheduler::Impl::first_of(std::span<const SessionView> candidates, uint64_t now_ns,
                                 uint64_t& until) const {
  size_t best = candidates.size();
  until = kUnknown;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (best < candidates.size() && !runs_before(candidates[i], candidates[best])) continue;
    if (allowed_now(candidates[i], now_ns, until)) best = i;
  }
  return with_deadline == 0 || best == candidates.size() ? best : urgent_of(candidates, best, now_ns);
}

bool Scheduler::Impl::allowed_now(const SessionView& view, uint64_t now_ns, uint64_t& until) const {
  if (!asks.may_run) return true;
  const uint64_t from_ns = policy->may_run(view, device, now_ns);
  if (from_ns <= now_ns) return true;
  until = std::min(until, from_ns);
  return false;
}

// An iteration lasts twice the mean at most, as a rule, and a turn of another process for a while in any case.
bool Scheduler::Impl::lost_by_waiting(const SessionView& view, const SessionView& other,
                                      uint64_t now_ns) const {
  if (view.worth == 0 || now_ns > view.worth_until_ns) return false;
  const uint64_t iteration_ns = other.iteration_ns > 0 ? other.iteration_ns : longest_ns;
  const uint64_t wait_ns = base::add_saturated(base::add_saturated(iteration_ns, iteration_ns), kQuantumNs);
  return view.worth_until_ns - now_ns < wait_ns;
}

size_t Scheduler::Impl::urgent_of(std::span<const SessionView> candidates, size_t first,
                                  uint64_t now_ns) const {
  const SessionView& head = candidates[first];
  if (head.share.kind != Share::Kind::kWeighted) return first;
  size_t best = first;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const SessionView& view = candidates[i];
    const SessionView& other = candidates[best];
    if (i == best || !lost_by_waiting(view, other, now_ns)) continue;
    if (view.share.kind != Share::Kind::kWeighted || !equal(view, head) ||
        view.virtual_ns - view.unused_ns > head.virtual_ns)
      continue;
    if (lost_by_waiting(other, view, now_ns) &&
        std::pair(other.worth, other.unused_ns) >= std::pair(view.worth, view.unused_ns))
      continue;
    uint64_t until = kUnknown;
    if (allowed_now(view, now_ns, until)) best = i;
  }
  return best;
}

void Scheduler::Impl::set_worth(SessionRecord& session, double worth, uint64_t until_ns) {
  SessionView& view = session.view;
  if (!std::isfinite(worth) || worth < 0) worth = 0;
  if (worth == 0 && view.worth == 0) return;
  with_deadline += size_t{worth > 0} - size_t{view.worth > 0};
  view.worth = worth;
  view.worth_until_ns = until_ns;
  show(session);
}

// The session pays for going ahead with the time that it left unused, so that its virtual time is not above that of the
// others.
void Scheduler::Impl::use_worth(SessionRecord& session) {
  SessionView& view = session.view;
  if (view.worth == 0) return;
  double least = view.virtual_ns;
  for (const LaneId id : ready_lanes)
    for (const SessionView& other : lanes[id].ready)
      if (other.share.kind == Share::Kind::kWeighted && equal(other, view))
        least = std::min(least, other.virtual_ns);
  const double used_ns = weighted(session) ? std::min(view.unused_ns, view.virtual_ns - least) : 0;
  view.virtual_ns -= used_ns;
  view.unused_ns -= used_ns;
  set_worth(session, 0, 0);
}

// The virtual time of the sessions with which this one shares the device. Under a policy without ranks: that of the
// device. With ranks: the least of those of equal rank that want the device, or else the most of those that do not,
// because sessions of other ranks run before or after it. Infinity if there are none.
double Scheduler::Impl::shared_virtual_ns(const SessionRecord& session) {
  if (!asks.before) return virtual_ns;
  if (session.peers != nullptr) {
    settle();
    for (const SessionRecord& other : session.peers->wanting)
      if (&other != &session) return other.begun_key;
    const auto& resting = session.peers->resting;
    for (auto other = resting.rbegin(); other != resting.rend(); ++other)
      if (&*other != &session) return other->begun_key;
    return INFINITY;
  }
  double least = INFINITY, most = -INFINITY;
  for (const LaneRecord& lane : lanes)
    for (const SessionRecord* other : lane.members) {
      if (other == &session || !weighted(*other) || !equal(other->view, session.view)) continue;
      const double begun =
          other->view.virtual_ns - virtual_cost(other->expected_in_flight_ns, other->view.share.weight);
      if (other->wanted() || other->soon_until_ns != 0)
        least = std::min(least, begun);
      else
        most = std::max(most, begun);
    }
  if (least < INFINITY) return least;
  return most > -INFINITY ? most : INFINITY;
}

// The session wants the device again, or for the first time: it begins where the others are, or behind them by so much.
void Scheduler::Impl::catch_up(SessionRecord& session, double lag_ns) {
  const double others = shared_virtual_ns(session);
  if (const double from_ns = others - lag_ns; others < INFINITY && from_ns > session.view.virtual_ns) {
    SessionView& view = session.view;
    view.unused_ns = std::min(view.unused_ns + (from_ns - view.virtual_ns),
                              virtual_cost(static_cast<double>(kMostUnusedNs), view.share.weight));
    view.virtual_ns = from_ns;
  }
  touch(session);
}

// Starts a session that is new in its lane.
void Scheduler::Impl::start_with_others(SessionRecord& session) {
  const double others = shared_virtual_ns(session);
  if (others < INFINITY) session.view.virtual_ns = others;
  touch(session);
}

// The others are those that want the device, and those that may be back soon: two sessions that pause by turns do not
// take each other's lag.
void Scheduler::Impl::note_lag(SessionRecord& session, uint64_t now_ns) {
  session.lag_ns = 0;
  if (options.keeps_lag_ns == 0 || session.wanted() || !weighted(session)) return;
  const auto counts = [&](const SessionRecord& other) {
    return other.wanted() || now_ns - std::min(now_ns, other.last_wanted_ns) < options.keeps_lag_ns;
  };
  double least = INFINITY;
  if (session.peers != nullptr) {
    settle();
    auto& recent = session.peers->recent;
    for (auto other = recent.begin(); other != recent.end() && least == INFINITY;) {
      if (&*other != &session && !counts(*other)) {
        other = recent.erase(other);  // it comes in again when it wants something
        continue;
      }
      if (&*other != &session) least = other->virtual_key;
      ++other;
    }
  } else {
    for (const LaneRecord& lane : lanes)
      for (const SessionRecord* other : lane.members)
        if (other != &session && weighted(*other) && equal(other->view, session.view) && counts(*other))
          least = std::min(least, other->view.virtual_ns);
  }
  if (least < INFINITY) session.lag_ns = std::max(least - session.view.virtual_ns, 0.0);
}

double Scheduler::Impl::others_virtual_ns(LaneId own, const SessionView& view, uint64_t now_ns,
                                          uint64_t& until) {
  if (const auto among = peers.find(view.rank); !asks.before || asks.ranks) {
    const FirstLanes::Of& found = lanes_behind(among->second, now_ns).without(own);
    if (found.virtual_ns < INFINITY) until = found.until_ns;
    return found.virtual_ns;
  }
  const auto shares = [&](const SessionView& other) {
    return other.share.kind == Share::Kind::kWeighted && equal(other, view);
  };
  double least = INFINITY;
  for (LaneId id = 0; id < lanes.size(); ++id) {
    const LaneRecord& lane = lanes[id];
    if (id == own || !lane.open) continue;
    double mine = INFINITY;
    uint64_t ends = 0;
    for (const SessionView& other : lane.ready) {
      if (!shares(other)) continue;
      mine = std::min(mine, other.virtual_ns);
      ends = std::max(ends, patience_ends_ns(other.ready_since_ns));
    }
    // One of unknown length says nothing yet.
    for (const SessionRecord* member : lane.flying)
      if (member->expected_in_flight_ns > 0 && shares(member->view))
        mine = std::min(mine, member->view.virtual_ns);
    if (lane.busy()) ends = overdue_ns(lane);
    if (mine < least && now_ns < ends) {
      least = mine;
      until = ends;
    }
    for (const SessionRecord* back : lane.paused) {
      if (back->view.virtual_ns >= least || !expected(*back, now_ns) || !shares(back->view)) continue;
      least = back->view.virtual_ns;
      until = back->expected_until_ns;
    }
  }
  return least;
}

void Scheduler::Impl::hold_back(LaneRecord& lane, uint64_t until_ns) {
  held_back += size_t{until_ns != kUnknown} - size_t{lane.held_back_ns != kUnknown};
  lane.held_back_ns = until_ns;
}

std::optional<SessionId> Scheduler::pick(LaneId id, uint64_t now_ns) {
  if (now_ns >= impl_->stays_end_ns) impl_->admit_waiting(now_ns);
  if (!lane_is_open(id) || impl_->lanes[id].held_up()) return std::nullopt;
  impl_->hold_back(impl_->lanes[id], kUnknown);
  if (impl_->ready_lanes.empty()) return std::nullopt;
  auto picked = impl_->options.shared_lanes ? impl_->pick_of_all(id, now_ns) : impl_->pick_in(id, now_ns);
  if (!picked && !impl_->options.shared_lanes && impl_->lanes_open > 1 && !impl_->lanes[id].busy() &&
      !impl_->crowded_lanes().empty())
    picked = impl_->move_in(id, now_ns);
  if (picked) impl_->lanes[id].picked = *picked;
  return picked;
}

bool Scheduler::Impl::may_start(LaneId id, const SessionView& view, uint64_t now_ns) {
  uint64_t until = kUnknown;
  if (!waits_for_lanes(id, view, now_ns, until)) return true;
  hold_back(lanes[id], until);
  return false;
}

bool Scheduler::Impl::waits_for_lanes(LaneId own, const SessionView& view, uint64_t now_ns, uint64_t& until) {
  if (lanes_open < 2) return false;
  if (asks.before && outranked(own, view, now_ns, until)) return true;
  if (view.share.kind != Share::Kind::kWeighted) return false;
  // Half an iteration may start early: lengths vary, and a lane that waited for the last microsecond of
  // another's iteration would lose time for nothing.
  const double others = others_virtual_ns(own, view, now_ns, until);
  const double unused_ns = view.worth > 0 && now_ns <= view.worth_until_ns ? view.unused_ns : 0;
  return view.virtual_ns - unused_ns -
             virtual_cost(static_cast<double>(view.iteration_ns) / 2, view.share.weight) >
         others;
}

// True if a session of another lane that has work ranks higher, because the iteration would slow that session. `until`:
// until when at most.
bool Scheduler::Impl::outranked(LaneId own, const SessionView& view, uint64_t now_ns, uint64_t& until) {
  if (asks.ranks) {
    const FirstLanes::Of& found = lanes_above(peers.find(view.rank)->second, now_ns).without(own);
    if (found.lane == kNoLane) return false;
    until = found.until_ns;
    return true;
  }
  for (LaneId id = 0; id < lanes.size(); ++id) {
    const LaneRecord& lane = lanes[id];
    if (id == own || !lane.open || lane.compute_units != 0) continue;
    uint64_t ends = 0;
    for (const SessionRecord* member : lane.flying)
      if (before(member->view, view)) ends = overdue_ns(lane);
    for (const SessionView& other : lane.ready)
      if (before(other, view))
        ends = std::max(ends, lane.busy() ? overdue_ns(lane) : patience_ends_ns(other.ready_since_ns));
    for (const SessionRecord* back : lane.paused)
      if (expected(*back, now_ns) && before(back->view, view)) ends = std::max(ends, back->expected_until_ns);
    if (now_ns >= ends) continue;
    until = ends;
    return true;
  }
  return false;
}

std::optional<SessionId> Scheduler::Impl::pick_in(LaneId id, uint64_t now_ns) {
  LaneRecord& lane = lanes[id];
  if (lane.ready.empty()) return std::nullopt;
  const bool others_come = !lane.paused.empty() || !lane.flying.empty();
  const std::span<const SessionView> candidates =
      others_come ? with_expected(lane.ready, id, now_ns) : lane.ready;
  uint64_t until = kUnknown;
  const size_t picked = first_of(candidates, now_ns, until);
  if (picked == candidates.size()) {
    hold_back(lane, until);
    return std::nullopt;
  }
  const SessionView& view = candidates[picked];
  const bool is_ready = picked < lane.ready.size();  // those that are expected stand behind the ready ones
  if ((!is_ready && waits_for(lane, view, now_ns)) || runs_ahead(lane, view) || !may_start(id, view, now_ns))
    return std::nullopt;
  return view.id;
}

// True if the session has said that more work waits for it, and came back when it said so before.
bool Scheduler::Impl::believes_more(SessionRecord& session, uint64_t now_ns) {
  session.said_more = false;
  if (session.view.worth == 0 || now_ns > session.view.worth_until_ns) return false;
  if (session.unbelieved > 0) {
    --session.unbelieved;
    return false;
  }
  return session.said_more = true;
}

void Scheduler::Impl::pause(SessionRecord& session, uint64_t now_ns) {
  session.last_wanted_ns = now_ns;
  touch(session);
  note_lag(session, now_ns);
  if (session.wanted()) return;
  session.paused_since_ns = now_ns;
  const uint64_t usual = session.pauses.usual_ns();
  Expected back = expected_of(session.pauses, session.view.iteration_ns);
  if (believes_more(session, now_ns)) back = {0, std::max(back.until_ns, kIdleForTurnNs)};
  session.returns = usual != kUnknown && back.from_ns == 0 && back.until_ns > 0;
  const uint64_t soon_ns = usual <= kSoonNs ? std::max(2 * usual, back.until_ns) : back.until_ns;
  if (soon_ns == 0 || session.lane == kNoLane) return;
  if (session.soon_until_ns == 0) lanes[session.lane].paused.push_back(&session);
  session.expected_from_ns = now_ns + back.from_ns;
  session.expected_until_ns = back.until_ns == 0 ? 0 : base::add_saturated(now_ns, back.until_ns);
  session.soon_until_ns = base::add_saturated(now_ns, soon_ns);
  touch(session);
}

// An iteration's end, which may pick the next one, needs no memory.
void Scheduler::Impl::make_places(LaneRecord& lane) {
  for (auto* list : {&lane.flying, &lane.paused})
    if (list->capacity() < lane.members.size()) list->reserve(2 * lane.members.size());
  const size_t most = 2 * residents + 2;  // those ready, and those expected
  if (movable.capacity() < most) movable.reserve(2 * most);
}

void Scheduler::Impl::stop_expecting(SessionRecord& session) {
  session.expected_until_ns = 0;
  if (std::exchange(session.soon_until_ns, 0) == 0) return;
  std::erase(lanes[session.lane].paused, &session);
  touch(session);
}

std::span<const SessionView> Scheduler::Impl::with_expected(std::span<const SessionView> ready, LaneId id,
                                                            uint64_t now_ns, SessionId except) {
  bool copied = ready.data() == movable.data() && !ready.empty();
  const auto add = [&](const SessionRecord& session) {
    if (session.view.id == except || !may_return(session)) return;
    if (!std::exchange(copied, true)) movable.assign(ready.begin(), ready.end());
    movable.push_back(session.view);
  };
  const auto add_of = [&](LaneRecord& lane) {
    const bool enqueues = options.enqueues && lane.long_in_flight();
    std::erase_if(lane.paused, [&](SessionRecord* session) {
      if (expected(*session, now_ns) || (enqueues && now_ns < session->soon_until_ns)) add(*session);
      const bool over = now_ns >= session->soon_until_ns;
      if (!over) return false;
      session->soon_until_ns = session->expected_until_ns = 0;
      touch(*session);
      return true;
    });
    for (const SessionRecord* member : lane.flying)
      if (member->returns && !member->ready) add(*member);
  };
  if (!options.shared_lanes)
    add_of(lanes[id]);
  else
    for (LaneRecord& lane : lanes)
      if (lane.open && !lane.held_up()) add_of(lane);
  return copied ? std::span<const SessionView>(movable) : ready;
}

bool Scheduler::Impl::waits_for(LaneRecord& lane, const SessionView& picked, uint64_t now_ns) {
  const SessionRecord& session = *find(picked.id);
  if (session.ready) return false;
  if (expected(session, now_ns)) hold_back(lane, session.expected_until_ns);
  return true;
}

bool Scheduler::Impl::runs_ahead(const LaneRecord& lane, const SessionView& view) {
  if (!options.enqueues || !lane.busy() || !asks.before || lane.compute_units != 0) return false;
  if (asks.ranks) {
    settle();
    for (const auto& [rank, among] : peers)
      if (rank < view.rank && among.in_the_way > 0) return true;
    return false;
  }
  for (const LaneRecord& other : lanes) {
    if (other.compute_units != 0) continue;
    for (const SessionRecord* member : other.members)
      if (member->view.id != view.id && !member->worth_ns && before(member->view, view)) return true;
  }
  return false;
}

// Sessions that wait for their turn behind others of their lane, have nothing in flight, and fit this one.
std::optional<SessionId> Scheduler::Impl::move_in(LaneId id, uint64_t now_ns) {
  const LaneRecord& lane = lanes[id];
  movable.clear();
  for (const LaneId from : crowded_lanes()) {
    if (from == id || lanes[from].least_ready_bytes > lane.bytes) continue;
    for (const SessionView& view : lanes[from].ready)
      if (const SessionRecord& each = *find(view.id);
          weighted(each) && view.in_flight == 0 && !each.overdue && takes(lane, each))
        movable.push_back(view);
  }
  if (movable.empty()) return std::nullopt;
  const std::span<const SessionView> candidates = with_expected(movable, id, now_ns);
  uint64_t until = kUnknown;
  const size_t picked = first_of(candidates, now_ns, until);
  if (picked == candidates.size() || waits_for(lanes[id], candidates[picked], now_ns) ||
      !may_start(id, candidates[picked], now_ns))
    return std::nullopt;
  const SessionId session = candidates[picked].id;
  if (move(*find(session), id, now_ns)) freed(now_ns);
  return session;
}

void Scheduler::set_overdue(SessionId id, bool overdue, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->lane == kNoLane || session->overdue == overdue) return;
  impl_->set_overdue(*session, overdue);
  if (overdue) return;
  if (session->bytes == Bytes::kLeaving && !session->busy())
    impl_->start_page_out(*session, now_ns);
  else if (session->stopped)
    impl_->stop(*session, now_ns);
  if (session->lane != kNoLane && impl_->lanes[session->lane].closing)
    (void)impl_->drain(session->lane, now_ns);
  impl_->freed(now_ns);  // those that left its lane may have room there
}

void Scheduler::Impl::set_overdue(SessionRecord& session, bool is) {
  if (session.overdue == is) return;
  session.overdue = is;
  touch(session);
  lanes[session.lane].overdue += is ? 1 : static_cast<uint32_t>(-1);
  overdue += is ? 1 : static_cast<uint32_t>(-1);
}

std::span<const SessionView> Scheduler::Impl::ready_of_all() {
  if (ready_lanes.size() == 1 && !lanes[ready_lanes.front()].held_up())
    return lanes[ready_lanes.front()].ready;
  movable.clear();
  for (const LaneId id : ready_lanes)
    if (!lanes[id].held_up()) movable.insert(movable.end(), lanes[id].ready.begin(), lanes[id].ready.end());
  return movable;
}

std::optional<SessionId> Scheduler::Impl::pick_of_all(LaneId id, uint64_t now_ns) {
  for (LaneId other = 0; other < lanes.size(); ++other)
    if (other != id && lanes[other].open && lanes[other].busy()) return std::nullopt;
  const std::span<const SessionView> ready = ready_of_all();
  if (ready.empty()) return std::nullopt;
  const std::span<const SessionView> candidates = with_expected(ready, id, now_ns);
  uint64_t until = kUnknown;
  const size_t picked = first_of(candidates, now_ns, until);
  if (picked == candidates.size()) hold_back(lanes[id], until);
  if (picked == candidates.size() || waits_for(lanes[id], candidates[picked], now_ns) ||
      find(candidates[picked].id)->lane != id)
    return std::nullopt;
  return candidates[picked].id;
}

bool Scheduler::would_go_on(SessionId id, LaneId lane_id, uint64_t now_ns) {
  const SessionRecord* session = impl_->find(id);
  return session != nullptr && impl_->weighted(*session) && would_pick(id, lane_id, now_ns);
}

bool Scheduler::would_pick(SessionId id, LaneId lane_id, uint64_t now_ns) {
  const SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->lane != lane_id || !session->resident()) return false;
  const std::span<const SessionView> ready = impl_->with_expected(
      impl_->options.shared_lanes ? impl_->ready_of_all() : impl_->lanes[lane_id].ready, lane_id, now_ns, id);
  if (ready.data() != impl_->movable.data()) impl_->movable.assign(ready.begin(), ready.end());
  impl_->movable.push_back(session->view);
  uint64_t until = kUnknown;
  return impl_->first_of(impl_->movable, now_ns, until) + 1 == impl_->movable.size() &&
         !waits_for_lanes(id, now_ns);
}

bool Scheduler::compares_lanes(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session != nullptr && session->lane != kNoLane && !impl_->options.shared_lanes &&
         (impl_->asks.before || impl_->weighted(*session));
}

bool Scheduler::waits_for_lanes(SessionId id, uint64_t now_ns) {
  if (!compares_lanes(id)) return false;
  const SessionRecord& session = *impl_->find(id);
  // What it has in flight ends before it begins anything, and by then the others have gone on, too.
  SessionView then = session.view;
  then.virtual_ns = begun_ns(session);
  uint64_t until = kUnknown;
  return impl_->waits_for_lanes(session.lane, then, now_ns, until);
}

bool Scheduler::outranked(SessionId id, uint64_t now_ns) {
  const SessionRecord* session = impl_->find(id);
  if (!impl_->asks.before || session == nullptr || session->lane == kNoLane) return false;
  const std::vector<SessionView>& ready = impl_->lanes[session->lane].ready;
  uint64_t until = kUnknown;
  return std::any_of(ready.begin(), ready.end(),
                     [&](const SessionView& view) { return impl_->before(view, session->view); }) ||
         (compares_lanes(id) && impl_->lanes_open > 1 &&
          impl_->outranked(session->lane, session->view, now_ns, until));
}

std::optional<std::span<const LaneId>> Scheduler::lanes_to_ask() const {
  Impl& state = *impl_;
  if (state.options.shared_lanes || state.ready_lanes.empty() || !state.crowded_lanes().empty())
    return std::nullopt;  // free lanes take sessions of busy ones
  // A lane that was held back for a session that has gone is asked once more.
  const auto held = std::count_if(state.ready_lanes.begin(), state.ready_lanes.end(),
                                  [&](LaneId id) { return state.lanes[id].held_back_ns != kUnknown; });
  if (static_cast<size_t>(held) != state.held_back) return std::nullopt;
  return state.ready_lanes;
}

uint64_t Scheduler::look_again_ns() const {
  uint64_t least = impl_->stays_end_ns;
  // Iterations in flight ask by themselves when they have finished.
  if (std::any_of(impl_->lanes.begin(), impl_->lanes.end(),
                  [](const LaneRecord& lane) { return lane.busy(); }))
    least = kUnknown;
  least = std::min(least, impl_->coordinate_at_ns);
  if (impl_->held_back > 0)
    for (const LaneRecord& lane : impl_->lanes) least = std::min(least, lane.held_back_ns);
  return least;
}

bool Scheduler::may_lend(SessionId id, LaneId lane_id) const {
  const SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->lane != lane_id || !session->resident() || session->view.in_flight > 0)
    return false;
  const LaneRecord& lane = impl_->lanes[lane_id];
  return !lane.closing && !lane.busy() && lane.held() == lane.bytes && impl_->waiting.empty() &&
         impl_->evicting == 0 && impl_->promised() <= impl_->capacity.target_bytes &&
         impl_->policy->holds_ns(session->view, impl_->device) > 0;
}

uint64_t Scheduler::decision_holds_until(LaneId id, uint64_t now_ns) const {
  if (!lane_is_open(id)) return kUnknown;
  const LaneRecord& lane = impl_->lanes[id];
  const SessionRecord* session = impl_->find(lane.picked);
  if (session == nullptr || session->lane != id || session->slot == SessionRecord::kNoSlot) return now_ns;
  const SessionView& view = session->view;
  uint64_t holds = impl_->policy->holds_ns(view, impl_->device);
  if (impl_->weighted(*session)) {
    uint64_t until = kUnknown;
    double next = impl_->lanes_open > 1 ? impl_->others_virtual_ns(id, view, now_ns, until) : INFINITY;
    for (const SessionView& other : lane.ready)
      if (other.id != view.id && other.share.kind == Share::Kind::kWeighted && impl_->equal(other, view))
        next = std::min(next, other.virtual_ns);
    holds = std::min(holds, base::to_uint64(std::max((next - view.virtual_ns) * view.share.weight, 0.0)));
  }
  return std::min(base::add_saturated(now_ns, holds), std::max(impl_->stays_end_ns, now_ns));
}

}  // namespace gpushare::sched
