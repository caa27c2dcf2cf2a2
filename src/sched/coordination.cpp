// The coordinator of a scheduler. Coordinator decides which sessions may run, in which class and with how many bytes,
// and the scheduler carries that out. A session that may not run is paged out at its boundary and waits. The driver is
// told of classes and limits by kTerms.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include "base/saturate.hpp"
#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {

base::Status Scheduler::set_coordination(const std::optional<CoordinatorOptions>& options, uint64_t now_ns) {
  impl_->coordinate_anew(options, now_ns);
  return {};
}

std::optional<CoordinatorOptions> Scheduler::coordination() const {
  if (!impl_->coordinator) return std::nullopt;
  return impl_->coordinator->options();
}

std::string Scheduler::coordinated_wait(SessionId id) const {
  const SessionRecord* session = impl_->find(id);
  return session != nullptr && session->stopped ? impl_->coordinator->describe() : std::string();
}

void Scheduler::look(uint64_t now_ns) {
  impl_->leave_held_up(now_ns);
  impl_->join_lanes(now_ns);
  if (impl_->coordinator && now_ns >= impl_->coordinate_at_ns) impl_->look_at_limits(now_ns);
}

CoordinatedJob Scheduler::Impl::job_of(SessionRecord& session) const {
  const uint64_t need = base::add_saturated(session.persistent_bytes, session.ephemeral_bytes);
  // A session's bytes beyond its limit lie in host memory, and its need does not count them. It still wants as much as before.
  session.wanted_bytes = session.limit_bytes > 0 ? std::max(session.wanted_bytes, need) : need;
  CoordinatedJob job;
  job.id = session.view.id;
  job.cls = session.spec.cls;
  job.bytes = std::min(session.wanted_bytes, beside_contexts());
  job.least_bytes = session.spec.least_bytes == 0 || session.rigid
                        ? job.bytes
                        : std::min(rounded(session.spec.least_bytes), job.bytes);
  job.weight = session.spec.weight;
  job.may_upgrade = session.spec.may_upgrade && session.spec.cls == SessionClass::kOpportunistic;
  return job;
}

void Scheduler::Impl::coordinate_anew(const std::optional<CoordinatorOptions>& asked, uint64_t now_ns) {
  std::vector<SessionRecord*> all;
  for (const auto& [id, session] : sessions) all.push_back(session.get());
  // Sessions that have memory join first, so that they can keep it.
  std::sort(all.begin(), all.end(), [](const SessionRecord* a, const SessionRecord* b) {
    return std::pair(!a->holds_promise(), a->view.id) < std::pair(!b->holds_promise(), b->view.id);
  });
  coordinator.reset();
  coordinate_at_ns = kUnknown;
  if (asked) {
    coordinator.emplace(*asked);
    coordinator->set_capacity(beside_contexts(), now_ns);
    for (SessionRecord* session : all) {
      session->rigid = false;
      coordinator->arrive(job_of(*session), now_ns);
    }
    coordinate(now_ns);
  } else {
    for (SessionRecord* session : all) {
      release(*session);
      set_terms(*session, session->spec.cls, 0);
    }
  }
  freed(now_ns);
}

void Scheduler::Impl::coordinate(uint64_t now_ns) {
  if (!coordinator) return;
  std::vector<SessionRecord*> all;
  for (const auto& [id, session] : sessions) all.push_back(session.get());
  std::sort(all.begin(), all.end(),
            [](const SessionRecord* a, const SessionRecord* b) { return a->view.id < b->view.id; });
  // A spare session is no job: it is dropped when others need the room.
  for (SessionRecord* session : all)
    if (session->worth_ns.has_value() == coordinator->knows(session->view.id)) {
      if (session->worth_ns)
        coordinator->leave(session->view.id, now_ns);
      else
        coordinator->arrive(job_of(*session), now_ns);
    }
  coordinate_at_ns = coordinator->look_again_ns();
  above_limit_bytes = 0;
  for (SessionRecord* session : all) {
    if (session->worth_ns) {
      release(*session);
      set_terms(*session, session->spec.cls, 0);
      continue;
    }
    const Coordinator::View view = coordinator->view(session->view.id);
    if (!view.running) {
      stop(*session, now_ns);
      continue;
    }
    release(*session);
    const bool limited = view.cls == SessionClass::kOpportunistic && view.limit_bytes < session->wanted_bytes;
    const uint64_t granule = std::max<uint64_t>(options.granularity_bytes, 1);
    set_terms(*session, view.cls, limited ? std::max(view.limit_bytes / granule * granule, granule) : 0);
    watch_limit(*session, now_ns);
  }
}

