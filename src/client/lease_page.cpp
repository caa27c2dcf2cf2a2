// SPDX-License-Identifier: Apache-2.0
#include "client/lease_page.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace gpushare::client {

base::Result<std::shared_ptr<LeasePage>> LeasePage::map(Descriptor file, uint32_t slots) {
  void* memory = mmap(nullptr, lease_memory_bytes(slots), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return system_error(GPUSHARE_HOST_OUT_OF_MEMORY, "mapping the page of leases");
  return std::shared_ptr<LeasePage>(new LeasePage(std::move(file), slots, static_cast<LeaseMemory*>(memory)));
}

base::Result<std::shared_ptr<LeasePage>> LeasePage::create(uint32_t slots) {
  GPUSHARE_ASSIGN_OR_RETURN(
      Descriptor file, make_page_file("gpushare-leases", "the page of leases", lease_memory_bytes(slots)));
  GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<LeasePage> page, map(std::move(file), slots));
  page->memory_->mark.store(kLeasePageMark, std::memory_order_release);
  return page;
}

base::Result<std::shared_ptr<LeasePage>> LeasePage::open(Descriptor file, uint32_t slots) {
  const uint64_t bytes = page_file_bytes(file.get());
  if (bytes == 0) return base::Status(GPUSHARE_MALFORMED_INPUT, "what came is no page of leases of a daemon");
  uint64_t mark = 0;
  if (pread(file.get(), &mark, sizeof mark, 0) != sizeof mark || mark != kLeasePageMark ||
      bytes != lease_memory_bytes(slots))
    return base::Status(
        GPUSHARE_MALFORMED_INPUT,
        base::format("the daemon's page of leases has %llu bytes and the mark %#llx, where this build has "
                     "%zu and %#llx. "
                     "Install the daemon and this library from the same release",
                     static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(mark),
                     lease_memory_bytes(slots), static_cast<unsigned long long>(kLeasePageMark)));
  return map(std::move(file), slots);
}

LeasePage::~LeasePage() {
  munmap(memory_, lease_memory_bytes(slots_));
}

}  // namespace gpushare::client
