// Mixes: parts on their share of the devices, static partitions, errors; guaranteed jobs beside opportunistic ones under gpushare.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <string>

#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "sim/cluster_simulation.hpp"
#include "sim/cluster_training.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;

namespace {

const char* const kTrials =
    R"("trials": {"max_packed": 1, "max_workers": 1, "groups": [{"arrival_s": 0, "trials": [{"name": "a", "budget_s": 30},
      {"name": "b", "budget_s": 30}]}]})";
const char* const kTraining =
    R"("training": {"jobs": [{"name": "x", "iterations": 100, "iteration_ms": 1000, "persistent_mb": 100, "ephemeral_mb": 100},
      {"name": "y", "iterations": 100, "iteration_ms": 1000, "persistent_mb": 100, "ephemeral_mb": 100}]})";
const char* const kServices =
    R"("services": {"services": [{"name": "s", "rate_rps": 100, "slo_ms": 100, "configurations": [
      {"batch": 8, "latency_ms": 20, "throughput_rps": 400, "memory_percent": 10, "wsm_percent": 25}]}], "run": {"duration_s": 5}})";

std::string mix(const std::string& devices, const std::string& parts) {
  return R"({"version": 1, "kind": "mix", "devices": )" + devices + ", " + parts + "}";
}

base::Result<cluster::OrderedJson> planned(const std::string& document,
                                           const std::vector<std::string>& schedulers = {}) {
  cluster::PlanOptions options;
  options.schedulers = schedulers;
  return cluster::plan(document, options, sim::all_cluster_kinds());
}

}  // namespace

TEST_CASE("a static mix takes the best partition into whole devices") {
  // Two trials and two jobs on three devices. Trials on 1 or 2: 60 or 30 s; jobs on 2 or 1: mean 100 or 150 s. 1/60/100 < 1/30/150.
  const auto result = planned(mix("3", std::string(kTrials) + "," + kTraining), {"static", "gpushare-whole"});
  REQUIRE(result.ok());
  const auto& row = (*result)["results"][0];
  CHECK(row["devices"]["trials"] == 2.0);
  CHECK(row["devices"]["training"] == 1.0);
  CHECK(row["makespan_s"].get<double>() == Approx(30));
  CHECK(row["jct_mean_s"].get<double>() == Approx(150));
  CHECK(row["score"].get<double>() == Approx(std::sqrt(1.0 / 30 / 150)));
  CHECK(row["parts"]["training"]["scheduler"] == "antman");
}

TEST_CASE("gpushare hands the trials' devices over, and shares those of services") {
  const auto result =
      planned(mix("3", std::string(kServices) + "," + kTrials + "," + kTraining), {"static", "gpushare"});
  REQUIRE(result.ok());
  const auto& rows = (*result)["results"];
  CHECK(rows[0]["goodput_rps"].get<double>() > 80);  // 100 a second at random, for 5 s
  CHECK(rows[1]["goodput_rps"] == rows[0]["goodput_rps"]);
  CHECK(rows[1]["score"].get<double>() > 1.1 * rows[0]["score"].get<double>());
}

TEST_CASE("training jobs beside services have whole devices, whatever services leave of theirs") {
  const auto result = planned(mix("2", std::string(kServices) + "," + kTraining), {"static", "gpushare"});
  REQUIRE(result.ok());
  INFO(result->dump());
  REQUIRE((*result)["results"].size() == 2);
  CHECK((*result)["results"][1]["devices"]["training"] == 1.0);
}

TEST_CASE("a mix on devices of different speeds is never worse than the partition into whole devices") {
  const std::string retraining =
      R"("retraining": {"window_s": 100, "quantum": 0.25, "accuracy_floor": 0, "streams": [{"name": "s0", "accuracy": 50,
      "gpus_needed": 0.5, "windows": [{"configurations": [{"name": "c", "accuracy": 80, "gpu_seconds": 30}]}]}, {"name":
      "s1", "accuracy": 50, "gpus_needed": 0.5, "windows": [{"configurations": []}]}]})";
  for (const char* speeds : {"1 0.25", "2 0.25", "0.25 1", "1 1 0.25", "1 0.25 0.25", "2 0.25 1"})
    for (const std::string& parts :
         {std::string(kTrials) + "," + kTraining, retraining + "," + kTrials, retraining + "," + kTraining}) {
      std::string devices;
      int count = 0;
      std::istringstream each(speeds);
      for (std::string speed; each >> speed; ++count)
        devices += base::format(R"(%s{"id": "%d", "memory_bytes": 16000000000, "speed": %s})",
                                count == 0 ? "" : ", ", count, speed.c_str());
      const auto result = planned(mix("[" + devices + "]", parts), {"static", "gpushare"});
      REQUIRE(result.ok());
      INFO(speeds << ": " << result->dump());
      const auto& rows = (*result)["results"];
      REQUIRE(rows.back()["scheduler"] == "gpushare");
      if (rows.size() == 2)  // static may have put retraining on a device that is too small for its streams
        CHECK(rows[1]["score"].get<double>() >= 0.98 * rows[0]["score"].get<double>());
    }
}

