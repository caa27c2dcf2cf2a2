// The cells of the published tables: what loads and costs they are run at, and how the policies do there.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "printed.hpp"
#include "rows.hpp"

namespace gpushare::experiments {
namespace {

constexpr double kLoads[] = {0.5, 1, 1.5};

void summary_line(Report& report, const std::string& name, const Summary& s) {
  report.row("| %s | %.3f | %.3f | %.3f | %.3f | %.3f | %.3f | %.3f | %.3f | %.3f |", name.c_str(),
             s.orloj_unlabelled, s.greedy_unlabelled, s.unlabelled, s.best, s.orloj, s.greedy, s.ours,
             s.clairvoyant, s.bound);
}
constexpr const char* kSummaryHead =
    "| load | orloj, no labels | greedy, no labels | gpushare, no labels | best of the four systems | Orloj "
    "| greedy | "
    "gpushare | clairvoyant | bound |\n"
    "|---|---|---|---|---|---|---|---|---|---|";

std::vector<Row> cells(const std::vector<Calibration>& all, Target target, double factor) {
  std::vector<Row> rows;
  for (const Calibration& each : all) {
    if (each.target != target) continue;
    for (double slo : kSlos) {
      Row row;
      row.name = base::format("%s at %g", each.name.c_str(), slo);
      row.draw = drawer(each.synthetic, each.load * factor);
      row.options = options_of(each, slo);
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace

void main_tables(Report& report, const std::vector<Calibration>& all) {
  report.line("## Calibration\n");
  report.line(
      "Neither the loads nor c0 and c1 are printed. Each case is given one load (arrival rate x mean "
      "execution time alone), c0 and c1 for "
      "all five SLOs, by random search (`serving_calibrate`, 200 points, seeds 11 and 12, not used again): "
      "the printed Clockwork and Nexus columns as near as they come, in least squares, among points where "
      "Orloj, re-implemented, has its printed mean within 0.03. That Orloj agrees there is by construction; "
      "it "
      "is no validation of either.\n");
  report.line("| case | load | c0 / mean | c1 | rms to Clockwork | rms to Nexus | Orloj, mean | printed |");
  report.line("|---|---|---|---|---|---|---|---|");
  for (const Calibration& each : all) {
    if (each.target != Target::kAchievable) continue;
    double printed = 0;
    for (const PrintedCell& cell : kPrinted)
      printed += cell.name == each.name ? cell.orloj / std::size(kSlos) : 0;
    report.row("| %s | %.2f | %.2f | %.3f | %.3f | %.3f | %.3f | %.3f |", each.name.c_str(), each.load,
               each.c0_x_mean, each.c1, each.clockwork_rms, each.nexus_rms, each.orloj_mean, printed);
  }

  std::vector<std::vector<Row>> achievable;
  for (double factor : kLoads) {
    achievable.push_back(cells(all, Target::kAchievable, factor));
    run_rows(achievable.back(), main_contenders());
    std::fprintf(stderr, "load x %g done\n", factor);
  }
  report.line(
      "\nOur Nexus and Clockwork follow their public code and lose less than the printed ones. Which loads "
      "the printed columns belong to is not known.\n");

  report.line("## Result\n");
  report.row(
      "Finish rate, mean over the 65 cells of tables C.1 and C.2, %llu seeds, %zu requests a run. The best "
      "variant of each published system counts, in each cell.\n",
      static_cast<unsigned long long>(seeds), kRequests);
  report.line(kSummaryHead);
  for (size_t i = 0; i < std::size(kLoads); ++i)
    summary_line(report, base::format("%gx", kLoads[i]), summarise(achievable[i]));
  report.line();
  report.line(
      "Read it in three steps. *No labels*: every request is of one application, so that only deadlines and "
      "one "
      "distribution are known. *greedy* knows only the mean of each application and takes the batch "
      "that serves "
      "the most per time: the gain from greedy without labels to greedy is the label's. *gpushare* adds "
      "distributions, "
      "prices and chances. *clairvoyant* is the better of two heuristics that are told every execution time; "
      "they are "
      "no bound, and gpushare may lie above them. *bound* is one: no schedule, made with everything known "
      "beforehand, "
      "finishes more in time (benchmarks/reference/serving_bound.hpp; loose, since it spreads batches over "
      "time and pads "
      "nobody).\n");
  report.line(
      "| load | above the best system | level (within 0.005) | of | least lead (where) | least lead, nobody "
      "told labels (where) |\n|---|---|---|---|---|---|");
  for (size_t i = 0; i < std::size(kLoads); ++i) {
    const Summary s = summarise(achievable[i]);
    report.row("| %gx | %zu | %zu | %zu | %+.4f (%s) | %+.4f (%s) |", kLoads[i], s.above, s.level, s.cells,
               s.worst, s.worst_cell.c_str(), s.worst_unlabelled, s.worst_unlabelled_cell.c_str());
  }
  report.line("\nWhere ours is more than 0.005 below a baseline:\n");
  const size_t before = report.text().size();
  for (size_t l = 0; l < std::size(kLoads); ++l)
    losses(report, achievable[l], base::format(", %gx", kLoads[l]));
  if (report.text().size() == before) report.line("- nowhere");

  const std::vector<Row>& at_one = achievable[1];
  report.line("\n## Every variant at 1x\n");
  report.line(
      "Mean over the 65 cells; what each variant takes from where is in "
      "[serving-decisions](serving-decisions.md).\n");
  report.line("| variant | finish rate |\n|---|---|");
  for (const Contender& each : main_contenders()) {
    double mean = 0;
    for (const Row& row : at_one) mean += row.rate(each.name).mean / static_cast<double>(at_one.size());
    report.row("| %s | %.3f |", each.name.c_str(), mean);
  }
  report.line("\n## Cases at 1x\n");
  report.line(
      "Best variant of each system in each cell; mean over the SLOs 1.5, 2, 3, 4 and 5. The paper's own "
      "figures, for Clipper, Nexus, "
      "Clockwork and Orloj, stand first. Every cell of this page is in "
      "`benchmarks/results/serving-cells.csv`.\n");
  std::vector<Row> named = at_one;
  for (Row& row : named) {
    const std::string of = row.name.substr(0, row.name.find(" at "));
    double clipper = 0, nexus = 0, clockwork = 0, orloj = 0;
    for (const PrintedCell& cell : kPrinted) {
      if (of != cell.name) continue;
      clipper += cell.clipper / std::size(kSlos);
      nexus += cell.nexus / std::size(kSlos);
      clockwork += cell.clockwork / std::size(kSlos);
      orloj += cell.orloj / std::size(kSlos);
    }
    row.line = base::format("%s | %.2f, %.2f, %.2f, %.2f", of.c_str(), clipper, nexus, clockwork, orloj);
  }
  finish_rates(report, "tables", "case | printed", named);

  std::vector<Row> others = cells(all, Target::kAchievable, 1);
  const std::vector<Contender> simple{{"fifo", "fifo"}, {"edf", "edf"}, {"maxdelay", "maxdelay"}};
  run_rows(others, simple);
  report.line("\n## The other baselines, 1x, mean over the 65 cells\n");
  report.line("| policy | finish rate |\n|---|---|");
  for (const Contender& each : simple) {
    double mean = 0;
    for (const Row& row : others) mean += row.rate(each.name).mean / static_cast<double>(others.size());
    report.row("| %s | %.3f |", each.name.c_str(), mean);
  }
}

}  // namespace gpushare::experiments
