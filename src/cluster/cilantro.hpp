// cilantro.hpp: shares of one resource for jobs whose performance is known or learned (Cilantro; thesis 002, chapter
// 3). Whole units.
//
// The source searches by evolution; here social welfare is a dynamic programme, egalitarian welfare a bisection, and no justified
// complaints (NJC) water-filling, each exact. Learning is in learn/, and hands this file curves and loads as bounds.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "cluster/model/curve.hpp"
#include "cluster/solve/shares.hpp"

namespace gpushare::cluster {

struct UtilityJob {
  std::string name;
  double load = 1;  // > 0
  double slo = 1;   // > 0, in the performance's own unit
  UtilityShape utility = UtilityShape::kLinear;
  PerformanceCurve curve;

  double utility_at(double units) const { return utility_of(utility, curve.at(units / load), slo); }
};

enum class ShareObjective { kSocialWelfare, kEgalitarianWelfare, kNoJustifiedComplaints };

struct ShareProblem {
  int64_t capacity = 0;
  std::vector<UtilityJob> jobs;
  // With max_step, a job's share differs from its previous one by at most so many units. Empty: any share.
  std::vector<int64_t> previous;
  std::optional<int64_t> max_step;
};

struct ShareResult {
  std::vector<int64_t> units;  // as in jobs
  double welfare = 0;          // mean utility, (3.1)
  double egalitarian = 0;      // least utility, (3.2)
  double fairness =
      1;  // least utility relative to that of capacity / jobs units, (3.3); jobs without any there do not count
  double useful = 0;  // sum of min(units, demand), (3.8)
};

// The least whole units at which a job reaches its objective. If no number of units does: the least at which it does
// best, since more gain nothing. At most `capacity`, or capacity + 1 if that many are not enough.
int64_t demand_units(const UtilityJob& job, int64_t capacity);

// Fails with INVALID_ARGUMENT if the previous shares cannot be brought within the capacity in one step, and with
// EXCEEDS_CAPACITY if jobs x units is beyond kMaxTable.
constexpr int64_t kMaxTable = 50'000'000;
base::Result<ShareResult> divide_shares(const ShareProblem& problem, ShareObjective objective);

// The four metrics of given shares under the jobs' curves and loads.
ShareResult judge_shares(const ShareProblem& problem, std::vector<int64_t> units);

}  // namespace gpushare::cluster