TEST_CASE("a run of a mix is deterministic by seed, and has the parts' rows") {
  const std::string document = mix("3", std::string(kServices) + "," + kTrials + "," + kTraining);
  cluster::PlayOptions play;
  play.noise = 0.2;
  std::vector<cluster::PlaySpan> spans;
  const auto once = cluster::run(document, {}, play, sim::all_cluster_kinds(), &spans);
  const auto again = cluster::run(document, {}, play, sim::all_cluster_kinds());
  REQUIRE(once.ok());
  CHECK(once->dump() == again->dump());
  CHECK((*once)["results"].size() == 2);
  CHECK((*once)["results"][1]["parts"]["services"]["throughput_rps"].get<double>() > 50);
  bool trials = false, training = false;
  for (const cluster::PlaySpan& span : spans) {
    trials |= span.row.rfind("trials, device", 0) == 0;
    training |= span.row.rfind("training, device", 0) == 0;
  }
  CHECK(trials);
  CHECK(training);
}

TEST_CASE("the trials' devices come over when the trials really end, and nobody has a device twice") {
  const std::string document = mix("3", std::string(kTrials) + "," + kTraining);
  int handed_over = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    cluster::PlayOptions play;
    play.noise = 0.5;  // trials that take much longer or shorter than told
    play.seed = seed;
    cluster::PlanOptions options;
    options.schedulers = {"gpushare"};
    std::vector<cluster::PlaySpan> spans;
    REQUIRE(cluster::run(document, options, play, sim::all_cluster_kinds(), &spans).ok());
    std::map<std::string, double> trials_end, training_begin;
    for (const cluster::PlaySpan& span : spans) {
      const std::string device = span.row.substr(span.row.find(", ") + 2);
      if (span.row.rfind("trials, ", 0) == 0)
        trials_end[device] = std::max(trials_end[device], span.end_s);
      else
        training_begin.emplace(device, span.begin_s);  // the first is the earliest
    }
    for (const auto& [device, begin_s] : training_begin) {
      if (trials_end.count(device) == 0) continue;
      ++handed_over;
      INFO("seed " << seed << ", device " << device);
      CHECK(begin_s >= trials_end[device] * (1 - 1e-9));
    }
  }
  CHECK(handed_over > 0);
}

namespace {

base::Result<cluster::OrderedJson> played_document(const std::string& document,
                                                   const std::vector<std::string>& schedulers,
                                                   std::vector<cluster::PlaySpan>* spans = nullptr) {
  cluster::PlanOptions options;
  options.schedulers = schedulers;
  return cluster::run(document, options, {}, sim::all_cluster_kinds(), spans);
}

}  // namespace

TEST_CASE("documents of trials and retraining whose devices fail are played by every scheduler") {
  const auto document = [](const char* kind, const std::string& fields) {
    return base::format(
               R"({"version": 1, "kind": "%s", "devices": [{"id": "a", "memory_bytes": 1000}, {"id": "b",
      "memory_bytes": 2000, "speed": 0.5, "down": [{"from_s": 10, "until_s": 40}, {"from_s": 70}]}], )",
               kind) +
           fields + "}";
  };
  const std::string trials =
      document("trials", R"("max_packed": 2, "max_workers": 2, "change_cost_s": 1, "groups":
    [{"arrival_s": 0, "trials": [{"name": "x", "budget_s": 30}, {"name": "y", "budget_s": 20},
      {"name": "large", "budget_s": 60, "memory_bytes": 1500}]}])");
  std::vector<cluster::PlaySpan> spans;
  const auto ran = played_document(trials, {"fifo", "static-fluid", "dynamic-fluid", "gpushare"}, &spans);
  REQUIRE(ran.ok());
  for (const auto& row : (*ran)["results"]) {
    INFO(row.dump());
    REQUIRE(row["not_completed"].size() == 1);  // it needs 120 s of b, which is up for 40 s
    CHECK(row["not_completed"][0]["trial"] == "large");
    CHECK(row["makespan_s"].get<double>() > 30);
  }
  for (const cluster::PlaySpan& span : spans)
    if (span.row == "device b") CHECK((span.end_s <= 10 || (span.begin_s >= 40 && span.end_s <= 70)));
  // A plan does not know it.
  CHECK_FALSE((*planned(trials, {"gpushare"}))["results"][0].contains("not_completed"));

  const auto retrained = played_document(
      document("retraining",
               R"("window_s": 50, "quantum": 0.25, "accuracy_floor": 0, "streams": [{"name": "s",
        "accuracy": 50, "gpus_needed": 1.5, "windows": [{"configurations": [{"name": "c", "accuracy": 90,
        "gpu_seconds": 20}]}, {"configurations": []}]}])"),
      {"none", "uniform", "fixed", "thief", "ekya", "gpushare"});
  REQUIRE(retrained.ok());
  // 1.5 devices are up for 10 s of the first window, for 10 + 20 s of both, and one else.
  CHECK((*retrained)["results"][0]["mean_accuracy"].get<double>() == Approx(50 * (40 + 60 * 2. / 3) / 100));
  for (const auto& row : (*retrained)["results"]) {
    INFO(row.dump());
    CHECK(row["mean_accuracy"].get<double>() > 40);
  }
}

