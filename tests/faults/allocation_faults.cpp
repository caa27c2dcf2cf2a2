// The host runs out of memory: on the library's own threads, and in calls, at every one of their first allocations in
// turn, once or from then on. Every call returns, every request is answered, nothing ends the process, and closing
// works.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "device/device.hpp"
#include "executor/serving/request_server.hpp"
#include "support/catch.hpp"
#include "support/executor_fixture.hpp"
#include "support/failing_new.hpp"

// Under AddressSanitizer nothing may leak but a node of Abseil's trees, which the batchers keep requests in: splitting
// one halfway loses it, they are not written for that.
// NOLINTBEGIN(bugprone-reserved-identifier): the sanitizer's name
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions();
const char* __lsan_default_suppressions() {
  return "leak:container_internal::btree\n"  // an inlined function is known by its file alone
         "leak:container/internal/btree.h";
}
// NOLINTEND(bugprone-reserved-identifier)

using namespace gpushare;
using executor::BatchReport;
using executor::RequestOutcome;
using executor::RequestServer;
using sched::slo::Batch;
using sched::slo::Request;
using test::FailingNew;
using test::Spared;

namespace {

constexpr size_t kRequests = 24;

struct Run {
  bool failed = false;  // an allocation did
  size_t accepted = 0, no_memory = 0, ran = 0;
};

// Requests through a server whose allocation number `succeed` + 1 fails; with `callers`, also those made in submit.
Run serve(const char* policy, uint64_t succeed, bool for_ever, bool callers) {
  const Spared mine;
  std::array<std::atomic<int>, kRequests + 1> answers{};
  std::atomic<int> no_memory{0}, ran{0}, late{0}, other{0};
  std::array<bool, kRequests> accepted{};
  executor::RequestServerOptions options;
  options.policy = policy;
  options.batcher.max_delay_ms = 0.01;
  auto server = RequestServer::start(options);
  REQUIRE(server.ok());
  sched::slo::ModelSpec model;
  model.c0_ns = 1e3;
  model.c1 = 0.1;
  REQUIRE((*server)
              ->add_model(model,
                          [](const Batch& batch, BatchReport& report) {
                            for (uint64_t& took : report.execution_ns) took = 1000 + batch.id;
                            return base::ok_status();
                          })
              .ok());
  Run run;
  const auto answer = [&](const RequestOutcome& outcome) {
    ++answers[outcome.id];
    ++(outcome.status == GPUSHARE_HOST_OUT_OF_MEMORY ? no_memory
       : outcome.status == GPUSHARE_OK               ? ran
       : outcome.status == GPUSHARE_TIMED_OUT        ? late  // clockwork, when the machine is slow
                                                     : other);
  };
  {
    const FailingNew failing(succeed, for_ever);
    for (uint64_t id = 0; id < kRequests; ++id) {
      Request request;
      request.id = id;
      request.application = static_cast<uint32_t>(id % 3);
      request.deadline_ns = base::host_now_ns() + 10'000'000'000;
      request.execution_ns = 1000;
      try {
        const Spared caller(!callers);
        const base::Status status = (*server)->submit(request, answer);
        accepted[id] = status.ok();
        if (!status.ok() && status.code() != GPUSHARE_HOST_OUT_OF_MEMORY) ++other;
      } catch (const std::bad_alloc&) {
        run.failed = true;
      }
    }
    const base::Status drained = (*server)->drain();
    CHECK(drained.ok());
    CHECK((*server)->stats().held == 0);
    CHECK((*server)->stop().ok());
    run.failed = run.failed || test::failures > 0;
  }
  for (size_t id = 0; id < kRequests; ++id) CHECK(answers[id] == (accepted[id] ? 1 : 0));
  for (const bool one : accepted) run.accepted += one ? 1 : 0;
  run.no_memory = static_cast<size_t>(no_memory);
  run.ran = static_cast<size_t>(ran + late);
  CHECK(run.no_memory + run.ran + static_cast<size_t>(other) == run.accepted);
  CHECK(other == 0);
  if (!run.failed) CHECK(run.ran == kRequests);
  return run;
}

}  // namespace

