// Cilantro's objectives: figures of the source and of its published profiles, exactness, steps, strategy-proofness, errors.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/cilantro.hpp"

#include <cmath>
#include <fstream>
#include <numeric>
#include <sstream>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace gpushare::cluster {
namespace {

// The synthetic bench (thesis 002, section 3.7.3): p = 1 / (1 + exp(-(a / load - b))), objective 0.95.
ShareProblem synthetic(int64_t capacity, double load = 1) {
  ShareProblem problem{capacity, {}, {}, std::nullopt};
  for (double offset : {0.1, 0.3, 0.5, 0.7, 0.9}) {
    UtilityJob job{"user" + std::to_string(problem.jobs.size()), load, 0.95, UtilityShape::kLinear, {}};
    job.curve.logistic = true;
    job.curve.offset = offset;
    problem.jobs.push_back(job);
  }
  return problem;
}

PerformanceCurve read_profile(const std::string& name) {
  PerformanceCurve curve;
  std::ifstream file(std::string(GPUSHARE_SHARED_DATA) + "/cilantro/" + name + ".csv");
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    std::istringstream cells(line);
    double units = 0;
    double lower = 0;
    double estimate = 0;
    char comma = 0;
    cells >> units >> comma >> lower >> comma >> estimate;
    curve.points.emplace_back(units, estimate);
  }
  return curve;
}

UtilityJob two_points(const char* name, double demand, double slo = 1) {
  return {name, 1, slo, UtilityShape::kLinear, {{{0, 0}, {demand, slo}}}};
}

}  // namespace

TEST_CASE(
    "a logistic job's unit demand is its offset + ln 19 at an objective of 0.95") {  // thesis 002, line 1038
  for (const UtilityJob& job : synthetic(1).jobs)
    CHECK(job.curve.demand(0.95) == Approx(job.curve.offset + std::log(19.0)).epsilon(1e-12));
}

TEST_CASE(
    "unit demands of the published profiles") {  // github.com/romilbhardwaj/cilantro, its profiles of the four workloads
  const struct {
    const char* profile;
    double slo;
    double demand;
  } cases[] = {{"db0", 0.9, 0.324},     {"db0", 0.95, 0.324},     {"db1", 0.9, 2.156},
               {"db1", 0.95, 3.474},    {"db1", 0.99, 3.874},     {"mltrain", 400, 100.25},
               {"mltrain", 450, 120.6}, {"predserv", 0.9, 0.317}, {"predserv", 0.95, 0.589}};
  for (const auto& c : cases) {
    const PerformanceCurve curve = read_profile(c.profile);
    if (curve.points.empty()) {
      WARN("no published profiles in " << GPUSHARE_SHARED_DATA);
      return;
    }
    const double step = curve.points[1].first - curve.points[0].first;
    INFO(c.profile << " at " << c.slo);
    CHECK(std::abs(curve.demand(c.slo) - c.demand) <= step);
  }
}

TEST_CASE("a curve is 0 below its first point, linear between, constant beyond its last") {
  const PerformanceCurve curve{{{1, 2}, {3, 6}, {5, 4}}};
  CHECK(curve.at(0.5) == 0);
  CHECK(curve.at(1) == 2);
  CHECK(curve.at(2) == 4);
  CHECK(curve.at(4) == 5);
  CHECK(curve.at(9) == 4);
  CHECK(curve.demand(5) == 2.5);
  CHECK(std::isinf(curve.demand(6.5)));
}

TEST_CASE("utility falls linearly, by the root or by the square below the objective, and is 1 above") {
  CHECK(utility_of(UtilityShape::kLinear, 0.25, 1) == 0.25);
  CHECK(utility_of(UtilityShape::kSqrt, 0.25, 1) == 0.5);
  CHECK(utility_of(UtilityShape::kQuadratic, 0.5, 1) == 0.25);
  CHECK(utility_of(UtilityShape::kSqrt, 7, 2) == 1);
}

TEST_CASE("three objectives on three linear jobs") {
  // In the manner of figure 3.5: 60 units, demands 150 together.
  const ShareProblem problem{
      60, {two_points("a", 10), two_points("b", 50), two_points("c", 90)}, {}, std::nullopt};
  const auto sw = divide_shares(problem, ShareObjective::kSocialWelfare);
  CHECK(sw->units == std::vector<int64_t>{10, 50, 0});
  CHECK(sw->welfare == Approx(2.0 / 3));
  CHECK(sw->egalitarian == 0);
  CHECK(sw->fairness == 0);
  CHECK(sw->useful == 60);
  const auto ew = divide_shares(problem, ShareObjective::kEgalitarianWelfare);
  CHECK(ew->egalitarian == Approx(0.4));
  CHECK(ew->units == std::vector<int64_t>{4, 20, 36});
  const auto njc = divide_shares(problem, ShareObjective::kNoJustifiedComplaints);
  CHECK(njc->units == std::vector<int64_t>{10, 25, 25});
  CHECK(njc->fairness == 1);
}

