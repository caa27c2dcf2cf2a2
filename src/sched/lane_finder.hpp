// lane_finder.hpp: where a new session runs: it joins a lane, a lane is opened or enlarged for it, or it waits. Salus,
// algorithm 2.1, and alternatives measured against it (docs/design/sched.md). A pure function; the scheduler carries
// the answer out.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.hpp"
#include "sched/types.hpp"

namespace gpushare::sched {

enum class LaneFinderKind : uint32_t {
  // Algorithm 2.1 as printed: opens a lane if it fits, else joins the best-fitting lane, else enlarges the smallest that can
  // be enlarged.
  kSalus = 0,
  // Opens a lane as kSalus does. Otherwise takes, of the lanes that fit or can be enlarged, that with the least work ahead.
  kBalanced,
  // Joins a lane that fits closely (E <= L <= 2 E) before it opens one: more residents, fewer lanes.
  kCompact
};

// "salus", "balanced", "compact". Errors: NOT_FOUND listing them.
base::Result<LaneFinderKind> lane_finder_named(std::string_view name);

struct LaneView {
  LaneId lane = kNoLane;
  uint64_t bytes = 0;  // promised size
  // Device time that its sessions still need; an unknown time counts as the longest known.
  uint64_t backlog_ns = 0;
  uint32_t sessions = 0;
};

struct Placement {
  enum class Kind : uint32_t { kNone, kOpen, kJoin, kEnlarge };
  Kind kind = Kind::kNone;
  LaneId lane = kNoLane;  // kJoin, kEnlarge
  uint64_t bytes = 0;     // size of the lane afterwards
};

// The lane for a session of `persistent_bytes` and `ephemeral_bytes` when `free_bytes` can still be promised.
// `may_open`: the limit on lanes leaves room for one more. The placement never promises more than
// `free_bytes` in addition. The paper's lines 4-6 do not test that P fits when a lane is joined; this
// function does. O(lanes).
Placement find_lane(LaneFinderKind kind, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                    uint64_t free_bytes, std::span<const LaneView> lanes, bool may_open);

}  // namespace gpushare::sched
