// SPDX-License-Identifier: Apache-2.0
#include "cluster/cilantro.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace gpushare::cluster {
namespace {

// A performance this close below the objective meets it: units / load is rounded.
constexpr double kSloTolerance = 1e-12;

bool meets(const UtilityJob& job, int64_t units) {
  return job.curve.at(double(units) / job.load) >= job.slo * (1 - kSloTolerance);
}

struct Limits {
  int64_t low = 0;
  int64_t high = 0;
};

base::Result<std::vector<Limits>> limits_of(const ShareProblem& problem) {
  std::vector<Limits> limits(problem.jobs.size(), Limits{0, problem.capacity});
  if (!problem.max_step || problem.previous.empty()) return limits;
  int64_t least = 0;
  for (size_t j = 0; j < limits.size(); ++j) {
    limits[j].low = std::max<int64_t>(0, problem.previous[j] - *problem.max_step);
    limits[j].high = std::min(problem.capacity, problem.previous[j] + *problem.max_step);
    least += limits[j].low;
  }
  if (least <= problem.capacity) return limits;
  return base::Status(GPUSHARE_INVALID_ARGUMENT,
                      base::format("previous: after one step of max_step %lld the jobs hold at least %lld "
                                   "units, and the capacity is %lld; raise max_step",
                                   static_cast<long long>(*problem.max_step), static_cast<long long>(least),
                                   static_cast<long long>(problem.capacity)));
}

// The job's utility at every number of units worth considering. Beyond the first that meets its objective none is better.
ValueTable table_of(const UtilityJob& job, Limits limits, int64_t capacity) {
  const int64_t demand = demand_units(job, capacity);
  int64_t top = limits.high;
  if (limits.low <= demand && demand <= capacity && meets(job, demand)) top = std::min(top, demand);
  if (!job.curve.logistic && !job.curve.points.empty()) {  // nor beyond the last point of the curve
    const double last = std::ceil(job.curve.points.back().first * job.load);
    if (last < double(top)) top = std::max<int64_t>(limits.low, int64_t(last) + 1);
    top = std::min(top, limits.high);
  }
  ValueTable table{limits.low, {}};
  for (int64_t units = limits.low; units <= std::max(top, limits.low); ++units)
    table.value.push_back(job.utility_at(double(units)));
  return table;
}

// The least whole units at which a curve of points meets the objective; if there are none, the least of the best
// performance, since a peak may be narrower than a unit. capacity + 1 if they are more than that.
int64_t demand_by_points(const UtilityJob& job, int64_t capacity) {
  const auto& points = job.curve.points;
  const auto units_at = [&](double x) { return std::min(x * job.load, double(capacity) + 1); };
  std::vector<int64_t> ends;  // the whole units next to each point: nothing between them is better
  for (const auto& [x, performance] : points)
    for (const double units : {std::floor(units_at(x)), std::ceil(units_at(x) * (1 - kSloTolerance))})
      ends.push_back(std::max<int64_t>(0, int64_t(units)));
  std::sort(ends.begin(), ends.end());
  int64_t before = 0;
  for (int64_t end : ends) {
    if (meets(job, end)) {
      while (end - before > 1) {  // it rises from there to here
        const int64_t middle = before + (end - before) / 2;
        (meets(job, middle) ? end : before) = middle;
      }
      return meets(job, before) ? before : end;
    }
    before = end;
  }
  const auto performance = [&](int64_t units) { return job.curve.at(double(units) / job.load); };
  int64_t best = 0;
  for (const int64_t end : ends)
    if (performance(end) > performance(best) * (1 + kSloTolerance)) best = end;
  return std::min(best, capacity + 1);
}

}  // namespace

int64_t demand_units(const UtilityJob& job, int64_t capacity) {
  if (!job.curve.logistic) return demand_by_points(job, capacity);
  const double per_load = job.curve.demand(job.slo);
  const double estimate = std::isinf(per_load) ? double(capacity) + 1 : std::floor(per_load * job.load);
  if (estimate > double(capacity)) return capacity + 1;
  auto units = std::max<int64_t>(0, int64_t(estimate) - 1);
  while (units <= capacity && !meets(job, units)) ++units;  // ends within two steps
  return units;
}

