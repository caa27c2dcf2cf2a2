// Lanes with compute units of their own, on green contexts of the stand-in for the driver.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>
#include <vector>

#include "support/executor_fixture.hpp"
#include "unit/device/cuda/standin_support.hpp"

using namespace gpushare;
using namespace gpushare::test;
using standin_test::check_clean;

namespace {

executor::RuntimeOptions standin(memory::Layout layout = memory::Layout::kVirtual,
                                 const char* policy = "fair") {
  return options_of({"cuda:0?driver=" GPUSHARE_CUDA_STANDIN "&total_bytes=268435456", layout}, policy);
}

executor::SessionOptions with_units(std::string name, uint32_t units) {
  executor::SessionOptions options = need(std::move(name), 2 * kMiB, 4 * kMiB);
  options.compute_units = units;
  return options;
}

// Iterations that fill a block. No assertion, so that several threads may: what went wrong, or OK.
base::Status iterate(executor::Session& session, int count) {
  for (int i = 0; i < count; ++i) {
    GPUSHARE_ASSIGN_OR_RETURN(const auto iteration, session.begin(GPUSHARE_NO_TIMEOUT));
    GPUSHARE_ASSIGN_OR_RETURN(const memory::Address block, iteration->alloc(kMiB, 0));
    GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration->stream());
    GPUSHARE_RETURN_IF_ERROR(stream->fill(block, static_cast<uint8_t>(i), kMiB));
    GPUSHARE_RETURN_IF_ERROR(iteration->end());
  }
  return {};
}

}  // namespace

TEST_CASE("a session's lane has the SMs it asked for, others share the device", "[partitions]") {
  for (const memory::Layout layout : {memory::Layout::kVirtual, memory::Layout::kContiguous}) {
    auto runtime = open_runtime(standin(layout));
    auto info = runtime->info();
    REQUIRE(info.ok());
    CHECK(info->compute_units == 132);
    CHECK(info->partitionable_compute_units == 128);
    CHECK(info->granularity_compute_units == 8);
    CHECK(info->promised_compute_units == 0);
    const uint64_t green = standin_calls("cuGreenCtxCreate");
    auto heavy = open_session(*runtime, with_units("heavy", 0));
    auto critical = open_session(*runtime, with_units("critical", 20));
    auto beside = open_session(*runtime, with_units("beside", 100));
    auto equal = open_session(*runtime, with_units("equal", 24));
    CHECK(standin_calls("cuGreenCtxCreate") == green + 2);
    CHECK(heavy->info().compute_units == 0);
    CHECK(critical->info().compute_units == 24);
    CHECK(beside->info().compute_units == 104);
    // All are promised: one that asks for as much shares the lane.
    CHECK(equal->info().lane == critical->info().lane);
    CHECK(runtime->info()->promised_compute_units == 128);
    std::vector<std::thread> threads;
    std::atomic<int> failed{0};
    for (auto* session : {&heavy, &critical, &beside, &equal})
      threads.emplace_back([session, &failed] { failed += iterate(**session, 20).ok() ? 0 : 1; });
    for (std::thread& thread : threads) thread.join();
    CHECK(failed == 0);
    REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
    CHECK(runtime->check() == "");
    // The units of a lane that closes serve the next, also one of another size in the same place.
    REQUIRE(critical->close().ok());
    REQUIRE(equal->close().ok());
    CHECK(runtime->info()->promised_compute_units == 104);
    CHECK(standin_calls("cuGreenCtxDestroy") >= 1);
    auto plain = open_session(*runtime, with_units("plain", 0));
    auto small = open_session(*runtime, with_units("small", 8));
    CHECK(iterate(*plain, 3).ok());
    CHECK(iterate(*small, 3).ok());
    CHECK(small->info().compute_units == 8);
    REQUIRE(runtime->close().ok());
    check_clean();
  }
}

