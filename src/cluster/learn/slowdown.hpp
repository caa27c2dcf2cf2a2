// slowdown.hpp: how much slower jobs make progress beside others, learned from observations of pairs.
//
// An observed pair has the mean of its observations. For another pair the logarithm of the slowdown is predicted: a
// prior (the most demanded resource is shared in proportion to demand; a larger batch takes longer) plus a sum of five
// learned effects: one of all pairs, those of the job's model and configuration (how sensitive it is), and those of the
// neighbour's (how much it presses). The effects come from ridge regression, so a configuration with few observations
// stays near the effect of its model, and a model with few near 0. The uncertainty is the error of the earlier
// predictions for pairs that were not observed then, widened where job or neighbour are new. Plain values; one thread;
// deterministic.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cluster/scheduler.hpp"

namespace gpushare::cluster {

class SlowdownModel {
  static constexpr size_t kNone = static_cast<size_t>(-1);

 public:
  struct Estimate {
    double mean = 0;    // of the slowdown less 1; below 0 where a batch size is better than the first
    double spread = 0;  // one standard deviation
  };

  // `job` made progress `slowdown` (> 0) times slower beside `other` alone.
  void observe(const JobInfo& job, const JobInfo& other, double slowdown);
  // The same, measured before: not part of predictions().
  void know(const JobInfo& job, const JobInfo& other, double slowdown);

  // The records of a configuration. Valid while names() stays the same.
  struct Ref {
    size_t name = kNone, model = kNone;
    bool nameless() const { return name == kNone && model == kNone; }
  };
  Ref ref(std::string_view config) const;
  size_t names() const { return names_.size(); }

  Estimate excess(const JobInfo& job, const JobInfo& other) const;
  // The same for who asks often: `known` and `other_known` are ref() of the two configurations.
  Estimate excess(const JobInfo& job, Ref known, const JobInfo& other, Ref other_known) const;
  bool seen(const JobInfo& job, const JobInfo& other) const;
  // The slowdown of two jobs of which nothing is known but their demands, mean and spread together, is what guessed()
  // says, times this, but for rounding; and at least nameless_least().
  double nameless_factor() const;
  double nameless_least() const;
  PredictionReport predictions() const;

  // The slowdown that demands alone predict, less 1.
  static double guessed(const JobInfo& job, const JobInfo& other);

 private:
  struct Effect {
    double value = 0, sum = 0, count = 0;
  };
  // The configuration and the model of a name, as indices into effects.
  struct Name {
    size_t config, model;
  };
  struct Pair {
    size_t job, other;                        // indices into names_
    double count = 0, mean = 0, squares = 0;  // of the logarithm less what is known beforehand
  };
  size_t name_of(std::string_view config);
  size_t find(std::string_view config) const;
  size_t pair_of(size_t job, size_t other) const;
  double spread_of(size_t name, size_t other_name) const;
  void add(size_t job, size_t other, double residual);
  void fit();
  double effects(size_t job, size_t other) const;
  double predicted(const JobInfo& job, const JobInfo& other, Ref known, Ref other_known) const;
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
