// Distributions, histograms, batch times, scores, and the score queue against brute force.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <vector>

#include "sched/slo/batch_time.hpp"
#include "sched/slo/distribution.hpp"
#include "sched/slo/feature_model.hpp"
#include "sched/slo/histogram.hpp"
#include "sched/slo/kernels.hpp"
#include "sched/slo/score.hpp"
#include "sched/slo/score_queue.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare::sched::slo;
using gpushare::test::Random;
using gpushare::test::uniform;

namespace {

Distribution random_distribution(Random& random, size_t bins) {
  std::uniform_real_distribution<double> unit(0, 1);
  std::vector<double> edges{unit(random) * 1e8};
  std::vector<double> weights;
  for (size_t i = 0; i < bins; ++i) {
    edges.push_back(edges.back() + 1e6 + unit(random) * 5e7);
    weights.push_back(i > 0 && i + 1 < bins && uniform(random, 0, 4) == 0 ? 0 : unit(random) + 0.01);
  }
  return *Distribution::from_bins(edges, weights);
}

// Orloj's eq 4.8 as printed, integrated: P(max <= x) = sum over subsets s of (-1)^(k-n_s) (n_s^k / k!)
// F^s(x)^k.
double subset_cdf(const std::vector<Distribution>& parts, double x) {
  const unsigned k = static_cast<unsigned>(parts.size());
  double factorial = 1;
  for (unsigned i = 2; i <= k; ++i) factorial *= i;
  double sum = 0;
  for (unsigned subset = 1; subset < 1u << k; ++subset) {
    const unsigned n = static_cast<unsigned>(__builtin_popcount(subset));
    double mean = 0;
    for (unsigned i = 0; i < k; ++i)
      if ((subset >> i & 1) != 0) mean += parts[i].cdf(x);
    mean /= n;
    sum += ((k - n) % 2 == 0 ? 1 : -1) * std::pow(n, k) / factorial * std::pow(mean, k);
  }
  return sum;
}

double slack(uint64_t deadline, uint64_t now) {
  return static_cast<double>(deadline) - static_cast<double>(now);
}

}  // namespace

TEST_CASE("the product of CDFs equals the sum over subsets of eq 4.8") {
  Random random(gpushare::test::seed());
  for (unsigned k = 2; k <= 7; ++k) {
    std::vector<Distribution> parts;
    for (unsigned i = 0; i < k; ++i) parts.push_back(random_distribution(random, 6));
    for (int i = 0; i < 50; ++i) {
      const double x = static_cast<double>(uniform(random, 0, 400'000'000));
      double product = 1;
      for (const Distribution& part : parts) product *= part.cdf(x);
      CHECK(subset_cdf(parts, x) == Approx(product).margin(1e-8));
    }
  }
}

TEST_CASE("the maximum of one draw and k others: mean, CDF and quantiles") {
  Random random(gpushare::test::seed());
  for (unsigned count : {0u, 1u, 3u, 7u, 15u, 31u}) {
    const Distribution one = random_distribution(random, 9), others = random_distribution(random, 12);
    const Distribution most = maximum(one, others, count, 1 << 12);
    for (double q : {0.01, 0.2, 0.5, 0.9, 0.99}) {
      const double x = most.quantile_ns(q);
      // The product bends inside a bin and is followed by four straight lines there.
      CHECK(one.cdf(x) * std::pow(others.cdf(x), count) == Approx(q).margin(0.02));
    }
    CHECK(expected_maximum_ns(one, others, count) == Approx(most.mean_ns()).epsilon(0.005));
    CHECK(maximum(one, others, count, 32).bins() <= 32);
    CHECK(maximum(one, others, count, 32).mean_ns() == Approx(most.mean_ns()).epsilon(0.02));
    // Never fewer than one bin, from the shortest to the longest.
    for (size_t bins : {0, 1}) {
      const Distribution coarse = most.coarsened(bins);
      CHECK(coarse.bins() == 1);
      CHECK(coarse.min_ns() == most.min_ns());
      CHECK(coarse.max_ns() == most.max_ns());
    }
  }
  CHECK(maximum(Distribution(), Distribution::point(5), 3, 8).empty());
  CHECK(maximum(Distribution::point(100), Distribution::point(700), 3, 8).mean_ns() ==
        Approx(699.5).margin(0.5));
  // k uniform draws on [0, 1]: k / (k + 1).
  const Distribution flat = *Distribution::from_bins(std::vector<double>{0, 1e9}, std::vector<double>{1});
  for (unsigned k = 1; k <= 15; ++k)
    CHECK(expected_maximum_ns(flat, flat, k - 1) == Approx(1e9 * k / (k + 1)).epsilon(1e-9));
}

