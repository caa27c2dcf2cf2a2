// lane_finder.hpp: which lane a new session joins, or that a lane is opened or enlarged for it, or that it must wait.
// Salus, algorithm 2.1, and alternatives measured against it (docs/design/sched.md).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "sched/types.hpp"

namespace gpushare::sched {

enum class LaneFinderKind : uint32_t {
  kSalus = 0,  // algorithm 2.1 as printed
  kBalanced    // as kSalus, but among lanes that fit prefers the one with the least backlog
};

}  // namespace gpushare::sched
