// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"
#include "support/random.hpp"

namespace gpushare::cts {
namespace {

uint64_t granule_of(const Context& cts) {
  const uint64_t granule = cts.device->info().mapping_granularity_bytes;
  REQUIRE(granule > 0);
  return granule;
}

}  // namespace

CTS_TEST("virtual memory: ranges are reserved aligned and given back") {
  const uint64_t granule = granule_of(cts);
  REQUIRE(cts.device->can(GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY));
  const auto small = cts.device->va_reserve(granule);
  // More than there is memory: addresses are not memory.
  const uint64_t large_bytes = (2 * cts.device->info().total_bytes + granule) / granule * granule;
  const auto large = cts.device->va_reserve(large_bytes);
  REQUIRE_OK(small.status());
  REQUIRE_OK(large.status());
  CHECK(*small % granule == 0);
  CHECK(*large % granule == 0);
  CHECK((*small + granule <= *large || *large + large_bytes <= *small));
  CHECK_OK(cts.device->va_free(*small, granule));
  CHECK_OK(cts.device->va_free(*large, large_bytes));
}

CTS_TEST("virtual memory: mapped memory is written and read") {
  const uint64_t granule = granule_of(cts);
  const auto data = pattern(granule, 5);
  const device::Address range = *cts.device->va_reserve(4 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(granule);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(cts.device->va_map(range + granule, granule, memory, 0));
    cts.upload(stream, range + granule, data);
    CHECK(cts.download(stream, range + granule, granule) == data);
  }
  CHECK_OK(cts.device->va_unmap(range + granule, granule));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, 4 * granule));
}

CTS_TEST("virtual memory: data move with the memory to another address") {
  const uint64_t granule = granule_of(cts);
  const auto data = pattern(granule, 6);
  const device::Address first = *cts.device->va_reserve(granule);
  const device::Address second = *cts.device->va_reserve(2 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(granule);
  gpushare_backend_memory* other = *cts.device->phys_create(granule);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(cts.device->va_map(first, granule, memory, 0));
    cts.upload(stream, first, data);
    REQUIRE_OK(cts.device->va_unmap(first, granule));
    REQUIRE_OK(cts.device->va_map(second + granule, granule, memory, 0));
    // Other memory takes the old address.
    REQUIRE_OK(cts.device->va_map(first, granule, other, 0));
    REQUIRE_OK(stream.fill(first, 0, granule));
    CHECK(cts.download(stream, second + granule, granule) == data);
  }
  CHECK_OK(cts.device->va_unmap(first, granule));
  CHECK_OK(cts.device->va_unmap(second + granule, granule));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->phys_release(other));
  CHECK_OK(cts.device->va_free(first, granule));
  CHECK_OK(cts.device->va_free(second, 2 * granule));
}

CTS_TEST("virtual memory: one memory at two addresses") {
  const uint64_t granule = granule_of(cts);
  const device::Address range = *cts.device->va_reserve(2 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(granule);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(cts.device->va_map(range, granule, memory, 0));
    REQUIRE_OK(cts.device->va_map(range + granule, granule, memory, 0));
    const auto data = pattern(granule, 7);
    cts.upload(stream, range, data);
    CHECK(cts.download(stream, range + granule, granule) == data);
    // One mapping goes, the other stays.
    REQUIRE_OK(cts.device->va_unmap(range, granule));
    CHECK(cts.download(stream, range + granule, granule) == data);
  }
  CHECK_OK(cts.device->va_unmap(range + granule, granule));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, 2 * granule));
}

CTS_TEST("virtual memory: a copy runs across neighbouring mappings") {
  const uint64_t granule = granule_of(cts);
  const auto data = pattern(3 * granule, 8);
  const device::Address range = *cts.device->va_reserve(3 * granule);
  std::vector<gpushare_backend_memory*> memories;
  {
    const auto stream = cts.stream();
    // Mapped out of order.
    for (const uint64_t i : {2, 0, 1}) {
      memories.push_back(*cts.device->phys_create(granule));
      REQUIRE_OK(cts.device->va_map(range + i * granule, granule, memories.back(), 0));
    }
    cts.upload(stream, range, data);
    CHECK(cts.download(stream, range, 3 * granule) == data);
    const auto middle = cts.download(stream, range + granule - 10, 20);
    CHECK(middle == std::vector<uint8_t>(data.begin() + static_cast<std::ptrdiff_t>(granule - 10),
                                         data.begin() + static_cast<std::ptrdiff_t>(granule + 10)));
  }
  for (uint64_t i = 0; i < 3; ++i) CHECK_OK(cts.device->va_unmap(range + i * granule, granule));
  for (auto* memory : memories) CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, 3 * granule));
}

