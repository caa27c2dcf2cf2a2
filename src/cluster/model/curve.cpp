// SPDX-License-Identifier: Apache-2.0
#include "cluster/model/curve.hpp"

#include <algorithm>
#include <cmath>

#include "cluster/never.hpp"

namespace gpushare::cluster {

double utility_of(UtilityShape shape, double performance, double slo) {
  const double ratio = std::clamp(performance, 0.0, slo) / slo;
  switch (shape) {
    case UtilityShape::kLinear:
      return ratio;
    case UtilityShape::kSqrt:
      return std::sqrt(ratio);
    case UtilityShape::kQuadratic:
      return ratio * ratio;
  }
  return ratio;
}

double PerformanceCurve::at(double units_per_load) const {
  if (logistic) return 1 / (1 + std::exp(-(units_per_load - offset)));
  if (points.empty() || units_per_load < points.front().first) return 0;
  const auto above = std::upper_bound(points.begin(), points.end(), units_per_load,
                                      [](double x, const auto& point) { return x < point.first; });
  if (above == points.end()) return points.back().second;
  const auto below = above - 1;
  const double part = (units_per_load - below->first) / (above->first - below->first);
  return below->second + part * (above->second - below->second);
}

double PerformanceCurve::demand(double performance) const {
  if (performance <= 0) return 0;
  if (logistic) {
    return performance >= 1 ? kNever : std::max(0.0, offset + std::log(performance / (1 - performance)));
  }
  if (points.empty()) return kNever;
  if (points.front().second >= performance) return std::max(0.0, points.front().first);
  for (size_t i = 1; i < points.size(); ++i) {
    const auto& [x0, p0] = points[i - 1];
    const auto& [x1, p1] = points[i];
    if (p1 >= performance) return x0 + (x1 - x0) * (performance - p0) / (p1 - p0);
  }
  return kNever;
}

}  // namespace gpushare::cluster
