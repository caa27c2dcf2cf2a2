// SPDX-License-Identifier: Apache-2.0
#include "executor/timeline.hpp"

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "support/executor_fixture.hpp"
#include "support/temporary_file.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT
using nlohmann::json;

json events_of(const TemporaryFile& file) {
  return json::parse(file.text())["traceEvents"];
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
      REQUIRE((*iteration)->alloc(512 * 1024, 0).ok());
      REQUIRE(enqueue(**(*iteration)->stream(), 2'000'000).ok());
      REQUIRE((*iteration)->end().ok());
    }
  }
  REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  REQUIRE(b->cancel().ok());
  for (const auto& session : {a, b}) REQUIRE(session->close().ok());
  const TemporaryFile file;
  REQUIRE(runtime->write_timeline(file.path()).ok());
  const json events = events_of(file);
  std::map<uint64_t, std::pair<double, double>> iterations;  // by start, to see them in order
  std::set<std::string> names;
  std::multiset<std::string> endings;
  size_t slices = 0, counters = 0, busy = 0;
  double end = 0;
  for (const json& event : events) {
    if (event["ph"] == "C") ++counters;
    if (event["ph"] == "i") endings.insert(event["name"].get<std::string>());
    if (event["name"] == "ephemeral bytes in use" && event["args"]["ephemeral"] != 0) {
      ++busy;
      CHECK(event["args"]["ephemeral"] >= 512 * 1024);
      CHECK(event["args"]["ephemeral"] <= kMiB);
    }
    if (event["ph"] != "X" || !event.contains("args") || !event["args"].contains("iteration")) continue;
    ++slices;
    names.insert(event["name"].get<std::string>());
    CHECK(event["ts"].get<double>() >= end - 0.001);
    end = event["ts"].get<double>() + event["dur"].get<double>();
    if (std::string(setup.device).starts_with("sim")) CHECK(event["dur"].get<double>() == Approx(2000.0));
  }
  CHECK(slices == 20);
  CHECK(counters > 0);
  CHECK(busy == 20);  // an iteration's bytes count while it is on the device
  // A session that its owner closes has left, and was not cancelled.
  CHECK(endings.count("left") == 2);
  CHECK(endings.count("cancelled") == 1);
  CHECK(names == std::set<std::string>{"alpha", "beta \"quoted\""});
  CHECK(runtime->write_timeline("/nonexistent/x.json").code() == GPUSHARE_IO_ERROR);
  REQUIRE(runtime->close().ok());
  CHECK(runtime->write_timeline(file.path()).code() == GPUSHARE_INVALID_STATE);
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
  const TemporaryFile file;
  REQUIRE(timeline.write_to(file.path()).ok());
  const std::string text = file.text();
  CHECK(text.find("older records dropped") != std::string::npos);
  CHECK(text.find("\"count\":100") != std::string::npos);
}

}  // namespace
