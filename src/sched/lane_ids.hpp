// lane_ids.hpp: the numbers of lanes: a lane that opens takes the lowest one that is free.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <queue>
#include <vector>

#include "sched/types.hpp"

namespace gpushare::sched {

// Each call costs O(log n) of the numbers that are free.
class LaneIds {
 public:
  LaneId take() {
    if (free_.empty()) return next_++;
    const LaneId lowest = free_.top();
    free_.pop();
    return lowest;
  }
  void give_back(LaneId id) { free_.push(id); }

 private:
  std::priority_queue<LaneId, std::vector<LaneId>, std::greater<>> free_;
  LaneId next_ = 0;
};

}  // namespace gpushare::sched
