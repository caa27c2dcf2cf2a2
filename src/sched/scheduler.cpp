// Events. Picks are in turns.cpp, admission and paging in admission.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "sched/scheduler.hpp"

#include <algorithm>
#include <cmath>

#include "base/saturate.hpp"
#include "base/units.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
namespace {

// Ranks by received service change in steps of this (srtf) or more.
constexpr uint64_t kAgesNs = 1'000'000'000;

}  // namespace

uint64_t Scheduler::Impl::rounded(uint64_t bytes) const {
  const uint64_t granule = std::max<uint64_t>(options.granularity_bytes, 1);
  const uint64_t rest = bytes % granule;
  if (rest == 0) return bytes;
  return bytes > kUnknown - (granule - rest) ? kUnknown : bytes + (granule - rest);
}

void Scheduler::Impl::show(SessionRecord& session) {
  if (session.slot != SessionRecord::kNoSlot) lanes[session.lane].ready[session.slot] = session.view;
}

void Scheduler::Impl::set_ready_slot(SessionRecord& session, bool present) {
  if (present == (session.slot != SessionRecord::kNoSlot)) return;
  LaneRecord& lane = lanes[session.lane];
  auto& ready = lane.ready;
  if (present) {
    if (ready.empty()) {
      lane.ready_position = ready_lanes.size();
      lane.least_ready_bytes = session.ephemeral_bytes;
      ready_lanes.push_back(session.lane);
    }
    lane.least_ready_bytes = std::min(lane.least_ready_bytes, session.ephemeral_bytes);
    session.slot = ready.size();
    ready.push_back(session.view);
    return;
  }
  if (session.slot + 1 != ready.size()) {
    ready[session.slot] = ready.back();
    find(ready[session.slot].id)->slot = session.slot;
  }
  ready.pop_back();
  session.slot = SessionRecord::kNoSlot;
  if (!ready.empty()) return;
  lanes[ready_lanes.back()].ready_position = lane.ready_position;
  ready_lanes[lane.ready_position] = ready_lanes.back();
  ready_lanes.pop_back();
}

// Declared time counts down; once it proves too short, or was never declared, iterations left times their
// mean.
void Scheduler::Impl::estimate_remaining(SessionRecord& session) {
  SessionView& view = session.view;
  const uint64_t total = session.spec.iterations_total;
  if (session.declared_ns != kUnknown && session.declared_ns > 0) {
    view.remaining_ns = session.declared_ns;
  } else if (total > view.iterations_done && view.iteration_ns > 0) {
    const double left =
        static_cast<double>(total - view.iterations_done) * static_cast<double>(view.iteration_ns);
    view.remaining_ns = left < 1e19 ? static_cast<uint64_t>(left) : kUnknown - 1;
  } else if (session.declared_ns == 0 && view.service_ns == 0) {
    view.remaining_ns = 0;
  } else {
    view.remaining_ns = kUnknown;
  }
}

base::Status Scheduler::Impl::validate(const SessionSpec& spec) const {
  if (spec.id == kNoSession || sessions.contains(spec.id))
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("session id %llu is 0 or in use", static_cast<unsigned long long>(spec.id))};
  if (!std::isfinite(spec.weight) || spec.weight <= 0)
    return {GPUSHARE_INVALID_ARGUMENT, base::format("session '%s': weight %g must be finite and above 0",
                                                    spec.name.c_str(), spec.weight)};
  const uint64_t p = rounded(spec.persistent_bytes), e = rounded(spec.ephemeral_bytes);
  const uint64_t most = capacity.target_bytes;
  if (p > most || e > most - p)
    return {GPUSHARE_EXCEEDS_CAPACITY,
            base::format("session '%s' needs persistent %s and ephemeral %s, but the capacity is %s: it "
                         "could not run alone",
                         spec.name.c_str(), base::format_bytes(p).c_str(), base::format_bytes(e).c_str(),
                         base::format_bytes(most).c_str())};
  if (rounded_units(spec.compute_units) > options.compute_units)
    return {
        GPUSHARE_EXCEEDS_CAPACITY,
        base::format("session '%s' needs %u compute units for itself; of this device lanes can have %u, in "
                     "multiples of %u",
                     spec.name.c_str(), spec.compute_units, options.compute_units,
                     options.granularity_compute_units)};
  return {};
}

uint64_t Scheduler::Impl::rounded_units(uint32_t units) const {
  const uint64_t granule = std::max<uint32_t>(options.granularity_compute_units, 1);
  return (units + granule - 1) / granule * granule;
}

