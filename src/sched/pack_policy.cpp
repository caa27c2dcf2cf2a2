// SPDX-License-Identifier: Apache-2.0
#include "sched/pack_policy.hpp"

#include <algorithm>
#include <cmath>

#include "base/saturate.hpp"

namespace gpushare::sched {
namespace {

// A session whose iteration takes more than twice as long as expected and this is not waited for: its host may hold the
// iteration open.
constexpr uint64_t kPackPatienceNs = 10'000'000;
// A session counts as active between two iterations for a quarter of an iteration and this, and at most this much longer.
constexpr uint64_t kLeastGapNs = 100'000, kMostGapNs = 10'000'000;
// Measurements change, so a pack plan made from them is made anew after this time.
constexpr uint64_t kPlanHoldsNs = 1'000'000'000;

double work_left(const SessionView& view) {
  return view.work_left_ns == kUnknown ? INFINITY : static_cast<double>(view.work_left_ns);
}

}  // namespace

PackPolicy::Member* PackPolicy::find(SessionId session, LaneId lane) {
  const auto members = lanes_.find(lane);
  if (members == lanes_.end()) return nullptr;
  const auto member = members->second.find(session);
  return member == members->second.end() ? nullptr : &member->second;
}

size_t PackPolicy::pick(LaneId lane, std::span<const SessionView> candidates, uint64_t now_ns) {
  look_again_ns_ = kUnknown;
  const auto first_of_lane = [this](const SessionView& view) {
    return std::pair(learns_ ? view.cls : SessionClass::kGuaranteed, view.id);
  };
  size_t oldest = 0;
  for (size_t i = 1; i < candidates.size(); ++i)
    if (interference_ == nullptr ? ahead_in_line(candidates[i], candidates[oldest])
                                 : first_of_lane(candidates[i]) < first_of_lane(candidates[oldest]))
      oldest = i;
  if (interference_ == nullptr) return oldest;
  const auto& running = together(now_ns);
  const auto runs = [&](const auto& session) {
    return std::find(running.begin(), running.end(), session.first) != running.end();
  };
  const auto members = lanes_.find(lane);
  if (members == lanes_.end() || !members->second.contains(candidates[oldest].id)) return oldest;
  // A session that is not its lane's head may stand in for it (the head has nothing ready), unless the head is to run alone.
  const auto head = std::find_if(members->second.begin(), members->second.end(), runs);
  const bool may_run = head != members->second.end() && (!alone_ || head->first == candidates[oldest].id);
  if (!learns_) return may_run ? oldest : kIdle;
  if (may_run && alone_) {
    uint64_t until = 0;
    for (const auto& [id, others] : lanes_)
      if (id != lane)
        for (const auto& [other, member] : others)
          if (member.in_flight > 0 &&
              (member.cls == candidates[oldest].cls || member.cls == SessionClass::kGuaranteed))
            until = std::max(until, active_until(member, now_ns));
    if (until <= now_ns) return oldest;
    look_again_ns_ = until;
    return kIdle;
  }
  if (may_run) return oldest;
  look_again_ns_ = std::min(look_ns_, plan_ends_ns_);
  return kIdle;
}

uint64_t PackPolicy::pick_holds_ns(LaneId, std::span<const SessionView> candidates, size_t picked) const {
  if (!learns_) return kUnknown;
  const SessionId only = candidates[picked].id;
  if (interference_->wants_alone(only)) return 0;
  for (const auto& [lane, members] : lanes_)
    for (const auto& [id, member] : members)
      if (id != only && (member.ready || member.in_flight > 0)) return 0;
  return kUnknown;
}

bool PackPolicy::welcomes(const SessionView& waiting) const {
  // With known remaining times the pack plan says when the session runs; the sooner it is there, the better the plan.
  // Where interference is measured those that are idle do not count, and come and go unseen from the door.
  if (interference_ == nullptr || learns_ || waiting.work_left_ns != kUnknown) return true;
  std::vector<SessionId> with = together(0);
  const double without = total_speed(with, *interference_);
  with.push_back(waiting.id);
  return total_speed(with, *interference_) >= without * (1 + kPackLeastGain);
}

void PackPolicy::set_interference(const std::shared_ptr<const Interference>& interference) {
  interference_ = interference;
  learns_ = interference != nullptr && interference->learns();
  stale_ = true;
}

void PackPolicy::admitted(const SessionView& view, LaneId lane, uint64_t now_ns) {
  Member& member = lanes_[lane][view.id];
  member = {};
  member.cls = view.cls;
  member.work_left_ns = work_left(view);
  member.in_flight = view.in_flight;
  member.iteration_ns = member.expected_ns = view.iteration_ns;
  member.since_ns = now_ns;
  stale_ = true;
}

void PackPolicy::ready(SessionId session, LaneId lane, uint64_t now_ns) {
  Member* member = find(session, lane);
  if (member == nullptr) return;
  member->ready = true;
  if (!learns_ || member->in_flight > 0) return;
  if (active_until(*member, now_ns) <= now_ns || !member->chosen) stale_ = true;
  member->since_ns = now_ns;
}

void PackPolicy::not_ready(SessionId session, LaneId lane, uint64_t) {
  Member* member = find(session, lane);
  if (member == nullptr) return;
  member->ready = false;
  stale_ = true;
}

void PackPolicy::dispatched(const SessionView& view, LaneId lane, uint64_t iterations, uint64_t now_ns) {
  Member* member = find(view.id, lane);
  if (member == nullptr) return;
  member->cls = view.cls;
  member->ready = false;
  if (member->in_flight == 0) member->expected_ns = 0;
  member->in_flight = view.in_flight;
  member->since_ns = now_ns;
  const uint64_t each = view.iteration_ns > 0 ? view.iteration_ns : longest_ns_;
  member->expected_ns += base::to_uint64(static_cast<double>(each) * static_cast<double>(iterations));
}

void PackPolicy::finished(const SessionView& view, LaneId lane, uint64_t, uint64_t now_ns) {
  Member* member = find(view.id, lane);
  if (member == nullptr) return;
  longest_ns_ = std::max(longest_ns_, view.iteration_ns);
  member->cls = view.cls;
  member->work_left_ns = work_left(view);
  member->in_flight = view.in_flight;
  member->iteration_ns = view.iteration_ns;
  member->since_ns = now_ns;
  if (learns_) look_ns_ = std::min(look_ns_, active_until(*member, now_ns));
  // The measurement of this iteration may end the session's time alone.
  if (alone_) stale_ = true;
}

void PackPolicy::paged_out(SessionId session, LaneId, uint64_t now_ns) {
  left(session, now_ns);
}

void PackPolicy::left(SessionId session, uint64_t) {
  for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
    if (lane->second.erase(session) == 0) continue;
    if (lane->second.empty()) lanes_.erase(lane);
    break;
  }
  stale_ = true;
}

