// The documents of src/cluster: what is read, what is refused and how it is told.
// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <sstream>

#include "cluster/json.hpp"
#include "cluster/plan.hpp"
#include "support/catch.hpp"
#include "support/sanitizers.hpp"

using namespace gpushare;
using cluster::OrderedJson;

namespace {

// One service that fits, with `more` in the service and `top` in the document.
std::string services(const std::string& more = "", const std::string& top = "",
                     const std::string& devices = "1") {
  return R"({"version": 1, "kind": "services", "devices": )" + devices +
         R"(, "services": [{"name": "a", "slo_ms": 50)" +
         (more.find("rate_rps") == std::string::npos ? R"(, "rate_rps": 100)" : "") + more +
         R"(, "configurations": [{"batch": 4, "latency_ms": 10, "throughput_rps": 80, "memory_percent": 10, "ao_percent": 60}]}])" +
         top + "}";
}

std::string told(const std::string& document, cluster::PlanOptions options = {}) {
  const auto result = cluster::plan(document, options);
  return result.ok() ? "" : result.status().message();
}

}  // namespace

TEST_CASE("a document is decided by the schedulers that are named, in that order", "[cluster]") {
  cluster::PlanOptions options;
  options.schedulers = {"milp-wsm", "milp-ao"};
  const auto result = cluster::plan(services(), options);
  REQUIRE(result.ok());
  CHECK((*result)["version"] == 1);
  CHECK((*result)["kind"] == "services");
  REQUIRE((*result)["results"].size() == 2);
  CHECK((*result)["results"][0]["scheduler"] == "milp-wsm");
  CHECK((*result)["results"][0]["goodput_rps"] == 0);  // not measured
  CHECK((*result)["results"][1]["goodput_rps"] == 80);
  CHECK((*result)["results"][1]["placements"][0]["device"] == "0");
}

TEST_CASE("bad documents are told with path, value and what is allowed", "[cluster]") {
  const auto [document, message] = GENERATE(table<std::string, std::string>({
      {"", "the document: not JSON"},
      {"[1, 2", "[2]: not JSON"},
      {R"({"version": 1, "devices": NaN})", "devices: not JSON"},
      {R"({"version": 1, "devices": 1e999})", "devices: not JSON"},
      {"[]", "the document: a list of 0 is not allowed; give an object"},
      {"{}", "version: the field is missing"},
      {R"({"version": 2})", "version: 2 is not allowed; give a whole number from 1 to 1"},
      {R"({"version": 1})", "kind: the field is missing"},
      {R"({"version": 1, "kind": "games"})", R"(kind: "games" is not allowed; there are services)"},
      {R"({"version": 1, "kind": "services"})", "devices: the field is missing"},
      {R"({"version": 1, "kind": "services", "devices": 0})",
       "devices: 0 is not allowed; give a whole number from 1"},
      {R"({"version": 1, "kind": "services", "devices": 1.5})", "devices: 1.5 is not allowed"},
      {R"({"version": 1, "kind": "services", "devices": 1000001})", "devices: 1000001 is not allowed"},
      {R"({"version": 1, "kind": "services", "devices": []})", "devices: a list of 0 is not allowed"},
      {R"({"version": 1, "kind": "services", "devices": 1})", "services: the field is missing"},
      {R"({"version": 1, "kind": "services", "devices": 1, "services": {}})",
       "services: an object is not allowed"},
      {R"({"version": 1, "kind": "services", "devices": 1, "services": [3]})",
       "services[0]: 3 is not allowed"},
      {R"({"version": 1, "version": 1})", "version: the field is there twice"},
      {services(R"(, "rate_rps": -4)"), "services[0].rate_rps: -4 is not allowed; give a number above 0"},
      {services(R"(, "rate_rps": 1e300)"),
       "services[0].rate_rps: 1e+300 is not allowed; give a number above 0 and at most 1e+15"},
      {R"({"version": 1, "kind": "shares", "capacity": 9, "jobs": [{"name": "a", "load": 1, "slo": 1,
          "utility": "linear", "curve": [[1, 1]], "loads": [4, -2]}]})",
       "jobs[0].loads[1]: -2 is not allowed; give a number above 0"},
      {services(R"(, "rate_rps": "x")"), R"(services[0].rate_rps: "x" is not allowed)"},
      {services(R"(, "rate": 4)"), "services[0].rate: no such field; there are name"},
      {services("", R"(, "sevices": 4)"),
       "sevices: no such field; there are version, kind, devices, multiprocessors, services"},
      {services("", "", R"([{"id": "x", "memory_bytes": 5}, {"id": "x", "memory_bytes": 5}])"),
       R"(devices[1].id: "x" is not allowed; element 0 has that id already)"},
      {services("", "", R"([{"id": "x", "memory_bytes": -5}])"),
       "devices[0].memory_bytes: -5 is not allowed"},
      {services("", "", R"([{"id": "x", "memory_bytes": 5, "speed": 0}])"),
       "devices[0].speed: 0 is not allowed"},
      {services("", "", R"([{"id": "x", "memory_bytes": 5, "sped": 0}])"), "devices[0].sped: no such field"},
  }));
  INFO(document);
  const std::string got = told(document);
  CHECK(got.find(message) == 0);
}

