// Persistent heaps and lanes over both layouts, on the host and the sim device.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "memory/elastic_range.hpp"
#include "memory/lane_inner.hpp"
#include "support/bytes.hpp"
#include "support/gate.hpp"
#include "support/random.hpp"
#include "unit/memory/device_memory_fixture.hpp"

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

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

TEST_CASE("a block that the host uses keeps its bytes when it is freed, until the host is done") {
  for (const Layout layout : {Layout::kVirtual, Layout::kContiguous}) {
    Fixture f(host(), layout, 64 * kMiB);
    auto stream = f.stream();
    PersistentHeap* heap = f.heap(1, 4 * kMiB);
    heap->set_stream(&stream);
    const Address block = must(heap->alloc(Kind::kModel, kMiB, 0));
    auto pin = f.memory->pin(block);
    REQUIRE(pin.ok());
    CHECK_OK(f.memory->free(block));
    CHECK(f.memory->free(block).code() == GPUSHARE_NOT_FOUND);
    CHECK(f.memory->pin(block).status().code() == GPUSHARE_NOT_FOUND);
    std::vector<Address> others;
    for (int i = 0; i < 3; ++i) others.push_back(must(heap->alloc(Kind::kModel, kMiB, 0)));
    CHECK(std::find(others.begin(), others.end(), block) == others.end());
    CHECK_FALSE(heap->alloc(Kind::kModel, kMiB, 0).ok());
    *pin = nullptr;
    CHECK(must(heap->alloc(Kind::kModel, kMiB, 0)) == block);
    CHECK_OK(f.memory->close_heap(heap));
  }
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
  Gate gate;
  CHECK_OK(upper_stream.launch_host(Gate::block, &gate));
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
  gate.open();
  CHECK_OK(lower_stream.synchronize());
  CHECK_OK(upper_stream.synchronize());
  const auto* bytes = reinterpret_cast<const uint8_t*>(after);
  CHECK(test::all_are(bytes, 8 * kMiB, 2));
  CHECK_OK(lower->end_iteration(nullptr));
}

TEST_CASE("a lane opened over a closed one's memory works after what the device still does there") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto first_stream = f.stream(), second_stream = f.stream();
  PersistentHeap* heap = f.heap(1, 2 * kMiB);
  Lane* first = f.lane(0, 16 * kMiB, first_stream);
  CHECK_OK(first->begin_iteration(*heap, false));
  const Address before = must(first->alloc(16 * kMiB, 0));
  Gate gate;
  CHECK_OK(first_stream.launch_host(Gate::block, &gate));
  CHECK_OK(first_stream.fill(before, 1, 16 * kMiB));
  CHECK_OK(first->end_iteration(nullptr));
  CHECK_OK(f.memory->close_lane(first));
  Lane* second = f.lane(1, 16 * kMiB, second_stream);
  CHECK_OK(second->begin_iteration(*heap, false));
  const Address after = must(second->alloc(16 * kMiB, 0));
  CHECK(after == before);  // still mapped: no driver call
  CHECK_OK(second_stream.fill(after, 2, 16 * kMiB));
  CHECK(second_stream.query().code() == GPUSHARE_NOT_READY);
  gate.open();
  CHECK_OK(second_stream.synchronize());
  CHECK_OK(first_stream.synchronize());
  const auto* bytes = reinterpret_cast<const uint8_t*>(after);
  CHECK(test::all_are(bytes, 16 * kMiB, 2));
  CHECK_OK(second->end_iteration(nullptr));
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

