// Ekya's micro-profiler (thesis 002, section 2.4.4): what profiling takes of a window, and which configurations are profiled no more.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/micro_profiler.hpp"

#include <algorithm>
#include <functional>

#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace gpushare::cluster {
namespace {

double no_error() {
  return 1;
}

std::vector<std::string> offered(const std::vector<RetrainingConfiguration>& window) {
  std::vector<std::string> names;
  for (const RetrainingConfiguration& configuration : window)
    if (configuration.offered) names.push_back(configuration.name);
  return names;
}

}  // namespace

TEST_CASE("profiling takes the observed part of the epochs on its part of the data") {
  RetrainingConfiguration configuration{"c", 90, 40, {10, {{1, 0.5}, {5, 0.7}}, 0.1}};
  CHECK(configuration.profiling_gpu_seconds() == Approx(2));  // 40 x 0.1 x 5/10
  configuration.profile.epochs = 2;                           // more was observed than is asked for
  CHECK(configuration.profiling_gpu_seconds() == Approx(4));
  CHECK(RetrainingConfiguration{"c", 90, 40}.profiling_gpu_seconds() == 0);
}

TEST_CASE("profiling comes first, and retraining has the rest of the window") {
  // Two devices, 100 s. Two GPU-seconds of profiling on one device: for 2 s inference has the other, at 60. Then 40 s of retraining on one
  // device at 60, and 58 s at 90: (42 x 60 + 58 x 90) / 100.
  const RetrainingProblem problem{2, 100, 0.5, 0, {{"s", 60, {{"all", 1, 1}}, {{{"c", 90, 40}}}}}};
  for (const auto scheduler : {RetrainingScheduler::kEkya, RetrainingScheduler::kGpushare}) {
    const auto plan = run_retraining(problem, problem, scheduler, {{2}, 1});
    CHECK(plan->mean_accuracy == Approx(77.4));
    REQUIRE(plan->windows[0].phases.size() >= 2);
    CHECK(plan->windows[0].profiling_s == Approx(2));
    CHECK(plan->windows[0].phases[0].shares[0].configuration == -1);
    CHECK(plan->windows[0].phases[0].shares[0].inference == Approx(1));
    CHECK(plan->windows[0].phases[1].start_s == Approx(2));
  }
  CHECK(run_retraining(problem, problem, RetrainingScheduler::kThief, {{2}, 1})->windows[0].profiling_s ==
        Approx(2));
  // Who does not profile does not pay.
  const auto uniform = run_retraining(problem, problem, RetrainingScheduler::kUniform, {{2}, 1});
  CHECK(uniform->mean_accuracy ==
        Approx(plan_retraining(problem, RetrainingScheduler::kUniform)->mean_accuracy));
  // Without cost nothing differs from before.
  CHECK(run_retraining(problem, problem, RetrainingScheduler::kEkya, {{0}, 1})->mean_accuracy ==
        Approx(plan_retraining(problem, RetrainingScheduler::kEkya)->mean_accuracy));
  // 58 s are left: too few for 40 GPU-seconds at half a device's share, enough for one device.
  CHECK(run_retraining(problem, problem, RetrainingScheduler::kEkya, {{42}, 1})->mean_accuracy ==
        Approx((82 * 60 + 18 * 90) / 100.0));
  // Profiling takes the whole window and more: one device is left to inference, and nothing is retrained.
  const auto late = run_retraining(problem, problem, RetrainingScheduler::kEkya, {{300}, 1});
  CHECK(late->mean_accuracy == Approx(60));
  CHECK(late->windows[0].profiling_s == 100);
  CHECK(late->windows[0].end_accuracy[0] == 60);
}

TEST_CASE("with profiling, fixed shares agree with brute force over all divisions before and after it") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  const auto number = [&](uint64_t low, uint64_t high) { return double(test::uniform(random, low, high)); };
  for (int round = 0; round < 500; ++round) {
    RetrainingProblem problem{number(1, 2), 100, 0.5, 0, {}};
    const size_t streams = test::uniform(random, 1, 2);
    for (size_t v = 0; v < streams; ++v) {
      Stream stream{"s" + std::to_string(v), number(30, 80), {{"i", 1, number(2, 15) / 10}}, {{}}};
      for (size_t c = test::uniform(random, 0, 2); c-- > 0;)
        stream.windows[0].push_back({"c", number(40, 99), number(10, 120)});
      problem.streams.push_back(stream);
    }
    const double work = number(0, 60);
    const int64_t quanta = problem.quanta(), taken = int64_t(test::uniform(random, 1, uint64_t(quanta)));
    const double profiling = std::min(100.0, work / (double(taken) * 0.5)), left = 100 - profiling;
    // The most that `seconds` can bring with `units`, by every division; with retraining or without.
    const std::function<double(size_t, int64_t, double, bool)> best = [&](size_t v, int64_t units,
                                                                          double seconds, bool retrain) {
      if (v == streams) return 0.0;
      const Stream& stream = problem.streams[v];
      double most = -1;
      for (int64_t i = 0; i <= units; ++i) {
        const double during = stream.accuracy * inference_factor(stream, double(i) * 0.5);
        most = std::max(most, during * seconds + best(v + 1, units - i, seconds, retrain));
        for (int64_t r = 1; retrain && i + r <= units; ++r)
          for (const RetrainingConfiguration& c : stream.windows[0]) {
            const double takes = c.gpu_seconds / (double(r) * 0.5);
            if (takes > seconds) continue;
            const double after = c.accuracy * inference_factor(stream, double(i + r) * 0.5);
            most = std::max(most, during * takes + after * (seconds - takes) +
                                      best(v + 1, units - i - r, seconds, retrain));
          }
      }
      return most;
    };
    const double expected =
        (best(0, quanta - taken, profiling, false) + best(0, quanta, left, true)) / 100 / double(streams);
    const auto got =
        run_retraining(problem, problem, RetrainingScheduler::kFixed, {{work}, double(taken) * 0.5});
    if (!got.ok()) continue;  // fewer quanta than streams
    if (std::abs(got->mean_accuracy - expected) > 1e-7)
      FAIL(got->mean_accuracy << " and " << expected << " in round " << round);
  }
}

