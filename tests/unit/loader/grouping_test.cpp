// The grouping plan against brute force over all 2^(n-1) groupings, and against a feasibility test that
// shares nothing with it.
// SPDX-License-Identifier: Apache-2.0
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
  for (uint32_t i = 0; i < first; ++i) start += instance.layers[i].execution_ms;
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
          execute += instance.layers[begin].execution_ms;
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

TEST_CASE("the search of very large models is bounded, and says so when it was cut short") {
  test::Random random(test::seed() + 3);
  Instance instance;
  for (size_t i = 0; i < 40'000; ++i) {
    const auto time = static_cast<double>(test::uniform(random, 1, 100));
    instance.layers.push_back({1, time, time});
  }
  // Without overheads nothing beats a group a layer: no search.
  auto plan = loader::plan_groups(instance.layers, instance.costs);
  REQUIRE(plan.ok());
  CHECK(plan->is_optimal);
  CHECK(plan->ends == loader::per_layer_groups(instance.layers.size(), 0));
  // Overheads so small that more groups than are searched would gain a little.
  instance.costs.call_overhead_ms = instance.costs.group_overhead_ms = 0.0001;
  plan = loader::plan_groups(instance.layers, instance.costs);
  REQUIRE(plan.ok());
  CHECK_FALSE(plan->is_optimal);
  CHECK(plan->makespan_ms <= 1.001 * loader::makespan_lower_bound_ms(instance.layers, instance.costs));
  // Ordinary overheads: the optimum is found long before.
  instance.costs.call_overhead_ms = instance.costs.group_overhead_ms = 1000;
  plan = loader::plan_groups(instance.layers, instance.costs);
  REQUIRE(plan.ok());
  CHECK(plan->is_optimal);
  const auto uniform = loader::best_uniform_groups(instance.layers, instance.costs);
  REQUIRE(uniform.ok());
  CHECK(plan->makespan_ms <=
        *loader::grouping_makespan_ms(instance.layers, instance.costs, *uniform) * (1 + 1e-9));
}

TEST_CASE("the best uniform groups may be one for each layer, or one for all") {
  const std::vector<LayerCost> layers(3, LayerCost{1, 4.0, 4.0});
  GroupingCosts costs;
  CHECK(*loader::best_uniform_groups(layers, costs) == std::vector<uint32_t>{1, 2, 3});
  costs.call_overhead_ms = 100;
  CHECK(*loader::best_uniform_groups(layers, costs) == std::vector<uint32_t>{3});
  costs.resident_layers = 1;
  CHECK(*loader::best_uniform_groups(layers, costs) == std::vector<uint32_t>{3});
}

