// Time to plan the groups of real models and of large ones. Figures with their command:
// docs/design/loader.md.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include "loader/grouping.hpp"
#include "model_sizes.hpp"

namespace {

using namespace gpushare;

constexpr double kBytesPerMs = 12e6;

// `execute_ratio`: execution over transmission time, of each layer.
void plan(benchmark::State& state, const std::vector<uint64_t>& bytes, double execute_ratio) {
  if (bytes.empty()) return state.SkipWithError("the shared data folder is not there");
  std::vector<loader::LayerCost> layers;
  for (const uint64_t size : bytes) {
    const double transmit_ms = static_cast<double>(size) / kBytesPerMs;
    layers.push_back({size, transmit_ms, transmit_ms * execute_ratio});
  }
  loader::GroupingCosts costs;
  costs.call_overhead_ms = 0.010;
  costs.group_overhead_ms = 0.020;
  size_t groups = 0;
  for (auto _ : state) {
    const auto best = loader::plan_groups(layers, costs);
    if (!best.ok()) return state.SkipWithError("refused");
    groups = best->ends.size();
    benchmark::DoNotOptimize(groups);
  }
  state.counters["layers"] = static_cast<double>(layers.size());
  state.counters["groups"] = static_cast<double>(groups);
}

// Execution as long as transmission, half of it, twice of it.
void plan_model(benchmark::State& state, const char* name) {
  plan(state, bench::model_layer_bytes(name), static_cast<double>(state.range(0)) / 100);
}
BENCHMARK_CAPTURE(plan_model, resnet101, "resnet101")->ArgName("exec%")->Arg(50)->Arg(100)->Arg(200);
BENCHMARK_CAPTURE(plan_model, bert_base, "bert_base")->ArgName("exec%")->Arg(50)->Arg(100)->Arg(200);

void plan_made(benchmark::State& state) {
  plan(state, bench::made_layer_bytes(static_cast<size_t>(state.range(0))),
       static_cast<double>(state.range(1)) / 100);
}
BENCHMARK(plan_made)
    ->ArgNames({"layers", "exec%"})
    ->ArgsProduct({{464, 1000, 5000}, {50, 100, 200}})
    ->Unit(benchmark::kMillisecond);

}  // namespace
