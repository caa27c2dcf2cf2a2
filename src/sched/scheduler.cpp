// Events. Picks are in turns.cpp, admission and paging in admission.cpp, what a driver changes in changes.cpp,
// questions and checks in books.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "sched/scheduler.hpp"

#include <algorithm>
#include <cmath>

#include "base/saturate.hpp"
#include "base/steps.hpp"
#include "base/units.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {
uint64_t Scheduler::Impl::rounded(uint64_t bytes) const {
  const uint64_t granule = std::max<uint64_t>(options.granularity_bytes, 1);
  return base::Steps{granule, granule}.round_up(bytes);
}

uint64_t Scheduler::Impl::rounded_persistent(uint64_t bytes) const {
  if (options.small_granularity_bytes == 0) return rounded(bytes);
  return base::Steps{options.small_granularity_bytes, options.granularity_bytes}.round_up(bytes);
}

bool Scheduler::Impl::change(SessionRecord& session, BytesEvent event) {
  const size_t row = change_of(session.bytes, event);
  if (row == kBytesTable.size()) {
    if (unlisted.empty())
      unlisted = base::format("session %llu: event %u means nothing while its bytes are %s",
                              static_cast<unsigned long long>(session.view.id), static_cast<unsigned>(event),
                              kBytesNames[static_cast<size_t>(session.bytes)]);
    return false;
  }
  const Bytes to = kBytesTable[row].to;
  evicting += (goes_out(to) ? 1u : 0u) - (session.goes_out() ? 1u : 0u);
  paged_out -= session.out() ? 1 : 0;
  session.bytes = to;
  paged_out += session.out() ? 1 : 0;
  touch(session);
  taken |= uint64_t{1} << row;
  return true;
}

void Scheduler::Impl::show(SessionRecord& session) {
  if (session.slot == SessionRecord::kNoSlot) return;
  lanes[session.lane].ready[session.slot] = session.view;
  touch(session);
}

void Scheduler::Impl::set_ready_slot(SessionRecord& session, bool present) {
  if (present == (session.slot != SessionRecord::kNoSlot)) return;
  touch(session);
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
  view.work_left_ns = view.remaining_ns;
  if (session.work_ns == kUnknown || total <= session.work_since) return;
  const double left = static_cast<double>(total - std::min(total, view.iterations_done)) /
                      static_cast<double>(total - session.work_since);
  view.work_left_ns = base::to_uint64(static_cast<double>(session.work_ns) * left);
}

base::Status Scheduler::Impl::validate(const SessionSpec& spec) const {
  if (spec.id == kNoSession || sessions.contains(spec.id))
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("session id %llu is 0 or in use", static_cast<unsigned long long>(spec.id))};
  if (!std::isfinite(spec.weight) || spec.weight <= 0)
    return {GPUSHARE_INVALID_ARGUMENT, base::format("session '%s': weight %g must be finite and above 0",
                                                    spec.name.c_str(), spec.weight)};
  const uint64_t p = rounded_persistent(spec.persistent_bytes), e = rounded(spec.ephemeral_bytes);
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
  impl_->take_policy(std::move(policy));
  if (impl_->options.measures && impl_->asks.by_interference) measure();
}

void Scheduler::Impl::take_policy(std::unique_ptr<Policy> asked) {
  policy = std::move(asked);
  asks = policy->answers();
  ++changes;
}

void Scheduler::Impl::set_share(SessionRecord& session) {
  const Share before = session.view.share;
  const bool was_whole = before.kind == Share::Kind::kWhole;
  session.view.share = policy->share(session.view);
  if (session.view.share.kind != before.kind || session.view.share.weight != before.weight) {
    touch(session);
    // The same device time as before.
    session.view.unused_ns = virtual_cost(session.view.unused_ns * before.weight, session.view.share.weight);
  }
  const bool is_whole = session.view.share.kind == Share::Kind::kWhole;
  set_rank(session);
  if (was_whole != is_whole && session.holds_promise()) whole += is_whole ? 1 : static_cast<size_t>(-1);
}

Scheduler::~Scheduler() = default;