TEST_CASE("compacting moves idle lanes up, the contents of others stay where they are") {
  Fixture f(host(), Layout::kContiguous, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 8 * kMiB);
  Lane* top = f.lane(0, 8 * kMiB, stream);
  Lane* busy = f.lane(1, 8 * kMiB, stream);
  Lane* gone = f.lane(2, 4 * kMiB, stream);
  Lane* idle = f.lane(3, 8 * kMiB, stream);
  Lane* last = f.lane(4, 8 * kMiB, stream);
  CHECK(f.memory->compact() == 0);
  CHECK_OK(busy->begin_iteration(*heap, false));
  const Address block = must(busy->alloc(kMiB, 0));
  CHECK_OK(f.memory->close_lane(top));
  CHECK_OK(f.memory->close_lane(gone));
  // 20 MiB below all lanes, holes of 8 and 4: `idle` fills the first, `last` follows, and their places join what is free.
  CHECK(f.memory->compact() == 16 * kMiB - 4 * kMiB);
  CHECK(f.memory->check() == "");
  CHECK(f.memory->find(block)->lane == 1);
  CHECK_OK(f.memory->free(block));
  CHECK(f.memory->compact() == 0);
  CHECK_OK(busy->end_iteration(nullptr));
  for (Lane* lane : {idle, last}) {
    CHECK_OK(lane->begin_iteration(*heap, false));
    must(lane->alloc(8 * kMiB, 0));
    CHECK(lane->stats().tail_bytes == 0);
    CHECK_OK(lane->end_iteration(nullptr));
    CHECK(lane->stats().tail_bytes == 8 * kMiB);
  }
  CHECK_OK(stream.synchronize());
}