TEST_CASE("njc: remainders go to earlier jobs, and a job without utility at the equal share does not count") {
  const ShareProblem seven{7, {two_points("a", 9), two_points("b", 9)}, {}, std::nullopt};
  CHECK(divide_shares(seven, ShareObjective::kNoJustifiedComplaints)->units == std::vector<int64_t>{4, 3});
  ShareProblem late{
      10, {two_points("a", 3), {"b", 1, 1, UtilityShape::kLinear, {{{8, 1}}}}}, {}, std::nullopt};
  const auto result = divide_shares(late, ShareObjective::kNoJustifiedComplaints);
  CHECK(result->units == std::vector<int64_t>{3, 7});
  CHECK(result->fairness == 1);
}

TEST_CASE("a peak narrower than a unit is worth the better of the whole units beside it") {
  UtilityJob peaky{"peaky", 1, 0.9, UtilityShape::kLinear, {}};
  peaky.curve.points = {{0, 0}, {5.5, 0.9}, {6.5, 0.2}};
  CHECK(demand_units(peaky, 20) == 5);  // 0.818 there, 0.55 at 6
  UtilityJob other{"other", 1, 0.9, UtilityShape::kLinear, {}};
  other.curve.points = {{0, 0}, {15, 0.9}};
  ShareProblem problem{20, {peaky, other}, {}, {}};
  const auto fair = divide_shares(problem, ShareObjective::kNoJustifiedComplaints);
  REQUIRE(fair.ok());
  CHECK(fair->units == std::vector<int64_t>{5, 15});
  // A second rise beyond the peak meets the objective.
  peaky.curve.points = {{0, 0}, {5.5, 0.9}, {6.5, 0.2}, {10, 0.2}, {12, 1}};
  CHECK(demand_units(peaky, 20) == 12);
  // The search does not go through every unit up to the capacity.
  peaky.curve.points = {{0, 0}, {5.5, 0.9}, {6.5, 0.2}};
  CHECK(demand_units(peaky, 1'000'000'000) == 5);
}

TEST_CASE("shares move by at most one step") {
  ShareProblem problem{60, {two_points("a", 10), two_points("b", 50), two_points("c", 90)}, {20, 20, 20}, 5};
  CHECK(divide_shares(problem, ShareObjective::kSocialWelfare)->units == std::vector<int64_t>{15, 25, 20});
  CHECK(divide_shares(problem, ShareObjective::kNoJustifiedComplaints)->units ==
        std::vector<int64_t>{15, 23, 22});
  problem.capacity = 40;
  const auto refused = divide_shares(problem, ShareObjective::kEgalitarianWelfare);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().message().find("raise max_step") != std::string::npos);
}

TEST_CASE("every objective is best at what it maximises") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  for (int round = 0; round < 300; ++round) {
    ShareProblem problem =
        synthetic(int64_t(test::uniform(random, 1, 120)), double(test::uniform(random, 1, 12)));
    for (UtilityJob& job : problem.jobs) {
      job.utility = UtilityShape(test::uniform(random, 0, 2));
      job.slo = double(test::uniform(random, 60, 99)) / 100;
    }
    const auto sw = divide_shares(problem, ShareObjective::kSocialWelfare);
    const auto ew = divide_shares(problem, ShareObjective::kEgalitarianWelfare);
    const auto njc = divide_shares(problem, ShareObjective::kNoJustifiedComplaints);
    for (const auto* other : {&*sw, &*ew, &*njc}) {
      if (std::accumulate(other->units.begin(), other->units.end(), int64_t(0)) > problem.capacity)
        FAIL("above capacity");
      if (other->welfare > sw->welfare + 1e-12) FAIL("social welfare is not the greatest in round " << round);
      if (other->egalitarian > ew->egalitarian)
        FAIL("egalitarian welfare is not the greatest in round " << round);
    }
  }
}

TEST_CASE(
    "njc is strategy-proof: halving or doubling what a job reports gains it nothing") {  // thesis 002, section 3.7.1
  test::Random random(test::seed());
  for (int round = 0; round < 300; ++round) {
    const ShareProblem truth =
        synthetic(int64_t(test::uniform(random, 5, 80)), double(test::uniform(random, 1, 9)));
    const auto honest = divide_shares(truth, ShareObjective::kNoJustifiedComplaints);
    for (size_t liar = 0; liar < truth.jobs.size(); ++liar) {
      for (double factor : {0.5, 2.0}) {
        ShareProblem told = truth;
        told.jobs[liar].load *= factor;  // as a performance reported for half or twice the units
        const auto lied = divide_shares(told, ShareObjective::kNoJustifiedComplaints);
        const double gain = truth.jobs[liar].utility_at(double(lied->units[liar])) -
                            truth.jobs[liar].utility_at(double(honest->units[liar]));
        if (gain > 1e-12) FAIL("a lie of x" << factor << " gains " << gain << " in round " << round);
      }
    }
  }
}

TEST_CASE("too many jobs times units are refused by name") {
  ShareProblem problem{60'000'000, {two_points("a", 1e9)}, {}, std::nullopt};
  const auto refused = divide_shares(problem, ShareObjective::kSocialWelfare);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().message().find("capacity") != std::string::npos);
}

}  // namespace gpushare::cluster
