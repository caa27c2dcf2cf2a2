// load_forecast.hpp: the load of the next round from those of the rounds before: an autoregressive moving average of
// order (1, 1), as Cilantro forecasts (thesis 002, section 3.6), with an upper bound. Fitted over the last rounds by
// least squares of the one-step errors on a grid of the two coefficients. No clock, no thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>

namespace gpushare::cluster {

class LoadForecast {
 public:
  struct Forecast {
    double mean = 0;
    double high = 0;  // exceeded by one load in twenty, if errors are normal
  };

  // `first` is the load that was declared; it holds until one was observed.
  explicit LoadForecast(double first) : next_{first, first} {}

  void observe(double load);
  Forecast next() const { return next_; }

 private:
  static constexpr size_t kWindow = 60;  // rounds that are looked at
  static constexpr size_t kRefit = 8;    // rounds between two fits
  double error_of(double phi, double theta, double mean, double* last_error) const;

  std::deque<double> loads_;
  size_t seen_ = 0;
  double phi_ = 1, theta_ = 0;
  Forecast next_;
};

}  // namespace gpushare::cluster
