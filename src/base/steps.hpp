// steps.hpp: sizes that grow in small steps up to a large one, and in large steps from there on.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/saturate.hpp"

namespace gpushare::base {

struct Steps {
  uint64_t small = 1, large = 1;  // small divides large

  constexpr uint64_t at(uint64_t bytes) const { return bytes < large ? small : large; }
  // Such sizes alone.
  constexpr bool has(uint64_t bytes) const { return bytes % at(bytes) == 0; }
  constexpr uint64_t round_down(uint64_t bytes) const { return bytes - bytes % at(bytes); }
  // UINT64_MAX where there is none.
  constexpr uint64_t round_up(uint64_t bytes) const {
    return has(bytes) ? bytes : add_saturated(round_down(bytes), at(bytes));
  }
};

}  // namespace gpushare::base
