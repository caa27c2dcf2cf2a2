// One parameter of a policy after the other, at one case.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "rows.hpp"

namespace gpushare::experiments {

void sensitivity(Report& report, const std::vector<Calibration>& all) {
  const auto at = std::find_if(all.begin(), all.end(), [](const Calibration& each) {
    return each.name == "three-modal" && each.target == Target::kAchievable;
  });
  if (at == all.end()) return;
  report.line("\n## Sensitivity\n");
  report.line("Three-modal at its achievable load, mean over SLO 1.5, 2, 3 and 5. Defaults in bold.\n");
  report.line("| policy | setting | value: finish rate |\n|---|---|---|");
  struct Variant {
    const char* policy;
    const char* setting;
    std::string value;
    std::function<void(ServingOptions&)> change;
  };
  std::vector<Variant> variants;
  const auto add = [&](const char* policy, const char* setting, double value, double standard,
                       const std::function<void(ServingOptions&)>& change) {
    variants.push_back({policy, setting, base::format(value == standard ? "**%g**" : "%g", value), change});
  };
  for (double b : {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1})
    add("orloj", "b / ms", b, 1e-4, [=](ServingOptions& o) { o.batcher.delay_rate_per_ms = b; });
  variants.push_back({"orloj", "of the text", "sizes by earliest deadline", [](ServingOptions& o) {
                        o.batcher.size_order = sched::slo::SizeOrder::kEarliestDeadline;
                      }});
  variants.push_back({"orloj", "of the text", "more than the size",
                      [](ServingOptions& o) { o.batcher.more_than_size = true; }});
  for (double q : {0.25, 0.5, 0.75, 0.9, 0.99})
    add("orloj", "estimate: quantile (default: the mean)", q, 0,
        [=](ServingOptions& o) { o.batcher.estimate_quantile = q; });
  for (double q : {0.1, 0.3, 0.5, 0.7, 0.9, 0.99})
    add("gpushare", "feasible quantile", q, 0.7, [=](ServingOptions& o) { o.batcher.feasible_quantile = q; });
  for (double p : {0.0, 0.35, 0.5, 0.7, 0.85, 1.0})
    add("gpushare", "opportunity", p, 1, [=](ServingOptions& o) { o.batcher.opportunity = p; });
  for (double d : {0.0, 10.0, 50.0, 200.0})
    add("gpushare", "defer, ms", d, 0, [=](ServingOptions& o) { o.batcher.max_defer_ms = d; });
  for (const char* policy : {"gpushare", "orloj"}) {
    for (size_t w : {32u, 128u, 512u, 2048u, 8192u})
      add(policy, "window", static_cast<double>(w), 2048, [=](ServingOptions& o) {
        o.batcher.histogram.window = w;
        o.warm_samples = w;
      });
    for (size_t bins : {4u, 8u, 16u, 32u, 128u})
      add(policy, "bins", static_cast<double>(bins), 32, [=](ServingOptions& o) { o.batcher.bins = bins; });
  }
  for (double window : {1.0, 10.0, 100.0, 1000.0})
    add("clockwork", "window, ms", window, 10,
        [=](ServingOptions& o) { o.batcher.clockwork_window_ms = window; });
  std::string line;
  for (size_t i = 0; i < variants.size(); ++i) {
    const Variant& variant = variants[i];
    std::vector<Row> rows;
    for (double slo : {1.5, 2.0, 3.0, 5.0}) {
      Row row;
      row.name = variant.value;
      row.draw = drawer(at->synthetic, at->load);
      row.options = options_of(*at, slo);
      variant.change(row.options);
      rows.push_back(std::move(row));
    }
    run_rows(rows, {{variant.policy, variant.policy}});
    double mean = 0;
    for (const Row& row : rows) mean += row.rate(variant.policy).mean / static_cast<double>(rows.size());
    line += base::format("%s%s: %.3f", line.empty() ? "" : ", ", variant.value.c_str(), mean);
    if (i + 1 < variants.size() && std::string(variants[i + 1].policy) == variant.policy &&
        std::string(variants[i + 1].setting) == variant.setting)
      continue;
    report.line(base::format("| %s | %s | %s |", variant.policy, variant.setting, line.c_str()));
    line.clear();
  }
  report.line("\ngpushare does not use b: its price of time is the device's own recent goodput.");
}

}  // namespace gpushare::experiments
