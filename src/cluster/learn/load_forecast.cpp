// SPDX-License-Identifier: Apache-2.0
#include "cluster/learn/load_forecast.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::cluster {

// The mean square of the one-step errors.
double LoadForecast::error_of(double phi, double theta, double mean, double* last_error) const {
  double error = 0;
  double sum = 0;
  for (size_t i = 1; i < loads_.size(); ++i) {
    const double predicted = mean + phi * (loads_[i - 1] - mean) + theta * error;
    error = loads_[i] - predicted;
    sum += error * error;
  }
  *last_error = error;
  return loads_.size() < 2 ? 0 : sum / double(loads_.size() - 1);
}

void LoadForecast::observe(double load) {
  loads_.push_back(load);
  if (loads_.size() > kWindow) loads_.pop_front();
  double mean = 0;
  for (double value : loads_) mean += value;
  mean /= double(loads_.size());
  double error = 0;
  if (++seen_ >= kRefit && seen_ % kRefit == 0) {
    double best = error_of(1, 0, mean,
                           &error);  // the next load is like the last: kept unless another is clearly better
    phi_ = 1;
    theta_ = 0;
    for (int p = 0; p <= 20; ++p) {
      for (int t = -9; t <= 9; ++t) {
        const double candidate = error_of(p * 0.05, t * 0.1, mean, &error);
        if (candidate >= best * 0.98) continue;
        best = candidate;
        phi_ = p * 0.05;
        theta_ = t * 0.1;
      }
    }
  }
  const double square = error_of(phi_, theta_, mean, &error);
  next_.mean = std::max(0.0, mean + phi_ * (load - mean) + theta_ * error);
  next_.high = next_.mean + 1.645 * std::sqrt(square);
  // A forecast of no load would leave nothing to divide by.
  next_.mean = std::max(next_.mean, 1e-9 * std::max(1.0, load));
  next_.high = std::max(next_.high, next_.mean);
}

}  // namespace gpushare::cluster
