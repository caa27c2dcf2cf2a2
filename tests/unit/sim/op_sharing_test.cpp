// Interference under the controller, and the two jobs of AntMan's tables.
// SPDX-License-Identifier: Apache-2.0
#include "reference/op_sharing.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <vector>

#include "reference/two_jobs.hpp"
#include "sim/interference.hpp"
#include "support/catch.hpp"
#include "support/sanitizers.hpp"

namespace {

using namespace gpushare;  // NOLINT
using sim::ContentionCurve;
using sim::OpponentSpec;
using sim::OpSharingSpec;

struct Pair {
  double guaranteed_rate, own_rate;
};

// All measured pairs, each job once in each role; without the published table, rates spread over the range of the published ones.
std::vector<Pair> pairs() {
  std::vector<Pair> out;
  const std::string path = std::string(GPUSHARE_SHARED_DATA) + "/interference/gavel_pairs_k80_p100.json";
  if (!std::ifstream(path)) {
    WARN("no shared data at " << path << ": rates made by this program are used");
    for (int i = 0; i < 20; ++i)
      for (int j = 0; j < 20; ++j) out.push_back({0.25 + 0.035 * i, 0.25 + 0.035 * j});
    return out;
  }
  for (const char* device : {"k80", "p100"}) {
    const auto table = sim::InterferenceTable::read(path, device);
    REQUIRE(table.ok());
    for (size_t i = 0; i < table->size(); ++i)
      for (size_t j = 0; j < table->size(); ++j)
        if (table->pair_rate(i, j) > 0) out.push_back({table->pair_rate(i, j), table->pair_rate(j, i)});
  }
  return out;
}

}  // namespace

TEST_CASE("measured pairs: under the target in 99 of 100 cases, with 85% of the oracle's throughput") {
  size_t cases = 0, within = 0;
  double sum = 0, oracle = 0;
  const std::vector<Pair> all = pairs();
  for (size_t i = 0; i < all.size(); i += test::kSanitized ? 4 : 1) {
    OpSharingSpec spec;
    spec.seed = ++cases;
    spec.iterations = 3000;
    spec.opponents.push_back({1, all[i].guaranteed_rate, all[i].own_rate});
    const auto result = run_op_sharing(spec);
    within += result.slowdown < spec.options.target_slowdown ? 1 : 0;
    sum += result.sum;
    oracle += result.oracle;
  }
  CAPTURE(cases, within, sum / oracle);
  CHECK(static_cast<double>(within) >= 0.99 * static_cast<double>(cases));
  CHECK(sum >= 0.85 * oracle);
}

TEST_CASE("curves of contention end at no loss and at the measured loss") {
  for (const auto curve : {ContentionCurve::kTurns, ContentionCurve::kGaps, ContentionCurve::kConvex,
                           ContentionCurve::kConcave}) {
    CHECK(sim::loss_at(curve, 0) == 0);
    CHECK(sim::loss_at(curve, 1) == Approx(1));
    for (double share = 0; share < 0.99; share += 0.01)
      CHECK(sim::loss_at(curve, share) <= sim::loss_at(curve, share + 0.01));
    CHECK(std::string(name_of(curve)).size() >= 4);
  }
}

TEST_CASE("arrival, departure and a new phase are followed within a few iterations") {
  OpSharingSpec spec;
  spec.iterations = 3000;
  spec.jitter = 0.005;
  spec.opponents.push_back({1, 0.999, 0.9});
  spec.opponents.back().from = 1000;
  spec.opponents.back().until = 2500;
  spec.phases = {{2000, 1.5}};
  const auto result = run_op_sharing(spec);
  const auto mean = [&](size_t from, size_t count) {
    double sum = 0;
    for (size_t i = from; i < from + count; ++i) sum += result.share[i];
    return sum / static_cast<double>(count);
  };
  CHECK(mean(0, 1000) == 0);
  CHECK(mean(1000, 30) > 0);
  CHECK(mean(1800, 200) > 0.8);
  // Two odd iterations show the phase; from then on five run alone.
  size_t alone = 0;
  for (size_t i = 2001; i < 2012; ++i) alone += result.share[i] == 0 ? 1 : 0;
  CHECK(alone >= 5);
  CHECK(mean(2300, 200) > 0.8);
  CHECK(mean(2500, 500) == 0);
  CHECK(result.slowdown < 0.01);
}

TEST_CASE("the two jobs of AntMan's tables 1 and 2") {
  // Printed minutes: seed text, table 2. 0 stands for a job that failed.
  const auto rows = sim::run_two_jobs({});
  REQUIRE(rows.size() == 5);
  const auto near = [](double value, double printed) { return std::abs(value - printed) <= 0.05 * printed; };
  CHECK(rows[0].a_min == 0);
  CHECK(near(rows[0].b_min, 91.1));
  CHECK(near(rows[1].a_min, 43.0));
  CHECK(near(rows[1].b_min, 108.2));
  CHECK(near(rows[2].a_min, 43.1));
  CHECK(rows[2].b_min == 0);
  CHECK(near(rows[3].a_min, 43.4));
  // B's 541.6 min under unified memory do not follow from the text: see benchmarks/results/antman.md.
  CHECK(rows[3].b_min > 91.1);
  CHECK(near(rows[4].a_min, 43.9));
  CHECK(near(rows[4].b_min, 91.8));
  CHECK(rows[4].a_min <= 43.9);
  CHECK(rows[4].b_min <= 91.8 + 0.05);  // printed to a tenth
}
