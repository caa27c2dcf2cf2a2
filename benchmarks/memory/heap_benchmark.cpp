// The device-memory table: the block heap against its two references (plain float bins for speed, exact tree
// best fit for packing) and, as host context, against mimalloc and jemalloc. Ratios within one run count,
// seconds do not.
//
//   memory_heap_benchmark                                  everything
//   memory_heap_benchmark --benchmark_filter=pangu         one trace
//
// Counters: p99_ns (allocations, each one's calm mean over replays), min_arena (smallest arena over peak live
// bytes).
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>
#include <dlfcn.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "base/dynamic_library.hpp"
#include "memory/allocators.hpp"
#include "memory/plan.hpp"
#include "memory/replay.hpp"
#include "memory/trace_io.hpp"
#if GPUSHARE_WITH_PEERS
#include "memory/peers.hpp"
#endif

namespace {

using namespace gpushare;

// Traces of the shared data folder; absent: one made here with the same shape (few sizes, nested lifetimes).
const memory::Trace& trace_named(const std::string& name) {
  static std::map<std::string, memory::Trace> traces;
  const auto found = traces.find(name);
  if (found != traces.end()) return found->second;
  auto loaded = memory::read_trace(std::string(GPUSHARE_SHARED_DATA) + "/alloc/" + name + ".csv");
  if (loaded.ok()) return traces[name] = std::move(loaded->trace);
  std::fprintf(stderr, "%s: not found; a made-up trace stands in for it\n", name.c_str());
  memory::TraceBuilder builder;
  uint64_t state = 88172645463325252ull;
  std::vector<uint32_t> live;
  for (int step = 0; step < 40000; ++step) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    if (live.size() < 16 || (state % 100 < 50 && live.size() < 1000)) {
      live.push_back(builder.allocate(uint64_t{256} << (state >> 32) % 18));
    } else {
      const size_t pick = live.size() - 1 - (state >> 32) % std::min<size_t>(live.size(), 16);
      builder.free(live[pick]);
      live[pick] = live.back();
      live.pop_back();
    }
  }
  for (const uint32_t block : live)
    builder.free(block);  // the references have nothing that ends an iteration
  return traces[name] = builder.take();
}

