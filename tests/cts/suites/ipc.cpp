// Memory shared between processes. The other process is this program again, see child.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include "child.hpp"
#include "cts.hpp"

namespace gpushare::cts {
namespace {

// A descriptor, closed when it dies.
struct Descriptor {
  explicit Descriptor(int number) : value(number) {}
  Descriptor(Descriptor&& other) noexcept : value(std::exchange(other.value, -1)) {}
  ~Descriptor() { reset(); }
  void reset() {
    if (value >= 0) close(value);
    value = -1;
  }
  int value;
};

// Shared memory of `granules`, mapped and holding `data`.
struct Shared {
  Shared(Context& context, uint64_t granules, uint64_t seed) : cts(context) {
    bytes = granules * cts.device->info().mapping_granularity_bytes;
    const auto made = cts.device->phys_create_shared(bytes);
    INFO(made.status().to_string());
    REQUIRE(made.ok());
    memory = *made;
    address = *cts.device->va_reserve(bytes);
    REQUIRE_OK(cts.device->va_map(address, bytes, memory, 0));
    data = pattern(bytes, seed);
    cts.upload(cts.stream(), address, data);
  }
  ~Shared() { drop(); }
  void drop() {
    if (address == 0) return;
    CHECK_OK(cts.device->va_unmap(address, bytes));
    CHECK_OK(cts.device->va_free(address, bytes));
    CHECK_OK(cts.device->phys_release(memory));
    address = 0;
  }
  Descriptor descriptor(uint32_t access = GPUSHARE_ACCESS_READ_WRITE) const {
    const auto exported = cts.device->phys_export(memory, access);
    INFO(exported.status().to_string());
    REQUIRE(exported.ok());
    return Descriptor(*exported);
  }
  Context& cts;
  uint64_t bytes = 0;
  gpushare_backend_memory* memory = nullptr;
  device::Address address = 0;
  std::vector<uint8_t> data;
};

// An import, mapped at an address of its own.
struct Import {
  Import(Context& context, int descriptor, uint64_t size, uint32_t access = GPUSHARE_ACCESS_READ_WRITE)
      : cts(context), bytes(size) {
    const auto imported = cts.device->phys_import(descriptor, bytes, access);
    INFO(imported.status().to_string());
    REQUIRE(imported.ok());
    memory = *imported;
    address = *cts.device->va_reserve(bytes);
    REQUIRE_OK(cts.device->va_map(address, bytes, memory, 0));
  }
  ~Import() {
    CHECK_OK(cts.device->va_unmap(address, bytes));
    CHECK_OK(cts.device->va_free(address, bytes));
    if (memory != nullptr) CHECK_OK(cts.device->phys_release(memory));
  }
  Context& cts;
  uint64_t bytes;
  gpushare_backend_memory* memory = nullptr;
  device::Address address = 0;
};

}  // namespace

CTS_TEST("ipc: the capability says that the group works") {
  REQUIRE(cts.device->can(GPUSHARE_DEVICE_CAP_IPC));
  REQUIRE(cts.device->can(GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY));
}

CTS_TEST("ipc: an import in the same process is the same memory") {
  Shared shared(cts, 2, 20);
  const Descriptor descriptor = shared.descriptor();
  CHECK((fcntl(descriptor.value, F_GETFD) & FD_CLOEXEC) != 0);
  const Import import(cts, descriptor.value, shared.bytes);
  const auto stream = cts.stream();
  CHECK(cts.download(stream, import.address, shared.bytes) == shared.data);
  REQUIRE_OK(stream.fill(import.address + 100, 0x5A, 50));
  CHECK(cts.download(stream, shared.address + 100, 50) == std::vector<uint8_t>(50, 0x5A));
}

CTS_TEST("ipc: another process reads and writes the memory") {
  Shared shared(cts, 2, 21);
  const Descriptor descriptor = shared.descriptor();
  CHECK(run_child({"invert", descriptor.value, shared.bytes, 21}) == 0);
  for (uint8_t& byte : shared.data) byte = static_cast<uint8_t>(~byte);
  CHECK(cts.download(cts.stream(), shared.address, shared.bytes) == shared.data);
}

CTS_TEST("ipc: another process maps part of the memory") {
  Shared shared(cts, 3, 22);
  const Descriptor descriptor = shared.descriptor();
  CHECK(run_child({"read_last_granule", descriptor.value, shared.bytes, 22}) == 0);
}

CTS_TEST("ipc: a process that dies takes nothing along") {
  Shared shared(cts, 2, 23);
  const Descriptor descriptor = shared.descriptor();
  CHECK(run_child({"read_and_die", descriptor.value, shared.bytes, 23}) == 128 + 9);
  CHECK(cts.download(cts.stream(), shared.address, shared.bytes) == shared.data);
}

CTS_TEST("ipc: an import opened for reading reads in another process") {
  Shared shared(cts, 2, 24);
  const Descriptor descriptor = shared.descriptor(GPUSHARE_ACCESS_READ);
  CHECK(run_child({"read", descriptor.value, shared.bytes, 24}) == 0);
}

CTS_TEST("ipc: a copy into a read-only import is refused") {
  Shared shared(cts, 1, 25);
  const Descriptor descriptor = shared.descriptor(GPUSHARE_ACCESS_READ);
  const Import import(cts, descriptor.value, shared.bytes, GPUSHARE_ACCESS_READ);
  const auto stream = cts.stream();
  CHECK(cts.download(stream, import.address, shared.bytes) == shared.data);
  CHECK(is_call_error(stream.fill(import.address, 1, 16)));
  CHECK(is_call_error(
      stream.copy(import.address, address_of(shared.data.data()), 16, GPUSHARE_COPY_HOST_TO_DEVICE)));
  CHECK(is_call_error(stream.copy(import.address, shared.address, 16, GPUSHARE_COPY_DEVICE_TO_DEVICE)));
  CHECK(cts.download(stream, import.address, shared.bytes) == shared.data);
}

CTS_TEST("ipc: what was exported for reading cannot be imported for writing") {
  Shared shared(cts, 1, 26);
  const Descriptor descriptor = shared.descriptor(GPUSHARE_ACCESS_READ);
  CHECK(is_call_error(
      cts.device->phys_import(descriptor.value, shared.bytes, GPUSHARE_ACCESS_READ_WRITE).status()));
}

CTS_TEST("ipc: memory lives while a descriptor or an import lives") {
  Shared shared(cts, 2, 27);
  const auto data = shared.data;
  Descriptor descriptor = shared.descriptor();
  shared.drop();
  {
    // Only the descriptor is left.
    Import import(cts, descriptor.value, shared.bytes);
    descriptor.reset();
    // Only the import.
    const auto stream = cts.stream();
    CHECK(cts.download(stream, import.address, shared.bytes) == data);
    REQUIRE_OK(cts.device->phys_release(std::exchange(import.memory, nullptr)));
    // Only its mapping.
    CHECK(cts.download(stream, import.address, shared.bytes) == data);
  }
}

CTS_TEST("ipc: one descriptor imported twice is one memory with two handles") {
  Shared shared(cts, 1, 28);
  const Descriptor descriptor = shared.descriptor();
  const Import first(cts, descriptor.value, shared.bytes);
  const auto stream = cts.stream();
  {
    const Import second(cts, descriptor.value, shared.bytes);
    CHECK(second.memory != first.memory);
    REQUIRE_OK(stream.fill(second.address, 7, 32));
    CHECK(cts.download(stream, first.address, 32) == std::vector<uint8_t>(32, 7));
  }
  CHECK(cts.download(stream, first.address, 32) == std::vector<uint8_t>(32, 7));
}

CTS_TEST("ipc: descriptors that are none are refused") {
  const uint64_t granule = cts.device->info().mapping_granularity_bytes;
  REQUIRE(cts.device->can(GPUSHARE_DEVICE_CAP_IPC));
  CHECK(is_call_error(cts.device->phys_import(-1, granule, GPUSHARE_ACCESS_READ_WRITE).status()));
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  const Descriptor in(ends[0]), out(ends[1]);
  const auto refused = cts.device->phys_import(ends[0], granule, GPUSHARE_ACCESS_READ_WRITE).status();
  CHECK_FALSE(refused.ok());
  const Descriptor null(open("/dev/null", O_RDWR | O_CLOEXEC));
  CHECK_FALSE(cts.device->phys_import(null.value, granule, GPUSHARE_ACCESS_READ_WRITE).ok());
}

CTS_TEST("ipc: an import names the bytes that were created") {
  Shared shared(cts, 2, 29);
  const Descriptor descriptor = shared.descriptor();
  CHECK(is_call_error(
      cts.device->phys_import(descriptor.value, shared.bytes / 2, GPUSHARE_ACCESS_READ_WRITE).status()));
  CHECK(is_call_error(
      cts.device->phys_import(descriptor.value, shared.bytes + 1, GPUSHARE_ACCESS_READ_WRITE).status()));
  CHECK(is_call_error(cts.device->phys_import(descriptor.value, 0, GPUSHARE_ACCESS_READ_WRITE).status()));
}

CTS_TEST("ipc: only shared memory of this device is exported") {
  const uint64_t granule = cts.device->info().mapping_granularity_bytes;
  Shared shared(cts, 1, 30);
  const Descriptor descriptor = shared.descriptor();
  gpushare_backend_memory* plain = *cts.device->phys_create(granule);
  CHECK(is_call_error(cts.device->phys_export(plain, GPUSHARE_ACCESS_READ).status()));
  CHECK_OK(cts.device->phys_release(plain));
  gpushare_backend_memory* imported =
      *cts.device->phys_import(descriptor.value, shared.bytes, GPUSHARE_ACCESS_READ);
  CHECK(is_call_error(cts.device->phys_export(imported, GPUSHARE_ACCESS_READ).status()));
  CHECK_OK(cts.device->phys_release(imported));
  CHECK(cts.device->phys_export(nullptr, GPUSHARE_ACCESS_READ).status().code() == GPUSHARE_INVALID_HANDLE);
  CHECK(is_call_error(cts.device->phys_export(shared.memory, 0).status()));
  CHECK(is_call_error(cts.device->phys_export(shared.memory, 2).status()));
  CHECK(is_call_error(cts.device->phys_import(descriptor.value, shared.bytes, 4).status()));
  CHECK(is_call_error(cts.device->phys_create_shared(0).status()));
  CHECK(is_call_error(cts.device->phys_create_shared(granule + 1).status()));
}

CTS_TEST("ipc: shared memory counts where it was created and until it goes") {
  REQUIRE(cts.device->can(GPUSHARE_DEVICE_CAP_IPC));
  if (!has_tag(kExactMemory)) return;
  const uint64_t granule = cts.device->info().mapping_granularity_bytes;
  const auto free_now = [&] { return cts.device->refresh_info()->free_bytes; };
  const uint64_t before = free_now();
  {
    Shared shared(cts, 2, 31);
    CHECK(free_now() == before - 2 * granule);
    const Descriptor descriptor = shared.descriptor();
    const Import import(cts, descriptor.value, shared.bytes);
    CHECK(free_now() == before - 2 * granule);
  }
  CHECK(free_now() == before);
  CHECK(cts.device->phys_create_shared(before + granule).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
}

}  // namespace gpushare::cts
