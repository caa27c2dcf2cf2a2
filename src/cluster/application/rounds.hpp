// rounds.hpp: playing an application round by round under a policy, and dividing it when all is known.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "cluster/application/network.hpp"

namespace gpushare::cluster::application {

struct RoundsProblem {
  Application application;
  int64_t capacity = 0;
  int64_t max_step = 1;
  double load_rps = 0;        // as declared
  std::vector<double> loads;  // true, a round each, then from the beginning again; empty: as declared
  uint64_t rounds = 180;
  double round_s = 30;
  double noise = 0;  // relative standard deviation of all that is seen
  uint64_t seed = 1;

  double load_at(uint64_t round) const {
    return loads.empty() ? load_rps : loads[size_t(round % loads.size())];
  }
  // Mean visits of a round of the greatest load.
  double most_visits() const;
};

struct PlayedRound {
  std::vector<int64_t> units;
  double mean_s = 0, p99_s = 0, in_time = 1;  // true
};

struct RoundsResult {
  std::vector<PlayedRound> rounds;
  // Mean of |expected - true| / true of the 99th percentile, over the rounds before which the policy expected one.
  double p99_error = 0;
  uint64_t expected = 0;
};

// The units for services whose work, spread and visits are known: of the divisions for several tails the one whose
// round, played with seed `seed`, has the least 99th percentile.
std::vector<int64_t> divide_known(const Application& application, int64_t capacity, double load_rps,
                                  double round_s, uint64_t seed);

// `policy` is one of kPolicies; "oracle" is divide_known of each round, told its load. Deterministic by seed, and the
// requests that come are the same under all policies. Errors: INVALID_ARGUMENT for another name.
base::Result<RoundsResult> play_rounds(const RoundsProblem& problem, std::string_view policy);

}  // namespace gpushare::cluster::application
