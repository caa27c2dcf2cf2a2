// rounds.hpp: playing shares round by round: true curves and loads, noisy observations, a policy that decides, its
// shares judged by the truth. Or jobs that really run, whose performance is measured.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
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

// What a job does where it really runs.
struct Work {
  double iteration_ms = 0;  // > 0, of the device alone, for an iteration or a request
  double deadline_ms =
      0;  // of a request, after its arrival; 0: no requests, the job always has an iteration to run
};

struct RoundJob {
  UtilityJob job;             // its load is the first round's, if there are no loads
  std::vector<double> loads;  // a round each, then from the beginning again; may be empty
  std::optional<Change> change;
  std::optional<PerformanceCurve> declared;
  std::optional<Work> work;  // then there is no curve
};

struct RoundsProblem {
  int64_t capacity = 0;
  int64_t max_step = 1;
  uint64_t rounds = 180;
  double noise = 0;  // standard deviation of an observed performance, as part of the objective
  uint64_t seed = 1;
  std::vector<RoundJob> jobs;
  double round_s = 1;  // of jobs that really run
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
  // Of jobs that really run: each job's mean utility, and the one measured at equal shares before the first round.
  std::vector<double> utilities, equal_utilities;
};

// Jobs that really run, in rounds. `round` blocks for a round's length at these units (as in the problem's jobs) and
// loads, and says what each job reached. The first error ends the run.
class RealJobs {
 public:
  virtual ~RealJobs() = default;
  virtual base::Result<std::vector<Observed>> round(const std::vector<int64_t>& units,
                                                    const std::vector<double>& loads) = 0;
};

// The truth of a round: curves and loads as they are then.
ShareProblem truth_at(const RoundsProblem& problem, uint64_t round);

// `policy` is one of kPolicies. Deterministic: the same problem and seed give the same result, and all policies see the
// same loads and the same noise. Errors: INVALID_ARGUMENT for another name.
base::Result<RoundsResult> play_rounds(const RoundsProblem& problem, std::string_view policy,
                                       ShareObjective objective);

// The same with jobs that really run. Utilities are those measured. Egalitarian welfare and fairness are the least of the
// jobs' means over the rounds, since the least of single rounds would be a measure of their noise; fairness is relative
// to rounds with equal shares, which are run first and told to nobody. Demands are unknown, so `useful` is 0; there is no
// coverage. INVALID_ARGUMENT for "oracle", too.
base::Result<RoundsResult> play_real_rounds(const RoundsProblem& problem, std::string_view policy,
                                            ShareObjective objective, RealJobs& jobs);

}  // namespace gpushare::cluster::shares