TEST_CASE("who asks for more SMs than are free waits, or is refused with the numbers", "[partitions]") {
  auto runtime = open_runtime(standin());
  auto first = open_session(*runtime, with_units("first", 64));
  auto waits = open_session(*runtime, with_units("waits", 128));
  CHECK(waits->info().state == executor::SessionState::kQueued);
  executor::SessionOptions options = with_units("refused", 128);
  options.allow_queueing = false;
  const auto refused = runtime->open_session(options);
  CHECK(refused.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(refused.status().message().find("64 of 128 can be promised") != std::string::npos);
  CHECK(runtime->open_session(with_units("never", 129)).status().code() == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(iterate(*first, 2).ok());
  REQUIRE(first->close().ok());
  REQUIRE(waits->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  CHECK(iterate(*waits, 2).ok());
  CHECK(waits->info().compute_units == 128);
  REQUIRE(runtime->close().ok());
  check_clean();
}

TEST_CASE("a driver that refuses the partition fails the session alone", "[partitions]") {
  auto runtime = open_runtime(standin());
  auto other = open_session(*runtime, with_units("other", 0));
  for (const char* call : {"cuGreenCtxCreate", "cuGreenCtxStreamCreate"}) {
    executor::SessionOptions options = with_units("unlucky", 8);
    options.allow_queueing = false;
    standin_fail_call(call, 1, 2);  // out of memory
    CHECK(runtime->open_session(options).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    CHECK(runtime->info()->promised_compute_units == 0);
  }
  CHECK(iterate(*other, 2).ok());
  auto again = open_session(*runtime, with_units("again", 8));
  CHECK(iterate(*again, 2).ok());
  REQUIRE(runtime->close().ok());
  check_clean();
}

TEST_CASE("a session paged out of a lane with SMs of its own comes back to another", "[partitions]") {
  auto runtime = open_runtime(standin(memory::Layout::kVirtual, "priority"));
  executor::SessionOptions low = with_units("low", 128);
  auto paged = open_session(*runtime, low);
  const auto kept = paged->alloc(memory::Kind::kModel, kMiB, 0);
  const auto freed = paged->alloc(memory::Kind::kModel, kMiB / 2, 0);
  REQUIRE(kept.ok());
  REQUIRE(freed.ok());
  CHECK(iterate(*paged, 2).ok());
  executor::SessionOptions high = with_units("high", 64);
  high.priority = 5;
  auto urgent = open_session(*runtime, high);
  REQUIRE(urgent->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  CHECK(paged->info().state == executor::SessionState::kPagedOut);
  CHECK(urgent->info().compute_units == 64);
  // Its stream is gone; its blocks can be freed all the same.
  CHECK(runtime->free(*freed).ok());
  CHECK(iterate(*urgent, 3).ok());
  REQUIRE(urgent->close().ok());
  CHECK(iterate(*paged, 2).ok());
  CHECK(paged->info().compute_units == 128);
  CHECK(runtime->free(*kept).ok());
  REQUIRE(runtime->close().ok());
  check_clean();
}

TEST_CASE("sessions with SMs of their own come and go under load", "[partitions]") {
  auto runtime = open_runtime(standin());
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t round = 0; round < 12; ++round) {
        auto session = runtime->open_session(with_units("s", (t * 5 + round) % 7 * 8));
        if (!session.ok()) {
          ++failed;
          continue;
        }
        for (int i = 0; i < 3; ++i) {
          auto iteration = (*session)->begin(GPUSHARE_NO_TIMEOUT);
          if (!iteration.ok() || !(*iteration)->alloc(4096, 0).ok() || !(*iteration)->end().ok()) ++failed;
        }
        if (!(*session)->close().ok()) ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failed == 0);
  CHECK(runtime->check() == "");
  CHECK(runtime->info()->promised_compute_units == 0);
  REQUIRE(runtime->close().ok());
  check_clean();
}

TEST_CASE("without partitions the device says so", "[partitions]") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  const auto refused = runtime->open_session(with_units("wants", 1));
  CHECK(refused.status().code() == GPUSHARE_UNSUPPORTED);
  CHECK(refused.status().message().find("compute units of its own") != std::string::npos);
  CHECK(runtime->info()->partitionable_compute_units == 0);
  REQUIRE(runtime->close().ok());
}
