// device_memory_fixture.hpp: a device with its memory, whose invariants are checked at the end.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "memory/device_memory.hpp"
#include "support/bytes.hpp"
#include "support/catch.hpp"
#include "support/sizes.hpp"
#include "support/status_checks.hpp"

namespace gpushare::test {

using memory::Address;
using memory::DeviceMemory;
using memory::Kind;
using memory::Lane;
using memory::Layout;
using memory::PersistentHeap;

struct Fixture {
  std::unique_ptr<device::Device> device;
  std::unique_ptr<DeviceMemory> memory;

  Fixture(const std::string& spec, Layout layout, uint64_t capacity_bytes, bool record = false,
          uint64_t spill_limit_bytes = memory::DeviceMemoryOptions().spill_limit_bytes) {
    auto opened = device::Device::open(spec);
    REQUIRE(opened.ok());
    device = std::move(*opened);
    memory::DeviceMemoryOptions options;
    options.capacity_bytes = capacity_bytes;
    options.layout = layout;
    options.record_allocations = record;
    options.spill_limit_bytes = spill_limit_bytes;
    auto result = DeviceMemory::open(*device, options);
    INFO(result.status().to_string());
    REQUIRE(result.ok());
    memory = std::move(*result);
  }
  ~Fixture() {
    CHECK(memory->check() == "");
    memory.reset();
    const auto status = device->close();
    INFO(status.to_string());
    CHECK(status.ok());
  }
  device::Stream stream() {
    auto stream = device->create_stream();
    REQUIRE(stream.ok());
    return std::move(*stream);
  }
  PersistentHeap* heap(memory::SessionId session, uint64_t bytes) {
    auto heap = memory->open_heap(session, base::format("s%d", static_cast<int>(session)), bytes);
    INFO(heap.status().to_string());
    REQUIRE(heap.ok());
    return *heap;
  }
  Lane* lane(uint32_t id, uint64_t bytes, const device::Stream& stream) {
    auto lane = memory->open_lane(id, bytes, stream);
    INFO(lane.status().to_string());
    REQUIRE(lane.ok());
    return *lane;
  }
};

inline Address must(base::Result<Address> result) {
  INFO(result.status().to_string());
  REQUIRE(result.ok());
  return *result;
}

// Whether each of a block's bytes is `value`. Used by one thread at a time. All calls read into the same memory: new pages for
// each would take more time than the copies, under a sanitizer most of the time.
inline bool holds(const device::Stream& stream, Address address, uint64_t bytes, int value) {
  static std::vector<uint8_t> read;
  if (read.size() < bytes) read.resize(bytes);
  CHECK_OK(
      stream.copy(reinterpret_cast<uintptr_t>(read.data()), address, bytes, GPUSHARE_COPY_DEVICE_TO_HOST));
  CHECK_OK(stream.synchronize());
  return all_are(read.data(), bytes, value);
}

inline std::string host() {
  return "host?total_bytes=256MiB";
}
inline std::string sim() {
  return "sim?total_bytes=256MiB";
}

}  // namespace gpushare::test
