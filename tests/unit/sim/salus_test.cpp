// The 99 jobs measured by Salus, all arriving at once on 16 GB. The test is skipped with a note when the shared
// data is absent; simulation_test.cpp has the same arithmetic on jobs of its own.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "sim/job_file.hpp"
#include "sim/simulation.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace gpushare::sim;

namespace {

bool load(std::vector<Job>& jobs) {
  const std::string path = std::string(GPUSHARE_SHARED_DATA) + "/jobs/salus_workloads.csv";
  if (!std::ifstream(path)) {
    WARN("no shared data at " << path << ": nothing to compare");
    return false;
  }
  auto file = read_jobs(path);
  REQUIRE(file.ok());
  jobs = std::move(file->jobs);
  return true;
}

SimulationResult run(const SimulationOptions& options, const std::vector<Job>& jobs, const char* policy) {
  Simulation simulation(options, jobs, std::move(*sched::make_policy(policy)));
  auto result = simulation.run();
  REQUIRE(result.ok());
  return std::move(*result);
}

constexpr double kMinute = 60e9;

}  // namespace

TEST_CASE("salus, one lane: fifo and srtf are arithmetic") {
  std::vector<Job> jobs;
  if (!load(jobs)) return;
  SimulationOptions options;
  options.max_lanes = 1;
  for (const uint64_t capacity : {uint64_t{16} << 30, uint64_t{16'000'000'000}}) {
    options.capacity_bytes = capacity;
    const SimulationResult fifo = run(options, jobs, "fifo"), srtf = run(options, jobs, "srtf");
    CHECK(fifo.completion_mean_ns / kMinute == Approx(279.8).epsilon(0.005));
    CHECK(srtf.completion_mean_ns / kMinute == Approx(185.0).epsilon(0.005));
    for (const SimulationResult* each : {&fifo, &srtf}) {
      CHECK(static_cast<double>(each->makespan_ns) / kMinute == Approx(567.7).epsilon(0.005));
      CHECK(each->completed == 99);
      CHECK(each->oom == 0);
    }
  }
}

TEST_CASE("salus, one lane, all admitted: fair is processor sharing") {
  std::vector<Job> jobs;
  if (!load(jobs)) return;
  SimulationOptions options;
  options.max_lanes = 1;
  options.capacity_bytes = uint64_t{1} << 40;
  const SimulationResult fair = run(options, jobs, "fair");
  // n jobs of ascending work w all present: the k-th ends at sum of w_1..w_k plus (n - k) w_k.
  std::vector<double> work;
  for (const Job& job : jobs) work.push_back(job.work_ns());
  std::sort(work.begin(), work.end());
  double passed = 0, mean = 0;
  for (size_t k = 0; k < work.size(); ++k) {
    passed += work[k];
    mean += (passed + static_cast<double>(work.size() - k - 1) * work[k]) / static_cast<double>(work.size());
  }
  CHECK(fair.completion_mean_ns == Approx(mean).epsilon(0.005));
  CHECK(static_cast<double>(fair.makespan_ns) == Approx(passed).epsilon(0.001));
}

TEST_CASE("salus, lanes free, interference modelled: pack is no slower than fifo, nobody out of memory") {
  std::vector<Job> jobs;
  if (!load(jobs)) return;
  const SimulationOptions options;
  const SimulationResult fifo = run(options, jobs, "fifo");
  for (const char* policy : {"srtf", "pack", "fair", "priority"}) {
    INFO(policy);
    const SimulationResult result = run(options, jobs, policy);
    CHECK(result.completed == 99);
    CHECK(result.oom == 0);
    CHECK(result.peak_bytes <= options.capacity_bytes);
    if (result.policy == "pack") CHECK(result.makespan_ns < fifo.makespan_ns);
  }
  // Lanes beside each other that gain nothing: pack must not lose by them.
  std::vector<Job> saturating = jobs;
  for (Job& job : saturating) job.demand = 1;
  CHECK(static_cast<double>(run(options, saturating, "pack").makespan_ns) <=
        static_cast<double>(fifo.makespan_ns) * 1.000001);
}
