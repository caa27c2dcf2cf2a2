// Who gets in, where, and who is paged out for it.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/units.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
namespace {

// Position of `session` in `list` by the policy's order, after its equals. A binary search of its own: a
// custom policy's `before` may be no order at all, and must then do no harm.
size_t position(const Policy& policy, const std::vector<SessionRecord*>& list, const SessionRecord& session) {
  size_t low = 0, high = list.size();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (policy.before(session.view, list[middle]->view))
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

}  // namespace

uint32_t Scheduler::Impl::max_lanes() const {
  const uint32_t a = options.max_lanes, b = traits.max_lanes;
  if (a == 0 || b == 0) return a + b;
  return std::min(a, b);
}

size_t Scheduler::Impl::enqueue(SessionRecord& session) {
  const size_t at = position(*policy, waiting, session);
  waiting.insert(waiting.begin() + static_cast<std::ptrdiff_t>(at), &session);
  return at;
}

void Scheduler::Impl::dequeue(SessionRecord& session) {
  const auto found = std::find(waiting.begin(), waiting.end(), &session);
  if (found != waiting.end()) waiting.erase(found);
}

void Scheduler::Impl::requeue_all() {
  std::vector<SessionRecord*> old;
  old.swap(waiting);
  for (SessionRecord* session : old) enqueue(*session);
}

Placement Scheduler::Impl::placement(const SessionRecord& session) const {
  if (traits.max_residents != 0 && residents >= traits.max_residents) return {};
  if (session.persistent_bytes > free_bytes()) return {};
  std::vector<LaneView> views;
  views.reserve(lanes_open);
  for (LaneId id = 0; id < lanes.size(); ++id) {
    const LaneRecord& lane = lanes[id];
    if (!lane.open) continue;
    // What was paged out for it made room where it runs next: not to queue behind its betters elsewhere.
    if (session.claiming && !runs_next(session, lane)) continue;
    if (lane.compute_units != session.compute_units) continue;
    LaneView view{id, lane.held, 0, static_cast<uint32_t>(lane.members.size())};
    if (options.lane_finder == LaneFinderKind::kBalanced) {
      uint64_t longest = 0, unknown = 0;
      for (const SessionRecord* member : lane.members) {
        const uint64_t left = member->view.remaining_ns;
        if (left == kUnknown) {
          ++unknown;
        } else {
          view.backlog_ns += left;
          longest = std::max(longest, left);
        }
      }
      view.backlog_ns += unknown * std::max<uint64_t>(longest, 1);
    }
    views.push_back(view);
  }
  const uint32_t limit = max_lanes();
  Placement found = find_lane(
      options.lane_finder, session.persistent_bytes, session.ephemeral_bytes, free_bytes(), views,
      (limit == 0 || lanes_open < limit) && session.compute_units <= options.compute_units - compute_units);
  if (session.spec.profiling && found.kind != Placement::Kind::kNone) {
    // All that is free, on top of what the lane has.
    const uint64_t room = free_bytes() - session.persistent_bytes;
    found.bytes = found.kind == Placement::Kind::kOpen ? room : lanes[found.lane].held + room;
  }
  return found;
}

bool Scheduler::Impl::place(SessionRecord& session, uint64_t now_ns) {
  if (residents > 0 && !policy->welcomes(session.view)) return false;
  const Placement found = placement(session);
  if (found.kind == Placement::Kind::kNone) return false;
  LaneId id = found.lane;
  if (found.kind == Placement::Kind::kOpen) {
    id = 0;
    while (id < lanes.size() && lanes[id].open) ++id;
    if (id == lanes.size()) lanes.emplace_back();
    LaneRecord& lane = lanes[id];
    lane = LaneRecord{};
    lane.open = true;
    lane.bytes = lane.held = found.bytes;
    lane.compute_units = session.compute_units;
    lane_bytes += lane.held;
    compute_units += lane.compute_units;
    ++lanes_open;
    actions.push_back({ActionKind::kOpenLane, id, kNoSession, lane.bytes, lane.compute_units});
  }
  if (session.spec.profiling) session.ephemeral_bytes = found.bytes;
  LaneRecord& lane = lanes[id];
  if (session.ephemeral_bytes > lane.bytes) {
    lane.bytes = session.ephemeral_bytes;
    if (lane.bytes > lane.held) {
      lane_bytes += lane.bytes - lane.held;
      lane.held = lane.bytes;
    }
    actions.push_back({ActionKind::kResizeLane, id, kNoSession, lane.bytes});
  }
  join(session, id);
  session.claiming = false;
  session.overtaken = 0;
  if (session.state == SessionState::kPagedOut) {
    session.move = SessionRecord::Move::kIn;
    actions.push_back({ActionKind::kPageIn, id, session.view.id, session.persistent_bytes});
    return true;
  }
  session.state = SessionState::kResident;
  actions.push_back({ActionKind::kAdmit, id, session.view.id, session.persistent_bytes});
  policy->admitted(session.view, id, now_ns);
  set_ready_slot(session, session.ready);
  return true;
}

void Scheduler::Impl::join(SessionRecord& session, LaneId id) {
  LaneRecord& lane = lanes[id];
  lane.members.push_back(&session);
  session.lane = id;
  session.wake = false;
  persistent_bytes += session.persistent_bytes;
  ++residents;
  session.view.virtual_ns = lane.virtual_ns;  // a newcomer starts at the current virtual time
}

void Scheduler::Impl::quit(SessionRecord& session) {
  const LaneId id = session.lane;
  LaneRecord& lane = lanes[id];
  set_ready_slot(session, false);
  lane.members.erase(std::find(lane.members.begin(), lane.members.end(), &session));
  session.lane = kNoLane;
  persistent_bytes -= session.persistent_bytes;
  --residents;
  if (session.evicting) {
    session.evicting = false;
    --evicting;
  }
  if (session.spec.profiling)
    session.ephemeral_bytes = rounded(session.spec.ephemeral_bytes);  // not the lane it had
  settle(id);
}

bool Scheduler::Impl::runs_next(const SessionRecord& session, const LaneRecord& lane) const {
  return std::all_of(lane.members.begin(), lane.members.end(),
                     [&](const SessionRecord* member) { return policy->before(session.view, member->view); });
}

void Scheduler::Impl::settle(LaneId id) {
  LaneRecord& lane = lanes[id];
  if (lane.members.empty()) {
    lane_bytes -= lane.held;
    compute_units -= lane.compute_units;
    lane.open = false;
    lane.held = lane.bytes = 0;
    lane.compute_units = 0;
    --lanes_open;
    actions.push_back({ActionKind::kCloseLane, id, kNoSession, 0});
    return;
  }
  uint64_t need = 0;
  for (const SessionRecord* member : lane.members) need = std::max(need, member->ephemeral_bytes);
  if (need == lane.bytes) return;
  lane.bytes = need;
  lane.settles_at = lane.dispatched;
  actions.push_back({ActionKind::kResizeLane, id, kNoSession, need});
  boundary(id);
}

bool Scheduler::Impl::boundary(LaneId id) {
  LaneRecord& lane = lanes[id];
  if (!lane.open || lane.held == lane.bytes || lane.completed < lane.settles_at) return false;
  lane_bytes -= lane.held - lane.bytes;
  lane.held = lane.bytes;
  return true;
}

// Would `session` fit, and run next in its lane, were `removed` gone and all shrinks settled?
bool Scheduler::Impl::fits_without(const SessionRecord& session,
                                   const std::vector<SessionRecord*>& removed) const {
  const auto is_removed = [&](const SessionRecord* member) {
    return member->evicting || member->move == SessionRecord::Move::kOut ||
           std::find(removed.begin(), removed.end(), member) != removed.end();
  };
  uint64_t used = 0;
  uint32_t units = 0;
  size_t staying = 0;
  std::vector<LaneView> views;
  for (LaneId id = 0; id < lanes.size(); ++id) {
    if (!lanes[id].open) continue;
    LaneView view{id, 0, 0, 0};
    bool runs_next = true;
    for (const SessionRecord* member : lanes[id].members) {
      if (is_removed(member)) continue;
      ++staying;
      ++view.sessions;
      view.bytes = std::max(view.bytes, member->ephemeral_bytes);
      used += member->persistent_bytes;
      runs_next = runs_next && policy->before(session.view, member->view);
    }
    used += view.bytes;
    if (view.sessions > 0) units += lanes[id].compute_units;
    runs_next = runs_next && lanes[id].compute_units == session.compute_units;
    if (view.sessions > 0 && runs_next) views.push_back(view);
    if (view.sessions > 0 && !runs_next)
      views.push_back({kNoLane, 0, 0, view.sessions});  // counts, but is no choice
  }
  if (used > options.capacity_bytes) return false;
  if (traits.max_residents != 0 && staying >= traits.max_residents) return false;
  const uint32_t limit = max_lanes();
  const bool may_open =
      (limit == 0 || views.size() < limit) && session.compute_units <= options.compute_units - units;
  std::erase_if(views, [](const LaneView& view) { return view.lane == kNoLane; });
  return find_lane(LaneFinderKind::kSalus, session.persistent_bytes, session.ephemeral_bytes,
                   options.capacity_bytes - used, views, may_open)
             .kind != Placement::Kind::kNone;
}

bool Scheduler::Impl::claim(SessionRecord& session, uint64_t now_ns) {
  if (!options.paging) return false;
  if (residents > 0 && !policy->welcomes(session.view)) return false;
  std::vector<SessionRecord*> outranked;  // best first
  for (const LaneRecord& lane : lanes) {
    if (!lane.open) continue;
    for (SessionRecord* member : lane.members) {
      if (!evictable(*member) || !policy->outranks(session.view, member->view)) continue;
      outranked.insert(outranked.begin() + static_cast<std::ptrdiff_t>(position(*policy, outranked, *member)),
                       member);
    }
  }
  if (outranked.empty() && evicting == 0 && !session.claiming) return false;
  std::vector<SessionRecord*> victims;
  while (!fits_without(session, victims)) {
    if (outranked.empty()) return session.claiming = false;
    victims.push_back(outranked.back());
    outranked.pop_back();
  }
  // Spare those that turned out not to be needed, better ranked ones first.
  for (size_t i = victims.size(); i-- > 0;) {
    std::vector<SessionRecord*> fewer = victims;
    fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
    if (fits_without(session, fewer)) victims = std::move(fewer);
  }
  if (victims.empty() && evicting == 0) {
    // Nothing to page out: either a shrink has yet to settle, or it fits only in a way that place() does not
    // take.
    const bool settling = std::any_of(lanes.begin(), lanes.end(), [](const LaneRecord& lane) {
      return lane.open && lane.held != lane.bytes;
    });
    return session.claiming = settling;
  }
  session.claiming = true;
  for (SessionRecord* victim : victims) {
    victim->evicting = true;
    ++evicting;
    set_ready_slot(*victim, false);
    if (!victim->busy()) start_page_out(*victim, now_ns);
  }
  return true;
}

void Scheduler::Impl::start_page_out(SessionRecord& session, uint64_t now_ns) {
  session.state = SessionState::kPagedOut;
  session.move = SessionRecord::Move::kOut;
  policy->paged_out(session.view.id, session.lane, now_ns);
  actions.push_back({ActionKind::kPageOut, session.lane, session.view.id, session.persistent_bytes});
}

bool Scheduler::make_room(SessionId id, uint64_t bytes, uint64_t now_ns) {
  const SessionRecord* session = impl_->find(id);
  if (session == nullptr || !session->holds_promise() || !impl_->options.paging) return false;
  std::vector<SessionRecord*> lower;  // best first
  for (const LaneRecord& lane : impl_->lanes) {
    for (SessionRecord* member : lane.members) {
      if (member == session || !impl_->evictable(*member) || member->busy()) continue;
      const bool lower_class =
          session->view.cls == SessionClass::kGuaranteed && member->view.cls == SessionClass::kOpportunistic;
      if (!lower_class && !impl_->policy->outranks(session->view, member->view)) continue;
      lower.insert(lower.begin() + static_cast<std::ptrdiff_t>(position(*impl_->policy, lower, *member)),
                   member);
    }
  }
  uint64_t freed = 0;
  for (; !lower.empty() && freed < bytes; lower.pop_back()) {
    SessionRecord& victim = *lower.back();
    freed += victim.persistent_bytes;
    victim.evicting = victim.yielding = true;
    ++impl_->evicting;
    impl_->set_ready_slot(victim, false);
    impl_->start_page_out(victim, now_ns);
  }
  return freed > 0;
}

// Those not begun: a copy under way is carried through.
void Scheduler::Impl::cancel_evictions() {
  for (const LaneRecord& lane : lanes) {
    for (SessionRecord* member : lane.members) {
      if (!member->evicting || member->move != SessionRecord::Move::kNone) continue;
      member->evicting = false;
      --evicting;
      set_ready_slot(*member, member->ready);
    }
  }
}

bool Scheduler::Impl::admit_newcomer(SessionRecord& session, uint64_t now_ns) {
  const size_t at = enqueue(session);
  for (size_t i = 0; i < at; ++i) {
    const SessionRecord& ahead = *waiting[i];
    if (!ahead.wants_in()) continue;
    if (traits.head_of_line || ahead.claiming ||
        (traits.max_overtakes != 0 && ahead.overtaken >= traits.max_overtakes))
      return false;
  }
  if (!place(session, now_ns)) {
    claim(session, now_ns);
    return false;
  }
  waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(at));
  for (size_t i = 0; i < at; ++i) ++waiting[i]->overtaken;
  return true;
}