TEST_CASE("trials under gpushare run longest first while a device is away") {
  // On the device that is left all orders end together. At 15 s the other one is back: best is to have 30 s under way.
  const auto ran = played_document(
      R"({"version": 1, "kind": "trials", "devices": [{"id": "a", "memory_bytes": 1000}, {"id": "b",
      "memory_bytes": 1000, "down": [{"from_s": 5, "until_s": 15}]}], "max_packed": 1, "max_workers": 1, "groups": [{"arrival_s": 0, "trials":
      [{"name": "x", "budget_s": 5}, {"name": "z", "budget_s": 30}, {"name": "y", "budget_s": 20}]}]})",
      {"fifo", "static-fluid", "dynamic-fluid", "gpushare"});
  REQUIRE(ran.ok());
  const auto& rows = (*ran)["results"];
  for (size_t rule = 0; rule < 3; ++rule) {
    INFO(rows[rule].dump() << rows[3].dump());
    CHECK(rows[3]["makespan_s"].get<double>() <= rows[rule]["makespan_s"].get<double>() * (1 + 1e-9));
  }
}

TEST_CASE("retraining under gpushare chooses its rule anew when a device fails") {
  // With both devices the thief's shares are as good as any; with one left they stay at what they are.
  const auto ran = played_document(
      R"({"version": 1, "kind": "retraining", "devices": [{"id": "a", "memory_bytes": 1000}, {"id": "b",
      "memory_bytes": 1000, "down": [{"from_s": 20}]}], "window_s": 100, "quantum": 0.25, "accuracy_floor": 0,
      "streams": [{"name": "s0", "accuracy": 40, "gpus_needed": 1, "windows": [{"configurations": [{"name": "c",
      "accuracy": 90, "gpu_seconds": 80}]}]}, {"name": "s1", "accuracy": 40, "gpus_needed": 1, "windows":
      [{"configurations": [{"name": "c", "accuracy": 90, "gpu_seconds": 40}]}]}]})",
      {"none", "thief", "ekya", "gpushare"});
  REQUIRE(ran.ok());
  const auto& rows = (*ran)["results"];
  for (size_t rule = 0; rule < 3; ++rule) {
    INFO(rows[rule].dump());
    CHECK(rows[3]["mean_accuracy"].get<double>() >= rows[rule]["mean_accuracy"].get<double>());
  }
}

TEST_CASE("retraining under gpushare chooses its rule anew after profiling, if a device failed meanwhile") {
  const auto stream = [](const char* name, int gpu_seconds) {
    return base::format(
        R"({"name": "%s", "accuracy": 40, "gpus_needed": 1, "windows": [{"configurations": [{"name": "c", "accuracy":
      90, "gpu_seconds": %d, "profile": {"epochs": 10, "data_share": 0.5, "observed": [{"epoch": 1, "accuracy": 60},
      {"epoch": 2, "accuracy": 69}, {"epoch": 4, "accuracy": 75}]}}]}]})",
        name, gpu_seconds);
  };
  const auto ran = played_document(
      R"({"version": 1, "kind": "retraining", "devices": [{"id": "a", "memory_bytes": 1000}, {"id": "b",
      "memory_bytes": 1000, "down": [{"from_s": 5}]}], "window_s": 100, "quantum": 0.25, "accuracy_floor": 0,
      "run": {"profiler": {"devices": 0.25}}, "streams": [)" +
          stream("s0", 40) + ", " + stream("s1", 20) + "]}",
      {"thief", "ekya", "gpushare"});
  REQUIRE(ran.ok());
  const auto& rows = (*ran)["results"];
  for (size_t rule = 0; rule < 2; ++rule) {
    INFO(rows[rule].dump());
    CHECK(rows[2]["mean_accuracy"].get<double>() >= rows[rule]["mean_accuracy"].get<double>());
  }
}

