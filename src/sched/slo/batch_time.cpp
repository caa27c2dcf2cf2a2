// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/batch_time.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace gpushare::sched::slo {
namespace {

constexpr size_t kLeastBatches = 8;    // before anything is fitted, and of a size before it has a factor
constexpr int kRounds = 8;             // of reweighted least squares
constexpr double kInferredRange = 4;   // see observe
constexpr double kLeastFactor = 0.05;  // deviations of a size below this are taken for noise
constexpr double kMostFactor = 8;
constexpr size_t kDeviations = 5;  // ratios that stand for all deviations
constexpr double kLeastDeviation =
    0.02;  // of a ratio from 1: below this batches are taken to keep to the line

bool moved(double from, double to) {
  return std::abs(to - from) > 1e-3 * std::max(std::abs(from), 1e-12);
}

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

BatchTimeModel::BatchTimeModel(double c0_ns, double c1, size_t memory)
    : c0_ns_(std::max(c0_ns, 0.0)),
      c1_(std::max(c1, 0.0)),
      first_c1_(c1_),
      memory_(std::max<size_t>(memory, kLeastBatches)),
      published_c0_(c0_ns_),
      published_c1_(c1_) {
  factor_.fill(1);
}

size_t BatchTimeModel::kind_of(unsigned k) {
  if (k <= 16) return k - (k > 0 ? 1 : 0);
  const auto octave = static_cast<unsigned>(std::bit_width(k)) - 1;  // 4 and more
  return std::min<size_t>(16 + (octave - 4) * size_t{8} + ((k >> (octave - 3)) & 7u), kKinds - 1);
}

void BatchTimeModel::observe(unsigned k, double longest_ns, double measured_ns, bool told) {
  if (frozen_ || k == 0 || !(longest_ns > 0) || !(measured_ns > 0) || !std::isfinite(longest_ns) ||
      !std::isfinite(measured_ns))
    return;
  const Seen batch{k * longest_ns, measured_ns, static_cast<uint8_t>(kind_of(k))};
  if (seen_.size() < memory_) {
    seen_.push_back(batch);
  } else {
    seen_[next_] = batch;
    next_ = (next_ + 1) % memory_;
  }
  // A fit costs as much as the batches that it looks at: as many come in between as are a sixteenth of them.
  if (seen_.size() < kLeastBatches || ++since_fit_ < seen_.size() / 16) return;
  since_fit_ = 0;
  fit(batch.x, told);
}

void BatchTimeModel::set_fixed(double c0_ns) {
  if (frozen_) return;
  c0_ns_ = c0_ns;
  if (!moved(published_c0_, c0_ns_)) return;
  published_c0_ = c0_ns_;
  ++version_;
}

void BatchTimeModel::rescale(double factor) {
  if (frozen_ || !(factor > 0) || !std::isfinite(factor)) return;
  seen_.clear();
  next_ = since_fit_ = 0;
  c0_ns_ *= factor;
  ++version_;
}

void BatchTimeModel::fit(double x, bool told) {
  if (!fit_line(told)) scale_line(told);
  if (!told) bound_fixed();
  bool bent = fit_factors();
  bent = fit_deviations(told) || bent;
  if (!bent && !moved(published_c0_ + published_c1_ * x, c0_ns_ + c1_ * x) && !moved(published_c1_, c1_))
    return;
  published_c0_ = c0_ns_;
  published_c1_ = c1_;
  ++version_;
}

// The line of the least sum of relative deviations, by least squares reweighted with them. False if the batches
// are too much alike for a line.
bool BatchTimeModel::fit_line(bool told) {
  double c0 = 0, c1 = 0;
  const double least_spread = told ? 1e-6 : 0.05;
  for (int round = 0; round < kRounds; ++round) {
    double n = 0, sx = 0, sxx = 0, sy = 0, sxy = 0;
    for (const Seen& each : seen_) {
      // The first round weighs all alike: a start from the last line would stay with the size that this line meets exactly.
      const double off = round == 0 ? 1 : std::abs(each.took_ns - c0 - c1 * each.x) / each.took_ns;
      const double weight = 1 / (each.took_ns * each.took_ns * std::max(off, 1e-4));
      n += weight;
      sx += weight * each.x;
      sxx += weight * each.x * each.x;
      sy += weight * each.took_ns;
      sxy += weight * each.x * each.took_ns;
    }
    const double spread = n * sxx - sx * sx;
    if (!(spread > least_spread * n * sxx)) return false;
    c1 = std::max(0.0, (n * sxy - sx * sy) / spread);
    if (!told) c1 = std::clamp(c1, first_c1_ / kInferredRange, first_c1_ * kInferredRange);
    c0 = (sy - c1 * sx) / n;
    if (c0 < 0) {  // through the origin
      c0 = 0;
      c1 = sxy / sxx;
    }
  }
  if (!std::isfinite(c0) || !std::isfinite(c1)) return false;
  c0_ns_ = c0;
  c1_ = c1;
  return true;
}

// All batches alike: one equation. Keeps the proportion of c0 to c1 and scales both. Where times are inferred, c1 keeps
// its range and c0 stays below what batches take, since a batch shorter than c0 tells nothing of its requests.
void BatchTimeModel::scale_line(bool told) {
  weights_.clear();
  for (const Seen& each : seen_) {
    const double predicted = c0_ns_ + c1_ * each.x;
    if (predicted > 0) weights_.push_back(each.took_ns / predicted);
  }
  if (weights_.empty()) return;
  double by = median(weights_);
  if (!told && c1_ > 0)
    by = std::clamp(by, first_c1_ / kInferredRange / c1_, first_c1_ * kInferredRange / c1_);
  c0_ns_ *= by;
  c1_ *= by;
  if (told) return;
  weights_.clear();
  for (const Seen& each : seen_) weights_.push_back(each.took_ns);
  c0_ns_ = std::min(c0_ns_, 0.75 * median(weights_));
}

// Inferred times: the fixed part is less than what the shortest batches took, however the line runs; a batch that is
// thought to be shorter than the fixed part would teach nothing of its requests.
void BatchTimeModel::bound_fixed() {
  constexpr double kMostFixed = 0.9;
  weights_.clear();
  for (const Seen& each : seen_) weights_.push_back(each.took_ns);
  const auto short_one = weights_.begin() + static_cast<ptrdiff_t>(weights_.size() / 20);
  std::nth_element(weights_.begin(), short_one, weights_.end());
  c0_ns_ = std::min(c0_ns_, kMostFixed * *short_one);
}

// By how much sizes deviate from the line: the median of their batches, drawn a little towards 1 while there are few.
bool BatchTimeModel::fit_factors() {
  bool bent = false, plain = true;
  std::array<uint16_t, kKinds> count_of{};
  for (const Seen& each : seen_) ++count_of[each.kind];
  for (size_t kind = 0; kind < kKinds; ++kind) {
    if (count_of[kind] < kLeastBatches) {
      plain = plain && factor_[kind] == 1;
      continue;
    }
    weights_.clear();
    for (const Seen& each : seen_)
      if (each.kind == kind) weights_.push_back(each.took_ns / std::max(c0_ns_ + c1_ * each.x, 1e-9));
    const auto count = static_cast<double>(weights_.size());
    const double off = median(weights_) - 1;
    const double factor = std::abs(off) < kLeastFactor
                              ? 1
                              : std::clamp(1 + off * count / (count + 1), 1 / kMostFactor, kMostFactor);
    bent = bent || moved(factor_[kind], factor);
    factor_[kind] = factor;
    plain = plain && factor == 1;
  }
  plain_ = plain;
  return bent;
}

// By how much single batches deviate from what the model says of them.
bool BatchTimeModel::fit_deviations(bool told) {
  if (!told) return false;
  weights_.clear();
  for (const Seen& each : seen_)
    weights_.push_back(each.took_ns /
                       std::max((plain_ ? 1 : factor_[each.kind]) * (c0_ns_ + c1_ * each.x), 1e-9));
  std::sort(weights_.begin(), weights_.end());
  std::array<double, kDeviations> ratios{};
  bool wide = false, changed = false;
  for (size_t i = 0; i < kDeviations; ++i) {
    ratios[i] = weights_[(2 * i + 1) * weights_.size() / (2 * kDeviations)];
    wide = wide || std::abs(ratios[i] - 1) > kLeastDeviation;
    changed = changed || deviations_.empty() || std::abs(ratios[i] - deviations_[i]) > kLeastDeviation;
  }
  if (!wide) {
    changed = !deviations_.empty();
    deviations_.clear();
  } else if (changed) {
    deviations_.assign(ratios.begin(), ratios.end());
  }
  return changed;
}

}  // namespace gpushare::sched::slo