base::Status Scheduler::arrive(const SessionSpec& spec, uint64_t now_ns) {
  GPUSHARE_RETURN_IF_ERROR(impl_->validate(spec));
  auto owned = std::make_unique<SessionRecord>();
  SessionRecord& session = *owned;
  session.spec = spec;
  impl_->join_group(session);
  session.persistent_bytes = impl_->rounded_persistent(spec.persistent_bytes);
  impl_->set_ephemeral(session, impl_->rounded(spec.ephemeral_bytes));
  session.compute_units = static_cast<uint32_t>(impl_->rounded_units(spec.compute_units));
  session.declared_ns = session.work_ns = spec.remaining_ns;
  SessionView& view = session.view;
  view.id = spec.id;
  session.bytes_cls = view.cls = spec.cls;
  view.priority = spec.priority;
  view.weight = spec.weight;
  view.arrival_ns = view.ready_since_ns = session.last_wanted_ns = now_ns;
  view.persistent_bytes = spec.persistent_bytes;
  view.ephemeral_bytes = spec.ephemeral_bytes;
  view.alternates = spec.alternates;
  impl_->estimate_remaining(session);
  impl_->join_line(session, now_ns);
  impl_->touched.reserve(impl_->sessions.size() + 1);  // the end of an iteration needs no memory
  impl_->set_share(session);
  if (spec.alternates) ++impl_->alternating;
  if (impl_->options.shared_lanes && !impl_->several_groups)
    impl_->several_groups =
        std::any_of(impl_->sessions.begin(), impl_->sessions.end(),
                    [&](const auto& other) { return other.second->spec.trust_group != spec.trust_group; });
  impl_->sessions.emplace(spec.id, std::move(owned));
  if (impl_->measured != nullptr) impl_->measured->arrived(spec.id, spec.named ? spec.name : "");
  if (impl_->coordinator) {
    session.stopped = true;
    impl_->coordinator->arrive(impl_->job_of(session), now_ns);
    impl_->coordinate(now_ns);
  }
  if (spec.may_queue) {
    const bool admitted = impl_->admit_newcomer(session, now_ns);
    if (impl_->coordinator) impl_->admit_waiting(now_ns);  // others may run now
    if (!admitted) impl_->alternate(now_ns);
    return {};
  }
  // Refused rather than queued: nobody is paged out for it either, since that takes time.
  const bool paging = std::exchange(impl_->options.paging, false);
  const std::string coordinated = coordinated_wait(spec.id);
  const bool admitted = impl_->admit_newcomer(session, now_ns);
  impl_->options.paging = paging;
  if (admitted) return {};
  base::Status refused(GPUSHARE_DEVICE_OUT_OF_MEMORY,
                       coordinated.empty() ? impl_->shortage(session)
                                           : "session '" + spec.name + "' may not run now: " + coordinated);
  impl_->dequeue(session);
  if (spec.alternates) --impl_->alternating;
  if (impl_->measured != nullptr) impl_->measured->left(spec.id);
  impl_->forget(session);
  if (impl_->coordinator) {
    impl_->coordinator->leave(spec.id, now_ns);
    impl_->coordinate(now_ns);
  }
  return refused;
}

void Scheduler::ready(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->ready) return;
  if (!session->goes_out() && session->worth_ns) {
    impl_->forget_worth(*session);
    impl_->coordinate(now_ns);
  }
  if (session->spec.alternates && !session->wanted())
    session->stay_rest_ns +=
        now_ns - std::min(now_ns, std::max(session->last_wanted_ns, session->stay_since_ns));
  if (std::exchange(session->said_more, false) && now_ns >= session->expected_until_ns)
    session->unbelieved = kUnbelieved;
  impl_->stop_expecting(*session);
  if (session->paused_since_ns != kUnknown)
    session->pauses.note(now_ns - std::min(now_ns, std::exchange(session->paused_since_ns, kUnknown)));
  session->ready = true;
  session->view.ready_since_ns = now_ns;
  impl_->touch(*session);
  if (on_device(session->bytes)) {
    const bool keeps_lag = now_ns - std::min(now_ns, session->last_wanted_ns) < impl_->options.keeps_lag_ns;
    impl_->catch_up(*session, keeps_lag ? session->lag_ns : 0);
    if (session->resident()) impl_->set_ready_slot(*session, true);
    impl_->changed(*session, session->view.in_flight == 0 ? now_ns : session->since_ns);
  } else if (session->bytes == Bytes::kOut) {
    if (impl_->alternating > 0 && session->queued_idle) impl_->join_line(*session, now_ns);
    impl_->requeue(*session);
    impl_->admit_waiting(now_ns);
  }
}

