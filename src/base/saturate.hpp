// saturate.hpp: arithmetic on 64 bits that stops at the ends of the range instead of wrapping around. For times and
// rates that were computed in floating point.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::base {

// NaN and negative values become 0.
inline uint64_t to_uint64(double value) {
  if (!(value > 0)) return 0;
  return value < 18446744073709551616.0 ? static_cast<uint64_t>(value) : UINT64_MAX;
}

inline uint64_t add_saturated(uint64_t a, uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

}  // namespace gpushare::base
