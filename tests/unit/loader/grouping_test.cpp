// The grouping plan against brute force over all 2^(n-1) groupings, and against a feasibility test that
// shares nothing with it. SPDX-License-Identifier: Apache-2.0
#include "loader/grouping.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using loader::Grouping;
using loader::GroupingCosts;
using loader::LayerCost;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Instance {
  std::vector<LayerCost> layers;
  GroupingCosts costs;
};

// Whole-number times in double: sums are exact, so equality can be exact.
Instance random_instance(test::Random& random, size_t most) {
  Instance instance;
  const size_t n = test::uniform(random, 1, most);
  const uint64_t scale_send = test::uniform(random, 1, 30), scale_run = test::uniform(random, 1, 30);
  for (size_t i = 0; i < n; ++i)
    instance.layers.push_back({test::uniform(random, 0, 100),
                               static_cast<double>(test::uniform(random, 0, scale_send)),
                               static_cast<double>(test::uniform(random, 0, scale_run))});
  instance.costs.call_overhead_ms = static_cast<double>(test::uniform(random, 0, 8));
  instance.costs.group_overhead_ms = static_cast<double>(test::uniform(random, 0, 8));
  if (test::uniform(random, 0, 2) == 0)
    instance.costs.link_busy_ms = static_cast<double>(test::uniform(random, 0, 60));
  if (test::uniform(random, 0, 2) == 0)
    instance.costs.lane_busy_ms = static_cast<double>(test::uniform(random, 0, 60));
  if (test::uniform(random, 0, 2) == 0)
    instance.costs.resident_layers = static_cast<uint32_t>(test::uniform(random, 0, n));
  if (test::uniform(random, 0, 2) == 0) instance.costs.group_cap_bytes = test::uniform(random, 50, 300);
  return instance;
}

bool within_cap(const Instance& instance, const std::vector<uint32_t>& ends) {
  uint32_t begin = instance.costs.resident_layers;
  for (const uint32_t end : ends) {
    uint64_t bytes = 0;
    for (uint32_t i = begin; i < end; ++i) bytes += instance.layers[i].bytes;
    if (instance.costs.group_cap_bytes > 0 && bytes > instance.costs.group_cap_bytes && end - begin > 1)
      return false;
    begin = end;
  }
  return true;
}

double brute_force(const Instance& instance) {
  const uint32_t first = instance.costs.resident_layers;
  const auto n = static_cast<uint32_t>(instance.layers.size());
  if (first == n) return *loader::grouping_makespan_ms(instance.layers, instance.costs, {});
  double best = kInfinity;
  for (uint64_t cuts = 0; cuts < (1ull << (n - first - 1)); ++cuts) {
    std::vector<uint32_t> ends;
    for (uint32_t i = first; i + 1 < n; ++i)
      if ((cuts >> (i - first)) & 1) ends.push_back(i + 1);
    ends.push_back(n);
    if (within_cap(instance, ends))
      best = std::min(best, *loader::grouping_makespan_ms(instance.layers, instance.costs, ends));
  }
  return best;
}

