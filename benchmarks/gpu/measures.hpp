// measures.hpp: the measurements of the suite. Each adds rows to the report and throws on failure.
//
// Device work without kernels of our own is fills: they exist in every driver, run at the memory's speed and can be made as
// long as wanted. What needs real kernels uses the networks of examples/training, where they were built.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "driver.hpp"
#include "report.hpp"

namespace gpushare::gpu_suite {

struct Settings {
  int repeats = 21;
  uint64_t fill_bytes = 64u << 20;  // one piece of device work
  int iterations = 200;             // of a run that is timed as a whole
};

// 1: lane alloc and free, beside cuMemAlloc and the stream-ordered allocator with a warmed pool.
void measure_allocation(const Driver& driver, const Settings& settings, Report& report);
// 2: iterations of one session alone, beside the same work on a plain stream.
void measure_iteration_overhead(const Driver& driver, const Settings& settings, Report& report);
// 3: the device's idle gap where a lane goes on with another session, by enqueue depth.
void measure_switch(const Driver& driver, const Settings& settings, Report& report);
// 4: eight jobs under each policy, beside a plain stream each; fairness of three equal jobs that come and go.
void measure_policies(const Driver& driver, const Settings& settings, Report& report);
// 5: 42 inference models resident at once: the latency that they add at a low rate.
void measure_many_models(const Driver& driver, const Settings& settings, Report& report);
// 6: what a granule costs to create, map and unmap, by its size; a session's growth above its promise.
void measure_virtual_memory(const Driver& driver, const Settings& settings, Report& report);
// 7: a short job beside a heavy one, on a share of the SMs of its own and without.
void measure_partitions(const Driver& driver, const Settings& settings, Report& report);

}  // namespace gpushare::gpu_suite
