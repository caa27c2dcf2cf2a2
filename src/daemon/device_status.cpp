// The status of a device that processes share, for people and tests.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

#include "base/saturate.hpp"
#include "base/units.hpp"
#include "daemon/service.hpp"

namespace gpushare::daemon {

using client::LeaseState;

client::DeviceStatus SharedDevice::status() const {
  client::DeviceStatus out;
  out.device = name_;
  out.policy = scheduler_.policy_name();
  const sched::Limit capacity = scheduler_.capacity();
  out.capacity_bytes = capacity.target_bytes;
  out.effective_capacity_bytes = capacity.effective_bytes;
  out.promised_bytes = scheduler_.promised_bytes();
  out.images_bytes = scheduler_.cached_bytes();
  out.context_bytes = scheduler_.context_bytes();
  out.lanes = scheduler_.lanes_open();
  out.resident = scheduler_.residents();
  out.waiting = scheduler_.waiting();
  out.turns = turns_;
  out.cut_off = cut_off_;
  out.service_ns = service_ns_;
  out.page_outs = page_outs_;
  out.page_ins = page_ins_;
  out.product = identity_.product;
  out.uuid = identity_.uuid;
  out.parent_uuid = identity_.parent_uuid;
  out.mig_profile = identity_.mig_profile;
  out.driver_version = identity_.driver_version;
  out.total_bytes = identity_.total_bytes;
  if (const auto coordination = scheduler_.coordination()) {
    out.max_guaranteed = coordination->max_guaranteed;
    out.max_opportunistic = coordination->max_opportunistic;
  }
  return out;
}

namespace {

// What the process reports in its lease. Any process may write nonsense there, which others only read.
void show_figures(const client::Lease& lease, client::SessionStatus& out) {
  const base::IterationCounts counts = lease.histogram().read();
  const auto none = [](uint64_t count) { return count == 0; };
  if (!std::all_of(std::begin(counts.times), std::end(counts.times), none)) {
    out.iteration_times.assign(std::begin(counts.times), std::end(counts.times));
    out.iteration_slowdowns.assign(std::begin(counts.slowdowns), std::end(counts.slowdowns));
    out.iteration_time_ns = counts.time_ns;
    out.slowdown_sum = static_cast<double>(counts.slowdown_milli) / 1000;
  }
  out.requests = lease.requests().read();
  if (!std::isfinite(out.requests.predicted_miss_rate)) out.requests.predicted_miss_rate = 0;
  if (!std::isfinite(out.requests.price_per_s)) out.requests.price_per_s = 0;
}

}  // namespace

client::SessionStatus SharedDevice::status_of(const RemoteSession& session) const {
  client::SessionStatus out;
  const Claim& claim = *session.claim;
  const sched::SessionView view = scheduler_.view(claim.id);
  out.pid = static_cast<uint64_t>(session.process->peer.pid);
  out.session = session.number;
  out.name = session.name;
  out.device = name_;
  out.lane = claim.lane == sched::kNoLane ? UINT64_MAX : claim.lane;
  out.persistent_bytes = claim.persistent_bytes;
  out.ephemeral_bytes = claim.ephemeral_bytes;
  out.service_ns = session.service_ns;
  out.iterations = session.iterations;
  out.weight = view.weight;
  out.cap = capped(claim) ? claim.cap->share() : 0;
  out.priority = view.priority;
  out.cls = view.cls == sched::SessionClass::kOpportunistic ? "opportunistic" : "guaranteed";
  out.limit_bytes = claim.limit_bytes;
  out.share =
      service_ns_ == 0 ? 0 : static_cast<double>(session.service_ns) / static_cast<double>(service_ns_);
  out.group = claim.limits != nullptr ? claim.limits->group : claim.group;
  const bool first = claim.members.front().get() == &session;
  if (first)
    out.owed_bytes =
        base::add_saturated(claim.short_bytes, claim.page != nullptr ? claim.page->limit().lent_bytes : 0);
  if (claim.page != nullptr && first) {
    const GroupPage::Held held = claim.page->held();
    out.held_bytes = held.device_bytes;
    out.spilled_bytes = held.spilled_bytes;
    out.pinned_bytes = held.pinned_bytes;
    out.held_by = kernel_limits_ != nullptr && kernel_limits_->holds(claim.id) ? "shim+kernel" : "shim";
  }
  show_figures(lease(session), out);
  out.waits_for = why_not_on(session, &out.state);
  return out;
}

// Why the session does not run now; empty if nothing holds it back. *out_state: SessionStatus::state.
std::string SharedDevice::why_not_on(const RemoteSession& session, std::string* out_state) const {
  const Claim& claim = *session.claim;
  const sched::SessionState state = scheduler_.state(claim.id);
  const auto is = [out_state](const char* name) { *out_state = name; };
  if (session.overdue()) {
    is("overdue");
    return "its own iteration, which exceeded the lease";
  }
  if (claim.pages_now()) return is("paging"), std::string();
  if (session.leased())
    return is(lease(session).look().state == LeaseState::kIdle ? "idle" : "turn"), std::string();
  if (state == sched::SessionState::kQueued) {
    is("queued");
    const std::string why = scheduler_.coordinated_wait(claim.id);
    return !why.empty()
               ? why
               : base::format(
                     "memory: needs %s, %s can be promised",
                     base::format_bytes(base::add_saturated(claim.persistent_bytes, claim.ephemeral_bytes))
                         .c_str(),
                     base::format_bytes(capacity_bytes_ -
                                        std::min(capacity_bytes_, scheduler_.promised_bytes()))
                         .c_str());
  }
  if (state == sched::SessionState::kPagedOut) {
    is("paged_out");
    if (!session.ready()) return {};
    const uint64_t needs = bytes_on_device(claim), contexts = scheduler_.context_bytes(),
                   capacity = scheduler_.capacity().target_bytes;
    if (base::add_saturated(needs, contexts) > capacity)
      return base::format(
          "memory, to be paged in: needs %s; of the capacity, %s, contexts of processes have %s",
          base::format_bytes(needs).c_str(), base::format_bytes(capacity).c_str(),
          base::format_bytes(contexts).c_str());
    const std::string why = scheduler_.coordinated_wait(claim.id);
    return why.empty() ? "memory, to be paged in" : why;
  }
  if (session.image_state == RemoteSession::ImageState::kWaits) {
    is("ready");
    return "its images, which are not on the device yet";
  }
  is(session.ready() ? "ready" : "resting");
  return session.ready() ? why_no_turn(claim) : std::string();
}

std::string SharedDevice::why_no_turn(const Claim& claim) const {
  if (std::find(in_debt_.begin(), in_debt_.end(), &claim) != in_debt_.end())
    return base::format("its cap, %g%% of the device's time", 100 * claim.cap->share());
  for (const auto& [id, other] : claims_)
    if (claim.shares_lane && other->shares_lane && other->lane == claim.lane && scheduler_.owes(id))
      return base::format(
          "its lane, where the iteration of '%s' of process %d exceeded the lease and may still run",
          other->members.front()->name.c_str(), other->members.front()->process->peer.pid);
  const Claim* holder = claim.lane < holders_.size() ? holders_[claim.lane] : nullptr;
  if (holder == nullptr || holder == &claim) return {};
  return base::format("the turn, which '%s' of process %d has", holder->members.front()->name.c_str(),
                      holder->members.front()->process->peer.pid);
}

std::string SharedDevice::check() const {
  if (std::string wrong = scheduler_.check(); !wrong.empty()) return wrong;
  if (std::string wrong = gates_.check(); !wrong.empty()) return "gates: " + wrong;
  size_t ready = 0;
  for (const auto& [id, claim] : claims_) {
    ready += claim->turn == Claim::Turn::kReady ? 1 : 0;
    const std::string name = "'" + claim->members.front()->name + "'";
    const sched::SessionView view = scheduler_.view(id);
    const uint64_t all = base::add_saturated(claim->persistent_bytes, claim->ephemeral_bytes);
    if (view.persistent_bytes != (claim->shares_lane ? claim->persistent_bytes : all) ||
        view.ephemeral_bytes != (claim->shares_lane ? lane_need(claim->ephemeral_bytes) : 0))
      return "session " + name + " and the scheduler disagree on what it needs";
    const bool holds = std::find(holders_.begin(), holders_.end(), claim.get()) != holders_.end();
    if (holds != claim->leased()) return "session " + name + " and its lane disagree on the turn";
    const bool leased = std::any_of(claim->members.begin(), claim->members.end(),
                                    [](const auto& member) { return member->leased(); });
    if (claim->turn == Claim::Turn::kReady &&
        std::find(in_debt_.begin(), in_debt_.end(), claim.get()) != in_debt_.end())
      return "session " + name + " waits for its turn and for its cap";
    if (leased != claim->leased()) return "session " + name + " and its group disagree on the turn";
  }
  if (lanes_ != nullptr)
    for (sched::LaneId lane = 0; lane < scheduler_.lane_limit(); ++lane)
      if (lanes_->bytes(lane) > scheduler_.lane_bytes(lane)) return "a lane has more memory than is promised";
  return ready == ready_ ? std::string() : "sessions that are ready are miscounted";
}

}  // namespace gpushare::daemon
