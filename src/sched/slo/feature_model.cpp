// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/feature_model.hpp"

#include <algorithm>
#include <cmath>

#include "base/saturate.hpp"
#include "sched/slo/distribution.hpp"

namespace gpushare::sched::slo {
namespace {

constexpr double kRemember = 1 - 1.0 / 2048;  // as many as a histogram's window
constexpr uint64_t kSolveEvery = 64;          // at most so many durations between two solutions
constexpr double kRidge = 1e-6;  // of the diagonal: features that say the same share their weight
constexpr double kRatioUnit = 1e6;
constexpr uint32_t kWidthShift = 16;  // a class's number: the halvings of its width, then its place
constexpr size_t kEnoughRatios = 64;

}  // namespace

void FeatureModel::observe(std::span<const double> features, uint64_t execution_ns) {
  const double duration = std::max<double>(1, static_cast<double>(execution_ns));
  shortest_ns_ = observed_ == 0 ? duration : std::min(shortest_ns_, duration);
  longest_ns_ = std::max(longest_ns_, duration);
  if (solved_) ratios_.record(base::to_uint64(duration / predict_ns(features) * kRatioUnit));
  Row row{1};
  std::copy(features.begin(), features.end(), row.begin() + 1);
  const double expected = solved_ ? predict_ns(features) : duration;
  const double weight = 1 / (expected * expected);
  for (size_t i = 0; i < terms_; ++i) {
    for (size_t j = 0; j <= i; ++j) products_[i][j] = products_[i][j] * kRemember + weight * row[i] * row[j];
    right_[i] = right_[i] * kRemember + weight * row[i] * duration;
  }
  ++observed_;
  if (observed_ < 8 + 4 * terms_) return;
  if (!solved_ || observed_ - solved_at_ >= std::min(kSolveEvery, observed_ / 8)) solve();
}

// Cholesky's decomposition of the products, each feature scaled to a diagonal of 1.
void FeatureModel::solve() {
  Row scale{};
  for (size_t i = 0; i < terms_; ++i)
    scale[i] = products_[i][i] > 0 ? 1 / std::sqrt(products_[i][i])
                                   : 0;  // a feature that is always 0 gets no weight
  std::array<Row, kMaxTerms> lower{};
  for (size_t i = 0; i < terms_; ++i)
    for (size_t j = 0; j <= i; ++j) {
      double sum = i == j ? 1 + kRidge : products_[i][j] * scale[i] * scale[j];
      for (size_t k = 0; k < j; ++k) sum -= lower[i][k] * lower[j][k];
      lower[i][j] = i == j ? std::sqrt(std::max(sum, kRidge * kRidge)) : sum / lower[j][j];
    }
  Row found{};
  for (size_t i = 0; i < terms_; ++i) {
    double sum = right_[i] * scale[i];
    for (size_t k = 0; k < i; ++k) sum -= lower[i][k] * found[k];
    found[i] = sum / lower[i][i];
  }
  for (size_t i = terms_; i-- > 0;) {
    for (size_t k = i + 1; k < terms_; ++k) found[i] -= lower[k][i] * found[k];
    found[i] /= lower[i][i];
  }
  for (size_t i = 0; i < terms_; ++i) {
    if (!std::isfinite(found[i] * scale[i])) return;  // features so large that their products are not numbers
    found[i] *= scale[i];
  }
  weights_ = found;
  solved_ = true;
  solved_at_ = observed_;
  choose_width();
}

void FeatureModel::choose_width() {
  if (ratios_.count() < kEnoughRatios) return;
  const Distribution ratios = ratios_.distribution(Histogram::kBucketsPerOctave);
  const double scatter = std::log2(ratios.quantile_ns(0.84) / ratios.quantile_ns(0.16)) / 2;
  const double wanted = std::clamp(1 - std::log2(scatter), 1.0, double{kMostHalvings});
  // The margin keeps the width from going back and forth between two values.
  if (std::abs(wanted - halvings_) > 0.75) halvings_ = static_cast<uint32_t>(std::lround(wanted));
}

double FeatureModel::predict_ns(std::span<const double> features) const {
  double sum = weights_[0];
  for (size_t i = 0; i < features.size(); ++i) sum += weights_[i + 1] * features[i];
  if (!(sum > shortest_ns_ / 2)) sum = shortest_ns_ / 2;  // also where it is no number
  return std::max(1.0, std::min(sum, longest_ns_ * 2));
}

uint32_t FeatureModel::class_of(std::span<const double> features) const {
  if (!solved_) return 0;
  const double octaves = std::log2(predict_ns(features));
  return halvings_ << kWidthShift |
         static_cast<uint32_t>(std::lround(std::ldexp(octaves, static_cast<int>(halvings_))));
}

void FeatureModel::first_durations_ns(uint32_t class_number, std::vector<uint64_t>& out) const {
  const uint32_t steps = class_number & ((1u << kWidthShift) - 1);
  const double centre_ns = std::exp2(std::ldexp(steps, -static_cast<int>(class_number >> kWidthShift)));
  const Distribution ratios = ratios_.distribution(Histogram::kBucketsPerOctave);
  for (size_t i = 0; i < kFirstDurations; ++i) {
    const double at = (static_cast<double>(i) + 0.5) / static_cast<double>(kFirstDurations);
    const double ratio = ratios.empty() ? 1 : ratios.quantile_ns(at) / kRatioUnit;
    out.push_back(std::max<uint64_t>(1, base::to_uint64(centre_ns * ratio)));
  }
}

}  // namespace gpushare::sched::slo
