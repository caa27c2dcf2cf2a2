// The traces of heap_benchmark.cpp through the C ABI, as a framework reaches a lane: an iteration a replay, blocks from
// gpushare_iteration_alloc, freed by gpushare_memory_free. Float bins beside it, in the same run, are the yardstick;
// `planned` is the same session with plan_iterations, once its plan is in use; `bulk` allocates and frees neighbours in the
// trace by one call of bulk.h. `framework` is the same session through gpushare_allocator_*, named by the lane's native
// stream; `model` has the trace as persistent blocks (gpushare_session_alloc), `heap` in a heap without a device
// (gpushare_heap_*). begin_end is an empty iteration, which every replay of a lane has too. model_threads: pairs of one
// persistent block, each thread with sessions of its own in one runtime, by turns.
// Counters: ns_per_op; p99_ns (allocations, each one's calm mean over replays), but for bulk.
//
//   memory_c_abi_benchmark --benchmark_min_time=0.1 --benchmark_repetitions=5 --benchmark_enable_random_interleaving=true
//
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "gpushare/gpushare.h"
#include "memory/allocators.hpp"
#include "memory/trace_io.hpp"
#if GPUSHARE_WITH_PEERS
#include "memory/peers.hpp"
#endif

namespace {

using namespace gpushare;

constexpr uint64_t kSinglesNs = 200'000'000;  // for p99_ns

// Empty where the shared data folder is not there.
memory::Trace trace_named(const std::string& name) {
  auto loaded = memory::read_trace(std::string(GPUSHARE_SHARED_DATA) + "/alloc/" + name + ".csv");
  return loaded.ok() ? std::move(loaded->trace) : memory::Trace();
}

// `p99_ns`: below 0 where single allocations are not timed.
void report(benchmark::State& state, const memory::Trace& trace, double p99_ns) {
  if (p99_ns >= 0) state.counters["p99_ns"] = p99_ns;
  state.counters["ns_per_op"] =
      benchmark::Counter(static_cast<double>(trace.ops.size()) * 1e-9,
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

template <class Allocator>
void BM_Alone(benchmark::State& state, const std::string& name) {
  const memory::Trace trace = trace_named(name);
  if (trace.ops.empty()) return state.SkipWithError("the trace is not there");
  Allocator allocator(2 * trace.peak_live_bytes, 2 * trace.block_count + 16);
  std::vector<decltype(allocator.allocate(0u, uint64_t{1}))> blocks(trace.block_count);
  for (auto _ : state) {
    for (const memory::TraceOp& op : trace.ops) {
      if (op.is_free)
        allocator.free(blocks[op.block]);
      else
        blocks[op.block] = allocator.allocate(op.block, op.size_bytes);
    }
  }
  report(state, trace, memory::time_trace(trace, allocator, kSinglesNs).alloc_p99_ns);
}

// A runtime with one session, on a device of no real memory.
struct Job {
  gpushare_runtime runtime = nullptr;
  gpushare_session session = nullptr;
  Job(uint64_t ephemeral_bytes, bool plan, uint64_t persistent_bytes = 1 << 20) {
    gpushare_runtime_params runtime_params = GPUSHARE_RUNTIME_PARAMS_INIT;
    const uint64_t total_bytes = persistent_bytes + ephemeral_bytes + (uint64_t{1} << 30);
    const std::string device = "host?total_bytes=" + std::to_string(total_bytes);
    runtime_params.device = device.c_str();
    runtime_params.capacity_bytes = persistent_bytes + ephemeral_bytes + (uint64_t{256} << 20);
    if (gpushare_runtime_open(&runtime_params, &runtime) != GPUSHARE_OK) return;
    gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
    params.persistent_bytes = persistent_bytes;
    params.ephemeral_bytes = ephemeral_bytes;
    params.plan_iterations = plan ? 1 : 0;
    (void)gpushare_session_open(runtime, &params, &session);
  }
  ~Job() {
    if (session != nullptr) (void)gpushare_session_close(session);
    if (runtime != nullptr) (void)gpushare_runtime_close(runtime);
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  uint64_t planned_iterations() const {
    gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
    return gpushare_session_get_info(session, &info) == GPUSHARE_OK ? info.planned_iterations : 0;
  }
  // False if a call failed.
  bool replay(const memory::Trace& trace, std::vector<gpushare_device_address>& addresses) const {
    gpushare_iteration iteration = nullptr;
    if (gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration) != GPUSHARE_OK) return false;
    int32_t status = GPUSHARE_OK;
    for (const memory::TraceOp& op : trace.ops)
      status |= op.is_free ? gpushare_memory_free(runtime, addresses[op.block])
                           : gpushare_iteration_alloc(iteration, op.size_bytes, 0, &addresses[op.block]);
    return gpushare_iteration_end(iteration) == GPUSHARE_OK && status == GPUSHARE_OK;
  }
};

// Blocks of an iteration, a replay each, in the shape that memory::time_trace() takes.
class LaneBlocks {
 public:
  explicit LaneBlocks(const Job& job) : job_(job) { begin(); }
  ~LaneBlocks() { note(gpushare_iteration_end(iteration_)); }
  LaneBlocks(const LaneBlocks&) = delete;
  LaneBlocks& operator=(const LaneBlocks&) = delete;
  gpushare_device_address allocate(uint32_t, uint64_t bytes) {
    gpushare_device_address address = 0;
    note(gpushare_iteration_alloc(iteration_, bytes, 0, &address));
    return address;
  }
  void free(gpushare_device_address address) { note(gpushare_memory_free(job_.runtime, address)); }
  void finish() {
    note(gpushare_iteration_end(iteration_));
    begin();
  }
  bool good() const { return status_ == GPUSHARE_OK; }

 private:
  void begin() { note(gpushare_iteration_begin(job_.session, GPUSHARE_NO_TIMEOUT, &iteration_)); }
  void note(int32_t status) { status_ |= status; }

  const Job& job_;
  gpushare_iteration iteration_ = nullptr;
  int32_t status_ = GPUSHARE_OK;
};

// Neighbours in a trace that are all allocations, or all frees: one call of bulk.h each.
struct BulkCall {
  bool is_free = false;
  std::vector<uint32_t> blocks;
  std::vector<uint64_t> bytes;
};

std::vector<BulkCall> bulk_calls(const memory::Trace& trace) {
  std::vector<BulkCall> calls;
  for (const memory::TraceOp& op : trace.ops) {
    if (calls.empty() || calls.back().is_free != op.is_free) calls.push_back({op.is_free, {}, {}});
    calls.back().blocks.push_back(op.block);
    calls.back().bytes.push_back(op.size_bytes);
  }
  return calls;
}

void BM_Bulk(benchmark::State& state, const std::string& name) {
  const memory::Trace trace = trace_named(name);
  if (trace.ops.empty()) return state.SkipWithError("the trace is not there");
  const Job job(static_cast<uint64_t>(1.3 * static_cast<double>(trace.peak_live_bytes)) + (8 << 20), false);
  if (job.session == nullptr) return state.SkipWithError(gpushare_last_error_message());
  const std::vector<BulkCall> calls = bulk_calls(trace);
  std::vector<gpushare_device_address> addresses(trace.block_count), together(trace.block_count);
  int32_t status = GPUSHARE_OK;
  for (auto _ : state) {
    gpushare_iteration iteration = nullptr;
    status |= gpushare_iteration_begin(job.session, GPUSHARE_NO_TIMEOUT, &iteration);
    for (const BulkCall& call : calls) {
      const size_t count = call.blocks.size();
      if (call.is_free) {
        for (size_t i = 0; i < count; ++i) together[i] = addresses[call.blocks[i]];
        status |= gpushare_memory_free_many(job.runtime, count, together.data(), nullptr);
      } else {
        status |= gpushare_iteration_alloc_many(iteration, count, call.bytes.data(), 0, together.data());
        for (size_t i = 0; i < count; ++i) addresses[call.blocks[i]] = together[i];
      }
    }
    status |= gpushare_iteration_end(iteration);
  }
  if (status != GPUSHARE_OK) return state.SkipWithError(gpushare_last_error_message());
  state.counters["blocks_per_call"] =
      static_cast<double>(trace.ops.size()) / static_cast<double>(calls.size());
  report(state, trace, -1);
}

// `room`: the lane's size over the peak of live bytes.
void BM_Lane(benchmark::State& state, const std::string& name, bool plan, double room) {
  const memory::Trace trace = name.empty() ? memory::Trace() : trace_named(name);
  if (!name.empty() && trace.ops.empty()) return state.SkipWithError("the trace is not there");
  const Job job(static_cast<uint64_t>(room * static_cast<double>(trace.peak_live_bytes)) + (8 << 20), plan);
  if (job.session == nullptr) return state.SkipWithError(gpushare_last_error_message());
  std::vector<gpushare_device_address> addresses(trace.block_count);
  while (plan && job.planned_iterations() == 0)
    if (!job.replay(trace, addresses)) return state.SkipWithError(gpushare_last_error_message());
  for (auto _ : state)
    if (!job.replay(trace, addresses)) return state.SkipWithError(gpushare_last_error_message());
  if (trace.ops.empty()) return;
  LaneBlocks blocks(job);
  const double p99_ns = memory::time_trace(trace, blocks, kSinglesNs).alloc_p99_ns;
  if (!blocks.good()) return state.SkipWithError(gpushare_last_error_message());
  report(state, trace, p99_ns);
}

// 1.3 of the trace's peak and a little.
uint64_t room_for(const memory::Trace& trace) {
  return static_cast<uint64_t>(1.3 * static_cast<double>(trace.peak_live_bytes)) + (8 << 20);
}

void BM_Framework(benchmark::State& state, const std::string& name) {
  const memory::Trace trace = trace_named(name);
  if (trace.ops.empty()) return state.SkipWithError("the trace is not there");
  const Job job(room_for(trace), false);
  gpushare_allocator allocator = nullptr;
  const gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
  if (job.session == nullptr || gpushare_allocator_create(job.runtime, &params, &allocator) != GPUSHARE_OK)
    return state.SkipWithError(gpushare_last_error_message());
  std::vector<gpushare_device_address> addresses(trace.block_count);
  int32_t status = GPUSHARE_OK;
  for (auto _ : state) {
    gpushare_iteration iteration = nullptr;
    gpushare_stream stream = nullptr;
    void* native = nullptr;
    status |= gpushare_iteration_begin(job.session, GPUSHARE_NO_TIMEOUT, &iteration);
    status |= gpushare_iteration_get_stream(iteration, &stream);
    status |= gpushare_stream_get_native(stream, &native);
    for (const memory::TraceOp& op : trace.ops)
      status |= op.is_free
                    ? gpushare_allocator_free(allocator, addresses[op.block], native)
                    : gpushare_allocator_alloc(allocator, op.size_bytes, 0, native, &addresses[op.block]);
    status |= gpushare_allocator_end_iteration(allocator, iteration);
  }
  (void)gpushare_allocator_release(allocator);
  if (status != GPUSHARE_OK) return state.SkipWithError(gpushare_last_error_message());
  report(state, trace, -1);
}

void BM_Model(benchmark::State& state, const std::string& name) {
  const memory::Trace trace = trace_named(name);
  if (trace.ops.empty()) return state.SkipWithError("the trace is not there");
  const Job job(1 << 20, false, room_for(trace));
  if (job.session == nullptr) return state.SkipWithError(gpushare_last_error_message());
  std::vector<gpushare_device_address> addresses(trace.block_count);
  int32_t status = GPUSHARE_OK;
  for (auto _ : state)
    for (const memory::TraceOp& op : trace.ops)
      status |= op.is_free ? gpushare_memory_free(job.runtime, addresses[op.block])
                           : gpushare_session_alloc(job.session, GPUSHARE_KIND_MODEL, op.size_bytes, 0,
                                                    &addresses[op.block]);
  if (status != GPUSHARE_OK) return state.SkipWithError(gpushare_last_error_message());
  report(state, trace, -1);
}

void BM_Heap(benchmark::State& state, const std::string& name) {
  const memory::Trace trace = trace_named(name);
  if (trace.ops.empty()) return state.SkipWithError("the trace is not there");
  gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
  params.capacity_bytes = room_for(trace);
  gpushare_heap heap = nullptr;
  int32_t status = gpushare_heap_create(&params, &heap);
  std::vector<uint64_t> offsets(trace.block_count);
  for (auto _ : state)
    for (const memory::TraceOp& op : trace.ops)
      status |= op.is_free ? gpushare_heap_free(heap, offsets[op.block])
                           : gpushare_heap_alloc(heap, op.size_bytes, &offsets[op.block]);
  (void)gpushare_heap_release(heap);
  if (status != GPUSHARE_OK) return state.SkipWithError(gpushare_last_error_message());
  report(state, trace, -1);
}

// `sessions`: of each thread, which has a block of each of them by turns.
void BM_ModelThreads(benchmark::State& state, size_t sessions) {
  static const Job shared(1 << 20, false, uint64_t{64} << 20);
  std::vector<gpushare_session> own(sessions);
  gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
  params.persistent_bytes = 1 << 20;
  params.ephemeral_bytes = 1 << 20;
  int32_t status = GPUSHARE_OK;
  for (gpushare_session& each : own) status |= gpushare_session_open(shared.runtime, &params, &each);
  size_t turn = 0;
  for (auto _ : state) {
    gpushare_device_address block = 0;
    status |= gpushare_session_alloc(own[turn], GPUSHARE_KIND_MODEL, 4096, 0, &block);
    status |= gpushare_memory_free(shared.runtime, block);
    turn = turn + 1 == sessions ? 0 : turn + 1;
  }
  for (const gpushare_session each : own) status |= gpushare_session_close(each);
  if (status != GPUSHARE_OK) state.SkipWithError("a call failed");
  state.SetItemsProcessed(state.iterations() * 2);
}

}  // namespace

int main(int argc, char** argv) {
  for (const char* trace : {"pangu_2.6B", "iopddl_S_1", "resnet50"}) {
    const std::string name = trace;
    benchmark::RegisterBenchmark(("float_bins/" + name).c_str(), [name](benchmark::State& state) {
      BM_Alone<bench::FloatBins>(state, name);
    });
#if GPUSHARE_WITH_PEERS
    benchmark::RegisterBenchmark(("offset_allocator/" + name).c_str(), [name](benchmark::State& state) {
      BM_Alone<bench::OffsetAllocatorPeer>(state, name);
    });
    benchmark::RegisterBenchmark(("vma/" + name).c_str(), [name](benchmark::State& state) {
      BM_Alone<bench::VmaPeer<0>>(state, name);
    });
#endif
    for (const bool plan : {false, true})
      benchmark::RegisterBenchmark(
          ((plan ? "planned/" : "lane/") + name).c_str(),
          [name, plan](benchmark::State& state) { BM_Lane(state, name, plan, 1.3); });
    benchmark::RegisterBenchmark(("framework/" + name).c_str(),
                                 [name](benchmark::State& state) { BM_Framework(state, name); });
    benchmark::RegisterBenchmark(("model/" + name).c_str(),
                                 [name](benchmark::State& state) { BM_Model(state, name); });
    benchmark::RegisterBenchmark(("heap/" + name).c_str(),
                                 [name](benchmark::State& state) { BM_Heap(state, name); });
    benchmark::RegisterBenchmark(("bulk/" + name).c_str(),
                                 [name](benchmark::State& state) { BM_Bulk(state, name); });
  }
  benchmark::RegisterBenchmark("begin_end", [](benchmark::State& state) { BM_Lane(state, "", false, 0); });
  for (const size_t sessions : {1, 4})
    benchmark::RegisterBenchmark(("model_threads/" + std::to_string(sessions) + "_sessions").c_str(),
                                 [sessions](benchmark::State& state) { BM_ModelThreads(state, sessions); })
        ->Threads(1)
        ->Threads(2)
        ->UseRealTime();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
