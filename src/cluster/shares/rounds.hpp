// rounds.hpp: playing shares round by round: true curves and loads, noisy observations, a policy that decides, its
// shares judged by the truth.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cluster/cilantro.hpp"
#include "cluster/shares/policy.hpp"

namespace gpushare::cluster::shares {

// From a round on, the job's curve or load is another.
struct Change {
  uint64_t round = 0;
  std::optional<PerformanceCurve> curve;
  double load_factor = 1;
};

struct RoundJob {
  UtilityJob job;             // its load is the first round's, if there are no loads
  std::vector<double> loads;  // a round each, then from the beginning again; may be empty
  std::optional<Change> change;
  std::optional<PerformanceCurve> declared;
};

struct RoundsProblem {
  int64_t capacity = 0;
  int64_t max_step = 1;
  uint64_t rounds = 180;
  double noise = 0;  // standard deviation of an observed performance, as part of the objective
  uint64_t seed = 1;
  std::vector<RoundJob> jobs;
};

struct Coverage {
  uint64_t inside = 0, all = 0;
  double width = 0;  // sum of the bounds' widths, cut at the objective
};

struct RoundsResult {
  // Means over rounds of what (3.1), (3.2), (3.3) and (3.8) say of the true utilities.
  double welfare = 0, egalitarian = 0, fairness = 0, useful = 0;
  // The same over the last quarter of the rounds.
  double last_welfare = 0, last_egalitarian = 0, last_fairness = 0;
  // How often the bounds held the true performance at the shares given, before it was observed: until the first change,
  // and from then on.
  Coverage before, after;
  Coverage load;  // how often the load was at most its bound
  std::vector<ShareResult> rounds;
};

// The truth of a round: curves and loads as they are then.
ShareProblem truth_at(const RoundsProblem& problem, uint64_t round);

// `policy` is one of kPolicies. Deterministic: the same problem and seed give the same result, and all policies see the
// same loads and the same noise. Errors: INVALID_ARGUMENT for another name.
base::Result<RoundsResult> play_rounds(const RoundsProblem& problem, std::string_view policy,
                                       ShareObjective objective);

}  // namespace gpushare::cluster::shares
