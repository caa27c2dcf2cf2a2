// file.hpp: reading a regular file by position: short reads and EINTR handled, changes noticed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/status.hpp"

namespace gpushare::loader {

// The function that read_at calls: pread, or a test's stand-in that is interrupted or reads short.
using ReadFunction = ssize_t (*)(int descriptor, void* out, size_t bytes, off_t offset);
// For tests; null restores pread. Not while files are read.
void set_read_function(ReadFunction function);

class File {
 public:
  enum class Mode : uint8_t { kBuffered, kDirect };
  // Never waits for a pipe's other end. Errors: IO_ERROR with errno and advice; INVALID_ARGUMENT naming the kind of
  // anything but a regular file; UNSUPPORTED if the file system has no direct I/O.
  static base::Result<File> open(const std::string& path, Mode mode = Mode::kBuffered);
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  int descriptor() const { return descriptor_; }
  // Reads exactly `bytes`. Errors: IO_ERROR; MALFORMED_INPUT if the file ends before.
  base::Status read_at(uint64_t offset, char* out, uint64_t bytes) const;
  // How much of it the page cache has, by samples: 0 to 1. 0 where the system does not tell.
  double cached_share() const;
  // Identifies the content of a file without reading it: device, inode, time of modification and size at the
  // time of opening.
  const std::string& version() const { return version_; }
  // The version of the file at `path` now. It is found by name, so a replaced file differs.
  static base::Result<std::string> version_at(const std::string& path);

 private:
  File(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  std::string path_;
  int descriptor_;
  uint64_t size_ = 0;
  std::string version_;
};

}  // namespace gpushare::loader
