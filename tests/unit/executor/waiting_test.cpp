// Waiting calls: each wait ends, and not before it may.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <functional>
#include <memory>
#include <string>
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

TEST_CASE("idle lanes move out of the way of a session that would wait for room in one piece") {
  const Setup setup = kSetups[GENERATE(1, 3)];
  CAPTURE(setup.device);
  executor::RuntimeOptions options = options_of(setup);
  options.capacity_bytes = 62 * kMiB;
  options.max_lanes = 2;
  auto runtime = open_runtime(std::move(options));
  auto above = open_session(*runtime, need("above", 2 * kMiB, 8 * kMiB));
  auto idle = open_session(*runtime, need("idle", 2 * kMiB, 8 * kMiB));
  REQUIRE(idle->info().lane != above->info().lane);
  REQUIRE(above->close().ok());
  // 52 MiB are free: 2 and 42 below the lane of `idle`, 8 above it. There is room for `wide` in that lane, not for another.
  auto wide = open_session(*runtime, need("wide", 46 * kMiB, 8 * kMiB));
  CHECK(wide->info().state == executor::SessionState::kResident);
  for (const auto& session : {idle, wide}) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    CHECK((*iteration)->alloc(8 * kMiB, 0).ok());
    CHECK((*iteration)->end().ok());
  }
  CHECK(runtime->check().empty());
  CHECK(runtime->close().ok());
}

TEST_CASE("draining waits for what was submitted before, and for nothing else") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  auto runtime = open_runtime(options_of(setup));
  CHECK(runtime->drain(0).ok());
  auto holder = open_session(*runtime, need("holder", 0, 4 * kMiB));
  auto strict = need("other", 0, 4 * kMiB);
  strict.fail_on_error = true;
  auto other = open_session(*runtime, strict);
  std::atomic<int> ran{0};
  const auto submit = [&](executor::Session& session, base::Status outcome) {
    std::unique_ptr<executor::Work> work = work_of([&ran, outcome](const auto&) {
      ++ran;
      return outcome;
    });
    REQUIRE(session.submit(work).ok());
  };
  auto iteration = holder->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  submit(*holder, {});
  const base::Status timed_out = runtime->drain(0);
  CHECK(timed_out.code() == GPUSHARE_TIMED_OUT);
  CHECK(timed_out.message().find("'holder'") != std::string::npos);
  // It would wait for the iteration that this thread has open.
  CHECK(runtime->drain(GPUSHARE_NO_TIMEOUT).code() == GPUSHARE_INVALID_STATE);
  CHECK(ran == 0);
  std::atomic<int32_t> drained{-1};
  std::thread drains([&] { drained = runtime->drain(GPUSHARE_NO_TIMEOUT).code(); });
  CHECK((*iteration)->end().ok());
  drains.join();
  CHECK(drained == GPUSHARE_OK);
  CHECK(ran == 1);
  for (int i = 0; i < 100; ++i) {
    submit(*holder, {});
    submit(*other, {});
  }
  submit(*other, {GPUSHARE_QUOTA_EXCEEDED, "fails"});
  CHECK(runtime->drain(GPUSHARE_NO_TIMEOUT).ok());
  CHECK(ran == 202);
  // `other` ended as failed; a session that is closed has nothing to wait for.
  CHECK(other->info().state == executor::SessionState::kFailed);
  CHECK(holder->close().ok());
  CHECK(runtime->drain(0).ok());
  CHECK(runtime->close().ok());
  CHECK(runtime->drain(0).code() == GPUSHARE_INVALID_STATE);
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
  std::atomic<int32_t> cancelled{GPUSHARE_OK};
  if (runs) {
    REQUIRE(session->submit(work).ok());
  } else {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    REQUIRE(session->submit(work).ok());
    canceller = std::thread([&] { cancelled = session->cancel().code(); });
    while (!destroying) std::this_thread::yield();
    CHECK((*iteration)->end().ok());
  }
  while (!destroying) std::this_thread::yield();
  closing = true;
  CHECK(session->close().ok());
  CHECK(destroyed);
  if (canceller.joinable()) canceller.join();
  CHECK(cancelled == GPUSHARE_OK);
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
  std::atomic<int32_t> cancelled{GPUSHARE_INTERNAL};
  std::thread canceller([&] { cancelled = session->cancel().code(); });
  while (!destroying) std::this_thread::yield();
  CHECK((*iteration)->end().ok());
  closing = true;
  CHECK(runtime->close().ok());
  CHECK(destroyed);
  canceller.join();
  CHECK(cancelled == GPUSHARE_OK);
}

