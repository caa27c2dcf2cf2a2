// pack_policy.hpp: fills lanes for throughput.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "sched/policy.hpp"

namespace gpushare::sched {

// Told nothing of interference, it admits while memory is safe and runs the oldest session of each lane
// (Salus, PACK). Told of it, a lane runs only if that raises the total speed: the oldest session of all
// always runs; then, in order of age, the heads of the other lanes are added while the sum of speeds grows by
// at least kLeastGain. So the total speed never falls below that of one session at a time (makespan no worse
// than fifo's as far as the estimates hold), and nobody starves: what is oldest runs.
class PackPolicy final : public Policy {
 public:
  static constexpr double kLeastGain = 0.01;

  std::string_view name() const override { return "pack"; }
  PolicyTraits traits() const override { return {0, 0, false, 64, PagingRule::kNever}; }
  size_t pick(LaneId lane, std::span<const SessionView> candidates, uint64_t now_ns) override;
  uint64_t pick_holds_ns(LaneId, std::span<const SessionView>, size_t) const override { return kUnknown; }
  bool welcomes(const SessionView& waiting) const override;
  uint64_t kind(const SessionView& session) const override {
    return interference_ == nullptr ? 0 : interference_->kind(session.id);
  }
  void set_interference(const std::shared_ptr<const Interference>& interference) override;
  void admitted(const SessionView& view, LaneId lane, uint64_t now_ns) override;
  void paged_out(SessionId session, LaneId lane, uint64_t now_ns) override;
  void left(SessionId session, uint64_t now_ns) override;

 private:
  // Lanes' heads that run together, oldest first. Computed anew only after somebody came or went.
  const std::vector<SessionId>& together() const;
  double total_rate(const std::vector<SessionId>& sessions) const;

  std::shared_ptr<const Interference> interference_;
  std::map<LaneId, std::set<SessionId>> lanes_;
  mutable std::vector<SessionId> together_;
  mutable double together_rate_ = 0;
  mutable bool stale_ = true;
};

}  // namespace gpushare::sched
