// The static placement solver.
// SPDX-License-Identifier: Apache-2.0
#include "memory/placement.hpp"

#include <algorithm>
#include <vector>

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

namespace {
constexpr uint64_t kExactWork = 4'000'000'000;  // some seconds, as of `gpushare alloc replay`
}

extern "C" int32_t gpushare_placement_solve(uint64_t count, const uint64_t* lower, const uint64_t* upper,
                                            const uint64_t* size_bytes, uint64_t alignment_bytes,
                                            uint64_t time_limit_ns, uint64_t* out_offsets,
                                            uint64_t* out_arena_bytes) {
  return capi::guard([&]() -> base::Status {
    if (out_arena_bytes == nullptr) return capi::null_argument("out_arena_bytes");
    if (count > 0 &&
        (lower == nullptr || upper == nullptr || size_bytes == nullptr || out_offsets == nullptr))
      return capi::null_argument("lower, upper, size_bytes or out_offsets");
    if (count > UINT32_MAX)
      return {GPUSHARE_INVALID_ARGUMENT, base::format("count is %llu, allowed are up to %u",
                                                      static_cast<unsigned long long>(count), UINT32_MAX)};
    if (time_limit_ns == GPUSHARE_NO_TIMEOUT)
      return {GPUSHARE_INVALID_ARGUMENT,
              "time_limit_ns is no limit: the search would not end; 0 asks for a bounded effort"};
    std::vector<memory::Buffer> buffers(count);
    for (uint64_t i = 0; i < count; ++i) {
      buffers[i].lower = lower[i];
      buffers[i].upper = upper[i];
      buffers[i].size_bytes = size_bytes[i];
    }
    memory::PlacementOptions options;
    if (alignment_bytes != 0) options.granule_bytes = alignment_bytes;
    options.exact_work_limit = kExactWork;
    if (time_limit_ns != 0) {
      options.time_limit_ns = time_limit_ns;
      options.work_limit = options.order_work_limit = options.exact_work_limit = UINT64_MAX;
    }
    GPUSHARE_ASSIGN_OR_RETURN(const memory::Placement placement, memory::solve_placement(buffers, options));
    std::copy(placement.offsets_bytes.begin(), placement.offsets_bytes.end(), out_offsets);
    *out_arena_bytes = placement.arena_bytes;
    return {};
  });
}
