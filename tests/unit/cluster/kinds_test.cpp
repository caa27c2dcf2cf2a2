// The documents of trials, retraining and shares: the known answers through the tool's own door, and what is refused.
// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "support/catch.hpp"

namespace gpushare::cluster {
namespace {

std::string refused(const std::string& kind, const std::string& fields) {
  const auto result =
      plan("{\"version\": 1, \"kind\": \"" + kind + "\", \"devices\": 2, " + fields + "}", {});
  return result.ok() ? "" : result.status().message();
}

}  // namespace

TEST_CASE("a document of trials: Fluid's example") {  // thesis 000, line 910
  PlanOptions options;
  options.schedulers = {"fifo", "static-fluid", "gpushare"};
  const auto result =
      plan(R"({"version": 1, "kind": "trials", "devices": 5, "max_packed": 3, "max_workers": 5, "groups": [
    {"arrival_s": 0, "trials": [{"name": "a", "budget_s": 4}, {"name": "b", "budget_s": 4}, {"name": "c", "budget_s": 12},
                                {"name": "d", "budget_s": 30}, {"name": "e", "budget_s": 1, "memory_bytes": 99000000000}]}]})",
           options);
  REQUIRE(result.ok());
  const auto& rows = (*result)["results"];
  CHECK(rows[0]["makespan_s"].get<double>() == Approx(30));
  CHECK(rows[1]["makespan_s"].get<double>() == Approx(12));
  CHECK(rows[1]["shares"]["d"] == 3);
  CHECK(rows[1]["shares"]["a"].get<double>() == 1);  // packing brings nothing without an alpha
  CHECK(rows[2]["makespan_s"].get<double>() == Approx(10));
  CHECK(rows[2]["bound_s"].get<double>() == Approx(10));
  CHECK(rows[2]["rejected"][0]["trial"] == "e");
  CHECK_FALSE(rows[2]["shares"].contains("e"));
}

TEST_CASE("a document of retraining says shares and configurations at a window's start") {
  PlanOptions options;
  options.schedulers = {"none", "ekya"};
  const auto result = plan(
      R"({"version": 1, "kind": "retraining", "devices": 2, "window_s": 100, "quantum": 0.5, "accuracy_floor": 10,
    "streams": [{"name": "A", "accuracy": 50, "inference": [{"name": "full", "accuracy_factor": 1, "gpus": 1}],
                 "windows": [{"configurations": [{"name": "long", "accuracy": 90, "gpu_seconds": 50}]}, {"configurations": []}]}]})",
      options);
  REQUIRE(result.ok());
  const auto& rows = (*result)["results"];
  CHECK(rows[0]["mean_accuracy"].get<double>() == Approx(50));
  CHECK(rows[0]["windows"][0]["shares"]["A"]["configuration"].is_null());
  CHECK(rows[1]["windows"][0]["shares"]["A"]["configuration"] == "long");
  CHECK(rows[1]["windows"][0]["accuracy"].get<double>() == Approx(70));  // 50 s at 50, 50 s at 90
  CHECK(rows[1]["mean_accuracy"].get<double>() == Approx(80));
}

