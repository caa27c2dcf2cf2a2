// pickle.hpp: reads Python pickles of plain data (dicts, lists, tuples, strings, numbers), as PyTorch's
// memory snapshots are. Nothing is ever called or imported: a pickle that names a Python object is refused.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"

namespace gpushare::cli {

// A pickle of protocol 2 or above begins with its protocol number.
bool is_pickle(std::string_view text);

// Protocols 2 to 5. Tuples and sets become arrays. The values of dict keys named in `skipped` become null:
// snapshots share their stack frames many times over, and a tree of them would be far larger than the file.
// More than `most_values`
// values are refused, as sharing lets a small file unfold without end. Errors: MALFORMED_INPUT with the byte.
base::Result<nlohmann::json> parse_pickle(std::string_view text, const std::string& name,
                                          const std::vector<std::string>& skipped = {},
                                          size_t most_values = 30'000'000);

}  // namespace gpushare::cli
