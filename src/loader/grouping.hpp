// loader: getting a model's layers onto the device while the first of them already compute: files, images,
// the grouping plan, pipelined transmission, the switcher. Calls base, device, memory and executor; may be
// called from c_api.
//
// grouping.hpp: the plan: which consecutive layers are sent, and then executed, as one group. Few groups hide
// little, many pay the overhead of each; PipeSwitch (Bai et al., OSDI 2020, section 4.2) searches with
// pruning in exponential time. Here the optimum is exact in O(n k).
//
// Model. Groups end at 0 = b_0 < ... < b_k = n. With a = overhead of a transmission, c = overhead of
// executing a group, S and E prefix sums of transmit and execution times, group m has arrived at t_m = L + m
// a + S[b_m] and is done at f_m = max(f_{m-1}, t_m) + c + E[b_m] - E[b_{m-1}], f_0 = F; L and F say until
// when the link and the lane are busy. Minimise f_k.
//
// Why O(n k). Substituting G = f - E[j] - m c gives G(j,m) = min over i < j of max(G(i,m-1), S[j] - E[i] + m
// (a-c) + c). Relaxed to "at most m groups" (valid for a >= c, where counting a group too many never
// flatters), G does not decrease in j while the second term decreases in i, so the best i is at their
// crossing, and the crossing only moves right as j grows: one sweep of two pointers a row. For a < c the
// reversed instance with (S,a) and (E,c) swapped has the same optimum. L and F enter at the end: f_k = max(F
// + k c + E[n], L + makespan without them).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.hpp"

namespace gpushare::loader {

// One layer, in execution order. Times in milliseconds, alone on link and lane; 0 is allowed.
struct LayerCost {
  uint64_t bytes = 0;
  double transmit_ms = 0;
  double execution_ms = 0;
};

struct GroupingCosts {
  double call_overhead_ms = 0;   // a: per transmission
  double group_overhead_ms = 0;  // c: per executed group
  double link_busy_ms = 0;       // L: the link is free from then on
  double lane_busy_ms = 0;       // F: the lane is free from then on
  uint32_t resident_layers = 0;  // the first so many layers are on the device already
  uint64_t group_cap_bytes =
      0;  // staging buffer: most bytes of a group; a larger layer is a group alone. 0 = none
};

struct Grouping {
  // Exclusive end of each group, ascending, the last one being the number of layers; without the resident
  // prefix.
  std::vector<uint32_t> ends;
  double makespan_ms = 0;  // when the last layer is done
  // False if the search was cut short (see plan_groups).
  bool is_optimal = true;
};

// The optimal grouping. O(n k) time for k useful groups, O(n + improvements) memory. The search stops when n k
// reaches 2^26, about a second: the result is then the best grouping of at most 2^26 / n groups (1,342 of
// 50,000 layers), and is_optimal says so. Up to 8,192 layers always get the optimum.
// Errors: INVALID_ARGUMENT (a negative or not finite time, resident_layers above the number of layers; names
// the layer).
base::Result<Grouping> plan_groups(std::span<const LayerCost> layers, const GroupingCosts& costs);

// The makespan of a given grouping (same meaning of `ends`), by simulating it. INVALID_ARGUMENT if the ends
// are not a grouping.
base::Result<double> grouping_makespan_ms(std::span<const LayerCost> layers, const GroupingCosts& costs,
                                          std::span<const uint32_t> ends);

// When one group is sent, has arrived, starts to execute (its overhead included) and is done.
struct GroupTimes {
  double send_ms = 0;
  double arrived_ms = 0;
  double start_ms = 0;
  double done_ms = 0;
};

// The same simulation, group by group: for pictures of the pipeline.
base::Result<std::vector<GroupTimes>> group_times(std::span<const LayerCost> layers,
                                                  const GroupingCosts& costs, std::span<const uint32_t> ends);

// Groupings that the plan is compared with. They ignore the limit on a group's bytes, because they would break
// it.
std::vector<uint32_t> one_shot_groups(size_t layers, uint32_t resident_layers);
std::vector<uint32_t> per_layer_groups(size_t layers, uint32_t resident_layers);
// Equal numbers of layers a group, for the number of groups that does best. Returns its ends. O(n log n).
base::Result<std::vector<uint32_t>> best_uniform_groups(std::span<const LayerCost> layers,
                                                        const GroupingCosts& costs);

// No grouping can be faster: the larger of all transmissions with one overhead followed by the last layer's
// execution, and all executions behind the first layer's arrival.
double makespan_lower_bound_ms(std::span<const LayerCost> layers, const GroupingCosts& costs);

}  // namespace gpushare::loader