void Scheduler::wake(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || !session->out() || comes_in(session->bytes)) return;
  session->wake = true;
  if (session->bytes != Bytes::kOut) return;
  impl_->requeue(*session);
  impl_->admit_waiting(now_ns);
}

void Scheduler::allow_paging(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->spec.may_page) return;
  session->spec.may_page = true;
  if (session->bytes == Bytes::kLeaving && !session->busy()) impl_->start_page_out(*session, now_ns);
}

void Scheduler::not_ready(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || !session->ready) return;
  session->ready = false;
  session->last_wanted_ns = now_ns;
  impl_->touch(*session);
  impl_->note_lag(*session, now_ns);
  impl_->set_ready_slot(*session, false);
  ++impl_->changes;
  if (session->wants_in() || session->chunk == nullptr) return;
  const bool claimed = std::exchange(session->claiming, false) || impl_->place_for == id;
  impl_->requeue(*session);
  if (!claimed) return;
  impl_->cancel_evictions();
  impl_->admit_waiting(now_ns);
}

void Scheduler::dispatched(SessionId id, LaneId lane_id, uint64_t now_ns, uint64_t iterations) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->lane != lane_id || lane_id == kNoLane) return;
  impl_->use_worth(*session);
  session->ready = false;
  session->paused_since_ns = kUnknown;
  impl_->stop_expecting(*session);
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
  view.virtual_ns += virtual_cost(expected, view.share.weight);
  session->expected_in_flight_ns += expected;
  impl_->touch(*session);
  impl_->advance(now_ns);
  if (impl_->measured != nullptr) impl_->measured->dispatched(id, lane_id, now_ns);
  impl_->changed(*session, now_ns);
}

void Scheduler::finished(SessionId id, uint64_t device_ns, uint64_t now_ns, uint64_t iterations) {
  progressed(id, device_ns, now_ns, iterations, 0);
}

void Scheduler::ran_alone(SessionId id, LaneId lane, uint64_t device_ns, uint64_t now_ns,
                          uint64_t iterations) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || iterations == 0) return;
  // Nobody has seen the pauses between these iterations: they were equally long in the mean.
  if (const uint64_t since_ns = std::exchange(session->paused_since_ns, kUnknown); since_ns != kUnknown) {
    const uint64_t elapsed_ns = now_ns - std::min(now_ns, since_ns);
    session->pauses.note((elapsed_ns - std::min(elapsed_ns, device_ns)) / iterations);
  }
  ready(id, now_ns);
  dispatched(id, lane, now_ns, iterations);
  finished(id, device_ns, now_ns, iterations);
}