TEST_CASE("run tells what the learning curve of a profile says, not the truth") {
  // Two configurations of the same cost. Their curves, 1 - 1/(b0 x + b1) - b2, say 0.876 and 0.7 after 30 epochs; the truth is the other way
  // round, so that who believes the profile takes the worse one.
  const auto observed = [](double b0, double b1, double b2) {
    std::string text;
    for (int epoch = 1; epoch <= 5; ++epoch)
      text += (epoch == 1 ? "" : ", ") + std::string(R"({"epoch": )") + std::to_string(epoch) +
              R"(, "accuracy": )" + std::to_string(100 * (1 - 1 / (b0 * epoch + b1) - b2)) + "}";
    return R"("profile": {"epochs": 30, "observed": [)" + text + "]}";
  };
  const std::string document =
      R"({"version": 1, "kind": "retraining", "devices": 1, "window_s": 100, "quantum": 0.25, "accuracy_floor": 0, "streams": [
        {"name": "s", "accuracy": 50, "gpus_needed": 0.5, "windows": [{"configurations": [
          {"name": "promises", "accuracy": 60, "gpu_seconds": 10, )" +
      observed(0.4, 1.6, 0.05) + R"(}, {"name": "holds", "accuracy": 90, "gpu_seconds": 10, )" +
      observed(0.1, 1.0, 0.05) + "}]}]}]}";
  const auto taken = [](const base::Result<OrderedJson>& result) {
    INFO((result.ok() ? "" : result.status().message()));
    REQUIRE(result.ok());
    return (*result)["results"][0]["windows"][0]["shares"]["s"]["configuration"].get<std::string>();
  };
  PlanOptions options;
  options.schedulers = {"ekya"};
  CHECK(taken(plan(document, options)) == "holds");
  CHECK(taken(run(document, options, PlayOptions{}, kinds(), nullptr)) == "promises");
}

TEST_CASE("a document of shares needs no devices") {
  const auto result =
      plan(R"({"version": 1, "kind": "shares", "capacity": 7, "previous": {"a": 4}, "max_step": 2, "jobs": [
    {"name": "a", "load": 1, "slo": 1, "utility": "linear", "curve": [[0, 0], [9, 1]]},
    {"name": "b", "load": 1, "slo": 1, "utility": "linear", "curve": [[0, 0], [9, 1]]}]})",
           {});
  REQUIRE(result.ok());
  REQUIRE((*result)["results"].size() == 3);
  CHECK((*result)["results"][2]["objective"] == "njc");
  CHECK((*result)["results"][2]["allocation"]["a"] == 5);
  CHECK((*result)["results"][2]["allocation"]["b"] == 2);
  CHECK((*result)["results"][2]["useful"] == 7);
}

TEST_CASE("a document of reservations: gangs at once or not at all, in order, with reasons for what waits") {
  const std::string nodes =
      R"("nodes": [{"name": "a", "resources": {"gpu": 4, "ssd": 1}}, {"name": "b", "resources": {"gpu": 4}}], )";
  const std::string text = R"({"version": 1, "kind": "reservations", )" + nodes + R"("requests": [
    {"name": "gang", "owner": "x", "parts": [{"needs": {"gpu": 3}, "count": 2, "apart": true}]},
    {"name": "second gang", "owner": "y", "parts": [{"needs": {"gpu": 2}, "count": 2}]},
    {"name": "soft", "owner": "z", "alternatives": [{"parts": [{"needs": {"gpu": 2, "ssd": 1}}]}, {"parts": [{"needs": {"gpu": 1}}]}]},
    {"name": "nowhere", "owner": "w", "parts": [{"needs": {"gpu": 5}}]}]})";
  const auto result = plan(text, {});
  INFO((result.ok() ? "" : result.status().message()));
  REQUIRE(result.ok());
  const OrderedJson& row = (*result)["results"][0];
  CHECK(row["granted"] == 2);
  CHECK(row["placements"][0]["nodes"] == OrderedJson::parse(R"([["a", "b"]])"));
  CHECK(row["placements"][1]["request"] == "soft");
  CHECK(row["placements"][1]["alternative"] == 1);  // no node has two left beside the ssd
  REQUIRE(row["waiting"].size() == 2);
  CHECK(row["waiting"][0]["request"] == "second gang");
  CHECK(row["waiting"][1]["reason"].get<std::string>().find("gpu") != std::string::npos);
}

TEST_CASE("reservations are played: waits, deadlines, leases, and devices as a node's gpus") {
  const std::string text = R"({"version": 1, "kind": "reservations",
    "devices": [{"id": "0", "memory_bytes": 1, "node": "n"}, {"id": "1", "memory_bytes": 1, "node": "n"}], "requests": [
    {"name": "first", "owner": "a", "hold_s": 10, "parts": [{"needs": {"gpu": 2}}]},
    {"name": "late", "owner": "b", "arrival_s": 1, "hold_s": 5, "deadline_ms": 2000, "parts": [{"needs": {"gpu": 1}}]},
    {"name": "next", "owner": "c", "arrival_s": 4, "hold_s": 6, "parts": [{"needs": {"gpu": 1}}]},
    {"name": "leased", "owner": "d", "arrival_s": 5, "lease_ms": 3000, "parts": [{"needs": {"gpu": 1}}]},
    {"name": "last", "owner": "e", "arrival_s": 6, "hold_s": 1, "parts": [{"needs": {"gpu": 2}}]}]})";
  std::vector<PlaySpan> spans;
  const auto result = run(text, {}, {}, kinds(), &spans);
  INFO((result.ok() ? "" : result.status().message()));
  REQUIRE(result.ok());
  const OrderedJson& row = (*result)["results"][0];
  CHECK(row["granted"] == 4);
  REQUIRE(row["refused"].size() == 1);
  CHECK(row["refused"][0]["request"] == "late");
  CHECK(row["placements"][1]["start_s"] == 10.0);  // next, and leased beside it
  CHECK(row["placements"][2]["start_s"] == 10.0);
  CHECK(row["placements"][3]["start_s"] == 16.0);  // when the lease ended at 13, next still held one
  CHECK(row["makespan_s"] == 17.0);
  CHECK(row["wait_most_s"] == 10.0);
  CHECK(spans.size() == 4);
}

TEST_CASE("reservations that are held until the end of time are held for ever") {
  std::string requests;
  for (int r = 0; r < 20; ++r)
    requests +=
        base::format(R"(%s{"name": "%d", "owner": "%d", "hold_s": 1e9, "parts": [{"needs": {"gpu": 1}}]})",
                     r == 0 ? "" : ", ", r, r);
  const auto result =
      run(R"({"version": 1, "kind": "reservations", "devices": 1, "requests": [)" + requests + "]}", {}, {});
  REQUIRE(result.ok());
  const OrderedJson& row = (*result)["results"][0];
  CHECK(row["granted"] == 19);  // the clock ends 18.4e9 s after its begin
  CHECK(row["placements"].back()["start_s"] == 18e9);
  CHECK(row["waiting"].size() == 1);
  CHECK(row["makespan_s"] == 18e9);
}