Scheduler::Scheduler(SchedulerOptions options, std::unique_ptr<Policy> policy)
    : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  impl_->capacity = {options.capacity_bytes, options.capacity_bytes};
  impl_->policy = std::move(policy);
  impl_->traits = impl_->policy->traits();
}

Scheduler::~Scheduler() = default;

base::Status Scheduler::arrive(const SessionSpec& spec, uint64_t now_ns) {
  GPUSHARE_RETURN_IF_ERROR(impl_->validate(spec));
  auto owned = std::make_unique<SessionRecord>();
  SessionRecord& session = *owned;
  session.spec = spec;
  session.persistent_bytes = impl_->rounded(spec.persistent_bytes);
  session.ephemeral_bytes = impl_->rounded(spec.ephemeral_bytes);
  session.compute_units = static_cast<uint32_t>(impl_->rounded_units(spec.compute_units));
  session.declared_ns = spec.remaining_ns;
  SessionView& view = session.view;
  view.id = spec.id;
  view.cls = spec.cls;
  view.priority = spec.priority;
  view.weight = spec.weight;
  view.arrival_ns = view.ready_since_ns = session.last_wanted_ns = now_ns;
  view.persistent_bytes = spec.persistent_bytes;
  view.ephemeral_bytes = spec.ephemeral_bytes;
  impl_->estimate_remaining(session);
  impl_->sessions.emplace(spec.id, std::move(owned));
  impl_->policy->arrived(view, now_ns);
  if (spec.may_queue) {
    impl_->admit_newcomer(session, now_ns);
    return {};
  }
  // Refused rather than queued: nobody is paged out for it either, since that takes time.
  const bool paging = std::exchange(impl_->options.paging, false);
  const bool admitted = impl_->admit_newcomer(session, now_ns);
  impl_->options.paging = paging;
  if (admitted) return {};
  base::Status refused(GPUSHARE_DEVICE_OUT_OF_MEMORY, impl_->shortage(session));
  impl_->dequeue(session);
  impl_->policy->left(spec.id, now_ns);
  impl_->sessions.erase(spec.id);
  return refused;
}

void Scheduler::ready(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->ready) return;
  if (!session->evicting) impl_->forget_worth(*session);
  session->ready = true;
  session->view.ready_since_ns = now_ns;
  if (session->state == SessionState::kResident) {
    session->view.virtual_ns = std::max(session->view.virtual_ns, impl_->virtual_ns);
    if (!session->evicting) impl_->set_ready_slot(*session, true);
    impl_->policy->ready(id, session->lane, now_ns);
  } else if (session->state == SessionState::kPagedOut && session->move == SessionRecord::Move::kNone) {
    impl_->requeue(*session);
    impl_->admit_waiting(now_ns);
  }
}

void Scheduler::wake(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->state != SessionState::kPagedOut ||
      session->move == SessionRecord::Move::kIn)
    return;
  session->wake = true;
  if (session->move != SessionRecord::Move::kNone) return;
  impl_->requeue(*session);
  impl_->admit_waiting(now_ns);
}

void Scheduler::allow_paging(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->spec.may_page) return;
  session->spec.may_page = true;
  if (session->evicting && session->move == SessionRecord::Move::kNone && !session->busy())
    impl_->start_page_out(*session, now_ns);
}

void Scheduler::not_ready(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || !session->ready) return;
  session->ready = false;
  session->last_wanted_ns = now_ns;
  impl_->set_ready_slot(*session, false);
  if (session->wants_in() || session->chunk == nullptr) return;
  const bool claimed = std::exchange(session->claiming, false);
  impl_->requeue(*session);
  if (!claimed) return;
  impl_->cancel_evictions();
  impl_->admit_waiting(now_ns);
}

void Scheduler::dispatched(SessionId id, LaneId lane_id, uint64_t now_ns, uint64_t iterations) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->lane != lane_id || lane_id == kNoLane) return;
  session->ready = false;
  impl_->set_ready_slot(*session, false);
  LaneRecord& lane = impl_->lanes[lane_id];
  impl_->hold_back(lane, kUnknown);
  if (!lane.busy()) lane.progress_ns = now_ns;
  ++lane.dispatched;
  SessionView& view = session->view;
  const double expected = static_cast<double>(view.iteration_ns > 0 ? view.iteration_ns : impl_->longest_ns) *
                          static_cast<double>(iterations);
  lane.start_tag_ns = std::max(lane.start_tag_ns, view.virtual_ns);
  if (view.in_flight++ == 0) lane.flying.push_back(session);
  view.virtual_ns += virtual_cost(expected, view.weight);
  session->expected_in_flight_ns += expected;
  impl_->advance(now_ns);
  impl_->policy->dispatched(id, lane_id, now_ns);
}

