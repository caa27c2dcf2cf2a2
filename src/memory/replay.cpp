// SPDX-License-Identifier: Apache-2.0
#include "memory/replay.hpp"

#include <memory>
#include <utility>

#include "memory/heap.hpp"
#include "memory/plan.hpp"

namespace gpushare::memory {
namespace {

base::Result<Heap> make_heap(const Trace& trace, uint64_t capacity_bytes, uint64_t granule_bytes,
                             bool index_offsets) {
  HeapOptions options;
  options.capacity_bytes = capacity_bytes;
  options.granule_bytes = granule_bytes;
  const uint32_t most_blocks = index_offsets ? 1u << 20 : 1u << 29;
  options.max_blocks = std::max<uint32_t>(4096, 2 * std::min(trace.block_count, most_blocks));
  options.index_offsets = index_offsets;
  return Heap::create(options);
}

// A heap, or a lane if told which blocks are persistent.
class HeapReplay {
 public:
  HeapReplay(Heap* heap, const std::vector<bool>* persistent) : heap_(heap), persistent_(persistent) {}
  BlockHandle allocate(uint32_t block, uint64_t bytes) {
    const bool high = persistent_ != nullptr && (*persistent_)[block];
    return heap_->allocate(bytes, 0, block, high ? HeapSide::kHigh : HeapSide::kLow);
  }
  void free(BlockHandle handle) { heap_->free(handle); }
  void finish() {
    if (heap_->live_blocks() != 0) heap_->reset();
  }

 private:
  Heap* heap_;
  const std::vector<bool>* persistent_;
};

class PlannedReplay {
 public:
  PlannedReplay(Heap* heap, std::shared_ptr<const Plan> plan) : replay_(heap), plan_(std::move(plan)) {
    replay_.begin(plan_);
  }
  uint64_t allocate(uint32_t block, uint64_t bytes) { return replay_.allocate(bytes, 0, block).offset_bytes; }
  void free(uint64_t offset) { replay_.free_at(offset); }
  void finish() {
    left_plan_ = left_plan_ || !replay_.end();
    replay_.begin(plan_);
  }
  bool left_plan() const { return left_plan_ || !replay_.on_plan(); }

 private:
  PlanReplay replay_;
  std::shared_ptr<const Plan> plan_;
  bool left_plan_ = false;
};

bool fits(const Trace& trace, HeapReplay* allocator, std::vector<BlockHandle>* handles) {
  for (const TraceOp& op : trace.ops) {
    BlockHandle& handle = (*handles)[op.block];
    if (op.is_free) {
      allocator->free(handle);
    } else {
      handle = allocator->allocate(op.block, op.size_bytes);
      if (!handle) return false;
    }
  }
  return true;
}

base::Result<ReplayResult> replay_heap(const Trace& trace, bool lane, const ReplayOptions& options) {
  const uint64_t granule = options.granule_bytes;
  const std::vector<bool>* persistent = lane && !trace.persistent.empty() ? &trace.persistent : nullptr;
  GPUSHARE_ASSIGN_OR_RETURN(Heap heap, make_heap(trace, 0, granule, false));
  std::vector<BlockHandle> handles(trace.block_count);
  const uint64_t granules = smallest_capacity(trace.peak_live_bytes / granule, [&](uint64_t capacity) {
    heap.reset();
    // Above 2^42 granules there is no heap; such a trace is refused by replay().
    if (heap.resize(capacity * granule) != HeapStatus::kOk) return true;
    HeapReplay allocator(&heap, persistent);
    return fits(trace, &allocator, &handles);
  });
  ReplayResult result;
  result.min_arena_bytes = granules * granule;
  if (options.time_ns != 0) {
    // Timed with the room of a lane that is not at its limit, as an allocator runs.
    GPUSHARE_ASSIGN_OR_RETURN(Heap roomy, make_heap(trace, 2 * result.min_arena_bytes, granule, false));
    HeapReplay allocator(&roomy, persistent);
    const Timing timing = time_trace(trace, allocator, options.time_ns);
    result.ns_per_op = timing.ns_per_op;
    result.p99_ns = timing.alloc_p99_ns;
  }
  return result;
}

base::Result<ReplayResult> replay_planned(const Trace& trace, const ReplayOptions& options) {
  const uint64_t granule = options.granule_bytes;
  // The online run is the recording; what its heap did competes with the solver.
  GPUSHARE_ASSIGN_OR_RETURN(const ReplayResult online, replay_heap(trace, false, {granule, 0, 0}));
  GPUSHARE_ASSIGN_OR_RETURN(Heap heap, make_heap(trace, online.min_arena_bytes, granule, true));
  PlanRecorder recorder(granule);
  std::vector<BlockHandle> handles(trace.block_count);
  for (const TraceOp& op : trace.ops) {
    if (op.is_free) {
      heap.free(handles[op.block]);
      recorder.free(op.block);
    } else {
      handles[op.block] = heap.allocate(op.size_bytes);
      if (!handles[op.block])
        return base::Status(GPUSHARE_INTERNAL, "the smallest arena found does not serve the trace");
      recorder.allocate(op.size_bytes, 0, handles[op.block].offset_bytes);
    }
  }
  const uint64_t start = base::host_now_ns();
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<const Plan> plan,
                            recorder.finish(options.plan_work_limit, options.exact_work_limit));
  ReplayResult result;
  result.solve_s = static_cast<double>(base::host_now_ns() - start) * 1e-9;
  result.method = plan->method;
  result.min_arena_bytes = plan->arena_bytes;
  if (options.time_ns != 0) {
    GPUSHARE_ASSIGN_OR_RETURN(Heap exact, make_heap(trace, plan->arena_bytes, granule, true));
    PlannedReplay allocator(&exact, plan);
    const Timing timing = time_trace(trace, allocator, options.time_ns);
    if (allocator.left_plan()) return base::Status(GPUSHARE_INTERNAL, "a planned replay left its plan");
    result.ns_per_op = timing.ns_per_op;
    result.p99_ns = timing.alloc_p99_ns;
  }
  return result;
}

}  // namespace