TEST_CASE("retraining on devices that are never all up is played, and knows no return before it comes") {
  const auto document = [](const std::string& devices, const char* quantum, const char* profile) {
    return base::format(
        R"({"version": 1, "kind": "retraining", "devices": [%s], "window_s": 50, "quantum": %s, "accuracy_floor": 0,
      "streams": [{"name": "s0", "accuracy": 40, "gpus_needed": 0.3, "windows": [{"configurations": [{"name": "c",
      "accuracy": 90, "gpu_seconds": 20%s}]}, {"configurations": []}, {"configurations": []}]}, {"name": "s1",
      "accuracy": 40, "gpus_needed": 0.3, "windows": [{"configurations": []}]}]})",
        devices.c_str(), quantum, profile);
  };
  const std::string first = R"({"id": "a", "memory_bytes": 1000)";
  for (const std::string& devices :
       {first + R"(, "down": [{"from_s": 0, "until_s": 10}]}, {"id": "b", "memory_bytes": 1000,
      "down": [{"from_s": 10}]})",
        first + R"(}, {"id": "b", "memory_bytes": 1000, "down": [{"from_s": 0}]})"})
    CHECK(played_document(document(devices, "1", ""), {"ekya", "gpushare"}).ok());
  std::vector<double> first_window;
  for (const char* down : {R"({"from_s": 0, "until_s": 110})", R"({"from_s": 0})"}) {
    const std::string others =
        base::format(R"(}, {"id": "b", "memory_bytes": 1000, "down": [%s]}, {"id": "c", "memory_bytes": 1000,
      "down": [%s]})",
                     down, down);
    const auto ran = played_document(
        document(first + others, "0.25",
                 R"(, "profile": {"epochs": 10, "observed": [{"epoch": 1, "accuracy": 40}, {"epoch": 2,
      "accuracy": 55}, {"epoch": 3, "accuracy": 60}]})"),
        {"gpushare"});
    REQUIRE(ran.ok());
    first_window.push_back((*ran)["results"][0]["windows"][0]["accuracy"].get<double>());
  }
  CHECK(first_window[0] == first_window[1]);
}

TEST_CASE("the parts of a mix go on with what is up, and their division knows no failure before it comes") {
  const std::string devices =
      R"([{"id": "a", "memory_bytes": 16000000000%s}, {"id": "b", "memory_bytes": 16000000000%s},
    {"id": "c", "memory_bytes": 16000000000%s}, {"id": "d", "memory_bytes": 16000000000%s}])";
  const auto document = [&](const char* down) {
    return mix(base::format(devices.c_str(), down, down, down, down),
               std::string(kServices) + "," + kTrials + "," + kTraining);
  };
  const std::vector<std::string> schedulers = {"static", "gpushare", "gpushare-whole", "oracle"};
  const auto up = played_document(document(""), schedulers);
  REQUIRE(up.ok());
  std::vector<cluster::PlaySpan> spans;
  const auto paused =
      played_document(document(R"(, "down": [{"from_s": 10, "until_s": 30}])"), schedulers, &spans);
  REQUIRE(paused.ok());
  for (size_t row = 0; row < schedulers.size(); ++row) {
    const auto& before = (*up)["results"][row];
    const auto& after = (*paused)["results"][row];
    INFO(before.dump() << " " << after.dump());
    CHECK(after["parts"]["training"]["completed"] == 2);
    CHECK(after["makespan_s"].get<double>() >= before["makespan_s"].get<double>() + 19.9);
    if (schedulers[row] != "oracle") CHECK(after["devices"] == before["devices"]);
  }
  for (const cluster::PlaySpan& span : spans) CHECK((span.end_s <= 10 + 1e-6 || span.begin_s >= 30 - 1e-6));
  // What never ends costs more than any speed gains.
  const auto gone = played_document(document(R"(, "down": [{"from_s": 10}])"), {"static"});
  REQUIRE(gone.ok());
  CHECK((*gone)["results"][0]["parts"]["trials"]["not_completed"].size() == 2);
  CHECK((*gone)["results"][0]["score"].get<double>() < 1e-9);
}

namespace {

// Devices a, b, ... of which those named fail.
std::string failing_devices(size_t count, const std::map<size_t, std::string>& down) {
  std::string text = "[";
  for (size_t d = 0; d < count; ++d) {
    const auto found = down.find(d);
    text += base::format(R"(%s{"id": "%c", "memory_bytes": 16000000000%s})", d == 0 ? "" : ", ", int('a' + d),
                         found == down.end() ? "" : (R"(, "down": )" + found->second).c_str());
  }
  return text + "]";
}

std::string device_of(const cluster::PlaySpan& span) {
  return span.row.substr(span.row.find("device ") + 7);
}

}  // namespace

TEST_CASE("a mix divides its devices anew when one fails or comes back") {
  const std::string parts = std::string(kTrials) + "," + kTraining;
  // Whichever of three fails for good, all work is done on the other two.
  for (size_t lost = 0; lost < 3; ++lost) {
    std::vector<cluster::PlaySpan> spans;
    const auto ran = played_document(mix(failing_devices(3, {{lost, R"([{"from_s": 10}])"}}), parts),
                                     {"gpushare"}, &spans);
    REQUIRE(ran.ok());
    const auto& row = (*ran)["results"][0];
    INFO("lost " << lost << ": " << row.dump());
    CHECK(row["parts"]["training"]["completed"] == 2);
    CHECK_FALSE(row["parts"]["trials"].contains("not_completed"));
    CHECK(row["jct_mean_s"].get<double>() < 220);  // 200 s are both jobs one after the other
    for (const cluster::PlaySpan& span : spans)
      if (device_of(span) == std::string(1, char('a' + lost))) CHECK(span.end_s <= 10 + 1e-6);
  }
  // Two come back: they are used from then on.
  std::vector<cluster::PlaySpan> spans;
  const std::string down = R"([{"from_s": 0, "until_s": 20}])";
  const auto ran =
      played_document(mix(failing_devices(4, {{2, down}, {3, down}}), parts), {"gpushare"}, &spans);
  REQUIRE(ran.ok());
  const auto& row = (*ran)["results"][0];
  INFO(row.dump());
  CHECK(row["devices"]["trials"].get<double>() + row["devices"]["training"].get<double>() == Approx(2));
  REQUIRE(row["divisions"].size() == 1);
  CHECK(row["divisions"][0]["at_s"] == 20.0);
  const auto& after = row["divisions"][0]["devices"];
  CHECK(after["trials"].get<double>() + after["training"].get<double>() == Approx(4));
  CHECK(row["jct_mean_s"].get<double>() < 145);
}

