// rows.hpp: an experiment with the serving simulator is some rows, each run with several policies and seeds on all
// cores, and what is said of them on the page.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "calibrate.hpp"

namespace gpushare::experiments {

using sim::ServingOptions;
using sim::ServingResult;
using sim::TimedRequest;

inline constexpr size_t kRequests = 3000;
// Seeds of each row and threads that run them; set from the command line before anything runs.
inline uint64_t seeds = 5;
inline unsigned threads = 0;  // 0: one a processor
// Used for nothing else: the policy was tuned on seeds 1 to 5, 101 and 102, the calibration made with 11 and 12. Set likewise.
inline uint64_t first_seed = 301;
// A policy as a row of an experiment runs it.
struct Contender {
  std::string name;  // on the page
  const char* policy;
  bool labels = true;
  bool model_per_application = false;
};
// A published system, in all the variants that are run; the best one counts.
struct Family {
  const char* name;
  std::vector<Contender> variants;
};
const std::vector<Family>& families();
// The columns that rows are compared by: all variants of the families, greedy, gpushare, these and orloj without labels, and the
// two clairvoyant heuristics.
const std::vector<Contender>& main_contenders();
inline constexpr const char* kUnlabelled = "gpushare, no labels";

struct Stat {
  double mean = 0, sd = 0;
};

// One experiment: a name for the row, how requests are drawn for a seed, options, and a finish rate per seed
// for each policy.
struct Row {
  std::string name;
  std::string line;  // rows of one line of the page follow each other, and their mean is printed there
  std::function<std::vector<TimedRequest>(uint64_t)> draw;
  ServingOptions options;
  std::map<std::string, std::vector<double>> rates;
  std::vector<double> bounds;  // a seed: no policy can do better
  Stat rate(const std::string& contender) const;
  double bound() const;
  // The best variant of a family, and of all families; `who` is its name.
  double family(const Family& of, std::string* who = nullptr) const;
  double best(std::string* who = nullptr) const;
  double unlabelled_best() const;  // the same of those that see no labels
};

// Every finish rate is checked against the bound: the program ends with an error where one is above.
void run_rows(std::vector<Row>& rows, const std::vector<Contender>& contenders);

// Draws kRequests of a synthetic case at a load; a Row's draw.
std::function<std::vector<TimedRequest>(uint64_t)> drawer(const std::string& synthetic, double load,
                                                          double burst = 0);
ServingOptions options_of(const Calibration& at, double slo);

// Valid for rows that were run with main_contenders().
struct Summary {
  size_t cells = 0, above = 0, level = 0;
  double ours = 0, unlabelled = 0, greedy = 0, greedy_unlabelled = 0, best = 0, orloj = 0,
         orloj_unlabelled = 0;
  double clairvoyant = 0, bound = 0;
  double worst = 1;
  std::string worst_cell;
  double worst_unlabelled = 1;  // against the best of those without labels
  std::string worst_unlabelled_cell;
};
Summary summarise(const std::vector<Row>& rows);

// The page.
class Report {
 public:
  void line(const std::string& text = {}) { text_ += text + "\n"; }
  __attribute__((format(printf, 2, 3))) void row(const char* format, ...);
  const std::string& text() const { return text_; }
  // Every cell, where the page has the means of lines.
  void cell(const std::string& experiment, const Row& row);
  const std::string& cells() const { return cells_; }

 private:
  std::string text_;
  std::string cells_ =
      "experiment,cell,clipper,nexus,clockwork,orloj,greedy,gpushare,gpushare_sd,gpushare_no_labels,"
      "clairvoyant,bound\n";
};

// The sections of the page, one after the other.
void main_tables(Report& report, const std::vector<Calibration>& all);
void static_models(Report& report);
void mixes(Report& report);
void trace(Report& report, const std::string& path);  // a section for each trace
void bursts(Report& report, const std::string& path);
// A table of rows that were run with main_contenders(); `keys` heads the columns that the rows' names fill.
void finish_rates(Report& report, const std::string& experiment, const std::string& keys,
                  const std::vector<Row>& rows);
// Where ours is more than 0.005 below a baseline, labelled or not; "nowhere" if so.
void losses(Report& report, const std::vector<Row>& rows, const std::string& at = {});
void sensitivity(Report& report, const std::vector<Calibration>& all);

}  // namespace gpushare::experiments
