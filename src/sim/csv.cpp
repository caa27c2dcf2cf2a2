// SPDX-License-Identifier: Apache-2.0
#include "sim/csv.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "base/units.hpp"

namespace gpushare::sim {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

base::Status at(const std::string& file, size_t line, const char* what) {
  return {GPUSHARE_MALFORMED_INPUT, base::format("%s:%zu: %s", file.c_str(), line, what)};
}

base::Status take_fields(std::string_view line, const std::string& file, CsvRow& row) {
  size_t position = 0;
  while (true) {
    if (row.fields.size() == kMostLineFields)
      return {GPUSHARE_MALFORMED_INPUT, base::format("%s:%zu: has more than %zu fields, the most allowed",
                                                     file.c_str(), row.line, kMostLineFields)};
    const size_t start = line.find_first_not_of(" \t", position);
    if (start != std::string_view::npos && line[start] == '"') {
      std::string field;
      size_t i = start + 1;
      for (;; ++i) {
        if (i >= line.size()) return at(file, row.line, "a quoted field is not closed on its line");
        if (line[i] != '"') {
          field += line[i];
        } else if (i + 1 < line.size() && line[i + 1] == '"') {
          field += '"';
          ++i;
        } else {
          break;
        }
      }
      row.fields.push_back(std::move(field));
      const size_t next = line.find_first_not_of(" \t", i + 1);
      if (next == std::string_view::npos) return {};
      if (line[next] != ',') return at(file, row.line, "text after a closing quote; expected a comma");
      position = next + 1;
      continue;
    }
    const size_t comma = line.find(',', position);
    row.fields.emplace_back(trimmed(line.substr(position, comma - position)));
    if (comma == std::string_view::npos) return {};
    position = comma + 1;
  }
}

}  // namespace

base::Result<std::vector<CsvRow>> parse_csv(std::string_view text, const std::string& file) {
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  std::vector<CsvRow> rows;
  size_t fields = 0;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.size() > kMostLineBytes)
      return base::Status(GPUSHARE_MALFORMED_INPUT,
                          base::format("%s:%zu: the line has %zu bytes; the most allowed are %zu",
                                       file.c_str(), number, line.size(), kMostLineBytes));
    if (line.find('\0') != std::string_view::npos) return at(file, number, "a NUL byte; expected text");
    if (trimmed(line).empty()) continue;
    CsvRow row;
    row.line = number;
    GPUSHARE_RETURN_IF_ERROR(take_fields(line, file, row));
    fields += row.fields.size();
    if (fields > kMostFields)
      return base::Status(
          GPUSHARE_MALFORMED_INPUT,
          base::format("%s:%zu: more than %zu fields in all, the most allowed; split the file", file.c_str(),
                       number, kMostFields));
    rows.push_back(std::move(row));
  }
  return rows;
}

base::Status CsvFields::check() const {
  if (row_.fields.size() == header_.size()) return {};
  return {GPUSHARE_MALFORMED_INPUT,
          base::format("%s:%zu: %zu fields, but the header has %zu columns (%s)", file_.c_str(), row_.line,
                       row_.fields.size(), header_.size(), joined(header_).c_str())};
}

size_t CsvFields::column(std::string_view name) const {
  return static_cast<size_t>(std::find(header_.begin(), header_.end(), name) - header_.begin());
}

base::Status CsvFields::fail(size_t column, const std::string& what) const {
  return {GPUSHARE_MALFORMED_INPUT,
          base::format("%s:%zu: %s: %s", file_.c_str(), row_.line, header_[column].c_str(), what.c_str())};
}

base::Result<double> CsvFields::number_in(const std::string& value, size_t column, double least, double most,
                                          bool above) const {
  const base::Result<double> parsed = base::parse_double(value);
  if (parsed.ok() && (above ? *parsed > least : *parsed >= least) && *parsed <= most) return *parsed;
  return fail(column, base::format("'%s' must be a number %s %g and at most %g", value.substr(0, 40).c_str(),
                                   above ? "above" : "of at least", least, most));
}

base::Result<uint64_t> CsvFields::count(size_t column, uint64_t least, double most) const {
  const base::Result<uint64_t> parsed = base::parse_uint64(text(column));
  if (parsed.ok() && *parsed >= least && static_cast<double>(*parsed) <= most) return *parsed;
  return refuse(column, base::format("must be a whole number from %llu to %g",
                                     static_cast<unsigned long long>(least), most));
}

std::vector<std::string_view> split(std::string_view line, char by) {
  std::vector<std::string_view> fields;
  for (;;) {
    const size_t end = line.find(by);
    fields.push_back(line.substr(0, end));
    if (end == std::string_view::npos) return fields;
    line.remove_prefix(end + 1);
  }
}

std::string joined(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ",") + name;
  return out;
}

base::Result<std::string> read_text(const std::string& path, uint64_t most_bytes) {
  errno = 0;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  const auto refused = [&](int error) {
    int32_t code = GPUSHARE_IO_ERROR;
    if (error == ENOENT)
      code = GPUSHARE_NOT_FOUND;
    else if (error == EISDIR || error == EACCES || error == ENOTDIR || error == ENAMETOOLONG ||
             error == ELOOP)
      code = GPUSHARE_INVALID_ARGUMENT;
    return base::Status(code, "cannot read '" + path + "': " + std::strerror(error), error);
  };
  if (file == nullptr) return refused(errno);
  struct stat info {};
  if (::fstat(::fileno(file.get()), &info) == 0 && (S_ISCHR(info.st_mode) || S_ISBLK(info.st_mode)))
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        "cannot read '" + path + "': it is a device; name a file or a pipe");
  std::string text;
  char buffer[1 << 16];
  while (const size_t n = std::fread(buffer, 1, sizeof(buffer), file.get())) {
    text.append(buffer, n);
    if (text.size() > most_bytes)
      return base::Status(
          GPUSHARE_MALFORMED_INPUT,
          "'" + path + "' is larger than " + base::format_bytes(most_bytes) + ", the most allowed");
  }
  if (std::ferror(file.get()) != 0) return refused(errno == 0 ? EIO : errno);
  if (text.starts_with(kByteOrderMark)) text.erase(0, kByteOrderMark.size());
  return text;
}

}  // namespace gpushare::sim
