// What is believed of a profiler's accuracies once some retrainings have ended.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/learn/profiler_error.hpp"

#include "cluster/ekya.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace gpushare::cluster {

TEST_CASE("a profiler is believed until it was wrong") {
  ProfilerError error;
  CHECK(error.believed(0, "c", 80) == 80);
  for (const double accuracy : {80.0, 95.0, 70.0}) error.reached(0, "c", accuracy, accuracy);
  CHECK(error.believed(0, "c", 60) == 60);  // never wrong
  error.reached(0, "d", 90, 60);
  CHECK(error.believed(0, "e", 90) == 90);  // nothing is known of this configuration
  CHECK(error.believed(1, "c", 90) == 90);  // nor of that stream's
}

TEST_CASE("a told accuracy is drawn to the mean of its configuration") {
  // By hand: told 80 and 100, reached 90 both times. Errors (100 + 100) / (2 + 1); what is told varies by 200, so the
  // accuracies by 133.3. The mean is 90, known to within 66.7; so told 120 is believed by 200 / (200 + 66.7) of 30.
  ProfilerError error;
  error.reached(0, "c", 80, 90);
  error.reached(0, "c", 100, 90);
  CHECK(error.believed(0, "c", 120) == Approx(112.5));
  CHECK(error.believed(0, "c", 90) == Approx(90));
  // Once only told, at 60: reached counts by 1/own, told by 1/(own + error).
  error.told(0, "c", 60);
  const double spread = 400, own = spread - 200.0 / 3, both = spread;
  const double weight = 2 / own + 1 / both, mean = (180 / own + 60 / both) / weight,
               before = own + 1 / weight;
  CHECK(error.believed(0, "c", 120) == Approx(mean + (120 - mean) * before / (before + 200.0 / 3)));
}

TEST_CASE("a profiler that always says the same is not believed once it was wrong") {
  // Told 80, reached 60, twice: errors of 800 / 3; what is told does not vary, so the accuracies are taken to vary by a
  // twentieth of the errors, and the mean is known to within half of that.
  ProfilerError error;
  error.reached(0, "c", 80, 60);
  error.reached(0, "c", 80, 60);
  const double own = 800.0 / 3 / 20, before = own * 1.5;
  CHECK(error.believed(0, "c", 80) == Approx(60 + 20 * before / (before + 800.0 / 3)));
}

TEST_CASE("what is believed is nearer to the truth than what is told") {
  test::Random random(test::seed());
  INFO("seed " << test::seed());
  // About normal, of deviation 1.
  const auto normal = [&] {
    double sum = 0;
    for (int i = 0; i < 12; ++i) sum += double(test::uniform(random, 0, 1'000'000)) / 1e6 - 0.5;
    return sum;
  };
  double told_errors = 0, believed_errors = 0;
  for (int instance = 0; instance < 40; ++instance) {
    ProfilerError error;
    for (int window = 0; window < 20; ++window)
      for (size_t stream = 0; stream < 4; ++stream)
        for (const char* name : {"long", "short"}) {
          const double truth = (name[0] == 'l' ? 85 : 80) + 5 * normal(), said = truth + 8 * normal();
          const double believed = error.believed(stream, name, said);
          told_errors += (said - truth) * (said - truth);
          believed_errors += (believed - truth) * (believed - truth);
          if (name[0] == 'l')
            error.reached(stream, name, said, truth);
          else
            error.told(stream, name, said);
        }
  }
  // With both deviations known it would be 25 / (25 + 64) = 0.28.
  CHECK(believed_errors < 0.5 * told_errors);
}

TEST_CASE("gpushare learns in a run that a profiler exaggerates by chance, and retrains no more for that") {
  // A stream at 90, whose configuration reaches 90 in every window. It is told as 120 and as 60 in turns. Retraining takes
  // a share from inference and gains nothing.
  RetrainingProblem truth{1, 100, 0.1, 0, {{"s", 90, {{"all", 1, 1}}, {}}}};
  for (int w = 0; w < 12; ++w) truth.streams[0].windows.push_back({{"c", 90, 20}});
  RetrainingProblem told = truth;
  for (size_t w = 0; w < 12; ++w) told.streams[0].windows[w][0].accuracy = w % 2 == 0 ? 120 : 60;
  const auto ours = run_retraining(truth, told, RetrainingScheduler::kGpushare);
  const auto ekya = run_retraining(truth, told, RetrainingScheduler::kEkya);
  CHECK(ours->mean_accuracy > ekya->mean_accuracy);
  CHECK(ours->windows[0].completed[0] == 0);
  CHECK(ekya->windows[10].completed[0] == 0);
}

}  // namespace gpushare::cluster
