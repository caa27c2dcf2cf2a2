// Replays a trace through one path, for callgrind to count its instructions: counts do not depend on the machine or its
// load, so they settle differences that times on a busy machine do not. count_paths.py runs it for every path and trace.
//
//   count_paths PATH TRACE REPLAYS
//     PATH: offset_allocator, vma (with GPUSHARE_PEER_ALLOCATORS), float_bins, lane, planned, framework, model, heap, bulk
//
// Instrumentation is on during the replays alone: valgrind --tool=callgrind --instr-atstart=no. A replay of a lane is a whole
// iteration, its begin and end included. The device has virtual time, so that a plan is solved before the replays begin.
//
// SPDX-License-Identifier: Apache-2.0
#include <valgrind/callgrind.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
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
using Replay = std::function<void()>;

void must(int32_t status) {
  if (status == GPUSHARE_OK) return;
  std::fprintf(stderr, "%s\n", gpushare_last_error_message());
  std::exit(1);
}

void count(long replays, const Replay& replay) {
  for (int warm = 0; warm < 3; ++warm) replay();
  CALLGRIND_START_INSTRUMENTATION;
  for (long i = 0; i < replays; ++i) replay();
  CALLGRIND_STOP_INSTRUMENTATION;
}

template <class Allocator>
void count_alone(const memory::Trace& trace, long replays) {
  Allocator allocator(2 * trace.peak_live_bytes, 2 * trace.block_count + 16);
  std::vector<decltype(allocator.allocate(0u, uint64_t{1}))> blocks(trace.block_count);
  count(replays, [&] {
    for (const memory::TraceOp& op : trace.ops) {
      if (op.is_free)
        allocator.free(blocks[op.block]);
      else
        blocks[op.block] = allocator.allocate(op.block, op.size_bytes);
    }
  });
}

uint64_t room_for(const memory::Trace& trace) {
  return static_cast<uint64_t>(1.3 * static_cast<double>(trace.peak_live_bytes)) + (8 << 20);
}

void count_heap(const memory::Trace& trace, long replays) {
  gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
  params.capacity_bytes = room_for(trace);
  gpushare_heap heap = nullptr;
  must(gpushare_heap_create(&params, &heap));
  std::vector<uint64_t> offsets(trace.block_count);
  count(replays, [&] {
    for (const memory::TraceOp& op : trace.ops)
      must(op.is_free ? gpushare_heap_free(heap, offsets[op.block])
                      : gpushare_heap_alloc(heap, op.size_bytes, &offsets[op.block]));
  });
  must(gpushare_heap_release(heap));
}

