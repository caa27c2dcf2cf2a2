// srtf: the session with the least device time left runs, and those of unknown length follow, least service first. Schrage
// (1968) shows that shortest remaining time first has the least mean completion time; the levels of service are those of
// Tiresias (Gu et al., NSDI 2019).
// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <utility>

#include "sched/policy.hpp"
#include "sched/turn_rules.hpp"

namespace gpushare::sched {
namespace {

// Service in doubling levels from one second up: sessions of unknown length change places rarely.
uint32_t level(const SessionView& view) {
  return view.remaining_ns != kUnknown
             ? 0
             : static_cast<uint32_t>(std::bit_width(view.service_ns / kServiceStepNs));
}

std::pair<uint64_t, uint32_t> srtf_rank(const SessionView& view) {
  return {view.remaining_ns, level(view)};
}

class Srtf final : public Policy {
 public:
  std::string_view name() const override { return "srtf"; }
  Answers answers() const override { return {.before = true, .gives_way = true}; }
  bool before(const SessionView& a, const SessionView& b) const override {
    return srtf_rank(a) < srtf_rank(b);
  }
  GivesWay gives_way(const SessionView& victim, const SessionView& other) const override {
    if (before(victim, other)) return GivesWay::kNever;
    if (!before(other, victim)) return GivesWay::kAfterStay;
    const bool known = victim.remaining_ns != kUnknown;
    // By the service that both have received no session takes a place before the stay there is over.
    if (!known && other.remaining_ns == kUnknown && victim.alternates) return GivesWay::kAfterStay;
    // A session that has run before comes back only for a clear gain, because estimates wobble and each swap
    // costs two copies.
    const uint64_t margin = known && other.service_ns > 0 ? victim.remaining_ns / 64 : 0;
    return !known || other.remaining_ns < victim.remaining_ns - margin ? GivesWay::kAtOnce
                                                                       : GivesWay::kAfterStay;
  }
  Share share(const SessionView&) const override { return {Share::Kind::kWhole}; }
  uint64_t holds_ns(const SessionView& view, const DeviceView&) const override {
    if (view.remaining_ns != kUnknown) return view.remaining_ns;  // it only falls further
    const uint32_t of = level(view);
    return of >= 33 ? kUnknown : (kServiceStepNs << of) - view.service_ns;  // 2^33 s: never
  }
};

}  // namespace

std::unique_ptr<Policy> make_srtf() {
  return std::make_unique<Srtf>();
}

}  // namespace gpushare::sched