TEST_CASE("a request queue without memory answers every request and closes") {
  for (const char* policy : sched::slo::batcher_names()) {
    for (const bool for_ever : {false, true}) {
      for (const bool callers : {false, true}) {
        INFO(policy << (for_ever ? ", for ever" : ", once") << (callers ? ", in submit too" : ""));
        uint64_t without = 0, with = 0;
        for (uint64_t n = 0; without < 3 && n < 2000; n += 1 + n / 8) {
          const Run run = serve(policy, n, for_ever, callers);
          without += run.failed ? 0 : 1;
          with += run.failed ? 1 : 0;
        }
        CHECK(with > 0);
      }
    }
  }
}

TEST_CASE("a request queue without memory answers what waits in pieces") {
  const Spared mine;
  constexpr size_t kMany = 5000;
  auto server = RequestServer::start({});
  REQUIRE(server.ok());
  std::atomic<bool> runs{false}, go_on{false};
  std::atomic<size_t> failed{0}, ran{0};
  std::atomic<uint64_t> failed_at_first{0};
  const auto run = [&](const Batch&, BatchReport&) -> base::Status {
    runs = true;
    while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return {};
  };
  REQUIRE((*server)->add_model({}, run).ok());
  const auto answer = [&](const RequestOutcome& outcome) {
    if (outcome.status == GPUSHARE_OK) ++ran;
    if (outcome.status != GPUSHARE_HOST_OUT_OF_MEMORY || failed++ > 0) return;
    failed_at_first = (*server)->stats().failed;
    go_on = true;
  };
  Request request;
  request.deadline_ns = base::host_now_ns() + 3'600'000'000'000;
  REQUIRE((*server)->submit(request, answer).ok());
  while (!runs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (request.id = 1; request.id <= kMany; ++request.id) REQUIRE((*server)->submit(request, answer).ok());
  request.features = {1};  // which the server copies
  RequestServer::Answer last = answer;
  {
    const FailingNew failing(0, false);
    const Spared caller(false);
    CHECK_THROWS_AS((*server)->submit(request, std::move(last)), std::bad_alloc);
  }
  CHECK((*server)->drain().ok());
  // The first answer is told when the first piece is done, and before the lock is taken again.
  CHECK(failed_at_first == 1024);
  CHECK(failed == kMany);
  CHECK(ran == 1);
  CHECK((*server)->stats().failed == kMany);
  CHECK((*server)->stop().ok());
}

TEST_CASE("a host stream without memory fails with a status, and its thread ends as ever") {
  for (const bool for_ever : {false, true}) {
    for (uint64_t n = 0; n < 6; ++n) {
      const Spared mine;
      auto device = device::Device::open("host?total_bytes=16777216");
      REQUIRE(device.ok());
      {
        auto stream = (*device)->create_stream();
        REQUIRE(stream.ok());
        REQUIRE(stream->launch_host([](void*) {}, nullptr).ok());
        REQUIRE(stream->synchronize().ok());
        const FailingNew failing(n, for_ever);
        // Its message is made on the stream's thread.
        REQUIRE(
            stream->launch_host([](void*) { throw std::runtime_error(std::string(64, 'x')); }, nullptr).ok());
        const int32_t code = stream->synchronize().code();
        CHECK((code == GPUSHARE_CALLBACK_FAILED || code == GPUSHARE_HOST_OUT_OF_MEMORY));
        if (n == 0) CHECK(test::failures > 0);
      }
      CHECK((*device)->close().ok());
    }
  }
}

namespace {

// Two sessions that push and pull, one of them above its promise, one whose blocks go out to host memory and come home,
// and another that needs their place. True if an allocation failed.
bool take_turns(const test::Setup& setup, uint64_t succeed, bool for_ever, bool callers) {
  const Spared mine;
  executor::RuntimeOptions options = test::options_of(setup);
  options.capacity_bytes = 40 * test::kMiB;
  options.record_timeline = true;
  const auto runtime = test::open_runtime(std::move(options));
  std::vector<std::shared_ptr<executor::Session>> sessions;
  std::vector<std::shared_ptr<executor::Ticket>> tickets;
  std::shared_ptr<executor::Iteration> iteration;
  const auto turn = [&] {
    for (uint64_t i = 0; i < 2; ++i) {
      executor::SessionOptions of = test::need(i == 0 ? "first" : "second", 4 * test::kMiB, 4 * test::kMiB);
      of.allow_queueing = true;
      const auto session = runtime->open_session(of);
      if (session.ok()) sessions.push_back(*session);
    }
    for (int round = 0; round < 3; ++round) {
      for (const auto& session : sessions) {
        auto work = test::work_of([](const std::shared_ptr<executor::Iteration>& at) -> base::Status {
          GPUSHARE_RETURN_IF_ERROR(at->alloc(2 * test::kMiB, 0).status());
          GPUSHARE_ASSIGN_OR_RETURN(const auto stream, at->stream());
          return test::enqueue(*stream, 1000);
        });
        const auto ticket = session->submit(work);
        if (ticket.ok()) tickets.push_back(*ticket);
      }
    }
    for (const auto& ticket : tickets) (void)ticket->wait(GPUSHARE_NO_TIMEOUT);
    for (const auto& session : sessions) {
      (void)session->alloc(memory::Kind::kModel, 5 * test::kMiB, 0);
      const auto begun = session->begin(GPUSHARE_NO_TIMEOUT);
      if (!begun.ok()) continue;
      iteration = *begun;
      (void)iteration->alloc(6 * test::kMiB, 0);
      (void)iteration->end();
      iteration = nullptr;
    }
    executor::SessionOptions spills = test::need("spills", 2 * test::kMiB, 2 * test::kMiB);
    spills.allow_spill = true;
    spills.allow_queueing = false;  // the others may have grown into its place
    if (const auto mover = runtime->open_session(spills); mover.ok()) {
      sessions.push_back(*mover);
      (void)(*mover)->alloc(memory::Kind::kModel, 7 * test::kMiB, 0);
      for (const uint64_t quota : {6 * test::kMiB, uint64_t{0}}) {
        (void)(*mover)->set_quota(quota);
        for (int i = 0; i < 3; ++i) {
          const auto begun = (*mover)->begin(GPUSHARE_NO_TIMEOUT);
          if (!begun.ok()) continue;
          iteration = *begun;
          (void)iteration->end();
          iteration = nullptr;
        }
      }
      (void)(*mover)->close();
    }
    const auto third = runtime->open_session(test::need("third", 8 * test::kMiB, 20 * test::kMiB));
    if (third.ok()) sessions.push_back(*third);
    (void)runtime->synchronize(GPUSHARE_NO_TIMEOUT);
    if (!sessions.empty()) (void)sessions.front()->close();
  };
  bool failed = false;
  {
    const FailingNew failing(succeed, for_ever);
    try {
      const Spared caller(!callers);
      turn();
    } catch (const std::bad_alloc&) {
      failed = true;  // what guard() makes a status of
    }
    failed = failed || test::failures > 0;
    if (!callers) CHECK((runtime->info().ok() || failed));
  }
  if (iteration != nullptr) (void)iteration->end();
  for (const auto& session : sessions) (void)session->info();
  const base::Status closed = runtime->close();
  INFO(closed.to_string());
  // A call that memory ran out in may leave a mapping, which the device then gives back and tells of.
  CHECK((closed.ok() || (failed && closed.message().find("they were released") != std::string::npos)));
  return failed;
}

}  // namespace

TEST_CASE("a runtime without memory returns from every call and closes") {
  for (const test::Setup& setup : test::kSetups) {
    for (const bool for_ever : {false, true}) {
      for (const bool callers : {false, true}) {
        uint64_t without = 0, with = 0;
        for (uint64_t n = 0; without < 2 && n < 3000; n += 1 + n / 8) {
          INFO(setup.device << ", layout " << static_cast<int>(setup.layout)
                            << (for_ever ? ", for ever" : ", once") << (callers ? ", in calls too" : "")
                            << ", allocation " << n);
          const bool failed = take_turns(setup, n, for_ever, callers);
          without += failed ? 0 : 1;
          with += failed ? 1 : 0;
        }
        CHECK(with > 0);
      }
    }
  }
}
