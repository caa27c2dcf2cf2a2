// SPDX-License-Identifier: Apache-2.0
#include "cluster/shares/rounds.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
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

// What policies are told before the first round.
Known known_of(const RoundsProblem& problem, ShareObjective objective) {
  Known known{problem.capacity, problem.max_step, objective, {}};
  const ShareProblem first = truth_at(problem, 0);
  for (size_t j = 0; j < problem.jobs.size(); ++j)
    known.jobs.push_back(
        {first.jobs[j].load, first.jobs[j].slo, first.jobs[j].utility, problem.jobs[j].declared});
  return known;
}

uint64_t last_quarter(const RoundsProblem& problem) {
  return problem.rounds - std::max<uint64_t>(1, problem.rounds / 4);
}

base::Status no_policy(std::string_view name) {
  return {GPUSHARE_INVALID_ARGUMENT, "there is no policy '" + std::string(name) + "'"};
}

}  // namespace

base::Result<RoundsResult> play_rounds(const RoundsProblem& problem, std::string_view name,
                                       ShareObjective objective) {
  const bool oracle = name == "oracle";
  const std::unique_ptr<Policy> policy =
      oracle ? nullptr : make_policy(name, known_of(problem, objective), problem.seed);
  if (!oracle && policy == nullptr) return no_policy(name);
  uint64_t change = problem.rounds;
  for (const RoundJob& job : problem.jobs)
    if (job.change) change = std::min(change, job.change->round);

  RoundsResult result;
  std::mt19937_64 random(problem.seed);
  std::normal_distribution<double> normal(0, 1);
  const uint64_t last_from = last_quarter(problem);
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

namespace {

constexpr uint64_t kEqualRounds = 5;  // or as many as a job has loads

class RealPlay {
 public:
  RealPlay(const RoundsProblem& problem, RealJobs& jobs) : problem_(problem), jobs_(jobs) {}

  base::Result<std::vector<Observed>> run(const std::vector<int64_t>& units, uint64_t round) {
    std::vector<double> loads;
    for (const UtilityJob& job : truth_at(problem_, round).jobs) loads.push_back(job.load);
    return jobs_.round(units, loads);
  }
  std::vector<double> utilities(const std::vector<Observed>& seen) const {
    std::vector<double> result;
    for (size_t j = 0; j < seen.size(); ++j)
      result.push_back(utility_of(problem_.jobs[j].job.utility, seen[j].performance, 1));
    return result;
  }
  // The utility of each job at equal shares.
  base::Result<std::vector<double>> equal() {
    uint64_t rounds = kEqualRounds;
    for (const RoundJob& job : problem_.jobs) rounds = std::max<uint64_t>(rounds, job.loads.size());
    rounds = std::min(rounds, problem_.rounds);
    std::vector<double> mean(problem_.jobs.size(), 0);
    for (uint64_t round = 0; round < rounds; ++round) {
      GPUSHARE_ASSIGN_OR_RETURN(const std::vector<Observed> seen,
                                run(equal_shares(problem_.capacity, problem_.jobs.size()), round));
      add(mean, utilities(seen), 1 / double(rounds));
    }
    return mean;
  }
  static void add(std::vector<double>& sum, const std::vector<double>& values, double part) {
    for (size_t j = 0; j < sum.size(); ++j) sum[j] += values[j] * part;
  }

 private:
  const RoundsProblem& problem_;
  RealJobs& jobs_;
};

double least(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}
double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}
// At most 1, as in play_rounds. A job that reaches nothing at an equal share does not count.
double fairness(const std::vector<double>& values, const std::vector<double>& equal) {
  double result = 1;
  for (size_t j = 0; j < values.size(); ++j)
    if (equal[j] > 0) result = std::min(result, values[j] / equal[j]);
  return result;
}

}  // namespace

base::Result<RoundsResult> play_real_rounds(const RoundsProblem& problem, std::string_view name,
                                            ShareObjective objective, RealJobs& jobs) {
  const std::unique_ptr<Policy> policy = make_policy(name, known_of(problem, objective), problem.seed);
  if (policy == nullptr) return no_policy(name);
  RealPlay play(problem, jobs);
  RoundsResult result;
  GPUSHARE_ASSIGN_OR_RETURN(result.equal_utilities, play.equal());
  result.utilities.assign(problem.jobs.size(), 0);
  std::vector<double> last(problem.jobs.size(), 0);
  const uint64_t last_from = last_quarter(problem);
  for (uint64_t round = 0; round < problem.rounds; ++round) {
    ShareResult reached;
    reached.units = policy->decide();
    GPUSHARE_ASSIGN_OR_RETURN(const std::vector<Observed> seen, play.run(reached.units, round));
    policy->observe(seen);
    const std::vector<double> utilities = play.utilities(seen);
    RealPlay::add(result.utilities, utilities, 1 / double(problem.rounds));
    if (round >= last_from) RealPlay::add(last, utilities, 1 / double(problem.rounds - last_from));
    reached.welfare = mean(utilities);
    reached.egalitarian = least(utilities);
    reached.fairness = fairness(utilities, result.equal_utilities);
    result.rounds.push_back(std::move(reached));
  }
  result.welfare = mean(result.utilities);
  result.egalitarian = least(result.utilities);
  result.fairness = fairness(result.utilities, result.equal_utilities);
  result.last_welfare = mean(last);
  result.last_egalitarian = least(last);
  result.last_fairness = fairness(last, result.equal_utilities);
  return result;
}

}  // namespace gpushare::cluster::shares
