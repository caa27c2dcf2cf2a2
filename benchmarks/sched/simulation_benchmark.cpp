// Events a second of the simulator: iterations decided one by one (fair), and arrivals with paging (srtf).
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "sim/simulation.hpp"

namespace {

using namespace gpushare;
using namespace gpushare::sim;

std::vector<Job> jobs(size_t count, bool at_once = false) {
  std::mt19937_64 random(7);
  std::vector<Job> out(count);
  uint64_t arrival = 0;
  for (Job& job : out) {
    if (!at_once) arrival += random() % 200'000'000'000;
    job.name = "bench";
    job.arrival_ns = arrival;
    job.iterations = 100 + random() % 2000;
    job.iteration_ns = 1e7 + static_cast<double>(random() % 100'000'000);
    job.priority = static_cast<int32_t>(random() % 8);
    job.weight = 1 + static_cast<double>(random() % 4);
    job.persistent_bytes = 100'000'000 + random() % 500'000'000;
    job.ephemeral_bytes = 500'000'000 + random() % 8'000'000'000;
  }
  return out;
}

void simulate(benchmark::State& state, const char* policy) {
  const std::vector<Job> trace = jobs(static_cast<size_t>(state.range(0)));
  uint64_t picks = 0;
  for (auto _ : state) {
    Simulation simulation({}, trace, std::move(*sched::make_policy(policy)));
    const auto result = simulation.run();
    if (!result.ok()) return state.SkipWithError("failed");
    picks += result->picks;
  }
  state.counters["decisions/s"] = benchmark::Counter(static_cast<double>(picks), benchmark::Counter::kIsRate);
  state.counters["jobs/s"] =
      benchmark::Counter(static_cast<double>(trace.size()) * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}
BENCHMARK_CAPTURE(simulate, fifo, "fifo")->Arg(100)->Arg(2000)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(simulate, srtf, "srtf")->Arg(100)->Arg(2000)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(simulate, pack, "pack")->Arg(100)->Arg(2000)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(simulate, fair, "fair")->Arg(100)->Arg(2000)->Unit(benchmark::kMillisecond);

// All jobs arrive at the same moment: the backlog is as long as the trace.
void backlog(benchmark::State& state, const char* policy) {
  const std::vector<Job> trace = jobs(static_cast<size_t>(state.range(0)), true);
  for (auto _ : state) {
    Simulation simulation({}, trace, std::move(*sched::make_policy(policy)));
    const auto result = simulation.run();
    if (!result.ok()) return state.SkipWithError("failed");
  }
  state.SetComplexityN(state.range(0));
}
#define BACKLOG(policy)                       \
  BENCHMARK_CAPTURE(backlog, policy, #policy) \
      ->Arg(1000)                             \
      ->Arg(10'000)                           \
      ->Arg(100'000)                          \
      ->Iterations(1)                         \
      ->Unit(benchmark::kMillisecond)
BACKLOG(fifo);
BACKLOG(srtf);
BACKLOG(pack);
BACKLOG(fair);
BACKLOG(priority);

// A comparison, no time: mean makespan and completion over 100 mixes of 100 jobs in Salus's style, by lane finder.
std::vector<Job> mix(uint64_t seed) {
  // P and E in MB, as measured by Salus for its models at the middle and largest batch.
  constexpr double kSizes[][2] = {{244, 911},   {244, 1153},  {111, 1300},  {111, 2423}, {111, 4664},
                                  {111, 9268},  {171, 8370},  {171, 12491}, {583, 2833}, {583, 5657},
                                  {111, 3897},  {111, 5804},  {178, 5928},  {178, 8810}, {241, 8396},
                                  {241, 12485}, {532, 4556},  {532, 8672},  {554, 5630}, {554, 9891},
                                  {575, 5784},  {575, 11450}, {18, 18},     {111, 2389}};
  std::mt19937_64 random(seed);
  std::lognormal_distribution<double> length(0, 1.2);
  std::exponential_distribution<double> gap(1);
  std::vector<Job> out(100);
  double work = 0, arrival = 0;
  for (Job& job : out) {
    job.name = "mix";
    job.iterations = 1 + static_cast<uint64_t>(length(random) * 200);
    job.iteration_ns = 0.45e9;
    job.arrival_ns = static_cast<uint64_t>(arrival);
    arrival += gap(random) * 18e9;  // half an hour in all
    const auto& size = kSizes[random() % std::size(kSizes)];
    job.persistent_bytes = static_cast<uint64_t>(size[0] * 1e6);
    job.ephemeral_bytes = static_cast<uint64_t>(size[1] * 1e6);
    work += job.work_ns();
  }
  for (Job& job : out) job.iteration_ns *= 100 * 180e9 / work;
  return out;
}

void lane_finder(benchmark::State& state, const char* policy, sched::LaneFinderKind kind) {
  double makespan = 0, mean = 0, runs = 0;
  for (auto _ : state) {
    for (uint64_t seed = 1; seed <= 100; ++seed) {
      SimulationOptions options;
      options.lane_finder = kind;
      Simulation simulation(options, mix(seed), std::move(*sched::make_policy(policy)));
      const auto result = simulation.run();
      if (!result.ok()) return state.SkipWithError("failed");
      makespan += static_cast<double>(result->makespan_ns);
      mean += result->completion_mean_ns;
      ++runs;
    }
  }
  state.counters["makespan_min"] = makespan / runs / 60e9;
  state.counters["completion_min"] = mean / runs / 60e9;
}
#define LANE_FINDER_ONE(policy, name, kind)                                             \
  BENCHMARK_CAPTURE(lane_finder, policy##_##name, #policy, sched::LaneFinderKind::kind) \
      ->Iterations(1)                                                                   \
      ->Unit(benchmark::kMillisecond)
#define LANE_FINDER(policy)                     \
  LANE_FINDER_ONE(policy, salus, kSalus);       \
  LANE_FINDER_ONE(policy, balanced, kBalanced); \
  LANE_FINDER_ONE(policy, compact, kCompact)
LANE_FINDER(pack);
LANE_FINDER(fair);
LANE_FINDER(priority);

}  // namespace
