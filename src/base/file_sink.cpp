// SPDX-License-Identifier: Apache-2.0
#include "base/file_sink.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

namespace gpushare::base {

FileSink::FileSink(const std::string& path) : path_(path), target_(path) {
  struct stat info {};
  const bool exists = ::stat(path.c_str(), &info) == 0;
  if (exists && !S_ISREG(info.st_mode)) {
    file_ = std::fopen(path.c_str(), "wbe");
    if (file_ == nullptr) error_ = errno;
    return;
  }
  if (const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), std::free); real)
    target_ = real.get();
  // The temporary file must be new: an existing one may be another program's, or a link.
  static std::atomic<unsigned> next{0};
  for (int tries = 0; file_ == nullptr && tries < 100; ++tries) {
    temporary_ = format("%s.tmp.%ld.%u", target_.c_str(), static_cast<long>(::getpid()), next++);
    file_ = std::fopen(temporary_.c_str(), "wbxe");
    error_ = file_ == nullptr ? errno : 0;
    if (error_ != 0 && error_ != EEXIST) return;
  }
}

FileSink::FileSink(FileSink&& other) noexcept
    : path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      temporary_(std::move(other.temporary_)),
      file_(std::exchange(other.file_, nullptr)),
      error_(other.error_) {}

FileSink::~FileSink() {
  discard();
}

void FileSink::write(std::string_view bytes) {
  if (error_ == 0 && std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size())
    error_ = errno != 0 ? errno : EIO;
}

Status FileSink::close() {
  if (file_ != nullptr && error_ == 0) {
    if (std::fclose(std::exchange(file_, nullptr)) != 0) error_ = errno != 0 ? errno : EIO;
    if (error_ == 0 && !temporary_.empty() && std::rename(temporary_.c_str(), target_.c_str()) != 0)
      error_ = errno;
    if (error_ != 0 && !temporary_.empty()) (void)::unlink(temporary_.c_str());
  }
  discard();
  if (error_ == 0) return {};
  return {GPUSHARE_IO_ERROR, format("cannot write '%s': %s", path_.c_str(), std::strerror(error_)), error_};
}

// Drops what has not taken its place.
void FileSink::discard() {
  if (file_ == nullptr) return;
  std::fclose(std::exchange(file_, nullptr));
  if (!temporary_.empty()) (void)::unlink(temporary_.c_str());
}

}  // namespace gpushare::base