TEST_CASE("what is kept pins its lane, and the virtual layout has nothing to compact") {
  const bool is_virtual = GENERATE(false, true);
  Fixture f(sim(), is_virtual ? Layout::kVirtual : Layout::kContiguous, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 8 * kMiB);
  Lane* top = f.lane(0, 8 * kMiB, stream);
  Lane* pinned = f.lane(1, 8 * kMiB, stream);
  CHECK_OK(pinned->begin_iteration(*heap, false));
  const Address kept = must(pinned->alloc(kMiB, 0));
  CHECK_OK(pinned->keep(kept));
  CHECK_OK(pinned->end_iteration(nullptr));
  CHECK_OK(f.memory->close_lane(top));
  CHECK(f.memory->compact() == 0);
  CHECK(f.memory->find(kept)->address == kept);
  CHECK_OK(f.memory->free(kept));
  if (!is_virtual) CHECK(f.memory->compact() > 0);
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
  const uint64_t count = number_from("GPUSHARE_MEMORY_SESSIONS", 20'000);
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

TEST_CASE("an elastic range takes and gives 2 MiB on a device of any size") {
  for (const uint64_t gib : {uint64_t{80}, uint64_t{141}}) {
    INFO(gib << " GiB");
    const uint64_t capacity = gib << 30;
    Fixture f("host?total_gib=" + std::to_string(gib), Layout::kVirtual, capacity);
    auto stream = f.stream();
    PersistentHeap* const heap = f.heap(1, 0);
    const auto range = f.memory->open_range(*heap, "cache", capacity);
    REQUIRE(range.ok());
    CHECK((*range)->granule_bytes() == 2 * kMiB);
    REQUIRE_OK((*range)->commit(6 * kMiB, 2 * kMiB));
    CHECK((*range)->committed_bytes() == 2 * kMiB);
    CHECK(f.memory->stats().free_bytes == capacity - 2 * kMiB);
    CHECK((*range)->decommit(6 * kMiB, 2 * kMiB).ok());
    f.memory->close_range(*range);
    REQUIRE_OK(f.memory->close_heap(heap));
  }
}

TEST_CASE("a small session takes steps of 2 MiB on a device of any size") {
  for (const uint64_t gib : {uint64_t{8}, uint64_t{80}, uint64_t{141}}) {
    INFO(gib << " GiB");
    const uint64_t capacity = gib << 30;
    Fixture f("host?total_gib=" + std::to_string(gib), Layout::kVirtual, capacity);
    const uint64_t granule = f.memory->granularity_bytes();
    const auto taken = [&] { return capacity - f.memory->stats().free_bytes; };
    auto stream = f.stream();
    PersistentHeap* const heap = f.heap(1, 1 * kMiB);
    heap->set_stream(&stream);
    CHECK(heap->stats().promised_bytes == 2 * kMiB);
    CHECK(taken() == 2 * kMiB);
    CHECK(f.memory->stats().mapped_bytes == 2 * kMiB);
    const Address first = must(heap->alloc(Kind::kModel, 2 * kMiB, 0));
    REQUIRE_OK(stream.fill(first, 7, 2 * kMiB));
    REQUIRE_OK(heap->resize(3 * kMiB));
    CHECK(taken() == 4 * kMiB);
    // It grows where it lies: one block lies in small granules and large ones.
    REQUIRE_OK(heap->resize(2 * kMiB + granule));
    CHECK(taken() == 2 * granule);
    const uint64_t large = 2 * granule - 2 * kMiB;
    const Address second = must(heap->alloc(Kind::kModel, large, 0));
    CHECK(second == first + 2 * kMiB);
    REQUIRE_OK(stream.fill(second, 9, large));
    CHECK(f.memory->check() == "");
    CHECK(holds(stream, first, 2 * kMiB, 7));
    CHECK(holds(stream, second, large, 9));
    // And gives back what no block needs, to the last step.
    REQUIRE_OK(f.memory->free(second));
    REQUIRE_OK(heap->resize(5 * kMiB));
    CHECK(taken() == 6 * kMiB);
    REQUIRE_OK(heap->give_back_free());
    CHECK(taken() == 2 * kMiB);
    CHECK(holds(stream, first, 2 * kMiB, 7));
    CHECK(f.memory->check() == "");
    REQUIRE_OK(f.memory->close_heap(heap));
    CHECK(taken() == 0);
  }
}

TEST_CASE(
    "the first granule of a heap goes to host memory and comes home, and the heap is small after that") {
  Fixture f("host?total_gib=141", Layout::kVirtual, uint64_t{141} << 30);
  REQUIRE(f.memory->has_host_tier());
  const uint64_t granule = f.memory->granularity_bytes();
  auto stream = f.stream();
  PersistentHeap* const heap = f.heap(1, 2 * granule);
  heap->set_stream(&stream);
  const Address first = must(heap->alloc(Kind::kModel, 2 * kMiB, 0));
  const Address last = must(heap->alloc(Kind::kModel, granule, 0));
  REQUIRE_OK(stream.fill(first, 7, 2 * kMiB));
  REQUIRE_OK(stream.fill(last, 9, granule));
  uint64_t moved = 0;
  REQUIRE_OK(heap->move_spilled(false, UINT64_MAX, UINT64_MAX, stream, &moved));
  CHECK(moved == 2 * granule);
  CHECK(heap->stats().promised_bytes == 0);
  CHECK(f.memory->stats().free_bytes == f.memory->capacity_bytes());
  CHECK(f.memory->check() == "");
  // Beside them a small promise has an extent of its own; then all is home, between two steps.
  REQUIRE_OK(heap->resize(1 * kMiB));
  CHECK(heap->stats().promised_bytes == 2 * kMiB);
  const Address beside = must(heap->alloc(Kind::kModel, 2 * kMiB, 0));
  REQUIRE_OK(stream.fill(beside, 5, 2 * kMiB));
  CHECK(holds(stream, first, 2 * kMiB, 7));
  REQUIRE_OK(heap->move_spilled(true, UINT64_MAX, UINT64_MAX, stream, &moved));
  CHECK(moved == 2 * granule);
  CHECK(heap->stats().promised_bytes == 2 * granule + 2 * kMiB);
  CHECK(f.memory->check() == "");
  REQUIRE_OK(heap->resize(2 * granule + 2 * kMiB));  // no more than it has
  CHECK(heap->stats().promised_bytes == 2 * granule + 2 * kMiB);
  CHECK(holds(stream, first, 2 * kMiB, 7));
  CHECK(holds(stream, last, granule, 9));
  CHECK(holds(stream, beside, 2 * kMiB, 5));
  REQUIRE_OK(f.memory->free(last));
  REQUIRE_OK(f.memory->free(beside));
  REQUIRE_OK(heap->resize(1 * kMiB));
  CHECK(f.memory->stats().free_bytes == f.memory->capacity_bytes() - 2 * kMiB);
  CHECK(holds(stream, first, 2 * kMiB, 7));
  CHECK(f.memory->check() == "");
  REQUIRE_OK(f.memory->close_heap(heap));
}

TEST_CASE("a session lends whole granules alone") {
  Fixture f("host?total_gib=141", Layout::kVirtual, uint64_t{141} << 30);
  const uint64_t granule = f.memory->granularity_bytes();
  auto stream = f.stream();
  PersistentHeap* const heap = f.heap(1, 3 * granule);
  heap->set_stream(&stream);
  (void)must(heap->alloc(Kind::kModel, 1 * kMiB, 0));
  Lane* const lane = f.lane(0, granule, stream);
  REQUIRE_OK(lane->begin_iteration(*heap, false));
  CHECK(lane->borrow_free(*heap, 3 * granule) == 2 * granule);  // a block lies in the first
  CHECK(f.memory->check() == "");
  REQUIRE_OK(lane->end_iteration(nullptr));
  CHECK(f.memory->check() == "");
  REQUIRE_OK(heap->resize(1 * kMiB));
  CHECK(heap->stats().promised_bytes == 2 * kMiB);
  CHECK(f.memory->check() == "");
  REQUIRE_OK(f.memory->close_heap(heap));
  REQUIRE_OK(f.memory->close_lane(lane));
}

TEST_CASE("memory passes between ranges with small granules and heaps with large ones, to the last byte") {
  constexpr uint64_t kCapacity = uint64_t{12} << 30;
  Fixture f("host?total_gib=12", Layout::kVirtual, kCapacity);
  REQUIRE(f.memory->granularity_bytes() > 2 * kMiB);
  auto stream = f.stream();
  PersistentHeap* const heap = f.heap(1, 0);
  heap->set_stream(&stream);
  memory::ElasticRange* const range = *f.memory->open_range(*heap, "cache", kCapacity);
  // All of it to the range, every second granule back, the rest; then to a heap.
  for (int round = 0; round < 2; ++round) {
    REQUIRE_OK(range->commit(0, kCapacity));
    CHECK(f.memory->open_heap(2, "late", 1).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    for (uint64_t at = 0; at < kCapacity; at += 4 * kMiB) REQUIRE(range->decommit(at, 2 * kMiB).ok());
    CHECK(f.memory->stats().free_bytes == kCapacity / 2);
    PersistentHeap* const half = f.heap(2, kCapacity / 2);
    CHECK(range->commit(0, 2 * kMiB).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    CHECK(f.memory->check() == "");
    REQUIRE(range->decommit(2 * kMiB, 2 * kMiB).ok());
    REQUIRE_OK(range->commit(0, 2 * kMiB));
    REQUIRE_OK(f.memory->close_heap(half));
    REQUIRE(range->decommit(0, kCapacity).ok());
    PersistentHeap* const whole = f.heap(3, kCapacity);
    CHECK(must(whole->alloc(Kind::kModel, kCapacity, 0)) != 0);
    CHECK(f.memory->check() == "");
    REQUIRE_OK(f.memory->close_heap(whole));
  }
  CHECK(f.memory->stats().mapped_bytes <= kCapacity);
  f.memory->close_range(range);
  REQUIRE_OK(f.memory->close_heap(heap));
}

TEST_CASE("a door lists no more blocks in a journal than there is room for") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* const heap = f.heap(1, 2 * kMiB);
  heap->set_stream(&stream);
  Lane* const lane = f.lane(0, 2 * kMiB, stream);
  REQUIRE_OK(lane->begin_iteration(*heap, false));
  const memory::LanePass pass = lane->pass();
  REQUIRE(pass.door != nullptr);
  memory::Journal journal(7);
  journal.most = 1000;
  Address block = 0;
  const auto alloc = [&] { return pass.door->alloc_listed(pass.key, 7, stream.native(), 256, 0, &block); };
  // One whose entries are elsewhere, as while they are kept.
  REQUIRE(pass.door->lend(pass.key, journal));
  CHECK_FALSE(alloc());
  pass.door->take_back(journal);
  journal.add(256, 0);
  journal.most = 1000;
  REQUIRE(pass.door->lend(pass.key, journal));
  const size_t room = journal.entries.size();
  size_t listed = 1;
  while (listed < 1000 && alloc()) ++listed;
  CHECK(listed == room);
  CHECK(journal.count == room);
  pass.door->take_back(journal);
  REQUIRE_OK(lane->end_iteration(nullptr));
}
