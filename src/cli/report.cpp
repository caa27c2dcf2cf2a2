// SPDX-License-Identifier: Apache-2.0
#include "cli/report.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/saturate.hpp"
#include "base/status.hpp"
#include "base/units.hpp"
#include "cli/charts.hpp"
#include "cli/report_style.hpp"
#include "gpushare/version.h"

namespace gpushare::cli {
namespace {

constexpr size_t kLiveStyle = 100;

std::string brief(double value) {
  const double size = std::abs(value);
  return base::format(size >= 100 ? "%.1f" : size >= 1 ? "%.2f" : "%.3g", value);
}

std::string plural(uint64_t count, const char* noun) {
  return base::format("%llu %s%s", static_cast<unsigned long long>(count), noun, count == 1 ? "" : "s");
}

// Everything the charts of one page share.
struct Page {
  const RunResult& result;
  TimeUnit unit;
  double end = 0;         // of the longest run, in units
  double bytes_unit = 1;  // of the memory charts
  const char* bytes_name = "B";
  std::string out = {};
  std::vector<std::string> names = {};  // of the policies

  std::string duration(double seconds) const { return unit.number(seconds) + " " + unit.name; }
};

size_t style_of(size_t policy) {
  return policy % kReportStyles;
}

std::vector<ChartPoint> points_of(const Series& series, double x_scale, double y_scale, double end) {
  std::vector<ChartPoint> out;
  const double width = static_cast<double>(series.bucket_ns()) * 1e-9 * x_scale;
  double x = 0;
  for (const Series::Bucket& bucket : series.buckets()) {
    if (x >= end && !out.empty()) break;
    out.push_back({x, bucket.mean * y_scale});
    x += width;
  }
  if (!out.empty()) out.push_back({std::min(x, end), out.back().y});
  return out;
}

double mean_until(const Series& series, double end_s) {
  double integral = 0;
  double seconds = 0;
  const double width = static_cast<double>(series.bucket_ns()) * 1e-9;
  for (const Series::Bucket& bucket : series.buckets()) {
    const double covered = std::min(width, end_s - seconds);
    if (covered <= 0) break;
    integral += bucket.mean * covered;
    seconds += covered;
  }
  return end_s > 0 ? integral / end_s : 0;
}

double end_of(const PolicyRun& run) {
  double end = 0;
  for (const JobOutcome& job : run.jobs) end = std::max(end, job.end_s);
  return end;
}

// A table with policies as rows below a chart, folded away.
std::string figures(const std::vector<std::string>& titles,
                    const std::vector<std::vector<std::string>>& rows) {
  return "<details><summary>The same in numbers</summary>" + html_table(titles, rows) + "</details>";
}

// "srtf has the shortest mean completion, 185.0 min, 1.51x less than fifo (279.8 min)."
std::string finding(const Page& page) {
  const std::vector<const PolicyRun*> runs = compared(page.result);
  if (runs.empty()) return "No job completed.";
  const auto best = [&](auto&& value) {
    return *std::min_element(runs.begin(), runs.end(),
                             [&](const auto* a, const auto* b) { return value(*a) < value(*b); });
  };
  const PolicyRun* quick = best([](const PolicyRun& run) { return run.jct_mean_s; });
  const PolicyRun* early = best([](const PolicyRun& run) { return run.makespan_s; });
  if (runs.size() == 1)
    return escape_html(base::format("%s: mean completion ", quick->policy.c_str()) +
                       page.duration(quick->jct_mean_s) + ", all done after " +
                       page.duration(quick->makespan_s) + ".");
  const auto fifo =
      std::find_if(runs.begin(), runs.end(), [](const PolicyRun* run) { return run->policy == "fifo"; });
  const PolicyRun& other = fifo != runs.end() ? **fifo : *runs.front();
  const auto against = [&](double value, double its, const char* word) {
    if (!(value > 0) || its <= value * 1.005) return std::string(".");
    return escape_html(base::format(", %.2f times %s under %s (%s).", its / value, word, other.policy.c_str(),
                                    page.duration(its).c_str()));
  };
  return "<b>" + escape_html(quick->policy) + "</b> has the shortest mean completion, " +
         page.duration(quick->jct_mean_s) + against(quick->jct_mean_s, other.jct_mean_s, "shorter than") +
         " <b>" + escape_html(early->policy) + "</b> is done first, after " +
         page.duration(early->makespan_s) + against(early->makespan_s, other.makespan_s, "sooner than");
}

void summary(Page& page) {
  const auto& runs = page.result.policies;
  page.out +=
      "<section aria-labelledby=\"summary\"><h2 id=\"summary\">Policies side by side</h2><p "
      "class=\"finding\">" +
      finding(page) + "</p>";
  struct Column {
    const char* title;
    double (*value)(const PolicyRun&);
    bool less_is_better;
    enum { kTime, kShare, kCount, kBytes } shown;
  };
  static const std::array<Column, 10> kColumns{{
      {"jobs<br>done", [](const PolicyRun& r) { return static_cast<double>(r.completed); }, 0,
       Column::kCount},
      {"makespan", [](const PolicyRun& r) { return r.makespan_s; }, true, Column::kTime},
      {"mean<br>completion", [](const PolicyRun& r) { return r.jct_mean_s; }, true, Column::kTime},
      {"median", [](const PolicyRun& r) { return r.jct_p50_s; }, true, Column::kTime},
      {"P95", [](const PolicyRun& r) { return r.jct_p95_s; }, true, Column::kTime},
      {"mean<br>queueing", [](const PolicyRun& r) { return r.queue_mean_s; }, true, Column::kTime},
      {"utili-<br>sation", [](const PolicyRun& r) { return r.utilization; }, false, Column::kShare},
      {"switches", [](const PolicyRun& r) { return static_cast<double>(r.switches); }, false, Column::kCount},
      {"peak<br>memory", [](const PolicyRun& r) { return static_cast<double>(r.peak_bytes); }, 0,
       Column::kBytes},
      {"out of<br>memory", [](const PolicyRun& r) { return static_cast<double>(r.oom); }, false,
       Column::kCount},
  }};
  const auto shown = [&](const Column& column, const PolicyRun& run) {
    const double value = column.value(run);
    switch (column.shown) {
      case Column::kTime:
        return page.unit.number(value);
      case Column::kShare:
        return base::format("%.1f%%", 100 * value);
      case Column::kCount:
        return base::format("%.0f", value);
      case Column::kBytes:
        return base::format_bytes(base::to_uint64(value));
    }
    return std::string();
  };
  page.out += "<div class=\"scroll\"><table><thead><tr><th scope=\"col\">policy</th>";
  for (const Column& column : kColumns)
    page.out += base::format(
        column.shown == Column::kTime ? "<th scope=\"col\">%s<br>(%s)</th>" : "<th scope=\"col\">%s</th>",
        column.title, page.unit.name);
  page.out += "</tr></thead><tbody>";
  const std::vector<const PolicyRun*> equals = compared(page.result);
  for (const PolicyRun& run : runs) {
    page.out += "<tr><th scope=\"row\">" + escape_html(run.policy) + "</th>";
    const bool is_compared = std::find(equals.begin(), equals.end(), &run) != equals.end();
    for (const Column& column : kColumns) {
      double low = column.value(run);
      double high = low;
      for (const PolicyRun* other : equals) {
        low = std::min(low, column.value(*other));
        high = std::max(high, column.value(*other));
      }
      // Marked as printed: what looks equal is equally good, and nothing is marked when all are.
      const bool differ = high > low * 1.0005;
      const bool best = is_compared && column.less_is_better && differ && column.value(run) <= low * 1.0005;
      page.out += std::string(best ? "<td class=\"best\">" : "<td>") + shown(column, run) + "</td>";
    }
    page.out += "</tr>";
  }
  page.out += "</tbody></table></div>";
  if (runs.size() > 1)
    page.out +=
        "<p class=\"soft\" style=\"margin:8px 0 0;font-size:13px\">Shaded: the best of its column.</p>";
  const std::vector<std::string> found = findings(page.result);
  if (!found.empty()) {
    page.out += "<h3>What sharing gains</h3><ul class=\"notes\">";
    for (const std::string& line : found) page.out += "<li>" + escape_html(line) + "</li>";
    page.out += "</ul>";
  }
  page.out += "</section>";
}

void completion(Page& page) {
  Chart chart;
  double low = 0;
  double high = 0;
  double median = 0;  // the smallest of the policies'
  for (size_t i = 0; i < page.result.policies.size(); ++i) {
    const PolicyRun& run = page.result.policies[i];
    std::vector<double> times;
    for (const JobOutcome& job : run.jobs)
      if (job.state == JobOutcome::State::kCompleted) times.push_back(job.completion_s() / page.unit.seconds);
    if (times.empty()) continue;
    std::sort(times.begin(), times.end());
    ChartLine line{run.policy, style_of(i), {}, true};
    const double count = static_cast<double>(times.size());
    // Equal times are one step; past a few hundred, steps finer than the line is wide are left out.
    const size_t stride = std::max<size_t>(1, times.size() / 600);
    for (size_t k = 0; k < times.size(); ++k)
      if ((k + 1) % stride == 0 || k + 1 == times.size())
        line.points.push_back({times[k], static_cast<double>(k + 1) / count});
    const double first = percentile(times, 0.01);
    low = chart.lines.empty() ? first : std::min(low, first);
    median = chart.lines.empty() ? times[times.size() / 2] : std::min(median, times[times.size() / 2]);
    high = std::max(high, times.back());
    chart.lines.push_back(std::move(line));
  }
  if (chart.lines.empty()) return;
  chart.log_x = low > 0 && median < high / 100;
  chart.x_min = chart.log_x ? low : 0;
  chart.x_max = high;
  for (ChartLine& line : chart.lines) {
    if (line.points.front().x > chart.x_min) line.points.insert(line.points.begin(), {chart.x_min, 0});
    line.points.push_back({high, 1});
  }
  chart.title = "Share of jobs completed within a time, by policy";
  chart.description = "A curve further left is better. The table below gives the percentiles.";
  chart.x_label = base::format("time from arrival to completion (%s%s)", page.unit.name,
                               chart.log_x ? ", logarithmic" : "");
  chart.y_label = "share of jobs";
  chart.y_percent = true;
  chart.height = 320;
  page.out +=
      "<section aria-labelledby=\"completion\"><h2 id=\"completion\">How long jobs took</h2>"
      "<p class=\"soft\">Share of jobs completed within the time on the axis, counted from each job's "
      "arrival; further left is better.</p>";
  page.out += policy_key(page.names) + draw(chart, "cdf");
  std::vector<std::vector<std::string>> rows;
  for (const PolicyRun& run : page.result.policies) {
    std::vector<double> times;
    for (const JobOutcome& job : run.jobs)
      if (job.state == JobOutcome::State::kCompleted) times.push_back(job.completion_s());
    std::sort(times.begin(), times.end());
    std::vector<std::string> row{run.policy};
    for (const double p : {0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0})
      row.push_back(page.unit.number(percentile(times, p)));
    rows.push_back(std::move(row));
  }
  page.out += figures({"policy (" + std::string(page.unit.name) + ")", "P10", "P25", "median", "P75", "P90",
                       "P95", "P99", "longest"},
                      rows);
  page.out += "</section>";
}

// One chart a policy, below each other, on the same axes.
template <class Fill>
void small_multiples(Page& page, const char* id, double y_max, const char* y_label, bool whole, Fill&& fill) {
  const auto& runs = page.result.policies;
  for (size_t i = 0; i < runs.size(); ++i) {
    Chart chart;
    chart.heading = runs[i].policy;
    chart.x_max = page.end;
    chart.y_max = y_max;
    chart.y_label = y_label;
    chart.y_whole = whole;
    chart.x_axis_text = i + 1 == runs.size();
    chart.height = chart.x_axis_text ? 150 : 116;
    chart.x_label = base::format("time since the first arrival (%s)", page.unit.name);
    fill(chart, runs[i]);
    page.out += draw(chart, base::format("%s%zu", id, i));
  }
}

void lanes(Page& page) {
  double y_max = 1;
  for (const PolicyRun& run : page.result.policies) y_max = std::max(y_max, run.lanes_open.max());
  page.out +=
      "<section aria-labelledby=\"lanes\"><h2 id=\"lanes\">Lanes</h2>"
      "<p class=\"soft\">Lanes run iterations side by side; inside a lane they take turns.</p>"
      "<ul class=\"key\"><li><span class=\"swatch busy\"></span>running an iteration (mean)</li>"
      "<li><svg viewBox=\"0 0 30 12\" aria-hidden=\"true\"><path class=\"line s100\" d=\"M0 "
      "6H30\"/></svg>open</li></ul>";
  std::vector<std::vector<std::string>> rows;
  small_multiples(page, "lanes", y_max, "lanes", true, [&](Chart& chart, const PolicyRun& run) {
    const double end_s = end_of(run);
    const double end = end_s / page.unit.seconds;
    const double busy = mean_until(run.lanes_busy, end_s);
    chart.title = run.policy + ": lanes over time";
    chart.description = base::format("On average %.2f lanes ran an iteration, at most %.0f were open.", busy,
                                     run.lanes_open.max());
    chart.areas.push_back({"running", "busy", points_of(run.lanes_busy, 1 / page.unit.seconds, 1, end), {}});
    chart.lines.push_back(
        {"open", kLiveStyle, points_of(run.lanes_open, 1 / page.unit.seconds, 1, end), true});
    rows.push_back({run.policy, brief(busy), brief(mean_until(run.lanes_open, end_s)),
                    base::format("%.0f", run.lanes_open.max())});
  });
  page.out += figures({"policy", "running, mean", "open, mean", "open, most"}, rows) + "</section>";
}

void memory(Page& page) {
  double y_max = static_cast<double>(page.result.capacity_bytes);
  for (const PolicyRun& run : page.result.policies)
    y_max = std::max(y_max, static_cast<double>(run.peak_bytes));
  const double scale = 1 / page.bytes_unit;
  page.out +=
      "<section aria-labelledby=\"memory\"><h2 id=\"memory\">Device memory</h2>"
      "<p class=\"soft\">Promised to jobs: their persistent bytes, and the lanes in which their iterations' "
      "scratch memory lives. "
      "The line is what was in use.</p>"
      "<ul class=\"key\"><li><span class=\"swatch persistent\"></span>persistent</li><li><span "
      "class=\"swatch lanes\"></span>lanes</li>"
      "<li><svg viewBox=\"0 0 30 12\" aria-hidden=\"true\"><path class=\"line s100\" d=\"M0 6H30\"/></svg>in "
      "use</li></ul>";
  std::vector<std::vector<std::string>> rows;
  small_multiples(
      page, "memory", y_max * scale * 1.06, page.bytes_name, false, [&](Chart& chart, const PolicyRun& run) {
        const double end_s = end_of(run);
        const double end = end_s / page.unit.seconds;
        const std::vector<ChartPoint> low =
            points_of(run.persistent_bytes, 1 / page.unit.seconds, scale, end);
        std::vector<ChartPoint> high = points_of(run.lane_bytes, 1 / page.unit.seconds, scale, end);
        high.resize(std::min(high.size(), low.size()));
        for (size_t i = 0; i < high.size(); ++i) high[i].y += low[i].y;
        const auto bytes = [](double value) { return base::format_bytes(base::to_uint64(value)); };
        chart.title = run.policy + ": device memory over time";
        chart.description = "Most in use at once: " + base::format_bytes(run.peak_bytes) + " of " +
                            base::format_bytes(page.result.capacity_bytes) + ".";
        chart.areas.push_back({"persistent", "persistent", low, {}});
        if (!high.empty())
          chart.areas.push_back(
              {"lanes", "lanes", high,
               std::vector<ChartPoint>(low.begin(), low.begin() + static_cast<std::ptrdiff_t>(high.size()))});
        chart.lines.push_back(
            {"in use", kLiveStyle, points_of(run.live_bytes, 1 / page.unit.seconds, scale, end), true});
        chart.reference = static_cast<double>(page.result.capacity_bytes) * scale;
        chart.reference_label = "capacity";
        rows.push_back({run.policy, bytes(mean_until(run.persistent_bytes, end_s)),
                        bytes(mean_until(run.lane_bytes, end_s)), bytes(mean_until(run.live_bytes, end_s)),
                        bytes(static_cast<double>(run.peak_bytes))});
      });
  page.out += figures({"policy", "persistent, mean", "lanes, mean", "in use, mean", "in use, most"}, rows);
  page.out += "</section>";
}

void waiting(Page& page) {
  Chart chart;
  std::vector<std::vector<std::string>> rows;
  for (size_t i = 0; i < page.result.policies.size(); ++i) {
    const PolicyRun& run = page.result.policies[i];
    const double end_s = end_of(run);
    chart.lines.push_back({run.policy, style_of(i),
                           points_of(run.waiting, 1 / page.unit.seconds, 1, end_s / page.unit.seconds),
                           true});
    chart.y_max = std::max(chart.y_max, run.waiting.max());
    rows.push_back(
        {run.policy, brief(mean_until(run.waiting, end_s)), base::format("%.0f", run.waiting.max())});
  }
  chart.title = "Jobs waiting for memory over time, by policy";
  chart.description =
      "Jobs that have arrived and hold no device memory: not admitted yet, or moved to host memory.";
  chart.x_label = base::format("time since the first arrival (%s)", page.unit.name);
  chart.y_label = "jobs";
  chart.x_max = page.end;
  chart.y_whole = true;
  chart.height = 260;
  page.out +=
      "<section aria-labelledby=\"waiting\"><h2 id=\"waiting\">Jobs waiting</h2>"
      "<p class=\"soft\">Jobs that have arrived and hold no device memory: not admitted yet, or moved to "
      "host memory to let another run.</p>";
  page.out += policy_key(page.names) + draw(chart, "queue") + figures({"policy", "mean", "most"}, rows) +
              "</section>";
}

void not_completed(Page& page) {
  std::string rows;
  size_t count = 0;
  constexpr size_t kMost = 50;
  for (const PolicyRun& run : page.result.policies)
    for (const JobOutcome& job : run.jobs) {
      if (job.state == JobOutcome::State::kCompleted || ++count > kMost) continue;
      rows += "<tr><th scope=\"row\">" + escape_html(run.policy) + "</th><td class=\"text\">" +
              escape_html(job.name) + "</td><td class=\"text\">" + name_of(job.state) +
              "</td><td class=\"text\">" + escape_html(job.reason) + "</td></tr>";
    }
  if (count == 0) return;
  page.out +=
      "<section aria-labelledby=\"lost\"><h2 id=\"lost\">Jobs that did not complete</h2><div "
      "class=\"scroll\"><table><thead><tr>"
      "<th scope=\"col\">policy</th><th scope=\"col\" class=\"text\">job</th><th scope=\"col\" "
      "class=\"text\"></th>"
      "<th scope=\"col\" class=\"text\">why</th></tr></thead><tbody>" +
      rows + "</tbody></table></div>";
  if (count > kMost)
    page.out += base::format("<p class=\"soft\">And %zu more; --json lists all.</p>", count - kMost);
  page.out += "</section>";
}

}  // namespace

std::string render_report(const RunResult& result) {
  double largest = 0;
  double end_s = 0;
  for (const PolicyRun& run : result.policies) {
    largest = std::max(largest, run.makespan_s);
    end_s = std::max(end_s, end_of(run));
  }
  Page page{result, time_unit(largest)};
  for (const PolicyRun& run : result.policies) page.names.push_back(run.policy);
  page.end = end_s > 0 ? end_s / page.unit.seconds : 1;
  const double capacity = static_cast<double>(result.capacity_bytes);
  if (capacity >= 4 * 1073741824.0) {
    page.bytes_unit = 1073741824.0;
    page.bytes_name = "GiB";
  } else if (capacity >= 4 * 1048576.0) {
    page.bytes_unit = 1048576.0;
    page.bytes_name = "MiB";
  }

  const bool simulated = result.label == "sim";
  const std::string from =
      simulated ? "Simulated: virtual time, a cost model in place of the device."
      : result.label == "host"
          ? "Measured on this machine's CPU: real iterations and real memory, on the host device."
          : "Measured on device " + result.device + ".";
  const size_t jobs = result.policies.empty() ? 0 : result.policies.front().jobs.size();
  page.out =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\">"
      "<title>gpushare run: " +
      escape_html(result.jobs_file) + "</title><style>" + kReportStyle + "</style></head><body><main>";
  page.out += "<header><h1>" + escape_html(plural(jobs, "job") + " on one device") +
              "</h1><p class=\"soft\">" + escape_html(from) + "</p><ul class=\"facts\">";
  const auto fact = [&](const char* name, const std::string& value) {
    page.out += "<li>" + std::string(name) + " <b>" + escape_html(value) + "</b></li>";
  };
  fact("device", result.device);
  fact("jobs from", result.jobs_file);
  fact("memory", base::format_bytes(result.capacity_bytes));
  fact("lanes", result.lanes == 0 ? "as the policy says" : "at most " + std::to_string(result.lanes));
  if (result.time_scale != 1.0) fact("time scale", tick_text(result.time_scale));
  if (simulated) fact("seed", std::to_string(result.seed));
  page.out += "</ul></header>";
  summary(page);
  not_completed(page);
  completion(page);
  lanes(page);
  memory(page);
  waiting(page);
  if (!result.notes.empty()) {
    page.out +=
        "<section aria-labelledby=\"notes\"><h2 id=\"notes\">What the figures rest on</h2><ul "
        "class=\"notes\">";
    for (const std::string& note : result.notes) page.out += "<li>" + escape_html(note) + "</li>";
    page.out += "</ul></section>";
  }
  page.out += "<footer>Made by gpushare " GPUSHARE_VERSION_STRING
              ". Completion: from arrival to the end of the last iteration. Queueing: from arrival to the "
              "start of the first. Utilisation: share of the makespan in which at least one lane ran an "
              "iteration.</footer></main></body></html>\n";
  return page.out;
}

}  // namespace gpushare::cli
