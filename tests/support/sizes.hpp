// sizes.hpp: the unit in which tests count memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::test {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

}  // namespace gpushare::test