void Scheduler::progressed(SessionId id, uint64_t device_ns, uint64_t now_ns, uint64_t iterations,
                           uint64_t left) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->lane == kNoLane || session->view.in_flight == 0) return;
  LaneRecord& lane = impl_->lanes[session->lane];
  lane.progress_ns = now_ns;
  if (iterations > 0) impl_->longest_ns = std::max(impl_->longest_ns, device_ns / iterations);
  SessionView& view = session->view;
  const double expected = session->expected_in_flight_ns / view.in_flight;
  session->expected_in_flight_ns -= expected;
  if (--view.in_flight == 0) std::erase(lane.flying, session);
  view.virtual_ns += virtual_cost(static_cast<double>(device_ns) - expected, view.share.weight);
  impl_->touch(*session);
  if (iterations > 1) {  // the lane has moved on to the start of the last of them
    const double last = static_cast<double>(device_ns) / static_cast<double>(iterations);
    lane.start_tag_ns =
        std::max(lane.start_tag_ns,
                 view.virtual_ns - virtual_cost(session->expected_in_flight_ns + last, view.share.weight));
    impl_->advance(now_ns);
  }
  ++lane.completed;
  view.service_ns += device_ns;
  view.iterations_done += iterations;
  if (view.iterations_done > 0) view.iteration_ns = view.service_ns / view.iterations_done;
  if (session->declared_ns != kUnknown) session->declared_ns -= std::min(session->declared_ns, device_ns);
  impl_->estimate_remaining(*session);
  impl_->set_share(*session);
  impl_->show(*session);
  impl_->pause(*session, now_ns);
  if (impl_->measured != nullptr) impl_->measured->finished(id, session->lane, device_ns, iterations, now_ns);
  impl_->changed(*session, now_ns);
  if (left > 0) dispatched(id, session->lane, now_ns, left);
  bool settled = impl_->boundary(session->lane);
  if (session->bytes == Bytes::kLeaving && !session->busy()) impl_->start_page_out(*session, now_ns);
  if (impl_->lanes[session->lane].closing && impl_->drain(session->lane, now_ns)) settled = true;
  if (settled)
    impl_->freed(now_ns);
  else if (now_ns >= impl_->stays_end_ns ||
           (!impl_->waiting.empty() &&
            view.service_ns / kServiceStepNs != (view.service_ns - device_ns) / kServiceStepNs))
    impl_->admit_waiting(now_ns);  // by what it has received, others may outrank it or have its place now
  else
    impl_->lower(now_ns);
}

void Scheduler::Impl::join_group(SessionRecord& session) {
  if (session.spec.group == 0) {
    session.claim = ClaimNode(tree.sessions);
    return;
  }
  GroupRecord& group = groups.try_emplace(session.spec.group, tree.sessions).first->second;
  ++group.sessions;
  session.claim = ClaimNode(group.claim);
}

void Scheduler::Impl::forget(SessionRecord& session) {
  join_peers(session, nullptr);
  const auto group = groups.find(session.spec.group);
  sessions.erase(session.view.id);
  if (group != groups.end() && --group->second.sessions == 0) groups.erase(group);
}

void Scheduler::leave(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr) return;
  const bool was_claiming = session->claiming || impl_->place_for == id,
             yielded = session->yields_to.has_value();
  if (session->spec.alternates) --impl_->alternating;
  impl_->forget_worth(*session);
  impl_->set_worth(*session, 0, 0);
  if (session->holds_promise()) {
    LaneRecord& lane = impl_->lanes[session->lane];
    lane.completed += session->view.in_flight;
    std::erase(lane.flying, session);
    impl_->touch(*session);
    const LaneId lane_id = session->lane;
    impl_->quit(*session);
    impl_->boundary(lane_id);
  } else {
    impl_->dequeue(*session);
  }
  impl_->change(*session, BytesEvent::kLeft);
  if (was_claiming) impl_->cancel_evictions();
  impl_->stop_yielding(id);
  impl_->came_back(id);
  std::erase_if(impl_->actions,
                [id](const Action& action) { return action.session == id; });  // nobody to do it to
  if (impl_->measured != nullptr) impl_->measured->left(id);
  impl_->forget(*session);
  for (const SessionId other : std::exchange(impl_->pinned, {}))
    if (SessionRecord* record = impl_->find(other)) record->pinned = false;
  if (impl_->coordinator) {
    impl_->coordinator->leave(id, now_ns);
    impl_->coordinate(now_ns);
  }
  if (!yielded)
    impl_->freed(now_ns);
  else if (!impl_->cache_line.empty())  // else what it gave is another's, until room_used()
    (void)impl_->hold_waiting(now_ns);
}

