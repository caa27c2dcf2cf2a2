// standby.hpp: decides which models that are not on the device keep their first layers there, within a budget
// of bytes. It is told what each would take and save, and moves nothing.
//
// This is a function without state. It grants the present wishes greedily by worth per byte, or the one wish
// that is worth more than all of those together. The result is worth at least half of the best choice. A prefix
// that is already held counts for a quarter more, so that models of equal worth do not push each other out in
// turn: each exchange costs a copy.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sched/residency.hpp"

namespace gpushare::sched {

struct StandbyWish {
  ModelId model = 0;
  uint64_t bytes = 0;
  double worth = 0;   // request rate times the time that the layers save when it is wanted
  bool held = false;  // the bytes are there already
};

// The models whose wishes are granted; their bytes are at most `budget_bytes` together. Wishes of no bytes or no
// worth are not granted. O(n log n).
std::vector<ModelId> grant_standby(std::span<const StandbyWish> wishes, uint64_t budget_bytes);

}  // namespace gpushare::sched
