// SPDX-License-Identifier: Apache-2.0
#include "device/support/shared_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/units.hpp"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace gpushare::device {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

base::Status file_error(int32_t code, const char* what, uint64_t bytes) {
  const int error = errno;
  return {code,
          base::format("%s of %s failed: %s", what, base::format_bytes(bytes).c_str(), std::strerror(error)),
          error};
}

std::string path_of(int file) {
  return "/proc/self/fd/" + std::to_string(file);
}

}  // namespace

base::Result<std::shared_ptr<SharedFile>> SharedFile::create(uint64_t bytes) {
  const int anonymous = memfd_create("gpushare-shared", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (anonymous < 0) return file_error(GPUSHARE_IO_ERROR, "memfd_create for shared memory", bytes);
  const bool sized =
      ftruncate(anonymous, static_cast<off_t>(bytes)) == 0 && fcntl(anonymous, F_ADD_SEALS, kSizeSeals) == 0;
  // Opened by path, as leases count only such (SpareFiles).
  const int file = sized ? open(path_of(anonymous).c_str(), O_RDWR | O_CLOEXEC) : -1;
  base::Status failed;
  void* pages = MAP_FAILED;
  if (file >= 0) pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (pages == MAP_FAILED)
    failed = file_error(GPUSHARE_HOST_OUT_OF_MEMORY, "making shared memory (needs /proc)", bytes);
  close(anonymous);
  if (!failed.ok()) {
    if (file >= 0) close(file);
    return failed;
  }
  (void)madvise(pages, bytes, MADV_DONTFORK);  // as all device memory
  return std::shared_ptr<SharedFile>(new SharedFile(file, static_cast<char*>(pages), bytes));
}

SharedFile::~SharedFile() {
  munmap(pages_, bytes_);
  close(number_);
}

base::Result<bool> SharedFile::seal(bool read_only) {
  if (sealed_) return read_only == read_only_;
  if (fcntl(number_, F_ADD_SEALS, F_SEAL_SEAL | (read_only ? F_SEAL_FUTURE_WRITE : 0)) != 0)
    return file_error(GPUSHARE_IO_ERROR, "sealing (needs Linux 5.1) shared memory", bytes_);
  sealed_ = true;
  read_only_ = read_only;
  return true;
}

base::Result<int> SharedFile::open_again(int mode) const {
  const int file = open(path_of(number_).c_str(), mode | O_CLOEXEC);
  if (file < 0)
    return file_error(GPUSHARE_IO_ERROR, "opening a descriptor (needs /proc) of shared memory", bytes_);
  return file;
}

bool SharedFile::map_at(char* target, uint64_t bytes, uint64_t offset) const {
  // An old size of 0 makes a second mapping of the same pages with the same rights. mmap would be refused once the file
  // is sealed.
  return mremap(pages_ + offset, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target) != MAP_FAILED;
}

bool SharedFile::is_shared(int descriptor) {
  const int seals = fcntl(descriptor, F_GET_SEALS);
  return seals >= 0 && (seals & (kSizeSeals | F_SEAL_SEAL)) == (kSizeSeals | F_SEAL_SEAL);
}

}  // namespace gpushare::device
