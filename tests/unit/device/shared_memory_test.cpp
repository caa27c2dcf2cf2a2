// Memory of the host device that other processes map: nobody but its owner can write what was exported for reading.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "support/bytes.hpp"
#include "support/status_checks.hpp"

using namespace gpushare;
using device::Device;

namespace {

constexpr uint64_t kMemoryBytes = 1 << 20;

struct Owned {
  Owned() {
    address = *device->va_reserve(kMemoryBytes);
    handle = *device->phys_create_shared(kMemoryBytes);
    REQUIRE_OK(device->va_map(address, kMemoryBytes, handle, 0));
  }
  ~Owned() {
    CHECK_OK(device->va_unmap(address, kMemoryBytes));
    CHECK_OK(device->va_free(address, kMemoryBytes));
    CHECK_OK(device->phys_release(handle));
  }
  void fill(int value) {
    const std::vector<char> source(kMemoryBytes, static_cast<char>(value));
    REQUIRE_OK(stream.copy(address, reinterpret_cast<uintptr_t>(source.data()), kMemoryBytes,
                           GPUSHARE_COPY_HOST_TO_DEVICE));
    REQUIRE_OK(stream.synchronize());
  }
  bool holds(int value) const {
    return test::all_are(reinterpret_cast<const void*>(address), kMemoryBytes, value);
  }

  std::unique_ptr<Device> device = std::move(*Device::open("host?total_bytes=16777216&granularity=65536"));
  device::Stream stream = *device->create_stream();
  device::Address address = 0;
  gpushare_backend_memory* handle = nullptr;
};

// Every way to write that a process has with a descriptor. The number of the first that worked; 0 if none did. In a child
// of a fork: system calls alone.
int try_to_write(int given) {
  char path[32] = "/proc/self/fd/";
  char* end = path + std::strlen(path);
  if (given >= 10) *end++ = static_cast<char>('0' + given / 10 % 10);
  *end++ = static_cast<char>('0' + given % 10);
  const int opened = open(path, O_RDWR);
  for (const int file : {given, opened}) {
    if (file < 0) continue;
    const char bad = 'B';
    if (pwrite(file, &bad, 1, 0) == 1) return 1;
    if (mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) != MAP_FAILED) return 2;
    void* const read_only = mmap(nullptr, kMemoryBytes, PROT_READ, MAP_SHARED, file, 0);
    if (read_only == MAP_FAILED) return 3;
    if (mprotect(read_only, kMemoryBytes, PROT_READ | PROT_WRITE) == 0) return 4;
    if (ftruncate(file, 0) == 0 || ftruncate(file, 2 * kMemoryBytes) == 0) return 5;
    if (fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kMemoryBytes) == 0) return 6;
  }
  return 0;
}

int as_user(uid_t user, int descriptor) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    if (user != 0 && (setgid(user) != 0 || setuid(user) != 0)) _exit(100);
    _exit(try_to_write(descriptor));
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("shared memory: what was exported for reading is its owner's alone to write", "[host]") {
  Owned memory;
  memory.fill(1);
  const int descriptor = *memory.device->phys_export(memory.handle, GPUSHARE_ACCESS_READ);
  CHECK(as_user(0, descriptor) == 0);  // the same user; as root: with all of root's rights
  if (geteuid() == 0) CHECK(as_user(65534, descriptor) == 0);
  CHECK(memory.holds(1));
  memory.fill(2);  // the owner goes on filling it
  CHECK(memory.holds(2));
  char first = 0;
  CHECK(pread(descriptor, &first, 1, 0) == 1);
  CHECK(first == 2);
  CHECK(memory.device->phys_export(memory.handle, GPUSHARE_ACCESS_READ_WRITE).status().code() ==
        GPUSHARE_INVALID_ARGUMENT);
  close(descriptor);
}

TEST_CASE("shared memory: pages of an earlier use serve memory of either kind", "[host]") {
  // One device, so that released memory comes back.
  auto device = std::move(*Device::open("host?total_bytes=16777216&granularity=65536"));
  const device::Stream stream = *device->create_stream();
  const device::Address address = *device->va_reserve(kMemoryBytes);
  const std::vector<char> source(kMemoryBytes, 7);
  for (const uint32_t access : {GPUSHARE_ACCESS_READ, GPUSHARE_ACCESS_READ_WRITE, GPUSHARE_ACCESS_READ_WRITE,
                                GPUSHARE_ACCESS_READ, GPUSHARE_ACCESS_READ, GPUSHARE_ACCESS_READ_WRITE}) {
    for (const bool filled_first : {true, false}) {
      gpushare_backend_memory* const memory = *device->phys_create_shared(kMemoryBytes);
      REQUIRE_OK(device->va_map(address, kMemoryBytes, memory, 0));
      CHECK(test::all_are(reinterpret_cast<const void*>(address), kMemoryBytes, 0));
      const auto fill = [&] {
        REQUIRE_OK(stream.copy(address, reinterpret_cast<uintptr_t>(source.data()), kMemoryBytes,
                               GPUSHARE_COPY_HOST_TO_DEVICE));
        REQUIRE_OK(stream.synchronize());
      };
      if (filled_first) fill();
      const int descriptor = *device->phys_export(memory, access);
      if (!filled_first) fill();
      CHECK(test::all_are(reinterpret_cast<const void*>(address), kMemoryBytes, 7));
      char last = 0;
      CHECK(pread(descriptor, &last, 1, kMemoryBytes - 1) == 1);
      CHECK(last == 7);
      CHECK((as_user(0, descriptor) == 0) == (access == GPUSHARE_ACCESS_READ));
      close(descriptor);
      REQUIRE_OK(device->va_unmap(address, kMemoryBytes));
      REQUIRE_OK(device->phys_release(memory));
      usleep(2000);  // so that the thread that zeroes it is likely to be done
    }
  }
  REQUIRE_OK(device->va_free(address, kMemoryBytes));
}
