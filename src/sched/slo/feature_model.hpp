// feature_model.hpp: execution times from numbers that are known when a request arrives (tokens, steps, pixels). A line
// through the features predicts the time, and a prediction names a class: requests with about the same prediction share
// one, and with it a distribution of execution times. So a batcher still knows only applications: a class of an
// application is treated as an application. The model also keeps how far times lie from their predictions. This gives a
// class its first distribution, and the width of classes: about half of the scatter of times, between half an octave
// and a sixteenth. Narrower classes would tell no more and have fewer durations each.
//
// The line minimises squared relative errors, older ones counting for less. Threads: the batcher's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "sched/slo/histogram.hpp"

namespace gpushare::sched::slo {

class FeatureModel {
 public:
  static constexpr size_t kMaxFeatures = 8;
  static constexpr size_t kFirstDurations = 16;  // that a class begins with

  explicit FeatureModel(size_t features) : terms_(features + 1) {}
  size_t features() const { return terms_ - 1; }
  // Learns that a request with these features took execution_ns alone. `features` has features() finite numbers, here
  // and below.
  void observe(std::span<const double> features, uint64_t execution_ns);
  // True if enough was observed to predict.
  bool ready() const { return solved_; }
  // Only when ready. At least 1, and between half the shortest and twice the longest observed time.
  double predict_ns(std::span<const double> features) const;
  // Above 0; 0 while not ready. Another number for the same prediction once classes are wider or narrower.
  uint32_t class_of(std::span<const double> features) const;
  // kFirstDurations durations that requests of the class are likely to take: quantiles of duration over prediction so
  // far, times the prediction that names the class. Only when ready.
  void first_durations_ns(uint32_t class_number, std::vector<uint64_t>& out) const;

 private:
  static constexpr size_t kMaxTerms = kMaxFeatures + 1;
  static constexpr uint32_t kMostHalvings = 4;
  using Row = std::array<double, kMaxTerms>;
  void solve();
  void choose_width();

  size_t terms_;  // the features and one for the constant
  std::array<Row, kMaxTerms> products_{};
  Row right_{};
  Row weights_{};
  Histogram ratios_;  // of durations to the predictions made before them, in millionths
  uint64_t observed_ = 0;
  uint64_t solved_at_ = 0;
  double shortest_ns_ = 0, longest_ns_ = 0;
  bool solved_ = false;
  uint32_t halvings_ = kMostHalvings;  // of an octave: the width of a class
};

}  // namespace gpushare::sched::slo
