// fair: each session has the part of the device's time that its weight says, whatever its lane. Start-time fair queueing
// (Goyal, Vin and Cheng, 1996), kept by the scheduler over all lanes.
// SPDX-License-Identifier: Apache-2.0
#include "sched/policy.hpp"

namespace gpushare::sched {
namespace {

class Fair final : public Policy {
 public:
  std::string_view name() const override { return "fair"; }
  Answers answers() const override { return {.gives_way = true}; }
  GivesWay gives_way(const SessionView&, const SessionView&) const override { return GivesWay::kAfterStay; }
  uint64_t holds_ns(const SessionView&, const DeviceView&) const override { return kUnknown; }
};

}  // namespace

std::unique_ptr<Policy> make_fair() {
  return std::make_unique<Fair>();
}

}  // namespace gpushare::sched
