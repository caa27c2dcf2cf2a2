// Measures the cost of closing a server for each request that it holds: submit n requests behind a batch that does not
// end, then stop. The time for each request must not grow with n.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <atomic>
#include <thread>

#include "base/clock.hpp"
#include "executor/serving/request_server.hpp"

namespace {

using namespace gpushare;            // NOLINT
using namespace gpushare::executor;  // NOLINT

void close_holding(benchmark::State& state) {
  const auto held = static_cast<uint64_t>(state.range(0));
  for (auto _ : state) {
    state.PauseTiming();
    RequestServerOptions options;
    options.batcher.max_pending = held;
    auto server = std::move(*RequestServer::start(options));
    std::atomic<bool> release{false};
    (void)server->add_model({}, [&](const sched::slo::Batch&, BatchReport&) {
      while (!release) std::this_thread::yield();
      return base::ok_status();
    });
    std::atomic<uint64_t> answered{0};
    for (uint64_t id = 0; id < held; ++id) {
      sched::slo::Request request;
      request.id = id;
      request.deadline_ns = base::host_now_ns() + 1'000'000'000'000;
      (void)server->submit(request, [&](const RequestOutcome&) { ++answered; });
    }
    state.ResumeTiming();
    release = true;
    (void)server->stop();
    if (answered != held) state.SkipWithError("a request was not answered");
    state.PauseTiming();
    server.reset();
    state.ResumeTiming();
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations()) * state.range(0));
}

BENCHMARK(close_holding)
    ->RangeMultiplier(10)
    ->Range(1000, 1'000'000)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