TEST_CASE("where one device is left for two parts, the second has it when the first has ended") {
  const std::string parts = std::string(kTrials) + "," + kTraining;
  for (size_t lost = 0; lost < 2; ++lost) {
    const auto ran =
        played_document(mix(failing_devices(2, {{lost, R"([{"from_s": 10}])"}}), parts), {"gpushare"});
    REQUIRE(ran.ok());
    const auto& row = (*ran)["results"][0];
    INFO("lost " << lost << ": " << row.dump());
    CHECK(row["parts"]["training"]["completed"] == 2);
    CHECK_FALSE(row["parts"]["trials"].contains("not_completed"));
  }
}

namespace {

// Whether gpushare does all work of a mix.
void check_done(const std::string& document, double noise = 0, uint64_t seed = 1) {
  cluster::PlayOptions play;
  play.noise = noise;
  play.seed = seed;
  cluster::PlanOptions options;
  options.schedulers = {"gpushare"};
  const auto ran = cluster::run(document, options, play, sim::all_cluster_kinds());
  REQUIRE(ran.ok());
  const auto& row = (*ran)["results"][0];
  INFO("seed " << seed << ": " << row.dump());
  if (row["parts"].contains("training"))
    CHECK(row["parts"]["training"]["completed"] == row["parts"]["training"]["jobs"]);
  if (!row["parts"].contains("trials")) return;
  CHECK_FALSE(row["parts"]["trials"].contains("not_completed"));
  CHECK_FALSE(row["parts"]["trials"].contains("rejected"));
}

}  // namespace

TEST_CASE("where too few devices are up for all parts, nobody waits for ever") {
  const std::string parts = std::string(kTrials) + "," + kTraining;
  for (size_t lost = 0; lost < 2; ++lost) {
    // It is down from the start, or fails when the trials should have ended.
    check_done(mix(failing_devices(2, {{lost, R"([{"from_s": 0}])"}}), parts));
    for (uint64_t seed = 1; seed <= 8; ++seed)
      check_done(mix(failing_devices(2, {{lost, R"([{"from_s": 62}])"}}), parts), 0.5, seed);
  }
  // Work that fits no device that is up at first.
  check_done(
      mix(failing_devices(2, {{1, R"([{"from_s": 0, "until_s": 60}])"}}),
          R"("training": {"jobs": [{"name": "x", "iterations": 30, "iteration_ms": 1000, "persistent_mb": 100,
      "ephemeral_mb": 100}, {"name": "gang", "gang": 2, "iterations": 100, "iteration_ms": 1000, "persistent_mb": 100,
      "ephemeral_mb": 100}]})"),
      0, 1);
  check_done(
      mix(R"([{"id": "a", "memory_bytes": 8000000000}, {"id": "b", "memory_bytes": 8000000000}, {"id": "c",
      "memory_bytes": 16000000000, "down": [{"from_s": 0, "until_s": 60}]}])",
          R"("trials": {"max_packed": 1, "max_workers": 1, "groups": [{"arrival_s": 0, "trials": [{"name": "a",
      "budget_s": 30}, {"name": "b", "budget_s": 30, "memory_bytes": 14000000000}]}]},)" +
              std::string(kTraining)),
      0, 1);
}

TEST_CASE("parts whose devices are lost have a device that comes up and that nobody had") {
  // Training jobs need it whole, so that no division gives it to both parts.
  check_done(mix(failing_devices(3, {{0, R"([{"from_s": 10}])"},
                                     {1, R"([{"from_s": 10}])"},
                                     {2, R"([{"from_s": 0, "until_s": 20}])"}}),
                 std::string(kTrials) + "," + kTraining));
  // Services leave nothing of their device, and outlast the others' work.
  const std::string document = mix(
      failing_devices(
          4, {{1, R"([{"from_s": 1}])"}, {2, R"([{"from_s": 0, "until_s": 3}])"}, {3, R"([{"from_s": 1}])"}}),
      R"("services": {"services": [{"name": "s", "rate_rps": 1, "slo_ms": 1000, "configurations": [{"batch": 1,
      "latency_ms": 20, "throughput_rps": 50, "memory_percent": 100, "wsm_percent": 100}]}],
      "run": {"duration_s": 1000}},)" +
          std::string(kTrials) + "," + kTraining);
  check_done(document);
  CHECK((*played_document(document, {"gpushare"}))["results"][0]["jct_mean_s"].get<double>() < 500);
}

