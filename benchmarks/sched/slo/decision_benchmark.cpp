// One scheduling decision with 140 requests pending (or as many as the second argument says), 5 batch sizes, 32 bins:
// CPU time of the thread in Batcher::next alone, which neither blocks nor is lengthened by what else the machine does.
// The batch that it takes out is put back as new requests, untimed; the mean includes the refreshing of distributions
// every 64 records.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <ctime>

#include <cmath>
#include <random>
#include <unordered_map>

#include "sched/slo/batcher.hpp"

namespace {

using namespace gpushare::sched::slo;

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void decision(benchmark::State& state, const char* policy) {
  const uint32_t applications = static_cast<uint32_t>(state.range(0));
  const auto pending = static_cast<size_t>(state.range(1));
  const auto models = static_cast<uint32_t>(state.range(2));
  const auto largest = static_cast<uint32_t>(state.range(3));
  const bool costs_differ = state.range(4) != 0;
  const int samples = applications <= 8 ? 2048 : 256;
  auto batcher = std::move(*make_batcher(policy));
  ModelSpec spec{.c0_ns = 100e6, .c1 = 0.2};
  spec.batch_sizes.clear();
  for (uint32_t size = 1; size <= largest; size *= 2) spec.batch_sizes.push_back(size);
  for (uint32_t m = 0; m < models; ++m)
    if (!batcher->add_model(spec).ok()) return;
  std::mt19937_64 random(1);
  std::normal_distribution<double> spread(0, 1);
  const auto length = [&](uint32_t application) {
    return static_cast<uint64_t>(std::max(0.5, 20.0 * (application + 0.5) / applications + spread(random)) *
                                 50e6);
  };
  // The applications of a model are spread over it; a model without any has the first.
  const auto model_of = [&](uint32_t application) { return application % models; };
  for (uint32_t a = 0; a < std::max(applications, models); ++a)
    for (int i = 0; i < samples; ++i)
      batcher->observe(model_of(a), a % applications, length(a % applications));
  uint64_t now = 1'000'000'000'000;
  RequestId next_id = 1;
  std::unordered_map<RequestId, std::pair<uint32_t, uint64_t>> sent;  // application and execution time
  const auto fill = [&] {
    while (batcher->pending() < pending) {
      Request request;
      request.id = next_id++;
      request.application = static_cast<uint32_t>(random() % applications);
      request.model = model_of(request.application);
      if (costs_differ) request.cost = 1 + static_cast<double>(random() % 1000) / 100;
      request.arrival_ns = now;
      request.deadline_ns = now + 1'500'000'000 + random() % (pending * 28'000'000);
      request.execution_ns = length(request.application);
      if (batcher->arrive(request, now).ok()) sent[request.id] = {request.application, request.execution_ns};
    }
  };
  fill();
  std::vector<Drop> drops;
  for (auto _ : state) {
    const double begin = thread_seconds();
    Decision decision = batcher->next(now, 0);
    state.SetIterationTime(thread_seconds() - begin);
    if (decision.batch) {
      now += decision.batch->expected_ns;
      for (const RequestId id : decision.batch->requests) {
        const auto of = sent.find(id);
        batcher->observe(model_of(of->second.first), of->second.first, of->second.second);
        sent.erase(of);
      }
      batcher->started(decision.batch->id, now);
      batcher->finished(decision.batch->id, decision.batch->expected_ns, now);
    } else {
      now += 1'000'000;
    }
    drops.clear();
    batcher->take_drops(drops);
    for (const Drop& drop : drops) sent.erase(drop.id);
    fill();
  }
}

BENCHMARK_CAPTURE(decision, gpushare, "gpushare")
    ->UseManualTime()
    ->ArgNames({"applications", "pending", "models", "largest", "costs_differ"})
    ->ArgsProduct({{1, 2, 3, 8, 512, 10'000}, {140}, {1}, {16}, {0, 1}})
    ->ArgsProduct({{3, 10'000}, {100'000}, {1}, {16}, {0}})
    ->ArgsProduct({{512}, {140, 10'000}, {1, 100}, {16, 4096}, {1}});
BENCHMARK_CAPTURE(decision, orloj, "orloj")
    ->UseManualTime()
    ->ArgsProduct({{1, 2, 3, 8}, {140}, {1}, {16}, {0}});
BENCHMARK_CAPTURE(decision, clockwork, "clockwork")->UseManualTime()->Args({2, 140, 1, 16, 0});

}  // namespace
