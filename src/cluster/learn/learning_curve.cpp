// SPDX-License-Identifier: Apache-2.0
#include "cluster/learn/learning_curve.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::cluster {
namespace {

constexpr int kGrid = 1000;  // steps of b2 between 0 and what the best observed accuracy leaves

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Least squares over the columns in `in`, by Gaussian elimination of the normal equations; the others are 0.
std::vector<double> unconstrained(const std::vector<std::vector<double>>& columns,
                                  const std::vector<double>& b, const std::vector<bool>& in) {
  std::vector<size_t> used;
  for (size_t c = 0; c < columns.size(); ++c)
    if (in[c]) used.push_back(c);
  std::vector<std::vector<double>> rows;
  for (const size_t r : used) {
    rows.emplace_back();
    for (const size_t c : used) rows.back().push_back(dot(columns[r], columns[c]));
    rows.back().push_back(dot(columns[r], b));
  }
  const size_t n = used.size();
  for (size_t k = 0; k < n; ++k) {
    size_t pivot = k;
    for (size_t r = k + 1; r < n; ++r)
      if (std::abs(rows[r][k]) > std::abs(rows[pivot][k])) pivot = r;
    std::swap(rows[k], rows[pivot]);
    if (std::abs(rows[k][k]) < 1e-300) continue;
    for (size_t r = 0; r < n; ++r) {
      if (r == k) continue;
      const double factor = rows[r][k] / rows[k][k];
      for (size_t c = k; c <= n; ++c) rows[r][c] -= factor * rows[k][c];
    }
  }
  std::vector<double> x(columns.size(), 0);
  for (size_t k = 0; k < n; ++k)
    if (std::abs(rows[k][k]) >= 1e-300) x[used[k]] = rows[k][n] / rows[k][k];
  return x;
}

}  // namespace

std::vector<double> non_negative_least_squares(const std::vector<std::vector<double>>& columns,
                                               const std::vector<double>& b) {
  std::vector<double> x(columns.size(), 0);
  std::vector<bool> in(columns.size(), false);
  double scale = 0;
  for (const auto& column : columns) scale = std::max(scale, std::abs(dot(column, b)));
  for (size_t round = 0; round < 3 * columns.size() + 3; ++round) {
    std::vector<double> rest = b;
    for (size_t c = 0; c < columns.size(); ++c)
      for (size_t i = 0; i < b.size(); ++i) rest[i] -= columns[c][i] * x[c];
    size_t entering = columns.size();
    double steepest = 1e-12 * scale;
    for (size_t c = 0; c < columns.size(); ++c)
      if (const double gradient = dot(columns[c], rest); !in[c] && gradient > steepest) {
        steepest = gradient;
        entering = c;
      }
    if (entering == columns.size()) break;
    in[entering] = true;
    for (;;) {
      const std::vector<double> wanted = unconstrained(columns, b, in);
      // As far towards `wanted` as all stay at 0 or above.
      double step = 1;
      for (size_t c = 0; c < columns.size(); ++c)
        if (in[c] && wanted[c] < 0) step = std::min(step, x[c] / (x[c] - wanted[c]));
      for (size_t c = 0; c < columns.size(); ++c)
        if (in[c]) x[c] += step * (wanted[c] - x[c]);
      if (step >= 1) break;
      for (size_t c = 0; c < columns.size(); ++c)
        if (in[c] && wanted[c] < 0 && x[c] <= 1e-14) {
          in[c] = false;
          x[c] = 0;
        }
    }
  }
  return x;
}

double LearningCurve::accuracy(double epochs) const {
  const double reached = b0 * epochs + b1;
  return reached > 0 ? std::clamp(1 - 1 / reached - b2, 0.0, 1.0) : 0;
}

std::optional<LearningCurve> fit_learning_curve(const std::vector<std::pair<double, double>>& points) {
  double best_accuracy = 0;
  bool different = false;
  for (const auto& [epochs, accuracy] : points) {
    best_accuracy = std::max(best_accuracy, accuracy);
    different |= epochs != points.front().first;
  }
  if (!different || !(best_accuracy < 1)) return std::nullopt;
  std::vector<double> epochs, ones(points.size(), 1);
  for (const auto& point : points) epochs.push_back(point.first);
  LearningCurve best;
  double least = -1;
  for (int step = 0; step < kGrid; ++step) {
    LearningCurve curve;
    curve.b2 = (1 - best_accuracy) * step / kGrid;
    std::vector<double> inverse;
    for (const auto& point : points) inverse.push_back(1 / (1 - curve.b2 - point.second));
    const std::vector<double> fitted = non_negative_least_squares({epochs, ones}, inverse);
    curve.b0 = fitted[0];
    curve.b1 = fitted[1];
    double error = 0;
    for (const auto& [at, accuracy] : points) error += std::pow(curve.accuracy(at) - accuracy, 2);
    if (least >= 0 && error >= least) continue;
    least = error;
    best = curve;
  }
  return best;
}

}  // namespace gpushare::cluster