TEST_CASE("where no part does anything more, one that does with all devices has them") {
  const std::string devices =
      R"([{"id": "a", "memory_bytes": 8000000000}, {"id": "b", "memory_bytes": 16000000000,
      "down": [{"from_s": 10}]})";
  const auto played = [&](const char* last_device, const char* other_trial, const char* other_job) {
    const auto ran = played_document(
        mix(devices + last_device + "]",
            base::format(
                R"("trials": {"max_packed": 1, "max_workers": 1, "groups": [{"arrival_s": 0, "trials": [%s{"name":
      "large", "budget_s": 30, "memory_bytes": 14000000000}]}]}, "training": {"jobs": [%s{"name": "gang", "gang": 2,
      "iterations": 100, "iteration_ms": 1000, "persistent_mb": 100, "ephemeral_mb": 100}]})",
                other_trial, other_job)),
        {"gpushare"});
    REQUIRE(ran.ok());
    const auto& parts = (*ran)["results"][0]["parts"];
    INFO((*ran)["results"][0].dump());
    CHECK(parts["training"]["completed"] == 1);
    CHECK(parts["trials"]["not_completed"].size() == 1);
  };
  // A trial that only the lost device could hold, and a gang of as many jobs as devices are left.
  played(R"(, {"id": "c", "memory_bytes": 8000000000})", "", "");
  // Beside that trial and a gang that nothing can run any more, each part has work for the device that is left.
  played(
      "", R"({"name": "small", "budget_s": 30}, )",
      R"({"name": "alone", "iterations": 100, "iteration_ms": 1000, "persistent_mb": 100, "ephemeral_mb": 100}, )");
}

TEST_CASE("a job that has too few devices goes on when another part has ended, if no device fails too") {
  check_done(mix(
      "2",
      R"("retraining": {"window_s": 50, "quantum": 0.25, "accuracy_floor": 0, "streams": [{"name": "s0", "accuracy": 50,
      "gpus_needed": 0.5, "windows": [{"configurations": []}]}]}, "training": {"jobs": [{"name": "gang", "gang": 2,
      "iterations": 100, "iteration_ms": 1000, "persistent_mb": 100, "ephemeral_mb": 100}]})"));
}

TEST_CASE("services end with their last arrivals, and leave their devices to parts that wait") {
  for (size_t lost = 0; lost < 2; ++lost)
    check_done(
        mix(failing_devices(2, {{lost, R"([{"from_s": 10}])"}}), std::string(kServices) + "," + kTraining));
  // Divisions are not searched for any more when the other device is lost.
  std::string flaps = "[";
  for (int k = 0; k < 22; ++k)
    flaps += base::format(R"({"from_s": %g, "until_s": %g}, )", 0.1 + 0.2 * k, 0.2 + 0.2 * k);
  check_done(mix(failing_devices(2, {{1, flaps + R"({"from_s": 4.8}])"}}),
                 std::string(kServices) + "," + kTraining));
}

TEST_CASE("services whose device fails have the last one before training jobs") {
  for (size_t lost = 0; lost < 2; ++lost) {
    const auto ran = played_document(
        mix(failing_devices(2, {{lost, R"([{"from_s": 1}])"}}), std::string(kServices) + "," + kTraining),
        {"gpushare"});
    REQUIRE(ran.ok());
    const auto& row = (*ran)["results"][0];
    INFO("lost " << lost << ": " << row.dump());
    CHECK(row["goodput_rps"].get<double>() > 80);
    CHECK(row["parts"]["training"]["completed"] == 2);
  }
}

TEST_CASE("a mix whose devices change more often than divisions are searched for does all work") {
  std::string flaps = "[";
  for (int at = 1; at < 60; at += 2) flaps += base::format(R"({"from_s": %d, "until_s": %d}, )", at, at + 1);
  check_done(
      mix(failing_devices(2, {{1, flaps + R"({"from_s": 61}])"}}), std::string(kTrials) + "," + kTraining));
}

TEST_CASE("a mix that is divided anew has no figures by devices in its parts") {
  const std::string parts = std::string(kTrials) + "," + kTraining;
  for (const char* down : {R"([{"from_s": 10}])", R"([{"from_s": 1000}])"}) {
    const auto ran = played_document(mix(failing_devices(3, {{0, down}}), parts), {"gpushare"});
    REQUIRE(ran.ok());
    const auto& row = (*ran)["results"][0];
    INFO(row.dump());
    CHECK(row["parts"]["trials"].contains("bound_s") != row.contains("divisions"));
    for (const char* part : {"trials", "training"})
      CHECK(row["parts"][part].contains("utilization") != row.contains("divisions"));
  }
}

