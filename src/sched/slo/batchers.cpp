// The batchers by name: ours, and those that it is compared with.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>

#include "sched/slo/batcher_base.hpp"

namespace gpushare::sched::slo {
namespace {

struct Named {
  const char* name;
  std::unique_ptr<Batcher> (*make)(const BatcherOptions&);
};
constexpr Named kPolicies[] = {{"fifo", make_fifo},
                               {"edf", make_edf},
                               {"clipper", make_clipper},
                               {"clipper-mean", make_clipper_mean},
                               {"clipper-aimd", make_clipper_aimd},
                               {"nexus", make_nexus},
                               {"nexus-earliest", make_nexus_earliest},
                               {"nexus-cycle", make_nexus_cycle},
                               {"clockwork", make_clockwork},
                               {"clockwork-single", make_clockwork_single},
                               {"maxdelay", make_maxdelay},
                               {"orloj", make_orloj},
                               {"orloj-own", make_orloj_own},
                               {"greedy", make_greedy},
                               {"gpushare", make_gpushare},
                               {"clairvoyant", make_clairvoyant},
                               {"clairvoyant-edf", make_clairvoyant_edf}};
// The names alone, in the same order.
constexpr auto kNames = [] {
  std::array<const char*, std::size(kPolicies)> names{};
  for (size_t i = 0; i < names.size(); ++i) names[i] = kPolicies[i].name;
  return names;
}();

base::Status check(const BatcherOptions& o) {
  const auto wrong = [](const char* name, double value, const char* allowed) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("batcher option %s is %g; allowed: %s", name, value, allowed));
  };
  if (o.max_pending == 0) return wrong("max_pending", 0, "1 and more");
  if (o.bins == 0 || o.bins > 4096) return wrong("bins", static_cast<double>(o.bins), "1 to 4096");
  if (!(o.delay_rate_per_ms > 0) || !std::isfinite(o.delay_rate_per_ms))
    return wrong("delay_rate_per_ms", o.delay_rate_per_ms, "above 0");
  if (!(o.estimate_quantile >= 0 && o.estimate_quantile < 1))
    return wrong("estimate_quantile", o.estimate_quantile, "0 to below 1");
  if (!(o.feasible_quantile > 0 && o.feasible_quantile < 1))
    return wrong("feasible_quantile", o.feasible_quantile, "between 0 and 1");
  for (const auto& [name, value] : {std::pair{"max_delay_ms", o.max_delay_ms},
                                    {"clockwork_window_ms", o.clockwork_window_ms},
                                    {"clockwork_slack_ms", o.clockwork_slack_ms},
                                    {"nexus_overhead_ms", o.nexus_overhead_ms},
                                    {"max_defer_ms", o.max_defer_ms},
                                    {"opportunity", o.opportunity}})
    if (!(value >= 0) || value > 1e9) return wrong(name, value, "0 to 1e9");
  return base::ok_status();
}

}  // namespace

std::span<const char* const> batcher_names() {
  return kNames;
}

base::Result<std::unique_ptr<Batcher>> make_batcher(std::string_view policy, const BatcherOptions& options) {
  GPUSHARE_RETURN_IF_ERROR(check(options));
  for (const Named& each : kPolicies)
    if (policy == each.name) return each.make(options);
  std::string names;
  for (const char* name : kNames) names += (names.empty() ? "" : ", ") + std::string(name);
  return base::Status(GPUSHARE_NOT_FOUND,
                      base::format("no serving policy '%.*s'; there are %s", static_cast<int>(policy.size()),
                                   policy.data(), names.c_str()));
}

}  // namespace gpushare::sched::slo
