// csv.hpp: lines of comma-separated fields with quotes, and whole files as text. Strict: what is odd is an
// error that names the line.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"

namespace gpushare::sim {

struct CsvRow {
  size_t line = 0;  // from 1
  std::vector<std::string> fields;
};

// Rows of `text`; blank lines are skipped, spaces around unquoted fields dropped, a byte order mark and CRLF
// accepted. A quoted field may hold commas and doubled quotes, no line break. Errors: MALFORMED_INPUT naming
// file and line (unclosed quote, text after a closing quote, NUL byte, a line longer than kMostLineBytes or with
// more than kMostLineFields fields, more than kMostFields fields in all).
inline constexpr size_t kMostLineBytes = size_t{64} << 10;
inline constexpr size_t kMostLineFields = 64;
inline constexpr size_t kMostFields = 16'000'000;  // some 600 MB as strings
base::Result<std::vector<CsvRow>> parse_csv(std::string_view text, const std::string& file);

// A whole file or pipe, without a byte order mark. Errors: NOT_FOUND; INVALID_ARGUMENT (a folder, a device such as
// /dev/zero, no permission); IO_ERROR with errno; MALFORMED_INPUT (larger than `most_bytes`). Blocks on the disk.
base::Result<std::string> read_text(const std::string& path, uint64_t most_bytes = uint64_t{64} << 20);

}  // namespace gpushare::sim
