// file_sink.hpp: a file written front to back that takes its place whole or not at all: bytes go to a temporary beside it, and
// close() renames that. Pipes, terminals and devices such as /dev/null have no such place and are written to directly.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

#include "base/status.hpp"

namespace gpushare::base {

// One thread at a time; blocks on the disk. Remembers the first failure, which close() tells. Without close(), or after
// a failure, the file that was there before still is.
class FileSink {
 public:
  explicit FileSink(const std::string& path);
  FileSink(FileSink&& other) noexcept;
  FileSink& operator=(FileSink&&) = delete;
  ~FileSink();

  bool failed() const { return error_ != 0; }
  void write(std::string_view bytes);
  void put(char byte) { write(std::string_view(&byte, 1)); }
  // Errors: IO_ERROR with errno.
  Status close();

 private:
  void discard();

  std::string path_;       // as given, for messages
  std::string target_;     // the file to replace: path_ with symbolic links followed
  std::string temporary_;  // empty: written directly
  std::FILE* file_ = nullptr;
  int error_ = 0;
};

}  // namespace gpushare::base
