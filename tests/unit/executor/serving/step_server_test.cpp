// The step server on real threads: requests that never join a step, and what a step says of the one after it.
// SPDX-License-Identifier: Apache-2.0
#include "executor/serving/step_server.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "base/clock.hpp"
#include "support/catch.hpp"
#include "support/executor_fixture.hpp"
#include "support/sanitizers.hpp"
#include "support/stopped_child.hpp"

using namespace gpushare;
using executor::StepServer;
using sched::slo::StepEvent;
using sched::slo::StepRequest;

namespace {

constexpr uint64_t kSecond = 1'000'000'000;

// A step queue of which nothing else is in the way: `function` runs its steps.
struct Stepping {
  explicit Stepping(const char* policy, const sched::slo::StepOptions& options,
                    executor::StepFunction function = {})
      : runtime(test::open_runtime(test::options_of(test::kSetups[0]))),
        session(test::open_session(*runtime, test::need("steps", test::kMiB, test::kMiB))) {
    auto started = StepServer::start(policy, options, session, std::move(function));
    INFO(started.status().to_string());
    REQUIRE(started.ok());
    server = std::move(*started);
  }
  base::Status submit(uint64_t id, uint64_t slack_ns, double cost, StepServer::Answer answer = {}) {
    StepRequest request;
    request.id = id;
    request.start_bytes = 10;
    request.cost = cost;
    request.first_deadline_ns = now_ns + slack_ns;
    return server->submit(request, std::move(answer), nullptr);
  }
  const uint64_t now_ns = base::host_now_ns();
  std::shared_ptr<executor::Runtime> runtime;
  std::shared_ptr<executor::Session> session;
  std::unique_ptr<StepServer> server;
};

// Runs a step and says that all its members are done; the first one waits until it may.
struct OneAtATime {
  base::Status operator()(executor::RunningStep& step) {
    std::fill(step.done.begin(), step.done.end(), uint8_t{1});
    if (steps++ > 0) return {};
    next = step.next;
    expected_ns = step.expected_ns;
    runs = true;
    while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return {};
  }
  void await() const {
    while (!runs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::shared_ptr<const executor::WaitingWork> next;  // the step after the first, as the first sees it
  uint64_t expected_ns = 0;                           // of the first
  std::atomic<bool> runs{false}, go_on{false};
  int steps = 0;
};

}  // namespace

TEST_CASE(
    "very many requests of a step queue that expire together are dropped in pieces, between which others are "
    "served") {
  for (const char* policy : {"gpushare", "fifo"}) {
    INFO(policy);
    constexpr size_t kMany = 20'000;
    sched::slo::StepOptions options;
    options.memory_bytes = 100;
    auto server = StepServer::start(policy, options, nullptr, {});
    INFO(server.status().to_string());
    REQUIRE(server.ok());
    REQUIRE((*server)->set_memory(1).ok());  // nobody joins, so no step runs
    std::atomic<size_t> answered{0};
    std::atomic<uint64_t> expired_at_first{0};
    const uint64_t deadline_ns = base::host_now_ns() + 1'000'000'000;
    size_t accepted = 0;
    for (size_t id = 1; id <= kMany; ++id) {
      StepRequest each;
      each.id = id;
      each.start_bytes = 10;
      each.first_deadline_ns = deadline_ns;
      const auto answer = [&](const StepEvent& event) {
        if (event.ended && answered++ == 0) expired_at_first = (*server)->stats().expired;
      };
      accepted += (*server)->submit(each, answer, nullptr).ok() ? 1 : 0;
    }
    while (answered < accepted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // Each of the two threads has dropped one piece at most before the first answer is told.
    if (accepted == kMany) CHECK(expired_at_first <= 2048);
    CHECK((*server)->stats().expired == accepted);
    CHECK((*server)->stop().ok());
  }
}

TEST_CASE("a step queue that closes cancels what waits in pieces, and answers between them") {
  for (const char* policy : {"gpushare", "fifo"}) {
    INFO(policy);
    constexpr size_t kMany = 20'000;
    sched::slo::StepOptions options;
    options.memory_bytes = 100;
    Stepping queue(policy, options);
    REQUIRE(queue.server->set_memory(1).ok());  // nobody joins, so no step runs
    std::atomic<size_t> answered{0};
    std::atomic<uint64_t> cancelled_at_first{0};
    const auto answer = [&](const StepEvent& event) {
      if (event.status == GPUSHARE_CANCELLED && answered++ == 0)
        cancelled_at_first = queue.server->stats().cancelled;
    };
    for (size_t id = 1; id <= kMany; ++id) REQUIRE(queue.submit(id, 3600 * kSecond, 1, answer).ok());
    REQUIRE(queue.server->stop().ok());
    CHECK(cancelled_at_first == 1024);
    CHECK(answered == kMany);
    CHECK(queue.server->stats().cancelled == kMany);
    CHECK(queue.server->stats().held == 0);
  }
}

TEST_CASE("what waits for the steps of a session that ends is answered in pieces") {
  constexpr size_t kMany = 20'000;
  OneAtATime first;
  sched::slo::StepOptions options;
  options.max_members = 1;
  Stepping queue("fifo", options, [&](const auto&, executor::RunningStep& step) { return first(step); });
  std::atomic<size_t> answered{0};
  std::atomic<uint64_t> failed_at_first{0};
  const auto answer = [&](const StepEvent& event) {
    if (event.status != GPUSHARE_OK && answered++ == 0) failed_at_first = queue.server->stats().failed;
  };
  REQUIRE(queue.submit(1, 3600 * kSecond, 1).ok());
  first.await();
  for (size_t id = 2; id <= kMany + 1; ++id) REQUIRE(queue.submit(id, 3600 * kSecond, 1, answer).ok());
  REQUIRE(queue.session->cancel().ok());
  first.go_on = true;
  REQUIRE(queue.server->drain().ok());
  CHECK(failed_at_first <= 1024 + 1);  // and the member of the step that ran
  CHECK(answered == kMany);
  CHECK(queue.submit(1, 3600 * kSecond, 1).code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("a step queue says what the step after the running one is worth, and by when it has to begin") {
  OneAtATime first;
  sched::slo::StepOptions options;
  options.max_members = 1;
  Stepping queue("fifo", options, [&](const auto&, executor::RunningStep& step) { return first(step); });
  REQUIRE(queue.submit(1, 1000 * kSecond, 1).ok());
  first.await();
  CHECK(first.next->worth().cost == 0);  // its last token comes in this step, and the step has said so
  REQUIRE(queue.submit(5, 4000 * kSecond, 1).ok());
  CHECK(first.next->worth().cost == 1);
  REQUIRE(queue.server->cancel(5));
  CHECK(first.next->worth().cost == 0);
  REQUIRE(queue.submit(2, 3000 * kSecond, 2).ok());
  CHECK(first.next->worth().cost == 2);
  CHECK(first.next->worth().until_ns == queue.now_ns + 3000 * kSecond - first.expected_ns);
  REQUIRE(queue.submit(3, 4000 * kSecond, 5).ok());  // there is no place for both
  CHECK(first.next->worth().cost == 2);
  CHECK(first.next->worth().until_ns == queue.now_ns + 3000 * kSecond - first.expected_ns);
  REQUIRE(queue.submit(4, 2000 * kSecond, 5).ok());
  CHECK(first.next->worth().cost == 5);  // it goes before them
  CHECK(first.next->worth().until_ns == queue.now_ns + 2000 * kSecond - first.expected_ns);
  first.go_on = true;
  REQUIRE(queue.server->drain().ok());
  REQUIRE(queue.server->stop().ok());
  CHECK(first.next->worth().cost == 0);
}

TEST_CASE("the time for which the process is stopped is no step's") {
  if (test::kThreadSanitizer) return;  // threads after fork
  const int status = test::run_stopped([](const test::StandsStill& process) {
    std::atomic<StepServer*> server{nullptr};
    std::atomic<int> steps{0};
    Stepping queue("gpushare", {}, [&](const auto&, executor::RunningStep& step) -> base::Status {
      std::fill(step.done.begin(), step.done.end(), uint8_t{1});
      if (++steps < 4) return {};
      // The answers before are told: the thread that told them sleeps.
      while (server.load()->stats().held > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      process.stand_still();
      return {};
    });
    server = queue.server.get();
    const auto known = [&] {
      const StepServer::Stats stats = queue.server->stats();
      return std::array<double, 4>{stats.step_ns, stats.decode_ns, stats.prefill_ns, stats.read_ns};
    };
    std::array<double, 4> before{};
    for (uint64_t id = 1; id <= 4; ++id) {
      before = known();
      if (!queue.submit(id, 3600 * kSecond, 1).ok()) return 1;
      while (queue.server->stats().held > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (steps != 4) return 2;
    if (known() != before) return 3;
    return queue.server->stop().ok() ? 0 : 4;
  });
  CHECK(status == 0);
}
