// The cost of an allocation through lanes and persistent heaps, on the sim device without data: bookkeeping only.
// Ratios within one run hold on other machines, times do not.
//
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "memory/device_memory.hpp"

using namespace gpushare;
using memory::Address;
using memory::DeviceMemory;
using memory::Kind;
using memory::Layout;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

void must(const base::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.to_string().c_str());
  std::abort();
}
template <class T>
T must(base::Result<T> result) {
  must(result.status());
  return std::move(result).value();
}

struct Setup {
  std::unique_ptr<device::Device> device = must(device::Device::open("sim?total_gib=16&data=0"));
  std::unique_ptr<DeviceMemory> memory;
  device::Stream stream = must(device->create_stream());
  explicit Setup(Layout layout = Layout::kVirtual) {
    memory::DeviceMemoryOptions options;
    options.capacity_bytes = uint64_t{15} << 30;
    options.layout = layout;
    memory = must(DeviceMemory::open(*device, options));
  }
};

void lane_alloc_free(benchmark::State& state) {
  Setup setup;
  auto* heap = must(setup.memory->open_heap(1, "a", 64 * kMiB));
  auto* lane = must(setup.memory->open_lane(0, 1024 * kMiB, setup.stream));
  must(lane->begin_iteration(*heap, false));
  for (auto _ : state) {
    const Address address = *lane->alloc(1 * kMiB, 0);
    must(setup.memory->free(address));
  }
  must(lane->end_iteration(nullptr));
}
BENCHMARK(lane_alloc_free);

// The same on a plan: an iteration of 1,000 pairs.
void lane_planned_pairs(benchmark::State& state) {
  Setup setup;
  auto* heap = must(setup.memory->open_heap(1, "a", 64 * kMiB));
  auto* lane = must(setup.memory->open_lane(0, 1024 * kMiB, setup.stream));
  bool planned = false;
  const auto iterate = [&] {
    must(lane->begin_iteration(*heap, true));
    for (int i = 0; i < 1000; ++i) must(setup.memory->free(*lane->alloc(1 * kMiB, 0)));
    must(lane->end_iteration(&planned));
  };
  iterate();
  iterate();
  for (auto _ : state) {
    iterate();
    if (!planned) state.SkipWithError("not planned");
  }
  state.SetItemsProcessed(state.iterations() * 1000);
}
BENCHMARK(lane_planned_pairs);

void persistent_alloc_free(benchmark::State& state) {
  Setup setup;
  auto* heap = must(setup.memory->open_heap(1, "a", 64 * kMiB));
  for (auto _ : state) {
    const Address address = *heap->alloc(Kind::kFramework, 64 * 1024, 0);
    must(setup.memory->free(address));
  }
}
BENCHMARK(persistent_alloc_free);

// Finding the owner of an address must not depend on how many there are.
void free_by_address(benchmark::State& state) {
  Setup setup;
  std::vector<memory::PersistentHeap*> heaps;
  for (int64_t i = 0; i < state.range(0); ++i)
    heaps.push_back(must(setup.memory->open_heap(static_cast<uint64_t>(i) + 1, "a", 4 * kMiB)));
  size_t next = 0;
  for (auto _ : state) {
    const Address address = *heaps[next]->alloc(Kind::kFramework, 64 * 1024, 0);
    must(setup.memory->free(address));
    if (++next == heaps.size()) next = 0;
  }
}
BENCHMARK(free_by_address)->Arg(1)->Arg(10)->Arg(100)->Arg(1000);

// begin + end of an iteration, with so many blocks left for the boundary to reclaim; allocating them is not
// timed.
void boundary(benchmark::State& state) {
  Setup setup;
  auto* heap = must(setup.memory->open_heap(1, "a", 64 * kMiB));
  auto* lane = must(setup.memory->open_lane(0, 1024 * kMiB, setup.stream));
  for (auto _ : state) {
    state.PauseTiming();
    must(lane->begin_iteration(*heap, false));
    for (int64_t i = 0; i < state.range(0); ++i) benchmark::DoNotOptimize(*lane->alloc(64 * 1024, 0));
    state.ResumeTiming();
    must(lane->end_iteration(nullptr));
  }
}
BENCHMARK(boundary)->Arg(0)->Arg(1000);

void session_open_close(benchmark::State& state) {
  Setup setup(state.range(0) == 0 ? Layout::kContiguous : Layout::kVirtual);
  for (auto _ : state) must(setup.memory->close_heap(must(setup.memory->open_heap(1, "a", 64 * kMiB))));
}
BENCHMARK(session_open_close)->Arg(0)->Arg(1);

}  // namespace
