// SPDX-License-Identifier: Apache-2.0
#include "cli/output.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/file_sink.hpp"
#include "base/utf8.hpp"
#include "gpushare/version.h"

namespace gpushare::cli {
namespace {

size_t width_of(std::string_view text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

// Writes all of `text`; 0 or errno.
int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

// Pipes, terminals and /dev/null are written to; only regular files (or new ones) are replaced.
bool is_special(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode);
}

// Names the same file, there or still to be made.
bool same_file(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  // A path that is not there yet is followed from its first part that is: it must be absolute.
  const auto real = [](const std::string& path) {
    std::error_code ignored;
    return fs::weakly_canonical(fs::absolute(path, ignored), ignored);
  };
  return real(a) == real(b);
}

base::Status check_writable(const std::string& path, const char* option) {
  if (path == "-") {
    if (std::strcmp(option, "--json") == 0) return {};
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("%s: '-' is not allowed; only --json goes to stdout, name a file", option)};
  }
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode))
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("%s: '%s' is a folder; name a file", option, path.c_str())};
  if (is_special(path)) return {};
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  if (::access(folder.c_str(), W_OK | X_OK) == 0) return {};
  return {GPUSHARE_INVALID_ARGUMENT, base::format("%s: cannot write '%s': folder '%s': %s", option,
                                                  path.c_str(), folder.c_str(), std::strerror(errno))};
}

}  // namespace

void Table::add_column(std::string title, Align align) {
  columns_.push_back({std::move(title), align});
}

void Table::add_row(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  for (std::string& cell : cells) cell = base::to_printable(cell);
  rows_.push_back(std::move(cells));
}

std::string Table::to_string() const {
  // Titles stand on the rule: shorter ones get empty lines above.
  std::vector<std::vector<std::string>> head;
  size_t height = 1;
  for (const Column& column : columns_) {
    std::vector<std::string> lines(1);
    for (const char c : column.title)
      if (c == '\n')
        lines.emplace_back();
      else
        lines.back() += c;
    height = std::max(height, lines.size());
    head.push_back(std::move(lines));
  }
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    head[c].insert(head[c].begin(), height - head[c].size(), "");
    size_t width = 0;
    for (const std::string& line : head[c]) width = std::max(width, width_of(line));
    for (const auto& row : rows_) width = std::max(width, width_of(row[c]));
    widths.push_back(width);
  }
  std::string out;
  const auto line = [&](auto&& cell) {
    std::string text;
    for (size_t c = 0; c < columns_.size(); ++c) {
      const std::string& content = cell(c);
      const std::string pad(widths[c] - width_of(content), ' ');
      if (c > 0) text += "  ";
      text += columns_[c].align == Align::kRight ? pad + content : content + pad;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + '\n';
  };
  for (size_t k = 0; k < height; ++k) line([&](size_t c) -> const std::string& { return head[c][k]; });
  std::vector<std::string> rule;
  rule.reserve(widths.size());
  for (const size_t width : widths) rule.emplace_back(width, '-');
  line([&](size_t c) -> const std::string& { return rule[c]; });
  for (const auto& row : rows_) line([&](size_t c) -> const std::string& { return row[c]; });
  return out;
}

std::string wrap(std::string_view text, size_t width, size_t indent) {
  std::string out;
  size_t column = 0;
  while (!text.empty()) {
    const size_t blank = text.find(' ');
    const std::string_view word = text.substr(0, blank);
    const size_t size = width_of(word);
    if (column > 0 && column + 1 + size > width) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    } else if (column > 0) {
      out += ' ';
      ++column;
    }
    out += word;
    column += size;
    text.remove_prefix(blank == std::string_view::npos ? text.size() : blank + 1);
  }
  return out;
}

void JsonOption::declare(CLI::App& app) {
  app.add_option("--json", path_,
                 "Write the result as JSON to FILE, or with '-' to stdout, in place of the table")
      ->type_name("FILE|-");
}

base::Status JsonOption::write(const nlohmann::ordered_json& document) const {
  if (!wanted()) return {};
  // Names come from files; bytes that are not UTF-8 become U+FFFD instead of an exception.
  // What made the document comes first in it.
  nlohmann::ordered_json versioned = nlohmann::ordered_json::object();
  versioned["version"] = GPUSHARE_VERSION_STRING;
  versioned.update(document);
  const std::string text =
      versioned.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  return on_stdout() ? write_stdout_bytes(text) : write_file(path_, text);
}

base::Status write_file(const std::string& path, std::string_view content) {
  base::FileSink file(path);
  file.write(content);
  return file.close();
}

base::Status check_files(const std::vector<NamedFile>& inputs, const std::vector<NamedFile>& outputs) {
  std::vector<const NamedFile*> others;
  others.reserve(inputs.size() + outputs.size());
  for (const NamedFile& input : inputs) others.push_back(&input);
  for (const NamedFile& output : outputs) {
    if (output.path.empty()) continue;
    GPUSHARE_RETURN_IF_ERROR(check_writable(output.path, output.option));
    if (output.path == "-" || is_special(output.path)) continue;
    for (const NamedFile* other : others)
      if (!other->path.empty() && same_file(other->path, output.path))
        return {GPUSHARE_INVALID_ARGUMENT, base::format("%s: '%s' is the file of %s already; name another",
                                                        output.option, output.path.c_str(), other->option)};
    others.push_back(&output);
  }
  return {};
}

base::Status write_stdout(std::string_view text) {
  return write_stdout_bytes(base::to_printable_lines(text));
}

base::Status write_stdout_bytes(std::string_view bytes) {
  std::fflush(stdout);
  if (const int error = write_all(STDOUT_FILENO, bytes); error != 0)
    return {GPUSHARE_IO_ERROR, base::format("cannot write to stdout: %s", std::strerror(error)), error};
  return {};
}

}  // namespace gpushare::cli
