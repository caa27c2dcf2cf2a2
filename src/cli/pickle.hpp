// pickle.hpp: reads Python pickles of plain data (dicts, lists, tuples, strings, numbers), as PyTorch's memory snapshots
// are. Python itself reads them, by an unpickler that finds no class and no function: nothing that a file names is ever
// imported or called.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"

namespace gpushare::cli {

// A pickle of protocol 2 or above begins with its protocol number.
bool is_pickle(std::string_view text);

// The pickle as JSON. Tuples and sets become arrays. The values of dict keys named in `skipped` become null:
// snapshots share their stack frames many times over, and a tree of them would be far larger than the file. More than
// `most_values` are refused, as sharing lets a small file unfold without end. Starts python3 and waits for it. `name` is
// the file's, for messages.
// Errors: MALFORMED_INPUT with Python's words; UNAVAILABLE where there is no python3.
base::Result<std::string> pickle_as_json(std::string_view pickle, const std::string& name,
                                         const std::vector<std::string>& skipped = {},
                                         uint64_t most_values = 30'000'000);

}  // namespace gpushare::cli
