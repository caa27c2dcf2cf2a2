// SPDX-License-Identifier: Apache-2.0
#include "cli/output.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

namespace gpushare::cli {
namespace {

size_t width_of(std::string_view text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

base::Status io_error(const char* doing, const std::string& path, int error) {
  return {GPUSHARE_IO_ERROR, base::format("cannot %s '%s': %s", doing, path.c_str(), std::strerror(error)),
          error};
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

}  // namespace

void Table::add_column(std::string title, Align align) {
  columns_.push_back({std::move(title), align});
}

void Table::add_row(std::vector<std::string> cells) {
  cells.resize(columns_.size());
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

base::Status JsonOption::check() const {
  return on_stdout() ? base::Status() : check_writable(path_, "--json");
}

base::Status JsonOption::write(const nlohmann::ordered_json& document) const {
  if (!wanted()) return {};
  // Names come from files; bytes that are not UTF-8 become U+FFFD instead of an exception.
  const std::string text =
      document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  return on_stdout() ? write_stdout(text) : write_file(path_, text);
}

base::Status write_file(const std::string& path, std::string_view content) {
  const bool special = is_special(path);
  const std::string target = special ? path : path + base::format(".tmp.%ld", static_cast<long>(::getpid()));
  const int fd = ::open(target.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return io_error("write", path, errno);
  int error = write_all(fd, content);
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && !special && std::rename(target.c_str(), path.c_str()) != 0) error = errno;
  if (error == 0) return {};
  if (!special) (void)::unlink(target.c_str());
  return io_error("write", path, error);
}

base::Status check_writable(const std::string& path, const char* option) {
  if (path.empty() || is_special(path)) {
    struct stat info {};
    if (!path.empty() && ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode))
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("%s: '%s' is a folder; name a file", option, path.c_str())};
    return {};
  }
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  if (::access(folder.c_str(), W_OK | X_OK) == 0) return {};
  return {GPUSHARE_INVALID_ARGUMENT, base::format("%s: cannot write '%s': folder '%s': %s", option,
                                                  path.c_str(), folder.c_str(), std::strerror(errno))};
}

base::Status write_stdout(std::string_view text) {
  std::fflush(stdout);
  if (const int error = write_all(STDOUT_FILENO, text); error != 0) return io_error("write", "stdout", error);
  return {};
}

base::Result<std::string> read_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    base::Status status = io_error("read", path, error);
    if (error == ENOENT) return base::Status(GPUSHARE_NOT_FOUND, status.message(), error);
    return status;
  }
  std::string out;
  char buffer[1 << 16];
  int error = 0;
  for (;;) {
    const ssize_t got = ::read(fd, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) error = errno;
    if (got <= 0) break;
    out.append(buffer, static_cast<size_t>(got));
  }
  (void)::close(fd);
  if (error != 0) return io_error("read", path, error);
  return out;
}

}  // namespace gpushare::cli
