// pack_policy.hpp: fills lanes for throughput.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "sched/pack_plan.hpp"
#include "sched/policy.hpp"

namespace gpushare::sched {

// Told nothing of interference, it admits while memory is safe and runs the oldest session of each lane
// (Salus, PACK). Told of it, the oldest session of all runs, and heads of other lanes join it (PackOrder). Each time
// that a session comes or goes, the time until all residents are done is predicted for each order, where their
// remaining time is known, and the order with the least is followed. One of them is what fair does; so pack does not
// end later than fair would, as far as the estimates hold and until other sessions arrive. Without known remaining
// times sessions join by age while each adds speed: the total speed never falls below that of one session at a time.
//
// Where interference is measured (Interference::learns), only sessions that are active count: those with an iteration
// ready or in flight, or between two iterations for a moment. A session whose time alone is not known runs its first
// iterations alone. Pairs that are not known run together, and are known then. No guaranteed session waits for
// opportunistic ones there: guaranteed ones are the heads of their lanes, the oldest of them runs, and opportunistic
// ones join last, not alone.
class PackPolicy final : public Policy {
 public:
  // With more residents, or with one of unknown remaining time, nothing is predicted.
  static constexpr size_t kMostPredicted = 16;

  std::string_view name() const override { return "pack"; }
  PolicyTraits traits() const override {
    return {.paging = PagingRule::kNever, .measures = true, .stay_factor = 1};
  }
  size_t pick(LaneId lane, std::span<const SessionView> candidates, uint64_t now_ns) override;
  uint64_t pick_holds_ns(LaneId, std::span<const SessionView> candidates, size_t picked) const override;
  uint64_t look_again_ns() const override { return look_again_ns_; }
  bool welcomes(const SessionView& waiting) const override;
  uint64_t kind(const SessionView& session) const override {
    return interference_ == nullptr ? 0 : interference_->kind(session.id);
  }
  void set_interference(const std::shared_ptr<const Interference>& interference) override;
  void admitted(const SessionView& view, LaneId lane, uint64_t now_ns) override;
  void ready(SessionId session, LaneId lane, uint64_t now_ns) override;
  void not_ready(SessionId session, LaneId lane, uint64_t now_ns) override;
  void dispatched(const SessionView& view, LaneId lane, uint64_t iterations, uint64_t now_ns) override;
  void finished(const SessionView& view, LaneId lane, uint64_t device_ns, uint64_t now_ns) override;
  void paged_out(SessionId session, LaneId lane, uint64_t now_ns) override;
  void left(SessionId session, uint64_t now_ns) override;

 private:
  struct Member {
    SessionClass cls = SessionClass::kGuaranteed;
    double work_left_ns = 0;  // infinite: not known
    bool ready = false;
    bool chosen = false;  // was to run as of the last pack plan
    uint32_t in_flight = 0;
    uint64_t iteration_ns = 0;
    uint64_t since_ns = 0;     // it is ready, chosen, in flight or idle
    uint64_t expected_ns = 0;  // in flight
  };
  Member* find(SessionId session, LaneId lane);
  // The time until which the session counts as running if nothing happens; at most `now_ns`: it does not count.
  uint64_t active_until(const Member& member, uint64_t now_ns) const;
  // Lanes' heads that run together. Computed anew after somebody came or went, and where interference is measured also with time.
  const std::vector<SessionId>& together(uint64_t now_ns) const;
  void plan(uint64_t now_ns) const;
  // Reads who is active into active_ and look_ns_; false if nobody came or went.
  bool read_active(uint64_t now_ns) const;

  std::shared_ptr<const Interference> interference_;
  bool learns_ = false;
  mutable std::map<LaneId, std::map<SessionId, Member>> lanes_;
  uint64_t longest_ns_ = 0;  // iteration
  mutable PackOrder order_ = PackOrder::kAge;
  mutable std::vector<SessionId> together_;
  mutable bool stale_ = true;
  mutable bool alone_ = false;  // the one of together_ is to run alone, so that its time is learned
  mutable std::vector<SessionId> active_;
  mutable uint64_t look_ns_ = 0;  // active_ may change by then
  mutable uint64_t plan_ends_ns_ = 0;
  mutable uint64_t look_again_ns_ = kUnknown;
};

}  // namespace gpushare::sched