void Scheduler::unplaced(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || !is_listed(session->bytes, BytesEvent::kUnplaced)) return;
  const bool turns_back = session->bytes == Bytes::kTurningBack;
  impl_->change(*session, BytesEvent::kUnplaced);
  impl_->came_back(id);
  impl_->quit(*session);
  if (turns_back && !session->yields_to) {  // for a session that waits, which comes before it
    impl_->enqueue(*session);
    return impl_->freed(now_ns);
  }
  impl_->block(*session);
  impl_->enqueue(*session);
  if (std::exchange(session->yields_to, std::nullopt)) {
    if (!impl_->cache_line.empty()) (void)impl_->hold_waiting(now_ns);
    return;
  }
  impl_->drop_caches(session->persistent_bytes + session->ephemeral_bytes, now_ns);
  impl_->admit_waiting(now_ns);
}

void Scheduler::page_part(SessionId id, uint64_t bytes, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->bytes != Bytes::kGoing) return;
  if (session->changes_lane) return;  // its bytes are for itself
  bytes = std::min(bytes / impl_->options.granularity_bytes * impl_->options.granularity_bytes,
                   session->held_bytes());
  session->gone_bytes += bytes;
  impl_->promise(*session);
  impl_->gave_back();
  if (!session->yields_to) impl_->freed(now_ns);
}

void Scheduler::page_done(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr) return;
  if (comes_in(session->bytes)) {
    impl_->change(*session, BytesEvent::kDone);
    session->yields_to.reset();
    impl_->came_back(id);
    impl_->catch_up(*session, 0);
    impl_->moved(*session, false, now_ns);
    impl_->begin_stay(*session, now_ns);
    impl_->changed(*session, now_ns);
    impl_->set_ready_slot(*session, session->ready);
    impl_->coordinate(now_ns);  // a coordinator may have stopped the session while it came in
    if (session->lane == kNoLane) return;
    if (impl_->lanes[session->lane].closing && impl_->drain(session->lane, now_ns)) impl_->freed(now_ns);
    // The session's bytes may already be wanted again.
    if (!impl_->waiting.empty() || impl_->promised() > impl_->capacity.target_bytes)
      impl_->admit_waiting(now_ns);
  } else if (session->bytes == Bytes::kGoing) {
    impl_->change(*session, BytesEvent::kDone);
    impl_->forget_worth(*session);  // the driver has copied it
    impl_->moved(*session, true, now_ns);
    impl_->quit(*session);
    impl_->coordinate(now_ns);
    const bool yielded = std::exchange(session->yields_to, std::nullopt).has_value();
    if (yielded) impl_->block(*session);
    // Its bytes are for itself: whoever waits for memory gets none of them.
    const bool changes_lane = std::exchange(session->changes_lane, false) && !yielded && session->wants_in();
    if (!changes_lane || !impl_->place(*session, now_ns)) impl_->enqueue(*session);
    if (!yielded)
      impl_->freed(now_ns);
    else if (!impl_->cache_line.empty())
      (void)impl_->hold_waiting(now_ns);
  }
}

void Scheduler::lane_applied(LaneId id, uint64_t bytes, uint64_t now_ns) {
  if (!lane_is_open(id)) return;
  impl_->lanes[id].applied = bytes;
  if (impl_->options.shared_lanes) {
    if (impl_->boundary(id)) impl_->freed(now_ns);
    return;
  }
  impl_->lower(now_ns);
  if (!impl_->waiting.empty()) impl_->merge_waiting(now_ns);
}

void Scheduler::room_used(SessionId id, uint64_t now_ns) {
  impl_->stop_yielding(id);
  impl_->freed(now_ns);
}

void Scheduler::page_out_failed(SessionId id, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->bytes != Bytes::kGoing) return;
  if (session->gone_bytes > 0) return page_done(id, now_ns);  // others may have those bytes
  impl_->change(*session, BytesEvent::kFailed);
  session->changes_lane = false;
  session->yields_to.reset();
  session->pinned = true;
  impl_->pinned.push_back(id);
  impl_->begin_stay(*session, now_ns);
  impl_->changed(*session, now_ns);
  impl_->set_ready_slot(*session, session->ready);
  for (SessionRecord* waiting : impl_->waiting.sessions()) impl_->set_claiming(*waiting, false);
  impl_->cancel_evictions();
  impl_->admit_waiting(now_ns);
}

std::vector<Action> Scheduler::take_actions() {
  return std::exchange(impl_->actions, {});
}

}  // namespace gpushare::sched