void Scheduler::finished(SessionId id, uint64_t device_ns, uint64_t now_ns, uint64_t iterations) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->lane == kNoLane || session->view.in_flight == 0) return;
  LaneRecord& lane = impl_->lanes[session->lane];
  lane.progress_ns = session->last_wanted_ns = now_ns;
  if (iterations > 0) impl_->longest_ns = std::max(impl_->longest_ns, device_ns / iterations);
  SessionView& view = session->view;
  const double expected = session->expected_in_flight_ns / view.in_flight;
  session->expected_in_flight_ns -= expected;
  if (--view.in_flight == 0) std::erase(lane.flying, session);
  view.virtual_ns += virtual_cost(static_cast<double>(device_ns) - expected, view.weight);
  if (iterations > 1) {  // the lane has moved on to the start of the last of them
    const double last = static_cast<double>(device_ns) / static_cast<double>(iterations);
    lane.start_tag_ns =
        std::max(lane.start_tag_ns, view.virtual_ns - (session->expected_in_flight_ns + last) / view.weight);
    impl_->advance(now_ns);
  }
  ++lane.completed;
  view.service_ns += device_ns;
  view.iterations_done += iterations;
  if (view.iterations_done > 0) view.iteration_ns = view.service_ns / view.iterations_done;
  if (session->declared_ns != kUnknown) session->declared_ns -= std::min(session->declared_ns, device_ns);
  impl_->estimate_remaining(*session);
  impl_->show(*session);
  impl_->policy->finished(id, session->lane, device_ns, now_ns);
  bool settled = impl_->boundary(session->lane);
  if (session->evicting && session->move == SessionRecord::Move::kNone && !session->busy())
    impl_->start_page_out(*session, now_ns);
  if (impl_->lanes[session->lane].closing && impl_->drain(session->lane, now_ns)) settled = true;
  if (settled)
    impl_->freed(now_ns);
  else if (!impl_->waiting.empty() && view.service_ns / kAgesNs != (view.service_ns - device_ns) / kAgesNs)
    impl_->admit_waiting(now_ns);  // by what it has received, others may outrank it now
  else
    impl_->lower(now_ns);
}

void Scheduler::leave(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr) return;
  const bool was_claiming = session->claiming, yielded = session->yielding;
  impl_->forget_worth(*session);
  if (session->holds_promise()) {
    LaneRecord& lane = impl_->lanes[session->lane];
    lane.completed += session->view.in_flight;
    std::erase(lane.flying, session);
    const LaneId lane_id = session->lane;
    impl_->quit(*session);
    impl_->boundary(lane_id);
  } else {
    impl_->dequeue(*session);
  }
  if (was_claiming) impl_->cancel_evictions();
  std::erase_if(impl_->actions,
                [id](const Action& action) { return action.session == id; });  // nobody to do it to
  impl_->policy->left(id, now_ns);
  impl_->sessions.erase(id);
  for (const SessionId other : std::exchange(impl_->pinned, {}))
    if (SessionRecord* record = impl_->find(other)) record->pinned = false;
  if (!yielded)
    impl_->freed(now_ns);
  else if (!impl_->cache_line.empty())  // else what it gave is another's, until room_used()
    (void)impl_->hold_waiting(now_ns);
}