CTS_TEST("virtual memory: a mapping at an offset of the memory") {
  const uint64_t granule = granule_of(cts);
  const auto data = pattern(4 * granule, 9);
  const device::Address range = *cts.device->va_reserve(4 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(4 * granule);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(cts.device->va_map(range, 4 * granule, memory, 0));
    cts.upload(stream, range, data);
    REQUIRE_OK(cts.device->va_unmap(range, 4 * granule));
    REQUIRE_OK(cts.device->va_map(range, 2 * granule, memory, granule));
    CHECK(cts.download(stream, range, 2 * granule) ==
          std::vector<uint8_t>(data.begin() + static_cast<std::ptrdiff_t>(granule),
                               data.begin() + static_cast<std::ptrdiff_t>(3 * granule)));
    CHECK(is_call_error(cts.device->va_map(range + 2 * granule, 2 * granule, memory, 3 * granule)));
  }
  CHECK_OK(cts.device->va_unmap(range, 2 * granule));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, 4 * granule));
}

CTS_TEST("virtual memory: memory lives until its last mapping goes") {
  const uint64_t granule = granule_of(cts);
  const auto data = pattern(granule, 10);
  const uint64_t before = cts.device->refresh_info()->free_bytes;
  const device::Address range = *cts.device->va_reserve(granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(granule);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(cts.device->va_map(range, granule, memory, 0));
    cts.upload(stream, range, data);
    REQUIRE_OK(cts.device->phys_release(memory));
    CHECK(cts.download(stream, range, granule) == data);
  }
  if (has_tag(kExactMemory)) CHECK(cts.device->refresh_info()->free_bytes == before - granule);
  CHECK_OK(cts.device->va_unmap(range, granule));
  if (has_tag(kExactMemory)) CHECK(cts.device->refresh_info()->free_bytes == before);
  CHECK_OK(cts.device->va_free(range, granule));
}

CTS_TEST("virtual memory: capacity is shared with allocations") {
  if (!has_tag(kExactMemory)) return;
  const uint64_t granule = granule_of(cts);
  const uint64_t half = cts.device->info().total_bytes / 2 / granule * granule;
  const device::Address block = *cts.device->alloc(half);
  gpushare_backend_memory* memory = *cts.device->phys_create(half);
  CHECK(cts.device->phys_create(granule * 2).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(cts.device->alloc(granule * 2).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->free(block));
}

CTS_TEST("virtual memory: sizes and addresses must be multiples of the granularity") {
  const uint64_t granule = granule_of(cts);
  CHECK(is_call_error(cts.device->va_reserve(granule + 1).status()));
  CHECK(is_call_error(cts.device->va_reserve(0).status()));
  CHECK(is_call_error(cts.device->phys_create(granule / 2).status()));
  CHECK(is_call_error(cts.device->phys_create(0).status()));
  const device::Address range = *cts.device->va_reserve(2 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(granule);
  CHECK(is_call_error(cts.device->va_map(range + granule / 2, granule, memory, 0)));
  CHECK(is_call_error(cts.device->va_map(range, granule / 2, memory, 0)));
  CHECK(is_call_error(cts.device->va_map(range, granule, memory, granule / 2)));
  CHECK(is_call_error(cts.device->va_map(range, 0, memory, 0)));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, 2 * granule));
}

CTS_TEST("virtual memory: what is mapped cannot be mapped or freed") {
  const uint64_t granule = granule_of(cts);
  const device::Address range = *cts.device->va_reserve(4 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(2 * granule);
  gpushare_backend_memory* other = *cts.device->phys_create(2 * granule);
  REQUIRE_OK(cts.device->va_map(range + granule, 2 * granule, memory, 0));
  CHECK(is_call_error(cts.device->va_map(range + granule, 2 * granule, other, 0)));
  CHECK(is_call_error(cts.device->va_map(range, 2 * granule, other, 0)));
  CHECK(is_call_error(cts.device->va_map(range + 2 * granule, 2 * granule, other, 0)));
  CHECK(is_call_error(cts.device->va_free(range, 4 * granule)));
  CHECK_OK(cts.device->va_unmap(range + granule, 2 * granule));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->phys_release(other));
  CHECK_OK(cts.device->va_free(range, 4 * granule));
}