// Can everything be done by `limit`? Walks back from the end: earliest[m] of the last m groups, by plain
// search over states (first layer of the suffix, groups in it) and the latest moment the suffix may start
// executing. Independent of the recurrence: it never computes a makespan.
bool feasible(const Instance& instance, double limit) {
  const uint32_t first = instance.costs.resident_layers;
  const auto n = static_cast<uint32_t>(instance.layers.size());
  double start = instance.costs.lane_busy_ms;
  if (first > 0) start += instance.costs.group_overhead_ms;
  for (uint32_t i = 0; i < first; ++i) start += instance.layers[i].execute_ms;
  if (first == n) return start <= limit;
  std::vector<double> sent(n + 1, instance.costs.link_busy_ms);
  for (uint32_t i = first; i < n; ++i) sent[i + 1] = sent[i] + instance.layers[i].transmit_ms;
  // For each total number of groups k: latest[i] with g groups before i = latest moment at which layer i..
  // may start.
  for (uint32_t k = 1; k <= n - first; ++k) {
    std::vector<double> latest(n + 1, -kInfinity), earlier(n + 1, -kInfinity);
    latest[n] = limit;
    for (uint32_t g = k; g >= 1; --g) {
      std::fill(earlier.begin(), earlier.end(), -kInfinity);
      for (uint32_t end = first + 1; end <= n; ++end) {
        if (latest[end] == -kInfinity) continue;
        double execute = instance.costs.group_overhead_ms;
        uint64_t bytes = 0;
        for (uint32_t begin = end; begin-- > first;) {
          execute += instance.layers[begin].execute_ms;
          bytes += instance.layers[begin].bytes;
          if (instance.costs.group_cap_bytes > 0 && bytes > instance.costs.group_cap_bytes && end - begin > 1)
            break;
          const double moment = latest[end] - execute;
          if (sent[end] + g * instance.costs.call_overhead_ms <= moment)
            earlier[begin] = std::max(earlier[begin], moment);
        }
      }
      latest.swap(earlier);
    }
    if (latest[first] >= start) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("the plan equals brute force on random instances of up to 12 layers") {
  const uint64_t seed = test::seed();
  INFO("seed " << seed);
  test::Random random(seed);
  for (int round = 0; round < 20'000; ++round) {
    const Instance instance = random_instance(random, round % 10 == 0 ? 12 : 8);
    const auto plan = loader::plan_groups(instance.layers, instance.costs);
    REQUIRE(plan.ok());
    const double best = brute_force(instance);
    if (plan->makespan_ms != best || !within_cap(instance, plan->ends)) {
      INFO("round " << round);
      CHECK(plan->makespan_ms == best);
      REQUIRE(within_cap(instance, plan->ends));
    }
  }
}

TEST_CASE(
    "the plan is feasible and nothing earlier is, by an independent test, on instances too large for brute "
    "force") {
  const uint64_t seed = test::seed() + 1;
  INFO("seed " << seed);
  test::Random random(seed);
  for (int round = 0; round < 200; ++round) {
    const Instance instance = random_instance(random, 40);
    const auto plan = loader::plan_groups(instance.layers, instance.costs);
    REQUIRE(plan.ok());
    INFO("round " << round);
    REQUIRE(feasible(instance, plan->makespan_ms));
    REQUIRE_FALSE(feasible(instance, plan->makespan_ms - 1));
  }
}

TEST_CASE(
    "the plan is never worse than one shot, per layer, or any uniform grouping, and never beats the bound") {
  test::Random random(test::seed() + 2);
  for (int round = 0; round < 300; ++round) {
    Instance instance = random_instance(random, 200);
    instance.costs.group_cap_bytes = 0;
    const auto plan = loader::plan_groups(instance.layers, instance.costs);
    REQUIRE(plan.ok());
    const size_t n = instance.layers.size();
    const auto makespan = [&](const std::vector<uint32_t>& ends) {
      return *loader::grouping_makespan_ms(instance.layers, instance.costs, ends);
    };
    CHECK(plan->makespan_ms <= makespan(loader::one_shot_groups(n, instance.costs.resident_layers)));
    CHECK(plan->makespan_ms <= makespan(loader::per_layer_groups(n, instance.costs.resident_layers)));
    CHECK(plan->makespan_ms <= makespan(*loader::best_uniform_groups(instance.layers, instance.costs)));
    CHECK(plan->makespan_ms >= loader::makespan_lower_bound_ms(instance.layers, instance.costs));
  }
}

TEST_CASE("bad costs are refused by name") {
  std::vector<LayerCost> layers(3, LayerCost{1, 1.0, 1.0});
  GroupingCosts costs;
  costs.resident_layers = 4;
  CHECK(loader::plan_groups(layers, costs).status().code() == GPUSHARE_INVALID_ARGUMENT);
  costs.resident_layers = 0;
  layers[1].execute_ms = -1;
  const auto plan = loader::plan_groups(layers, costs);
  CHECK(plan.status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(plan.status().message().find("layer 1") != std::string::npos);
  layers[1].execute_ms = 1;
  costs.call_overhead_ms = kInfinity;
  CHECK_FALSE(loader::plan_groups(layers, costs).ok());
  CHECK_FALSE(loader::grouping_makespan_ms(layers, GroupingCosts{}, std::vector<uint32_t>{2, 2, 3}).ok());
  CHECK_FALSE(loader::grouping_makespan_ms(layers, GroupingCosts{}, std::vector<uint32_t>{2}).ok());
  CHECK(loader::plan_groups({}, GroupingCosts{})->makespan_ms == 0);
}