TEST_CASE("schedulers and objectives that a kind does not have are refused", "[cluster]") {
  cluster::PlanOptions options;
  options.schedulers = {"fifo9"};
  CHECK(told(services(), options)
            .find("--scheduler: 'fifo9' is not allowed; a document of kind services has") == 0);
  options.schedulers = {"milp-ao", "milp-ao"};
  CHECK(told(services(), options).find("'milp-ao' is there twice") != std::string::npos);
  options.schedulers.clear();
  options.schedulers = {"igniter"};
  CHECK(told(services(), options).find("igniter: measurements: the field is missing") == 0);
  options.schedulers.clear();
  options.objectives = {"sw"};
  CHECK(told(services(), options).find("--objective: a document of kind services has none") == 0);
}

TEST_CASE("a scheduler that cannot decide does not take the others with it", "[cluster]") {
  cluster::PlanOptions options;
  options.schedulers = {"fifo9", "milp-ao", "igniter"};
  const auto got = cluster::plan(services(), options);
  REQUIRE(got.ok());
  REQUIRE((*got)["results"].size() == 1);
  CHECK((*got)["results"][0]["scheduler"] == "milp-ao");
  REQUIRE((*got)["errors"].size() == 2);
  CHECK((*got)["errors"][0]["scheduler"] == "fifo9");
  CHECK((*got)["errors"][0]["error"].get<std::string>().find("'fifo9' is not allowed") != std::string::npos);
  CHECK((*got)["errors"][1]["error"].get<std::string>().find("igniter: measurements") == 0);
}

TEST_CASE("devices that fail: read in order, and refused where a kind does not play it", "[cluster]") {
  const auto training = [](const char* down) {
    return std::string(
               R"({"version": 1, "kind": "services", "devices": [{"id": "a", "memory_bytes": 1000, "down": )") +
           down + R"(}], "services": []})";
  };
  CHECK(told(training(R"([{"from_s": 5, "until_s": 4}])"), {}).find("devices[0].down[0].until_s") == 0);
  CHECK(told(training(R"([{"from_s": 5}, {"from_s": 9}])"), {}).find("devices[0].down[1].from_s") == 0);
  CHECK(
      told(
          R"({"version": 1, "kind": "reservations", "devices": [{"id": "a", "memory_bytes": 1000, "down": [{"from_s": 5}]}]})",
          {})
          .find("documents of this kind do not say when devices fail") != std::string::npos);
}

