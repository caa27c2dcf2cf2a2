// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/batch_time.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::sched::slo {

BatchTimeModel::BatchTimeModel(double c0_ns, double c1, double memory)
    : c0_ns_(std::max(c0_ns, 0.0)),
      c1_(std::max(c1, 0.0)),
      keep_(1 - 1 / std::max(memory, 2.0)),
      published_c0_(c0_ns_),
      published_c1_(c1_) {}

void BatchTimeModel::observe(unsigned k, double longest_ns, double measured_ns, double least_spread) {
  if (frozen_ || k == 0 || !(longest_ns > 0) || !(measured_ns > 0) || !std::isfinite(longest_ns) ||
      !std::isfinite(measured_ns))
    return;
  const double x = k * longest_ns;
  n_ = n_ * keep_ + 1;
  x_ = x_ * keep_ + x;
  xx_ = xx_ * keep_ + x * x;
  y_ = y_ * keep_ + measured_ns;
  xy_ = xy_ * keep_ + x * measured_ns;
  if (++seen_ < 8) return;
  const double spread = n_ * xx_ - x_ * x_;
  if (spread > least_spread * n_ * xx_) {
    c1_ = std::max(0.0, (n_ * xy_ - x_ * y_) / spread);
    c0_ns_ = (y_ - c1_ * x_) / n_;
    if (c0_ns_ < 0) {  // through the origin
      c0_ns_ = 0;
      c1_ = xy_ / xx_;
    }
  } else {
    // All batches alike: one equation. Keep the proportion of c0 to c1 and scale both.
    const double predicted = c0_ns_ * n_ + c1_ * x_;
    if (predicted > 0) {
      c0_ns_ *= y_ / predicted;
      c1_ *= y_ / predicted;
    }
  }
  const auto moved = [](double from, double to) {
    return std::abs(to - from) > 1e-3 * std::max(std::abs(from), 1e-12);
  };
  if (moved(published_c0_ + published_c1_ * x, c0_ns_ + c1_ * x) || moved(published_c1_, c1_)) {
    published_c0_ = c0_ns_;
    published_c1_ = c1_;
    ++version_;
  }
}

}  // namespace gpushare::sched::slo