CTS_TEST("virtual memory: only reserved ranges can be mapped") {
  const uint64_t granule = granule_of(cts);
  const device::Address range = *cts.device->va_reserve(2 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(2 * granule);
  CHECK(is_call_error(cts.device->va_map(range + granule, 2 * granule, memory, 0)));
  CHECK(is_call_error(cts.device->va_map(range, 4 * granule, memory, 0)));
  CHECK_OK(cts.device->va_free(range, 2 * granule));
  CHECK(is_call_error(cts.device->va_map(range, 2 * granule, memory, 0)));
  CHECK_OK(cts.device->phys_release(memory));
}

CTS_TEST("virtual memory: ranges are unmapped as they were mapped and once") {
  const uint64_t granule = granule_of(cts);
  const device::Address range = *cts.device->va_reserve(4 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(2 * granule);
  CHECK(is_call_error(cts.device->va_unmap(range, granule)));
  REQUIRE_OK(cts.device->va_map(range, 2 * granule, memory, 0));
  CHECK(is_call_error(cts.device->va_unmap(range, granule)));
  CHECK(is_call_error(cts.device->va_unmap(range + granule, granule)));
  CHECK_OK(cts.device->va_unmap(range, 2 * granule));
  CHECK(is_call_error(cts.device->va_unmap(range, 2 * granule)));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, 4 * granule));
}

CTS_TEST("virtual memory: a run of memories is mapped and unmapped side by side") {
  const uint64_t granule = granule_of(cts);
  const auto data = pattern(4 * granule, 12);
  const device::Address range = *cts.device->va_reserve(5 * granule);
  std::vector<gpushare_backend_memory*> memories;
  for (int i = 0; i < 4; ++i) memories.push_back(*cts.device->phys_create(granule));
  std::swap(memories[0], memories[2]);  // neighbours in no order
  uint64_t done = 9;
  {
    const auto stream = cts.stream();
    REQUIRE_OK(cts.device->va_map_run(range, granule, memories.data(), 4));
    cts.upload(stream, range, data);
    // A run ends anywhere, and each mapping is also one by itself.
    REQUIRE_OK(cts.device->va_unmap(range + granule, granule));
    REQUIRE_OK(cts.device->va_unmap_run(range + 2 * granule, granule, 2, &done));
    CHECK(done == 2);
    REQUIRE_OK(cts.device->va_map(range + granule, granule, memories[1], 0));
    REQUIRE_OK(cts.device->va_map_run(range + 2 * granule, granule, &memories[2], 2));
    CHECK(cts.download(stream, range, 4 * granule) == data);
  }
  REQUIRE_OK(cts.device->va_unmap_run(range, granule, 4, &done));
  CHECK(done == 4);
  for (auto* memory : memories) CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, 5 * granule));
}

CTS_TEST("virtual memory: a run that cannot be mapped or unmapped as asked changes nothing") {
  const uint64_t granule = granule_of(cts);
  const device::Address range = *cts.device->va_reserve(4 * granule);
  gpushare_backend_memory* memories[3];
  for (auto& memory : memories) memory = *cts.device->phys_create(granule);
  gpushare_backend_memory* const taken = *cts.device->phys_create(granule);
  REQUIRE_OK(cts.device->va_map(range + 2 * granule, granule, taken, 0));
  CHECK(is_call_error(cts.device->va_map_run(range, granule, memories, 3)));  // the third is taken
  CHECK(is_call_error(cts.device->va_map_run(range + 3 * granule, granule, memories, 2)));  // beyond the end
  CHECK(is_call_error(cts.device->va_map_run(range, 2 * granule, memories, 1)));  // more than it has
  CHECK(is_call_error(cts.device->va_map_run(range, granule / 2, memories, 2)));
  CHECK(is_call_error(cts.device->va_map_run(range, granule, memories, 0)));
  REQUIRE_OK(cts.device->phys_release(memories[2]));
  CHECK(is_call_error(cts.device->va_map_run(range, granule, memories + 1, 2)));  // the second is released
  REQUIRE_OK(cts.device->va_map_run(range, granule, memories, 2));
  uint64_t done = 9;
  CHECK(is_call_error(cts.device->va_unmap_run(range, granule, 4, &done)));  // the fourth is not mapped
  CHECK(done == 0);
  CHECK(is_call_error(cts.device->va_unmap_run(range, granule, 0, &done)));
  REQUIRE_OK(cts.device->va_unmap_run(range, granule, 3, &done));
  CHECK(done == 3);
  CHECK(is_call_error(cts.device->va_unmap_run(range, granule, 1, &done)));
  CHECK_OK(cts.device->phys_release(memories[0]));
  CHECK_OK(cts.device->phys_release(memories[1]));
  CHECK_OK(cts.device->phys_release(taken));
  CHECK_OK(cts.device->va_free(range, 4 * granule));
}

