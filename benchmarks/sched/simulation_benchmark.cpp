// Events a second of the simulator: iterations decided one by one (fair), and arrivals with paging (srtf).
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "sim/simulation.hpp"

namespace {

using namespace gpushare;
using namespace gpushare::sim;

std::vector<Job> jobs(size_t count) {
  std::mt19937_64 random(7);
  std::vector<Job> out(count);
  uint64_t arrival = 0;
  for (Job& job : out) {
    arrival += random() % 200'000'000'000;
    job.name = "bench";
    job.arrival_ns = arrival;
    job.iterations = 100 + random() % 2000;
    job.iteration_ns = 1e7 + static_cast<double>(random() % 100'000'000);
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

}  // namespace
