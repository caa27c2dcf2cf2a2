// pack: fills the lanes with sessions while memory is safe and, told how they slow each other, while one more raises the
// total speed. Salus (Yu and Chowdhury, MLSys 2020) packs by memory; the pack plan (pack_plan.hpp) is ours.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "base/saturate.hpp"
#include "sched/pack_plan.hpp"
#include "sched/policy.hpp"
#include "sched/turn_rules.hpp"

namespace gpushare::sched {
namespace {

// A session counts as active between two iterations for a quarter of an iteration and this, and at most this much longer.
constexpr uint64_t kLeastGapNs = 100'000, kMostGapNs = 10'000'000;
// Measurements change, so a pack plan made from them is made anew after this time.
constexpr uint64_t kPlanHoldsNs = 1'000'000'000;
// With more residents, or with one of unknown remaining time, nothing is predicted.
constexpr size_t kMostPredicted = 16;

bool is_among(const std::vector<SessionId>& sessions, SessionId id) {
  return std::find(sessions.begin(), sessions.end(), id) != sessions.end();
}

// Told of interference, the oldest session of all runs, and heads of other lanes join it (PackOrder). Each time that a
// session comes or goes, the time until all residents are done is predicted for each order, where their remaining time
// is known, and the order with the least is followed. One of them is what fair does; so pack does not end later than
// fair would, as far as the estimates hold and until other sessions arrive. Without known remaining times sessions join
// by age while each adds speed: the total speed never falls below that of one session at a time.
//
// Where interference is measured (Interference::learns), only sessions that are active count: those with an iteration
// ready or in flight, or between two iterations for a moment. A session whose time alone is not known runs its first
// iterations alone. Pairs that are not known run together, and are known then. No guaranteed session waits for
// opportunistic ones there: guaranteed ones are the heads of their lanes, the oldest of them runs, and opportunistic
// ones join last, not alone.
class Pack final : public Policy {
 public:
  std::string_view name() const override { return "pack"; }
  Answers answers() const override {
    return {.may_run = true, .gives_way = true, .may_join = true, .by_interference = true};
  }
  GivesWay gives_way(const SessionView&, const SessionView&) const override { return GivesWay::kAfterStay; }
  Share share(const SessionView&) const override { return {Share::Kind::kInLine}; }
  uint64_t may_run(const SessionView& session, const DeviceView& device, uint64_t now_ns) const override;
  MayJoin may_join(const SessionView& waiting, const Joining& what) const override;
  uint64_t holds_ns(const SessionView& session, const DeviceView& device) const override;

 private:
  struct Member {
    SessionId id = kNoSession;
    LaneId lane = kNoLane;
    SessionClass cls = SessionClass::kGuaranteed;
    double work_left_ns = 0;  // infinite: not known
    bool ready = false;
    bool chosen = false;  // was to run as of the last pack plan
    uint32_t in_flight = 0;
    uint64_t iteration_ns = 0;
    uint64_t since_ns = 0;         // it is ready, chosen, in flight or idle
    uint64_t chosen_since_ns = 0;  // while it was ready
    double expected_ns = 0;        // in flight
  };
  bool is_chosen(const Member& member) const { return is_among(together_, member.id); }
  // The time until which the session counts as running if nothing happens; at most `now_ns`: it does not count.
  uint64_t active_until(const Member& member, uint64_t now_ns) const;
  // Reads the residents, and makes the pack plan anew after a session came or went; where interference is measured,
  // also after some time.
  void refresh(const DeviceView& device, uint64_t now_ns) const;
  bool read_members(const DeviceView& device) const;  // true if somebody came or went
  bool read_active(uint64_t now_ns) const;            // likewise among those active
  std::vector<std::vector<PackJob>> active_jobs(std::vector<SessionId>& opportunistic) const;
  void plan(uint64_t now_ns) const;
  bool guaranteed_first(const Member& member) const;  // a ready guaranteed session of its lane is