base::Status Scheduler::set_need(SessionId id, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                                 uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr) return {GPUSHARE_NOT_FOUND, "no such session"};
  SessionSpec spec = session->spec;
  spec.persistent_bytes = persistent_bytes;
  spec.ephemeral_bytes = ephemeral_bytes;
  const uint64_t p = impl_->rounded(persistent_bytes), e = impl_->rounded(ephemeral_bytes);
  const uint64_t need = base::add_saturated(p, e), most = impl_->capacity.target_bytes;
  const bool grows = need > session->persistent_bytes + session->ephemeral_bytes;
  if (grows && need > impl_->quota_of(*session))
    return {GPUSHARE_QUOTA_EXCEEDED,
            base::format("session '%s' would need persistent %s and ephemeral %s; its quota is %s",
                         spec.name.c_str(), base::format_bytes(p).c_str(), base::format_bytes(e).c_str(),
                         base::format_bytes(spec.quota_bytes).c_str())};
  if ((grows || need > impl_->options.capacity_bytes) && need > most)
    return {
        GPUSHARE_EXCEEDS_CAPACITY,
        base::format("session '%s' would need persistent %s and ephemeral %s of %s: it could not run alone",
                     spec.name.c_str(), base::format_bytes(p).c_str(), base::format_bytes(e).c_str(),
                     base::format_bytes(most).c_str())};
  if (session->holds_promise()) {
    LaneRecord& lane = impl_->lanes[session->lane];
    const uint64_t grown_lane = e > lane.held ? e - lane.held : 0;
    const uint64_t grown = grown_lane + (p > session->persistent_bytes ? p - session->persistent_bytes : 0);
    uint64_t shrunk = p < session->persistent_bytes ? session->persistent_bytes - p : 0;
    uint64_t lane_need = e;
    for (const SessionRecord* member : lane.members)
      if (member != session) lane_need = std::max(lane_need, member->ephemeral_bytes);
    if (lane_need < lane.held && lane.completed == lane.dispatched)
      shrunk += lane.held - lane_need;  // settles at once
    if (grown > impl_->free_bytes() + shrunk)
      return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
              base::format("session '%s' would grow by %s; %s of %s can be promised: persistent %s of %zu "
                           "sessions, lanes %s (%u)",
                           spec.name.c_str(), base::format_bytes(grown).c_str(),
                           base::format_bytes(impl_->free_bytes()).c_str(), base::format_bytes(most).c_str(),
                           base::format_bytes(impl_->persistent_bytes).c_str(), impl_->residents,
                           base::format_bytes(impl_->lane_bytes).c_str(), impl_->lanes_open)};
    impl_->persistent_bytes = impl_->persistent_bytes - session->persistent_bytes + p;
    impl_->lane_bytes += grown_lane;
    lane.held += grown_lane;
  }
  session->spec = std::move(spec);
  session->spec.profiling = false;
  session->persistent_bytes = p;
  session->ephemeral_bytes = e;
  if (session->slot != SessionRecord::kNoSlot)
    impl_->lanes[session->lane].least_ready_bytes =
        std::min(impl_->lanes[session->lane].least_ready_bytes, e);
  session->view.persistent_bytes = persistent_bytes;
  session->view.ephemeral_bytes = ephemeral_bytes;
  impl_->show(*session);
  if (session->holds_promise()) {
    impl_->gave_back();
    impl_->settle(session->lane);
  } else {
    impl_->requeue(*session);
  }
  impl_->freed(now_ns);
  return {};
}

void Scheduler::set_priority(SessionId id, int32_t priority, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr) return;
  session->spec.priority = session->view.priority = priority;
  impl_->show(*session);
  impl_->requeue(*session);
  impl_->admit_waiting(now_ns);
}

void Scheduler::set_class(SessionId id, SessionClass cls, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->view.cls == cls) return;
  session->spec.cls = session->view.cls = cls;
  impl_->show(*session);
  impl_->requeue(*session);
  impl_->admit_waiting(now_ns);
}

void Scheduler::set_weight(SessionId id, double weight) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || !std::isfinite(weight) || weight <= 0) return;
  session->spec.weight = session->view.weight = weight;
  impl_->show(*session);
}

void Scheduler::set_remaining(SessionId id, uint64_t remaining_ns, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr) return;
  session->declared_ns = remaining_ns;
  impl_->estimate_remaining(*session);
  if (remaining_ns == 0) session->view.remaining_ns = 0;
  impl_->show(*session);
  impl_->requeue(*session);
  impl_->admit_waiting(now_ns);
}

void Scheduler::set_policy(std::unique_ptr<Policy> policy, uint64_t now_ns) {
  impl_->policy = std::move(policy);
  impl_->traits = impl_->policy->traits();
  if (impl_->interference != nullptr) impl_->policy->set_interference(impl_->interference);
  impl_->cancel_evictions();
  std::vector<SessionRecord*> all;
  for (const auto& [id, session] : impl_->sessions) all.push_back(session.get());
  std::sort(all.begin(), all.end(),
            [](const SessionRecord* a, const SessionRecord* b) { return a->view.id < b->view.id; });
  for (SessionRecord* session : all) {
    session->claiming = false;
    impl_->policy->arrived(session->view, now_ns);
    if (session->state == SessionState::kResident)
      impl_->policy->admitted(session->view, session->lane, now_ns);
  }
  impl_->requeue_all();
  impl_->freed(now_ns);
}

