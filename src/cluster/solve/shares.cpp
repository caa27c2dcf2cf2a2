// SPDX-License-Identifier: Apache-2.0
#include "cluster/solve/shares.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>

namespace gpushare::cluster {
namespace {

constexpr double kImpossible = -std::numeric_limits<double>::infinity();

// Units left when every job has its least; negative if that is already too much.
int64_t above_lows(const std::vector<ValueTable>& tables, int64_t capacity) {
  for (const ValueTable& table : tables) capacity -= table.low;
  return capacity;
}

// Numbers of units at which the least concave function above a table bends, as indices into it.
std::vector<size_t> hull_of(const ValueTable& table) {
  std::vector<size_t> hull;
  const auto& v = table.value;
  for (size_t k = 0; k < v.size(); ++k) {
    if (v[k] == kImpossible) continue;
    if (!hull.empty() && v[k] <= v[hull.back()]) continue;  // more units for no more value
    while (hull.size() >= 2) {
      const size_t a = hull[hull.size() - 2];
      const size_t b = hull.back();
      // Points on a line stay: smaller steps fit more often. The tolerance is that of the subtraction.
      const double before = (v[b] - v[a]) * double(k - b);
      if (before >= (v[k] - v[b]) * double(b - a) - 1e-12 * std::abs(before)) break;
      hull.pop_back();
    }
    hull.push_back(k);
  }
  return hull;
}

}  // namespace

std::optional<std::vector<int64_t>> maximise_sum(const std::vector<ValueTable>& tables, int64_t capacity) {
  const int64_t extra = above_lows(tables, capacity);
  if (extra < 0) return std::nullopt;
  // best[c]: the greatest sum of the jobs so far with at most c units above their lows. Beyond `reach` more units change nothing.
  std::vector<double> best{0};
  std::vector<double> next;
  std::vector<std::vector<uint32_t>> choice(tables.size());
  int64_t reach = 0;
  for (size_t j = 0; j < tables.size(); ++j) {
    const auto& value = tables[j].value;
    const int64_t before = reach;
    reach = std::min(extra, reach + int64_t(value.size()) - 1);
    next.assign(size_t(reach) + 1, kImpossible);
    choice[j].assign(size_t(reach) + 1, 0);
    double* const to = next.data();
    uint32_t* const chosen = choice[j].data();
    double greatest = kImpossible;  // more units for no more value are never chosen
    for (int64_t k = 0; k < int64_t(value.size()) && k <= reach; ++k) {
      const double gain = value[size_t(k)];
      if (gain <= greatest) continue;
      greatest = gain;
      for (int64_t c = k; c <= reach; ++c) {
        const double sum = best[size_t(std::min(c - k, before))] + gain;
        if (sum > to[c]) {
          to[c] = sum;
          chosen[c] = uint32_t(k);
        }
      }
    }
    best.swap(next);
  }
  if (best[size_t(reach)] == kImpossible) return std::nullopt;
  // The fewest units with the greatest sum: the first c that has it.
  int64_t left = std::find(best.begin(), best.end(), best[size_t(reach)]) - best.begin();
  std::vector<int64_t> units(tables.size());
  for (size_t j = tables.size(); j-- > 0;) {
    const int64_t k = choice[j][size_t(std::min(left, int64_t(choice[j].size()) - 1))];
    units[j] = tables[j].low + k;
    left -= k;
  }
  return units;
}

std::optional<HullAllocation> maximise_sum_by_hulls(const std::vector<ValueTable>& tables, int64_t capacity) {
  int64_t left = above_lows(tables, capacity);
  if (left < 0) return std::nullopt;
  struct Step {
    double slope;
    size_t job;
    size_t bend;  // index into the job's hull of the step's end
    bool operator<(const Step& other) const {
      return slope != other.slope ? slope < other.slope : job > other.job;
    }
  };
  HullAllocation result;
  std::vector<std::vector<size_t>> hulls;
  std::priority_queue<Step> steps;
  const auto push = [&](size_t job, size_t bend) {
    const auto& hull = hulls[job];
    if (bend >= hull.size()) return;
    const auto& v = tables[job].value;
    steps.push({(v[hull[bend]] - v[hull[bend - 1]]) / double(hull[bend] - hull[bend - 1]), job, bend});
  };
  for (size_t j = 0; j < tables.size(); ++j) {
    hulls.push_back(hull_of(tables[j]));
    if (hulls[j].empty()) return std::nullopt;
    left -= int64_t(hulls[j].front());
    result.units.push_back(tables[j].low + int64_t(hulls[j].front()));
    result.value += tables[j].value[hulls[j].front()];
  }
  if (left < 0) return std::nullopt;
  for (size_t j = 0; j < tables.size(); ++j) push(j, 1);
  result.bound = result.value;
  int64_t for_bound = left;
  while (!steps.empty()) {
    const Step step = steps.top();
    steps.pop();
    const auto& hull = hulls[step.job];
    const auto size = int64_t(hull[step.bend] - hull[step.bend - 1]);
    result.bound += step.slope * double(std::min(size, for_bound));
    for_bound -= std::min(size, for_bound);
    if (size > left) {
      if (for_bound == 0 && left == 0) break;
      continue;  // this job takes no further step; a smaller one of another job may still fit
    }
    left -= size;
    result.units[step.job] += size;
    result.value += step.slope * double(size);
    push(step.job, step.bend + 1);
  }
  return result;
}

std::optional<std::vector<int64_t>> maximise_least(const std::vector<ValueTable>& tables, int64_t capacity) {
  if (above_lows(tables, capacity) < 0) return std::nullopt;
  std::vector<std::vector<double>> reached(tables.size());  // greatest value with at most k units
  double most = std::numeric_limits<double>::infinity();
  for (size_t j = 0; j < tables.size(); ++j) {
    double greatest = kImpossible;
    for (double value : tables[j].value) reached[j].push_back(greatest = std::max(greatest, value));
    most = std::min(most, greatest);
  }
  if (tables.empty()) return std::vector<int64_t>{};
  std::vector<int64_t> units(tables.size());
  const auto feasible = [&](double level) {
    int64_t sum = 0;
    for (size_t j = 0; j < tables.size(); ++j) {
      const auto first = std::lower_bound(reached[j].begin(), reached[j].end(), level);
      if (first == reached[j].end()) return false;
      units[j] = tables[j].low + (first - reached[j].begin());
      sum += units[j];
      if (sum > capacity) return false;
    }
    return true;
  };
  const auto least = [&] {
    double value = std::numeric_limits<double>::infinity();
    for (size_t j = 0; j < tables.size(); ++j)
      value = std::min(value, reached[j][size_t(units[j] - tables[j].low)]);
    return value;
  };
  if (!(most > kImpossible)) return std::nullopt;
  if (feasible(most)) return units;
  double low = std::numeric_limits<double>::infinity();  // a level that is reached
  for (const auto& values : reached)
    for (double value : values)
      if (value > kImpossible) {
        low = std::min(low, value);
        break;
      }
  if (!feasible(low)) return std::nullopt;
  low = least();
  double high = most;  // a level that is not
  while (std::nextafter(low, high) < high) {
    double middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) middle = std::nextafter(low, high);
    if (feasible(middle))
      low = least();
    else
      high = middle;
  }
  feasible(low);
  return units;
}

std::optional<std::vector<int64_t>> max_min_shares(const std::vector<Demand>& demands, int64_t capacity) {
  const auto at = [&](const Demand& demand, int64_t level) {
    return std::clamp(std::min(demand.units, level), demand.low, std::max(demand.low, demand.high));
  };
  const auto sum_at = [&](int64_t level) {
    int64_t sum = 0;
    for (const Demand& demand : demands) {
      sum += at(demand, level);
      if (sum > capacity) break;
    }
    return sum;
  };
  if (sum_at(0) > capacity) return std::nullopt;
  int64_t low = 0;              // a level that fits
  int64_t high = capacity + 1;  // a level that does not, or beyond which nothing changes
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (sum_at(middle) <= capacity ? low : high) = middle;
  }
  int64_t left = capacity;
  std::vector<int64_t> units;
  for (const Demand& demand : demands) {
    units.push_back(at(demand, low));
    left -= units.back();
  }
  for (size_t j = 0; j < demands.size() && left > 0; ++j) {
    const int64_t more = at(demands[j], low + 1) - units[j];
    units[j] += std::min(more, left);
    left -= std::min(more, left);
  }
  return units;
}

}  // namespace gpushare::cluster
