// SPDX-License-Identifier: Apache-2.0
#include "cli/serve_result.hpp"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "base/units.hpp"
#include "cli/charts.hpp"
#include "cli/output.hpp"
#include "cli/report_style.hpp"
#include "cluster/json.hpp"

namespace gpushare::cli {
namespace {

std::vector<std::string> row_of(const ServeCase& each) {
  const sim::ServingResult& r = each.result;
  return {each.load > 0 ? base::format("%g", each.load) : "recorded",
          base::format("%g", each.slo_x_p99),
          each.policy,
          base::format("%.1f%%", 100 * r.finish_rate),
          base::format("%.2f", r.goodput_per_s),
          base::format("%.1f", r.p50_ms),
          base::format("%.1f", r.p99_ms),
          base::format("%.1f", r.mean_batch),
          std::to_string(r.finished_late),
          std::to_string(r.drops()),
          base::format("%.1f", r.decision_us)};
}
constexpr const char* kTitles[] = {"load",   "SLO",   "policy", "in time", "goodput/s",  "P50 ms",
                                   "P99 ms", "batch", "late",   "dropped", "decision us"};

std::string page_head(const ServeResult& result) {
  return "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
         "content=\"width=device-width,initial-scale=1\"><title>gpushare serve</title><style>" +
         std::string(kReportStyle) +
         "</style></head><body><main><header><h1>Requests finished in time</h1><p>" +
         escape_html(result.source) + ", " +
         (result.device == "sim" ? "simulated on virtual time" : "in real time on CPU threads") +
         "</p></header>";
}

// Which policies finish the most in time at one load, in the mean over the deadlines. Policies within 0.05 points of
// the best are level with it and are all named: with generous deadlines every policy finishes everything.
std::string finding_of(const ServeResult& result, double at_load) {
  constexpr double kLevel = 0.0005;
  std::vector<double> means;
  for (const std::string& policy : result.policies) {
    double sum = 0;
    size_t count = 0;
    for (const ServeCase& each : result.cases) {
      if (each.policy != policy || each.load != at_load) continue;
      sum += each.result.finish_rate;
      ++count;
    }
    means.push_back(count > 0 ? sum / static_cast<double>(count) : 0);
  }
  if (means.empty()) return {};
  const double most = *std::max_element(means.begin(), means.end());
  std::string names;
  size_t level = 0;
  for (size_t p = 0; p < means.size(); ++p) {
    if (means[p] < most - kLevel) continue;
    names += (level++ > 0 ? ", " : "") + result.policies[p];
  }
  const char* over = result.slos_x_p99.size() > 1 ? " in the mean over the deadlines" : "";
  if (level == means.size() && level > 1)
    return base::format("All policies finish %.1f%% in time%s.", 100 * most, over);
  return base::format("%s the most in time%s: %.1f%%.",
                      (names + (level > 1 ? " finish" : " finishes")).c_str(), over, 100 * most);
}

// The share in time over the deadline, a line a policy, at one load.
std::string chart_of(const ServeResult& result, size_t index) {
  const double at_load = result.loads[index];
  const std::vector<double>& slos = result.slos_x_p99;
  const std::string load = at_load > 0 ? base::format("load %g", at_load) : "arrivals as recorded";
  Chart chart;
  chart.title = "Share of requests finished in time over the deadline, " + load;
  chart.heading = load;
  chart.x_label = "deadline, multiples of the P99 execution time";
  chart.y_label = "in time";
  chart.x_min = std::min(1.0, *std::min_element(slos.begin(), slos.end()));
  chart.x_max = std::max(chart.x_min + 1, *std::max_element(slos.begin(), slos.end()));
  chart.y_percent = true;
  for (size_t p = 0; p < result.policies.size(); ++p) {
    ChartLine line;
    line.label = result.policies[p];
    line.style = p % kReportStyles;
    for (const ServeCase& each : result.cases) {
      if (each.policy != result.policies[p] || each.load != at_load) continue;
      line.points.push_back({each.slo_x_p99, each.result.finish_rate});
    }
    std::sort(line.points.begin(), line.points.end(),
              [](const ChartPoint& a, const ChartPoint& b) { return a.x < b.x; });
    chart.lines.push_back(std::move(line));
  }
  chart.description = finding_of(result, at_load);
  return "<section><p class=\"finding\">" + escape_html(chart.description) + "</p>" +
         draw(chart, base::format("load%zu", index)) + "</section>";
}

std::string figures(const ServeResult& result) {
  std::string out = "<section><h2>In numbers</h2><div class=\"scroll\"><table><thead><tr>";
  const auto attributes = [](size_t column) {
    return std::string_view(kTitles[column]) == "policy" ? " class=\"text\">" : ">";
  };
  for (size_t i = 0; i < std::size(kTitles); ++i)
    out += "<th scope=\"col\"" + std::string(attributes(i)) + escape_html(kTitles[i]) + "</th>";
  out += "</tr></thead><tbody>";
  for (const ServeCase& each : result.cases) {
    out += "<tr>";
    const auto cells = row_of(each);
    for (size_t i = 0; i < std::size(cells); ++i)
      out += std::string("<td") + attributes(i) + escape_html(cells[i]) + "</td>";
    out += "</tr>";
  }
  return out + "</tbody></table></div></section>";
}

}  // namespace

cluster::OrderedJson to_json(const ServeResult& result) {
  cluster::OrderedJson rows = cluster::OrderedJson::array();
  for (const ServeCase& each : result.cases) {
    const sim::ServingResult& r = each.result;
    cluster::OrderedJson dropped;
    for (uint32_t i = 0; i < sched::slo::kDropReasons; ++i)
      dropped[sched::slo::drop_reason_name(static_cast<sched::slo::DropReason>(i))] = r.dropped[i];
    cluster::OrderedJson row = cluster::object({{"case", result.source}, {"slo_x_p99", each.slo_x_p99}});
    row["load"] = each.load > 0 ? cluster::OrderedJson(each.load) : cluster::OrderedJson(nullptr);
    row.update(cluster::object({{"policy", each.policy},
                                {"requests", r.requests},
                                {"finished_in_time", r.finished_in_time},
                                {"finish_rate", r.finish_rate},
                                {"p50_ms", r.p50_ms},
                                {"p99_ms", r.p99_ms},
                                {"dropped", dropped},
                                {"decision_us", r.decision_us},
                                {"finished_late", r.finished_late},
                                {"goodput_per_s", r.goodput_per_s},
                                {"mean_batch", r.mean_batch},
                                {"batches", r.batches},
                                {"busy", r.busy_share},
                                {"predicted_miss_rate", r.signals.predicted_miss_rate},
                                {"price_per_s", r.signals.price_per_s}}));
    cluster::OrderedJson sizes = cluster::OrderedJson::object();
    for (size_t k = 1; k < r.batch_sizes.size(); ++k)
      if (r.batch_sizes[k] != 0) sizes[std::to_string(k)] = r.batch_sizes[k];
    row["batch_sizes"] = sizes;
    rows.push_back(row);
  }
  return cluster::object({{"device", result.device},
                          {"label", result.device},
                          {"source", result.source},
                          {"c0_ms", result.c0_ms},
                          {"c1", result.c1},
                          {"cases", rows}});
}

std::string render_table(const ServeResult& result) {
  Table out;
  for (size_t i = 0; i < std::size(kTitles); ++i)
    out.add_column(kTitles[i], i == 2 ? Table::Align::kLeft : Table::Align::kRight);
  for (const ServeCase& each : result.cases) out.add_row(row_of(each));
  return out.to_string() +
         base::format("\n%s; SLO is a multiple of the P99 execution time.\n",
                      result.device == "sim" ? "sim: virtual time" : "host: real time on CPU threads");
}

std::string render_report(const ServeResult& result) {
  std::string out = page_head(result) + policy_key(result.policies);
  for (size_t l = 0; l < result.loads.size(); ++l) out += chart_of(result, l);
  return out + figures(result) + "</main></body></html>\n";
}

}  // namespace gpushare::cli