  // The residents at the last question, and the pack plan for them. Answers depend on the device alone, so keeping the
  // plan saves making it for each question.
  mutable const Interference* interference_ = nullptr;
  mutable bool learns_ = false;
  mutable uint64_t changes_ = kUnknown, seen_ns_ = 0;
  mutable std::vector<Member> members_;  // by lane, then id
  mutable uint64_t longest_ns_ = 0;      // iteration
  mutable PackOrder order_ = PackOrder::kAge;
  mutable std::vector<SessionId> together_, active_;
  mutable bool alone_ = false;    // the one of together_ is to run alone, so that its time is learned
  mutable uint64_t look_ns_ = 0;  // active_ may change by then
  mutable uint64_t plan_ends_ns_ = 0;
};

uint64_t Pack::may_run(const SessionView& session, const DeviceView& device, uint64_t now_ns) const {
  refresh(device, now_ns);
  if (interference_ == nullptr) return now_ns;
  const auto self = std::find_if(members_.begin(), members_.end(),
                                 [&](const Member& member) { return member.id == session.id; });
  if (self == members_.end()) return now_ns;
  // A session that is not its lane's head may stand in for it (the head has nothing ready), unless the head is to run alone.
  const auto head = std::find_if(members_.begin(), members_.end(), [&](const Member& member) {
    return member.lane == self->lane && is_chosen(member);
  });
  const bool runs = head != members_.end() && (!alone_ || head->id == session.id);
  if (!learns_) return runs ? now_ns : kUnknown;
  if (guaranteed_first(*self)) return kUnknown;
  if (!runs) return std::min(look_ns_, plan_ends_ns_);
  uint64_t until = now_ns;
  if (alone_)
    for (const Member& member : members_)
      if (member.lane != self->lane && member.in_flight > 0 &&
          (member.cls == self->cls || member.cls == SessionClass::kGuaranteed))
        until = std::max(until, active_until(member, now_ns));
  return until;
}

MayJoin Pack::may_join(const SessionView& waiting, const Joining& what) const {
  refresh(*what.device, seen_ns_);
  // With known remaining times the pack plan says when the session runs; the sooner it is there, the better the plan.
  // Where interference is measured those that are idle do not count, and come and go unseen from the door.
  if (interference_ == nullptr || learns_ || waiting.work_left_ns != kUnknown) return MayJoin::kYes;
  std::vector<SessionId> with = together_;
  const double without = total_speed(with, *interference_);
  with.push_back(waiting.id);
  return total_speed(with, *interference_) >= without * (1 + kPackLeastGain) ? MayJoin::kYes : MayJoin::kNo;
}

uint64_t Pack::holds_ns(const SessionView& session, const DeviceView& device) const {
  refresh(device, seen_ns_);
  if (!learns_) return kUnknown;
  if (interference_->wants_alone(session.id)) return 0;
  return std::any_of(members_.begin(), members_.end(),
                     [&](const Member& member) {
                       return member.id != session.id && (member.ready || member.in_flight > 0);
                     })
             ? 0
             : kUnknown;
}

bool Pack::guaranteed_first(const Member& member) const {
  if (member.cls == SessionClass::kGuaranteed) return false;
  return std::any_of(members_.begin(), members_.end(), [&](const Member& other) {
    return other.lane == member.lane && other.ready && other.cls == SessionClass::kGuaranteed;
  });
}

uint64_t Pack::active_until(const Member& member, uint64_t now_ns) const {
  if (!learns_) return kUnknown;
  if (member.in_flight > 0)
    return base::add_saturated(member.since_ns,
                               base::add_saturated(base::to_uint64(2 * member.expected_ns), kPatienceNs));
  if (member.ready) {
    // A chosen session that does not run has a driver that does not serve its lane now.
    if (!member.chosen) return kUnknown;
    return base::add_saturated(
        std::max(member.since_ns, member.chosen_since_ns),
        base::add_saturated(base::add_saturated(longest_ns_, longest_ns_), kPatienceNs));
  }
  if (member.iteration_ns == 0) return now_ns;
  return base::add_saturated(member.since_ns, std::min(member.iteration_ns / 4 + kLeastGapNs, kMostGapNs));
}

bool Pack::read_members(const DeviceView& device) const {
  std::vector<Member> now;
  for (const ResidentView& each : device.residents()) {
    const SessionView& view = *each.session;
    Member member{view.id, each.lane, view.cls};
    member.work_left_ns = view.work_left_ns == kUnknown ? INFINITY : static_cast<double>(view.work_left_ns);
    member.ready = each.ready;
    member.in_flight = view.in_flight;
    member.iteration_ns = view.iteration_ns;
    member.since_ns = each.since_ns;
    member.expected_ns = each.in_flight_ns;
    longest_ns_ = std::max(longest_ns_, view.iteration_ns);
    now.push_back(member);
  }
  const auto place = [](const Member& member) { return std::pair(member.lane, member.id); };
  std::sort(now.begin(), now.end(), [&](const Member& a, const Member& b) { return place(a) < place(b); });
  const bool same = std::equal(now.begin(), now.end(), members_.begin(), members_.end(),
                               [&](const Member& a, const Member& b) { return place(a) == place(b); });
  for (Member& member : now)
    for (const Member& before : members_)
      if (before.id == member.id)
        std::tie(member.chosen, member.chosen_since_ns) = std::tie(before.chosen, before.chosen_since_ns);
  members_ = std::move(now);
  return !same;
}

void Pack::refresh(const DeviceView& device, uint64_t now_ns) const {
  const Interference* known = device.interference();
  if (changes_ == device.changes() && interference_ == known && (!learns_ || now_ns <= seen_ns_)) return;
  const bool happened = changes_ != device.changes();
  bool stale = interference_ != known;
  interference_ = known;
  learns_ = known != nullptr && known->learns();
  changes_ = device.changes();
  seen_ns_ = now_ns;
  if (known == nullptr) return;
  stale = read_members(device) || stale;
  // The measurement of an iteration may end the session's time alone.
  if (learns_) stale = read_active(now_ns) || now_ns >= plan_ends_ns_ || (alone_ && happened) || stale;
  if (stale) plan(now_ns);
}

bool Pack::read_active(uint64_t now_ns) const {
  const std::vector<SessionId> before = std::move(active_);
  active_.clear();
  look_ns_ = kUnknown;
  for (const Member& member : members_) {
    const uint64_t until = active_until(member, now_ns);
    if (until <= now_ns) continue;
    look_ns_ = std::min(look_ns_, until);
    active_.push_back(member.id);
  }
  return active_ != before;
}

// The active jobs of each lane that has any. Guaranteed ones come first; those that are not are in `opportunistic`.
std::vector<std::vector<PackJob>> Pack::active_jobs(std::vector<SessionId>& opportunistic) const {
  std::vector<std::vector<PackJob>> lanes;
  for (auto member = members_.begin(); member != members_.end();) {
    std::vector<PackJob> jobs;
    for (const LaneId lane = member->lane; member != members_.end() && member->lane == lane; ++member) {
      if (!is_among(active_, member->id)) continue;
      jobs.push_back({member->id, member->work_left_ns});
      if (learns_ && member->cls == SessionClass::kOpportunistic) opportunistic.push_back(member->id);
    }
    if (jobs.empty()) continue;
    std::stable_partition(jobs.begin(), jobs.end(),
                          [&opportunistic](const PackJob& job) { return !is_among(opportunistic, job.id); });
    lanes.push_back(std::move(jobs));
  }
  return lanes;
}

void Pack::plan(uint64_t now_ns) const {
  plan_ends_ns_ = base::add_saturated(now_ns, kPlanHoldsNs);
  read_active(now_ns);
  std::vector<SessionId> opportunistic;
  const std::vector<std::vector<PackJob>> lanes = active_jobs(opportunistic);
  const auto guaranteed = [&opportunistic](const PackJob& job) { return !is_among(opportunistic, job.id); };
  std::vector<PackJob> heads;
  size_t count = 0;
  bool known = true;
  for (const std::vector<PackJob>& jobs : lanes) {
    heads.push_back(jobs.front());
    count += jobs.size();
    for (const PackJob& job : jobs) known = known && job.left_ns < INFINITY;
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
  for (Member& member : members_) {
    const bool chosen = is_chosen(member);
    // From now on it is to run.
    if (chosen && !member.chosen) member.chosen_since_ns = now_ns;
    member.chosen = chosen;
    if (chosen) look_ns_ = std::min(look_ns_, active_until(member, now_ns));
  }
}

}  // namespace

std::unique_ptr<Policy> make_pack() {
  return std::make_unique<Pack>();
}

}  // namespace gpushare::sched
