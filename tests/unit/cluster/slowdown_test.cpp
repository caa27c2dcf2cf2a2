// Learning about jobs beside each other: the predictor of slowdowns, and the tuner of batch sizes.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "cluster/learn/slowdown.hpp"
#include "cluster/training/batch_tuner.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::cluster;

namespace {

JobInfo job_of(const std::string& config) {
  JobInfo info;
  info.config = config;
  info.demands = {0.93};
  info.guaranteed = false;
  return info;
}

// A job whose batch sizes are first, 2 x first, ... and back to first / 4.
JobInfo tunable(const std::string& model, double first, double noise_scale) {
  JobInfo info = job_of(model + " (batch size " + std::to_string(int(first)) + ")");
  info.batch = first;
  info.batch_sizes = {first, first * 2, first * 4, first / 2, first / 4};
  info.noise_scale = noise_scale;
  info.ephemeral_bytes = 2000;
  info.memory_bytes = 2500;
  return info;
}

}  // namespace

TEST_CASE("batch sizes change memory, the name of the configuration and the iterations that are needed") {
  const JobInfo info = tunable("LM", 16, 48);
  CHECK(iterations_factor(info) == 1);
  const JobInfo twice = with_batch(info, 32);
  CHECK(twice.config == "LM (batch size 32)");
  CHECK(twice.memory_bytes == 4500);
  CHECK(iterations_factor(twice) == Approx(0.5 * (48.0 + 32) / (48 + 16)));
  CHECK(assumed_iteration_factor(twice) == Approx(1.8));
  CHECK(with_batch(twice, 16).memory_bytes == info.memory_bytes);
  JobInfo nameless = info;
  nameless.config = "mine";
  CHECK(with_batch(nameless, 8).config == "mine (batch size 8)");
}

TEST_CASE("slowdowns of pairs that were never seen are predicted from those of other pairs") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  std::normal_distribution<double> normal;
  double error = 0, mean_error = 0;
  for (int repeat = 0; repeat < 10; ++repeat) {
    // Each job has its own sensitivity and its own pressure on others; the noise is a tenth.
    constexpr size_t kJobs = 20;
    double feels[kJobs], presses[kJobs];
    for (size_t i = 0; i < kJobs; ++i) {
      feels[i] = 0.3 * std::abs(normal(random));
      presses[i] = 0.3 * std::abs(normal(random));
    }
    const auto truth = [&](size_t i, size_t j) { return std::exp(0.1 + feels[i] + presses[j]); };
    SlowdownModel model;
    double sum = 0, count = 0;
    for (int k = 0; k < 150; ++k) {
      const size_t i = test::uniform(random, 0, kJobs - 1), j = test::uniform(random, 0, kJobs - 1);
      const double seen = std::max(1.0, truth(i, j) * (1 + 0.05 * normal(random)));
      model.observe(job_of("j" + std::to_string(i)), job_of("j" + std::to_string(j)), seen);
      sum += seen;
      ++count;
    }
    for (size_t i = 0; i < kJobs; ++i)
      for (size_t j = 0; j < kJobs; ++j) {
        const JobInfo a = job_of("j" + std::to_string(i)), b = job_of("j" + std::to_string(j));
        const auto known = model.excess(a, model.ref(a.config), b, model.ref(b.config));
        CHECK(known.mean == model.excess(a, b).mean);
        CHECK(known.spread == model.excess(a, b).spread);
        if (model.seen(a, b)) continue;
        error += std::abs(1 + model.excess(a, b).mean - truth(i, j)) / truth(i, j);
        mean_error += std::abs(sum / count - truth(i, j)) / truth(i, j);
        CHECK(model.excess(a, b).spread > 0);
      }
    const PredictionReport report = model.predictions();
    CHECK(report.observations == 150);
    CHECK(report.early.pairs > 50);
    CHECK(report.late.pairs > 10);
    CHECK(report.late.error < report.late.mean_error);
  }
  CHECK(error < 0.5 * mean_error);
}

TEST_CASE("a pair that was seen has the mean of what was seen, and what was known before is no prediction") {
  SlowdownModel model;
  const JobInfo a = job_of("a"), b = job_of("b"), nameless = job_of("");
  model.know(a, b, 1.5);
  CHECK(model.seen(a, b));
  CHECK(model.excess(a, b).mean == Approx(0.5));
  model.observe(a, b, 1.7);
  CHECK(model.excess(a, b).mean == Approx(std::sqrt(1.5 * 1.7) - 1));
  CHECK(model.predictions().early.pairs == 0);
  CHECK_FALSE(model.seen(b, a));
  CHECK_FALSE(model.seen(nameless, nameless));
  model.observe(a, b, 0);  // nothing was measured
  CHECK(model.predictions().observations == 1);
  const double before = model.excess(nameless, nameless).mean;
  for (int i = 0; i < 50; ++i) model.observe(nameless, nameless, 1.2);
  const SlowdownModel::Estimate after = model.excess(nameless, nameless);
  CHECK(after.mean < before);
  CHECK(1 + after.mean + after.spread ==
        Approx(std::max(model.nameless_least(),
                        (1 + SlowdownModel::guessed(nameless, nameless)) * model.nameless_factor())));
}

