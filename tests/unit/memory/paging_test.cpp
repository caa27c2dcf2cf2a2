// Persistent heaps that go to host memory and come back.
//
// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "support/bytes.hpp"
#include "unit/memory/device_memory_fixture.hpp"

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

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
  CHECK(heap->alloc(Kind::kModel, 1, 0).status().code() == base::kAway);
  CHECK(heap->resize(0).code() == base::kAway);
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
    CHECK(test::all_are(bytes, block.bytes, block.value));
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
  f.memory->trim();                  // gives the granules back, so that paging in maps anew
  arm(GPUSHARE_FAULT_MAP_FAILS, 1);  // granules side by side are mapped by one call
  CHECK_FALSE(heap->page_in(stream).ok());
  CHECK(heap->paged_out());
  arm(GPUSHARE_FAULT_LAUNCH_FAILS, 1);
  CHECK_FALSE(heap->page_in(stream).ok());
  CHECK(heap->paged_out());
  CHECK(f.memory->check() == "");
  CHECK_OK(heap->page_in(stream));
  const auto* bytes = reinterpret_cast<const uint8_t*>(a);
  CHECK(test::all_are(bytes, 20 * kMiB, 9));
}

TEST_CASE(
    "a page-out in parts gives back what each part has copied, and a page-in in parts brings all of it "
    "back") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 20 * kMiB);
  heap->set_stream(&stream);
  std::vector<Address> blocks;
  for (uint8_t i = 1; i <= 10; ++i) {
    blocks.push_back(must(heap->alloc(Kind::kModel, 2 * kMiB, 0)));
    CHECK_OK(stream.fill(blocks.back(), i, 2 * kMiB));
  }
  CHECK_OK(f.memory->free(blocks[4]));
  const auto intact = [&] {
    for (uint8_t i = 1; i <= 10; ++i)
      if (i != 5 && !test::all_are(reinterpret_cast<const uint8_t*>(blocks[i - 1]), 2 * kMiB, i))
        return false;
    return true;
  };
  const auto fail = [&](uint32_t kind) {
    gpushare_backend_fault fault{sizeof(fault), kind, 1, 0};
    CHECK_OK(f.device->set_fault(fault));
  };
  const uint64_t free_bytes = f.memory->stats().free_bytes;
  // The first part fails: the session is as it was.
  uint64_t given = 0;
  fail(GPUSHARE_FAULT_LAUNCH_FAILS);
  CHECK_FALSE(heap->page_out(stream, 4 * kMiB, &given).ok());
  CHECK(given == 0);
  CHECK(heap->alloc(Kind::kModel, 2 * kMiB, 0).ok());  // where block 5 was
  CHECK(test::all_are(reinterpret_cast<const uint8_t*>(blocks[0]), 2 * kMiB, 1));
  int parts = 0;
  for (; !heap->paged_out(); ++parts) {
    const uint64_t before = given;
    if (parts == 2) {  // a later one fails: it is tried again
      fail(GPUSHARE_FAULT_LAUNCH_FAILS);
      CHECK_FALSE(heap->page_out(stream, 4 * kMiB, &given).ok());
      CHECK(given == before);
      CHECK_FALSE(heap->paged_out());
    }
    CHECK_OK(heap->page_out(stream, 4 * kMiB, &given));
    CHECK(given == before + 4 * kMiB);
    CHECK(f.memory->stats().free_bytes == free_bytes + given);
    CHECK(f.memory->check() == "");
    CHECK(heap->alloc(Kind::kModel, 1, 0).status().code() == base::kAway);
    if (!heap->paged_out()) CHECK(heap->page_in(stream).code() == GPUSHARE_INVALID_STATE);
  }
  CHECK(parts == 5);
  CHECK(given == 20 * kMiB);
  CHECK_OK(heap->page_in(stream));
  CHECK(intact());
  // Others overwrite what is out. A page-in that is stopped, or whose copy fails, has changed nothing.
  CHECK_OK(heap->page_out(stream));
  PersistentHeap* other = f.heap(2, 64 * kMiB);
  CHECK_OK(stream.fill(must(other->alloc(Kind::kModel, 64 * kMiB, 0)), 0xEE, 64 * kMiB));
  CHECK_OK(stream.synchronize());
  CHECK_OK(f.memory->close_heap(other));
  const bool fails = GENERATE(false, true);
  CHECK_OK(heap->page_in(stream, 6 * kMiB));
  CHECK(heap->paged_out());
  CHECK(f.memory->stats().free_bytes == free_bytes);
  if (fails) {
    fail(GPUSHARE_FAULT_LAUNCH_FAILS);
    CHECK_FALSE(heap->page_in(stream, 6 * kMiB).ok());
  } else {
    heap->stop_page_in();
  }
  CHECK(heap->paged_out());
  CHECK(f.memory->stats().free_bytes == free_bytes + 20 * kMiB);
  CHECK(f.memory->check() == "");
  for (parts = 0; heap->paged_out(); ++parts) CHECK_OK(heap->page_in(stream, 6 * kMiB));
  CHECK(parts == 4);
  CHECK(intact());
  CHECK(f.memory->check() == "");
  // One that is out in part closes.
  CHECK_OK(heap->page_out(stream, 4 * kMiB));
  CHECK_OK(f.memory->close_heap(heap));
  CHECK(f.memory->stats().free_bytes == free_bytes + 20 * kMiB);
  CHECK(f.memory->check() == "");
}
