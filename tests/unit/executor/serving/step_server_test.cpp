// The step server on real threads, with requests that never join a step.
// SPDX-License-Identifier: Apache-2.0
#include "executor/serving/step_server.hpp"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "base/clock.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using executor::StepServer;
using sched::slo::StepEvent;
using sched::slo::StepRequest;

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
