// execution.hpp: a stand-in for a GPU that executes groups of layers: a host function that takes a given time
// without using a core. Times are kept on paper: a group begins when it has arrived (by the device's clock) and
// the one before is done, so what the function's thread wakes late delays the end once and not with each group.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "base/clock.hpp"

namespace gpushare::bench {

struct Execution {
  uint64_t* lane_free_ns;                // on paper, shared by the groups of a run
  uint64_t time_ns;                      // that the group takes
  std::function<uint64_t()> arrival_ns;  // when it had arrived

  static void run(void* user_data) {
    const auto* of = static_cast<Execution*>(user_data);
    *of->lane_free_ns = std::max(*of->lane_free_ns, of->arrival_ns()) + of->time_ns;
    const uint64_t now_ns = base::host_now_ns();
    if (*of->lane_free_ns > now_ns)
      std::this_thread::sleep_for(std::chrono::nanoseconds(*of->lane_free_ns - now_ns));
  }
};

}  // namespace gpushare::bench