// A session and its blocks, by the ways that it has.
class Job {
 public:
  Job(const memory::Trace& trace, bool plan) : trace_(trace), addresses_(trace.block_count) {
    const uint64_t room = room_for(trace);
    const std::string device = "sim?data=0&total_bytes=" + std::to_string(2 * room + (uint64_t{1} << 30));
    gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
    params.device = device.c_str();
    must(gpushare_runtime_open(&params, &runtime_));
    gpushare_session_params need = GPUSHARE_SESSION_PARAMS_INIT;
    need.persistent_bytes = need.ephemeral_bytes = room;
    need.plan_iterations = plan ? 1 : 0;
    must(gpushare_session_open(runtime_, &need, &session_));
    const gpushare_allocator_params options = GPUSHARE_ALLOCATOR_PARAMS_INIT;
    must(gpushare_allocator_create(runtime_, &options, &allocator_));
    group();
  }
  ~Job() {
    must(gpushare_allocator_release(allocator_));
    must(gpushare_session_close(session_));
    must(gpushare_runtime_close(runtime_));
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  bool is_planned() const {
    gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
    must(gpushare_session_get_info(session_, &info));
    return info.planned_iterations > 0;
  }
  void lane() {
    begin();
    for (const memory::TraceOp& op : trace_.ops)
      must(op.is_free ? gpushare_memory_free(runtime_, addresses_[op.block])
                      : gpushare_iteration_alloc(iteration_, op.size_bytes, 0, &addresses_[op.block]));
    must(gpushare_iteration_end(iteration_));
  }
  void framework() {
    begin();
    gpushare_stream stream = nullptr;
    void* native = nullptr;
    must(gpushare_iteration_get_stream(iteration_, &stream));
    must(gpushare_stream_get_native(stream, &native));
    for (const memory::TraceOp& op : trace_.ops)
      must(op.is_free
               ? gpushare_allocator_free(allocator_, addresses_[op.block], native)
               : gpushare_allocator_alloc(allocator_, op.size_bytes, 0, native, &addresses_[op.block]));
    must(gpushare_allocator_end_iteration(allocator_, iteration_));
  }
  void model() {
    for (const memory::TraceOp& op : trace_.ops)
      must(op.is_free ? gpushare_memory_free(runtime_, addresses_[op.block])
                      : gpushare_session_alloc(session_, GPUSHARE_KIND_MODEL, op.size_bytes, 0,
                                               &addresses_[op.block]));
  }
  void bulk() {
    begin();
    for (const Call& call : calls_) {
      const size_t blocks = call.blocks.size();
      if (call.is_free) {
        for (size_t i = 0; i < blocks; ++i) together_[i] = addresses_[call.blocks[i]];
        must(gpushare_memory_free_many(runtime_, blocks, together_.data(), nullptr));
      } else {
        must(gpushare_iteration_alloc_many(iteration_, blocks, call.bytes.data(), 0, together_.data()));
        for (size_t i = 0; i < blocks; ++i) addresses_[call.blocks[i]] = together_[i];
      }
    }
    must(gpushare_iteration_end(iteration_));
  }

 private:
  // Neighbours in the trace that are all allocations, or all frees.
  struct Call {
    bool is_free = false;
    std::vector<uint32_t> blocks;
    std::vector<uint64_t> bytes;
  };
  void group() {
    for (const memory::TraceOp& op : trace_.ops) {
      if (calls_.empty() || calls_.back().is_free != op.is_free) calls_.push_back({op.is_free, {}, {}});
      calls_.back().blocks.push_back(op.block);
      calls_.back().bytes.push_back(op.size_bytes);
      together_.resize(std::max(together_.size(), calls_.back().blocks.size()));
    }
  }
  void begin() { must(gpushare_iteration_begin(session_, GPUSHARE_NO_TIMEOUT, &iteration_)); }

  const memory::Trace& trace_;
  std::vector<gpushare_device_address> addresses_, together_;
  std::vector<Call> calls_;
  gpushare_runtime runtime_ = nullptr;
  gpushare_session session_ = nullptr;
  gpushare_allocator allocator_ = nullptr;
  gpushare_iteration iteration_ = nullptr;
};

bool count_path(const std::string& path, const memory::Trace& trace, long replays) {
  if (path == "float_bins") return count_alone<bench::FloatBins>(trace, replays), true;
#if GPUSHARE_WITH_PEERS
  if (path == "offset_allocator") return count_alone<bench::OffsetAllocatorPeer>(trace, replays), true;
  if (path == "vma") return count_alone<bench::VmaPeer<0>>(trace, replays), true;
#endif
  if (path == "heap") return count_heap(trace, replays), true;
  if (path != "lane" && path != "planned" && path != "framework" && path != "model" && path != "bulk")
    return false;
  Job job(trace, path == "planned");
  while (path == "planned" && !job.is_planned()) job.lane();
  count(replays, [&] {
    if (path == "framework") return job.framework();
    if (path == "model") return job.model();
    if (path == "bulk") return job.bulk();
    job.lane();
  });
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const long replays = argc == 4 ? std::strtol(argv[3], nullptr, 10) : 0;
  if (replays <= 0) {
    std::fprintf(stderr, "usage: count_paths PATH TRACE REPLAYS\n");
    return 2;
  }
  const auto loaded = memory::read_trace(argv[2]);
  if (!loaded.ok()) {
    std::fprintf(stderr, "%s\n", loaded.status().message().c_str());
    return 1;
  }
  if (!count_path(argv[1], loaded->trace, replays)) {
    std::fprintf(stderr, "there is no path '%s' here\n", argv[1]);
    return 2;
  }
  std::printf("%zu operations\n", loaded->trace.ops.size());
  return 0;
}
