// The changes that a driver makes while sessions run: their needs, class, weight and rank, the policy, and the known
// interference.
// SPDX-License-Identifier: Apache-2.0
#include "sched/scheduler.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/saturate.hpp"
#include "base/units.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {

base::Status Scheduler::set_need(SessionId id, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                                 uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr) return {GPUSHARE_NOT_FOUND, "no such session"};
  SessionSpec spec = session->spec;
  spec.persistent_bytes = persistent_bytes;
  spec.ephemeral_bytes = ephemeral_bytes;
  const uint64_t p = impl_->rounded_persistent(persistent_bytes), e = impl_->rounded(ephemeral_bytes);
  const uint64_t need = base::add_saturated(p, e), most = impl_->capacity.target_bytes;
  const bool grows = need > session->persistent_bytes + session->ephemeral_bytes;
  if (grows && impl_->coordinator) impl_->want(*session, need, now_ns);
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
    const uint64_t grown_lane = e > lane.held() ? e - lane.held() : 0;
    const uint64_t grown = grown_lane + (p > session->persistent_bytes ? p - session->persistent_bytes : 0);
    // Bytes that the session does not need any more may be out already.
    const uint64_t forgone = p < session->persistent_bytes ? session->persistent_bytes - p : 0;
    const uint64_t gone = session->gone_bytes - std::min(session->gone_bytes, forgone);
    uint64_t shrunk = forgone - (session->gone_bytes - gone);
    const uint64_t lane_need = std::max(e, lane.need_without(session->ephemeral_bytes));
    if (lane_need < lane.held() && lane.completed == lane.dispatched && !impl_->options.shared_lanes)
      shrunk += lane.held() - lane_need;  // settles at once
    if (grown > impl_->free_bytes() + shrunk)
      return {GPUSHARE_DEVICE_OUT_OF_MEMORY,
              base::format("session '%s' would grow by %s; %s of %s can be promised: persistent %s of %zu "
                           "sessions, lanes %s (%u)",
                           spec.name.c_str(), base::format_bytes(grown).c_str(),
                           base::format_bytes(impl_->free_bytes()).c_str(), base::format_bytes(most).c_str(),
                           base::format_bytes(impl_->tree.sessions.promised()).c_str(), impl_->residents,
                           base::format_bytes(impl_->tree.lanes.promised()).c_str(), impl_->lanes_open)};
    session->gone_bytes = gone;
    lane.claim.promise(lane.held() + grown_lane);
  }
  session->spec = std::move(spec);
  session->spec.profiling = false;
  session->persistent_bytes = p;
  impl_->promise(*session);
  impl_->set_ephemeral(*session, e);
  if (session->slot != SessionRecord::kNoSlot)
    impl_->lanes[session->lane].least_ready_bytes =
        std::min(impl_->lanes[session->lane].least_ready_bytes, e);
  session->view.persistent_bytes = persistent_bytes;
  session->view.ephemeral_bytes = ephemeral_bytes;
  impl_->show(*session);
  if (session->holds_promise()) {
    impl_->gave_back();
    impl_->shrink_or_close(session->lane);
  } else {
    impl_->requeue(*session);
  }
  impl_->job_changed(*session, now_ns);
  impl_->freed(now_ns);
  return {};
}

void Scheduler::Impl::rank_changed(SessionRecord& session) {
  set_share(session);
  if (asks.before && session.holds_promise()) start_with_others(session);
  show(session);
}

void Scheduler::set_priority(SessionId id, int32_t priority, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->spec.priority == priority) return;
  session->spec.priority = session->view.priority = priority;
  impl_->rank_changed(*session);
  impl_->requeue(*session);
  impl_->admit_waiting(now_ns);
}

void Scheduler::set_class(SessionId id, SessionClass cls, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || session->spec.cls == cls) return;
  session->spec.cls = cls;
  if (!impl_->coordinator || !impl_->coordinator->knows(id)) session->bytes_cls = session->view.cls = cls;
  impl_->set_rank(*session);
  impl_->job_changed(*session, now_ns);
  impl_->rank_changed(*session);
  impl_->requeue(*session);
  impl_->admit_waiting(now_ns);
}

void Scheduler::set_weight(SessionId id, double weight) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr || !std::isfinite(weight) || weight <= 0) return;
  session->spec.weight = session->view.weight = weight;
  impl_->set_share(*session);
  impl_->show(*session);
}

void Scheduler::set_remaining(SessionId id, uint64_t remaining_ns, uint64_t now_ns) {
  SessionRecord* session = impl_->find(id);
  if (session == nullptr) return;
  session->declared_ns = session->work_ns = remaining_ns;
  session->work_since = session->view.iterations_done;
  impl_->estimate_remaining(*session);
  if (remaining_ns == 0) session->view.remaining_ns = 0;
  impl_->show(*session);
  impl_->requeue(*session);
  impl_->admit_waiting(now_ns);
}

void Scheduler::set_worth(SessionId id, double worth, uint64_t until_ns) {
  if (SessionRecord* session = impl_->find(id)) impl_->set_worth(*session, worth, until_ns);
}

void Scheduler::set_policy(std::unique_ptr<Policy> policy, uint64_t now_ns) {
  impl_->take_policy(std::move(policy));
  if (impl_->options.measures && impl_->asks.by_interference) measure();
  impl_->stays_end_ns = kUnknown;
  impl_->cancel_evictions();
  for (const auto& [id, session] : impl_->sessions) {
    session->claiming = false;
    impl_->set_share(*session);
    impl_->show(*session);
    impl_->touch(*session);  // also where share and rank stay as they were
    session->since_ns = now_ns;
  }
  impl_->requeue_all();
  impl_->freed(now_ns);
}

std::shared_ptr<MeasuredInterference> Scheduler::measure() {
  if (impl_->measured != nullptr) return impl_->measured;
  impl_->measured = std::make_shared<MeasuredInterference>();
  for (const auto& [id, session] : impl_->sessions)
    impl_->measured->arrived(id, session->spec.named ? session->spec.name : "");
  if (impl_->interference == nullptr) {
    impl_->interference = impl_->measured;
    ++impl_->changes;
  }
  return impl_->measured;
}

std::shared_ptr<MeasuredInterference> Scheduler::measured() const {
  return impl_->measured;
}

void Scheduler::set_interference(std::shared_ptr<const Interference> interference, uint64_t now_ns) {
  impl_->interference = std::move(interference);
  ++impl_->changes;
  impl_->admit_waiting(now_ns);
}

}  // namespace gpushare::sched
