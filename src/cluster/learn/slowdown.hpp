// slowdown.hpp: how much slower jobs run beside others, learned from what was observed, pair by pair.
//
// A job's slowdown beside a set is 1 + the sum of its excess beside each. The excess of a pair that was seen is the mean of what was seen;
// of one that was not, what their demands say (the most demanded resource is shared in proportion), mixed with the mean error of that
// guess so far. The spread is that of the observations, and of the guesses for a pair that was not seen.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <string>
#include <unordered_map>
#include <vector>

#include "cluster/scheduler.hpp"

namespace gpushare::cluster {

class SlowdownModel {
 public:
  struct Estimate {
    double mean = 0;    // of the excess over 1
    double spread = 0;  // one standard deviation
  };

  // `job` ran `slowdown` times slower beside `other` alone.
  void observe(const JobInfo& job, const JobInfo& other, double slowdown) {
    const double excess = slowdown - 1, guess = guessed(job, other);
    add(errors_, excess - guess);
    if (!job.config.empty() && !other.config.empty()) add(pairs_[job.config + '\n' + other.config], excess);
  }

  Estimate excess(const JobInfo& job, const JobInfo& other) const {
    if (!job.config.empty() && !other.config.empty()) {
      const auto at = pairs_.find(job.config + '\n' + other.config);
      if (at != pairs_.end()) return {at->second.mean, deviation(at->second) / std::sqrt(at->second.count)};
    }
    // Some pairs only tell how well guesses do; the bias is trusted as they become many.
    const double trust = errors_.count / (errors_.count + 5);
    return {std::max(0.0, guessed(job, other) + trust * errors_.mean),
            errors_.count < 2 ? 0.1 : deviation(errors_)};
  }

  bool seen(const JobInfo& job, const JobInfo& other) const {
    return pairs_.count(job.config + '\n' + other.config) > 0;
  }

  // What demands alone say.
  static double guessed(const JobInfo& job, const JobInfo& other) {
    double most = 1;
    for (size_t r = 0; r < job.demands.size() && r < other.demands.size(); ++r)
      most = std::max(most, job.demands[r] + other.demands[r]);
    return most - 1;
  }

 private:
  struct Seen {
    double count = 0, mean = 0, squares = 0;
  };
  static void add(Seen& seen, double value) {
    ++seen.count;
    const double off = value - seen.mean;
    seen.mean += off / seen.count;
    seen.squares += off * (value - seen.mean);
  }
  static double deviation(const Seen& seen) {
    return seen.count < 2 ? 0.1 : std::sqrt(seen.squares / (seen.count - 1));
  }

  std::unordered_map<std::string, Seen> pairs_;
  Seen errors_;
};

}  // namespace gpushare::cluster