CTS_TEST("virtual memory: handles and ranges are given back once") {
  const uint64_t granule = granule_of(cts);
  const device::Address range = *cts.device->va_reserve(2 * granule);
  gpushare_backend_memory* memory = *cts.device->phys_create(granule);
  CHECK(is_call_error(cts.device->va_free(range, granule)));
  CHECK_OK(cts.device->va_free(range, 2 * granule));
  CHECK(is_call_error(cts.device->va_free(range, 2 * granule)));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK(is_call_error(cts.device->phys_release(memory)));
}

CTS_TEST("virtual memory: a thousand granules come and go") {
  const uint64_t granule = granule_of(cts);
  const device::Address range = *cts.device->va_reserve(8 * granule);
  const auto stream = cts.stream();
  for (uint64_t i = 0; i < 1000; ++i) {
    const device::Address at = range + (i * 5 % 8) * granule;
    gpushare_backend_memory* memory = *cts.device->phys_create(granule);
    REQUIRE_OK(cts.device->va_map(at, granule, memory, 0));
    if (i % 100 == 0) {
      REQUIRE_OK(stream.fill(at, 1, granule));
      REQUIRE_OK(stream.synchronize());
    }
    REQUIRE_OK(cts.device->va_unmap(at, granule));
    REQUIRE_OK(cts.device->phys_release(memory));
  }
  CHECK_OK(cts.device->va_free(range, 8 * granule));
}

// Memories wander between addresses, several addresses to a memory, against a model that is a number a
// memory.
CTS_TEST("virtual memory: random remapping against a model") {
  INFO("seed " << test::seed());
  test::Random random(test::seed());
  const uint64_t granule = granule_of(cts);
  constexpr size_t kSlots = 8;
  constexpr size_t kMemories = 5;
  constexpr size_t kNone = SIZE_MAX;
  const device::Address range = *cts.device->va_reserve(kSlots * granule);
  const auto slot_address = [&](size_t slot) { return range + slot * granule; };
  std::vector<gpushare_backend_memory*> memories;
  std::vector<uint8_t> holds(kMemories, 0);
  std::vector<size_t> mapped(kSlots, kNone);
  const auto stream = cts.stream();
  for (size_t i = 0; i < kMemories; ++i) {
    memories.push_back(*cts.device->phys_create(granule));
    REQUIRE_OK(cts.device->va_map(slot_address(0), granule, memories[i], 0));
    REQUIRE_OK(stream.fill(slot_address(0), 0, granule));
    REQUIRE_OK(stream.synchronize());
    REQUIRE_OK(cts.device->va_unmap(slot_address(0), granule));
  }
  for (int step = 0; step < 1500; ++step) {
    const size_t slot = test::uniform(random, 0, kSlots - 1);
    const size_t memory = mapped[slot];
    if (memory == kNone) {
      const size_t chosen = test::uniform(random, 0, kMemories - 1);
      REQUIRE_OK(cts.device->va_map(slot_address(slot), granule, memories[chosen], 0));
      mapped[slot] = chosen;
    } else if (test::uniform(random, 0, 2) == 0) {
      REQUIRE_OK(cts.device->va_unmap(slot_address(slot), granule));
      mapped[slot] = kNone;
    } else if (test::uniform(random, 0, 1) == 0) {
      holds[memory] = static_cast<uint8_t>(step);
      REQUIRE_OK(stream.fill(slot_address(slot) + granule / 2, holds[memory], 32));
      REQUIRE_OK(stream.synchronize());
    } else {
      REQUIRE(cts.download(stream, slot_address(slot) + granule / 2, 32) ==
              std::vector<uint8_t>(32, holds[memory]));
    }
  }
  for (size_t slot = 0; slot < kSlots; ++slot) {
    if (mapped[slot] != kNone) CHECK_OK(cts.device->va_unmap(slot_address(slot), granule));
  }
  for (auto* memory : memories) CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, kSlots * granule));
}

