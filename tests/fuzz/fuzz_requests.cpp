// Request files and histograms of any bytes; what parses is served: every request answered once under any policy.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "sched/slo/histogram.hpp"
#include "sim/serving/serving.hpp"

using namespace gpushare;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto histogram = sched::slo::Histogram::parse(text);
  if (histogram.ok()) {
    const auto again = sched::slo::Histogram::parse(histogram->serialize());
    if (!again.ok() || again->serialize() != histogram->serialize()) std::abort();
  }
  const auto requests = sim::parse_requests(text, "requests.csv");
  if (!requests.ok()) {
    if (requests.status().message().empty()) std::abort();
    return 0;
  }
  if (requests->empty() || requests->size() > 40) return 0;
  sim::ServingOptions options;
  options.c0_ns = 1e6;
  options.c1 = 0.5;
  options.slo_x_p99 = 0.1 + static_cast<double>(size % 8);
  const auto policies = sched::slo::batcher_names();
  const auto result = sim::serve(*requests, policies[size % policies.size()], options);
  if (!result.ok()) std::abort();  // lost or answered twice
  return 0;
}
