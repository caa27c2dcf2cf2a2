// curve.hpp: the performance of a utility job as a function of the units that it holds per unit of load, and the
// utility that its user draws from that performance. Plain values; no locks, no allocation after construction. Used by
// cilantro.hpp and the learners.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace gpushare::cluster {

// How utility falls below the service level objective (Cilantro, section 3.4.1): (min(p, slo) / slo) to the power 1, 0.5 or 2.
enum class UtilityShape { kLinear, kSqrt, kQuadratic };

double utility_of(UtilityShape shape, double performance, double slo);

// Either points or a logistic function.
struct PerformanceCurve {
  // (units per unit of load, performance), ascending in the first. Linear between points, constant beyond the last, 0
  // below the first. Performance need not be monotone.
  std::vector<std::pair<double, double>> points;
  bool logistic = false;
  double offset = 0;  // logistic: 1 / (1 + exp(-(units per load - offset)))

  double at(double units_per_load) const;
  // The least units per unit of load that reach `performance`; infinity if none does.
  double demand(double performance) const;
};

}  // namespace gpushare::cluster
