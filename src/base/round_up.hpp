// round_up.hpp: the next multiple.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::base {

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace gpushare::base
