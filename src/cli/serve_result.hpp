// serve_result.hpp: what `gpushare serve` found, and its table, JSON and HTML page.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "sim/serving/serving.hpp"

namespace gpushare::cli {

// One policy at one load and one deadline.
struct ServeCase {
  double slo_x_p99 = 0;
  double load = 0;  // 0: arrivals as recorded
  std::string policy;
  sim::ServingResult result;
};

struct ServeResult {
  std::string device = "sim";  // or host
  std::string source;          // the request file, or the specification drawn from
  double c0_ms = 0;
  double c1 = 0.1;
  std::vector<double> loads;
  std::vector<double> slos_x_p99 = {1.5, 2, 3, 4, 5};
  std::vector<std::string> policies = {"clipper", "nexus", "clockwork", "orloj", "gpushare"};
  std::vector<ServeCase> cases;  // by load, then deadline, then policy
};

nlohmann::ordered_json to_json(const ServeResult& result);
std::string render_table(const ServeResult& result);
std::string render_report(const ServeResult& result);

}  // namespace gpushare::cli
