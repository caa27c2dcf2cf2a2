// never.hpp: a time that does not come, a cost that nobody pays.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>

namespace gpushare::cluster {

inline constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace gpushare::cluster
