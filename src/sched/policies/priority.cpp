// priority: guaranteed sessions go before opportunistic ones, then those of larger priority, and whoever ranks lower gives
// its bytes up. Fixed priorities with pauses at boundaries, as in limited preemption (Buttazzo, Bertogna and Yao, 2013);
// equal ranks share by weight.
// SPDX-License-Identifier: Apache-2.0

#include "sched/policy.hpp"

namespace gpushare::sched {
namespace {

class Priority final : public Policy {
 public:
  std::string_view name() const override { return "priority"; }
  Answers answers() const override { return {.before = true, .gives_way = true, .ranks = true}; }
  bool before(const SessionView& a, const SessionView& b) const override {
    return a.cls != b.cls ? a.cls < b.cls : a.priority > b.priority;
  }
  uint64_t rank(const SessionView& session) const override {
    return static_cast<uint64_t>(session.cls) << 32 |
           (static_cast<uint32_t>(INT32_MAX) - static_cast<uint32_t>(session.priority));
  }
  GivesWay gives_way(const SessionView& victim, const SessionView& other) const override {
    if (before(other, victim)) return GivesWay::kAtOnce;
    return before(victim, other) ? GivesWay::kNever : GivesWay::kAfterStay;
  }
  uint64_t holds_ns(const SessionView&, const DeviceView&) const override { return kUnknown; }
};

}  // namespace

std::unique_ptr<Policy> make_priority() {
  return std::make_unique<Priority>();
}

}  // namespace gpushare::sched