void Scheduler::Impl::watch_limit(SessionRecord& session, uint64_t now_ns) {
  const uint64_t need = session.persistent_bytes + session.ephemeral_bytes;
  if (session.limit_bytes == 0 || need <= session.limit_bytes || !session.holds_promise()) {
    session.above_bytes = 0;
    return;
  }
  const uint64_t above = need - session.limit_bytes;
  if (session.above_bytes == 0 || above < session.above_bytes) session.above_since_ns = now_ns;
  session.above_bytes = above;
  above_limit_bytes = base::add_saturated(above_limit_bytes, above);
  coordinate_at_ns =
      std::min(coordinate_at_ns,
               base::add_saturated(session.above_since_ns, coordinator->options().shrink_patience_ns));
}

void Scheduler::Impl::look_at_limits(uint64_t now_ns) {
  for (const auto& [id, session] : sessions) {
    if (session->above_bytes == 0 ||
        now_ns < base::add_saturated(session->above_since_ns, coordinator->options().shrink_patience_ns))
      continue;
    if (waiting.empty()) {
      session->above_since_ns = now_ns;  // it keeps no session out
      continue;
    }
    session->rigid = true;
    coordinator->change(job_of(*session), now_ns);
  }
  coordinator->tick(now_ns);
  coordinate(now_ns);
  freed(now_ns);
}

void Scheduler::Impl::stop(SessionRecord& session, uint64_t now_ns) {
  if (!std::exchange(session.stopped, true)) {
    touch(session);
    session.rigid = false;  // it begins anew
    set_terms(session, session.spec.cls, 0);
    requeue(session);
  }
  session.above_bytes = 0;
  if (session.holds_promise() && evictable(session) && options.paging) evict({{&session}, {}}, now_ns);
}

void Scheduler::Impl::release(SessionRecord& session) {
  if (!std::exchange(session.stopped, false)) return;
  touch(session);
  requeue(session);
  if (session.bytes == Bytes::kLeaving) stay(session);
}

void Scheduler::Impl::set_terms(SessionRecord& session, SessionClass cls, uint64_t limit_bytes) {
  // Turns go by the better of the two classes. A guaranteed session that runs before its bytes are free lacks only
  // bytes; it keeps the rank and weight that the policy promised it.
  const SessionClass turn_cls = std::min(cls, session.spec.cls);
  if (session.bytes_cls == cls && session.view.cls == turn_cls && session.limit_bytes == limit_bytes) return;
  session.bytes_cls = cls;
  session.limit_bytes = limit_bytes;
  if (std::exchange(session.view.cls, turn_cls) != turn_cls) rank_changed(session);
  requeue(session);
  actions.push_back({ActionKind::kTerms, kNoLane, session.view.id, limit_bytes, 0, cls});
}

// Called before the session grows, so that its limit rises if others leave room. The least bytes that it can run with
// stay the same.
void Scheduler::Impl::want(SessionRecord& session, uint64_t need_bytes, uint64_t now_ns) {
  if (session.bytes_cls == SessionClass::kGuaranteed || !coordinator->knows(session.view.id)) return;
  CoordinatedJob job = job_of(session);
  job.bytes = session.wanted_bytes = std::min(std::max(job.bytes, need_bytes), beside_contexts());
  coordinator->change(job, now_ns);
  coordinate(now_ns);
}

void Scheduler::Impl::job_changed(SessionRecord& session, uint64_t now_ns) {
  if (!coordinator || !coordinator->knows(session.view.id)) return;
  coordinator->change(job_of(session), now_ns);
  coordinate(now_ns);
}

}  // namespace gpushare::sched
