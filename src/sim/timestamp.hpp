// timestamp.hpp: dates and times of day as public traces write them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace gpushare::sim {

// "2023-11-16 18:15:46[.6805900][+00:00]" to nanoseconds since 1970; a 'T' in place of the space and 'Z' for the zone are
// accepted, and without a zone the time counts as UTC. False if the text is none, or the year is not in [1970, 2200].
bool parse_timestamp(std::string_view text, uint64_t* ns);

}  // namespace gpushare::sim
