// The host runs out of memory: on the threads of the request queue, at every one of their first allocations in turn, once or from then on.
// Every request is answered, nothing ends the process, and closing works.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "device/device.hpp"
#include "executor/serving/request_server.hpp"
#include "support/catch.hpp"
#include "support/failing_new.hpp"

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
  std::atomic<int> no_memory{0}, ran{0}, other{0};
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
  run.ran = static_cast<size_t>(ran);
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
