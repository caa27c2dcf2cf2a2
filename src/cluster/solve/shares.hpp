// src/cluster/solve: exact and anytime solvers without knowledge of any system; src/cluster's systems call them. No
// thread, no clock.
//
// shares.hpp: dividing whole units of one resource among jobs, each with a table of its value at every number of units.
// Values need not be concave or monotone. Used by Cilantro (shares) and Ekya (retraining), whose sources use hill
// climbing where these are exact.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace gpushare::cluster {

// value[k] is the worth of low + k units to one job; minus infinity forbids that number. The job gets at most low +
// value.size() - 1.
struct ValueTable {
  int64_t low = 0;
  std::vector<double> value;
};

// The allocation of at most `capacity` units with the greatest sum of values, with the fewest units where several have
// it. Empty if the least units of all exceed the capacity. Dynamic programme over units: O(sum of table sizes x
// capacity) time, O(jobs x capacity) bytes.
std::optional<std::vector<int64_t>> maximise_sum(const std::vector<ValueTable>& tables, int64_t capacity);

// The same by upper concave hulls: each step of the steepest hull that is left is taken while it fits. Fast, and at
// most one step's value below `bound`, which no allocation exceeds.
struct HullAllocation {
  std::vector<int64_t> units;
  double value = 0;
  double bound = 0;
};
std::optional<HullAllocation> maximise_sum_by_hulls(const std::vector<ValueTable>& tables, int64_t capacity);

// The allocation whose least value is greatest, each job with the fewest units that reach it. Exact: bisection until no
// number lies between the value reached and one that cannot be.
std::optional<std::vector<int64_t>> maximise_least(const std::vector<ValueTable>& tables, int64_t capacity);

// Max-min fair shares (water-filling): every job gets min(demand, level), moved into [low, high]; units that do not
// divide go to earlier jobs. Empty if the sum of lows exceeds the capacity.
struct Demand {
  int64_t units = 0;
  int64_t low = 0;
  int64_t high = INT64_MAX;
};
std::optional<std::vector<int64_t>> max_min_shares(const std::vector<Demand>& demands, int64_t capacity);

}  // namespace gpushare::cluster