void Scheduler::set_interference(std::shared_ptr<const Interference> interference, uint64_t now_ns) {
  impl_->interference = std::move(interference);
  impl_->policy->set_interference(impl_->interference);
  impl_->requeue_all();
  impl_->admit_waiting(now_ns);
}

void Scheduler::unplaced(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || !session->holds_promise() || session->move == SessionRecord::Move::kOut) return;
  if (session->state == SessionState::kResident) {
    impl_->policy->paged_out(id, session->lane, now_ns);
    session->state = SessionState::kQueued;
  }
  session->move = SessionRecord::Move::kNone;
  impl_->quit(*session);
  impl_->block(*session);
  impl_->enqueue(*session);
  impl_->admit_waiting(now_ns);
}

void Scheduler::page_done(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr) return;
  if (session->move == SessionRecord::Move::kIn) {
    session->move = SessionRecord::Move::kNone;
    session->state = SessionState::kResident;
    session->view.virtual_ns = std::max(session->view.virtual_ns, impl_->virtual_ns);
    impl_->policy->admitted(session->view, session->lane, now_ns);
    impl_->set_ready_slot(*session, session->ready);
    if (impl_->lanes[session->lane].closing && impl_->drain(session->lane, now_ns)) impl_->freed(now_ns);
    // It may be wanted out again already.
    if (!impl_->waiting.empty() || impl_->promised() > impl_->capacity.target_bytes)
      impl_->admit_waiting(now_ns);
  } else if (session->move == SessionRecord::Move::kOut) {
    session->move = SessionRecord::Move::kNone;
    impl_->forget_worth(*session);  // the driver has copied it
    impl_->quit(*session);
    const bool yielded = std::exchange(session->yielding, false);
    if (yielded) impl_->block(*session);
    impl_->enqueue(*session);
    if (!yielded)
      impl_->freed(now_ns);
    else if (!impl_->cache_line.empty())
      (void)impl_->hold_waiting(now_ns);
  }
}

void Scheduler::lane_applied(LaneId id, uint64_t bytes, uint64_t now_ns) {
  if (!lane_is_open(id)) return;
  impl_->lanes[id].applied = bytes;
  impl_->lower(now_ns);
  if (!impl_->waiting.empty()) impl_->merge_waiting(now_ns);
}

void Scheduler::room_used(uint64_t now_ns) {
  impl_->freed(now_ns);
}

void Scheduler::page_out_failed(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->move != SessionRecord::Move::kOut) return;
  session->move = SessionRecord::Move::kNone;
  session->state = SessionState::kResident;
  session->evicting = session->yielding = false;
  --impl_->evicting;
  session->pinned = true;
  impl_->pinned.push_back(id);
  impl_->policy->admitted(session->view, session->lane, now_ns);
  impl_->set_ready_slot(*session, session->ready);
  for (SessionRecord* waiting : impl_->waiting.sessions()) impl_->set_claiming(*waiting, false);
  impl_->cancel_evictions();
  impl_->admit_waiting(now_ns);
}

std::vector<Action> Scheduler::take_actions() {
  return std::exchange(impl_->actions, {});
}

SessionState Scheduler::state(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session == nullptr ? SessionState::kQueued : session->state;
}
LaneId Scheduler::lane_of(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session == nullptr ? kNoLane : session->lane;
}
SessionView Scheduler::view(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session == nullptr ? SessionView{} : session->view;
}
bool Scheduler::knows(SessionId id) const {
  return impl_->find(id) != nullptr;
}
Policy& Scheduler::policy() {
  return *impl_->policy;
}
std::string Scheduler::policy_name() const {
  return std::string(impl_->policy->name());
}
uint64_t Scheduler::promised_bytes() const {
  return impl_->promised();
}
uint64_t Scheduler::persistent_bytes() const {
  return impl_->persistent_bytes;
}
uint32_t Scheduler::lanes_open() const {
  return impl_->lanes_open;
}
uint32_t Scheduler::lane_limit() const {
  return static_cast<uint32_t>(impl_->lanes.size());
}
bool Scheduler::lane_is_open(LaneId lane) const {
  return lane < impl_->lanes.size() && impl_->lanes[lane].open;
}
uint64_t Scheduler::lane_bytes(LaneId lane) const {
  return lane_is_open(lane) ? impl_->lanes[lane].held : 0;
}
uint32_t Scheduler::lane_compute_units(LaneId lane) const {
  return lane_is_open(lane) ? impl_->lanes[lane].compute_units : 0;
}
uint32_t Scheduler::promised_compute_units() const {
  return impl_->compute_units;
}
size_t Scheduler::residents() const {
  return impl_->residents;
}
size_t Scheduler::waiting() const {
  return impl_->waiting.size() + impl_->idle.size();
}

