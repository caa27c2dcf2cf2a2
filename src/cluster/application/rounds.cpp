// SPDX-License-Identifier: Apache-2.0
#include "cluster/application/rounds.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "cluster/application/latency.hpp"
#include "cluster/application/policies.hpp"

namespace gpushare::cluster::application {
namespace {

constexpr double kTails[] = {1, 2, 3, 5};

uint64_t seed_of(uint64_t seed, uint64_t round) {
  return seed * 0x9E3779B97F4A7C15ull + round;
}

// The round as policies are told it: each figure has noise of its own.
Round with_noise(Round round, double noise, uint64_t seed) {
  if (noise <= 0) return round;
  std::mt19937_64 random(~seed);
  std::normal_distribution<double> normal;
  const auto blur = [&](double& value) { value *= std::max(0.01, 1 + noise * normal(random)); };
  blur(round.load_rps);
  blur(round.answered_rps);
  blur(round.mean_s);
  blur(round.p99_s);
  for (Usage& usage : round.usage) {
    blur(usage.busy);
    blur(usage.waiting);
    blur(usage.visits_rps);
  }
  return round;
}

}  // namespace

double RoundsProblem::most_visits() const {
  const std::vector<double> visits = application.visits();
  const double load = loads.empty() ? load_rps : *std::max_element(loads.begin(), loads.end());
  return load * round_s * std::accumulate(visits.begin(), visits.end(), 0.0);
}

std::vector<int64_t> divide_known(const Application& application, int64_t capacity, double load_rps,
                                  double round_s, uint64_t seed) {
  std::vector<Belief> beliefs;
  for (const Service& service : application.services)
    beliefs.push_back({0, service.work_s, (1 + service.spread * service.spread) / 2});
  const std::vector<double> visits = application.visits();
  for (size_t s = 0; s < visits.size(); ++s) beliefs[s].visits = visits[s];
  std::vector<int64_t> best;
  double least = 0;
  for (const double tail : kTails) {
    std::vector<int64_t> units = divide(beliefs, {capacity, load_rps, round_s, tail, {}, 0});
    if (units == best) continue;
    const double p99_s = play_round(application, units, load_rps, round_s, seed).p99_s;
    if (!best.empty() && p99_s >= least) continue;
    least = p99_s;
    best = std::move(units);
  }
  return best;
}

base::Result<RoundsResult> play_rounds(const RoundsProblem& problem, std::string_view name) {
  const Known known{problem.capacity, problem.max_step, problem.application.services.size(),
                    problem.load_rps, problem.round_s,  problem.seed};
  const bool oracle = name == "oracle";
  const std::unique_ptr<Policy> policy = oracle ? nullptr : make_policy(name, known);
  if (!oracle && policy == nullptr)
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "there is no policy '" + std::string(name) + "'");
  RoundsResult result;
  for (uint64_t r = 0; r < problem.rounds; ++r) {
    const Application now = problem.application.at(r);
    const double load = problem.load_at(r);
    const uint64_t seed = seed_of(problem.seed, r);
    const std::vector<int64_t> units =
        oracle ? divide_known(now, problem.capacity, load, problem.round_s, seed_of(seed, 1))
               : policy->decide();
    const Round played = play_round(now, units, load, problem.round_s, seed);
    if (!oracle) {
      if (const auto expected = policy->expected_p99_s(load); expected && played.p99_s > 0) {
        result.p99_error += std::abs(*expected - played.p99_s) / played.p99_s;
        ++result.expected;
      }
      policy->observe(units, with_noise(played, problem.noise, seed));
    }
    result.rounds.push_back({units, played.mean_s, played.p99_s, played.in_time});
  }
  if (result.expected > 0) result.p99_error /= double(result.expected);
  return result;
}

}  // namespace gpushare::cluster::application