template <class Allocator>
void replay_trace(benchmark::State& state, Allocator& allocator, const memory::Trace& trace) {
  std::vector<decltype(allocator.allocate(0u, uint64_t{1}))> handles(trace.block_count);
  for (auto _ : state) {
    for (const memory::TraceOp& op : trace.ops) {
      if (op.is_free)
        allocator.free(handles[op.block]);
      else
        handles[op.block] = allocator.allocate(op.block, op.size_bytes);
    }
    allocator.finish();
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(trace.ops.size()));
  state.counters["ns_per_op"] =
      benchmark::Counter(static_cast<double>(trace.ops.size()) * 1e-9,
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

template <class Allocator>
void BM_Trace(benchmark::State& state, const std::string& name) {
  const memory::Trace& trace = trace_named(name);
  Allocator allocator(2 * trace.peak_live_bytes, 2 * trace.block_count + 16);
  replay_trace(state, allocator, trace);
  state.counters["p99_ns"] = memory::time_trace(trace, allocator, 100'000'000).alloc_p99_ns;
  state.counters["min_arena"] = bench::min_arena<Allocator>(trace);
}

void BM_Planned(benchmark::State& state, const std::string& name) {
  const memory::Trace& trace = trace_named(name);
  memory::PlanRecorder recorder;
  for (const memory::TraceOp& op : trace.ops) {
    if (op.is_free)
      recorder.free(op.block);
    else
      recorder.allocate(op.size_bytes);
  }
  const std::shared_ptr<const memory::Plan> plan = *recorder.finish();
  memory::Heap heap = bench::make_heap(plan->arena_bytes, 1u << 16, true);
  struct Planned {
    memory::PlanReplay replay;
    std::shared_ptr<const memory::Plan> plan;
    uint64_t allocate(uint32_t, uint64_t bytes) { return replay.allocate(bytes).offset_bytes; }
    void free(uint64_t offset) { replay.free_at(offset); }
    void finish() {
      replay.end();
      replay.begin(plan);
    }
  } planned{memory::PlanReplay(&heap), plan};
  planned.replay.begin(plan);
  replay_trace(state, planned, trace);
  if (planned.replay.deviations() != 0) state.SkipWithError("the replay left its plan");
  state.counters["p99_ns"] = memory::time_trace(trace, planned, 100'000'000).alloc_p99_ns;
  state.counters["min_arena"] =
      static_cast<double>(plan->arena_bytes) / static_cast<double>(trace.peak_live_bytes);
}

// range(0) random blocks live; each iteration frees one at random and allocates one. Read the ratio of a row to the
// same allocator's row with 1,000.
template <class Allocator>
void BM_RandomLive(benchmark::State& state) {
  const auto live = static_cast<uint32_t>(state.range(0));
  uint64_t random = 88172645463325252ull;
  const auto next = [&] {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random;
  };
  // Log-uniform from 512 bytes to 1 MiB, drawn beforehand so that only the allocator is timed.
  std::vector<uint32_t> sizes(1 << 16), victims(1 << 16);
  for (uint32_t& size : sizes) size = static_cast<uint32_t>((512ull << next() % 11) + next() % 512);
  for (uint32_t& victim : victims) victim = static_cast<uint32_t>(next() % live);
  Allocator allocator(uint64_t{live} * (1u << 19), 4 * live + 1024);
  std::vector<decltype(allocator.allocate(0u, uint64_t{1}))> handles(live);
  for (uint32_t k = 0; k < live; ++k) handles[k] = allocator.allocate(k, sizes[k & 0xFFFF]);
  uint32_t step = 0;
  const auto churn = [&] {
    const uint32_t victim = victims[step & 0xFFFF];
    allocator.free(handles[victim]);
    handles[victim] = allocator.allocate(victim, sizes[(step * 7 + (step >> 16)) & 0xFFFF]);
    ++step;
  };
  for (uint32_t k = 0; k < 4 * live; ++k) churn();  // the steady state, not the fresh heap
  for (auto _ : state) churn();
  state.counters["ns_per_op"] =
      benchmark::Counter(2e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

// General-purpose host allocators: context, not a bar. They manage the same sizes up to 1 MiB but touch their
// memory and have no arena. mimalloc is loaded on the side, so that it replaces nobody's malloc. jemalloc cannot
// be (its thread-local storage must be there from the start), so a child process that preloads it runs its rows.
struct HostFunctions {
  void* (*malloc)(size_t) = nullptr;
  void (*free)(void*) = nullptr;
};
HostFunctions host_functions;

class HostAllocator {
 public:
  HostAllocator(uint64_t, uint32_t) {}
  void* allocate(uint32_t, uint64_t bytes) { return host_functions.malloc(bytes); }
  static bool ok(void* pointer) { return pointer != nullptr; }
  void free(void* pointer) { host_functions.free(pointer); }
  void finish() {}
};

constexpr const char* kJemalloc = "libjemalloc.so.2";
constexpr const char* kChildVariable =
    "GPUSHARE_BENCHMARK_OF_MALLOC";  // set in the child: the library's name

template <class Allocator>
void register_all(const std::string& allocator) {
  for (const char* trace : {"pangu_2.6B", "iopddl_S_1", "resnet50"})
    benchmark::RegisterBenchmark((allocator + "/" + trace).c_str(),
                                 [trace](benchmark::State& state) { BM_Trace<Allocator>(state, trace); });
  benchmark::RegisterBenchmark((allocator + "/random_live").c_str(), BM_RandomLive<Allocator>)
      ->Arg(1000)
      ->Arg(100000);
}

void register_host(const char* name) {
  benchmark::RegisterBenchmark((std::string(name) + "/random_live").c_str(), BM_RandomLive<HostAllocator>)
      ->Arg(1000)
      ->Arg(100000);
}

void register_mimalloc() {
  static auto library = base::DynamicLibrary::open("libmimalloc.so.2");
  if (!library.ok()) {
    std::fprintf(stderr, "mimalloc is left out: %s\n", library.status().message().c_str());
    return;
  }
  host_functions.malloc = reinterpret_cast<void* (*)(size_t)>(library->find("mi_malloc"));
  host_functions.free = reinterpret_cast<void (*)(void*)>(library->find("mi_free"));
  register_host("mimalloc");
}

// In the child: this process's malloc is jemalloc's, if the dynamic loader found it.
bool register_jemalloc() {
  if (dlsym(RTLD_DEFAULT, "mallctl") == nullptr) {
    std::fprintf(stderr, "jemalloc is left out: %s could not be preloaded\n", kJemalloc);
    return false;
  }
  host_functions = {std::malloc, std::free};
  register_host("jemalloc");
  return true;
}

int run_child_with(const char* library, char** argv) {
  std::fflush(nullptr);
  std::vector<char*> arguments;
  for (char** argument = argv; *argument != nullptr; ++argument)  // a file is this process's
    if (std::strncmp(*argument, "--benchmark_out", 15) != 0) arguments.push_back(*argument);
  arguments.push_back(nullptr);
  const std::string preload = std::string("LD_PRELOAD=") + library;
  const std::string mark = std::string(kChildVariable) + "=" + library;
  std::vector<char*> environment{const_cast<char*>(preload.c_str()), const_cast<char*>(mark.c_str())};
  for (char** variable = environ; *variable != nullptr; ++variable)
    if (std::strncmp(*variable, "LD_PRELOAD=", 11) != 0) environment.push_back(*variable);
  environment.push_back(nullptr);
  pid_t child = 0;
  int status = 0;
  if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments.data(), environment.data()) != 0)
    return 1;
  if (waitpid(child, &status, 0) != child) return 1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_child = std::getenv(kChildVariable) != nullptr;
  const std::vector<char*> arguments(argv, argv + argc + 1);  // before the library takes its own out
  if (is_child) {
    if (!register_jemalloc()) return 0;
  } else {
    register_all<bench::FloatBins>("float_bins");
    register_all<bench::OurHeap>("heap");
    register_all<bench::OurIndexedHeap>("heap_indexed");
    register_all<bench::TreeBestFit>("tree_best_fit");
#if GPUSHARE_WITH_PEERS
    register_all<bench::OffsetAllocatorPeer>("offset_allocator");
    register_all<bench::VmaPeer<0>>("vma");
#endif
    for (const char* trace : {"pangu_2.6B", "iopddl_S_1", "resnet50"})
      benchmark::RegisterBenchmark((std::string("planned/") + trace).c_str(),
                                   [trace](benchmark::State& state) { BM_Planned(state, trace); });
    register_mimalloc();
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return is_child ? 0 : run_child_with(kJemalloc, const_cast<char**>(arguments.data()));
}
