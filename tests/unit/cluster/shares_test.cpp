// The share solvers against brute force on small random instances, values neither concave nor monotone.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/solve/shares.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace gpushare::cluster {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

std::vector<ValueTable> random_tables(test::Random& random) {
  std::vector<ValueTable> tables(test::uniform(random, 1, 4));
  for (ValueTable& table : tables) {
    table.low = int64_t(test::uniform(random, 0, 2));
    for (size_t k = test::uniform(random, 1, 6); k-- > 0;)
      table.value.push_back(test::uniform(random, 0, 9) == 0 ? kNever
                                                             : double(test::uniform(random, 0, 20)) / 4);
  }
  return tables;
}

// Calls visit with every allocation within the capacity that no table forbids.
void each_allocation(const std::vector<ValueTable>& tables, int64_t capacity,
                     const std::function<void(const std::vector<int64_t>&)>& visit) {
  std::vector<int64_t> units(tables.size());
  const std::function<void(size_t, int64_t)> at = [&](size_t job, int64_t left) {
    if (job == tables.size()) return visit(units);
    for (size_t k = 0; k < tables[job].value.size(); ++k) {
      units[job] = tables[job].low + int64_t(k);
      if (units[job] <= left && tables[job].value[k] > kNever) at(job + 1, left - units[job]);
    }
  };
  at(0, capacity);
}

double sum_of(const std::vector<ValueTable>& tables, const std::vector<int64_t>& units) {
  double sum = 0;
  for (size_t j = 0; j < tables.size(); ++j) sum += tables[j].value[size_t(units[j] - tables[j].low)];
  return sum;
}

double least_of(const std::vector<ValueTable>& tables, const std::vector<int64_t>& units) {
  double least = std::numeric_limits<double>::infinity();
  for (size_t j = 0; j < tables.size(); ++j)
    least = std::min(least, tables[j].value[size_t(units[j] - tables[j].low)]);
  return least;
}

int64_t total(const std::vector<int64_t>& units) {
  return std::accumulate(units.begin(), units.end(), int64_t(0));
}

}  // namespace

TEST_CASE("share solvers agree with brute force") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  for (int round = 0; round < 5000; ++round) {
    const auto tables = random_tables(random);
    const auto capacity = int64_t(test::uniform(random, 0, 14));
    double best_sum = kNever;
    double best_least = kNever;
    int64_t fewest = 0;
    each_allocation(tables, capacity, [&](const std::vector<int64_t>& units) {
      const double sum = sum_of(tables, units);
      if (sum > best_sum || (sum == best_sum && total(units) < fewest)) fewest = total(units);
      best_sum = std::max(best_sum, sum);
      best_least = std::max(best_least, least_of(tables, units));
    });
    const auto most = maximise_sum(tables, capacity);
    const auto hulls = maximise_sum_by_hulls(tables, capacity);
    const auto least = maximise_least(tables, capacity);
    if (most.has_value() != (best_sum > kNever) || least.has_value() != (best_least > kNever)) {
      FAIL("feasibility differs in round " << round);
    }
    if (hulls && !most) FAIL("the hulls found what does not exist, round " << round);
    if (!most) continue;
    if (sum_of(tables, *most) != best_sum || total(*most) != fewest) FAIL("sum differs in round " << round);
    if (least_of(tables, *least) != best_least || total(*least) > capacity)
      FAIL("least differs in round " << round);
    if (!hulls) continue;
    if (hulls->bound < best_sum - 1e-9 || std::abs(sum_of(tables, hulls->units) - hulls->value) > 1e-9 ||
        hulls->value > best_sum + 1e-9 || total(hulls->units) > capacity) {
      FAIL("hulls are wrong in round " << round);
    }
  }
}

TEST_CASE("concave tables: the hulls' distance is below one step's value") {
  test::Random random(test::seed());
  for (int round = 0; round < 1000; ++round) {
    std::vector<ValueTable> tables(test::uniform(random, 1, 6));
    double largest = 0;
    for (ValueTable& table : tables) {
      double value = 0;
      double slope = 8;
      for (int k = 0; k < 12; ++k) {
        table.value.push_back(value);
        value += slope *= double(test::uniform(random, 50, 100)) / 100;
        largest = std::max(largest, slope);
      }
    }
    const auto capacity = int64_t(test::uniform(random, 0, 60));
    const auto hulls = maximise_sum_by_hulls(tables, capacity);
    const auto exact = maximise_sum(tables, capacity);
    if (hulls->bound - hulls->value > 1e-9 || std::abs(sum_of(tables, *exact) - hulls->value) > 1e-9)
      FAIL("hulls are not exact on concave values in round " << round);
  }
}

TEST_CASE("max-min shares are the published rounds in whole units") {
  // Whole demands: give demands below the equal share, divide what is left by the rest, until none is below (Cilantro, 3.4.1).
  test::Random random(test::seed());
  for (int round = 0; round < 5000; ++round) {
    std::vector<Demand> demands(test::uniform(random, 1, 6));
    for (Demand& demand : demands) demand.units = int64_t(test::uniform(random, 0, 12));
    const auto capacity = int64_t(test::uniform(random, 0, 40));
    std::vector<int64_t> expected(demands.size(), -1);
    int64_t left = capacity;
    auto waiting = int64_t(demands.size());
    for (bool more = true; more && waiting > 0;) {
      more = false;
      const int64_t before = left;
      const int64_t sharers = waiting;
      for (size_t j = 0; j < demands.size(); ++j) {
        if (expected[j] >= 0 || demands[j].units * sharers > before) continue;
        expected[j] = demands[j].units;
        left -= demands[j].units;
        --waiting;
        more = true;
      }
    }
    int64_t remainder = waiting > 0 ? left % waiting : 0;
    for (int64_t& units : expected) {
      if (units >= 0) continue;
      units = left / waiting + (remainder-- > 0 ? 1 : 0);
    }
    if (*max_min_shares(demands, capacity) != expected) FAIL("shares differ in round " << round);
  }
}

TEST_CASE("max-min shares within steps") {
  CHECK(*max_min_shares({{10, 0, 3}, {10, 4, 9}}, 9) == std::vector<int64_t>{3, 6});
  CHECK(*max_min_shares({{0, 2, 5}, {9, 0, 9}}, 5) == std::vector<int64_t>{2, 3});
  CHECK_FALSE(max_min_shares({{0, 2, 5}, {9, 4, 9}}, 5).has_value());
  CHECK(max_min_shares({}, 5)->empty());
}

}  // namespace gpushare::cluster
