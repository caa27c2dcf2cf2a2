// replay.hpp: measures allocators on traces: the engine of `gpushare replay` and of the benchmarks. For tools
// and tests (target gpushare_memory_tools).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/status.hpp"
#include "memory/trace.hpp"

#if defined(__x86_64__) || defined(__i386__)
#include <x86intrin.h>
#endif

namespace gpushare::memory {

// The allocators that a trace can be replayed on.
//   heap     one block heap; every block from the low end
//   lane     the same heap as a lane's: blocks that live through the whole trace (Trace::persistent) take the high end
//   planned  the placement solved for the trace, replayed in constant time
enum class ReplayAllocator { kHeap, kLane, kPlanned };
// Errors: INVALID_ARGUMENT naming the three.
base::Result<ReplayAllocator> parse_replay_allocator(std::string_view name);
const char* name_of(ReplayAllocator allocator);

struct ReplayOptions {
  uint64_t granule_bytes = 256;
  uint64_t plan_work_limit = 4'000'000'000;   // see PlacementOptions
  uint64_t exact_work_limit = 4'000'000'000;  // see PlacementOptions
  uint64_t time_ns = 300'000'000;             // roughly how long to time; 0: packing only
};

struct ReplayResult {
  double ns_per_op = 0;  // allocations and frees; median over replays of the whole trace
  double p99_ns = 0;     // 99th percentile over the trace's allocations of each one's calm_mean over replays
  uint64_t operations = 0;
  uint64_t peak_live_bytes = 0;  // sizes as asked for
  // heap, lane: a capacity with which the replay succeeds and with one granule less fails (bisection from the
  // peak; success is not strictly monotone in capacity, so a smaller one may exist). planned: the plan's
  // arena.
  uint64_t min_arena_bytes = 0;
  double min_arena_ratio = 0;  // over peak_live_bytes
  double solve_s = 0;          // planned: host time of the solver
  std::string method;          // planned: what the solver's result came from
};

// Errors: INVALID_ARGUMENT for an empty trace or options out of range; those of the heap and solver; INTERNAL
// if a planned replay leaves its plan.
base::Result<ReplayResult> replay(const Trace& trace, ReplayAllocator allocator,
                                  const ReplayOptions& options = {});

// Time stamps for single operations: the CPU's counter where there is one, else the clock.
class Ticks {
 public:
  static uint64_t now() {
#if defined(__x86_64__) || defined(__i386__)
    unsigned cpu = 0;
    return __rdtscp(&cpu);
#else
    return base::host_now_ns();
#endif
  }
  // Nanoseconds a tick, measured once against the clock (20 ms), and the ticks that two calls of now() with
  // nothing between them take (calm_mean of many), which is subtracted from every single-operation time.
  static double ns_per_tick();
  static double overhead();
};

// Mean of the lower two thirds (reorders `values`, which is not empty): what an operation takes when nothing interrupts it.
// A mean, not a median: some machines' tick counters move in steps longer than an operation (10 ns), and only a mean
// sees below a step.
inline double calm_mean(std::vector<double>& values) {
  const size_t kept = (values.size() * 2 + 2) / 3;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(kept - 1), values.end());
  return std::accumulate(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(kept), 0.0) /
         static_cast<double>(kept);
}

struct Timing {
  double ns_per_op = 0;
  double alloc_p99_ns = 0;
  uint64_t replays = 0;
};

// Replays `trace` on `allocator` again and again for about `time_ns`. Allocator: Handle allocate(uint32_t
// block, uint64_t bytes), void free(Handle), void finish() after each replay, which must bring it back to
// empty. Allocations must not fail. Half of the time goes to whole replays (mean), half to replays with a
// time stamp around each allocation (p99).
template <class Allocator>
Timing time_trace(const Trace& trace, Allocator& allocator, uint64_t time_ns) {
  using Handle = decltype(allocator.allocate(0u, uint64_t{1}));
  std::vector<Handle> handles(trace.block_count);
  const auto median = [](std::vector<double>& values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  };
  Timing timing;
  std::vector<double> means;
  const uint64_t begin = base::host_now_ns();
  while (means.size() < 5 || (base::host_now_ns() - begin < time_ns / 2 && means.size() < 100000)) {
    const uint64_t start = base::host_now_ns();
    for (const TraceOp& op : trace.ops) {
      if (op.is_free)
        allocator.free(handles[op.block]);
      else
        handles[op.block] = allocator.allocate(op.block, op.size_bytes);
    }
    means.push_back(static_cast<double>(base::host_now_ns() - start) / static_cast<double>(trace.ops.size()));
    allocator.finish();
  }
  timing.replays = means.size();
  timing.ns_per_op = median(means);

  const double overhead = Ticks::overhead();
  constexpr size_t kSamples = 30;
  std::vector<std::vector<double>> samples(trace.block_count);
  const uint64_t begin_singles = base::host_now_ns();
  for (size_t run = 0; run < 3 || (run < kSamples && base::host_now_ns() - begin_singles < time_ns / 2);
       ++run) {
    for (const TraceOp& op : trace.ops) {
      if (op.is_free) {
        allocator.free(handles[op.block]);
        continue;
      }
      const uint64_t start = Ticks::now();
      handles[op.block] = allocator.allocate(op.block, op.size_bytes);
      const uint64_t ticks = Ticks::now() - start;
      samples[op.block].push_back(static_cast<double>(ticks));
    }
    allocator.finish();
  }
  std::vector<double> typical;
  typical.reserve(samples.size());
  for (std::vector<double>& sample : samples) typical.push_back(std::max(0.0, calm_mean(sample) - overhead));
  const auto at = typical.begin() + static_cast<std::ptrdiff_t>(typical.size() * 99 / 100);
  std::nth_element(typical.begin(), at, typical.end());
  timing.alloc_p99_ns = *at * Ticks::ns_per_tick();
  return timing;
}

// The smallest capacity in granules, from `low` on, that `fits(capacity)` accepts. Whether a trace fits is
// not monotone in the capacity, so the way is part of the definition: upwards from `low` in steps of 1/1024
// of it to the first that fits, then bisection within that step.
template <class Fits>
uint64_t smallest_capacity(uint64_t low, Fits&& fits) {
  uint64_t high = low;
  const uint64_t step = low / 1024 + 1;
  while (!fits(high)) {
    low = high;
    high += step;
  }
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    (fits(middle) ? high : low) = middle;
  }
  return high;
}

}  // namespace gpushare::memory
