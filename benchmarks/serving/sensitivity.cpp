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
  report.line("| policy | setting | finish rate |\n|---|---|---|");
  struct Variant {
    const char* policy;
    std::string name;
    std::function<void(ServingOptions&)> change;
  };
  std::vector<Variant> variants;
  for (double b : {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1})
    variants.push_back({"orloj", base::format(b == 1e-4 ? "**b = %g / ms**" : "b = %g / ms", b),
                        [=](ServingOptions& o) { o.batcher.delay_rate_per_ms = b; }});
  variants.push_back({"orloj", "sizes by earliest deadline (the text)", [](ServingOptions& o) {
                        o.batcher.size_order = sched::slo::SizeOrder::kEarliestDeadline;
                      }});
  variants.push_back({"orloj", "more than the size (as printed)",
                      [](ServingOptions& o) { o.batcher.more_than_size = true; }});
  for (double q : {0.25, 0.5, 0.75, 0.9, 0.99})
    variants.push_back({"orloj", base::format("estimate = quantile %g (default: the mean)", q),
                        [=](ServingOptions& o) { o.batcher.estimate_quantile = q; }});
  for (double q : {0.1, 0.3, 0.5, 0.7, 0.9, 0.99})
    variants.push_back({"gpushare",
                        base::format(q == 0.7 ? "**feasible quantile %g**" : "feasible quantile %g", q),
                        [=](ServingOptions& o) { o.batcher.feasible_quantile = q; }});
  for (double p : {0.0, 0.35, 0.5, 0.7, 0.85, 1.0})
    variants.push_back({"gpushare", base::format(p == 1 ? "**opportunity %g**" : "opportunity %g", p),
                        [=](ServingOptions& o) { o.batcher.opportunity = p; }});
  for (double d : {0.0, 10.0, 50.0, 200.0})
    variants.push_back({"gpushare", base::format(d == 0 ? "**defer %g ms**" : "defer %g ms", d),
                        [=](ServingOptions& o) { o.batcher.max_defer_ms = d; }});
  for (const char* policy : {"gpushare", "orloj"}) {
    for (size_t w : {32u, 128u, 512u, 2048u, 8192u})
      variants.push_back(
          {policy, base::format(w == 2048 ? "**window %zu**" : "window %zu", w), [=](ServingOptions& o) {
             o.batcher.histogram.window = w;
             o.warm_samples = w;
           }});
    for (size_t bins : {4u, 8u, 16u, 32u, 128u})
      variants.push_back({policy, base::format(bins == 32 ? "**bins %zu**" : "bins %zu", bins),
                          [=](ServingOptions& o) { o.batcher.bins = bins; }});
  }
  for (double window : {1.0, 10.0, 100.0, 1000.0})
    variants.push_back({"clockwork", base::format(window == 10 ? "**window %g ms**" : "window %g ms", window),
                        [=](ServingOptions& o) { o.batcher.clockwork_window_ms = window; }});
  for (const Variant& variant : variants) {
    std::vector<Row> rows;
    for (double slo : {1.5, 2.0, 3.0, 5.0}) {
      Row row;
      row.name = variant.name;
      row.draw = drawer(at->synthetic, at->load);
      row.options = options_of(*at, slo);
      variant.change(row.options);
      rows.push_back(std::move(row));
    }
    run_rows(rows, {{variant.policy, variant.policy}});
    double mean = 0;
    for (const Row& row : rows) mean += row.rate(variant.policy).mean / static_cast<double>(rows.size());
    report.row("| %s | %s | %.3f |", variant.policy, variant.name.c_str(), mean);
  }
  report.line("\ngpushare does not use b: its price of time is the device's own recent goodput.");
}

}  // namespace gpushare::experiments
