// file_sink.hpp: a file written front to back, for the exports of this folder.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "base/status.hpp"

namespace gpushare::memory {

// Not thread-safe. Remembers the first failure; close() tells it. A file that could not be written to its end stays as far as it
// was written.
class FileSink {
 public:
  explicit FileSink(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "wb")) {
    if (file_ == nullptr) error_ = errno;
  }
  ~FileSink() {
    if (file_ != nullptr) std::fclose(file_);
  }
  FileSink(const FileSink&) = delete;
  FileSink& operator=(const FileSink&) = delete;

  bool failed() const { return error_ != 0; }
  void write(std::string_view bytes) {
    if (error_ == 0 && std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size())
      error_ = errno != 0 ? errno : EIO;
  }
  void put(char byte) { write(std::string_view(&byte, 1)); }
  // Errors: IO_ERROR with errno.
  base::Status close() {
    if (file_ != nullptr && std::fclose(file_) != 0 && error_ == 0) error_ = errno != 0 ? errno : EIO;
    file_ = nullptr;
    if (error_ == 0) return {};
    return {GPUSHARE_IO_ERROR, "cannot write '" + path_ + "': " + std::strerror(error_), error_};
  }

 private:
  const std::string path_;
  std::FILE* file_;
  int error_ = 0;
};

}  // namespace gpushare::memory
