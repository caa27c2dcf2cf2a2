// options.hpp: option values that CLI11 passes as text, checked with messages that name the option and what
// is allowed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.hpp"

namespace gpushare::cli {

// INVALID_ARGUMENT "--lanes: 'x' is not allowed; give a whole number from 0 to 64".
base::Status bad_option(const char* option, const std::string& value, const std::string& allowed);

// "a,b,c" to its items; empty ones are kept, to be refused by name.
std::vector<std::string> split_list(const std::string& text);

// "a,b" to names that are all `known`, each once. Errors: INVALID_ARGUMENT naming what there is.
base::Result<std::vector<std::string>> parse_names(const char* option, const std::string& text,
                                                   std::span<const char* const> known);

// From `low` (above it, unless `low_allowed`) to `high`. Errors: INVALID_ARGUMENT.
base::Result<double> parse_number(const char* option, const std::string& text, double low, bool low_allowed,
                                  double high);
// `low` to `high`. Errors: INVALID_ARGUMENT.
base::Result<uint64_t> parse_count(const char* option, const std::string& text, uint64_t high,
                                   uint64_t low = 0);
// A size above 0. Errors: INVALID_ARGUMENT.
base::Result<uint64_t> parse_size(const char* option, const std::string& text);

}  // namespace gpushare::cli
