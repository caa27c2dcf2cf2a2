// Job files of any bytes, and what parses is simulated: bounded, never out of memory, nobody lost.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "sim/job_file.hpp"
#include "sim/simulation.hpp"

using namespace gpushare;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto file = sim::parse_jobs(text, "fuzz.csv");
  if (!file.ok()) {
    if (file.status().message().empty()) std::abort();
    return 0;
  }
  if (file->jobs.empty() || file->jobs.size() > 20) return 0;
  const char* const policies[] = {"fifo", "srtf", "pack", "fair", "priority"};
  sim::SimulationOptions options;
  options.capacity_bytes = 4'000'000'000;
  options.max_picks = 1'000;
  sim::Simulation simulation(options, file->jobs, std::move(*sched::make_policy(policies[size % 5])));
  const auto result = simulation.run();
  if (!result.ok()) {
    if (result.status().code() != GPUSHARE_INVALID_ARGUMENT) std::abort();  // sums out of range
    return 0;
  }
  if (result->oom != 0 || result->completed + result->refused != file->jobs.size()) std::abort();
  return 0;
}
