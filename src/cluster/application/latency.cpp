// SPDX-License-Identifier: Apache-2.0
#include "cluster/application/latency.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <tuple>

#include "cluster/solve/shares.hpp"

namespace gpushare::cluster::application {
namespace {

constexpr double kSaturated = 0.98;
constexpr int kMostSteps = 8;
constexpr double kMostWork = 1e7;

struct UnitRange {
  int64_t low = 1, high = 1;
};

std::vector<UnitRange> ranges_of(size_t services, const Division& division) {
  const int64_t most = division.capacity - int64_t(services) + 1;
  std::vector<UnitRange> ranges(services, {1, most});
  for (size_t s = 0; s < division.previous.size(); ++s) {
    ranges[s].low = std::max<int64_t>(1, division.previous[s] - division.max_step);
    ranges[s].high = std::min(most, division.previous[s] + division.max_step);
  }
  return ranges;
}

// Units that are left go one by one to the service that is busiest for the units it has, then to the smallest.
void give_rest(std::vector<int64_t>& units, const std::vector<double>& offered, int64_t capacity,
               const std::vector<UnitRange>& ranges) {
  int64_t rest = capacity - std::accumulate(units.begin(), units.end(), int64_t{0});
  std::priority_queue<std::tuple<double, int64_t, size_t>> next;
  const auto add = [&](size_t s) {
    if (units[s] < ranges[s].high) next.emplace(offered[s] / double(units[s]), -units[s], s);
  };
  for (size_t s = 0; s < units.size(); ++s) add(s);
  for (; rest > 0 && !next.empty(); --rest) {
    const size_t s = std::get<size_t>(next.top());
    next.pop();
    ++units[s];
    add(s);
  }
}

std::vector<int64_t> greatest_sum(const std::vector<ValueTable>& tables, int64_t capacity) {
  double entries = 0;
  for (const ValueTable& table : tables) entries += double(table.value.size());
  if (entries * double(capacity) <= kMostWork) return *maximise_sum(tables, capacity);
  return maximise_sum_by_hulls(tables, capacity)->units;
}

}  // namespace

std::vector<Moments> time_by_units(const Belief& belief, double load_rps, int64_t most, double round_s) {
  const double visits = belief.visits, work = belief.work_s;
  const double offered = load_rps * visits * work;  // units that are busy
  const double spread_square = std::max(0.0, 2 * belief.wait_factor - 1);
  std::vector<Moments> result;
  double blocked = 1;  // Erlang's B
  for (int64_t n = 1; n <= most; ++n) {
    const auto units = double(n);
    blocked = offered * blocked / (units + offered * blocked);
    const double busy = offered / units;
    Moments wait;
    double waits = 1, backlog = 0;
    if (busy <= kSaturated)
      waits = blocked / (1 - busy * (1 - blocked));  // Erlang's C
    else
      backlog = (busy - kSaturated) * round_s / 2;
    const double one =
        belief.wait_factor * work / (units * (1 - std::min(busy, kSaturated)));  // of who waits
    wait.mean = waits * one + backlog;
    wait.variance = waits * (2 - waits) * one * one + backlog * backlog / 3;  // a backlog grows evenly
    const double time = work + wait.mean;
    // Whether a request comes here at all varies, too.
    result.push_back({visits * time, visits * (spread_square * work * work + wait.variance) +
                                         std::max(0.0, visits * (1 - visits)) * time * time});
  }
  return result;
}

Moments end_to_end(const std::vector<Belief>& beliefs, double load_rps, const std::vector<int64_t>& units,
                   double round_s) {
  Moments sum;
  for (size_t s = 0; s < beliefs.size(); ++s) {
    const Moments time = time_by_units(beliefs[s], load_rps, units[s], round_s).back();
    sum.mean += time.mean;
    sum.variance += time.variance;
  }
  return sum;
}

std::vector<int64_t> divide(const std::vector<Belief>& beliefs, const Division& division) {
  const std::vector<UnitRange> ranges = ranges_of(beliefs.size(), division);
  std::vector<std::vector<Moments>> times;
  std::vector<double> offered;
  for (size_t s = 0; s < beliefs.size(); ++s) {
    times.push_back(time_by_units(beliefs[s], division.load_rps, ranges[s].high, division.round_s));
    offered.push_back(division.load_rps * beliefs[s].visits * beliefs[s].work_s);
  }
  std::vector<int64_t> best;
  double least = 0, weight = 0;
  for (int step = 0; step < kMostSteps; ++step) {
    std::vector<ValueTable> tables;
    for (size_t s = 0; s < beliefs.size(); ++s) {
      ValueTable& table = tables.emplace_back();
      table.low = ranges[s].low;
      for (int64_t n = ranges[s].low; n <= ranges[s].high; ++n) {
        const Moments& time = times[s][size_t(n - 1)];
        table.value.push_back(-(time.mean + weight * time.variance));
      }
    }
    const std::vector<int64_t> units = greatest_sum(tables, division.capacity);
    Moments sum;
    for (size_t s = 0; s < units.size(); ++s) {
      sum.mean += times[s][size_t(units[s] - 1)].mean;
      sum.variance += times[s][size_t(units[s] - 1)].variance;
    }
    const double deviation = std::sqrt(sum.variance);
    const double reached = sum.mean + division.tail * deviation;
    if (step > 0 && reached >= least) break;
    least = reached;
    best = units;
    if (deviation <= 0) break;
    weight = division.tail / (2 * deviation);
  }
  give_rest(best, offered, division.capacity, ranges);
  return best;
}

std::vector<int64_t> proportional_division(const std::vector<double>& weights, int64_t capacity) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const int64_t free = capacity - int64_t(weights.size());
  std::vector<int64_t> units;
  for (const double weight : weights)
    units.push_back(1 + (sum > 0 ? int64_t(std::floor(double(free) * weight / sum)) : 0));
  give_rest(units, weights, capacity, std::vector<UnitRange>(weights.size(), {1, capacity}));
  return units;
}

}  // namespace gpushare::cluster::application
