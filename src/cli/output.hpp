// output.hpp: what commands print: aligned tables, JSON, files. stdout carries results and nothing else; when it carries JSON
// (--json -) it carries only JSON.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"

namespace CLI {
class App;
}

namespace gpushare::cli {

// A text table: a header, a rule, rows. Cells are printed as base::to_printable makes them, since names in them come from files and from
// other users; widths count code points. Titles may have several lines ('\n').
class Table {
 public:
  enum class Align { kLeft, kRight };
  // `title` may be empty for no header cell.
  void add_column(std::string title, Align align);
  // Missing cells are empty; surplus ones are dropped.
  void add_row(std::vector<std::string> cells);
  // Lines end with '\n', without trailing blanks.
  std::string to_string() const;

 private:
  struct Column {
    std::string title;
    Align align;
  };
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// `text` broken at blanks to lines of at most `width` columns, every line indented by `indent` except the
// first.
std::string wrap(std::string_view text, size_t width, size_t indent);

// A file as the user named it: the option ("--timeline") and its path, empty when not given.
struct NamedFile {
  const char* option;
  std::string path;
};

// Before long work: each output can be written, and none is an input or another output, which it would replace. Errors:
// INVALID_ARGUMENT naming the option.
base::Status check_files(const std::vector<NamedFile>& inputs, const std::vector<NamedFile>& outputs);

// The --json option of a command, and its meaning for stdout.
class JsonOption {
 public:
  void declare(CLI::App& app);
  bool wanted() const { return !path_.empty(); }
  // True when stdout belongs to the JSON: print no table there.
  bool on_stdout() const { return path_ == "-"; }
  // For check_files.
  NamedFile file() const { return {"--json", path_}; }
  // Writes the document if it was asked for. Errors: IO_ERROR.
  base::Status write(const nlohmann::ordered_json& document) const;

 private:
  std::string path_;
};

// Replaces the file at `path` whole or not at all. Errors: IO_ERROR, with the path and the reason.
base::Status write_file(const std::string& path, std::string_view content);
// Writes text for people to stdout, as base::to_printable_lines makes it. Errors: IO_ERROR (closed pipe, full disk).
base::Status write_stdout(std::string_view text);
// Writes the bytes as they are: JSON, and what clears a terminal.
base::Status write_stdout_bytes(std::string_view bytes);

}  // namespace gpushare::cli
