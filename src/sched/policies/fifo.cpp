// fifo: one session has the device until it ends, and the next one in line follows. Salus (Yu and Chowdhury, MLSys 2020)
// measures against it: it is what a device without sharing does.
// SPDX-License-Identifier: Apache-2.0
#include "sched/policy.hpp"

namespace gpushare::sched {
namespace {

class Fifo final : public Policy {
 public:
  std::string_view name() const override { return "fifo"; }
  Answers answers() const override { return {.gives_way = true, .may_join = true}; }
  // A session that ends within ten stays runs to its end undisturbed; an endless one keeps nobody off for ever.
  GivesWay gives_way(const SessionView&, const SessionView&) const override {
    return GivesWay::kAfterLongStay;
  }
  Share share(const SessionView&) const override { return {Share::Kind::kWhole}; }
  MayJoin may_join(const SessionView&, const Joining& what) const override {
    return what.residents == 0 && !what.passes ? MayJoin::kYes : MayJoin::kNobody;
  }
  uint64_t holds_ns(const SessionView&, const DeviceView&) const override { return kUnknown; }
};

}  // namespace

std::unique_ptr<Policy> make_fifo() {
  return std::make_unique<Fifo>();
}

}  // namespace gpushare::sched
