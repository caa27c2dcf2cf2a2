// exact_placement.hpp: the last step of static placement, for small hard instances: does a placement within a
// given capacity exist? A bounded depth-first search that finds one, or proves that there is none, or gives up.
//
// Method, after the published ideas of MiniMalloc (Moffitt 2023). Every solution can be pushed down until
// nothing can move lower, and its buffers named by rising offset; only such orders are searched. So each buffer
// goes on top of the buffers that it overlaps in time, never below the buffer placed before it, and not above room
// that would hold another buffer whole. A branch ends when, at some instant, the lowest place left for any buffer plus
// the sizes still to come exceed the capacity. When the remaining buffers fall apart in time, the parts are solved one by
// one. Which buffer is tried first among equals is a static order; several are tried in turn with growing effort.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace gpushare::memory {

// A buffer in the solver's units: granules, and times replaced by their rank.
struct PlacementItem {
  uint32_t lower, upper, size;
};

enum class ExactOutcome : uint8_t { kFound, kImpossible, kGaveUp };

// The most buffers for which the search is tried: memory and each step grow with their square at worst.
constexpr size_t kMaxExactItems = 2048;

// `capacity` must hold the peak of live sizes; capacity plus the largest size must stay below 2^32. Effort is
// counted in items looked at and added to *work: same input, same answer, on any machine. out_offsets is set
// when found. `stopped` is asked every 2^16 items or so; once it says yes, the search gives up.
ExactOutcome place_exactly(std::span<const PlacementItem> items, uint32_t capacity, uint64_t work_limit,
                           uint64_t* work, std::vector<uint32_t>* out_offsets,
                           const std::function<bool()>& stopped = nullptr);

}  // namespace gpushare::memory
