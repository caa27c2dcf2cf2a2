// units.hpp: sizes and durations as people write and read them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.hpp"

namespace gpushare::base {

// "512", "64KiB", "1.5GiB", "16G" (binary), "16GB" (decimal) to bytes. Errors: INVALID_ARGUMENT naming what is allowed
// (empty, negative, not a number, unknown suffix, above 2^63).
Result<uint64_t> parse_bytes(std::string_view text);

// The same of a size that a person gives: a number without a unit is refused, because "8" may mean 8 GiB. 0 needs no unit.
Result<uint64_t> parse_size(std::string_view text);

// 1536 -> "1.50 KiB"; below 1 KiB "512 B".
std::string format_bytes(uint64_t bytes);

// 1500000 -> "1.50 ms"; from nanoseconds up to hours.
std::string format_duration_ns(uint64_t ns);

// Whole-string number parsing: no sign tricks, no trailing text, finite. Errors: INVALID_ARGUMENT.
Result<double> parse_double(std::string_view text);
// A part of a whole as "30%": above 0, at most 100%. The result is of 1.
Result<double> parse_percent(std::string_view text);
Result<uint64_t> parse_uint64(std::string_view text);

}  // namespace gpushare::base
