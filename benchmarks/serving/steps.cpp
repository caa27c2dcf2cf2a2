// Continuous batching on public traces, on virtual time: serving_steps TRACE... Writes the tables of benchmarks/results/continuous.md to
// stdout. Deterministic.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "reference/serving_steps.hpp"
#include "step_baselines.hpp"

namespace gpushare::experiments {
namespace {

constexpr const char* kPolicies[] = {"fifo", "orca", "vllm", "sarathi", "slos-serve", "jitserve", "gpushare"};

struct Slo {
  const char* name;
  double first_s, first_ms_per_token, token_ms;
};
// Tight, loose, and one whose first token may take longer for longer prompts.
constexpr Slo kSlos[] = {{"tight", 0.5, 0, 25}, {"loose", 2, 0, 50}, {"by length", 0.5, 0.3, 35}};

std::vector<sim::TimedGeneration> at_rate(const std::vector<sim::TimedGeneration>& trace, double factor,
                                          size_t most) {
  std::vector<sim::TimedGeneration> out(
      trace.begin(), trace.begin() + static_cast<std::ptrdiff_t>(std::min(most, trace.size())));
  for (auto& each : out)
    each.arrival_ns = static_cast<uint64_t>(static_cast<double>(each.arrival_ns) / factor);
  return out;
}

void table(const std::string& path, const Slo& slo, size_t most, double noise, double wrong) {
  const auto trace = sim::read_generations(path);
  if (!trace.ok()) {
    std::fprintf(stderr, "%s\n", trace.status().to_string().c_str());
    std::exit(1);
  }
  std::printf("\n%s, %s: first token within %.1f s%s, a token each %.0f ms%s\n\n| rate |",
              path.substr(path.rfind('/') + 1).c_str(), slo.name, slo.first_s,
              slo.first_ms_per_token > 0 ? " and 0.3 ms a prompt token" : "", slo.token_ms,
              noise > 0 ? ", noise 0.2, costs told at half" : "");
  for (const char* policy : kPolicies) std::printf(" %s |", policy);
  std::printf(" returned work, fifo, jitserve, gpushare |\n|---|");
  for (size_t i = 0; i <= std::size(kPolicies); ++i) std::printf("---|");
  std::printf("\n");
  for (const double rate : {0.5, 1.0, 2.0, 4.0}) {
    const auto requests = at_rate(*trace, rate, most);
    std::printf("| x%g |", rate);
    std::vector<double> lost;
    for (const char* policy : kPolicies) {
      sim::StepServingOptions options;
      options.cost = {12e6, 0.05e6, 0.09e6, 87, noise};
      options.bytes_per_token = 131'072;
      options.first_ns = static_cast<uint64_t>(slo.first_s * 1e9);
      options.first_ns_per_token = slo.first_ms_per_token * 1e6;
      options.token_ns = static_cast<uint64_t>(slo.token_ms * 1e6);
      sched::slo::StepOptions batcher;
      batcher.memory_bytes = uint64_t{40} << 30;
      batcher.step_ns = options.cost.step_ns * wrong;
      batcher.decode_ns = options.cost.decode_ns * wrong;
      batcher.prefill_ns = options.cost.prefill_ns * wrong;
      batcher.read_ns = options.cost.read_ns * wrong;
      const auto made = step_policy(policy, batcher);
      const auto result = sim::serve_steps(requests, *made, options);
      std::printf(" %.3f (%.3f) |", result.in_time, result.in_time_mean);
      lost.push_back(result.lost_work);
      std::fflush(stdout);
    }
    std::printf(" %.3f, %.3f, %.3f |\n", lost[0], lost[5], lost[6]);
  }
}

}  // namespace
}  // namespace gpushare::experiments

int main(int argc, char** argv) {
  size_t most = 4000;
  if (const char* set = std::getenv("GPUSHARE_SERVING_REQUESTS")) most = std::strtoull(set, nullptr, 10);
  for (int i = 1; i < argc; ++i) {
    for (const auto& slo : gpushare::experiments::kSlos)
      gpushare::experiments::table(argv[i], slo, most, 0, 1);
    gpushare::experiments::table(argv[i], gpushare::experiments::kSlos[1], most, 0.2, 0.5);
  }
  return 0;
}
