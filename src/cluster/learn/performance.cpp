// SPDX-License-Identifier: Apache-2.0
#include "cluster/learn/performance.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "cluster/learn/gaussian_process.hpp"

namespace gpushare::cluster {
namespace {

constexpr double kNormal95 = 1.645;  // one in twenty is beyond so many standard deviations

// The noise of observations: the mean square of their differences from the prediction, with a prior worth some observations.
class NoiseEstimate {
 public:
  void add(double residual) {
    squares_ = squares_ * kKeep + residual * residual;
    weight_ = weight_ * kKeep + 1;
  }
  double sd() const {
    return std::sqrt((squares_ + kPriorWeight * kPrior * kPrior) / (weight_ + kPriorWeight));
  }

 private:
  static constexpr double kKeep = 0.99, kPrior = 0.15, kPriorWeight = 3;
  double squares_ = 0, weight_ = 0;
};

class Binning final : public PerformanceLearner {
 public:
  Binning(double scale_units, double load) : scale_(scale_units / load * 8) {}

  void observe(double units, double load, double performance) override {
    const double x = units / load / scale_;
    Bin& leaf = bins_[{kDepth, index(x, kDepth)}];
    if (leaf.count > 0)
      noise_.add((performance - leaf.sum / leaf.count) * std::sqrt(leaf.count / (leaf.count + 1)));
    for (int depth = 0; depth <= kDepth; ++depth) {
      Bin& bin = bins_[{depth, index(x, depth)}];
      bin.sum += performance;
      ++bin.count;
    }
  }

  PerformanceBounds at(double units, double load) override {
    const double x = units / load / scale_;
    PerformanceBounds result{0, 0, std::numeric_limits<double>::infinity()};
    for (int depth = 0; depth <= kDepth; ++depth) {
      const auto found = bins_.find({depth, index(x, depth)});
      if (found == bins_.end()) break;
      const Bin& bin = found->second;
      const double mean = bin.sum / bin.count;
      const double margin =
          kNormal95 * noise_.sd() / std::sqrt(bin.count) + kLipschitz * std::ldexp(1.0, -depth);
      result.low = std::max(result.low, mean - margin);
      result.high = std::min(result.high, mean + margin);
      result.estimate = mean;
    }
    if (result.low > result.high) result.low = result.high = (result.low + result.high) / 2;
    return result;
  }

 private:
  struct Bin {
    double sum = 0, count = 0;
  };
  static constexpr int kDepth = 10;
  static constexpr double kLipschitz = 10;
  // All beyond the scale fall into the last bins.
  static int64_t index(double x, int depth) {
    return int64_t(std::clamp(x, 0.0, 1 - 1e-9) * std::ldexp(1.0, depth));
  }
  double scale_;
  std::map<std::pair<int, int64_t>, Bin> bins_;
  NoiseEstimate noise_;
};

class Kernel final : public PerformanceLearner {
 public:
  Kernel(LearnerKind kind, double scale_units, double load)
      : adaptive_(kind == LearnerKind::kAdaptive),
        surface_(kind == LearnerKind::kSurface),
        scale_units_(scale_units),
        load_(load) {}

  void observe(double units, double load, double performance) override {
    if (!seen_.empty()) {
      refresh();
      double point[2];
      place(units, load, point);
      const auto predicted = process_.at(point);
      const double error = performance - predicted.mean - saturation_.at(per_load(units, load));
      const double sd = std::sqrt(predicted.sd * predicted.sd + noise_.sd() * noise_.sd());
      // Only errors where something was known tell of the noise or of a change.
      if (predicted.sd < noise_.sd()) {
        noise_.add(std::clamp(error, -3 * noise_.sd(), 3 * noise_.sd()));
        if (adaptive_) watch(error / sd);
      }
    }
    // Performance is not below 0, so noise is cut off there: what was seen as 0 was less in the mean.
    if (adaptive_ && performance <= 0) performance = -kCutOff * noise_.sd();
    seen_.push_back({units, load, performance});
    if (seen_.size() > kWindow) seen_.pop_front();
    stale_ = true;
  }

