// Tiresias with several settings of its queues on a job file, without noise. Prints one line of JSON for each;
// scripts/experiments/training makes a table of benchmarks/results/training.md of it. Usage: queue_experiments JOBS.csv
// DEVICES
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cluster/training/schedulers.hpp"
#include "sim/cluster_simulation.hpp"
#include "sim/cluster_training.hpp"

using namespace gpushare;

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: queue_experiments JOBS.csv DEVICES\n");
    return 1;
  }
  std::vector<cluster::Device> devices(std::strtoul(argv[2], nullptr, 10));
  for (size_t d = 0; d < devices.size(); ++d) devices[d].id = std::to_string(d);
  const auto jobs = sim::read_training_jobs(argv[1], devices.size(), {});
  if (!jobs.ok()) {
    std::fprintf(stderr, "error: %s\n", jobs.status().message().c_str());
    return 1;
  }
  const std::vector<double> settings[] = {
      {100},   {3200},   {3250}, {3600},        {3250, 7200}, {3250, 7200, 18000}, {3600, 7200, 18000},
      {32000}, {320000}, {1e6},  {3200, 320000}};
  for (const std::vector<double>& limits : settings) {
    const auto scheduler = cluster::training::make_tiresias(limits);
    const auto result = sim::run_cluster(jobs->jobs, devices, *scheduler, {});
    if (!result.ok()) {
      std::fprintf(stderr, "error: %s\n", result.status().message().c_str());
      return 1;
    }
    std::printf("{\"limits\": [");
    for (size_t i = 0; i < limits.size(); ++i) std::printf("%s%.0f", i == 0 ? "" : ", ", limits[i]);
    std::printf("], \"jct_mean_s\": %.3f, \"jct_p95_s\": %.3f, \"makespan_s\": %.3f}\n", result->jct_mean_s,
                result->jct_p95_s, result->makespan_s);
  }
  return 0;
}
