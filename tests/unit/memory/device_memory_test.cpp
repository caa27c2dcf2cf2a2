// Persistent heaps and lanes over both layouts, on the host and the sim device.
//
// SPDX-License-Identifier: Apache-2.0
#include "memory/device_memory.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
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

TEST_CASE("the peak is of one time: lanes that were full one after the other do not add up") {
  Fixture f(host(), Layout::kContiguous, 64 * kMiB);
  auto stream = f.stream(), other = f.stream();
  PersistentHeap* heap = f.heap(1, 8 * kMiB);
  PersistentHeap* second = f.heap(2, 8 * kMiB);
  Lane* a = f.lane(0, 16 * kMiB, stream);
  Lane* b = f.lane(1, 16 * kMiB, other);
  const auto peak = [&] { return f.memory->stats().peak_bytes; };
  must(heap->alloc(Kind::kModel, 4 * kMiB, 0));
  CHECK(peak() == 4 * kMiB);
  CHECK_OK(a->begin_iteration(*heap, false));
  CHECK_OK(b->begin_iteration(*second, false));
  const Address big = must(a->alloc(12 * kMiB, 0));
  CHECK(peak() == 16 * kMiB);
  CHECK_OK(f.memory->free(big));
  must(b->alloc(10 * kMiB, 0));
  CHECK(peak() == 16 * kMiB);
  // Kept blocks change owner and count once.
  const Address kept = must(a->alloc(2 * kMiB, 0));
  CHECK(peak() == 16 * kMiB);
  CHECK_OK(a->keep(kept));
  CHECK(peak() == 16 * kMiB);
  must(a->alloc(3 * kMiB, 0));
  CHECK(peak() == 19 * kMiB);
  CHECK_OK(a->end_iteration(nullptr));
  CHECK_OK(b->end_iteration(nullptr));
  must(second->alloc(Kind::kModel, 8 * kMiB, 0));
  CHECK(peak() == 19 * kMiB);
  CHECK_OK(f.memory->close_lane(a));
  CHECK_OK(f.memory->close_lane(b));
  CHECK_OK(f.memory->close_heap(heap));
  CHECK_OK(f.memory->close_heap(second));
}

TEST_CASE("a lane without live blocks grows in the middle of an iteration wherever there is room") {
  Fixture f(host(), Layout::kContiguous, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 4 * kMiB);
  Lane* lane = f.lane(0, 8 * kMiB, stream);  // at the high end: nothing above it
  CHECK_OK(lane->begin_iteration(*heap, false));
  const Address block = must(lane->alloc(kMiB, 0));
  CHECK_OK(lane->set_size(16 * kMiB));
  CHECK(lane->stats().size_bytes == 8 * kMiB);  // a live block: at the boundary
  CHECK_OK(f.memory->free(block));
  CHECK_OK(lane->set_size(16 * kMiB));
  CHECK(lane->stats().size_bytes == 16 * kMiB);
  must(lane->alloc(14 * kMiB, 0));
  CHECK(f.memory->check() == "");
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK_OK(f.memory->close_lane(lane));
  CHECK_OK(f.memory->close_heap(heap));
}

