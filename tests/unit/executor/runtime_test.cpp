// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "support/executor_fixture.hpp"

namespace {

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

TEST_CASE("opening: bad options are refused") {
  executor::RuntimeOptions options;
  options.device = "nosuch";
  CHECK(executor::Runtime::open(std::move(options)).status().code() == GPUSHARE_NOT_FOUND);
  executor::RuntimeOptions lanes;
  lanes.device = "host";
  lanes.max_lanes = executor::kMaxLanes + 1;
  CHECK(executor::Runtime::open(std::move(lanes)).status().code() == GPUSHARE_INVALID_ARGUMENT);
  executor::RuntimeOptions depth;
  depth.device = "host";
  depth.enqueue_depth = executor::kMaxDepth + 1;
  CHECK(executor::Runtime::open(std::move(depth)).status().code() == GPUSHARE_INVALID_ARGUMENT);
  executor::RuntimeOptions capacity;
  capacity.device = "host";
  capacity.capacity_bytes = uint64_t{1} << 60;
  CHECK_FALSE(executor::Runtime::open(std::move(capacity)).ok());
}

TEST_CASE("session options are checked") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  for (const double weight : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    executor::SessionOptions options = need("w", 0, kMiB);
    options.weight = weight;
    CHECK(runtime->open_session(options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  }
  executor::SessionOptions quota = need("q", 4 * kMiB, 4 * kMiB);
  quota.quota_bytes = 6 * kMiB;
  CHECK(runtime->open_session(quota).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(runtime->open_session(need("x", UINT64_MAX, UINT64_MAX)).status().code() ==
        GPUSHARE_EXCEEDS_CAPACITY);
  auto session = open_session(*runtime, need("s", 0, kMiB));
  CHECK(session->set_weight(0).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(session->set_weight(2).ok());
  CHECK(session->set_priority(3).ok());
  CHECK(session->set_remaining(1000).ok());
  CHECK(session->info().remaining_ns == 1000);
  CHECK(runtime->info()->sessions_resident == 1);
}

TEST_CASE("progress: once an iteration, may call in, may throw, may not wait or close") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  CAPTURE(setup.device);
  auto options = options_of(setup);
  std::atomic<uint64_t> calls{0}, told{0}, misnamed{0};
  std::atomic<int32_t> begin_code{-1}, close_code{-1};
  std::shared_ptr<executor::Session> other;
  executor::Runtime* self = nullptr;
  options.on_progress = [&](const executor::Progress& progress) {
    // Each once, in either order: this thread and the runtime's tell.
    told += uint64_t{1} << (8 * progress.iterations_done);
    if (std::string(progress.session_name) != "p") ++misnamed;
    begin_code = other->begin(GPUSHARE_NO_TIMEOUT).status().code();
    close_code = self->close().code();
    (void)self->info();
    if (++calls == 2) throw std::runtime_error("ignored");
  };
  options.policy = std::move(*sched::make_policy("fifo"));  // one at a time: `other` is queued
  auto runtime = open_runtime(std::move(options));
  self = runtime.get();
  auto session = open_session(*runtime, need("p", 0, kMiB));
  other = open_session(*runtime, need("other", 0, kMiB));
  for (int i = 0; i < 4; ++i) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    REQUIRE(enqueue(**(*iteration)->stream(), 1000).ok());
    REQUIRE((*iteration)->end().ok());
  }
  REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  while (calls < 4) std::this_thread::yield();
  CHECK(told == 0x0101010100);
  CHECK(misnamed == 0);
  CHECK(begin_code == GPUSHARE_INVALID_STATE);
  CHECK(close_code == GPUSHARE_INVALID_STATE);
  CHECK(runtime->close().ok());
  other.reset();
}

TEST_CASE("policies change at run time") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  auto runtime = open_runtime(options_of(setup, "fifo"));
  auto a = open_session(*runtime, need("a", 0, kMiB));
  auto b = open_session(*runtime, need("b", 0, kMiB));
  CHECK(b->info().state == executor::SessionState::kQueued);
  CHECK(runtime->set_policy(nullptr).code() == GPUSHARE_INVALID_ARGUMENT);
  REQUIRE(runtime->set_policy(std::move(*sched::make_policy("fair"))).ok());
  CHECK(b->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  CHECK(runtime->info()->policy == "fair");
  for (const char* name : {"srtf", "pack", "priority", "fifo", "fair"}) {
    REQUIRE(runtime->set_policy(std::move(*sched::make_policy(name))).ok());
    for (const auto& session : {a, b}) {
      auto work = work_of([](const auto&) { return base::Status(); });
      REQUIRE(session->submit(work).ok());
    }
  }
  while (a->info().iterations_done + b->info().iterations_done < 10) std::this_thread::yield();
  CHECK(runtime->close().ok());
}

TEST_CASE("priority pages out and back, addresses and bytes kept, copies charged") {
  const bool sim = GENERATE(false, true);
  executor::RuntimeOptions options =
      options_of({sim ? "sim?total_bytes=134217728" : "host?total_bytes=134217728", memory::Layout::kVirtual},
                 "priority");
  options.record_timeline = true;
  auto runtime = open_runtime(std::move(options));
  auto low = open_session(*runtime, need("low", 60 * kMiB, 20 * kMiB));
  const auto block = low->alloc(memory::Kind::kModel, 40 * kMiB, 0);
  REQUIRE(block.ok());
  auto stream = runtime->create_stream(0);
  REQUIRE(stream.ok());
  REQUIRE((*stream)->fill(*block, 0x5a, 40 * kMiB).ok());
  REQUIRE((*stream)->synchronize().ok());
  executor::SessionOptions urgent = need("high", 60 * kMiB, 40 * kMiB);
  urgent.priority = 5;
  auto high = open_session(*runtime, urgent);
  REQUIRE(high->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
  CHECK(low->info().state == executor::SessionState::kPagedOut);
  CHECK(runtime->info()->sessions_paged_out == 1);
  CHECK(runtime->check().empty());  // waits for the rest of the page-out
  CHECK(runtime->info()->paged_out_bytes_total == 40 * kMiB);
  CHECK(runtime->info()->paging_ns > 0);
  std::atomic<bool> ran{false};
  std::thread waiter([&] {
    auto iteration = low->begin(GPUSHARE_NO_TIMEOUT);
    ran = iteration.ok() && (*iteration)->end().ok();
  });
  for (int i = 0; i < 3; ++i) {
    auto iteration = high->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    REQUIRE((*iteration)->end().ok());
  }
  CHECK_FALSE(ran);
  REQUIRE(high->close().ok());
  waiter.join();
  CHECK(ran);
  std::vector<unsigned char> back(40 * kMiB);
  REQUIRE(
      (*stream)
          ->copy(reinterpret_cast<uintptr_t>(back.data()), *block, back.size(), GPUSHARE_COPY_DEVICE_TO_HOST)
          .ok());
  REQUIRE((*stream)->synchronize().ok());
  size_t wrong = 0;
  for (const unsigned char byte : back) wrong += byte != 0x5a;
  CHECK(wrong == 0);
  CHECK(runtime->info()->paged_in_bytes_total == 40 * kMiB);
  REQUIRE((*stream)->release().ok());
  CHECK((*stream)->release().code() == GPUSHARE_INVALID_STATE);
  CHECK(runtime->close().ok());
}

TEST_CASE("side streams live and end") {
  auto runtime = open_runtime(options_of(kSetups[0]));
  auto stream = runtime->create_stream(-100);
  REQUIRE(stream.ok());
  CHECK_FALSE((*stream)->is_lane());
  REQUIRE((*stream)->native().ok());
  const auto again = runtime->adopt_stream(*(*stream)->native());  // no second one
  REQUIRE(again.ok());
  CHECK(*again == *stream);
  auto kept = runtime->create_stream(0);
  auto session = open_session(*runtime, need("s", 0, kMiB));
  std::shared_ptr<executor::Stream> lane;
  {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    lane = *(*iteration)->stream();
    CHECK(lane->is_lane());
    CHECK(*runtime->adopt_stream(*lane->native()) == lane);
    CHECK(lane->release().code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(lane->launch_host(nullptr, nullptr).code() == GPUSHARE_INVALID_ARGUMENT);
    REQUIRE((*iteration)->end().ok());
  }
  REQUIRE((*stream)->release().ok());
  CHECK(runtime->close().ok());
  CHECK((*kept)->synchronize().code() == GPUSHARE_INVALID_STATE);
  CHECK((*kept)->release().code() == GPUSHARE_INVALID_STATE);
  CHECK(lane->synchronize().code() == GPUSHARE_INVALID_STATE);
  CHECK(lane->native().status().code() == GPUSHARE_INVALID_STATE);
  CHECK(runtime->adopt_stream(nullptr).status().code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("dropping the last pointer closes; sessions kept longer say so") {
  auto runtime = open_runtime(options_of(kSetups[2]));
  auto session = open_session(*runtime, need("s", kMiB, kMiB));
  runtime.reset();
  CHECK(session->begin(0).status().code() == GPUSHARE_INVALID_STATE);
  CHECK(session->close().code() == GPUSHARE_INVALID_STATE);
  CHECK(session->cancel().code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("dropping the last pointer closes though this thread has an iteration open") {
  const Setup setup = GENERATE(from_range(std::begin(kSetups), std::end(kSetups)));
  auto runtime = open_runtime(options_of(setup));
  auto session = open_session(*runtime, need("s", kMiB, kMiB)),
       other = open_session(*runtime, need("other", kMiB, kMiB));
  auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(iteration.ok());
  auto other_iteration = other->begin(GPUSHARE_NO_TIMEOUT);
  REQUIRE(other_iteration.ok());
  auto token = std::make_shared<int>(0);
  const std::weak_ptr<int> work_alive = token;
  auto work = work_of(
      [token = std::move(token)](const std::shared_ptr<executor::Iteration>&) { return base::Status(); });
  auto ticket = session->submit(work);
  REQUIRE(ticket.ok());
  runtime.reset();
  CHECK(work_alive.expired());
  CHECK((*iteration)->end().code() == GPUSHARE_INVALID_STATE);
  CHECK((*other_iteration)->end().code() == GPUSHARE_INVALID_STATE);
  CHECK((*ticket)->wait(0).code() != GPUSHARE_TIMED_OUT);
  CHECK(session->close().code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("lanes run in parallel on the device: virtual time shows it") {
  executor::RuntimeOptions options =
      options_of({"sim?total_bytes=268435456&contention=none", memory::Layout::kVirtual});
  auto runtime = open_runtime(std::move(options));
  auto a = open_session(*runtime, need("a", 0, 32 * kMiB));
  auto b = open_session(*runtime, need("b", 0, 32 * kMiB));
  CHECK(runtime->info()->lanes == 2);
  const uint64_t start = runtime->info()->now_ns;
  for (const auto& session : {a, b}) {
    auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    REQUIRE(enqueue(**(*iteration)->stream(), 1'000'000).ok());
    REQUIRE((*iteration)->end().ok());
  }
  REQUIRE(runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  CHECK(runtime->info()->now_ns - start == 1'000'000);
  CHECK(runtime->info()->device_busy_ns == 2'000'000);
  CHECK(a->info().service_ns == 1'000'000);
}

TEST_CASE("depth: begin waits for the device only when so many are in flight") {
  const uint32_t depth = GENERATE(1u, 2u, 5u);
  executor::RuntimeOptions options = options_of(kSetups[2]);
  options.enqueue_depth = depth;
  auto runtime = open_runtime(std::move(options));
  auto session = open_session(*runtime, need("a", 0, kMiB));
  const uint64_t start = runtime->info()->now_ns;
  for (uint32_t i = 0; i < depth; ++i) {
    auto iteration = session->begin(0);
    REQUIRE(iteration.ok());
    REQUIRE(enqueue(**(*iteration)->stream(), 1'000'000).ok());
    REQUIRE((*iteration)->end().ok());
  }
  auto iteration =
      session->begin(GPUSHARE_NO_TIMEOUT);  // moves the clock to the end of the first, no further
  REQUIRE(iteration.ok());
  CHECK(runtime->info()->now_ns - start == 1'000'000);
  REQUIRE((*iteration)->end().ok());
}

}  // namespace