TEST_CASE(
    "the batch tuner comes near the best sizes by enumeration within 17 rounds, and stays within memory") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  std::uniform_real_distribution<double> real(0, 1);
  std::normal_distribution<double> normal;
  double regret = 0, untuned = 0, rounds = 0, worst = 0;
  constexpr int kInstances = 60;
  for (int instance = 0; instance < kInstances; ++instance) {
    const std::vector<JobInfo> start = {
        tunable("A" + std::to_string(instance), 16, 16 * (0.5 + 3.5 * real(random))),
        tunable("B" + std::to_string(instance), 64, 64 * (0.5 + 3.5 * real(random)))};
    const uint64_t memory = 6000 + test::uniform(random, 0, 12000);
    // The part of an iteration that no batch size changes, how strongly the job feels the other, how strongly it
    // presses with its size.
    const double fixed[2] = {real(random), real(random)}, feels[2] = {real(random), real(random)};
    const auto truth = [&](const std::vector<JobInfo>& jobs) {
      std::vector<double> out;
      for (size_t i = 0; i < 2; ++i) {
        const double grown = jobs[i].batch / jobs[i].batch_sizes[0],
                     other = jobs[1 - i].batch / jobs[1 - i].batch_sizes[0];
        out.push_back((fixed[i] + (1 - fixed[i]) * grown) * (1 + feels[i] * std::sqrt(other)) *
                      iterations_factor(jobs[i]));
      }
      return out;
    };
    const auto predict = [](const std::vector<JobInfo>& jobs) {
      std::vector<double> out;
      for (const JobInfo& job : jobs)
        out.push_back(1.4 * assumed_iteration_factor(job) * iterations_factor(job));
      return out;
    };
    const auto cost = [&](const std::vector<JobInfo>& jobs) {
      const std::vector<double> slow = truth(jobs);
      return std::log(slow[0]) + std::log(slow[1]);
    };
    training::BatchTuner tuner;
    std::vector<JobInfo> jobs = start;
    bool ended = false;
    size_t used = 0;
    for (; used < 40 && !ended; ++used) {
      const std::vector<double> sizes = tuner.next(jobs, memory, predict, &ended);
      for (size_t i = 0; i < 2; ++i) jobs[i] = with_batch(jobs[i], sizes[i]);
      CHECK(jobs[0].memory_bytes + jobs[1].memory_bytes <= memory);
      std::vector<double> slow = truth(jobs);
      for (double& value : slow) value *= 1 + 0.01 * normal(random);
      tuner.measured(jobs, slow);
    }
    CHECK(ended);
    CHECK(used <= training::BatchTuner::kMostRounds + 1);
    double best = 1e9;
    for (const double a : start[0].batch_sizes)
      for (const double b : start[1].batch_sizes) {
        const std::vector<JobInfo> then = {with_batch(start[0], a), with_batch(start[1], b)};
        if (then[0].memory_bytes + then[1].memory_bytes <= memory) best = std::min(best, cost(then));
      }
    regret += (cost(jobs) - best) / 2;
    untuned += (cost(start) - best) / 2;
    worst = std::max(worst, (cost(jobs) - best) / 2);
    rounds += static_cast<double>(used);
  }
  INFO("mean regret " << regret / kInstances << ", worst " << worst << ", untuned " << untuned / kInstances
                      << ", rounds " << rounds / kInstances);
  CHECK(regret / kInstances < 0.03);
  CHECK(regret < 0.2 * untuned);
}

TEST_CASE(
    "the batch tuner lets no guaranteed job exceed its limit by prediction, and keeps what it cannot "
    "change") {
  training::BatchTuner tuner;
  std::vector<JobInfo> jobs = {tunable("A", 16, 64)};
  jobs[0].guaranteed = true;
  bool ended = false;
  const auto slower = [](const std::vector<JobInfo>& of) {
    return std::vector<double>(of.size(), of[0].batch == 16 ? 1.0 : 1.05);
  };
  CHECK(tuner.next(jobs, 1 << 20, slower, &ended) == std::vector<double>{16});
  const std::vector<JobInfo> fixed = {job_of("a"), job_of("b")};
  CHECK(tuner.next(fixed, 1 << 20, slower, &ended) == std::vector<double>{0, 0});
  CHECK(tuner.best_alone(fixed[0]) == 1);
  // Other batch sizes are compared with the measurement alone.
  jobs[0].guaranteed = false;
  jobs[0] = with_batch(jobs[0], 64);
  tuner.measured(jobs, {0.4});
  CHECK(tuner.best_alone(with_batch(jobs[0], 16)) == Approx(0.4));
}

TEST_CASE("the batch tuner gives no job the sizes of another one of the same configuration") {
  training::BatchTuner tuner;
  JobInfo many = job_of("A (batch size 1)");
  many.batch = 1;
  for (size_t size = 1; size <= training::BatchTuner::kMostRounds; ++size)
    many.batch_sizes.push_back(static_cast<double>(size));
  for (const double size : many.batch_sizes) tuner.measured({with_batch(many, size)}, {1 / size});
  const auto equal = [](const std::vector<JobInfo>& of) { return std::vector<double>(of.size(), 1.0); };
  bool ended = false;
  const JobInfo none = job_of("A (batch size 1)");
  CHECK(tuner.next({none}, 1 << 20, equal, &ended) == std::vector<double>{0});
  JobInfo two = many;
  two.batch_sizes = {1, 2};
  const double next = tuner.next({two}, 1 << 20, equal, &ended)[0];
  CHECK((next == 1 || next == 2));
}
