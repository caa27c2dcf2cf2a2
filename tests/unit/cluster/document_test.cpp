// The documents of src/cluster: what is read, what is refused and how it is told.
// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <sstream>

#include "cluster/plan.hpp"
#include "support/catch.hpp"

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
      {services(R"(, "rate_rps": "x")"), R"(services[0].rate_rps: "x" is not allowed)"},
      {services(R"(, "rate": 4)"), "services[0].rate: no such field; there are name"},
      {services("", R"(, "sevices": 4)"),
       "sevices: no such field; there are version, kind, devices, services"},
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

TEST_CASE("a field given twice deep inside is found", "[cluster]") {
  const auto result =
      cluster::parse_document(R"({"a": [{"b": 1}, {"b": 1, "c": {"d": 1, "e": 2, "d": 3}}]})");
  REQUIRE_FALSE(result.ok());
  CHECK(result.status().message().find("a[1].c.d: the field is there twice") == 0);
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