void Scheduler::Impl::admit_waiting(uint64_t now_ns) {
  size_t kept = 0;
  bool stopped = false;
  for (size_t i = 0; i < waiting.size(); ++i) {
    SessionRecord& session = *waiting[i];
    if (!stopped && session.wants_in() && !session.blocked) {
      if (place(session, now_ns)) {
        for (size_t j = 0; j < kept; ++j) ++waiting[j]->overtaken;
        continue;
      }
      stopped = claim(session, now_ns);
    }
    if (session.wants_in() &&
        (traits.head_of_line || (traits.max_overtakes != 0 && session.overtaken >= traits.max_overtakes)))
      stopped = true;
    waiting[kept++] = &session;
  }
  waiting.resize(kept);
  if (waiting.empty() || evicting > 0) return;
  // Idle paged-out sessions come back only into room that nobody wants.
  if (std::any_of(waiting.begin(), waiting.end(), [](const SessionRecord* s) { return s->wants_in(); }))
    return;
  std::erase_if(waiting,
                [&](SessionRecord* session) { return !session->blocked && place(*session, now_ns); });
}

void Scheduler::Impl::freed(uint64_t now_ns) {
  for (SessionRecord* session : waiting) session->blocked = false;
  admit_waiting(now_ns);
}

std::string Scheduler::Impl::shortage(const SessionRecord& session) const {
  const SessionSpec& spec = session.spec;
  if (session.compute_units > options.compute_units - compute_units)
    return base::format(
        "session '%s' needs %u compute units for itself; %u of %u can be promised, other lanes have the "
        "rest. "
        "Lower compute_units, close a session, or allow queueing",
        spec.name.c_str(), session.compute_units, options.compute_units - compute_units,
        options.compute_units);
  return base::format(
      "session '%s' needs %s (persistent %s, ephemeral %s); %s of %s can be promised: persistent %s of %zu "
      "sessions, lanes %s "
      "(%u). Lower ephemeral_bytes, close a session, or allow queueing",
      spec.name.c_str(), base::format_bytes(session.persistent_bytes + session.ephemeral_bytes).c_str(),
      base::format_bytes(session.persistent_bytes).c_str(),
      base::format_bytes(session.ephemeral_bytes).c_str(), base::format_bytes(free_bytes()).c_str(),
      base::format_bytes(options.capacity_bytes).c_str(), base::format_bytes(persistent_bytes).c_str(),
      residents, base::format_bytes(lane_bytes).c_str(), lanes_open);
}

}  // namespace gpushare::sched
