// Elastic ranges through the C ABI on the host device: commit and decommit of a granule beside the calls of the kernel that the host device
// makes for it, the latency of a grant when another range must give back, and how fast a session shrinks and grows.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "gpushare/gpushare.hpp"

namespace gs = gpushare;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kGranule = 2 * kMiB;

struct Pair {
  explicit Pair(uint64_t capacity_bytes) {
    gs::RuntimeOptions options;
    options.device = "host";
    options.capacity_bytes = capacity_bytes;
    runtime = gs::Runtime::open(options);
    gs::SessionOptions one, two;
    one.name = "one";
    two.name = "two";
    one.ephemeral_bytes = two.ephemeral_bytes = kGranule;
    first = runtime.open_session(one);
    second = runtime.open_session(two);
  }
  gs::Runtime runtime;
  gs::Session first, second;
};

// The system calls of the host device that put a granule behind addresses and take it away, with nothing else.
void BM_kernel_map_unmap(benchmark::State& state) {
  const int file = memfd_create("bench", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(kGranule)) != 0) std::abort();
  char* const at = static_cast<char*>(
      mmap(nullptr, kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (auto _ : state) {
    if (mmap(at, kGranule, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
      std::abort();
    if (mmap(at, kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
      std::abort();
  }
  munmap(at, kGranule);
  close(file);
}
BENCHMARK(BM_kernel_map_unmap);

void BM_kernel_mprotect_madvise(benchmark::State& state) {
  char* const at = static_cast<char*>(
      mmap(nullptr, kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (auto _ : state) {
    if (mprotect(at, kGranule, PROT_READ | PROT_WRITE) != 0) std::abort();
    if (madvise(at, kGranule, MADV_DONTNEED) != 0 || mprotect(at, kGranule, PROT_NONE) != 0) std::abort();
  }
  munmap(at, kGranule);
}
BENCHMARK(BM_kernel_mprotect_madvise);

// Nobody else needs the granule meanwhile.
void BM_commit_decommit_again(benchmark::State& state) {
  Pair pair(64 * kMiB);
  gs::Range range(pair.first, {"range", 64 * kMiB, {}, {}, 0});
  for (auto _ : state) {
    range.commit(0, kGranule);
    range.decommit(0, kGranule);
  }
}
BENCHMARK(BM_commit_decommit_again);

// Each commit needs the granule that the other range has just decommitted: one unmap and one map.
void BM_commit_decommit_in_turn(benchmark::State& state) {
  Pair pair(3 * kGranule);
  gs::Range ranges[2] = {gs::Range(pair.first, {"one", 64 * kMiB, {}, {}, 0}),
                         gs::Range(pair.second, {"two", 64 * kMiB, {}, {}, 0})};
  const uint64_t free =
      (pair.runtime.info().capacity_bytes - pair.runtime.info().promised_bytes) / kGranule * kGranule;
  ranges[0].commit(0, free);
  ranges[0].decommit(0, free);
  size_t turn = 1;
  for (auto _ : state) {
    ranges[turn].commit(0, free);
    ranges[turn].decommit(0, free);
    turn = 1 - turn;
  }
  state.counters["granules"] = static_cast<double>(free / kGranule);
}
BENCHMARK(BM_commit_decommit_in_turn);

// The other one has everything and gives 32 MiB in its function: two wake-ups of threads, a decommit, 16 unmaps and maps.
void BM_grant_by_give_back(benchmark::State& state) {
  Pair pair(64 * kMiB);
  gs::Range first;
  uint64_t has = 0;
  first = gs::Range(pair.first, {"first", 64 * kMiB,
                                 [&](uint64_t bytes, gs::Nanoseconds) {
                                   has -= bytes;
                                   first.decommit(has, bytes);
                                   return bytes;
                                 },
                                 std::chrono::seconds(10), 0});
  gs::Range second(pair.second, {"second", 64 * kMiB, {}, {}, 0});
  const uint64_t all = pair.runtime.info().capacity_bytes - pair.runtime.info().promised_bytes;
  for (auto _ : state) {
    state.PauseTiming();
    second.decommit(0, 64 * kMiB);
    first.commit(0, all);
    has = all;
    state.ResumeTiming();
    second.commit(0, 32 * kMiB, std::chrono::seconds(10));
  }
}
BENCHMARK(BM_grant_by_give_back)->UseRealTime();

// A session with 512 MiB of live bytes goes to host memory and comes back, as its capacity falls and rises.
void BM_session_out_and_in(benchmark::State& state) {
  constexpr uint64_t kBytes = 512 * kMiB;
  gs::RuntimeOptions options;
  options.device = "host?total_bytes=1073741824";
  options.capacity_bytes = 640 * kMiB;
  gs::Runtime runtime = gs::Runtime::open(options);
  gs::SessionOptions wanted;
  wanted.name = "job";
  wanted.ephemeral_bytes = kGranule;
  gs::Session session = runtime.open_session(wanted);
  gs::Range range(session, {"table", kBytes, {}, {}, 0});
  range.commit(0, kBytes);
  auto* const bytes = reinterpret_cast<unsigned char*>(range.info().address);
  std::memset(bytes, 1, kBytes);
  double out_s = 0, in_s = 0;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    runtime.set_capacity(64 * kMiB);
    while (runtime.info().effective_capacity_bytes > 64 * kMiB) std::this_thread::yield();
    const auto middle = std::chrono::steady_clock::now();
    // Below the capacity of opening the granules have gone back to the device, so all of it is copied back.
    const auto restart = std::chrono::steady_clock::now();
    runtime.set_capacity(640 * kMiB);
    session.wait_admitted(gs::no_timeout);
    const auto end = std::chrono::steady_clock::now();
    out_s += std::chrono::duration<double>(middle - start).count();
    in_s += std::chrono::duration<double>(end - restart).count();
  }
  const double total = static_cast<double>(kBytes) * static_cast<double>(state.iterations()) / 1e9;
  state.counters["out_GB_per_s"] = total / out_s;
  state.counters["in_GB_per_s"] = total / in_s;
  if (bytes[kBytes - 1] != 1) std::abort();
}
BENCHMARK(BM_session_out_and_in)->UseRealTime()->Iterations(4)->Unit(benchmark::kMillisecond);

// The limit for both: a copy in memory.
void BM_memcpy(benchmark::State& state) {
  constexpr uint64_t kBytes = 512 * kMiB;
  void *from = nullptr, *to = nullptr;
  if (posix_memalign(&from, 4096, kBytes) != 0 || posix_memalign(&to, 4096, kBytes) != 0) std::abort();
  std::memset(from, 1, kBytes);
  std::memset(to, 2, kBytes);
  for (auto _ : state) {
    std::memcpy(to, from, kBytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * kBytes));
  std::free(from);
  std::free(to);
}
BENCHMARK(BM_memcpy)->UseRealTime()->Iterations(4)->Unit(benchmark::kMillisecond);

// The same 512 MiB when their owner gives them up: no copy.
void BM_range_shrink_and_grow(benchmark::State& state) {
  constexpr uint64_t kBytes = 512 * kMiB;
  Pair pair(640 * kMiB);
  gs::Range range(pair.first, {"table", kBytes, {}, {}, 0});
  // Below the capacity of opening the granules go back to the device each time.
  if (state.range(0) != 0) pair.runtime.set_capacity(600 * kMiB);
  for (auto _ : state) {
    range.commit(0, kBytes);
    range.decommit(0, kBytes);
  }
}
BENCHMARK(BM_range_shrink_and_grow)->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMicrosecond);

}  // namespace
