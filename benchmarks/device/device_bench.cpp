// The devices' costs for the layers above: events and queries on the hot path of an iteration, a round
// trip to a stream's thread, and copies beside plain memcpy.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <vector>

#include "device/device.hpp"

namespace {

using gpushare::device::Address;
using gpushare::device::Device;
using gpushare::device::Event;
using gpushare::device::Stream;

struct Host {
  explicit Host(const char* spec = "host") : device(*Device::open(spec)), stream(*device->create_stream()) {}
  std::unique_ptr<Device> device;
  Stream stream;
};

void record_on_idle_stream(benchmark::State& state) {
  Host host;
  const Event event = *host.device->create_event(static_cast<uint32_t>(state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(host.stream.record(event).ok());
}
BENCHMARK(record_on_idle_stream)->ArgName("timing")->Arg(GPUSHARE_EVENT_DEFAULT)->Arg(GPUSHARE_EVENT_TIMING);

void query_passed_event(benchmark::State& state) {
  Host host;
  const Event event = *host.device->create_event();
  if (!host.stream.record(event).ok()) state.SkipWithError("record failed");
  for (auto _ : state) benchmark::DoNotOptimize(event.query().ok());
}
BENCHMARK(query_passed_event);

void wait_for_passed_event(benchmark::State& state) {
  Host host;
  const Stream other = *host.device->create_stream();
  const Event event = *host.device->create_event();
  if (!other.record(event).ok()) state.SkipWithError("record failed");
  for (auto _ : state) benchmark::DoNotOptimize(host.stream.wait(event).ok());
}
BENCHMARK(wait_for_passed_event);

// The executor's additions to an iteration that runs on the caller's thread: two timing events, their query,
// their difference.
void events_of_one_iteration(benchmark::State& state) {
  Host host;
  const Event start = *host.device->create_event(GPUSHARE_EVENT_TIMING);
  const Event end = *host.device->create_event(GPUSHARE_EVENT_TIMING);
  for (auto _ : state) {
    benchmark::DoNotOptimize(host.stream.record(start).ok());
    benchmark::DoNotOptimize(host.stream.record(end).ok());
    benchmark::DoNotOptimize(end.query().ok());
    benchmark::DoNotOptimize(*end.elapsed_since(start));
  }
}
BENCHMARK(events_of_one_iteration);

void launch_and_synchronize(benchmark::State& state) {
  Host host;
  for (auto _ : state) {
    benchmark::DoNotOptimize(host.stream.launch_host([](void*) {}, nullptr).ok());
    benchmark::DoNotOptimize(host.stream.synchronize().ok());
  }
}
BENCHMARK(launch_and_synchronize)->UseRealTime();

void plain_memcpy(benchmark::State& state) {
  const size_t bytes = static_cast<size_t>(state.range(0));
  std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes, 2);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<int64_t>(bytes * state.iterations()));
}
BENCHMARK(plain_memcpy)->RangeMultiplier(16)->Range(4 << 10, 64 << 20)->UseRealTime();

void copy_to(Host& host, benchmark::State& state) {
  const uint64_t bytes = static_cast<uint64_t>(state.range(0));
  std::vector<char> from(bytes, 1);
  const Address to = *host.device->alloc(bytes);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        host.stream.copy(to, reinterpret_cast<uint64_t>(from.data()), bytes, GPUSHARE_COPY_HOST_TO_DEVICE)
            .ok());
    benchmark::DoNotOptimize(host.stream.synchronize().ok());
  }
  state.SetBytesProcessed(static_cast<int64_t>(bytes * static_cast<uint64_t>(state.iterations())));
  if (!host.device->free(to).ok()) state.SkipWithError("free failed");
}

void copy_to_device(benchmark::State& state) {
  Host host;
  copy_to(host, state);
}
BENCHMARK(copy_to_device)->RangeMultiplier(16)->Range(4 << 10, 64 << 20)->UseRealTime();

// A model of 1 GiB in tensors of 4 MiB, beside one memcpy of as much, which the C library takes past the cache.
constexpr uint64_t kModelBytes = uint64_t{1} << 30, kTensorBytes = uint64_t{4} << 20;
void memcpy_of_a_model(benchmark::State& state) {
  std::vector<char> from(kModelBytes, 1), to(kModelBytes, 2);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), kModelBytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<int64_t>(kModelBytes * static_cast<uint64_t>(state.iterations())));
}
BENCHMARK(memcpy_of_a_model)->UseRealTime();

void copies_of_a_model(benchmark::State& state) {
  Host host;
  std::vector<char> from(kModelBytes, 1);
  const Address to = *host.device->alloc(kModelBytes);
  if (!host.stream.fill(to, 2, kModelBytes).ok() || !host.stream.synchronize().ok())
    state.SkipWithError("fill failed");
  for (auto _ : state) {
    for (uint64_t at = 0; at < kModelBytes; at += kTensorBytes)
      benchmark::DoNotOptimize(host.stream
                                   .copy(to + at, reinterpret_cast<uint64_t>(from.data()) + at, kTensorBytes,
                                         GPUSHARE_COPY_HOST_TO_DEVICE)
                                   .ok());
    benchmark::DoNotOptimize(host.stream.synchronize().ok());
  }
  state.SetBytesProcessed(static_cast<int64_t>(kModelBytes * static_cast<uint64_t>(state.iterations())));
  if (!host.device->free(to).ok()) state.SkipWithError("free failed");
}
BENCHMARK(copies_of_a_model)->UseRealTime();

// The modelled bus: bytes_per_second should read as the option says.
void copy_over_capped_bus(benchmark::State& state) {
  Host host("host?copy_gbps=2");
  copy_to(host, state);
}
BENCHMARK(copy_over_capped_bus)->Arg(64 << 10)->Arg(1 << 20)->Arg(32 << 20)->UseRealTime();

void map_and_unmap_granule(benchmark::State& state) {
  Host host;
  const uint64_t granule = host.device->info().mapping_granularity_bytes;
  const Address range = *host.device->va_reserve(granule);
  gpushare_backend_memory* memory = *host.device->phys_create(granule);
  for (auto _ : state) {
    benchmark::DoNotOptimize(host.device->va_map(range, granule, memory, 0).ok());
    benchmark::DoNotOptimize(host.device->va_unmap(range, granule).ok());
  }
  if (!host.device->phys_release(memory).ok() || !host.device->va_free(range, granule).ok()) {
    state.SkipWithError("release failed");
  }
}
BENCHMARK(map_and_unmap_granule);

// Host time that the simulator takes for one modelled work, with so many streams busy at once.
void simulated_work(benchmark::State& state) {
  const auto device = *Device::open("sim");
  std::vector<Stream> streams;
  for (int64_t i = 0; i < state.range(0); ++i) streams.push_back(*device->create_stream());
  gpushare_backend_work work{};
  work.struct_size = sizeof(work);
  work.duration_ns = 1'000'000;
  work.demand = 0.3F;
  int64_t works = 0;
  for (auto _ : state) {
    for (const Stream& stream : streams) benchmark::DoNotOptimize(stream.work(work).ok());
    for (const Stream& stream : streams) benchmark::DoNotOptimize(stream.synchronize().ok());
    works += state.range(0);
    work.duration_ns += 1;  // so that ends do not all coincide
  }
  state.SetItemsProcessed(works);
}
BENCHMARK(simulated_work)->Arg(1)->Arg(8)->Arg(64);

}  // namespace