  PerformanceBounds at(double units, double load) override {
    if (seen_.empty()) return {0, 0, std::numeric_limits<double>::infinity()};
    refresh();
    double point[2];
    place(units, load, point);
    auto predicted = process_.at(point);
    predicted.mean += saturation_.at(per_load(units, load));
    // Where the curve may have a step is known no better than to kEdge.
    if (adaptive_)
      predicted.sd = std::hypot(
          predicted.sd, (mean(units * std::exp2(kEdge), load) - mean(units * std::exp2(-kEdge), load)) / 2);
    return {std::max(0.0, predicted.mean - kNormal95 * predicted.sd), std::max(0.0, predicted.mean),
            std::max(0.0, predicted.mean + kNormal95 * predicted.sd)};
  }

 private:
  struct Seen {
    double units, load, performance;
  };
  // The shape of most performance curves: floor + level x^k / (half^k + x^k). The kernel learns the difference from it,
  // so a few observations predict shares that were never given. `floor` and `level` are fitted by least squares at each
  // `half` and k of a grid.
  struct Saturation {
    double floor = 0, level = 0, half = 1, power = 1;
    double at(double x) const { return floor + (level == 0 ? 0 : level * shape(x, half, power)); }
    static double shape(double x, double half, double power) {
      return x <= 0 ? 0 : 1 / (1 + std::pow(half / x, power));
    }
  };
  static constexpr size_t kWindow = 48;
  static constexpr double kDrift = 0.75, kAlarm = 6;  // of the CUSUM, in standard deviations
  static constexpr size_t kKeptAtAlarm = 2;
  static constexpr double kCutOff = 0.8;  // mean of the lower half of a normal distribution, in deviations
  static constexpr double kEdge = 0.05;   // doublings of the units, as a standard deviation
  static constexpr double kAge = 1.02;    // by which the noise of an observation grows a round

  // Logarithms, since performance saturates: a step from 1 to 2 units is as long as one from 10 to 20.
  double per_load(double units, double load) const { return units / load * load_ / scale_units_; }
  void place(double units, double load, double* point) const {
    point[0] = std::log2(0.05 + (surface_ ? units / scale_units_ : per_load(units, load)));
    point[1] = surface_ ? std::log2(0.05 + load / load_) : 0;
  }

  double mean(double units, double load) const {
    double point[2];
    place(units, load, point);
    return process_.at(point).mean + saturation_.at(per_load(units, load));
  }

  void watch(double error) {
    up_ = std::max(0.0, up_ + error - kDrift);
    down_ = std::max(0.0, down_ - error - kDrift);
    if (std::max(up_, down_) < kAlarm) return;
    up_ = down_ = 0;
    while (seen_.size() > kKeptAtAlarm) seen_.pop_front();
    fits_ = 0;
    stale_ = true;
  }

  void refresh() {
    if (!stale_) return;
    stale_ = false;
    const size_t dimensions = surface_ ? 2 : 1;
    std::vector<double> points, values, noise;
    double mean = 0;
    if (adaptive_) fit_saturation();
    for (size_t i = 0; i < seen_.size(); ++i) {
      double point[2];
      place(seen_[i].units, seen_[i].load, point);
      points.insert(points.end(), point, point + dimensions);
      values.push_back(seen_[i].performance - saturation_.at(per_load(seen_[i].units, seen_[i].load)));
      if (!adaptive_) mean += seen_[i].performance / double(seen_.size());
      noise.push_back(noise_.sd() * (adaptive_ ? std::pow(kAge, double(seen_.size() - 1 - i)) : 1));
    }
    // The length that explains the observations best, chosen anew now and then.
    if (fits_++ % 12 == 0 || seen_.size() < 6) {
      double best = -std::numeric_limits<double>::infinity();
      for (double length : {0.5, 1.0, 2.0, 4.0}) {
        process_.fit(dimensions, points, values, noise, length, amplitude(), mean);
        const double likelihood = process_.log_likelihood() - 0.5 * std::abs(std::log2(length));
        if (likelihood <= best) continue;
        best = likelihood;
        length_ = length;
      }
    }
    process_.fit(dimensions, std::move(points), values, noise, length_, amplitude(), mean);
  }

