// What calls wait for: that each wait ends, and when it may.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "support/executor_fixture.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

// Runs `on_destruction` when it is destroyed.
class WatchedWork final : public executor::Work {
 public:
  explicit WatchedWork(std::function<void()> on_destruction) : on_destruction_(std::move(on_destruction)) {}
  ~WatchedWork() override { on_destruction_(); }
  base::Status run(const std::shared_ptr<executor::Iteration>&) override { return {}; }

 private:
  const std::function<void()> on_destruction_;
};

TEST_CASE("profiling takes the largest piece of free memory, whatever size the lane had") {
  executor::RuntimeOptions options = options_of(kSetups[1]);
  options.capacity_bytes = 18 * kMiB;
  options.max_lanes = 1;
  auto runtime = open_runtime(std::move(options));
  // Heaps from the low end: 4 MiB free, 4 MiB held, 4 MiB free, then the lane of 5 MiB, of which 6 are promised.
  auto gone = open_session(*runtime, need("gone", 4 * kMiB, 5 * kMiB));
  auto held = open_session(*runtime, need("held", 4 * kMiB, 5 * kMiB));
  REQUIRE(gone->close().ok());
  auto profiled = open_session(*runtime, need("profiled", 0, 0));
  // 8 MiB are free, and three quarters of that are promised beyond the lane's 6. Only 4 adjoin it.
  auto iteration = profiled->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  CHECK((*iteration)->alloc(10 * kMiB, 0).ok());
  CHECK((*iteration)->end().ok());
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE("a session that is closed has no work left that is being destroyed") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  const bool runs = GENERATE(true, false);
  CAPTURE(setup.device, static_cast<int>(setup.layout), runs);
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("a", 0, 4 * kMiB));
  std::atomic<bool> destroying{false}, closing{false}, destroyed{false};
  std::unique_ptr<executor::Work> work = std::make_unique<WatchedWork>([&] {
    destroying = true;
    while (!closing) std::this_thread::yield();
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    destroyed = true;
  });
  std::thread canceller;
  if (runs) {
    REQUIRE(session->submit(work).ok());
  } else {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    REQUIRE(session->submit(work).ok());
    canceller = std::thread([&] { CHECK(session->cancel().ok()); });
    while (!destroying) std::this_thread::yield();
    CHECK((*iteration)->end().ok());
  }
  while (!destroying) std::this_thread::yield();
  closing = true;
  CHECK(session->close().ok());
  CHECK(destroyed);
  if (canceller.joinable()) canceller.join();
  CHECK(runtime->close().ok());
}

TEST_CASE("a work may close its session as it is destroyed") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("a", 0, 4 * kMiB));
  std::atomic<int32_t> code{-1};
  std::unique_ptr<executor::Work> work =
      std::make_unique<WatchedWork>([&code, session] { code = session->close().code(); });
  REQUIRE(session->submit(work).ok());
  while (code == -1) std::this_thread::yield();
  CHECK(code == GPUSHARE_OK);
  CHECK(session->close().code() == GPUSHARE_INVALID_STATE);
  CHECK(runtime->close().ok());
}

TEST_CASE("a runtime that is closed has no work left that another thread destroys") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("a", 0, 4 * kMiB));
  auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  std::atomic<bool> destroying{false}, closing{false}, destroyed{false};
  std::unique_ptr<executor::Work> work = std::make_unique<WatchedWork>([&] {
    destroying = true;
    while (!closing) std::this_thread::yield();
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    destroyed = true;
  });
  REQUIRE(session->submit(work).ok());
  std::thread canceller([&] { CHECK(session->cancel().ok()); });
  while (!destroying) std::this_thread::yield();
  CHECK((*iteration)->end().ok());
  closing = true;
  CHECK(runtime->close().ok());
  CHECK(destroyed);
  canceller.join();
}

}  // namespace