CTS_TEST("host physical memory: the capability tells whether it works") {
  const bool can = cts.device->can(GPUSHARE_DEVICE_CAP_HOST_PHYSICAL);
  // A device without virtual memory has no granule.
  const auto memory = cts.device->phys_create_host(can ? granule_of(cts) : 1 << 16);
  CHECK(memory.ok() == can);
  if (!memory.ok()) {
    CHECK(memory.status().code() == GPUSHARE_UNSUPPORTED);
    return;
  }
  CHECK_OK(cts.device->phys_release(*memory));
  CHECK(is_call_error(cts.device->phys_create_host(0).status()));
  CHECK(is_call_error(cts.device->phys_create_host(granule_of(cts) / 2).status()));
}

CTS_TEST("host physical memory: it serves as device memory and takes none of it") {
  if (!cts.device->can(GPUSHARE_DEVICE_CAP_HOST_PHYSICAL)) return;
  const uint64_t granule = granule_of(cts);
  const auto data = pattern(granule, 11);
  const device::Address range = *cts.device->va_reserve(4 * granule);
  const uint64_t free_before = cts.device->refresh_info()->free_bytes;
  gpushare_backend_memory* memory = *cts.device->phys_create_host(2 * granule);
  CHECK(cts.device->refresh_info()->free_bytes == free_before);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(cts.device->va_map(range, granule, memory, granule));
    cts.upload(stream, range, data);
    CHECK(cts.download(stream, range, granule) == data);
    REQUIRE_OK(stream.fill(range, 7, granule / 2));
    REQUIRE_OK(stream.synchronize());
    CHECK(cts.download(stream, range, 1).front() == 7);
  }
  CHECK_OK(cts.device->va_unmap(range, granule));
  CHECK_OK(cts.device->phys_release(memory));
  CHECK_OK(cts.device->va_free(range, 4 * granule));
}

CTS_TEST("host physical memory: bytes move to the device and back behind one address") {
  if (!cts.device->can(GPUSHARE_DEVICE_CAP_HOST_PHYSICAL)) return;
  const uint64_t granule = granule_of(cts);
  const auto data = pattern(granule, 12);
  const device::Address home = *cts.device->va_reserve(granule);
  const device::Address window = *cts.device->va_reserve(granule);
  gpushare_backend_memory* on_host = *cts.device->phys_create_host(granule);
  gpushare_backend_memory* on_device = *cts.device->phys_create(granule);
  {
    const auto stream = cts.stream();
    REQUIRE_OK(cts.device->va_map(home, granule, on_host, 0));
    cts.upload(stream, home, data);
    for (int round = 0; round < 2; ++round) {
      gpushare_backend_memory* const to = round == 0 ? on_device : on_host;
      REQUIRE_OK(cts.device->va_map(window, granule, to, 0));
      REQUIRE_OK(stream.copy(window, home, granule, GPUSHARE_COPY_DEVICE_TO_DEVICE));
      REQUIRE_OK(stream.synchronize());
      REQUIRE_OK(cts.device->va_unmap(home, granule));
      // Mapped at two addresses for a moment, so that the bytes are never without one.
      REQUIRE_OK(cts.device->va_map(home, granule, to, 0));
      REQUIRE_OK(cts.device->va_unmap(window, granule));
      CHECK(cts.download(stream, home, granule) == data);
    }
  }
  CHECK_OK(cts.device->va_unmap(home, granule));
  CHECK_OK(cts.device->phys_release(on_host));
  CHECK_OK(cts.device->phys_release(on_device));
  CHECK_OK(cts.device->va_free(home, granule));
  CHECK_OK(cts.device->va_free(window, granule));
}

}  // namespace gpushare::cts
