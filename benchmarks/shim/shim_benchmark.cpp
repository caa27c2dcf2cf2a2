// Measures the time that the shim adds to calls of the driver: each call goes to the recording driver directly, and through the shim's entry, in one run.
//   LD_PRELOAD=build/release/lib/libgpushare_preload.so GPUSHARE_CUDA_DRIVER=build/release/lib/doubles/libcuda_recorder.so GPUSHARE_MEMORY=64G
//   build/release/bin/shim_benchmark
// With a daemon (GPUSHARE_SOCKET=..., and GPUSHARE_MEMORY below its capacity) the gate is that of a process with the turn. With
// GPUSHARE_CLASS=opportunistic in addition each launch and copy is measured and bounded, as it is while others wait.
// The result is the difference of "shim" and "bare": the recording driver's own allocation keeps a map under a lock.
// SHIM_BENCHMARK_ROUNDS=n makes exactly n rounds of each call. Under callgrind the difference of two such runs is the cost of the rounds alone.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "doubles/cuda_recorder/recorder.h"
#include "shim/table.hpp"

namespace {

using gpushare::shim::find_entry;
using gpushare::shim::Result;

void* driver() {
  static void* handle = [] {
    const char* path = std::getenv("GPUSHARE_CUDA_DRIVER");
    void* opened = path != nullptr ? dlopen(path, RTLD_NOW) : nullptr;
    if (opened == nullptr) {
      std::fprintf(stderr,
                   "set LD_PRELOAD and GPUSHARE_CUDA_DRIVER as the head of shim_benchmark.cpp says\n");
      std::exit(2);
    }
    return opened;
  }();
  return handle;
}
template <class F>
F function(const char* name, bool shim) {
  if (shim) return reinterpret_cast<F>(dlsym(driver(), name));
  return reinterpret_cast<F>(
      reinterpret_cast<decltype(&recorder_function)>(dlsym(driver(), "recorder_function"))(find_entry(name)));
}

// A context, so that the shim has a session and events.
void make_context() {
  static const bool made = [] {
    void* context = nullptr;
    return function<Result (*)(void**, int)>("cuDevicePrimaryCtxRetain", true)(&context, 0) == 0 &&
           function<Result (*)(void*)>("cuCtxSetCurrent", true)(context) == 0;
  }();
  if (!made) std::exit(2);
}

using Launch = Result (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                          void**, void**);
void launch(benchmark::State& state, bool shim) {
  make_context();
  const auto call = function<Launch>("cuLaunchKernel", shim);
  for (auto _ : state)
    benchmark::DoNotOptimize(call(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
}
void copy(benchmark::State& state, bool shim) {
  make_context();
  const auto call =
      function<Result (*)(uint64_t, const void*, uint64_t, void*)>("cuMemcpyHtoDAsync_v2", shim);
  for (auto _ : state) benchmark::DoNotOptimize(call(1, &state, 8, nullptr));
}
void info(benchmark::State& state, bool shim) {
  const auto call = function<Result (*)(uint64_t*, uint64_t*)>("cuMemGetInfo_v2", shim);
  uint64_t free_bytes = 0, total = 0;
  for (auto _ : state) benchmark::DoNotOptimize(call(&free_bytes, &total));
}
// One allocation and one free beside `live` blocks; the addresses are the driver's.
void allocation(benchmark::State& state, bool shim) {
  const auto get = function<Result (*)(uint64_t*, uint64_t)>("cuMemAlloc_v2", shim);
  const auto release = function<Result (*)(uint64_t)>("cuMemFree_v2", shim);
  std::vector<uint64_t> live(static_cast<size_t>(state.range(0)));
  for (uint64_t& address : live)
    if (get(&address, 4096) != 0) state.SkipWithError("no memory");
  for (auto _ : state) {
    uint64_t address = 0;
    if (get(&address, 4096) != 0) state.SkipWithError("no memory");
    release(address);
  }
  for (const uint64_t address : live) release(address);
}

// Physical memory of 2 MiB, created and released.
void physical(benchmark::State& state, bool shim) {
  const auto create =
      function<Result (*)(uint64_t*, uint64_t, const void*, unsigned long long)>("cuMemCreate", shim);
  const auto release = function<Result (*)(uint64_t)>("cuMemRelease", shim);
  const int properties[16] = {1, 0, 1, 0};  // pinned, without handles to export, on device 0
  for (auto _ : state) {
    uint64_t handle = 0;
    if (create(&handle, 2 << 20, properties, 0) != 0) state.SkipWithError("no memory");
    release(handle);
  }
}

// One of `live` blocks, whichever, is freed, and another one allocated.
void replacement(benchmark::State& state, bool shim) {
  const auto get = function<Result (*)(uint64_t*, uint64_t)>("cuMemAlloc_v2", shim);
  const auto release = function<Result (*)(uint64_t)>("cuMemFree_v2", shim);
  std::vector<uint64_t> live(static_cast<size_t>(state.range(0)));
  for (uint64_t& address : live)
    if (get(&address, 4096) != 0) state.SkipWithError("no memory");
  uint64_t random = 1;
  for (auto _ : state) {
    random = random * 6364136223846793005 + 1442695040888963407;
    uint64_t& address = live[(random >> 33) % live.size()];
    release(address);
    if (get(&address, 4096) != 0) state.SkipWithError("no memory");
  }
  for (const uint64_t address : live) release(address);
}

void rounds(benchmark::internal::Benchmark* benchmark) {
  if (const char* exactly = std::getenv("SHIM_BENCHMARK_ROUNDS"))
    benchmark->Iterations(std::strtoll(exactly, nullptr, 10));
}

BENCHMARK_CAPTURE(launch, bare, false)->Apply(rounds);
BENCHMARK_CAPTURE(launch, shim, true)->Apply(rounds);
BENCHMARK_CAPTURE(copy, bare, false)->Apply(rounds);
BENCHMARK_CAPTURE(copy, shim, true)->Apply(rounds);
BENCHMARK_CAPTURE(info, bare, false)->Apply(rounds);
BENCHMARK_CAPTURE(info, shim, true)->Apply(rounds);
BENCHMARK_CAPTURE(physical, bare, false)->Apply(rounds);
BENCHMARK_CAPTURE(physical, shim, true)->Apply(rounds);
BENCHMARK_CAPTURE(allocation, bare, false)->Arg(10)->Arg(100'000)->Apply(rounds);
BENCHMARK_CAPTURE(allocation, shim, true)->Arg(10)->Arg(100'000)->Apply(rounds);
BENCHMARK_CAPTURE(replacement, bare, false)->Arg(100'000)->Apply(rounds);
BENCHMARK_CAPTURE(replacement, shim, true)->Arg(100'000)->Apply(rounds);

}  // namespace

BENCHMARK_MAIN();
