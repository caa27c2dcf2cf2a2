// Iterations on the stand-in for the driver: begins and ends that it refuses, and what it is asked for.
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

namespace {

executor::RuntimeOptions on_standin() {
  return options_of(
      {"cuda:0?driver=" GPUSHARE_CUDA_STANDIN "&total_bytes=268435456", memory::Layout::kVirtual});
}

}  // namespace

TEST_CASE("timeline: iterations after one whose begin failed are where they were") {
  executor::RuntimeOptions options = on_standin();
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

TEST_CASE("an iteration whose end can be neither marked nor waited for says that the device is lost") {
  const auto runtime = open_runtime(on_standin());
  const auto session = open_session(*runtime, need("one", kMiB, kMiB)),
             other = open_session(*runtime, need("other", kMiB, kMiB));
  const auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  for (const char* call : {"cuEventRecord", "cuStreamQuery", "cuStreamSynchronize"})
    standin_fail_call(call, 1, standin_test::CUDA_ERROR_OUT_OF_MEMORY);
  const base::Status ended = (*iteration)->end();
  standin_clear_faults();
  INFO(ended.to_string());
  CHECK(ended.code() == GPUSHARE_DEVICE_LOST);
  CHECK(other->begin(0).status().code() == GPUSHARE_DEVICE_LOST);
  CHECK(runtime->close().ok());
}

TEST_CASE("an iteration that is measured maps what it allocates, not all that it was promised") {
  const auto runtime = open_runtime(on_standin());
  const auto session = open_session(*runtime, need("measured", kMiB, 0));
  const uint64_t before = standin_calls("cuMemCreate");
  const auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  CHECK((*iteration)->alloc(3 * kMiB, 0).ok());
  CHECK(session->info().promised_ephemeral_bytes >= 128 * kMiB);
  CHECK(standin_calls("cuMemCreate") - before <= 4);
  CHECK((*iteration)->end().ok());
  CHECK(runtime->close().ok());
}
