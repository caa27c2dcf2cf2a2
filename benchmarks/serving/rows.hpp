// rows.hpp: an experiment with the serving simulator is some rows, each run with several policies and seeds on all cores, and what is
// said of them on the page.
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
inline constexpr uint64_t kSeeds = 5;
// The policy was tuned on seeds 1 to 5, the calibration made with 11 and 12.
inline constexpr uint64_t kFirstSeed = 101;
inline constexpr const char* kFour[] = {"clipper", "nexus", "clockwork", "orloj"};
inline const std::vector<const char*> kMain{"clipper",  "nexus",       "clockwork",      "orloj",
                                            "gpushare", "clairvoyant", "clairvoyant-edf"};

struct Stat {
  double mean = 0, sd = 0;
};

// One experiment: a name for the row, how requests are drawn for a seed, options, and a finish rate per seed
// for each policy.
struct Row {
  std::string name;
  std::function<std::vector<TimedRequest>(uint64_t)> draw;
  ServingOptions options;
  std::map<std::string, std::vector<double>> rates;
  Stat rate(const std::string& policy) const;
  // Of those that know each execution time, the better; with kMain only.
  double ceiling() const;
};

void run_rows(std::vector<Row>& rows, const std::vector<const char*>& policies, uint64_t seeds = kSeeds);

// Draws kRequests of a synthetic case at a load; a Row's draw.
std::function<std::vector<TimedRequest>(uint64_t)> drawer(const std::string& synthetic, double load,
                                                          double burst = 0);
ServingOptions options_of(const Calibration& at, double slo);

// Of rows that were run with kMain.
struct Summary {
  size_t cells = 0, above = 0, level = 0, near_ceiling = 0;
  double ours = 0, best = 0, ceiling = 0, orloj = 0;
  double worst = 1;
  std::string worst_cell;
};
Summary summarise(const std::vector<Row>& rows);

// The page.
class Report {
 public:
  void line(const std::string& text = {}) { text_ += text + "\n"; }
  __attribute__((format(printf, 2, 3))) void row(const char* format, ...);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// The sections of the page, one after the other.
void main_tables(Report& report, const std::vector<Calibration>& all);
void static_models(Report& report);
void mixes(Report& report);
void trace(Report& report, const std::string& path);
void sensitivity(Report& report, const std::vector<Calibration>& all);

}  // namespace gpushare::experiments