TEST_CASE("owners whose reservations wait for each other are told so, and the others go on") {
  const auto result = run(
      R"({"version": 1, "kind": "reservations", "nodes": [{"name": "n", "resources": {"p": 1, "q": 1}}], "requests": [
    {"name": "a p", "owner": "a", "hold_s": 20, "parts": [{"needs": {"p": 1}}]},
    {"name": "b q", "owner": "b", "hold_s": 20, "parts": [{"needs": {"q": 1}}]},
    {"name": "a q", "owner": "a", "arrival_s": 1, "hold_s": 1, "parts": [{"needs": {"q": 1}}]},
    {"name": "b p", "owner": "b", "arrival_s": 2, "hold_s": 1, "parts": [{"needs": {"p": 1}}]}]})",
      {}, {});
  REQUIRE(result.ok());
  const OrderedJson& row = (*result)["results"][0];
  CHECK(row["granted"] == 3);
  REQUIRE(row["refused"].size() == 1);
  CHECK(row["refused"][0]["request"] == "b p");
}

TEST_CASE("what these kinds refuse is told with path and value") {
  const std::string job =
      R"({"name": "a", "load": 1, "slo": 1, "utility": "linear", "logistic": {"offset": 1}})";
  CHECK(refused("shares", "\"jobs\": [" + job + "]").find("capacity: the field is missing") == 0);
  CHECK(refused("shares", "\"capacity\": 5, \"jobs\": [" + job + ", " + job + "]")
            .find("jobs[1].name: \"a\"") == 0);
  CHECK(refused("shares", "\"capacity\": 5, \"previous\": {\"z\": 1}, \"jobs\": [" + job + "]")
            .find("previous:") == 0);
  CHECK(refused("shares", "\"capacity\": 5, \"previous\": {\"a\": 0.5}, \"jobs\": [" + job + "]")
            .find("previous.a: 0.5 is not allowed; give a whole number") == 0);
  CHECK(
      refused("shares", R"("capacity": 5, "jobs": [{"name": "a", "load": 1, "slo": 1, "utility": "linear"}])")
          .find("jobs[0]: ") == 0);
  CHECK(refused("trials", R"("max_packed": 0, "max_workers": 1, "groups": [])").find("max_packed: 0") == 0);
  CHECK(
      refused(
          "trials",
          R"("max_packed": 1, "max_workers": 1, "groups": [{"arrival_s": 0, "trials": [{"name": "a", "budget_s": -1}]}])")
          .find("groups[0].trials[0].budget_s: -1") == 0);
  CHECK(refused("retraining", R"("window_s": 1, "quantum": 0.1, "accuracy_floor": 0,
    "streams": [{"name": "a", "accuracy": 1, "windows": []}])")
            .find("streams[0]: give one of gpus_needed and inference") == 0);
}

TEST_CASE("devices without a speed are as fast as their compute units say") {
  const auto speeds = [](const char* text) {
    const Json json = Json::parse(text);
    base::Status error;
    Fields fields(json, &error);
    std::vector<double> out;
    for (const Device& device : read_devices(fields, true)) out.push_back(device.speed);
    CHECK(error.ok());
    return out;
  };
  using Speeds = std::vector<double>;
  CHECK(speeds(R"({"devices": 2})") == Speeds{1, 1});
  CHECK(
      speeds(
          R"({"devices": [{"id": "a", "memory_bytes": 1, "compute_units": 40}, {"id": "b", "memory_bytes": 1, "compute_units": 80},
                               {"id": "c", "memory_bytes": 1}]})") == Speeds{0.5, 1, 1});
  CHECK(
      speeds(
          R"({"devices": [{"id": "a", "memory_bytes": 1, "compute_units": 160}, {"id": "b", "memory_bytes": 1, "compute_units": 80, "speed": 1},
                               {"id": "c", "memory_bytes": 1, "compute_units": 80, "speed": 3}]})") ==
      Speeds{2, 1, 3});
  // Through the door: devices of 80 and 40 units are one and a half, and two streams need three.
  const auto result = plan(
      R"({"version": 1, "kind": "retraining", "devices": [{"id": "a", "memory_bytes": 1, "compute_units": 80},
      {"id": "b", "memory_bytes": 1, "compute_units": 40}], "window_s": 100, "quantum": 0.5, "accuracy_floor": 0,
      "streams": [{"name": "s", "accuracy": 60, "gpus_needed": 1.5, "windows": [{"configurations": []}]},
                  {"name": "t", "accuracy": 60, "gpus_needed": 1.5, "windows": [{"configurations": []}]}]})",
      {});
  REQUIRE(result.ok());
  CHECK((*result)["results"][0]["mean_accuracy"].get<double>() == Approx(30));  // 1.5 devices for 3
}

}  // namespace gpushare::cluster
