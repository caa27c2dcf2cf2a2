// Persistent heaps and lanes over both layouts, on the host and the sim device.
//
// SPDX-License-Identifier: Apache-2.0
#include "memory/device_memory.hpp"

#include <cstring>
#include <string>
#include <vector>

#include "support/catch.hpp"

using namespace gpushare;
using memory::Address;
using memory::DeviceMemory;
using memory::Kind;
using memory::Lane;
using memory::Layout;
using memory::PersistentHeap;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

struct Fixture {
  std::unique_ptr<device::Device> device;
  std::unique_ptr<DeviceMemory> memory;

  Fixture(const std::string& spec, Layout layout, uint64_t capacity_bytes, bool record = false) {
    auto opened = device::Device::open(spec);
    REQUIRE(opened.ok());
    device = std::move(*opened);
    memory::DeviceMemoryOptions options;
    options.capacity_bytes = capacity_bytes;
    options.layout = layout;
    options.record_allocations = record;
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

Address must(base::Result<Address> result) {
  INFO(result.status().to_string());
  REQUIRE(result.ok());
  return *result;
}

#define CHECK_OK(expr)              \
  do {                              \
    const base::Status s_ = (expr); \
    INFO(s_.to_string());           \
    CHECK(s_.ok());                 \
  } while (0)

std::string host() {
  return "host?total_bytes=256MiB";
}
std::string sim() {
  return "sim?total_bytes=256MiB";
}

}  // namespace

TEMPLATE_TEST_CASE_SIG("blocks of sessions and lanes are found, freed and returned", "", ((int V), V), 0, 1,
                       2, 3) {
  Fixture f(V < 2 ? host() : sim(), V % 2 == 0 ? Layout::kContiguous : Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(7, 8 * kMiB);
  const Address model = must(heap->alloc(Kind::kModel, 3 * kMiB, 0));
  const Address odd = must(heap->alloc(Kind::kFramework, 1000, 4096));
  CHECK(odd % 4096 == 0);
  auto info = f.memory->find(model);
  REQUIRE(info.ok());
  CHECK(info->bytes == 3 * kMiB);
  CHECK(info->session == 7);
  CHECK(info->kind == Kind::kModel);
  CHECK(info->lane == UINT32_MAX);
  CHECK(f.memory->find(model + 256).status().code() == GPUSHARE_NOT_FOUND);

  Lane* lane = f.lane(0, 16 * kMiB, stream);
  CHECK(lane->alloc(100, 0).status().code() == GPUSHARE_INVALID_STATE);
  CHECK_OK(lane->begin_iteration(*heap, false));
  CHECK(lane->begin_iteration(*heap, false).code() == GPUSHARE_INVALID_STATE);
  const Address a = must(lane->alloc(5 * kMiB, 2 * kMiB));
  CHECK(a % (2 * kMiB) == 0);
  const Address b = must(lane->alloc(5 * kMiB, 0));
  CHECK(lane->alloc(16 * kMiB, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  info = f.memory->find(b);
  REQUIRE(info.ok());
  CHECK(info->session == 7);
  CHECK(info->lane == 0);
  CHECK(f.memory->check() == "");
  CHECK_OK(f.memory->free(a));
  CHECK(f.memory->free(a).code() == GPUSHARE_NOT_FOUND);
  CHECK(f.memory->close_lane(lane).code() == GPUSHARE_INVALID_STATE);
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK(lane->stats().live_bytes == 0);
  CHECK(lane->stats().iteration_peak_bytes >= 10 * kMiB);
  CHECK(f.memory->free(b).code() == GPUSHARE_NOT_FOUND);
  CHECK(heap->stats().live_bytes == 3 * kMiB + 1024);
  CHECK(f.memory->stats().persistent_bytes == 3 * kMiB + 1024);
  CHECK(f.memory->check() == "");
  CHECK_OK(f.memory->close_lane(lane));
  CHECK_OK(f.memory->close_heap(heap));
  CHECK(f.memory->free(model).code() == GPUSHARE_NOT_FOUND);
  CHECK(f.memory->stats().persistent_bytes == 0);
  CHECK_OK(stream.synchronize());
}