TEST_CASE("wrong calls are refused and change nothing") {
  Fixture f(host(), Layout::kContiguous, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 4 * kMiB);
  Lane* lane = f.lane(0, 4 * kMiB, stream);
  CHECK(heap->alloc(Kind::kModel, 0, 0).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(heap->alloc(Kind::kModel, UINT64_MAX, 0).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(heap->alloc(Kind::kModel, 1, 3).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(heap->alloc(Kind::kModel, 1, 4 * kMiB).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(heap->alloc(Kind::kEphemeral, 1, 0).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(f.memory->free(0).code() == GPUSHARE_NOT_FOUND);
  CHECK(f.memory->free(UINT64_MAX).code() == GPUSHARE_NOT_FOUND);
  CHECK(f.memory->record_use(12345, stream).code() == GPUSHARE_NOT_FOUND);
  CHECK(f.memory->close_heap(nullptr).code() == GPUSHARE_INVALID_HANDLE);
  CHECK(f.memory->close_lane(nullptr).code() == GPUSHARE_INVALID_HANDLE);
  CHECK(lane->end_iteration(nullptr).code() == GPUSHARE_INVALID_STATE);
  CHECK(lane->keep(0).code() == GPUSHARE_INVALID_STATE);
  CHECK(heap->page_out(stream).code() == GPUSHARE_UNSUPPORTED);
  CHECK(heap->page_in(stream).code() == GPUSHARE_INVALID_STATE);
  CHECK(f.memory->open_heap(2, "big", 64 * kMiB).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(f.memory->open_lane(2, 64 * kMiB, stream).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_OK(f.memory->close_lane(lane));
  CHECK(f.memory->close_lane(lane).code() == GPUSHARE_INVALID_STATE);
  CHECK_OK(f.memory->close_heap(heap));
  CHECK(f.memory->close_heap(heap).code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("open refuses what the device cannot give") {
  auto device = device::Device::open(host());
  REQUIRE(device.ok());
  memory::DeviceMemoryOptions options;
  options.capacity_bytes = 257 * kMiB;
  CHECK(DeviceMemory::open(**device, options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  options.capacity_bytes = 1000;
  CHECK(DeviceMemory::open(**device, options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  gpushare_backend_fault fault{sizeof(fault), GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY, 1, 0};
  CHECK_OK((*device)->set_fault(fault));
  options.capacity_bytes = 64 * kMiB;
  options.layout = Layout::kContiguous;
  CHECK(DeviceMemory::open(**device, options).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  options.capacity_bytes = 0;  // all that is free
  options.layout = Layout::kAuto;
  auto memory = DeviceMemory::open(**device, options);
  REQUIRE(memory.ok());
  CHECK((*memory)->layout() == Layout::kVirtual);
  CHECK((*memory)->capacity_bytes() > 200 * kMiB);
}

TEST_CASE("out-of-memory messages name the session, what it asked and why there is no room") {
  Fixture f(sim(), Layout::kVirtual, 64 * kMiB, true);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(3, 4 * kMiB);
  must(heap->alloc(Kind::kModel, 3 * kMiB, 0));
  auto refused = heap->alloc(Kind::kModel, 2 * kMiB, 0).status();
  CHECK(refused.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  for (const char* part : {"'s3'", "2.00 MiB", "3.00 MiB", "4.00 MiB", "largest hole 1.00 MiB"}) {
    INFO(refused.message());
    CHECK(refused.message().find(part) != std::string::npos);
  }
  Lane* lane = f.lane(5, 4 * kMiB, stream);
  CHECK_OK(lane->begin_iteration(*heap, false));
  refused = lane->alloc(5 * kMiB, 0).status();
  for (const char* part : {"'s3'", "lane 5", "5.00 MiB", "4.00 MiB", "largest hole 4.00 MiB"}) {
    INFO(refused.message());
    CHECK(refused.message().find(part) != std::string::npos);
  }
  const std::string report = f.memory->report();
  INFO(report);
  CHECK(report.find("s3 3.00 MiB of 4.00 MiB") != std::string::npos);
  CHECK(report.find("free 56.00 MiB of 64.00 MiB") != std::string::npos);
  const auto events = f.memory->snapshot().events;
  REQUIRE(events.size() == 3);
  CHECK(events[1].action == memory::AllocationEvent::Action::kOutOfMemory);
  CHECK_OK(lane->end_iteration(nullptr));
}

TEST_CASE("the report has what is free, the largest promises first, lanes, and what lies in host memory") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  CHECK(f.memory->report() == "free 64.00 MiB of 64.00 MiB, largest hole 64.00 MiB");
  PersistentHeap* small = f.heap(1, 4 * kMiB);
  PersistentHeap* large = f.heap(2, 16 * kMiB);
  f.heap(3, 2 * kMiB);
  Lane* lane = f.lane(0, 8 * kMiB, stream);
  must(small->alloc(Kind::kModel, 3 * kMiB, 0));
  must(large->alloc_spilled(Kind::kModel, kMiB, 0));
  CHECK_OK(small->page_out(stream));
  const std::string report = f.memory->report(2);
  INFO(report);
  CHECK(report.find("free 38.00 MiB of 64.00 MiB") == 0);
  CHECK(report.find("sessions: s2 0 B of 16.00 MiB, s1 3.00 MiB of 4.00 MiB (paged out) and 1 more") !=
        std::string::npos);
  CHECK(report.find("; 1 lane with 8.00 MiB") != std::string::npos);
  CHECK(report.find("spilled to host memory") != std::string::npos);
  CHECK_OK(lane->begin_iteration(*large, false));
  CHECK_OK(lane->keep(must(lane->alloc(kMiB, 0))));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK_OK(f.memory->close_lane(lane));
  CHECK(f.memory->report().find("1 closed that promoted blocks pin") != std::string::npos);
}

TEST_CASE("a closed lane's range goes to the lane below at its boundary, in stream order") {
  Fixture f(host(), Layout::kContiguous, 64 * kMiB);
  auto upper_stream = f.stream(), lower_stream = f.stream();
  PersistentHeap* heap = f.heap(1, 2 * kMiB);
  Lane* upper = f.lane(0, 16 * kMiB, upper_stream);
  Lane* lower = f.lane(1, 8 * kMiB, lower_stream);
  CHECK_OK(upper->begin_iteration(*heap, false));
  const Address a = must(upper->alloc(16 * kMiB, 0));
  // The device still writes to the upper lane when it is closed and its bytes go to the lower one.
  std::atomic<bool> go{false};
  CHECK_OK(upper_stream.launch_host(
      [](void* flag) {
        while (!static_cast<std::atomic<bool>*>(flag)->load()) {
        }
      },
      &go));
  CHECK_OK(upper_stream.fill(a, 1, 16 * kMiB));
  CHECK_OK(upper->end_iteration(nullptr));
  CHECK_OK(lower->begin_iteration(*heap, false));
  const Address before = must(lower->alloc(8 * kMiB, 0));
  CHECK_OK(f.memory->close_lane(upper));
  CHECK_OK(lower->end_iteration(nullptr));
  CHECK_OK(lower->begin_iteration(*heap, false));
  const Address after = must(lower->alloc(8 * kMiB, 0));
  CHECK(after == before + 16 * kMiB);  // at the top, over the end of the upper lane's range
  CHECK_OK(lower_stream.fill(after, 2, 8 * kMiB));
  CHECK(lower_stream.query().code() == GPUSHARE_NOT_READY);
  go = true;
  CHECK_OK(lower_stream.synchronize());
  CHECK_OK(upper_stream.synchronize());
  const auto* bytes = reinterpret_cast<const uint8_t*>(after);
  CHECK(std::count(bytes, bytes + 8 * kMiB, 2) == static_cast<ptrdiff_t>(8 * kMiB));
  CHECK_OK(lower->end_iteration(nullptr));
}

TEST_CASE("a lane opened over a closed one's memory works after what the device still does there") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto first_stream = f.stream(), second_stream = f.stream();
  PersistentHeap* heap = f.heap(1, 2 * kMiB);
  Lane* first = f.lane(0, 16 * kMiB, first_stream);
  CHECK_OK(first->begin_iteration(*heap, false));
  const Address before = must(first->alloc(16 * kMiB, 0));
  std::atomic<bool> go{false};
  CHECK_OK(first_stream.launch_host(
      [](void* flag) {
        while (!static_cast<std::atomic<bool>*>(flag)->load()) {
        }
      },
      &go));
  CHECK_OK(first_stream.fill(before, 1, 16 * kMiB));
  CHECK_OK(first->end_iteration(nullptr));
  CHECK_OK(f.memory->close_lane(first));
  Lane* second = f.lane(1, 16 * kMiB, second_stream);
  CHECK_OK(second->begin_iteration(*heap, false));
  const Address after = must(second->alloc(16 * kMiB, 0));
  CHECK(after == before);  // still mapped: no driver call
  CHECK_OK(second_stream.fill(after, 2, 16 * kMiB));
  CHECK(second_stream.query().code() == GPUSHARE_NOT_READY);
  go = true;
  CHECK_OK(second_stream.synchronize());
  CHECK_OK(first_stream.synchronize());
  const auto* bytes = reinterpret_cast<const uint8_t*>(after);
  CHECK(std::count(bytes, bytes + 16 * kMiB, 2) == static_cast<ptrdiff_t>(16 * kMiB));
  CHECK_OK(second->end_iteration(nullptr));
}

TEMPLATE_TEST_CASE_SIG("a block used on another stream is reused only after that use", "", ((int V), V), 0,
                       1) {
  Fixture f(host(), V == 0 ? Layout::kContiguous : Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream(), side = f.stream();
  PersistentHeap* heap = f.heap(1, 4 * kMiB);
  Lane* lane = f.lane(0, 4 * kMiB, stream);
  std::atomic<bool> go{false};
  const auto hold = [](void* flag) {
    while (!static_cast<std::atomic<bool>*>(flag)->load()) {
    }
  };
  CHECK_OK(lane->begin_iteration(*heap, false));
  heap->set_stream(&stream);
  const bool persistent = GENERATE(false, true);
  const Address a = must(persistent ? heap->alloc(Kind::kModel, 4 * kMiB, 0) : lane->alloc(4 * kMiB, 0));
  CHECK_OK(side.launch_host(hold, &go));
  CHECK_OK(f.memory->record_use(a, side));
  CHECK_OK(f.memory->free(a));
  CHECK(f.memory->free(a).code() == GPUSHARE_NOT_FOUND);
  // Nothing else is free: the stream waits for the side stream by event, the host does not.
  const Address b = must(persistent ? heap->alloc(Kind::kModel, 4 * kMiB, 0) : lane->alloc(4 * kMiB, 0));
  CHECK(a == b);
  CHECK_OK(stream.fill(b, 7, 256));
  CHECK(stream.query().code() == GPUSHARE_NOT_READY);
  go = true;
  CHECK_OK(stream.synchronize());
  // At the boundary the whole lane comes after uses on other streams.
  if (!persistent) {
    go = false;
    CHECK_OK(side.launch_host(hold, &go));
    CHECK_OK(f.memory->record_use(b, side));
    CHECK_OK(lane->end_iteration(nullptr));
    CHECK(lane->stats().live_bytes == 0);
    CHECK_OK(stream.fill(b, 8, 256));
    CHECK(stream.query().code() == GPUSHARE_NOT_READY);
    go = true;
    CHECK_OK(stream.synchronize());
  } else {
    CHECK_OK(lane->end_iteration(nullptr));
  }
  CHECK_OK(side.synchronize());
}

TEMPLATE_TEST_CASE_SIG("a kept block outlives its iteration, its lane, and goes with its session", "",
                       ((int V), V), 0, 1) {
  Fixture f(host(), V == 0 ? Layout::kContiguous : Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 4 * kMiB);
  Lane* lane = f.lane(0, 8 * kMiB, stream);
  heap->set_stream(&stream);
  CHECK_OK(lane->begin_iteration(*heap, false));
  const Address kept = must(lane->alloc(3 * kMiB, 0));
  const Address second = must(lane->alloc(3 * kMiB, 0));
  CHECK_OK(lane->keep(kept));
  CHECK_OK(lane->keep(kept));
  CHECK(lane->keep(kept + 1).code() == GPUSHARE_NOT_FOUND);
  // 3 of 4 MiB promised are taken: keeping another three is not safe.
  CHECK(lane->keep(second).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK(heap->stats().promoted_bytes == 3 * kMiB);
  CHECK(heap->stats().live_bytes == 3 * kMiB);
  CHECK(lane->stats().promoted_bytes == 3 * kMiB);
  CHECK(heap->alloc(Kind::kModel, 2 * kMiB, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(f.memory->find(kept)->promoted);
  CHECK_OK(lane->begin_iteration(*heap, false));
  const Address other = must(lane->alloc(5 * kMiB, 0));
  CHECK((other >= kept + 3 * kMiB || other + 5 * kMiB <= kept));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK_OK(f.memory->close_lane(lane));
  CHECK(f.memory->find(kept)->promoted);
  CHECK(f.memory->check() == "");
  SECTION("freed") {
    CHECK_OK(f.memory->free(kept));
  }
  SECTION("closed") {
    CHECK_OK(f.memory->close_heap(heap));
    heap = nullptr;
  }
  CHECK(f.memory->find(kept).status().code() == GPUSHARE_NOT_FOUND);
  CHECK(f.memory->stats().persistent_bytes == 0);
  if (heap != nullptr) CHECK_OK(f.memory->close_heap(heap));
  // All of it is there again.
  auto whole = f.memory->open_heap(2, "whole", f.memory->capacity_bytes());
  CHECK(whole.ok());
}

// Of 64 MiB all are promised: what is kept must find its bytes once, in the session's promise or in the lane.
TEST_CASE("a kept block takes its bytes from the promise, and the lane keeps its size") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 16 * kMiB);
  PersistentHeap* other = f.heap(2, 32 * kMiB);
  Lane* lane = f.lane(0, 16 * kMiB, stream);
  heap->set_stream(&stream);
  other->set_stream(&stream);
  const auto boundary = [&] {
    CHECK_OK(stream.synchronize());
    CHECK_OK(lane->begin_iteration(*heap, false));
    CHECK_OK(lane->end_iteration(nullptr));
    CHECK(f.memory->check() == "");
  };
  CHECK_OK(lane->begin_iteration(*heap, false));
  const Address kept = must(lane->alloc(9 * kMiB, 0));
  CHECK_OK(lane->keep(kept));
  CHECK_OK(lane->end_iteration(nullptr));
  boundary();
  CHECK(heap->stats().promised_bytes == 16 * kMiB);
  CHECK(heap->stats().lent_bytes == 8 * kMiB);  // whole granules
  CHECK(lane->stats().lent_bytes == 8 * kMiB);
  CHECK(lane->stats().size_bytes == 16 * kMiB);
  CHECK(f.memory->stats().free_bytes == 0);
  const auto all_of_it = [&] {
    CHECK_OK(lane->begin_iteration(*heap, false));
    REQUIRE(lane->alloc(15 * kMiB, 0).ok());
    CHECK_OK(lane->end_iteration(nullptr));
    const uint64_t least =
        15 * kMiB + (heap->stats().promoted_bytes > 0 ? kMiB : 0);  // with what is not lent
    CHECK(lane->stats().iteration_peak_bytes == least);
  };
  all_of_it();
  SECTION("the rest of the promise is the session's") {
    const Address block = must(heap->alloc(Kind::kModel, 7 * kMiB, 0));
    CHECK(heap->alloc(Kind::kModel, kMiB, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    REQUIRE(other->alloc(Kind::kModel, 32 * kMiB, 0).ok());
    all_of_it();
    CHECK_OK(f.memory->free(block));
  }
  SECTION("freed, it comes back with the next size that is set, or at the boundary") {
    CHECK_OK(f.memory->free(kept));
    CHECK(heap->stats().lent_bytes == 8 * kMiB);
    CHECK_OK(heap->resize(16 * kMiB));
    CHECK(heap->stats().lent_bytes == 0);
    REQUIRE(heap->alloc(Kind::kModel, 16 * kMiB, 0).ok());
    all_of_it();
  }
  SECTION("freed in the middle of an iteration that needs the room") {
    CHECK_OK(lane->begin_iteration(*heap, false));
    REQUIRE(lane->alloc(15 * kMiB, 0).ok());
    CHECK_OK(f.memory->free(kept));
    CHECK_OK(heap->resize(16 * kMiB));
    CHECK(f.memory->check() == "");
    CHECK_OK(lane->end_iteration(nullptr));
    boundary();
    CHECK_OK(heap->resize(16 * kMiB));
    REQUIRE(heap->alloc(Kind::kModel, 16 * kMiB, 0).ok());
  }
  SECTION("freed, and the device refuses the lane more memory: the lane does not keep what was lent") {
    CHECK_OK(other->resize(16 * kMiB));
    CHECK_OK(f.memory->free(kept));
    unsigned refused = 0;
    for (uint64_t nth = 1; nth <= 12; ++nth) {
      boundary();
      CHECK_OK(lane->begin_iteration(*heap, false));
      const Address again = must(lane->alloc(9 * kMiB, 0));
      CHECK_OK(lane->keep(again));
      CHECK_OK(lane->end_iteration(nullptr));
      boundary();
      CHECK(lane->stats().lent_bytes == 8 * kMiB);
      CHECK_OK(f.memory->free(again));
      CHECK_OK(stream.synchronize());
      f.memory->trim();
      gpushare_backend_fault fault{sizeof(fault), GPUSHARE_FAULT_MAP_FAILS, nth, 0};
      CHECK_OK(f.device->set_fault(fault));
      const bool grown = lane->set_size(32 * kMiB).ok();
      refused += grown ? 0 : 1;
      const uint64_t size = (grown ? 32 : 16) * kMiB;
      CHECK(lane->stats().size_bytes == size);
      CHECK(f.memory->capacity_bytes() - f.memory->stats().free_bytes <= 32 * kMiB + size);
      fault.kind = GPUSHARE_FAULT_NONE;
      CHECK_OK(f.device->set_fault(fault));
      CHECK_OK(lane->set_size(16 * kMiB));
    }
    CHECK(refused > 0);
    all_of_it();
  }
  SECTION("paged out, nothing of the promise is held; paged in, it is lent again") {
    CHECK_OK(heap->page_out(stream));
    CHECK(lane->stats().lent_bytes == 0);
    CHECK(f.memory->stats().free_bytes == 16 * kMiB);
    PersistentHeap* third = f.heap(3, 16 * kMiB);
    CHECK(f.memory->find(kept)->promoted);
    CHECK_OK(f.memory->close_heap(third));
    CHECK_OK(heap->page_in(stream));
    boundary();
    boundary();
    CHECK(lane->stats().lent_bytes == 8 * kMiB);
    all_of_it();
  }
  SECTION("freed while another stream may use it, then paged out: the lane keeps nothing of what was lent") {
    auto side = f.stream();
    CHECK_OK(lane->begin_iteration(*heap, false));
    must(lane->alloc(7 * kMiB, 0));
    const Address high = must(lane->alloc(6 * kMiB, 0));  // from 16 to 22 MiB of the lane's range
    CHECK_OK(lane->keep(high));
    CHECK_OK(lane->end_iteration(nullptr));
    boundary();
    CHECK(lane->stats().lent_bytes == 14 * kMiB);
    CHECK_OK(f.memory->record_use(high, side));
    CHECK_OK(f.memory->free(high));
    CHECK_OK(heap->page_out(stream));
    CHECK(lane->stats().lent_bytes == 0);
    CHECK(lane->stats().size_bytes == 16 * kMiB);
    CHECK(f.memory->stats().free_bytes == 16 * kMiB);
    CHECK_OK(heap->page_in(stream));
  }
  SECTION("its lane closes, and then it is freed") {
    CHECK_OK(f.memory->close_lane(lane));
    CHECK(f.memory->stats().pinned_bytes == 2 * kMiB);
    CHECK(f.memory->stats().free_bytes == 14 * kMiB);
    CHECK(heap->stats().lent_bytes == 8 * kMiB);
    CHECK_OK(f.memory->free(kept));
    CHECK_OK(heap->resize(16 * kMiB));
    CHECK(heap->stats().lent_bytes == 0);
    CHECK(f.memory->stats().free_bytes == 16 * kMiB);
  }
  SECTION("its session closes") {
    CHECK_OK(f.memory->close_heap(heap));
    CHECK(lane->stats().lent_bytes == 0);
    CHECK(lane->stats().size_bytes == 16 * kMiB);
    CHECK(f.memory->stats().free_bytes == 16 * kMiB);
  }
  CHECK(f.memory->check() == "");
}

// docs/design/memory.md says why.
TEST_CASE("on the contiguous layout a kept block counts in the promise and in the lane") {
  Fixture f(host(), Layout::kContiguous, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 16 * kMiB);
  Lane* lane = f.lane(0, 16 * kMiB, stream);
  heap->set_stream(&stream);
  CHECK_OK(lane->begin_iteration(*heap, false));
  const Address kept = must(lane->alloc(9 * kMiB, 0));
  CHECK_OK(lane->keep(kept));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK(heap->stats().lent_bytes == 0);
  CHECK(lane->stats().size_bytes == 16 * kMiB);
  CHECK(f.memory->stats().free_bytes == 32 * kMiB);
  CHECK(heap->alloc(Kind::kModel, 8 * kMiB, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  const Address block = must(heap->alloc(Kind::kModel, 7 * kMiB, 0));
  CHECK_OK(lane->begin_iteration(*heap, false));
  CHECK(lane->alloc(8 * kMiB, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  must(lane->alloc(7 * kMiB, 0));
  // Freed, both have it back at once.
  CHECK_OK(f.memory->free(kept));
  must(lane->alloc(9 * kMiB, 0));
  must(heap->alloc(Kind::kModel, 9 * kMiB, 0));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK_OK(f.memory->free(block));
}

TEST_CASE("a session paged out keeps its addresses and gets its bytes back") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 40 * kMiB);
  heap->set_stream(&stream);
  struct Saved {
    Address address;
    uint64_t bytes;
    uint8_t value;
  };
  std::vector<Saved> blocks;
  for (uint8_t i = 1; i <= 12; ++i) {
    const uint64_t bytes = i * 500'000;
    blocks.push_back({must(heap->alloc(Kind::kModel, bytes, 0)), bytes, i});
    CHECK_OK(stream.fill(blocks.back().address, i, bytes));
  }
  CHECK_OK(f.memory->free(blocks[3].address));
  blocks.erase(blocks.begin() + 3);
  const bool pressure = GENERATE(false, true);
  CHECK_OK(heap->page_out(stream));
  CHECK(heap->paged_out());
  CHECK(heap->page_out(stream).code() == GPUSHARE_INVALID_STATE);
  CHECK(heap->alloc(Kind::kModel, 1, 0).status().code() == GPUSHARE_INVALID_STATE);
  CHECK(heap->resize(0).code() == GPUSHARE_INVALID_STATE);
  CHECK(f.memory->find(blocks[0].address)->spilled);
  CHECK_OK(f.memory->free(blocks[0].address));
  blocks.erase(blocks.begin());
  if (pressure) {  // others take the memory and write all over it
    PersistentHeap* other = f.heap(2, 64 * kMiB);
    CHECK(heap->page_in(stream).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    CHECK(heap->paged_out());
    const Address all = must(other->alloc(Kind::kModel, 64 * kMiB, 0));
    CHECK_OK(stream.fill(all, 0xEE, 64 * kMiB));
    CHECK_OK(stream.synchronize());
    CHECK_OK(f.memory->close_heap(other));
  }
  CHECK_OK(heap->page_in(stream));
  CHECK_OK(stream.synchronize());
  for (const Saved& block : blocks) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(block.address);
    CHECK(std::count(bytes, bytes + block.bytes, block.value) == static_cast<ptrdiff_t>(block.bytes));
  }
  CHECK(f.memory->stats().paged_out_bytes_total >= 37'000'000);
  must(heap->alloc(Kind::kModel, 400'000, 0));
}

TEST_CASE("what nobody needed while a session was paged out is not copied back") {
  Fixture f(sim(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 48 * kMiB);
  must(heap->alloc(Kind::kModel, 48 * kMiB, 0));
  const auto duration = [&](auto&& call) {
    const uint64_t begin = f.device->now_ns();
    CHECK_OK(call());
    return f.device->now_ns() - begin;
  };
  const uint64_t out = duration([&] { return heap->page_out(stream); });
  CHECK(out > 0);  // simulated time of a copy
  CHECK(duration([&] { return heap->page_in(stream); }) < out / 16);
  CHECK_OK(heap->page_out(stream));
  PersistentHeap* other = f.heap(2, 24 * kMiB);  // takes a batch of its granules, 32 MiB
  CHECK_OK(f.memory->close_heap(other));
  const uint64_t part = duration([&] { return heap->page_in(stream); });
  CHECK(part > out / 2);
  CHECK(part < out);
}

TEST_CASE("a promise that grows where it lies has room for a block as large as itself") {
  Fixture f(sim(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 4 * kMiB);
  f.heap(2, 4 * kMiB);
  heap->set_stream(&stream);
  CHECK_OK(heap->resize(12 * kMiB));
  CHECK(heap->stats().largest_hole_bytes == 12 * kMiB);
  must(heap->alloc(Kind::kModel, 12 * kMiB, 0));
}

TEST_CASE("paging that fails leaves the session where it was") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 20 * kMiB);
  const Address a = must(heap->alloc(Kind::kModel, 20 * kMiB, 0));
  CHECK_OK(stream.fill(a, 9, 20 * kMiB));
  const auto arm = [&](uint32_t kind, uint64_t at_call) {
    gpushare_backend_fault fault{sizeof(fault), kind, at_call, 0};
    CHECK_OK(f.device->set_fault(fault));
  };
  arm(GPUSHARE_FAULT_HOST_OUT_OF_MEMORY, 2);
  CHECK(heap->page_out(stream).code() == GPUSHARE_HOST_OUT_OF_MEMORY);
  CHECK_FALSE(heap->paged_out());
  arm(GPUSHARE_FAULT_LAUNCH_FAILS, 2);
  CHECK_FALSE(heap->page_out(stream).ok());
  CHECK_FALSE(heap->paged_out());
  CHECK_OK(heap->page_out(stream));
  f.memory->trim();  // gives the granules back, so that paging in maps anew
  arm(GPUSHARE_FAULT_MAP_FAILS, 4);
  CHECK_FALSE(heap->page_in(stream).ok());
  CHECK(heap->paged_out());
  arm(GPUSHARE_FAULT_LAUNCH_FAILS, 1);
  CHECK_FALSE(heap->page_in(stream).ok());
  CHECK(heap->paged_out());
  CHECK(f.memory->check() == "");
  CHECK_OK(heap->page_in(stream));
  const auto* bytes = reinterpret_cast<const uint8_t*>(a);
  CHECK(std::count(bytes, bytes + 20 * kMiB, 9) == static_cast<ptrdiff_t>(20 * kMiB));
}

TEST_CASE("an iteration that repeats itself is planned, and a deviation is served all the same") {
  Fixture f(sim(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 4 * kMiB);
  Lane* lane = f.lane(0, 32 * kMiB, stream);
  const auto iterate = [&](uint64_t extra, bool keep) {
    bool planned = false;
    CHECK_OK(lane->begin_iteration(*heap, true));
    std::vector<Address> blocks;
    for (uint64_t i = 1; i <= 20; ++i) {
      blocks.push_back(must(lane->alloc(i * 10'000 + (i == 12 ? extra : 0), i % 4 == 0 ? 4096 : 0)));
      if (i % 3 == 0) {
        CHECK_OK(f.memory->free(blocks[blocks.size() / 2]));
        CHECK(f.memory->free(blocks[blocks.size() / 2]).code() == GPUSHARE_NOT_FOUND);
        blocks.erase(blocks.begin() + static_cast<ptrdiff_t>(blocks.size() / 2));
      }
      if (keep && i == 15) CHECK_OK(lane->keep(blocks[3]));
    }
    for (Address a : blocks) CHECK(f.memory->find(a)->session == 1);
    CHECK(f.memory->check() == "");
    CHECK_OK(lane->end_iteration(&planned));
    if (keep) CHECK_OK(f.memory->free(blocks[3]));
    return planned;
  };
  CHECK_FALSE(iterate(0, false));
  CHECK_FALSE(iterate(0, false));
  CHECK(iterate(0, false));
  CHECK(lane->stats().planned_allocs == 20);
  CHECK_FALSE(iterate(777, false));
  CHECK(iterate(0, false));
  CHECK_FALSE(iterate(0, true));
  CHECK(iterate(0, false));
  for (int i = 0; i < 4; ++i) CHECK_FALSE(iterate(1000, false));  // gives the plan up
  CHECK_FALSE(iterate(0, false));
  CHECK(lane->stats().live_bytes == 0);
}

TEST_CASE("sessions open and close without end") {
  // 10^6 under GPUSHARE_MEMORY_SESSIONS; each leaves nothing behind.
  const char* text = std::getenv("GPUSHARE_MEMORY_SESSIONS");
  const uint64_t count = text != nullptr ? std::strtoull(text, nullptr, 10) : 20'000;
  Fixture f(sim(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  for (uint64_t i = 0; i < count; ++i) {
    auto heap = f.memory->open_heap(i + 1, "x", 4 * kMiB);
    if (!heap.ok()) FAIL(heap.status().to_string());
    (*heap)->set_stream(&stream);
    if (!(*heap)->alloc(Kind::kModel, 1 * kMiB, 0).ok()) FAIL("alloc");
    if (!f.memory->close_heap(*heap).ok()) FAIL("close");
  }
  CHECK(f.memory->stats().mapped_bytes <= 64 * kMiB);
  CHECK(f.memory->stats().persistent_bytes == 0);
}
