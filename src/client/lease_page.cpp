// SPDX-License-Identifier: Apache-2.0
#include "client/lease_page.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace gpushare::client {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

base::Status system_error(int32_t code, const char* what) {
  const int error = errno;
  return {code, std::string(what) + ": " + std::strerror(error), error};
}

}  // namespace

base::Result<std::shared_ptr<LeasePage>> LeasePage::map(Descriptor file, uint32_t slots) {
  void* memory = mmap(nullptr, lease_memory_bytes(slots), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return system_error(GPUSHARE_HOST_OUT_OF_MEMORY, "mapping the page of leases");
  return std::shared_ptr<LeasePage>(new LeasePage(std::move(file), slots, static_cast<LeaseMemory*>(memory)));
}

base::Result<std::shared_ptr<LeasePage>> LeasePage::create(uint32_t slots) {
  Descriptor file(memfd_create("gpushare-leases", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return system_error(GPUSHARE_IO_ERROR, "memfd_create for leases");
  if (ftruncate(file.get(), static_cast<off_t>(lease_memory_bytes(slots))) != 0 ||
      fcntl(file.get(), F_ADD_SEALS, kSeals) != 0)
    return system_error(GPUSHARE_IO_ERROR, "sizing the page of leases");
  GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<LeasePage> page, map(std::move(file), slots));
  page->memory_->mark.store(kLeasePageMark, std::memory_order_release);
  return page;
}

base::Result<std::shared_ptr<LeasePage>> LeasePage::open(Descriptor file, uint32_t slots) {
  struct stat info {};
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(file.get(), &info) != 0)
    return base::Status(GPUSHARE_MALFORMED_INPUT, "what came is no page of leases of a daemon");
  uint64_t mark = 0;
  if (pread(file.get(), &mark, sizeof mark, 0) != sizeof mark || mark != kLeasePageMark ||
      info.st_size != static_cast<off_t>(lease_memory_bytes(slots)))
    return base::Status(
        GPUSHARE_MALFORMED_INPUT,
        base::format("the daemon's page of leases has %lld bytes and the mark %#llx, where this build has "
                     "%zu and %#llx. "
                     "Install the daemon and this library from the same release",
                     static_cast<long long>(info.st_size), static_cast<unsigned long long>(mark),
                     lease_memory_bytes(slots), static_cast<unsigned long long>(kLeasePageMark)));
  return map(std::move(file), slots);
}

LeasePage::~LeasePage() {
  munmap(memory_, lease_memory_bytes(slots_));
}

}  // namespace gpushare::client
