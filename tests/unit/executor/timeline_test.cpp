// SPDX-License-Identifier: Apache-2.0
#include "executor/timeline.hpp"

#include <unistd.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "support/executor_fixture.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT
using nlohmann::json;

std::string scratch_path() {
  char name[] = "/tmp/gpushare_timeline_XXXXXX";
  const int file = mkstemp(name);
  REQUIRE(file >= 0);
  ::close(file);
  return name;
}

json events_of(const std::string& path) {
  std::ifstream in(path);
  json all = json::parse(in);
  std::remove(path.c_str());
  return all["traceEvents"];
}

TEST_CASE("timeline: iterations of a lane never overlap and all are there") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto options = options_of(setup);
  options.record_timeline = true;
  options.max_lanes = 1;
  auto runtime = open_runtime(std::move(options));
  auto a = open_session(*runtime, need("alpha", kMiB, kMiB));
  auto b = open_session(*runtime, need("beta \"quoted\"", kMiB, kMiB));
  for (int i = 0; i < 10; ++i) {
    for (const auto& session : {a, b}) {
      auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      REQUIRE(iteration.ok());
      REQUIRE(enqueue(**(*iteration)->stream(), 2'000'000).ok());
      REQUIRE((*iteration)->end().ok());
    }
  }
  REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  const std::string path = scratch_path();
  REQUIRE(runtime->write_timeline(path).ok());
  const json events = events_of(path);
  std::map<uint64_t, std::pair<double, double>> iterations;  // by start, to see them in order
  std::set<std::string> names;
  size_t slices = 0, counters = 0;
  double end = 0;
  for (const json& event : events) {
    if (event["ph"] == "C") ++counters;
    if (event["ph"] != "X" || !event.contains("args") || !event["args"].contains("iteration")) continue;
    ++slices;
    names.insert(event["name"].get<std::string>());
    CHECK(event["ts"].get<double>() >= end - 0.001);
    end = event["ts"].get<double>() + event["dur"].get<double>();
    if (std::string(setup.device).starts_with("sim")) CHECK(event["dur"].get<double>() == Approx(2000.0));
  }
  CHECK(slices == 20);
  CHECK(counters > 0);
  CHECK(names == std::set<std::string>{"alpha", "beta \"quoted\""});
  CHECK(runtime->write_timeline("/nonexistent/x.json").code() == GPUSHARE_IO_ERROR);
  REQUIRE(runtime->close().ok());
  CHECK(runtime->write_timeline(path).code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("timeline: off by default") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  CHECK(runtime->write_timeline("/tmp/x").code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("timeline: bounded, and says what it dropped") {
  executor::Timeline timeline;
  for (uint64_t i = 0; i < executor::Timeline::kMaxRecords + 100; ++i)
    timeline.add({executor::Timeline::Kind::kIteration, 0, 1, i * 10, i * 10 + 5, i});
  CHECK(timeline.size() == executor::Timeline::kMaxRecords);
  CHECK(timeline.dropped() == 100);
  for (uint64_t id = 1; id < executor::Timeline::kMaxNames + 10; ++id) timeline.name_session(id, "n");
  const std::string path = scratch_path();
  REQUIRE(timeline.write_to(path).ok());
  std::ifstream in(path);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  std::remove(path.c_str());
  CHECK(text.find("older records dropped") != std::string::npos);
  CHECK(text.find("\"count\":100") != std::string::npos);
}

}  // namespace