TEST_CASE("changes of devices: those that are down at the start, intervals that meet and that overlap",
          "[cluster]") {
  std::vector<cluster::Device> devices(3);
  devices[0].down = {{0, 4}, {4, 6}, {9, cluster::kNever}};
  devices[1].down = {{6, 7}};
  devices[2].down = {{1, 2}, {3, 12}, {0, 8}};
  std::string told;
  for (const cluster::DeviceChange& change : cluster::device_changes(devices))
    told += base::format("%u %s %g, ", change.device, change.up ? "up" : "down", change.at_s);
  CHECK(told == "0 down 0, 2 down 0, 0 up 6, 1 down 6, 1 up 7, 0 down 9, 2 up 12, ");
  // In time that is not quadratic: each second it is down for a half.
  std::vector<cluster::Device> flapping(1);
  for (int at = 0; at < 500'000; ++at) flapping[0].down.push_back({double(at), at + 0.5});
  CHECK(cluster::device_changes(flapping).size() == 1'000'000);
}

TEST_CASE("a field given twice deep inside is found", "[cluster]") {
  const auto result =
      cluster::parse_document(R"({"a": [{"b": 1}, {"b": 1, "c": {"d": 1, "e": 2, "d": 3}}]})");
  REQUIRE_FALSE(result.ok());
  CHECK(result.status().message().find("a[1].c.d: the field is there twice") == 0);
}

TEST_CASE("a million elements: a plan, or a clear error", "[cluster]") {
  // Under sanitizers fewer, since they are read some twenty times as slowly.
  constexpr size_t kCount = test::kSanitized ? 20'000 : 1'000'000, kFewer = kCount / 10;
  const auto list = [](size_t count, const std::string& head, const std::string& tail) {
    std::string text;
    for (size_t i = 0; i < count; ++i)
      text += (i == 0 ? "{\"name\": \"" : ",{\"name\": \"") + head + std::to_string(i) + "\"" + tail + "}";
    return text;
  };
  const std::string service =
      R"(, "rate_rps": 10, "slo_ms": 100, "configurations": [{"batch": 4, "latency_ms": 20, "throughput_rps": 200, "memory_percent": 10, "wao_percent": 20}])";
  const auto plan = cluster::plan(R"({"version": 1, "kind": "services", "devices": 1000, "services": [)" +
                                      list(kCount, "s", service) + "]}",
                                  {});
  REQUIRE(plan.ok());
  const auto& result = (*plan)["results"][0];
  CHECK(result["served_rps"].size() == kCount);
  CHECK(result["goodput_rps"] == Approx(10 * std::min<double>(5000, kCount)));  // five replicas a device
  CHECK(result["unserved"].size() == kCount - 5000);
  CHECK(result["unserved"][0]["reason"] == "no room is left: others serve more with it");

  const std::string stream =
      R"(, "accuracy": 50, "gpus_needed": 0.1, "windows": [{"configurations": [{"name": "c", "accuracy": 80, "gpu_seconds": 20}]}])";
  CHECK(
      told(
          R"({"version": 1, "kind": "retraining", "devices": 1000, "window_s": 200, "quantum": 0.1, "accuracy_floor": 10, "streams": [)" +
          list(kFewer, "s", stream) + "]}")
          .find("gpushare: quantum: 0.1 of a device divides 1000 devices into 10000 quanta, at most") == 0);
  cluster::PlanOptions welfare;
  welfare.objectives = {"sw"};
  CHECK(told(R"({"version": 1, "kind": "shares", "capacity": 100000000, "jobs": [)" +
                 list(kFewer, "j",
                      R"(, "load": 1, "slo": 0.9, "utility": "linear", "curve": [[0, 0], [1, 1]])") +
                 "]}",
             welfare)
            .find("capacity: " + std::to_string(kFewer) + " jobs over 100000000 units are") !=
        std::string::npos);
  if (!test::kSanitized) {
    CHECK(
        told(
            R"({"version": 1, "kind": "trials", "devices": 1, "max_packed": 1, "max_workers": 1, "groups": [{"arrival_s": 0, "trials": [)" +
            list(kCount + 1, "t", "") + "]}]}")
            .find("groups[0].trials: a list of 1000001 is not allowed") == 0);
  }
}

TEST_CASE("infeasible documents: a plan that says what is not served and why", "[cluster]") {
  const auto plan_of = [](const std::string& document, cluster::PlanOptions options = {}) {
    const auto result = cluster::plan(document, options);
    INFO((result.ok() ? "" : result.status().message()));
    REQUIRE(result.ok());
    return (*result)["results"][0];
  };
  // A service that is slower than its SLO with every batch, one that needs more memory than any device has, one without a profile.
  const auto served = plan_of(
      R"({"version": 1, "kind": "services", "devices": 1, "services": [
        {"name": "slow", "rate_rps": 10, "slo_ms": 5, "configurations": [{"batch": 4, "latency_ms": 20, "throughput_rps": 200, "memory_percent": 10, "wao_percent": 20}]},
        {"name": "big", "rate_rps": 10, "slo_ms": 50, "configurations": [{"batch": 4, "latency_ms": 20, "throughput_rps": 200, "memory_bytes": 99000000000, "wao_percent": 20}]},
        {"name": "unknown", "rate_rps": 10, "slo_ms": 50},
        {"name": "wide", "rate_rps": 10, "slo_ms": 50, "configurations": [{"batch": 4, "latency_ms": 20, "throughput_rps": 200, "memory_percent": 10, "wao_percent": 130}]}]})");
  CHECK(served["goodput_rps"] == 0);
  REQUIRE(served["unserved"].size() == 4);
  CHECK(served["unserved"][3]["reason"] == "every configuration takes more compute than a device has");
  CHECK(served["unserved"][0]["reason"] == "every configuration is slower than slo_ms on every device");
  CHECK(served["unserved"][1]["reason"] == "every configuration in time needs more memory than a device has");
  CHECK(served["unserved"][2]["reason"] == "it has no configurations");
  cluster::PlanOptions usher;
  usher.schedulers = {"usher-wao"};
  const auto grouped = plan_of(
      R"({"version": 1, "kind": "services", "devices": 1, "services": [
        {"name": "slow", "rate_rps": 10, "slo_ms": 5, "configurations": [{"batch": 4, "latency_ms": 20, "throughput_rps": 200, "memory_percent": 10, "wao_percent": 20}]},
        {"name": "other", "rate_rps": 10, "slo_ms": 50, "configurations": [{"batch": 4, "latency_ms": 20, "throughput_rps": 200, "memory_percent": 10, "ao_percent": 20}]},
        {"name": "unknown", "rate_rps": 10, "slo_ms": 50}]})",
      usher);
  REQUIRE(grouped["unserved"].size() == 3);
  CHECK(grouped["unserved"][0]["reason"] ==
        "every configuration with the metric of compute is slower than slo_ms");
  CHECK(grouped["unserved"][1]["reason"] ==
        "no configuration has the metric of compute that this scheduler counts");
  CHECK(grouped["unserved"][2]["reason"] == "it has no configurations");
  const auto trials = plan_of(
      R"({"version": 1, "kind": "trials", "devices": 1, "max_packed": 1, "max_workers": 1, "groups": [{"arrival_s": 0, "trials": [
        {"name": "fits", "budget_s": 5}, {"name": "big", "budget_s": 5, "memory_bytes": 99000000000}]}]})");
  CHECK(trials["makespan_s"] == Approx(5));
  REQUIRE(trials["rejected"].size() == 1);
  CHECK(trials["rejected"][0]["trial"] == "big");
  // A floor that cannot be kept: the window says by how much.
  const auto retraining = plan_of(
      R"({"version": 1, "kind": "retraining", "devices": 1, "window_s": 100, "quantum": 0.5, "accuracy_floor": 60, "streams": [
        {"name": "s", "accuracy": 80, "gpus_needed": 1, "windows": [{"configurations": []}]},
        {"name": "t", "accuracy": 80, "gpus_needed": 1, "windows": [{"configurations": []}]}]})");
  CHECK(retraining["windows"][0]["below_floor"] > 0);
  CHECK_FALSE(retraining["windows"][0].contains("floor_out_of_reach"));  // one of them alone would keep it
  // A stream that all devices would not keep above the floor is named.
  const auto beyond = plan_of(
      R"({"version": 1, "kind": "retraining", "devices": 1, "window_s": 100, "quantum": 0.5, "accuracy_floor": 60, "streams": [
        {"name": "s", "accuracy": 80, "gpus_needed": 2, "windows": [{"configurations": []}]}]})");
  CHECK(beyond["windows"][0]["accuracy"] == Approx(40));
  CHECK(beyond["windows"][0]["floor_out_of_reach"] == cluster::OrderedJson::array({"s"}));
  // More is wanted than there is: all is divided, and the least utility says what is missed.
  cluster::PlanOptions fair;
  fair.objectives = {"njc"};
  const auto shares = plan_of(
      R"({"version": 1, "kind": "shares", "capacity": 10, "jobs": [
        {"name": "a", "load": 100, "slo": 0.9, "utility": "linear", "curve": [[0, 0], [1, 1]]},
        {"name": "b", "load": 100, "slo": 0.9, "utility": "linear", "curve": [[0, 0], [1, 1]]}]})",
      fair);
  CHECK(shares["allocation"]["a"] == 5);
  CHECK(shares["egalitarian"] < 0.1);
}

TEST_CASE("every example document is decided by every scheduler of its kind", "[cluster]") {
  for (const auto& entry : std::filesystem::directory_iterator(GPUSHARE_EXAMPLES "/cluster")) {
    if (entry.path().extension() != ".json") continue;
    INFO(entry.path().string());
    std::ifstream file(entry.path());
    std::stringstream text;
    text << file.rdbuf();
    const auto document = OrderedJson::parse(text.str());
    for (const cluster::Kind* kind : cluster::kinds()) {
      if (document["kind"] != kind->name) continue;
      cluster::PlanOptions options;
      options.choices.assign(kind->choices.begin(), kind->choices.end());
      const auto result = cluster::plan(text.str(), options);
      INFO((result.ok() ? "" : result.status().message()));
      CHECK(result.ok());
    }
  }
}

TEST_CASE("the schema is JSON, and has every kind", "[cluster]") {
  const auto schema = OrderedJson::parse(cluster::schema());
  for (const cluster::Kind* kind : cluster::kinds()) {
    CHECK(schema["$defs"].contains(kind->name));
    CHECK(std::filesystem::exists(std::string(GPUSHARE_EXAMPLES "/cluster/") + kind->name + ".json"));
  }
}