ShareResult judge_shares(const ShareProblem& problem, std::vector<int64_t> units) {
  ShareResult result;
  const size_t jobs = problem.jobs.size();
  const double fair = double(problem.capacity) / double(std::max<size_t>(jobs, 1));
  double sum = 0;
  double least = std::numeric_limits<double>::infinity();
  double ratio = std::numeric_limits<double>::infinity();
  for (size_t j = 0; j < jobs; ++j) {
    const UtilityJob& job = problem.jobs[j];
    const double utility = job.utility_at(double(units[j]));
    const double at_fair = job.utility_at(fair);
    sum += utility;
    least = std::min(least, utility);
    if (at_fair > 0) ratio = std::min(ratio, utility / at_fair);
    result.useful += double(std::min(units[j], demand_units(job, problem.capacity)));
  }
  result.units = std::move(units);
  result.welfare = jobs == 0 ? 0 : sum / double(jobs);
  result.egalitarian = jobs == 0 ? 0 : least;
  result.fairness = std::isinf(ratio) ? 1 : ratio;
  return result;
}

base::Result<ShareResult> divide_shares(const ShareProblem& problem, ShareObjective objective) {
  GPUSHARE_ASSIGN_OR_RETURN(const std::vector<Limits> limits, limits_of(problem));
  std::optional<std::vector<int64_t>> units;
  if (objective == ShareObjective::kNoJustifiedComplaints) {
    std::vector<Demand> demands;
    for (size_t j = 0; j < problem.jobs.size(); ++j)
      demands.push_back({demand_units(problem.jobs[j], problem.capacity), limits[j].low, limits[j].high});
    units = max_min_shares(demands, problem.capacity);
  } else {
    std::vector<ValueTable> tables;
    int64_t cells = 0;
    for (size_t j = 0; j < problem.jobs.size(); ++j) {
      cells += limits[j].high - limits[j].low + 1;
      if (cells <= kMaxTable) tables.push_back(table_of(problem.jobs[j], limits[j], problem.capacity));
    }
    if (cells > kMaxTable) {
      return base::Status(
          GPUSHARE_EXCEEDS_CAPACITY,
          base::format(
              "capacity: %zu jobs over %lld units are %lld values, more than the %lld that are searched; "
              "count in larger units, or give previous and max_step",
              problem.jobs.size(), static_cast<long long>(problem.capacity), static_cast<long long>(cells),
              static_cast<long long>(kMaxTable)));
    }
    if (objective == ShareObjective::kEgalitarianWelfare) {
      units = maximise_least(tables, problem.capacity);
      if (units) {  // what is left goes where it adds most utility, and takes no job below the least
        double least = std::numeric_limits<double>::infinity();
        for (size_t j = 0; j < tables.size(); ++j)
          least = std::min(least, tables[j].value[size_t((*units)[j] - tables[j].low)]);
        for (ValueTable& table : tables)
          for (double& value : table.value)
            if (value < least) value = -std::numeric_limits<double>::infinity();
        if (auto rest = maximise_sum_by_hulls(tables, problem.capacity)) units = std::move(rest->units);
      }
    } else {
      // The dynamic programme where its table is small enough, hulls beyond: their gap is below one job's utility.
      double work = 0;
      for (const ValueTable& table : tables) work += double(table.value.size()) * double(problem.capacity);
      if (work <= 2e9 && double(tables.size()) * double(problem.capacity) <= 2e8) {
        units = maximise_sum(tables, problem.capacity);
      } else if (auto hulls = maximise_sum_by_hulls(tables, problem.capacity)) {
        units = std::move(hulls->units);
      }
    }
  }
  if (!units) return base::Status(GPUSHARE_INTERNAL, "no allocation within the capacity");
  return judge_shares(problem, std::move(*units));
}

}  // namespace gpushare::cluster