TEST_CASE("configurations that are never on the Pareto front are profiled no more, the worst first") {
  // cheap and good are on the front; late is 5 points below good, and bad 20.
  Stream stream{"s", 50, {{"all", 1, 1}}, {}};
  const RetrainingProfile profile{10, {{1, 0.5}, {5, 0.7}}, 0.1};
  for (int w = 0; w < 7; ++w)
    stream.windows.push_back({{"bad", 60, 40}, {"cheap", 70, 10}, {"good", 80, 20}, {"late", 75, 30}});
  RetrainingProblem problem{1, 100, 0.5, 0, {stream}};
  ProfilerReport report;
  auto told = profile_retraining(problem, {0.25, 2}, no_error, report);
  const auto names = [&](size_t w) { return offered(told.streams[0].windows[w]); };
  const std::vector<std::string> all{"bad", "cheap", "good", "late"}, three{"cheap", "good", "late"},
      two{"cheap", "good"};
  CHECK(names(0) == all);
  CHECK(names(1) == all);
  CHECK(names(2) == three);
  CHECK(names(3) == three);
  CHECK(names(4) == two);
  CHECK(names(6) == two);
  CHECK(report.profiled == 0);  // nothing had a profile
  // Nothing is dropped unless it is asked for; all that is never on the front is dropped at once if it is.
  told = profile_retraining(problem, {0, 2}, no_error, report);
  CHECK(names(6) == all);
  told = profile_retraining(problem, {1, 1}, no_error, report);
  CHECK(names(0) == all);
  CHECK(names(1) == two);
  // Once on the front, never dropped.
  problem.streams[0].windows[0][0].accuracy = 95;
  told = profile_retraining(problem, {1, 2}, no_error, report);
  CHECK(names(6) == std::vector<std::string>{"bad", "cheap", "good"});
  // A dropped configuration takes no time, and is not chosen though it would be best.
  for (auto& window : problem.streams[0].windows)
    for (RetrainingConfiguration& configuration : window) configuration.profile = profile;
  problem.streams[0].windows[0][0].accuracy = 60;
  told = profile_retraining(problem, {1, 1}, no_error, report);
  CHECK(report.gpu_seconds[0] == Approx((10 + 20 + 30 + 40) * 0.1 * 0.5));
  // All curves say the same, so that none is behind another.
  CHECK(names(1) == all);
  CHECK(report.profiled == 28);
}

TEST_CASE("what was dropped is not retrained") {
  Stream stream{"s", 50, {{"all", 1, 0.5}}, {}};
  stream.windows.push_back({{"bad", 55, 40}, {"good", 60, 20}});
  stream.windows.push_back(
      {{"bad", 99, 20}, {"good", 60, 20}});  // the truth has changed; nobody looks any more
  const RetrainingProblem problem{1, 100, 0.5, 0, {stream}};
  ProfilerReport report;
  const RetrainingProblem told = profile_retraining(problem, {0.5, 1}, no_error, report);
  for (const auto scheduler : {RetrainingScheduler::kUniform, RetrainingScheduler::kThief,
                               RetrainingScheduler::kEkya, RetrainingScheduler::kGpushare}) {
    const auto plan = run_retraining(problem, told, scheduler);
    CHECK(plan->windows[1].end_accuracy[0] == 60);
  }
}

TEST_CASE("a document's profiles are charged, and the result says what they took and how far off they were") {
  const std::string text =
      R"({"version": 1, "kind": "retraining", "devices": 2, "window_s": 100, "quantum": 0.5,
    "accuracy_floor": 0, "streams": [{"name": "s", "accuracy": 60, "gpus_needed": 1, "windows": [{"configurations": [
    {"name": "c", "accuracy": 90, "gpu_seconds": 40, "profile": {"epochs": 10, "data_share": 0.1,
     "observed": [{"epoch": 1, "accuracy": 88}, {"epoch": 5, "accuracy": 88}]}}]}]}], "run": {"profiler": {"devices": 1}}})";
  PlanOptions options;
  options.choices = {"ekya", "uniform"};
  const auto result = run(text, options, {});
  REQUIRE(result.ok());
  const auto& rows = result->at("results");
  CHECK(rows[0].at("mean_accuracy").get<double>() == Approx(77.4));
  CHECK(rows[0].at("profiler").at("mean_s").get<double>() == Approx(2));
  CHECK(rows[0].at("profiler").at("median_error").get<double>() == Approx(2));
  CHECK(rows[0].at("profiler").at("profiled") == 1);
  CHECK(rows[0].at("windows")[0].at("shares").at("s").at("configuration") == "c");
  CHECK(rows[1].at("profiler").at("mean_s") == 0);
  for (const char* bad :
       {R"("devices": 0)", R"("drop_fraction": 1.5)", R"("drop_every": 0)", R"("share": 1)"}) {
    std::string wrong = text;
    wrong.replace(wrong.find(R"("devices": 1})"), 12, bad);
    CHECK(run(wrong, options, {}).status().code() == GPUSHARE_MALFORMED_INPUT);
  }
}

}  // namespace gpushare::cluster
