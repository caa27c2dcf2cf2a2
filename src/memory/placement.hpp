// placement.hpp: static placement. Given buffers with lifetimes, choose offsets so that no two that live
// together overlap and the arena is small (dynamic storage allocation; NP-hard). This is the solver behind
// planned lanes.
//
// Method. A placement is made from an order: each buffer in turn takes the lowest offset at which it fits.
// The orders by size, by size times square root of lifetime, and by lifetime are tried on all buffers, and
// what a heap does online competes: the caller's own run, or one made here. Then the order is improved, where it matters: the
// buffers that are alive when the load comes near the peak, the core, are few, and the rest drops into the
// room they leave. On the core two kinds of change alternate: buffers that stick out above the target move to
// the front (squeaky wheel: Joslin and Clements 1999), and random changes of a few priorities, kept unless
// worse. The best is kept throughout; a placement is never worse than the best simple order or the caller's.
// Deterministic for a seed: effort is counted in comparisons, and in seconds only where a time limit is given. On request,
// small instances are then searched exactly (exact_placement.hpp).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.hpp"
#include "memory/exact_placement.hpp"
#include "memory/trace.hpp"

namespace gpushare::memory {

struct PlacementOptions {
  uint64_t granule_bytes = 256;  // offsets are multiples of it, sizes round up to it; a power of two
  // Comparisons of two buffers; about 10^9 a second. 0: the simple orders only. Of 10^6 buffers and more one order is made.
  uint64_t work_limit = 2'500'000'000;
  // Comparisons of one order of all buffers, which grow with the square of the buffers that overlap: some 10^10 for 140,000. An order
  // that takes more is given up, and the online run's placement is the answer.
  uint64_t order_work_limit = 10'000'000'000;
  // Items that the exact search may look at, about 10^9 a second, for kMaxExactItems and fewer buffers. 0: no search.
  uint64_t exact_work_limit = 0;
  // Nonzero: the solver returns the best that it has about then, whatever the other limits say. The online run is always made.
  uint64_t time_limit_ns = 0;
  // Good enough: stop at or below this arena. The peak of live bytes, a lower bound for any placement, always
  // stops.
  uint64_t stop_at_bytes = 0;
  // If given: once it is true, set by any thread, the solver returns CANCELLED within milliseconds.
  const std::atomic<bool>* cancelled = nullptr;
  uint64_t seed = 1;
};

struct Placement {
  std::vector<uint64_t> offsets_bytes;  // by buffer
  uint64_t arena_bytes = 0;
  uint64_t lower_bound_bytes = 0;  // peak of live bytes, sizes rounded to granules
  const char* method =
      "";  // which way won: "given", "online", "size", "weight", "lifetime", "search", "exact"
};

// `given`: offsets of a valid placement to start from (one a buffer), or empty.
// Errors: CANCELLED; INVALID_ARGUMENT for an empty lifetime, a zero size, sizes that add up to 2^63 or more, a granule
// that is not a power of two, `given` of another length or not valid. O(n^2) at worst for the orders, with a
// small constant; O(n log n) where few buffers live at once; memory O(n log n). No threads.
base::Result<Placement> solve_placement(std::span<const Buffer> buffers, const PlacementOptions& options,
                                        std::span<const uint64_t> given = {});

// Independent of the solver: OK if no two buffers alive together overlap and all end at or below
// `arena_bytes`; INTERNAL naming the first pair or buffer that does not. O(n log n).
base::Status check_placement(std::span<const Buffer> buffers, std::span<const uint64_t> offsets_bytes,
                             uint64_t arena_bytes);

// The peak of live bytes over time, sizes rounded up to granules.
uint64_t peak_bytes(std::span<const Buffer> buffers, uint64_t granule_bytes);

}  // namespace gpushare::memory
