// Beyond the published tables: static models, mixes that are skewed or drift, the public request trace.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "rows.hpp"

namespace gpushare::experiments {

void static_models(Report& report) {
  std::vector<Row> rows;
  for (double load : {0.6, 1.0, 2.0, 3.0})
    for (double slo : {1.5, 2.0, 3.0, 5.0}) {
      Row row;
      row.name = base::format("load %g at %g", load, slo);
      row.line = base::format("%g", load);
      row.draw = drawer("static:50", load, 0.5);
      row.options.c0_ns = 0.7 * 50e6;
      row.options.c1 = 0.3;
      row.options.slo_x_p99 = slo;
      rows.push_back(std::move(row));
    }
  run_rows(rows, main_contenders());
  report.line("\n## Static models\n");
  report.line(
      "50 ms for every request, c0 = 35 ms, c1 = 0.3, arrivals with a rate that varies (coefficient of "
      "variation 0.5). Mean over the SLOs 1.5, 2, 3 and 5.\n");
  finish_rates(report, "static", "load", rows);
}

namespace {

// `first` for half of the requests, then `second`; applications of the second are numbered from `offset`.
std::vector<TimedRequest> two_halves(const sim::SyntheticSpec& first, const sim::SyntheticSpec& second,
                                     uint32_t offset, double load, uint64_t seed) {
  std::vector<TimedRequest> all;
  uint64_t start = 0;
  for (const sim::SyntheticSpec* spec : {&first, &second}) {
    const double rate = load / (sim::mean_execution_ns(*spec) / 1e9);
    for (TimedRequest request : sim::draw(*spec, {.requests = kRequests / 2,
                                                 .rate_per_s = rate,
                                                 .seed = first_seed - 1 + seed + (all.empty() ? 0 : 100)})) {
      request.arrival_ns += start;
      if (spec == &second) request.application += offset;
      all.push_back(request);
    }
    start = all.back().arrival_ns;
  }
  return all;
}

}  // namespace

void mixes(Report& report) {
  sim::SyntheticSpec mostly_short = *sim::parse_synthetic("bimodal:1"), mostly_long = mostly_short,
                     even = mostly_short;
  mostly_short.modes[0].share = 10;
  mostly_long.modes[1].share = 10;
  sim::SyntheticSpec shifted = even, with_new = even;
  shifted.modes = {{5, 1}, {8, 1}};  // the long application has become shorter
  sim::SyntheticSpec longer = even;
  longer.modes = {{5, 1}, {19, 1}};
  with_new.modes.push_back({10, 1, 2});
  struct Case {
    const char* name;
    sim::SyntheticSpec first, second;
  };
  const std::vector<Case> cases{
      {"10:1, short ones", mostly_short, mostly_short}, {"10:1, long ones", mostly_long, mostly_long},
      {"from 10:1 to 1:10", mostly_short, mostly_long}, {"a new application at half time", even, with_new},
      {"the long one becomes shorter", even, shifted},  {"the long one becomes longer", even, longer}};
  std::vector<Row> rows;
  for (const Case& each : cases)
    for (double load : {1.5, 4.0})
      for (double slo : {2.0, 3.0}) {
        Row row;
        row.name = base::format("%s at load %g, SLO %g", each.name, load, slo);
        row.line = base::format("%s | %g", each.name, load);
        row.draw = [each, load](uint64_t seed) { return two_halves(each.first, each.second, 0, load, seed); };
        const double mean = sim::mean_execution_ns(even);
        row.options.c0_ns = 0.9 * mean;
        row.options.c1 = 0.1;
        row.options.slo_x_p99 = slo;
        row.options.warm_from = kRequests / 2;
        rows.push_back(std::move(row));
      }
  run_rows(rows, main_contenders());
  report.line("\n## Skewed and drifting mixes\n");
  report.line(
      "Bimodal (means 5 and 15 units of 50 ms, deviation 1), c0 = 0.9 of the even mix's mean, c1 = 0.1. The "
      "offline profile knows the first "
      "half of the requests only. Mean over the SLOs 2 and 3.\n");
  finish_rates(report, "mixes", "mix | load", rows);
}

// Between the windows on which the policy was tuned, which were the first and the last of the trace.
static size_t window_start(size_t requests, uint64_t seed) {
  return (2 * seed - 1) * (requests - kRequests) / (2 * seeds);
}

void trace(Report& report, const std::string& path) {
  const std::string name = path.substr(path.rfind('/') + 1);
  report.line("\n### " + name + "\n");
  const auto read = sim::read_requests(path);
  if (!read.ok()) {
    report.line("Not run: " + read.status().message());
    return;
  }
  const sim::TokenRule rule;
  double mean = 0;
  for (const TimedRequest& request : *read)
    mean += static_cast<double>(request.execution_ns) / static_cast<double>(read->size());
  report.row(
      "%zu requests. Execution time = %g ms a context token + %g ms a generated "
      "token (mean %.2f s, P99 %.2f s); the "
      "application is the octave of the context length, all that is known at arrival. Arrivals keep their "
      "pattern and are scaled to the "
      "load. c0 = 0.9 of the mean, c1 = 0.1. Windows of 3,000 requests, %llu of them, stand for seeds. Mean "
      "over the SLOs 1.5, 2, 3 and 5.\n",
      read->size(), rule.prefill_ms_per_token, rule.decode_ms_per_token, mean / 1e9,
      sim::execution_quantile_ns(*read, 0.99) / 1e9, static_cast<unsigned long long>(seeds));
  std::vector<Row> rows;
  const double p99 = sim::execution_quantile_ns(*read, 0.99);
  for (double load : {0.8, 1.5, 3.0, 4.5, 6.0})
    for (double slo : {1.5, 2.0, 3.0, 5.0}) {
      Row row;
      row.name = base::format("load %g at %g", load, slo);
      row.line = base::format("%g", load);
      const std::vector<TimedRequest>& all = *read;
      row.draw = [&all, load, mean](uint64_t seed) {
        const size_t from = window_start(all.size(), seed);
        std::vector<TimedRequest> part(all.begin() + static_cast<ptrdiff_t>(from),
                                       all.begin() + static_cast<ptrdiff_t>(from + kRequests));
        const uint64_t start = part.front().arrival_ns;
        const double span = static_cast<double>(part.back().arrival_ns - start);
        const double scale = mean * static_cast<double>(kRequests) / load / span;
        for (TimedRequest& request : part)
          request.arrival_ns = static_cast<uint64_t>(static_cast<double>(request.arrival_ns - start) * scale);
        return part;
      };
      row.options.c0_ns = 0.9 * mean;
      row.options.c1 = 0.1;
      row.options.slo_x_p99 = slo;
      row.options.p99_ns = p99;
      rows.push_back(std::move(row));
    }
  run_rows(rows, main_contenders());
  finish_rates(report, name, "load", rows);
  const Summary s = summarise(rows);
  report.row(
      "\nMean: best of the four systems %.3f, greedy %.3f, gpushare %.3f, without labels %.3f (orloj %.3f), "
      "bound %.3f. "
      "Where ours is more than 0.005 below a baseline:\n",
      s.best, s.greedy, s.ours, s.unlabelled, s.orloj_unlabelled, s.bound);
  const size_t before = report.text().size();
  losses(report, rows);
  if (report.text().size() == before) report.line("- nowhere");
}

void bursts(Report& report, const std::string& path) {
  const auto read = sim::read_requests(path);
  if (!read.ok()) return;
  const std::vector<TimedRequest>& all = *read;
  double trace_mean = 0;
  for (const TimedRequest& request : all)
    trace_mean += static_cast<double>(request.execution_ns) / static_cast<double>(all.size());
  const double trace_p99 = sim::execution_quantile_ns(all, 0.99);
  std::vector<Row> rows;
  for (const char* source : {"trace", "modes:3", "modes:8"})
    for (double load : {0.3, 0.5, 0.8, 1.5})
      for (double burst : {1.0, 2.0, 4.0})
        for (double slo : {1.5, 3.0}) {
          Row row;
          row.name = base::format("%s at load %g, burst %g, SLO %g", source, load, burst, slo);
          row.line = base::format("%s | %g", source, load);
          const bool of_trace = std::string(source) == "trace";
          const double mean = of_trace ? trace_mean : sim::mean_execution_ns(*sim::parse_synthetic(source));
          row.options.c0_ns = 0.9 * mean;
          row.options.c1 = 0.1;
          row.options.slo_x_p99 = slo;
          if (of_trace) {
            row.options.p99_ns = trace_p99;
            // The trace's work, one window a seed, with arrivals drawn.
            row.draw = [&all, load, burst, mean](uint64_t seed) {
              std::vector<TimedRequest> part = drawer("modes:1", 1, burst)(seed);
              const double unit = sim::mean_execution_ns(*sim::parse_synthetic("modes:1"));
              const size_t from = window_start(all.size(), seed);
              for (size_t i = 0; i < part.size(); ++i) {
                TimedRequest request = all[from + i];
                request.arrival_ns =
                    static_cast<uint64_t>(static_cast<double>(part[i].arrival_ns) / unit * mean / load);
                part[i] = request;
              }
              return part;
            };
          } else {
            row.draw = drawer(source, load, burst);
          }
          rows.push_back(std::move(row));
        }
  run_rows(rows, main_contenders());
  report.line("\n## Bursts and low loads\n");
  report.line(
      "The arrival rate varies: its coefficient of variation over periods of about 20 mean gaps is *burst*. "
      "c0 = 0.9 of "
      "the mean, c1 = 0.1. *trace* is the work of the public trace with drawn arrivals. Mean over bursts of "
      "1, 2 and 4 and the SLOs 1.5 and 3.\n");
  finish_rates(report, "bursts", "source | load", rows);
  const Summary s = summarise(rows);
  report.row(
      "\nMean: best of the four systems %.3f, greedy %.3f, gpushare %.3f, without labels %.3f (orloj %.3f), "
      "bound %.3f. "
      "Where ours is more than 0.005 below a baseline:\n",
      s.best, s.greedy, s.ours, s.unlabelled, s.orloj_unlabelled, s.bound);
  const size_t before = report.text().size();
  losses(report, rows);
  if (report.text().size() == before) report.line("- nowhere");
}

}  // namespace gpushare::experiments