uint64_t PackPolicy::active_until(const Member& member, uint64_t now_ns) const {
  if (!learns_) return kUnknown;
  if (member.in_flight > 0)
    return base::add_saturated(
        member.since_ns,
        base::add_saturated(2 * std::min(member.expected_ns, kUnknown / 2), kPackPatienceNs));
  if (member.ready) {
    // A chosen session that does not run has a driver that does not serve its lane now.
    if (!member.chosen) return kUnknown;
    return base::add_saturated(
        member.since_ns, base::add_saturated(base::add_saturated(longest_ns_, longest_ns_), kPackPatienceNs));
  }
  if (member.iteration_ns == 0) return now_ns;
  return base::add_saturated(member.since_ns, std::min(member.iteration_ns / 4 + kLeastGapNs, kMostGapNs));
}

const std::vector<SessionId>& PackPolicy::together(uint64_t now_ns) const {
  if (learns_ && now_ns >= plan_ends_ns_) stale_ = true;
  if (stale_ || (learns_ && now_ns >= look_ns_ && read_active(now_ns))) plan(now_ns);
  stale_ = false;
  return together_;
}

bool PackPolicy::read_active(uint64_t now_ns) const {
  const std::vector<SessionId> before = std::move(active_);
  active_.clear();
  look_ns_ = kUnknown;
  for (const auto& [lane, members] : lanes_)
    for (const auto& [id, member] : members) {
      const uint64_t until = active_until(member, now_ns);
      if (until <= now_ns) continue;
      look_ns_ = std::min(look_ns_, until);
      active_.push_back(id);
    }
  return active_ != before;
}

void PackPolicy::plan(uint64_t now_ns) const {
  std::vector<PackJob> heads;
  std::vector<std::vector<PackJob>> lanes;
  size_t count = 0;
  bool known = true;
  std::vector<SessionId> opportunistic;  // active ones
  const auto guaranteed = [&opportunistic](const PackJob& job) {
    return std::find(opportunistic.begin(), opportunistic.end(), job.id) == opportunistic.end();
  };
  plan_ends_ns_ = base::add_saturated(now_ns, kPlanHoldsNs);
  read_active(now_ns);
  for (const auto& [lane, members] : lanes_) {
    std::vector<PackJob> jobs;
    for (const auto& [id, member] : members) {
      if (std::find(active_.begin(), active_.end(), id) == active_.end()) continue;
      jobs.push_back({id, member.work_left_ns});
      if (learns_ && member.cls == SessionClass::kOpportunistic) opportunistic.push_back(id);
      known = known && member.work_left_ns < INFINITY;
    }
    if (jobs.empty()) continue;
    std::stable_partition(jobs.begin(), jobs.end(), guaranteed);
    heads.push_back(jobs.front());
    count += jobs.size();
    lanes.push_back(std::move(jobs));
  }
  std::sort(heads.begin(), heads.end(), [](const PackJob& a, const PackJob& b) { return a.id < b.id; });
  const auto joins = std::stable_partition(heads.begin(), heads.end(), guaranteed);
  const bool both = joins != heads.begin() && joins != heads.end();
  const auto may_want_alone = both ? joins : heads.end();
  const auto unknown = std::find_if(heads.begin(), may_want_alone, [this](const PackJob& job) {
    return interference_->wants_alone(job.id);
  });
  alone_ = heads.size() > 1 && unknown != may_want_alone;
  if (!known || both || count > kMostPredicted)
    order_ = PackOrder::kAge;
  else if (lanes.size() > 1 && !alone_)
    order_ = best_order(order_, lanes, *interference_);
  together_ = alone_ ? std::vector<SessionId>{unknown->id} : run_together(order_, heads, *interference_);
  for (auto& [lane, members] : lanes_)
    for (auto& [id, member] : members) {
      const bool chosen = std::find(together_.begin(), together_.end(), id) != together_.end();
      // From now on it is to run.
      if (chosen && !member.chosen && member.ready && member.in_flight == 0) member.since_ns = now_ns;
      member.chosen = chosen;
      if (chosen) look_ns_ = std::min(look_ns_, active_until(member, now_ns));
    }
}

}  // namespace gpushare::sched
