// Learning curves from a few epochs, and the non-negative least squares below them.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/learn/learning_curve.hpp"

#include <algorithm>
#include <cmath>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace gpushare::cluster {
namespace {

double residual(const std::vector<std::vector<double>>& columns, const std::vector<double>& b,
                const std::vector<double>& x) {
  double sum = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    double rest = b[i];
    for (size_t c = 0; c < columns.size(); ++c) rest -= columns[c][i] * x[c];
    sum += rest * rest;
  }
  return sum;
}

}  // namespace

TEST_CASE("non-negative least squares: known answers, and the conditions of an optimum") {
  // By hand: without the bound x = (-1, 2); with it the second column alone, 3/2.
  const auto known = non_negative_least_squares({{1, 0}, {1, 1}}, {1, 2});
  CHECK(known[0] == Approx(0).margin(1e-12));
  CHECK(known[1] == Approx(1.5));
  CHECK(non_negative_least_squares({{0, 0}, {1, 1}}, {2, 2})[1] == Approx(2));  // a column of zeros
  CHECK(non_negative_least_squares({{1, 1}}, {-1, -1})[0] == 0);
  test::Random random(test::seed());
  const auto number = [&] { return static_cast<double>(test::uniform(random, 0, 2000)) / 1000 - 1; };
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::vector<double>> columns(test::uniform(random, 1, 4), std::vector<double>(6));
    std::vector<double> b(6);
    for (auto& column : columns)
      for (double& value : column) value = number();
    for (double& value : b) value = number();
    const auto x = non_negative_least_squares(columns, b);
    const double least = residual(columns, b, x);
    for (size_t c = 0; c < columns.size(); ++c) {
      CHECK(x[c] >= 0);
      for (const double step : {-1e-3, 1e-3}) {  // the problem is convex: no small step is better
        auto other = x;
        other[c] = std::max(0.0, other[c] + step);
        if (residual(columns, b, other) < least - 1e-9)
          FAIL("column " << c << " could be better by " << step);
      }
    }
  }
}

TEST_CASE("a learning curve comes out of its first five epochs") {
  // The form of the source's profiler: accuracy(x) = 1 - 1/(b0 x + b1) - b2.
  const LearningCurve truth{0.4, 1.6, 0.05};
  std::vector<std::pair<double, double>> points;
  for (int epoch = 1; epoch <= 5; ++epoch) points.emplace_back(epoch, truth.accuracy(epoch));
  CHECK(points[0].second == Approx(0.45));  // 1 - 1/2 - 0.05
  const auto curve = fit_learning_curve(points);
  REQUIRE(curve);
  CHECK(curve->accuracy(30) == Approx(truth.accuracy(30)).margin(0.003));
  CHECK(truth.accuracy(30) == Approx(1 - 1 / 13.6 - 0.05));
  CHECK_FALSE(fit_learning_curve({}));
  CHECK_FALSE(fit_learning_curve({{1, 0.5}, {1, 0.6}}));
  CHECK_FALSE(fit_learning_curve({{1, 0.5}, {2, 1.0}}));
}

TEST_CASE("curves from noisy epochs are off by a few points") {
  test::Random random(test::seed());
  std::vector<double> errors;
  for (int i = 0; i < 200; ++i) {
    const LearningCurve truth{static_cast<double>(test::uniform(random, 100, 800)) / 1000,
                              static_cast<double>(test::uniform(random, 1200, 2500)) / 1000,
                              static_cast<double>(test::uniform(random, 0, 150)) / 1000};
    std::vector<std::pair<double, double>> points;
    for (int epoch = 1; epoch <= 5; ++epoch)
      points.emplace_back(epoch, truth.accuracy(epoch) +
                                     (static_cast<double>(test::uniform(random, 0, 2000)) / 1000 - 1) * 0.01);
    const auto curve = fit_learning_curve(points);
    REQUIRE(curve);
    errors.push_back(std::abs(curve->accuracy(30) - truth.accuracy(30)));
  }
  std::sort(errors.begin(), errors.end());
  CHECK(errors[errors.size() / 2] < 0.06);  // the source has 5.8% in the median
}

}  // namespace gpushare::cluster
