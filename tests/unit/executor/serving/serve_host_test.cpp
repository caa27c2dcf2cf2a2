// `gpushare serve --device host`: real time, real threads; every request accounted for. No times are asserted.
// SPDX-License-Identifier: Apache-2.0
#include "cli/serve_host.hpp"

#include "support/catch.hpp"

using namespace gpushare;

TEST_CASE("requests on the host device are all accounted for") {
  const sim::SyntheticSpec spec = *sim::parse_synthetic("modes:2");
  const double mean = sim::mean_execution_ns(spec);
  for (const char* policy : {"gpushare", "clockwork", "orloj"})
    for (double load : {1.0, 20.0}) {
      INFO(policy << " at load " << load);
      const auto requests = sim::draw(spec, {.requests = 400, .rate_per_s = load / (mean / 1e9)});
      sim::ServingOptions options;
      options.c0_ns = 0.9 * mean;
      options.c1 = 0.1;
      const auto result = cli::serve_on_host(requests, policy, options, 0.0005);
      INFO(result.status().to_string());
      REQUIRE(result.ok());
      CHECK(result->finished_in_time + result->finished_late + result->drops() == 400);
    }
  CHECK(cli::serve_on_host({}, "none", {}, 1).status().code() == GPUSHARE_NOT_FOUND);
}