std::string Scheduler::check() const {
  const Impl& state = *impl_;
  uint64_t persistent = 0, lanes = 0;
  size_t residents = 0, ready = 0;
  uint32_t open = 0, units = 0;
  size_t lanes_ready = 0;
  for (LaneId id = 0; id < state.lanes.size(); ++id) {
    const LaneRecord& lane = state.lanes[id];
    if (!lane.ready.empty() &&
        (++lanes_ready > state.ready_lanes.size() || state.ready_lanes[lane.ready_position] != id))
      return base::format("lane %u is not among those with somebody ready", id);
    for (const SessionView& view : lane.ready)
      if (state.find(view.id)->ephemeral_bytes < lane.least_ready_bytes)
        return base::format("a ready session of lane %u needs less than the least", id);
    if (!lane.open) {
      if (!lane.members.empty()) return base::format("closed lane %u has sessions", id);
      continue;
    }
    ++open;
    if (lane.members.empty()) return base::format("open lane %u is empty", id);
    if (lane.held < lane.bytes) return base::format("lane %u holds less than its size", id);
    lanes += lane.held;
    units += lane.compute_units;
    ready += lane.ready.size();
    for (const SessionRecord* member : lane.members) {
      if (member->lane != id) return base::format("lane %u has a session of another lane", id);
      if (member->ephemeral_bytes > lane.bytes)
        return base::format("lane %u is smaller than a session's E", id);
      if (member->compute_units != lane.compute_units)
        return base::format("lane %u has a session of another share of the device", id);
    }
    residents += lane.members.size();
  }
  if (lanes_ready != state.ready_lanes.size()) return "a lane without a ready session counts as one with";
  size_t waiting = 0, slots = 0, spares = 0;
  uint32_t evicting = 0;
  for (const auto& [id, session] : state.sessions) {
    if (session->holds_promise()) persistent += session->persistent_bytes;
    if (session->evicting) ++evicting;
    if (session->worth_ns) ++spares;
    if (!session->holds_promise()) {
      ++waiting;
      if (session->chunk == nullptr) return "a session without a promise is not queued";
      if (session->queued_idle == session->wants_in())
        return "a session that wants in is idle, or the other way round";
      const WaitingList& list = session->queued_idle ? state.idle : state.waiting;
      if (&list.at(list.position_of(*session)) != session.get()) return "a queued session is not in its list";
      if (session->state == SessionState::kResident) return "a resident session holds no promise";
    }
    if (session->slot != SessionRecord::kNoSlot) {
      ++slots;
      if (session->state != SessionState::kResident || !session->ready)
        return "a session that cannot run is a candidate";
      if (state.lanes[session->lane].ready[session->slot].id != id) return "a candidate's slot is another's";
    } else if (session->state == SessionState::kResident && session->ready && !session->evicting) {
      return "a session that can run is no candidate";
    }
  }
  uint64_t cached = 0;
  for (const auto& cache : state.caches) {
    if (cache->held) cached += cache->bytes;
    if (cache->dropping) ++evicting;
    if (cache->dropping && !cache->held) return "a cache that is not held is being dropped";
    if (cache->waiting && cache->users == 0) return "a cache waits that nobody wants";
    const CacheRecord* first = state.find_cache(cache->first_part);
    if (first != nullptr && first->dropping && cache->held && !cache->dropping)
      return "first layers go before the rest";
  }
  if (cached != state.cache_bytes) return "the bytes of caches are miscounted";
  if (persistent != state.persistent_bytes || lanes != state.lane_bytes || residents != state.residents ||
      open != state.lanes_open || waiting != this->waiting() || slots != ready ||
      evicting != state.evicting || spares != state.spares)
    return "a running total is wrong";
  if (units != state.compute_units || units > state.options.compute_units)
    return base::format("lanes have %u compute units of %u", units, state.options.compute_units);
  if (persistent + lanes + cached > state.capacity.effective_bytes)
    return base::format("promised %s of %s", base::format_bytes(persistent + lanes + cached).c_str(),
                        base::format_bytes(state.capacity.effective_bytes).c_str());
  if (state.capacity.effective_bytes > std::max(state.capacity.target_bytes, persistent + lanes + cached))
    return "the effective capacity did not fall with the promises";
  return {};
}

}  // namespace gpushare::sched
