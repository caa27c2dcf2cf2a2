// slowdown.hpp: how much slower jobs make progress beside others, learned from what was observed, pair by pair.
//
// A pair that was seen has the mean of what was seen. Of one that was not, the logarithm of the slowdown is predicted as what is known
// beforehand (the most demanded resource is shared in proportion to demand; a larger batch takes longer), plus a sum of five learned
// effects: of all pairs, of the job's model and configuration (how sensitive it is), and of the neighbour's (how much it presses). Ridge
// regression, so that an effect that few observations tell of stays near that of its model, and that near nothing. Its uncertainty is the
// error of the predictions made so far for pairs not seen then, widened where job or neighbour are new.
// Plain values; one thread; deterministic.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cluster/scheduler.hpp"

namespace gpushare::cluster {

class SlowdownModel {
 public:
  struct Estimate {
    double mean = 0;    // of the slowdown less 1; below 0 where a batch size is better than the first
    double spread = 0;  // one standard deviation
  };

  // `job` made progress `slowdown` (> 0) times slower beside `other` alone.
  void observe(const JobInfo& job, const JobInfo& other, double slowdown);
  // The same, measured before: not part of predictions().
  void know(const JobInfo& job, const JobInfo& other, double slowdown);

  Estimate excess(const JobInfo& job, const JobInfo& other) const;
  bool seen(const JobInfo& job, const JobInfo& other) const;
  PredictionReport predictions() const;

  // What demands alone say, less 1.
  static double guessed(const JobInfo& job, const JobInfo& other);

 private:
  struct Effect {
    double value = 0, sum = 0, count = 0;
  };
  // What a name stands for: its configuration and its model, as indices into effects.
  struct Name {
    size_t config, model;
  };
  struct Pair {
    size_t job, other;                        // indices into names_
    double count = 0, mean = 0, squares = 0;  // of the logarithm less what is known beforehand
  };
  static constexpr size_t kNone = static_cast<size_t>(-1);

  size_t name_of(std::string_view config);
  size_t find(std::string_view config) const;
  void add(size_t job, size_t other, double residual);
  void fit();
  double effects(size_t job, size_t other) const;
  double predicted(const JobInfo& job, const JobInfo& other, size_t name, size_t other_name,
                   double* spread) const;
  static double beforehand(const JobInfo& job, const JobInfo& other);

  std::unordered_map<std::string, size_t> index_, models_;
  std::vector<Name> names_;
  std::vector<Effect> sensitive_, pressing_;              // by configuration: names_[].config
  std::vector<Effect> model_sensitive_, model_pressing_;  // by model
  double all_ = 0;
  std::unordered_map<uint64_t, size_t> pair_index_;
  std::vector<Pair> pairs_;
  size_t fitted_ = 0;                       // pairs at the last fit
  double errors_ = 0, squared_errors_ = 0;  // of predictions, in logarithms
  uint64_t nameless_ = 0;                   // observations of jobs without a configuration
  double observed_sum_ = 0;
  PredictionReport report_;
};

}  // namespace gpushare::cluster
