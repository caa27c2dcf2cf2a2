// learning_curve.hpp: the accuracy that a training will reach, from its first epochs (Ekya's micro-profiler, thesis
// 002, section 2.4.3).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <utility>
#include <vector>

namespace gpushare::cluster {

// The x >= 0 that minimises |A x - b|, where the columns of A have as many elements as b (Lawson and Hanson 1974: columns enter by their
// gradient and leave where they would become negative). Exact up to rounding, for a few columns. A column of zeros keeps 0.
std::vector<double> non_negative_least_squares(const std::vector<std::vector<double>>& columns,
                                               const std::vector<double>& b);

// accuracy(x) = 1 - 1/(b0 x + b1) - b2 after x epochs, of 1; b0, b1, b2 >= 0. It never falls as x grows, and stays below 1 - b2.
struct LearningCurve {
  double b0 = 0, b1 = 1, b2 = 0;
  double accuracy(double epochs) const;  // in [0, 1]
};

// The curve through (epochs, accuracy in [0, 1)), by least squares of the accuracies over a grid of b2, for each of
// which b0 and b1 are linear. Empty with fewer than two different numbers of epochs.
std::optional<LearningCurve> fit_learning_curve(const std::vector<std::pair<double, double>>& points);

}  // namespace gpushare::cluster
