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

// A row below its header: values by column, and errors that say where, "FILE:LINE: COLUMN: WHAT". Keeps references to
// all three. Columns by name: of two with one name the first; text() and numbers need the column to be there.
class CsvFields {
 public:
  CsvFields(const std::string& file, const CsvRow& header, const CsvRow& row)
      : file_(file), header_(header.fields), row_(row) {}
  // MALFORMED_INPUT unless the row has as many fields as the header.
  base::Status check() const;
  size_t column(std::string_view name) const;  // as many as there are columns: none has that name
  bool has(std::string_view name) const { return column(name) < header_.size(); }
  const std::string& text(size_t column) const { return row_.fields[column]; }
  const std::string& text(std::string_view name) const { return text(column(name)); }
  base::Status fail(size_t column, const std::string& what) const;
  base::Status fail(std::string_view name, const std::string& what) const { return fail(column(name), what); }
  // "'TEXT' ALLOWED"
  base::Status refuse(size_t column, const std::string& allowed) const {
    return fail(column, "'" + text(column).substr(0, 40) + "' " + allowed);
  }
  // A number in [least, most], or in (least, most] if `above`.
  base::Result<double> number(size_t column, double least, double most, bool above = false) const {
    return number_in(text(column), column, least, most, above);
  }
  base::Result<double> number(std::string_view name, double least, double most, bool above = false) const {
    return number(column(name), least, most, above);
  }
  // The number that is written in `value`, a part of the column's text.
  base::Result<double> number_in(const std::string& value, size_t column, double least, double most,
                                 bool above) const;
  base::Result<uint64_t> count(size_t column, uint64_t least, double most) const;
  base::Result<uint64_t> count(std::string_view name, uint64_t least, double most) const {
    return count(column(name), least, most);
  }

 private:
  const std::string& file_;
  const std::vector<std::string>& header_;
  const CsvRow& row_;
};

// The pieces of a line between separators; one piece more than there are separators.
std::vector<std::string_view> split(std::string_view line, char by);
std::string joined(const std::vector<std::string>& names);  // with commas

// A whole file or pipe, without a byte order mark. Errors: NOT_FOUND; INVALID_ARGUMENT (a folder, a device such as
// /dev/zero, no permission); IO_ERROR with errno; MALFORMED_INPUT (larger than `most_bytes`). Blocks on the disk.
base::Result<std::string> read_text(const std::string& path, uint64_t most_bytes = uint64_t{64} << 20);

}  // namespace gpushare::sim
