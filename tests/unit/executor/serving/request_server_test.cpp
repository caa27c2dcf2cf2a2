// The request server on real threads: nothing lost, nothing answered twice, back-pressure, cancels, failures,
// stop at any time.
// SPDX-License-Identifier: Apache-2.0
#include "executor/serving/request_server.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "executor/runtime.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "support/stopped_child.hpp"

using namespace gpushare;
using executor::BatchReport;
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
    sched::slo::ModelSpec model;
    model.c0_ns = 5e3;
    model.c1 = 0.1;
    options.batcher.max_pending = 500;
    options.batcher.clockwork_slack_ms = 0.1;
    options.batcher.max_delay_ms = 0.1;
    std::atomic<uint64_t> work{0};
    auto server = RequestServer::start(options);
    REQUIRE(server.ok());
    CHECK((*server)->policy() == policy);
    CHECK(*(*server)->add_model(model, [&](const Batch& batch, BatchReport&) {
      for (uint64_t i = 0; i < 2000 * batch.requests.size(); ++i)
        work.fetch_add(i, std::memory_order_relaxed);
      return base::ok_status();
    }) == 0);
    const auto answer = [&](const RequestOutcome& outcome) { (*answers)(outcome); };
    for (uint32_t application = 0; application < 3; ++application)
      for (int i = 0; i < 32; ++i) {
        Request known;
        known.application = application;
        REQUIRE((*server)->observe(known, 20'000).ok());
      }
    std::atomic<size_t> refused{0};
    std::vector<std::thread> producers;
    for (size_t p = 0; p < kProducers; ++p)
      producers.emplace_back([&, p] {
        test::Random random(test::seed() + p);
        for (size_t i = 0; i < kEach; ++i) {
          const uint64_t id = p * kEach + i;
          const base::Status status =
              (*server)->submit(request(id, test::uniform(random, 0, kSecond / 20),
                                        static_cast<uint32_t>(test::uniform(random, 0, 2))),
                                answer);
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
    CHECK((*server)->drain().ok());
    const executor::RequestServerStats stats = (*server)->stats();
    CHECK(stats.pending == 0);
    CHECK(stats.held == 0);
    CHECK(stats.accepted + refused == kProducers * kEach);
    CHECK(stats.refused_full + stats.refused_hopeless == refused);
    CHECK(stats.in_time + stats.late == answers->ran);
    CHECK(stats.batched_requests == answers->ran);
    CHECK(stats.most_held <= 2 * options.batcher.max_pending + 4096);
    CHECK((*server)->submit(request(1, kSecond), answer).code() == GPUSHARE_INVALID_STATE);
    CHECK((*server)->add_model({}, {}).status().code() == GPUSHARE_INVALID_STATE);
    CHECK((*server)->stop().ok());
    size_t wrong = 0;
    for (const auto& count : answers->of) wrong += count != 1 ? 1 : 0;
    CHECK(wrong == 0);
    CHECK(answers->ran + answers->dropped + answers->cancelled + refused == kProducers * kEach);
  }
}

TEST_CASE("a failing or throwing batch fails its own requests alone") {
  Answers answers(3);
  const auto answer = [&](const RequestOutcome& outcome) { answers(outcome); };
  auto server = RequestServer::start({});
  REQUIRE(server.ok());
  std::atomic<int> runs{0};
  sched::slo::ModelSpec model;
  model.batch_sizes = {1};
  REQUIRE((*server)
              ->add_model(model,
                          [&](const Batch&, BatchReport&) -> base::Status {
                            const int run = ++runs;
                            if (run == 1) return base::Status(GPUSHARE_CALLBACK_FAILED, "no");
                            if (run == 2) throw std::runtime_error("no");
                            return base::ok_status();
                          })
              .ok());
  for (uint64_t id = 0; id < 3; ++id) CHECK((*server)->submit(request(id, 1000 * kSecond), answer).ok());
  CHECK((*server)->drain().ok());
  CHECK(answers.failed == 2);
  CHECK(answers.ran == 1);
  CHECK((*server)->stats().failed == 2);
}

TEST_CASE("a model that ended refuses further requests, another one goes on") {
  Answers answers(4);
  const auto answer = [&](const RequestOutcome& outcome) { answers(outcome); };
  auto server = RequestServer::start({});
  REQUIRE(server.ok());
  sched::slo::ModelSpec model;
  model.batch_sizes = {1};
  REQUIRE((*server)
              ->add_model(model,
                          [&](const Batch&, BatchReport& report) {
                            report.model_ended = true;
                            return base::Status(GPUSHARE_CALLBACK_FAILED, "the session was closed");
                          })
              .ok());
  REQUIRE((*server)->add_model(model, [&](const Batch&, BatchReport&) { return base::ok_status(); }).ok());
  CHECK((*server)->submit(request(0, 1000 * kSecond), answer).ok());
  while (answers.failed == 0) std::this_thread::yield();
  const base::Status refused = (*server)->submit(request(1, 1000 * kSecond), answer);
  CHECK(refused.code() == GPUSHARE_INVALID_STATE);
  CHECK(refused.message().find("the session was closed") != std::string::npos);
  Request other = request(2, 1000 * kSecond);
  other.model = 1;
  CHECK((*server)->submit(other, answer).ok());
  other.model = 2;
  other.id = 3;
  CHECK((*server)->submit(other, answer).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK((*server)->drain().ok());
  CHECK(answers.ran == 1);
}

TEST_CASE("what answers and batches may not do is refused, and their exceptions stay where they are") {
  auto server = RequestServer::start({});
  REQUIRE(server.ok());
  std::atomic<int> in_batch{0}, in_answer{0};
  std::atomic<bool> submitted{false};
  REQUIRE((*server)
              ->add_model({},
                          [&](const Batch&, BatchReport&) {
                            in_batch = (*server)->stop().code();
                            return base::ok_status();
                          })
              .ok());
  CHECK((*server)
            ->submit(request(0, 1000 * kSecond),
                     [&](const RequestOutcome&) {
                       in_answer = (*server)->drain().code();
                       // From an answer more may be submitted.
                       submitted = (*server)->submit(request(1, 1000 * kSecond), {}).ok();
                       throw std::runtime_error("thrown by an answer");
                     })
            .ok());
  while (!submitted) std::this_thread::yield();
  CHECK((*server)->drain().ok());
  CHECK(in_batch == GPUSHARE_INVALID_STATE);
  CHECK(in_answer == GPUSHARE_INVALID_STATE);
  CHECK((*server)->stats().in_time == 2);
}

TEST_CASE("back-pressure, duplicates, expired deadlines and stop with work waiting") {
  Answers answers(100);
  const auto answer = [&](const RequestOutcome& outcome) { answers(outcome); };
  RequestServerOptions options;
  options.batcher.max_pending = 10;
  std::atomic<bool> release{false}, running{false};
  auto server = RequestServer::start(options);
  REQUIRE(server.ok());
  sched::slo::ModelSpec model;
  model.batch_sizes = {1};
  REQUIRE((*server)
              ->add_model(model,
                          [&](const Batch&, BatchReport&) {
                            running = true;
                            while (!release) std::this_thread::yield();
                            return base::ok_status();
                          })
              .ok());
  CHECK((*server)->submit(request(0, 1000 * kSecond), answer).ok());
  while (!running) std::this_thread::yield();
  for (uint64_t id = 1; id <= 10; ++id) CHECK((*server)->submit(request(id, 1000 * kSecond), answer).ok());
  CHECK((*server)->submit(request(11, 1000 * kSecond), answer).code() == GPUSHARE_QUEUE_FULL);
  CHECK((*server)->stats().refused_full == 1);
  CHECK((*server)->cancel(5));
  CHECK((*server)->submit(request(6, 1000 * kSecond), answer).code() == GPUSHARE_ALREADY_EXISTS);
  CHECK((*server)->submit(request(12, 0), answer).code() == GPUSHARE_TIMED_OUT);
  CHECK_FALSE((*server)->cancel(0));  // runs
  CHECK_FALSE((*server)->cancel(99));
  CHECK((*server)->drain(1).code() == GPUSHARE_TIMED_OUT);
  std::thread releaser([&] {
    std::this_thread::yield();
    release = true;
  });
  CHECK((*server)->stop().ok());
  releaser.join();
  CHECK(answers.ran + answers.cancelled == 11);
  CHECK(answers.cancelled >= 1);
  CHECK((*server)->stop().ok());
  RequestServerOptions wrong;
  wrong.policy = "none";
  CHECK(RequestServer::start(wrong).status().code() == GPUSHARE_NOT_FOUND);
  auto empty = RequestServer::start({});
  REQUIRE(empty.ok());
  model.batch_sizes.clear();
  CHECK((*empty)->add_model(model, {}).status().code() == GPUSHARE_INVALID_ARGUMENT);
}

TEST_CASE("requests that expire while a batch function runs on are answered meanwhile") {
  for (const char* policy : sched::slo::batcher_names()) {
    INFO(policy);
    RequestServerOptions options;
    options.policy = policy;
    options.batcher.max_delay_ms = 0.1;
    auto server = RequestServer::start(options);
    REQUIRE(server.ok());
    std::atomic<bool> runs{false}, may_end{false};
    sched::slo::ModelSpec model;
    model.c0_ns = 1e3;
    model.c1 = 0.1;
    REQUIRE((*server)
                ->add_model(model,
                            [&](const Batch&, BatchReport&) {
                              runs = true;
                              while (!may_end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                              return base::ok_status();
                            })
                .ok());
    constexpr uint64_t kLong = 1'000'000;
    std::atomic<size_t> expired{0}, others{0}, long_ones{0};
    const auto answer = [&](const RequestOutcome& outcome) {
      if (outcome.id >= kLong)
        ++long_ones;
      else if (outcome.status == GPUSHARE_TIMED_OUT && outcome.dropped && outcome.batch_size == 0 &&
               (outcome.finished_ns > outcome.deadline_ns ||
                outcome.dropped == sched::slo::DropReason::kRejected))
        ++expired;  // or its batch should have begun by now
      else
        ++others;
    };
    // Until one is in a batch: the first ones may be refused or dropped on a busy machine.
    size_t first = kLong;
    for (; !runs; ++first) {
      (void)(*server)->submit(request(first, 1000 * kSecond), answer);
      for (int i = 0; i < 1000 && !runs; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    size_t accepted = 0;
    for (uint64_t id = 0; id < 8; ++id)
      if ((*server)->submit(request(id, kSecond / 20), answer).ok()) ++accepted;
    const size_t before = long_ones;
    size_t later = (*server)->submit(request(2 * kLong, 10000 * kSecond), answer).ok() ? 1 : 0;
    while (expired + others < accepted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(others == 0);
    CHECK(long_ones == before);
    CHECK((*server)->drain(0).code() == GPUSHARE_TIMED_OUT);
    may_end = true;
    REQUIRE((*server)->drain().ok());
    CHECK(long_ones >= before + later);
    uint64_t dropped = 0;
    for (const uint64_t count : (*server)->stats().dropped) dropped += count;
    CHECK(dropped >= accepted);
  }
}

TEST_CASE("very many requests that expire together are dropped in pieces, between which others are served") {
  for (const char* policy : {"gpushare", "fifo", "orloj"}) {
    INFO(policy);
    constexpr size_t kMany = 20'000;
    RequestServerOptions options;
    options.policy = policy;
    auto server = RequestServer::start(options);
    REQUIRE(server.ok());
    std::atomic<bool> go_on{false};
    std::atomic<size_t> answered{0};
    std::atomic<uint64_t> dropped_at_first{0};
    bool first = true;  // used by the thread that answers alone
    REQUIRE((*server)
                ->add_model({},
                            [&](const Batch&, BatchReport&) -> base::Status {
                              while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                              return {};
                            })
                .ok());
    REQUIRE((*server)->submit(request(kMany, 3600 * kSecond), {}).ok());
    while ((*server)->stats().pending != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const uint64_t deadline_ns = base::host_now_ns() + kSecond;
    size_t accepted = 0;
    for (size_t id = 0; id < kMany; ++id) {
      Request each = request(id, 0);
      each.deadline_ns = deadline_ns;
      accepted += (*server)
                          ->submit(each,
                                   [&](const RequestOutcome& outcome) {
                                     if (outcome.dropped == sched::slo::DropReason::kExpired &&
                                         std::exchange(first, false))
                                       dropped_at_first =
                                           (*server)->stats().dropped[static_cast<size_t>(*outcome.dropped)];
                                     ++answered;
                                   })
                          .ok()
                      ? 1
                      : 0;
    }
    while (answered < accepted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // The first answer is told when the first piece is done, and before the lock is taken again.
    if (accepted == kMany) CHECK(dropped_at_first <= 2048);
    go_on = true;
    CHECK((*server)->stop().ok());
  }
}

TEST_CASE("cancelled requests whose answers nobody takes do not pile up") {
  RequestServerOptions options;
  options.batcher.max_pending = 50;
  auto server = RequestServer::start(options);
  REQUIRE(server.ok());
  std::atomic<bool> release{false};
  std::atomic<uint64_t> answered{0};
  REQUIRE((*server)->add_model({}, [](const Batch&, BatchReport&) { return base::ok_status(); }).ok());
  const auto slow = [&](const RequestOutcome&) {
    while (!release) std::this_thread::yield();
    ++answered;
  };
  uint64_t accepted = 0, id = 0;
  base::Status status;
  for (; id < 100'000 && status.code() != GPUSHARE_QUEUE_FULL; ++id) {
    status = (*server)->submit(request(id, 1000 * kSecond), slow);
    if (!status.ok()) continue;
    ++accepted;
    (*server)->cancel(id);
  }
  CHECK(status.code() == GPUSHARE_QUEUE_FULL);
  CHECK(accepted <= 2 * 50 + 4096);
  release = true;
  CHECK((*server)->drain().ok());
  CHECK(answered == accepted);
}

// Taking an answer moves no other: with 200,000 held, moving the rest each time would copy some 30 GB.
TEST_CASE("a server that holds very many requests closes, and answers each of them once") {
  constexpr size_t kHeld = 200'000;
  Answers answers(kHeld);
  RequestServerOptions options;
  options.batcher.max_pending = kHeld;
  auto server = RequestServer::start(options);
  REQUIRE(server.ok());
  REQUIRE((*server)
              ->add_model({},
                          [&](const Batch&, BatchReport&) {
                            while (answers.cancelled == 0) std::this_thread::yield();
                            return base::ok_status();
                          })
              .ok());
  size_t accepted = 0;
  for (uint64_t id = 0; id < kHeld; ++id)
    accepted += (*server)
                        ->submit(request(id, 1000 * kSecond),
                                 [&](const RequestOutcome& outcome) { answers(outcome); })
                        .ok()
                    ? 1
                    : 0;
  REQUIRE(accepted == kHeld);
  CHECK((*server)->stop().ok());
  CHECK(answers.ran + answers.cancelled == kHeld);
  CHECK(answers.ran <= 16);  // the batch that ran when it was to close
  CHECK(std::all_of(answers.of.begin(), answers.of.end(), [](const auto& count) { return count == 1; }));
}

TEST_CASE("a server that closes cancels what waits in pieces, and answers between them") {
  for (const char* policy : {"gpushare", "fifo", "orloj"}) {
    INFO(policy);
    constexpr size_t kMany = 20'000;
    RequestServerOptions options;
    options.policy = policy;
    auto server = RequestServer::start(options);
    REQUIRE(server.ok());
    std::atomic<bool> go_on{false};
    std::atomic<size_t> answered{0};
    std::atomic<uint64_t> cancelled_at_first{0};
    REQUIRE((*server)
                ->add_model({},
                            [&](const Batch&, BatchReport&) -> base::Status {
                              while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                              return {};
                            })
                .ok());
    REQUIRE((*server)->submit(request(kMany, 3600 * kSecond), {}).ok());
    while ((*server)->stats().pending != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto answer = [&](const RequestOutcome& outcome) {
      if (outcome.status != GPUSHARE_CANCELLED || answered++ > 0) return;
      cancelled_at_first = (*server)->stats().dropped[static_cast<size_t>(*outcome.dropped)];
      go_on = true;
    };
    for (size_t id = 0; id < kMany; ++id)
      REQUIRE((*server)->submit(request(id, 3600 * kSecond), answer).ok());
    REQUIRE((*server)->stop().ok());
    // The first answer is told when the first piece is done, and before the lock is taken again.
    CHECK(cancelled_at_first == 1024);
    CHECK(answered == kMany);
    CHECK((*server)->stats().in_time == 1);  // no batch began meanwhile
  }
}

TEST_CASE("a batch finds what waits for the next one when it begins, and also when more comes") {
  RequestServerOptions options;
  options.policy = "edf";
  auto server = RequestServer::start(options);
  REQUIRE(server.ok());
  std::array<std::atomic<bool>, 2> runs{}, go_on{};
  std::shared_ptr<const executor::WaitingWork> waiting;
  std::atomic<size_t> batches{0};
  sched::slo::ModelSpec model;
  model.batch_sizes = {1};
  REQUIRE((*server)
              ->add_model(model,
                          [&](const Batch&, BatchReport& report) -> base::Status {
                            const size_t number = batches++;
                            if (number >= runs.size()) return {};
                            waiting = report.waiting;
                            runs[number] = true;
                            while (!go_on[number]) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                            return {};
                          })
              .ok());
  const auto await = [](const std::atomic<bool>& flag) {
    while (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  REQUIRE((*server)->submit(request(0, 10000 * kSecond), {}).ok());
  await(runs[0]);
  // The thread that decides takes an answer all the while.
  std::atomic<bool> takes{false}, taken{false};
  const auto slow = [&](const RequestOutcome&) {
    takes = true;
    await(taken);
  };
  REQUIRE((*server)->submit(request(1, 10000 * kSecond), slow).ok());
  REQUIRE((*server)->cancel(1));
  await(takes);
  Request one = request(2, 1000 * kSecond), two = request(3, 2000 * kSecond);
  one.cost = two.cost = 4;
  for (const Request& each : {one, two, request(4, 3000 * kSecond)})
    REQUIRE((*server)->submit(each, {}).ok());
  CHECK(waiting->worth().cost == 4);
  CHECK(waiting->worth().until_ns <= one.deadline_ns);
  go_on[0] = true;
  await(runs[1]);
  const uint64_t until_ns = waiting->worth().until_ns;
  CHECK(waiting->worth().cost == 4);
  CHECK(until_ns > one.deadline_ns);
  CHECK(until_ns <= two.deadline_ns);
  REQUIRE((*server)->submit(request(5, 4000 * kSecond), {}).ok());
  CHECK(waiting->worth().until_ns == until_ns);
  Request first = request(6, 500 * kSecond);
  first.cost = 4;
  REQUIRE((*server)->submit(first, {}).ok());
  CHECK(waiting->worth().until_ns < until_ns - 1000 * kSecond);
  CHECK(waiting->worth().cost == 4);
  taken = go_on[1] = true;
  REQUIRE((*server)->drain().ok());
  REQUIRE((*server)->stop().ok());
  CHECK(waiting->worth().cost == 0);
}

TEST_CASE("a server tells its statistics when they have changed, those of refusals too") {
  RequestServerOptions options;
  base::Mutex mutex;
  std::vector<base::RequestCounts> told;
  options.changed = [&](const executor::RequestServerStats& stats) {
    base::MutexLock lock(mutex);
    told.push_back(stats.counts());
  };
  auto server = RequestServer::start(options);
  REQUIRE(server.ok());
  REQUIRE((*server)->add_model({}, [](const Batch&, BatchReport&) { return base::ok_status(); }).ok());
  const auto seen = [&](auto&& condition) {
    while (true) {
      {
        base::MutexLock lock(mutex);
        if (!told.empty() && condition(told.back())) return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  REQUIRE((*server)->submit(request(1, 3600 * kSecond), {}).ok());
  seen([](const base::RequestCounts& counts) { return counts.offered == 1 && counts.in_time == 1; });
  Request hopeless = request(2, 0);
  hopeless.deadline_ns = 1;
  CHECK((*server)->submit(hopeless, {}).code() == GPUSHARE_TIMED_OUT);
  seen([](const base::RequestCounts& counts) { return counts.offered == 2 && counts.refused == 1; });
  REQUIRE((*server)->stop().ok());
}

TEST_CASE("the time for which the process is stopped is no batch's") {
  if (test::kThreadSanitizer) return;  // threads after fork
  const int status = test::run_stopped([](const test::StandsStill& process) {
    auto server = RequestServer::start({});
    if (!server.ok()) return 1;
    std::atomic<int> batches{0};
    const auto run = [&](const Batch&, BatchReport&) {
      if (++batches < 4) return base::ok_status();
      // The answers before are told: the thread that told them sleeps.
      while ((*server)->stats().held > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      process.stand_still();
      return base::ok_status();
    };
    if (!(*server)->add_model({}, run).ok()) return 2;
    uint64_t samples = 0;
    for (uint64_t id = 1; id <= 4; ++id) {
      const auto profile = (*server)->profile(0, 0);
      samples = profile.ok() ? profile->samples : 0;
      if (!(*server)->submit(request(id, 3600 * kSecond), {}).ok()) return 3;
      while ((*server)->stats().held > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (batches != 4) return 4;
    if ((*server)->profile(0, 0)->samples != samples) return 5;
    return (*server)->stop().ok() ? 0 : 6;
  });
  CHECK(status == 0);
}
