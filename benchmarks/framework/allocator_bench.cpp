// An allocation and a free of 1 KiB inside an iteration: by the iteration's handle, by the handle of its stream, by its
// native stream.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>
#include <gpushare/gpushare.hpp>

namespace gs = gpushare;

namespace {

struct Step {
  Step() {
    gs::RuntimeOptions options;
    options.device = "host";
    runtime = gs::Runtime::open(options);
    gs::SessionOptions need;
    need.ephemeral_bytes = 16 << 20;
    session = runtime.open_session(need);
    allocator = gs::Allocator(runtime);
    iteration = session.begin_iteration();
  }
  gs::Runtime runtime;
  gs::Session session;
  gs::Allocator allocator;
  gs::Iteration iteration;
};

void by_iteration(benchmark::State& state) {
  Step step;
  for (auto _ : state) {
    gpushare_device_address block = 0;
    (void)gpushare_iteration_alloc(step.iteration.get(), 1024, 0, &block);
    (void)gpushare_memory_free(step.runtime.get(), block);
  }
}
BENCHMARK(by_iteration);

void by_stream(benchmark::State& state) {
  Step step;
  const gpushare_stream stream = step.iteration.stream().get();
  for (auto _ : state) {
    gpushare_device_address block = 0;
    (void)gpushare_memory_alloc(step.runtime.get(), stream, GPUSHARE_KIND_EPHEMERAL, 1024, 0, &block);
    (void)gpushare_memory_free(step.runtime.get(), block);
  }
}
BENCHMARK(by_stream);

void by_native_stream(benchmark::State& state) {
  Step step;
  void* const native = step.iteration.stream().native();
  for (auto _ : state) {
    gpushare_device_address block = 0;
    (void)gpushare_allocator_alloc(step.allocator.get(), 1024, 0, native, &block);
    (void)gpushare_allocator_free(step.allocator.get(), block, native);
  }
}
BENCHMARK(by_native_stream);

}  // namespace