std::string timed_out(base::Status status) {
  CHECK(status.code() == GPUSHARE_TIMED_OUT);
  return status.message();
}

TEST_CASE("a session that the policy keeps out is told so, and not that memory lacks") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  auto runtime = open_runtime(options_of(setup, "fifo"));
  auto first = open_session(*runtime, need("first", kMiB, kMiB));
  auto second = open_session(*runtime, need("second", kMiB, kMiB));
  auto third = open_session(*runtime, need("third", kMiB, kMiB));
  const std::string expected =
      " waits for admission: policy 'fifo' lets it in only when other sessions have left the device; held by "
      "'first'";
  CHECK(timed_out(second->begin(0).status()).find("'second'" + expected) != std::string::npos);
  CHECK(timed_out(third->wait_admitted(0)).find("'third'" + expected) != std::string::npos);
  REQUIRE(first->close().ok());
  REQUIRE(second->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
}

TEST_CASE("a call that waited in vain says for what") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device, static_cast<int>(setup.layout));
  executor::RuntimeOptions options = options_of(setup);
  options.capacity_bytes = 64 * kMiB;
  options.max_lanes = 1;
  options.enqueue_depth = 1;
  auto runtime = open_runtime(std::move(options));
  auto a = open_session(*runtime, need("a", 16 * kMiB, 8 * kMiB));
  auto b = open_session(*runtime, need("b", 16 * kMiB, 8 * kMiB));
  auto queued = open_session(*runtime, need("queued", 32 * kMiB, 8 * kMiB));
  const std::string admission =
      "session 'queued' waits for admission: it needs 32.00 MiB persistent and 8.00 MiB ephemeral; 24.00 MiB "
      "of 64.00 MiB can be "
      "promised, the rest is held by 'a'";
  CHECK(timed_out(queued->wait_admitted(0)).find(admission) != std::string::npos);
  CHECK(timed_out(queued->begin(0).status()).find("waits for admission") != std::string::npos);
  auto iteration = a->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  CHECK(timed_out(b->begin(0).status()).find("lane 0 is in an iteration of session 'a'") !=
        std::string::npos);
  std::atomic<bool> go_on{false};
  if (setup.device[0] == 'h') {
    const auto stream = (*iteration)->stream();
    REQUIRE(stream.ok());
    const auto wait = [](void* data) {
      while (!*static_cast<std::atomic<bool>*>(data)) std::this_thread::yield();
    };
    REQUIRE((*stream)->launch_host(wait, &go_on).ok());
  }
  REQUIRE((*iteration)->end().ok());
  if (setup.device[0] == 'h')
    CHECK(timed_out(b->begin(0).status()).find("lane 0 has 1 iterations on the device") != std::string::npos);
  go_on = true;
  CHECK(runtime->close().ok());
}

TEST_CASE("a session that ends with iterations queued and a begin under way leaves nobody who waits") {
  executor::RuntimeOptions options = options_of(kSetups[0]);
  options.max_lanes = 1;
  auto runtime = open_runtime(std::move(options));
  auto a = open_session(*runtime, need("a", 0, kMiB)), b = open_session(*runtime, need("b", 0, kMiB));
  const auto iteration = a->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  for (int i = 0; i < 3; ++i) {
    std::unique_ptr<executor::Work> work = std::make_unique<WatchedWork>([] {});
    REQUIRE(b->submit(work).ok());
  }
  base::Status begun;
  std::thread begins([&] { begun = b->begin(GPUSHARE_NO_TIMEOUT).status(); });
  while (b->info().iterations_queued < 4) std::this_thread::yield();
  CHECK(runtime->check() == "");
  REQUIRE(b->cancel().ok());
  CHECK(runtime->check() == "");
  begins.join();
  CHECK(begun.code() == GPUSHARE_CANCELLED);
  CHECK(runtime->check() == "");
  REQUIRE((*iteration)->end().ok());
  CHECK(runtime->close().ok());
}

TEST_CASE("one whose need is not declared says whose profiling it waits for") {
  executor::RuntimeOptions options = options_of(kSetups[0]);
  auto runtime = open_runtime(std::move(options));
  auto first = open_session(*runtime, need("first", 0, 0));
  auto second = open_session(*runtime, need("second", 0, 0));
  auto iteration = first->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  CHECK(
      timed_out(second->begin(0).status()).find("session 'first' runs an iteration of unknown need first") !=
      std::string::npos);
  REQUIRE((*iteration)->end().ok());
  CHECK(runtime->close().ok());
}

}  // namespace