  double amplitude() const { return adaptive_ ? 0.2 : 0.5; }

  // Sums over observations of 1, the shape, the performance, and their products.
  struct Moments {
    double ones = 0, shape = 0, value = 0, shape2 = 0, shape_value = 0, value2 = 0;
  };
  // The floor and level of the least weighted squared error, both bounded, and that error.
  static std::pair<double, Saturation> fit_level(const Moments& m, double half, double power) {
    Saturation fitted{0, 0, half, power};
    const double determinant = m.ones * m.shape2 - m.shape * m.shape;
    if (determinant > 1e-9)
      fitted.floor = std::clamp((m.value * m.shape2 - m.shape * m.shape_value) / determinant, 0.0, 1.0);
    fitted.level = std::clamp((m.shape_value - fitted.floor * m.shape) / std::max(m.shape2, 1e-9), 0.3, 3.0);
    const double f = fitted.floor, l = fitted.level;
    return {m.value2 - 2 * f * m.value - 2 * l * m.shape_value + f * f * m.ones + 2 * f * l * m.shape +
                l * l * m.shape2,
            fitted};
  }

  void fit_saturation() {
    double best = std::numeric_limits<double>::infinity();
    Saturation chosen;
    for (double power : {1.0, 2.0, 4.0, 8.0}) {
      for (int h = -10; h <= 8; ++h) {
        const double half = std::exp2(h * 0.5);
        // Weak beliefs, worth one observation each: nothing is reached without units, and level 1 with many.
        Moments m{2, 1, 1, 1, 1, 1};
        double weight = 1;
        for (size_t i = seen_.size(); i-- > 0; weight /= kAge) {
          const double shape = Saturation::shape(per_load(seen_[i].units, seen_[i].load), half, power);
          const double value = seen_[i].performance;
          m.ones += weight;
          m.shape += weight * shape;
          m.value += weight * value;
          m.shape2 += weight * shape * shape;
          m.shape_value += weight * shape * value;
          m.value2 += weight * value * value;
        }
        // And that half of it is reached at a third of a fair share.
        const double off = std::log2(half) + 1.5;
        const auto [error, fitted] = fit_level(m, half, power);
        const double cost = error + noise_.sd() * noise_.sd() * (0.3 * off * off + 0.5 * std::log2(power));
        if (cost >= best) continue;
        best = cost;
        chosen = fitted;
      }
    }
    saturation_ = chosen;
  }

  const bool adaptive_, surface_;
  const double scale_units_, load_;
  std::deque<Seen> seen_;
  GaussianProcess process_;
  Saturation saturation_;
  NoiseEstimate noise_;
  double length_ = 1;
  size_t fits_ = 0;
  double up_ = 0, down_ = 0;
  bool stale_ = false;
};

class Declared final : public PerformanceLearner {
 public:
  Declared(PerformanceCurve curve, double slo) : curve_(std::move(curve)), slo_(slo) {}
  void observe(double, double, double) override {}
  PerformanceBounds at(double units, double load) override {
    const double performance = curve_.at(units / load) / slo_;
    return {performance, performance, performance};
  }

 private:
  PerformanceCurve curve_;
  double slo_;
};

}  // namespace

std::unique_ptr<PerformanceLearner> make_performance_learner(LearnerKind kind, double scale_units,
                                                             double load) {
  if (kind == LearnerKind::kBinning) return std::make_unique<Binning>(scale_units, load);
  return std::make_unique<Kernel>(kind, scale_units, load);
}

std::unique_ptr<PerformanceLearner> make_declared_performance(PerformanceCurve curve, double slo) {
  return std::make_unique<Declared>(std::move(curve), slo);
}

}  // namespace gpushare::cluster
