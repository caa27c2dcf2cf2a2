// policies.hpp: the policies that divide an application's units among its services, round by round.
//
//   gpushare      from proxy metrics: the busy time and the visits of each service say how long requests would take with
//                 other units (latency.hpp); how long visits were seen to wait, and the 99th percentile that was seen,
//                 correct that. Equal shares until something was seen; by busy times where no visit has ended yet.
//   cilantro      the source's: a kernel regression of the end-to-end latency over all units and the load, and the units
//                 whose lower bound of the latency is least
//   proportional  units in proportion to the busy time of the last round
//   fair, epsilon-greedy, evolutionary   the source's baselines
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "cluster/application/latency.hpp"
#include "cluster/application/network.hpp"

namespace gpushare::cluster::application {

// The standard deviations from the mean to the 99th percentile, until one was seen: between the 2.3 of a normal time and the
// 3.6 of an exponential one.
inline constexpr double kTail = 3;

struct Known {
  int64_t capacity = 0;  // at least one unit for each service
  int64_t max_step = 1;  // gpushare and cilantro: most units by which a share changes from round to round
  size_t services = 0;
  double load_rps = 0;  // as declared
  double round_s = 0;
  uint64_t seed = 1;
};

class Policy {
 public:
  virtual ~Policy() = default;
  // The units of the next round; all of them, at least one for each service.
  virtual std::vector<int64_t> decide() = 0;
  virtual void observe(const std::vector<int64_t>& units, const Round& seen) = 0;
  // The 99th percentile of the latency that it expects of its last decision at that load, if it predicts and has seen a
  // request answered.
  virtual std::optional<double> expected_p99_s(double /*load_rps*/) const { return {}; }
};

inline constexpr const char* kPolicies[] = {"gpushare",     "cilantro",     "oracle",        "fair",
                                            "proportional", "evolutionary", "epsilon-greedy"};

// Null for a name that is none, and for "oracle", which knows what policies are not told: rounds.cpp plays it.
std::unique_ptr<Policy> make_policy(std::string_view name, const Known& known);

}  // namespace gpushare::cluster::application
