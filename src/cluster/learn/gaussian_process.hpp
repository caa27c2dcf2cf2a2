// gaussian_process.hpp: regression of a function of a few variables from noisy observations, with its uncertainty.
// Matern 5/2 kernel. Exact: a Cholesky factorisation of the observations' covariance, O(n^3) a fit and O(n) to O(n^2) a
// prediction, for up to some hundred observations. Plain values; one thread. Used by the learners of performance.hpp
// (kernel ridge regression is its mean) and by the batch tuner of training/.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace gpushare::cluster {

class GaussianProcess {
 public:
  struct Prediction {
    double mean = 0;
    double sd = 0;  // of the function, without the noise of an observation
  };

  // Points are rows of `dimensions` numbers; `length` is the kernel's length in each, `amplitude` its standard
  // deviation, `prior` the mean far from all points. noise_sd[i] is the standard deviation of the i-th observation.
  void fit(size_t dimensions, std::vector<double> points, const std::vector<double>& values,
           const std::vector<double>& noise_sd, double length, double amplitude, double prior) {
    dimensions_ = dimensions;
    points_ = std::move(points);
    length_ = length;
    amplitude_ = amplitude;
    prior_ = prior;
    const size_t n = values.size();
    factor_.assign(n * n, 0);
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j <= i; ++j) {
        double sum = kernel(&points_[i * dimensions_], &points_[j * dimensions_]);
        if (i == j) sum += noise_sd[i] * noise_sd[i] + 1e-9 * amplitude_ * amplitude_;
        for (size_t k = 0; k < j; ++k) sum -= factor_[i * n + k] * factor_[j * n + k];
        factor_[i * n + j] = i == j ? std::sqrt(std::max(sum, 1e-12)) : sum / factor_[j * n + j];
      }
    }
    std::vector<double> half(n);
    fit_ = 0;
    log_determinant_ = 0;
    for (size_t i = 0; i < n; ++i) {
      half[i] = values[i] - prior_;
      for (size_t k = 0; k < i; ++k) half[i] -= factor_[i * n + k] * half[k];
      half[i] /= factor_[i * n + i];
      fit_ += half[i] * half[i];
      log_determinant_ += std::log(factor_[i * n + i]);
    }
    weights_.assign(n, 0);
    for (size_t i = n; i-- > 0;) {
      weights_[i] = half[i];
      for (size_t k = i + 1; k < n; ++k) weights_[i] -= factor_[k * n + i] * weights_[k];
      weights_[i] /= factor_[i * n + i];
    }
  }

  // Up to a constant: greater is a better choice of length and amplitude.
  double log_likelihood() const { return -0.5 * fit_ - log_determinant_; }

  Prediction at(const double* point) const {
    const size_t n = weights_.size();
    Prediction result{prior_, 0};
    double explained = 0;
    std::vector<double> half(n);
    for (size_t i = 0; i < n; ++i) {
      const double k = kernel(point, &points_[i * dimensions_]);
      result.mean += k * weights_[i];
      half[i] = k;
      for (size_t j = 0; j < i; ++j) half[i] -= factor_[i * n + j] * half[j];
      half[i] /= factor_[i * n + i];
      explained += half[i] * half[i];
    }
    result.sd = std::sqrt(std::max(0.0, amplitude_ * amplitude_ - explained));
    return result;
  }

 private:
  double kernel(const double* a, const double* b) const {
    double squares = 0;
    for (size_t d = 0; d < dimensions_; ++d) squares += (a[d] - b[d]) * (a[d] - b[d]);
    const double r = std::sqrt(5 * squares) / length_;
    return amplitude_ * amplitude_ * (1 + r + r * r / 3) * std::exp(-r);
  }

  size_t dimensions_ = 1;
  std::vector<double> points_;
  std::vector<double> factor_;  // lower triangle
  std::vector<double> weights_;
  double length_ = 1, amplitude_ = 1, prior_ = 0;
  double fit_ = 0, log_determinant_ = 0;
};

}  // namespace gpushare::cluster