TEST_CASE("a mix of all parts on devices that fail does all work when they are back") {
  test::Random random(test::seed());
  const std::string retraining =
      R"("retraining": {"window_s": 50, "quantum": 0.25, "accuracy_floor": 0, "streams": [{"name": "s0", "accuracy": 50,
      "gpus_needed": 0.5, "windows": [{"configurations": [{"name": "c", "accuracy": 80, "gpu_seconds": 20}]},
      {"configurations": []}]}]})";
  for (int round = 0; round < 10; ++round) {
    const size_t count = 4 + static_cast<size_t>(test::uniform(random, 0, 1));
    std::map<size_t, std::string> down;
    for (size_t d = 0; d < count; ++d) {
      if (test::uniform(random, 0, 2) == 0) continue;
      const auto from = static_cast<unsigned>(test::uniform(random, 0, 80)),
                 until = from + static_cast<unsigned>(test::uniform(random, 1, 60));
      down[d] = base::format(R"([{"from_s": %u, "until_s": %u}])", from, until);
    }
    cluster::PlayOptions play;
    play.noise = 0.3;
    play.seed = test::uniform(random, 1, 1000);
    cluster::PlanOptions options;
    options.schedulers = {"gpushare"};
    const auto ran =
        cluster::run(mix(failing_devices(count, down),
                         std::string(kServices) + "," + retraining + "," + kTrials + "," + kTraining),
                     options, play, sim::all_cluster_kinds());
    INFO("seed " << test::seed() << ", round " << round);
    REQUIRE(ran.ok());
    const auto& parts = (*ran)["results"][0]["parts"];
    INFO((*ran)["results"][0].dump());
    CHECK(parts["training"]["completed"] == 2);
    CHECK_FALSE(parts["trials"].contains("not_completed"));
    CHECK(parts["retraining"]["windows"].size() == 2);
  }
}

TEST_CASE("services whose device fails go on elsewhere, and have what they need before the other parts") {
  const std::string parts = std::string(kServices) + "," + kTrials + "," + kTraining;
  for (size_t lost = 0; lost < 3; ++lost) {
    const auto ran =
        played_document(mix(failing_devices(3, {{lost, R"([{"from_s": 1}])"}}), parts), {"gpushare"});
    REQUIRE(ran.ok());
    const auto& row = (*ran)["results"][0];
    INFO("lost " << lost << ": " << row.dump());
    CHECK(row["goodput_rps"].get<double>() > 80);
    CHECK(row["parts"]["training"]["completed"] == 2);
  }
}

TEST_CASE(
    "a mix with devices that fail: nothing runs twice on a device or on one that is down, nor knows the "
    "future") {
  test::Random random(test::seed());
  const std::string parts = std::string(kTrials) + "," + kTraining;
  for (int round = 0; round < 40; ++round) {
    std::map<size_t, std::string> down, later;
    std::map<std::string, std::pair<double, double>> times;
    for (size_t d = 0; d < 4; ++d) {
      if (test::uniform(random, 0, 1) == 0) continue;
      const auto from = static_cast<unsigned>(test::uniform(random, 0, 60)),
                 until = from + static_cast<unsigned>(test::uniform(random, 1, 40));
      down[d] = base::format(R"([{"from_s": %u, "until_s": %u}])", from, until);
      later[d] = base::format(R"([{"from_s": %u, "until_s": %u}, {"from_s": 110}])", from, until);
      times[std::string(1, char('a' + d))] = {from, until};
    }
    cluster::PlayOptions play;
    play.noise = 0.3;
    play.seed = test::uniform(random, 1, 1000);
    cluster::PlanOptions options;
    options.schedulers = {"gpushare"};
    std::vector<cluster::PlaySpan> spans, spans_later;
    const auto ran =
        cluster::run(mix(failing_devices(4, down), parts), options, play, sim::all_cluster_kinds(), &spans);
    REQUIRE(ran.ok());
    REQUIRE(cluster::run(mix(failing_devices(4, later), parts), options, play, sim::all_cluster_kinds(),
                         &spans_later)
                .ok());
    INFO("seed " << test::seed() << ", round " << round << ": " << (*ran)["results"][0].dump());
    std::map<std::string, std::vector<const cluster::PlaySpan*>> trials;
    for (const cluster::PlaySpan& span : spans)
      if (span.row.rfind("trials, ", 0) == 0) trials[device_of(span)].push_back(&span);
    for (const cluster::PlaySpan& span : spans) {
      if (const auto at = times.find(device_of(span)); at != times.end())
        CHECK((span.end_s <= at->second.first + 1e-6 || span.begin_s >= at->second.second - 1e-6));
      if (span.row.rfind("training, ", 0) == 0)
        for (const cluster::PlaySpan* trial : trials[device_of(span)])
          CHECK((span.end_s <= trial->begin_s + 1e-6 || span.begin_s >= trial->end_s - 1e-6));
    }
    const auto begun_by = [](const std::vector<cluster::PlaySpan>& all) {
      std::vector<std::string> rows;
      for (const cluster::PlaySpan& span : all)
        if (span.begin_s < 110)
          rows.push_back(base::format("%s %s %.6f", span.row.c_str(), span.name.c_str(), span.begin_s));
      std::sort(rows.begin(), rows.end());
      return rows;
    };
    CHECK(begun_by(spans) == begun_by(spans_later));
  }
}

