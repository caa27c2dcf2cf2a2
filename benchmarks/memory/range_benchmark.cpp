// Elastic ranges through the C ABI on the host device: commit and decommit of a granule beside the calls of the kernel
// that the host device makes for it, the latency of a grant when another range must give back, and how fast a session
// shrinks and grows.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

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

// The cost of parts: the same session of blocks goes out and comes back in parts (default settings) and in one piece, in
// turns. Counters: the ratios of time of the pairs, parts over one piece.
void BM_session_out_and_in_parts(benchmark::State& state) {
  constexpr uint64_t kBytes = 512 * kMiB;
  struct Side {
    explicit Side(bool parts) {
      gs::RuntimeOptions options;
      options.device = "host?total_bytes=1073741824";
      options.capacity_bytes = 640 * kMiB;
      if (!parts) options.spill_move_bytes = options.spill_move_ns = UINT64_MAX / 2;
      runtime = gs::Runtime::open(options);
      gs::SessionOptions wanted;
      wanted.name = "job";
      wanted.ephemeral_bytes = kGranule;
      session = runtime.open_session(wanted);
      bytes = reinterpret_cast<unsigned char*>(session.alloc_bytes(gs::Kind::model, kBytes));
      std::memset(bytes, 1, kBytes);
    }
    double out() {
      const auto start = std::chrono::steady_clock::now();
      runtime.set_capacity(64 * kMiB);
      while (runtime.info().effective_capacity_bytes > 64 * kMiB)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    double in() {
      const auto start = std::chrono::steady_clock::now();
      runtime.set_capacity(640 * kMiB);
      session.wait_admitted(gs::no_timeout);
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    gs::Runtime runtime;
    gs::Session session;
    unsigned char* bytes = nullptr;
  } parts(true), whole(false);
  std::vector<double> out, in;
  bool parts_first = true;
  for (auto _ : state) {
    Side& first = parts_first ? parts : whole;
    Side& second = parts_first ? whole : parts;
    const double first_out = first.out(), second_out = second.out();
    const double first_in = first.in(), second_in = second.in();
    out.push_back(parts_first ? first_out / second_out : second_out / first_out);
    in.push_back(parts_first ? first_in / second_in : second_in / first_in);
    parts_first = !parts_first;
  }
  const auto tell = [&](const std::string& name, std::vector<double>& ratios) {
    std::sort(ratios.begin(), ratios.end());
    state.counters[name + "_median"] = ratios[ratios.size() / 2];
    state.counters[name + "_least"] = ratios.front();
    state.counters[name + "_most"] = ratios.back();
  };
  tell("out", out);
  tell("in", in);
  if (parts.bytes[kBytes - 1] != 1 || whole.bytes[0] != 1) std::abort();
}
BENCHMARK(BM_session_out_and_in_parts)->UseRealTime()->Iterations(11)->Unit(benchmark::kMillisecond);

// A session whose blocks may move; it has begun an iteration, so it has its lane.
gs::Session open_spilling(gs::Runtime& runtime) {
  gs::SessionOptions wanted;
  wanted.name = "job";
  wanted.persistent_bytes = kGranule;
  wanted.ephemeral_bytes = kGranule;
  wanted.allow_spill = true;
  gs::Session session = runtime.open_session(wanted);
  session.begin_iteration().end();
  return session;
}

// A session with 512 MiB of live blocks within P goes down to 64 MiB as its quota falls, and comes back: copies at its
// boundaries, under the blocks' own addresses. The bounds of a boundary and of what moves may cost are lifted, so each
// way is one or two boundaries.
void BM_session_quota_down_and_up(benchmark::State& state) {
  constexpr uint64_t kBytes = 512 * kMiB, kSmall = 64 * kMiB;
  gs::RuntimeOptions options;
  options.device = "host?total_bytes=1073741824";
  options.capacity_bytes = 640 * kMiB;
  options.spill_limit_bytes = 1024 * kMiB;
  options.spill_move_bytes = options.spill_move_ns = UINT64_MAX / 2;
  options.spill_move_loss = 1e9;
  gs::Runtime runtime = gs::Runtime::open(options);
  gs::Session session = open_spilling(runtime);
  auto* const bytes = reinterpret_cast<unsigned char*>(session.alloc_bytes(gs::Kind::model, kBytes));
  std::memset(bytes, 1, kBytes);
  const auto promised = [&] { return session.info().promised_persistent_bytes; };
  // Returns the time of boundaries until the session has come so far, without those at which it only rested.
  const auto iterate_until = [&](const auto& done) {
    double seconds = 0;
    while (!done()) {
      const uint64_t before = promised();
      const auto start = std::chrono::steady_clock::now();
      session.begin_iteration().end();
      const auto end = std::chrono::steady_clock::now();
      if (promised() != before) seconds += std::chrono::duration<double>(end - start).count();
    }
    return seconds;
  };
  // The limit in the same run: a plain copy of as many bytes to pages that exist.
  std::vector<unsigned char> to(kBytes - kSmall, 2);
  double out_s = 0, in_s = 0, copy_s = 0;
  uint64_t moved = 0;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    std::memcpy(to.data(), bytes, to.size());
    benchmark::ClobberMemory();
    copy_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const uint64_t full = promised();
    session.set_quota(kSmall);
    out_s += iterate_until([&] { return promised() <= kSmall; });
    moved += full - promised();
    session.set_quota(0);
    in_s += iterate_until([&] { return session.info().spilled_bytes == 0; });
  }
  const double rounds = static_cast<double>(state.iterations());
  state.counters["out_GB_per_s"] = static_cast<double>(moved) / 1e9 / out_s;
  state.counters["in_GB_per_s"] = static_cast<double>(moved) / 1e9 / in_s;
  state.counters["memcpy_GB_per_s"] = static_cast<double>(to.size()) * rounds / 1e9 / copy_s;
  state.counters["out_ms"] = 1e3 * out_s / rounds;
  state.counters["in_ms"] = 1e3 * in_s / rounds;
  if (bytes[kBytes - 1] != 1 || bytes[0] != 1) std::abort();
}
BENCHMARK(BM_session_quota_down_and_up)->UseRealTime()->Iterations(6)->Unit(benchmark::kMillisecond);

// A job that only ever shrinks and grows, as fast as it may: its quota falls to an eighth and rises again as soon as it
// is there. Iterations of 20 ms of real work on 64 MiB. It loses the time of its boundaries, given as a share of all.
// With 0 it only iterates: what boundaries take without moves.
void BM_job_that_shrinks_and_grows(benchmark::State& state) {
  constexpr uint64_t kBytes = 64 * kMiB;
  gs::RuntimeOptions options;
  options.device = "host?total_bytes=268435456";
  gs::Runtime runtime = gs::Runtime::open(options);
  gs::Session session = open_spilling(runtime);
  auto* const words = reinterpret_cast<uint64_t*>(session.alloc_bytes(gs::Kind::model, kBytes));
  std::memset(words, 1, kBytes);
  double boundaries_s = 0, moves_s = 0, work_s = 0;
  uint64_t cycles = 0;
  bool small = false;
  for (auto _ : state) {
    const bool there = small ? session.info().spilled_bytes >= kBytes / 2 : session.info().spilled_bytes == 0;
    if (there && state.range(0) != 0) {
      session.set_quota(small ? 0 : kBytes / 8);
      cycles += small ? 1 : 0;
      small = !small;
    }
    const uint64_t before = session.info().promised_persistent_bytes;
    const auto start = std::chrono::steady_clock::now();
    gs::Iteration iteration = session.begin_iteration();
    const auto begun = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begun < std::chrono::milliseconds(20))
      for (uint64_t i = 0; i < kBytes / 8; i += 512) words[i] += i;
    const auto middle = std::chrono::steady_clock::now();
    iteration.end();
    const std::chrono::duration<double> boundary =
        std::chrono::steady_clock::now() - middle + (begun - start);
    boundaries_s += boundary.count();
    if (session.info().promised_persistent_bytes != before) moves_s += boundary.count();
    work_s += std::chrono::duration<double>(middle - begun).count();
  }
  state.counters["lost_percent"] = 100 * boundaries_s / (boundaries_s + work_s);
  state.counters["moving_percent"] = 100 * moves_s / (boundaries_s + work_s);
  state.counters["cycles"] = static_cast<double>(cycles);
}
BENCHMARK(BM_job_that_shrinks_and_grows)
    ->Arg(1)
    ->Arg(0)
    ->UseRealTime()
    ->Iterations(4500)
    ->Unit(benchmark::kMillisecond);

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
