// SPDX-License-Identifier: Apache-2.0
#include "loader/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

namespace gpushare::loader {
namespace {

const char* advice(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return "; check the path, and where a link leads";
    case EACCES:
    case EPERM:
      return "; let this process's user read it";
    case EMFILE:
      return "; this process has as many files open as it may (ulimit -n)";
    case EIO:
      return "; the disk or its connection failed: see the system's log";
    case ESTALE:
      return "; it was removed from the file server: load it again";
    default:
      return "";
  }
}

base::Status io_error(const char* verb, const std::string& path) {
  const int code = errno;
  return {GPUSHARE_IO_ERROR,
          std::string("cannot ") + verb + " " + path + ": " + std::strerror(code) + advice(code), code};
}

const char* kind(mode_t mode) {
  return S_ISDIR(mode) ? "a folder" : S_ISFIFO(mode) ? "a pipe" : S_ISSOCK(mode) ? "a socket" : "a device";
}

std::string version_of(const struct stat& facts) {
  return base::format("%llu:%llu:%lld.%09ld:%llu", static_cast<unsigned long long>(facts.st_dev),
                      static_cast<unsigned long long>(facts.st_ino),
                      static_cast<long long>(facts.st_mtim.tv_sec), facts.st_mtim.tv_nsec,
                      static_cast<unsigned long long>(facts.st_size));
}

std::atomic<ReadFunction> read_function{&::pread};

}  // namespace

void set_read_function(ReadFunction function) {
  read_function.store(function != nullptr ? function : &::pread);
}

base::Result<File> File::open(const std::string& path, Mode mode) {
  // Without O_NONBLOCK a pipe would wait here for a writer, perhaps for ever; to a regular file it is nothing.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (mode == Mode::kDirect ? O_DIRECT : 0);
  const int descriptor = ::open(path.c_str(), flags);
  if (descriptor < 0 && mode == Mode::kDirect && errno == EINVAL)
    return base::Status(GPUSHARE_UNSUPPORTED, "direct I/O is not possible on " + path, EINVAL);
  if (descriptor < 0) return io_error("open", path);
  File file(path, descriptor);
  struct stat facts {};
  if (fstat(descriptor, &facts) != 0) return io_error("read the size of", path);
  if (!S_ISREG(facts.st_mode))
    return base::Status(GPUSHARE_INVALID_ARGUMENT, path + " is " + kind(facts.st_mode) +
                                                       "; give a regular file, as of a model: *.safetensors "
                                                       "or *.safetensors.index.json");
  file.size_ = static_cast<uint64_t>(facts.st_size);
  file.version_ = version_of(facts);
  return file;
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_),
      version_(std::move(other.version_)) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

base::Status File::read_at(uint64_t offset, char* out, uint64_t bytes) const {
  while (bytes > 0) {
    // Linux transfers at most 2 GiB less a page at a time.
    const size_t step = static_cast<size_t>(std::min<uint64_t>(bytes, 1u << 30));
    const ssize_t got =
        read_function.load(std::memory_order_relaxed)(descriptor_, out, step, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return io_error("read", path_);
    if (got == 0)
      return {GPUSHARE_MALFORMED_INPUT,
              base::format("%s: ends at byte %llu while byte %llu was to be read; it became shorter",
                           path_.c_str(), static_cast<unsigned long long>(offset),
                           static_cast<unsigned long long>(offset) + bytes)};
    out += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return {};
}

double File::cached_share() const {
  constexpr int kSamples = 64;
  int cached = 0;
  for (int i = 0; i < kSamples; ++i) {
    char byte = 0;
    iovec part{&byte, 1};
    const auto offset = static_cast<off_t>(size_ / kSamples * static_cast<uint64_t>(i));
    if (preadv2(descriptor_, &part, 1, offset, RWF_NOWAIT) == 1) ++cached;
  }
  return static_cast<double>(cached) / kSamples;
}

base::Result<std::string> File::version_at(const std::string& path) {
  struct stat facts {};
  if (stat(path.c_str(), &facts) != 0) return io_error("look at", path);
  return version_of(facts);
}

}  // namespace gpushare::loader