base::Result<ReplayAllocator> parse_replay_allocator(std::string_view name) {
  for (const ReplayAllocator allocator :
       {ReplayAllocator::kHeap, ReplayAllocator::kLane, ReplayAllocator::kPlanned})
    if (name == name_of(allocator)) return allocator;
  return base::Status(GPUSHARE_INVALID_ARGUMENT,
                      "unknown allocator '" + std::string(name) + "'; allowed: heap, lane, planned");
}

const char* name_of(ReplayAllocator allocator) {
  switch (allocator) {
    case ReplayAllocator::kHeap:
      return "heap";
    case ReplayAllocator::kLane:
      return "lane";
    case ReplayAllocator::kPlanned:
      return "planned";
  }
  return "unknown";
}

base::Result<ReplayResult> replay(const Trace& trace, ReplayAllocator allocator,
                                  const ReplayOptions& options) {
  if (trace.ops.empty()) return base::Status(GPUSHARE_INVALID_ARGUMENT, "the trace has no operations");
  if (options.granule_bytes == 0 || (options.granule_bytes & (options.granule_bytes - 1)) != 0)
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "the granule must be a power of two");
  if (trace.peak_live_bytes / options.granule_bytes + trace.block_count >= (uint64_t{1} << 41))
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("the trace's peak of %llu bytes is above 2^41 granules",
                                     static_cast<unsigned long long>(trace.peak_live_bytes)));
  auto result = allocator == ReplayAllocator::kPlanned
                    ? replay_planned(trace, options)
                    : replay_heap(trace, allocator == ReplayAllocator::kLane, options);
  if (!result.ok()) return result;
  result->operations = trace.ops.size();
  result->peak_live_bytes = trace.peak_live_bytes;
  result->min_arena_ratio =
      static_cast<double>(result->min_arena_bytes) / static_cast<double>(trace.peak_live_bytes);
  return result;
}

double Ticks::ns_per_tick() {
#if defined(__x86_64__) || defined(__i386__)
  static const double value = [] {
    const uint64_t ns = base::host_now_ns();
    const uint64_t ticks = now();
    while (base::host_now_ns() - ns < 20'000'000) {
    }
    const uint64_t ns_passed = base::host_now_ns() - ns;
    return static_cast<double>(ns_passed) / static_cast<double>(now() - ticks);
  }();
  return value;
#else
  return 1.0;
#endif
}

double Ticks::overhead() {
  static const double value = [] {
    std::vector<double> samples(10'000);
    for (double& sample : samples) {
      const uint64_t start = now();
      sample = static_cast<double>(now() - start);
    }
    return calm_mean(samples);
  }();
  return value;
}

}  // namespace gpushare::memory
