// The request server on real threads: nothing lost, nothing answered twice, back-pressure, cancels, failures,
// stop at any time.
// SPDX-License-Identifier: Apache-2.0
#include "executor/serving/request_server.hpp"

#include <atomic>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using executor::RequestOutcome;
using executor::RequestServer;
using executor::RequestServerOptions;
using sched::slo::Batch;
using sched::slo::Request;

namespace {

Request request(uint64_t id, uint64_t slack_ns, uint32_t application = 0) {
  Request r;
  r.id = id;
  r.application = application;
  r.arrival_ns = base::host_now_ns();
  r.deadline_ns = r.arrival_ns + slack_ns;
  r.execution_ns = 1000;
  return r;
}

constexpr uint64_t kSecond = 1'000'000'000;

struct Answers {
  explicit Answers(size_t n) : of(n) {}
  std::vector<std::atomic<int>> of;
  std::atomic<size_t> ran{0}, dropped{0}, failed{0}, cancelled{0};
  void operator()(const RequestOutcome& outcome) {
    ++of[outcome.id];
    if (outcome.status == GPUSHARE_OK)
      ++ran;
    else if (outcome.status == GPUSHARE_CALLBACK_FAILED)
      ++failed;
    else if (outcome.status == GPUSHARE_CANCELLED)
      ++cancelled;
    else
      ++dropped;
  }
};

}  // namespace

TEST_CASE("four producers under every policy: each request is answered exactly once") {
  for (const char* policy : sched::slo::batcher_names()) {
    INFO(policy);
    constexpr size_t kProducers = 4, kEach = 1500;
    auto answers = std::make_unique<Answers>(kProducers * kEach);
    RequestServerOptions options;
    options.policy = policy;
    options.model.c0_ns = 5e3;
    options.model.c1 = 0.1;
    options.batcher.max_pending = 500;
    options.batcher.clockwork_slack_ms = 0.1;
    options.batcher.max_delay_ms = 0.1;
    std::atomic<uint64_t> work{0};
    auto server = RequestServer::start(
        options,
        [&](const Batch& batch) {
          for (uint64_t i = 0; i < 2000 * batch.requests.size(); ++i)
            work.fetch_add(i, std::memory_order_relaxed);
          return base::ok_status();
        },
        [&](const RequestOutcome& outcome) { (*answers)(outcome); });
    REQUIRE(server.ok());
    for (uint32_t application = 0; application < 3; ++application)
      for (int i = 0; i < 32; ++i) (*server)->observe(0, application, 20'000);
    std::atomic<size_t> refused{0};
    std::vector<std::thread> producers;
    for (size_t p = 0; p < kProducers; ++p)
      producers.emplace_back([&, p] {
        test::Random random(test::seed() + p);
        for (size_t i = 0; i < kEach; ++i) {
          const uint64_t id = p * kEach + i;
          const base::Status status =
              (*server)->submit(request(id, test::uniform(random, 0, kSecond / 20),
                                        static_cast<uint32_t>(test::uniform(random, 0, 2))));
          if (!status.ok()) {
            ++refused;
            ++answers->of[id];
          } else if (test::uniform(random, 0, 19) == 0) {
            (*server)->cancel(id);
          }
          if (i % 64 == 0) std::this_thread::yield();
        }
      });
    for (std::thread& producer : producers) producer.join();
    (*server)->drain();
    CHECK((*server)->pending() == 0);
    CHECK((*server)->submit(request(1, kSecond)).code() == GPUSHARE_INVALID_STATE);
    (*server)->stop();
    size_t wrong = 0;
    for (const auto& count : answers->of) wrong += count != 1 ? 1 : 0;
    CHECK(wrong == 0);
    CHECK(answers->ran + answers->dropped + answers->cancelled + refused == kProducers * kEach);
  }
}

TEST_CASE("a failing or throwing batch fails its own requests alone") {
  Answers answers(3);
  RequestServerOptions options;
  options.model.batch_sizes = {1};
  std::atomic<int> runs{0};
  auto server = RequestServer::start(
      options,
      [&](const Batch&) -> base::Status {
        const int run = ++runs;
        if (run == 1) return base::Status(GPUSHARE_INTERNAL, "no");
        if (run == 2) throw std::runtime_error("no");
        return base::ok_status();
      },
      [&](const RequestOutcome& outcome) { answers(outcome); });
  REQUIRE(server.ok());
  for (uint64_t id = 0; id < 3; ++id) CHECK((*server)->submit(request(id, 1000 * kSecond)).ok());
  (*server)->drain();
  CHECK(answers.failed == 2);
  CHECK(answers.ran == 1);
}

TEST_CASE("back-pressure, duplicates, expired deadlines and stop with work waiting") {
  Answers answers(100);
  RequestServerOptions options;
  options.batcher.max_pending = 10;
  options.model.batch_sizes = {1};
  std::atomic<bool> release{false}, running{false};
  auto server = RequestServer::start(
      options,
      [&](const Batch&) {
        running = true;
        while (!release) std::this_thread::yield();
        return base::ok_status();
      },
      [&](const RequestOutcome& outcome) { answers(outcome); });
  REQUIRE(server.ok());
  CHECK((*server)->submit(request(0, 1000 * kSecond)).ok());
  while (!running) std::this_thread::yield();
  for (uint64_t id = 1; id <= 10; ++id) CHECK((*server)->submit(request(id, 1000 * kSecond)).ok());
  CHECK((*server)->submit(request(11, 1000 * kSecond)).code() == GPUSHARE_QUEUE_FULL);
  CHECK((*server)->cancel(5));
  CHECK((*server)->submit(request(6, 1000 * kSecond)).code() == GPUSHARE_ALREADY_EXISTS);
  CHECK((*server)->submit(request(12, 0)).code() == GPUSHARE_TIMED_OUT);
  CHECK_FALSE((*server)->cancel(0));  // runs
  CHECK_FALSE((*server)->cancel(99));
  std::thread releaser([&] {
    std::this_thread::yield();
    release = true;
  });
  (*server)->stop();
  releaser.join();
  CHECK(answers.ran + answers.cancelled == 11);
  CHECK(answers.cancelled >= 1);
  (*server)->stop();
  RequestServerOptions wrong;
  wrong.policy = "none";
  CHECK(RequestServer::start(wrong, {}, {}).status().code() == GPUSHARE_NOT_FOUND);
  wrong.policy = "gpushare";
  wrong.model.batch_sizes.clear();
  CHECK(RequestServer::start(wrong, {}, {}).status().code() == GPUSHARE_INVALID_ARGUMENT);
}