TEST_CASE("the oracle of a mix knows what really happens") {
  const std::string document = mix("4", std::string(kServices) + "," + kTrials + "," + kTraining);
  double best_partition = 0, ours = 0, oracle = 0;  // over the seeds
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    cluster::PlayOptions play;
    play.noise = 0.5;
    play.seed = seed;
    cluster::PlanOptions options;
    options.schedulers = {"static", "gpushare", "oracle"};
    const auto result = cluster::run(document, options, play, sim::all_cluster_kinds());
    REQUIRE(result.ok());
    const auto score = [&](size_t row) { return std::log((*result)["results"][row]["score"].get<double>()); };
    best_partition += score(0);
    ours += score(1);
    oracle += score(2);
  }
  CHECK(oracle >= ours);
  CHECK(oracle >= best_partition);                  // that, with our schedulers, is one of its divisions
  CHECK_FALSE(planned(document, {"oracle"}).ok());  // a plan is made before anything happens
}

TEST_CASE("bad mixes are refused with their path") {
  const auto message = [](const std::string& document) {
    const auto result = planned(document);
    return result.ok() ? std::string() : result.status().message();
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  CHECK(has(
      message(mix(
          "3",
          R"("trials": {"max_packed": 1, "max_workers": 1, "groups": [{"arrival_s": -1, "trials": []}]})")),
      "trials.groups[0].arrival_s: -1"));
  CHECK(has(message(mix("1", std::string(kTrials) + "," + kTraining)),
            "devices: 1 are fewer than the 2 parts"));
  CHECK(has(message(mix("65", kTrials)), "devices: 65"));
  std::string flaps = "[";
  for (int at = 0; at <= 500; ++at)
    flaps += base::format(R"(%s{"from_s": %d, "until_s": %d.5})", at == 0 ? "" : ", ", at, at);
  CHECK(has(message(mix(failing_devices(2, {{1, flaps + "]"}}), kTrials)),
            "devices: they fail and come back 1002 times, more than the 1000"));
  CHECK(has(message(mix("2", R"("specialists": {})")), "at least one of"));
  CHECK(has(message(mix("2", std::string(kTrials) + R"(, "specialists": {"trials": "antman"})")),
            "specialists.trials"));
  CHECK(has(message(mix("2", std::string(kTrials) + R"(, "shares": {})")), "shares"));
  CHECK(has(message(mix("2", R"("training": {"jobs": []})")), "training.jobs"));
}

TEST_CASE("under gpushare a guaranteed job is not slowed by what comes beside it") {
  test::Random random(test::seed());
  for (int round = 0; round < 30; ++round) {
    std::vector<cluster::JobInfo> jobs;
    double now = 0;
    for (int j = 0; j < 40; ++j) {
      now += static_cast<double>(test::uniform(random, 0, 20));
      cluster::JobInfo job;
      job.name = std::to_string(j);
      job.arrival_s = now;
      job.work_s = static_cast<double>(test::uniform(random, 10, 300));
      job.memory_bytes = test::uniform(random, 1, 8) << 30;
      const auto config = test::uniform(random, 0, 5);
      job.config = std::to_string(config);
      job.demands = {0.1 + 0.17 * static_cast<double>(config)};
      job.guaranteed = test::uniform(random, 0, 1) == 0;
      jobs.push_back(job);
    }
    const std::vector<cluster::Device> devices(3);
    const auto scheduler = cluster::make_training_scheduler("gpushare");
    const auto result = sim::run_cluster(jobs, devices, *scheduler, {});
    REQUIRE(result.ok());
    INFO("seed " << test::seed());
    CHECK(result->completed == jobs.size());
    CHECK(result->slowdown_p99 <= 1.05);
  }
}

TEST_CASE("devices that come up later are used from then on, and not before") {
  std::vector<cluster::JobInfo> jobs(2);
  for (size_t j = 0; j < 2; ++j) {
    jobs[j].name = std::to_string(j);
    jobs[j].work_s = 100;
    jobs[j].demands = {1};
  }
  std::vector<cluster::Device> devices(2);
  devices[1].down = {{0, 40}};
  for (const char* name : cluster::kTrainingSchedulers) {
    const auto scheduler = cluster::make_training_scheduler(name);
    const auto result = sim::run_cluster(jobs, devices, *scheduler, {});
    INFO(name);
    REQUIRE(result.ok());
    CHECK(result->completed == 2);
    CHECK(result->jobs[1].end_s <= 200.001);
    if (std::string(name) == "fifo") CHECK(result->jobs[1].start_s == Approx(40));
  }
}