TEST_CASE("bad costs are refused by name") {
  std::vector<LayerCost> layers(3, LayerCost{1, 1.0, 1.0});
  GroupingCosts costs;
  costs.resident_layers = 4;
  CHECK(loader::plan_groups(layers, costs).status().code() == GPUSHARE_INVALID_ARGUMENT);
  costs.resident_layers = 0;
  layers[1].execution_ms = -1;
  const auto plan = loader::plan_groups(layers, costs);
  CHECK(plan.status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(plan.status().message().find("layer 1") != std::string::npos);
  layers[1].execution_ms = 1;
  costs.call_overhead_ms = kInfinity;
  CHECK_FALSE(loader::plan_groups(layers, costs).ok());
  CHECK_FALSE(loader::grouping_makespan_ms(layers, GroupingCosts{}, std::vector<uint32_t>{2, 2, 3}).ok());
  CHECK_FALSE(loader::grouping_makespan_ms(layers, GroupingCosts{}, std::vector<uint32_t>{2}).ok());
  CHECK(loader::plan_groups({}, GroupingCosts{})->makespan_ms == 0);
}

namespace {

// PipeSwitch's own search (Bai et al., OSDI 2020, algorithm 1) with both prunings: exponential in the worst
// case. T(x, i) counts one call's overhead; B.delay is what the lane is still busy with when the link is
// free.
class PipeSwitchSearch {
 public:
  PipeSwitchSearch(const std::vector<LayerCost>& layers, double call_ms, double group_ms)
      : layers_(layers), call_ms_(call_ms), group_ms_(group_ms) {}

  // Time until the last layer is done, from when the link is free for layer `x`.
  double best_from(size_t x, double delay) {
    ++calls_;
    const size_t n = layers_.size();
    if (x == n) return delay;
    size_t first = x;
    for (size_t i = x; i < n && transmit(x, i + 1) <= delay; ++i) first = i;
    double best = kInfinity;
    for (size_t i = first; i < n; ++i) {
      const double sent = transmit(x, i + 1);
      if (best < kInfinity) {
        const double all_sent = sent + (i + 1 < n ? transmit(i + 1, n) : 0);
        const double all_run =
            std::max(sent, delay) + execute(x, i + 1) + (i + 1 < n ? execute(i + 1, n) : 0);
        if (std::min(all_sent, all_run) > best) continue;
      }
      best = std::min(best, sent + best_from(i + 1, std::max(sent, delay) + execute(x, i + 1) - sent));
    }
    return best;
  }
  uint64_t calls() const { return calls_; }

 private:
  double transmit(size_t begin, size_t end) const {
    double sum = call_ms_;
    for (size_t i = begin; i < end; ++i) sum += layers_[i].transmit_ms;
    return sum;
  }
  double execute(size_t begin, size_t end) const {
    double sum = group_ms_;
    for (size_t i = begin; i < end; ++i) sum += layers_[i].execution_ms;
    return sum;
  }
  const std::vector<LayerCost>& layers_;
  const double call_ms_, group_ms_;
  uint64_t calls_ = 0;
};

}  // namespace

TEST_CASE("the plan equals PipeSwitch's own pruned search") {
  const uint64_t seed = test::seed() + 7;
  INFO("seed " << seed);
  test::Random random(seed);
  uint64_t calls = 0, unpruned = 0;
  for (int round = 0; round < 2'000; ++round) {
    Instance instance = random_instance(random, 14);
    const double lane_busy = instance.costs.lane_busy_ms;
    instance.costs.link_busy_ms = 0;
    instance.costs.resident_layers = 0;
    instance.costs.group_cap_bytes = 0;
    const auto plan = loader::plan_groups(instance.layers, instance.costs);
    REQUIRE(plan.ok());
    PipeSwitchSearch search(instance.layers, instance.costs.call_overhead_ms,
                            instance.costs.group_overhead_ms);
    INFO("round " << round);
    REQUIRE(search.best_from(0, lane_busy) == plan->makespan_ms);
    calls += search.calls();
    unpruned += uint64_t{1} << instance.layers.size();
  }
  // Otherwise the reference would be brute force under another name.
  CHECK(calls < unpruned / 2);
}

TEST_CASE("group times are the pipeline of the plan") {
  const uint64_t seed = test::seed() + 8;
  INFO("seed " << seed);
  test::Random random(seed);
  for (int round = 0; round < 500; ++round) {
    const Instance instance = random_instance(random, 30);
    const auto plan = loader::plan_groups(instance.layers, instance.costs);
    REQUIRE(plan.ok());
    const auto times = loader::group_times(instance.layers, instance.costs, plan->ends);
    REQUIRE(times.ok());
    REQUIRE(times->size() == plan->ends.size());
    double link_free = instance.costs.link_busy_ms, lane_free = instance.costs.lane_busy_ms;
    for (const loader::GroupTimes& group : *times) {
      CHECK(group.send_ms == link_free);
      CHECK(group.arrived_ms >= group.send_ms + instance.costs.call_overhead_ms);
      CHECK(group.start_ms >= group.arrived_ms);
      CHECK(group.start_ms >= lane_free);
      CHECK(group.done_ms >= group.start_ms + instance.costs.group_overhead_ms);
      link_free = group.arrived_ms;
      lane_free = group.done_ms;
    }
    if (!times->empty()) CHECK(lane_free == plan->makespan_ms);
  }
  const std::vector<LayerCost> layers(3, LayerCost{1, 1, 1});
  CHECK(loader::group_times(layers, {}, std::vector<uint32_t>{2}).status().code() ==
        GPUSHARE_INVALID_ARGUMENT);
}