TEST_CASE("mixtures weigh by the observed shares") {
  const Distribution low = *Distribution::from_bins(std::vector<double>{10, 20}, std::vector<double>{1});
  const Distribution high = *Distribution::from_bins(std::vector<double>{100, 200}, std::vector<double>{1});
  const Distribution none;
  const Distribution* parts[] = {&low, &high, &none};
  const double weights[] = {10, 1, 5};
  const Distribution both = mixture(parts, weights);
  CHECK(both.cdf(50) == Approx(10.0 / 11));
  CHECK(both.mean_ns() == Approx((10 * 15 + 150) / 11.0));
  const double nothing[] = {0, 0, 0};
  CHECK(mixture(parts, nothing).empty());
}

TEST_CASE("a distribution refuses what is none") {
  const auto bins = [](std::vector<double> edges, std::vector<double> weights) {
    return Distribution::from_bins(edges, weights);
  };
  CHECK_FALSE(bins({}, {}).ok());
  CHECK_FALSE(bins({1, 2}, {1, 1}).ok());
  CHECK_FALSE(bins({2, 1}, {1}).ok());
  CHECK_FALSE(bins({1, 1}, {1}).ok());
  CHECK_FALSE(bins({-1, 1}, {1}).ok());
  CHECK_FALSE(bins({1, NAN}, {1}).ok());
  CHECK_FALSE(bins({1, 2}, {-1}).ok());
  CHECK_FALSE(bins({1, 2}, {0}).ok());
  CHECK(bins({1, 2}, {0}).status().code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("the histogram keeps its window, merges, survives text and notices a shift") {
  Random random(gpushare::test::seed());
  Histogram histogram({.window = 500, .drift_samples = 0});
  for (int i = 0; i < 2000; ++i) histogram.record(uniform(random, 1'000'000, 3'000'000));
  CHECK(histogram.count() == 500);
  CHECK(histogram.distribution(32).mean_ns() == Approx(2e6).epsilon(0.05));
  for (int i = 0; i < 500; ++i) histogram.record(9'000'000);
  CHECK(histogram.distribution(32).min_ns() == Approx(9e6).epsilon(1e-6));
  CHECK(histogram.distribution(32).max_ns() == 9e6);

  Histogram other({.window = 500, .drift_samples = 0});
  for (int i = 0; i < 250; ++i) other.record(1'000'000);
  histogram.merge(other);
  CHECK(histogram.count() == 500);
  CHECK(histogram.distribution(32).mean_ns() == Approx(5e6).epsilon(0.01));
  histogram.merge(histogram);
  CHECK(histogram.distribution(32).mean_ns() == Approx(5e6).epsilon(0.01));

  const auto again = Histogram::parse(histogram.serialize());
  REQUIRE(again.ok());
  CHECK(again->serialize() == histogram.serialize());
  CHECK(again->distribution(32).mean_ns() == Approx(5e6).epsilon(0.03));
  for (const char* bad :
       {"", "histogram", "gpushare-histogram 2", "gpushare-histogram 1 0 0", "gpushare-histogram 1 10 11",
        "gpushare-histogram 1 10 2 5", "gpushare-histogram 1 10 1 99999", "gpushare-histogram 1 10 1 5 5",
        "gpushare-histogram 1 10 1 0", "gpushare-histogram 1 10 1 -5"}) {
    INFO(bad);
    CHECK(Histogram::parse(bad).status().code() == GPUSHARE_MALFORMED_INPUT);
  }

  Histogram drifting({.window = 4096});
  for (int i = 0; i < 3000; ++i) drifting.record(uniform(random, 1'000'000, 3'000'000));
  CHECK(drifting.drifts() == 0);
  for (int i = 0; i < 64; ++i) drifting.record(uniform(random, 5'000'000, 6'000'000));
  CHECK(drifting.drifts() >= 1);
  CHECK(drifting.count() <= 96);
  drifting.reset();
  CHECK(drifting.distribution(8).empty());
  drifting.record(0);
  drifting.record(UINT64_MAX);
  CHECK(drifting.count() == 2);
  CHECK(drifting.distribution(8).max_ns() <= 1.1e12);
}

TEST_CASE("buckets are contiguous and hold their durations") {
  for (size_t b = 1; b + 1 < Histogram::kBuckets; ++b) {
    const uint64_t low = static_cast<uint64_t>(Histogram::bucket_low_ns(b));
    REQUIRE(Histogram::bucket_of(low) == b);
    if (b > 1) REQUIRE(Histogram::bucket_of(low - 1) == b - 1);
  }
}

TEST_CASE("the batch-time model finds c0 and c1") {
  Random random(gpushare::test::seed());
  std::normal_distribution<double> noise(1, 0.02);
  BatchTimeModel model(1e6, 1);
  for (int i = 0; i < 400; ++i) {
    const unsigned k = static_cast<unsigned>(uniform(random, 1, 16));
    const double longest = static_cast<double>(uniform(random, 10'000'000, 90'000'000));
    model.observe(k, longest, (30e6 + 0.2 * k * longest) * noise(random));
  }
  CHECK(model.c0_ns() == Approx(30e6).epsilon(0.1));
  CHECK(model.c1() == Approx(0.2).epsilon(0.05));
  CHECK(model.version() > 1);
  // Batches that take what was said change nothing that anybody would have to compute anew.
  BatchTimeModel known(10e6, 0.5);
  for (unsigned i = 0; i < 100; ++i) known.observe(1 + i % 8, 20e6, known.duration_ns(1 + i % 8, 20e6));
  CHECK(known.version() == 1);
  // Only one kind of batch: the sum is right although the two cannot be told apart.
  BatchTimeModel single(10, 1);
  for (int i = 0; i < 100; ++i) single.observe(1, 1000, 2020);
  CHECK(single.duration_ns(1, 1000) == Approx(2020));
  const double before = single.c1();
  single.observe(0, 1, 1);
  single.observe(1, NAN, 1);
  single.observe(1, 1, -1);
  single.freeze();
  for (int i = 0; i < 100; ++i) single.observe(1, 1000, 9999);
  CHECK(single.c1() == before);
}

TEST_CASE("the batch-time model leaves a line that meets the commonest batches and no others") {
  // Batches of two take what the first line says. The truth is 4 ms + 1 ms a member.
  for (const bool told : {true, false}) {
    INFO((told ? "told" : "inferred"));
    BatchTimeModel model(1e6, 0.5);
    const double longest = 5e6;
    for (int i = 0; i < 100; ++i)
      for (const unsigned k : {2, 2, 2, 2, 2, 2, 1, 1, 4, 8}) model.observe(k, longest, 4e6 + 1e6 * k, told);
    CHECK(model.c0_ns() == Approx(4e6).epsilon(0.05));
    CHECK(model.c1() == Approx(0.2).epsilon(0.05));
  }
}

TEST_CASE("the batch-time model tells how much batches deviate from it") {
  Random random(gpushare::test::seed());
  INFO("seed " << gpushare::test::seed());
  std::normal_distribution<double> noise(0, 0.3);
  BatchTimeModel exact(1e6, 1), noisy(1e6, 1), inferred(1e6, 1);
  for (int i = 0; i < 2000; ++i) {
    const unsigned k = static_cast<unsigned>(uniform(random, 1, 16));
    const double longest = static_cast<double>(uniform(random, 10'000'000, 90'000'000));
    const double took = 30e6 + 0.2 * k * longest, factor = std::exp(noise(random));
    exact.observe(k, longest, took);
    noisy.observe(k, longest, took * factor);
    inferred.observe(k, longest, took * factor, /*told=*/false);
  }
  CHECK(exact.deviations().empty());
  CHECK(inferred.deviations().empty());  // they are the requests' own
  REQUIRE(noisy.deviations().size() == 5);
  CHECK(std::is_sorted(noisy.deviations().begin(), noisy.deviations().end()));
  // The tenth and the ninetieth percentile of the factor: e^-0.384 and e^0.384.
  CHECK(noisy.deviations().front() == Approx(0.68).epsilon(0.15));
  CHECK(noisy.deviations().back() == Approx(1.47).epsilon(0.15));
}

TEST_CASE("where times are inferred the fixed part stays below what the shortest batches take") {
  BatchTimeModel model(8e6, 0.5);
  for (int i = 0; i < 300; ++i)
    model.observe(4, 6e6, i % 6 == 0 ? 5e6 : 24e6, /*told=*/false);  // one in six is short
  CHECK(model.c0_ns() < 5e6);
}

TEST_CASE("stalled batches do not move the batch-time model, and sizes off its line have a factor") {
  Random random(gpushare::test::seed());
  INFO("seed " << gpushare::test::seed());
  std::normal_distribution<double> noise(0, 0.1);
  BatchTimeModel model(1e6, 1);
  for (int i = 0; i < 600; ++i) {
    const unsigned k = static_cast<unsigned>(uniform(random, 1, 16));
    const double longest = static_cast<double>(uniform(random, 10'000'000, 90'000'000));
    const double stall = uniform(random, 0, 9) == 0 ? 5e9 : 0;
    model.observe(k, longest, (30e6 + 0.2 * k * longest) * std::exp(noise(random)) + stall);
  }
  CHECK(model.c0_ns() == Approx(30e6).epsilon(0.25));
  CHECK(model.c1() == Approx(0.2).epsilon(0.15));
  // Steps of four, a power of the size, a sum: of constant requests, every size is right.
  const auto shapes = {+[](unsigned k) { return 5e6 + 1e6 * ((k + 3) / 4 * 4); },
                       +[](unsigned k) { return 5e6 + 4e6 * std::sqrt(k); },
                       +[](unsigned k) { return 5e6 + 1e6 * k; },
                       +[](unsigned k) { return k == 8 ? 40e6 : 10e6; }};
  for (const auto shape : shapes) {
    BatchTimeModel bent(5e6, 0.1);
    for (int i = 0; i < 2000; ++i) {
      const unsigned k = static_cast<unsigned>(uniform(random, 1, 16));
      bent.observe(k, 10e6, shape(k));
    }
    for (unsigned k = 1; k <= 16; ++k) {
      INFO("size " << k << " takes " << shape(k));
      CHECK(bent.duration_ns(k, 10e6) == Approx(shape(k)).epsilon(0.3));
    }
  }
  // c1 keeps its range while times are inferred.
  BatchTimeModel inferred(5e6, 1);
  for (int i = 0; i < 2000; ++i)
    inferred.observe(1 + static_cast<unsigned>(i) % 16, 5e6, 20e6 * std::exp(noise(random)), /*told=*/false);
  CHECK(inferred.c1() >= 0.25);
  CHECK(inferred.c1() <= 4);
}

TEST_CASE("the score equals its definition, whatever b") {
  Random random(gpushare::test::seed());
  std::uniform_real_distribution<double> unit(0, 1);
  for (double rate_per_ms : {1e-6, 1e-4, 1e-2, 1e-1, 10.0}) {
    const double b = rate_per_ms / 1e6;
    const Distribution batch = random_distribution(random, 10);
    const double mean = batch.mean_ns();
    const std::vector<CostStep> steps{{0, 1}, {2e8, 3}};
    const ScoreCurve single(batch, mean, b), both(batch, mean, b, steps);
    // p = (1 / E[L]) E[1{L <= s} e^{-b (s - L)}] by the midpoint rule.
    const auto expected = [&](double s) {
      double sum = 0;
      for (size_t i = 0; i < batch.bins(); ++i) {
        const double from = batch.edges_ns()[i], width = batch.edges_ns()[i + 1] - from;
        const int cuts = 20'000;
        for (int j = 0; j < cuts; ++j) {
          const double l = from + width * (j + 0.5) / cuts;
          if (l <= s) sum += batch.probability(i) / cuts * std::exp(-b * (s - l));
        }
      }
      return sum / mean;
    };
    for (int i = 0; i < 25; ++i) {
      const double s = unit(random) * 1.5 * batch.max_ns() - 1e8;
      INFO("b " << rate_per_ms << "/ms, slack " << s);
      CHECK(single.at(s) * mean == Approx(expected(s) * mean).epsilon(0.01).margin(1e-5));
      CHECK(both.at(s) == Approx(single.at(s) + 3 * single.at(s + 2e8)).epsilon(1e-6).margin(1e-18));
    }
    // Runs are what they say.
    for (const ScoreCurve::Run& run : both.runs()) {
      const double end = std::min(run.end_ns, run.start_ns + 1e9);
      double previous = both.at(run.start_ns);
      for (int i = 1; i < 20; ++i) {
        const double next = both.at(run.start_ns + (end - run.start_ns) * i / 20);
        CHECK((run.rising ? next >= previous * (1 - 1e-9) : next <= previous * (1 + 1e-9)));
        previous = next;
      }
    }
  }
  CHECK(ScoreCurve().at(1e9) == 0);
  CHECK(ScoreCurve(Distribution(), 1, 1).empty());
}

TEST_CASE(
    "the score of several cost steps is the sum of theirs, with bins of a nanosecond beside wide ones") {
  Random random(gpushare::test::seed());
  INFO("seed " << gpushare::test::seed());
  std::uniform_real_distribution<double> unit(0, 1);
  size_t wrong = 0;
  for (int round = 0; round < 300; ++round) {
    Histogram histogram;
    for (int i = 0; i < 6; ++i) histogram.record(uniform(random, 1000, 300'000));
    const Distribution batch = histogram.distribution(10);
    const double mean = batch.mean_ns(), b = 5e-4 * (0.1 + unit(random)) / 1e6;
    const std::vector<CostStep> steps{{0, unit(random) + 0.1},
                                      {static_cast<double>(uniform(random, 0, 400'000)), 2},
                                      {unit(random) * 1e6, 3}};
    const ScoreCurve single(batch, mean, b), sum(batch, mean, b, steps);
    for (int i = 0; i < 100; ++i) {
      const double slack = unit(random) * 1.5e6 - 1e6;
      double expected = 0;
      for (const CostStep& step : steps) expected += step.cost * single.at(slack + step.after_ns);
      const double at = sum.at(slack);
      wrong += std::abs(at - expected) > 1e-6 * (expected + 1e-9 / mean) ? 1 : 0;
      wrong += at > 6.2 / mean ? 1 : 0;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("32 bins keep the means of what was recorded within 2%, the quantiles within 2.5%") {
  Random random(gpushare::test::seed());
  INFO("seed " << gpushare::test::seed());
  std::uniform_real_distribution<double> unit(0, 1);
  std::normal_distribution<double> normal(0, 1);
  for (int kind = 0; kind < 5; ++kind) {
    Histogram histogram({.drift_samples = 0});
    std::vector<double> durations;
    for (int i = 0; i < 1500; ++i) {
      const double u = unit(random),
                   draws[] = {1, 0.5 + u, u < 0.5 ? 0.2 : 1.8, 0.3 * std::pow(std::max(u, 1e-4), -1 / 1.3),
                              std::exp(normal(random))};
      durations.push_back(std::floor(1e7 * draws[kind]));
      histogram.record(static_cast<uint64_t>(durations.back()));
    }
    std::sort(durations.begin(), durations.end());
    const Distribution coarse = histogram.distribution(32);
    CHECK(coarse.bins() <= 32);
    for (const unsigned k : {1u, 5u}) {
      double mean = 0, before = 0;
      for (size_t i = 0; i < durations.size(); ++i) {
        const double below = std::pow(static_cast<double>(i + 1) / 1500, k);
        mean += durations[i] * (below - before);
        before = below;
      }
      INFO("kind " << kind << ", longest of " << k);
      CHECK(expected_maximum_ns(coarse, coarse, k - 1) == Approx(mean).epsilon(0.02));
      const Distribution longest = maximum(coarse, coarse, k - 1, 32);
      CHECK(longest.mean_ns() == Approx(mean).epsilon(0.02));
      for (const double q : {0.1, 0.25, 0.45, 0.55, 0.75, 0.9, 0.99}) {
        const auto rank = static_cast<size_t>(std::pow(q, 1.0 / k) * 1500);  // neighbours lie apart in a tail
        const double low = durations[rank - 2], high = durations[std::min<size_t>(rank + 2, 1499)];
        if (kind == 2 && std::abs(std::pow(q, 1.0 / k) - 0.5) < 0.05) continue;  // between the two
        INFO("quantile " << q);
        CHECK(longest.quantile_ns(q) >= 0.975 * low);
        CHECK(longest.quantile_ns(q) <= 1.025 * high);
      }
    }
  }
}

TEST_CASE("the score queue equals brute force over seven days, with time standing still and going back") {
  Random random(gpushare::test::seed());
  ScoreQueue queue;
  std::vector<ScoreCurve> curves;
  const std::vector<CostStep> steps{{0, 1}, {3e8, 2}};
  for (int i = 0; i < 3; ++i) {
    const Distribution batch = random_distribution(random, 12);
    curves.emplace_back(batch, batch.mean_ns(), 1e-10,
                        i == 2 ? std::span<const CostStep>(steps) : std::span<const CostStep>());
    queue.add_class(curves.back());
  }
  struct Pending {
    ScoreQueue::Handle handle;
    uint32_t of;
    uint64_t deadline;
    uint64_t id;
  };
  std::vector<Pending> pending;
  uint64_t now = 1'700'000'000'000'000'000;
  const uint64_t week = 7ull * 24 * 3600 * 1'000'000'000;
  constexpr int kSteps = 60'000;
  size_t wrong = 0;
  for (int i = 0; i < kSteps; ++i) {
    const uint64_t kind = uniform(random, 0, 99);
    if (kind == 0)
      now += week / 600;
    else if (kind < 60)
      now += uniform(random, 0, 5'000'000);
    else if (kind == 99)
      now -= uniform(random, 0, 200'000'000);
    if (pending.size() < 40 && (pending.empty() || uniform(random, 0, 1) == 0)) {
      Pending next{};
      next.of = static_cast<uint32_t>(uniform(random, 0, 2));
      next.deadline = now + uniform(random, 0, 2'000'000'000);
      if (!pending.empty() && uniform(random, 0, 9) == 0) next.deadline = pending[0].deadline;
      next.id = static_cast<uint64_t>(i) + 1;
      next.handle = queue.insert(next.of, next.deadline, next.id);
      pending.push_back(next);
    } else {
      const size_t which = uniform(random, 0, pending.size() - 1);
      if (!queue.erase(pending[which].handle)) ++wrong;
      pending[which] = pending.back();
      pending.pop_back();
    }
    if (i % 20'000 == 10'000) {  // a curve is replaced
      const Distribution batch = random_distribution(random, 12);
      curves[1] = ScoreCurve(batch, batch.mean_ns(), 1e-10);
      REQUIRE(queue.set_curve(1, curves[1]).ok());
    }
    const auto top = queue.best(now);
    if (pending.empty() != !top.has_value()) ++wrong;
    if (pending.empty() || !top) continue;
    double best = 0, reported = -1;
    for (const Pending& p : pending) {
      const double score = curves[p.of].at(slack(p.deadline, now));
      best = std::max(best, score);
      if (p.handle == top->handle && p.id == top->id) reported = score;
    }
    if (!(reported >= best * (1 - 1e-6) - 1e-17)) ++wrong;
  }
  CHECK(wrong == 0);
  CHECK_FALSE(queue.erase(ScoreQueue::kNoHandle));
  CHECK(queue.insert(99, 1, 1) == ScoreQueue::kNoHandle);
  CHECK(queue.set_curve(99, curves[0]).code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("scores a million million times apart are told apart") {
  const Distribution batch = Distribution::point(1e6);
  const auto curve = [&](double cost) {
    return ScoreCurve(batch, 1e6, 1e-9, std::vector<CostStep>{{0, cost}});
  };
  ScoreQueue queue;
  queue.add_class(curve(1));
  queue.add_class(curve(1000));
  const ScoreQueue::ClassId far = queue.add_class(curve(1e12));
  queue.insert(0, 5'000'000, 1);
  queue.insert(far, 500'000, 2);  // lost already
  CHECK(queue.best(0)->id == 1);
  queue.insert(far, 50'000'000, 3);
  CHECK(queue.best(0)->id == 3);
}

TEST_CASE("a line through features: found exactly without noise, closely with it, and never out of range") {
  Random random(gpushare::test::seed());
  INFO("seed " << gpushare::test::seed());
  std::uniform_real_distribution<double> unit(0, 1);
  std::normal_distribution<double> normal(0, 1);
  for (const double noise : {0.0, 0.3}) {
    FeatureModel model(3);
    CHECK(model.class_of(std::vector<double>{1, 1, 1}) == 0);
    const auto draw = [&] {
      return std::vector<double>{unit(random) * 4000, unit(random) * 1e-3, 0};
    };  // of any size; one always 0
    const auto truth = [](const std::vector<double>& x) { return 2e6 + 5e3 * x[0] + 1e10 * x[1]; };
    for (int i = 0; i < 4000; ++i) {
      const std::vector<double> x = draw();
      model.observe(x, static_cast<uint64_t>(truth(x) * std::max(0.2, 1 + noise * normal(random))));
    }
    REQUIRE(model.ready());
    double worst = 0;
    for (int i = 0; i < 200; ++i) {
      const std::vector<double> x = draw();
      worst = std::max(worst, std::abs(model.predict_ns(x) / truth(x) - 1));
    }
    CHECK(worst < (noise == 0 ? 1e-3 : 0.15));
    // Durations of a class before it has any: around the prediction, as wide as the noise.
    const std::vector<double> x = draw();
    std::vector<uint64_t> first;
    model.first_durations_ns(model.class_of(x), first);
    REQUIRE(first.size() == FeatureModel::kFirstDurations);
    CHECK(std::is_sorted(first.begin(), first.end()));
    CHECK(static_cast<double>(first[8]) / truth(x) > 0.8);
    CHECK(static_cast<double>(first[8]) / truth(x) < 1.2);
    CHECK((static_cast<double>(first.back() - first.front()) > 0.5 * truth(x)) == (noise > 0));
    // Far outside what was seen.
    CHECK(model.predict_ns(std::vector<double>{1e300, 0, 0}) < 1e9);
    CHECK(model.predict_ns(std::vector<double>{-1e300, 0, 0}) >= 1);
    CHECK(model.predict_ns(std::vector<double>{INFINITY, -INFINITY, 0}) >= 1);
  }
}

TEST_CASE("features so large that nothing can be computed of them do no harm") {
  FeatureModel model(1);
  const auto x = [](int i) { return std::vector<double>{i % 2 == 0 ? 1e300 : -1e300}; };
  for (int i = 0; i < 100; ++i) model.observe(x(i), 1000 + static_cast<uint64_t>(i));
  for (int i = 0; model.ready() && i < 2; ++i) {
    CHECK(model.predict_ns(x(i)) >= 500);
    CHECK(model.predict_ns(x(i)) <= 2200);
  }
}

TEST_CASE("the line follows a change of what features mean") {
  FeatureModel model(1);
  const auto observe = [&model](double per_token) {
    for (int i = 0; i < 12'000; ++i) {
      const double x = 1 + i * 37 % 100;
      model.observe(std::vector<double>{x}, static_cast<uint64_t>(x * per_token));
    }
  };
  observe(1e6);
  observe(3e6);
  const double now = model.predict_ns(std::vector<double>{50});
  CHECK(now > 140e6);
  CHECK(now < 160e6);
}

TEST_CASE("all kernels agree") {
  Random random(gpushare::test::seed());
  std::uniform_real_distribution<double> unit(-1, 1);
  const Kernels& fast = kernels();
  const Kernels& plain = portable_kernels();
  INFO(fast.name);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<double> weights(16), by_fast(16), by_plain(16);
    for (double& weight : weights) weight = unit(random);
    std::vector<std::vector<double>> data(uniform(random, 1, 9), std::vector<double>(16));
    std::vector<const double*> rows;
    for (auto& row : data) {
      for (double& value : row) value = unit(random);
      rows.push_back(row.data());
    }
    const double sum_fast = fast.product(rows.data(), rows.size(), weights.data(), by_fast.data(), 16);
    const double sum_plain = plain.product(rows.data(), rows.size(), weights.data(), by_plain.data(), 16);
    REQUIRE(by_fast == by_plain);
    REQUIRE(sum_fast == Approx(sum_plain).margin(1e-12));
  }
}
