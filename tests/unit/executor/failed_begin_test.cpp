// An iteration whose begin the driver refuses, on the stand-in: what the timeline shows of those after it.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/clock.hpp"
#include "support/executor_fixture.hpp"
#include "support/temporary_file.hpp"
#include "unit/device/cuda/standin_support.hpp"

using namespace gpushare;
using namespace gpushare::test;

TEST_CASE("timeline: iterations after one whose begin failed are where they were") {
  executor::RuntimeOptions options =
      options_of({"cuda:0?driver=" GPUSHARE_CUDA_STANDIN "&total_bytes=268435456", memory::Layout::kVirtual});
  options.max_lanes = 1;
  options.enqueue_depth = 2;
  options.record_timeline = true;
  const auto runtime = open_runtime(std::move(options));
  const auto failing = open_session(*runtime, need("failing", kMiB, kMiB));
  const auto session = open_session(*runtime, need("going on", kMiB, kMiB));
  const auto run = [&] {
    const auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    REQUIRE((*iteration)->end().ok());
    REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  };
  const uint64_t before_ns = base::host_now_ns();
  for (int i = 0; i < 3; ++i) run();  // all events of the lane have passed once
  standin_fail_call("cuEventRecord", 1, 2);
  CHECK_FALSE(failing->begin(GPUSHARE_NO_TIMEOUT).ok());
  standin_clear_faults();
  CHECK(failing->info().state == executor::SessionState::kFailed);
  for (int i = 0; i < 2; ++i) run();
  const auto passed_us = static_cast<double>(base::host_now_ns() - before_ns) / 1e3;

  const TemporaryFile file;
  REQUIRE(runtime->write_timeline(file.path()).ok());
  double first = -1, end = 0;
  size_t slices = 0;
  const auto trace = nlohmann::json::parse(file.text());
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X" || !event.contains("args") || !event["args"].contains("iteration")) continue;
    ++slices;
    const auto start = event["ts"].get<double>();
    if (first < 0) first = start;
    CHECK(start >= end - 1);
    end = start + event["dur"].get<double>();
  }
  CHECK(slices == 5);
  CHECK(end - first <= passed_us);
  CHECK(runtime->close().ok());
}
