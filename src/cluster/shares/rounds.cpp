// SPDX-License-Identifier: Apache-2.0
#include "cluster/shares/rounds.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

namespace gpushare::cluster::shares {

ShareProblem truth_at(const RoundsProblem& problem, uint64_t round) {
  ShareProblem truth{problem.capacity, {}, {}, std::nullopt};
  for (const RoundJob& job : problem.jobs) {
    truth.jobs.push_back(job.job);
    UtilityJob& now = truth.jobs.back();
    if (!job.loads.empty()) now.load = job.loads[round % job.loads.size()];
    if (!job.change || round < job.change->round) continue;
    if (job.change->curve) now.curve = *job.change->curve;
    now.load *= job.change->load_factor;
  }
  return truth;
}

namespace {

void note(Coverage& coverage, const PerformanceBounds& bounds, double performance) {
  ++coverage.all;
  if (bounds.low <= performance && performance <= bounds.high) ++coverage.inside;
  coverage.width += std::max(0.0, std::min(1.0, bounds.high) - std::min(1.0, bounds.low));
}

}  // namespace

base::Result<RoundsResult> play_rounds(const RoundsProblem& problem, std::string_view name,
                                       ShareObjective objective) {
  Known known{problem.capacity, problem.max_step, objective, {}};
  const ShareProblem first = truth_at(problem, 0);
  for (size_t j = 0; j < problem.jobs.size(); ++j)
    known.jobs.push_back(
        {first.jobs[j].load, first.jobs[j].slo, first.jobs[j].utility, problem.jobs[j].declared});
  const bool oracle = name == "oracle";
  const std::unique_ptr<Policy> policy = oracle ? nullptr : make_policy(name, known, problem.seed);
  if (!oracle && policy == nullptr)
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "there is no policy '" + std::string(name) + "'");
  uint64_t change = problem.rounds;
  for (const RoundJob& job : problem.jobs)
    if (job.change) change = std::min(change, job.change->round);

  RoundsResult result;
  std::mt19937_64 random(problem.seed);
  std::normal_distribution<double> normal(0, 1);
  const uint64_t last_from = problem.rounds - std::max<uint64_t>(1, problem.rounds / 4);
  for (uint64_t round = 0; round < problem.rounds; ++round) {
    const ShareProblem truth = truth_at(problem, round);
    std::vector<int64_t> units;
    if (oracle) {
      GPUSHARE_ASSIGN_OR_RETURN(ShareResult best, divide_shares(truth, objective));
      units = std::move(best.units);
    } else {
      units = policy->decide();
    }
    std::vector<Observed> observed;
    for (size_t j = 0; j < truth.jobs.size(); ++j) {
      const UtilityJob& job = truth.jobs[j];
      const double performance = job.curve.at(double(units[j]) / job.load) / job.slo;
      observed.push_back({units[j], job.load, std::max(0.0, performance + problem.noise * normal(random))});
      if (oracle) continue;
      if (const auto bounds = policy->bounds(j, double(units[j]), job.load))
        note(round < change ? result.before : result.after, *bounds, performance);
      if (const auto load = policy->load_bound(j)) {
        ++result.load.all;
        if (job.load <= *load * (1 + 1e-9)) ++result.load.inside;
      }
    }
    if (policy) policy->observe(observed);
    ShareResult judged = judge_shares(truth, std::move(units));
    const double part = 1 / double(problem.rounds), last = 1 / double(problem.rounds - last_from);
    result.welfare += judged.welfare * part;
    result.egalitarian += judged.egalitarian * part;
    // A job beyond its equal share's utility is no better than one that has it: fairness is at most 1 (3.3).
    const double fairness = std::min(1.0, judged.fairness);
    result.fairness += fairness * part;
    result.useful += judged.useful * part;
    if (round >= last_from) {
      result.last_welfare += judged.welfare * last;
      result.last_egalitarian += judged.egalitarian * last;
      result.last_fairness += fairness * last;
    }
    result.rounds.push_back(std::move(judged));
  }
  return result;
}

}  // namespace gpushare::cluster::shares
