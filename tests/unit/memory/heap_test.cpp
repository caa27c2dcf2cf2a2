// SPDX-License-Identifier: Apache-2.0
#include "memory/heap.hpp"

#include <utility>
#include <vector>

#include "support/catch.hpp"

using namespace gpushare;
using memory::BlockHandle;
using memory::Heap;
using memory::HeapOptions;
using memory::HeapSide;
using memory::HeapStatus;

namespace {

Heap make_heap(uint64_t capacity_bytes, uint64_t granule_bytes = 256, uint32_t max_blocks = 1u << 16) {
  HeapOptions options;
  options.capacity_bytes = capacity_bytes;
  options.granule_bytes = granule_bytes;
  options.max_blocks = max_blocks;
  auto heap = Heap::create(options);
  REQUIRE(heap.ok());
  return std::move(heap).value();
}

#define CHECK_SOUND(heap)               \
  do {                                  \
    const auto status = (heap).check(); \
    INFO(status.message());             \
    CHECK(status.ok());                 \
  } while (0)

}  // namespace

TEST_CASE("a heap gives out disjoint blocks and becomes one hole again when all are freed") {
  Heap heap = make_heap(1 << 20);
  std::vector<BlockHandle> blocks;
  for (uint64_t bytes : {1u, 256u, 257u, 4096u, 70000u}) {
    blocks.push_back(heap.allocate(bytes, 0, bytes));
    REQUIRE(blocks.back());
    CHECK(heap.size_bytes(blocks.back()) >= bytes);
    CHECK(heap.tag(blocks.back()) == bytes);
    CHECK_SOUND(heap);
  }
  CHECK(heap.live_blocks() == 5);
  CHECK(heap.live_bytes() == 256 + 256 + 512 + 4096 + 70144);
  CHECK(heap.high_water_bytes() == heap.live_bytes());
  for (int k : {1, 3, 0, 4, 2}) {
    CHECK(heap.free(blocks[static_cast<size_t>(k)]) == HeapStatus::kOk);
    CHECK_SOUND(heap);
  }
  CHECK(heap.live_bytes() == 0);
  CHECK(heap.largest_hole_bytes() == 1 << 20);
}

TEST_CASE("create refuses what it cannot represent and names the limit") {
  HeapOptions options;
  options.capacity_bytes = 1 << 20;
  options.granule_bytes = 100;
  CHECK(Heap::create(options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(Heap::create(options).status().message().find("power of two") != std::string::npos);
  options.granule_bytes = 0;
  CHECK(Heap::create(options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  options.granule_bytes = 256;
  options.max_blocks = 3;
  CHECK(Heap::create(options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  options.max_blocks = 64;
  options.capacity_bytes = UINT64_MAX;
  CHECK(Heap::create(options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  options.capacity_bytes = uint64_t{1} << 50;  // 1 PiB: 2^42 granules
  CHECK(Heap::create(options).ok());
  options.capacity_bytes += 256;
  CHECK(Heap::create(options).status().message().find("2^42 granules") != std::string::npos);
  options.capacity_bytes = 1 << 20;
  options.max_blocks = (1u << 21) + 1;  // the index's links have 21 bits
  CHECK(Heap::create(options).status().message().find("from 4 to 2097152") != std::string::npos);
  options.index_offsets = false;
  CHECK(Heap::create(options).ok());
  options.index_offsets = true;
  --options.max_blocks;
  CHECK(Heap::create(options).ok());
}

TEST_CASE("bad requests are refused and change nothing") {
  Heap heap = make_heap(1 << 20);
  CHECK(heap.allocate(0).status == HeapStatus::kBadArgument);
  CHECK(heap.allocate(256, 3).status == HeapStatus::kBadArgument);
  CHECK(heap.allocate((1 << 20) + 1).status == HeapStatus::kNoSpace);
  CHECK(heap.allocate(UINT64_MAX).status == HeapStatus::kNoSpace);
  CHECK(heap.allocate(256, uint64_t{1} << 63).offset_bytes == 0);  // offset 0 is aligned to anything
  CHECK(heap.allocate(256, uint64_t{1} << 63).status == HeapStatus::kNoSpace);
  CHECK(heap.free(BlockHandle{}) == HeapStatus::kBadArgument);
  CHECK(heap.free(BlockHandle{512, 9999, HeapStatus::kOk}) == HeapStatus::kBadArgument);
  CHECK(heap.free_at(256) == HeapStatus::kBadArgument);
  CHECK(heap.free_at(1) == HeapStatus::kBadArgument);
  CHECK(heap.live_blocks() == 1);
  CHECK_SOUND(heap);
}

TEST_CASE("a double free is refused") {
  Heap heap = make_heap(1 << 20);
  const BlockHandle a = heap.allocate(1024);
  const BlockHandle b = heap.allocate(1024);
  CHECK(heap.free(a) == HeapStatus::kOk);
  CHECK(heap.free(a) == HeapStatus::kBadArgument);
  CHECK(heap.free(b) == HeapStatus::kOk);
  CHECK(heap.free(b) == HeapStatus::kBadArgument);
  CHECK_SOUND(heap);
}

TEST_CASE("pool exhaustion is its own status and leaves the heap usable") {
  Heap heap = make_heap(1 << 20, 256, 8);
  std::vector<BlockHandle> blocks;
  BlockHandle block = heap.allocate(256);
  while (block) {
    blocks.push_back(block);
    block = heap.allocate(256);
  }
  CHECK(block.status == HeapStatus::kNoRecords);
  CHECK(blocks.size() >= 5);
  for (BlockHandle b : blocks) CHECK(heap.free(b) == HeapStatus::kOk);
  CHECK_SOUND(heap);
  CHECK(heap.allocate(1 << 19));
}

TEST_CASE("alignment above the granule is kept at both ends") {
  Heap heap = make_heap(1 << 24);
  REQUIRE(heap.allocate(256));
  for (uint64_t alignment : {512u, 4096u, 65536u, 1u << 21}) {
    for (HeapSide side : {HeapSide::kLow, HeapSide::kHigh}) {
      const BlockHandle block = heap.allocate(1000, alignment, 7, side);
      REQUIRE(block);
      CHECK(block.offset_bytes % alignment == 0);
      CHECK_SOUND(heap);
    }
  }
}

TEST_CASE("the two sides grow towards each other and meet exactly") {
  Heap heap = make_heap(1 << 20);
  CHECK(heap.allocate(1 << 19, 0, 0, HeapSide::kHigh).offset_bytes == 1 << 19);
  CHECK(heap.allocate(1 << 19).offset_bytes == 0);
  CHECK(heap.allocate(1).status == HeapStatus::kNoSpace);
}

TEST_CASE("allocate_at takes exactly the range or nothing") {
  Heap heap = make_heap(1 << 20);
  const BlockHandle a = heap.allocate_at(4096, 4096, 1);
  REQUIRE(a);
  CHECK(a.offset_bytes == 4096);
  CHECK(heap.allocate_at(4096, 256).status == HeapStatus::kNoSpace);
  CHECK(heap.allocate_at(0, 4097).status == HeapStatus::kNoSpace);
  CHECK(heap.allocate_at(1, 256).status == HeapStatus::kBadArgument);
  CHECK(heap.allocate_at(1 << 20, 256).status == HeapStatus::kBadArgument);
  CHECK(heap.allocate_at((1 << 20) - 256, 512).status == HeapStatus::kBadArgument);
  CHECK(heap.allocate_at(0, 4096));
  CHECK(heap.allocate_at(8192, 256));
  CHECK_SOUND(heap);
}

TEST_CASE("what fits is never refused: the rest of a request's own bin is looked at last") {
  Heap heap = make_heap((640 + 1 + 645 + 1) * 256);
  const BlockHandle small = heap.allocate(640 * 256);
  REQUIRE(heap.allocate(256));
  const BlockHandle large = heap.allocate(645 * 256);
  REQUIRE(heap.allocate(256));
  CHECK(heap.free(large) == HeapStatus::kOk);
  CHECK(heap.free(small) == HeapStatus::kOk);  // the head of the bin of both
  CHECK(heap.allocate(646 * 256).status == HeapStatus::kNoSpace);
  CHECK(heap.allocate(644 * 256).offset_bytes == 641 * 256);
  CHECK_SOUND(heap);
}

TEST_CASE("find and free_at name a block by its offset") {
  Heap heap = make_heap(1 << 20);
  std::vector<BlockHandle> blocks;
  for (int k = 0; k < 1000; ++k) blocks.push_back(heap.allocate(512, 0, static_cast<uint64_t>(k)));
  for (int k = 0; k < 1000; ++k) {
    const BlockHandle found = heap.find(blocks[static_cast<size_t>(k)].offset_bytes);
    REQUIRE(found);
    CHECK(heap.tag(found) == static_cast<uint64_t>(k));
    CHECK(heap.free_at(found.offset_bytes) == HeapStatus::kOk);
    CHECK_FALSE(heap.find(found.offset_bytes));
  }
  CHECK_SOUND(heap);
}

TEST_CASE("blocks whose offsets share a bucket of the index are told apart") {
  // The hash of heap.hpp over its least table, 64 buckets: the first bucket with five granules in it.
  std::vector<std::vector<uint64_t>> buckets(64);
  std::vector<uint64_t> same;
  for (uint64_t granule = 1; same.empty(); granule += 2) {
    auto& bucket = buckets[granule * 0x9E3779B97F4A7C15ull >> 58];
    bucket.push_back(granule * 256);
    if (bucket.size() == 5) same = bucket;
  }
  for (size_t first = 0; first < same.size(); ++first) {
    Heap heap = make_heap(1 << 20);
    for (size_t k = 0; k < same.size(); ++k) REQUIRE(heap.allocate_at(same[k], 256, k + 1));
    // One goes, from every place in the chain; the others stay, and so does the order of what follows.
    CHECK(heap.free_at(same[first]) == HeapStatus::kOk);
    CHECK(heap.free_at(same[first]) == HeapStatus::kBadArgument);
    CHECK_SOUND(heap);
    for (size_t k = 0; k < same.size(); ++k) {
      const BlockHandle found = heap.find(same[k]);
      CHECK(static_cast<bool>(found) == (k != first));
      if (found) CHECK(heap.tag(found) == k + 1);
    }
    for (size_t k = 0; k < same.size(); ++k)
      if (k != first) CHECK(heap.free(heap.find(same[k])) == HeapStatus::kOk);
    CHECK_SOUND(heap);
    CHECK(heap.live_blocks() == 0);
  }
}

TEST_CASE("the index finds every block while it grows and shrinks") {
  Heap heap = make_heap(1 << 26, 256, 1u << 17);
  std::vector<BlockHandle> blocks;
  for (uint64_t k = 0; k < 20000; ++k) {
    blocks.push_back(heap.allocate(256 + k % 7 * 256, 0, k));
    if (k % 3 == 0) {  // a record given out again while the table grows
      REQUIRE(heap.free(blocks[k / 2]) == HeapStatus::kOk);
      blocks[k / 2] = heap.allocate(512, 0, k / 2);
    }
  }
  CHECK_SOUND(heap);
  for (uint64_t k = 0; k < blocks.size(); ++k) {
    const BlockHandle found = heap.find(blocks[k].offset_bytes);
    REQUIRE(found);
    REQUIRE(heap.tag(found) == k);
  }
}

TEST_CASE("carve turns one block into parts and leaves the rest free") {
  Heap heap = make_heap(1 << 20);
  REQUIRE(heap.allocate(1024));
  const BlockHandle arena = heap.allocate(16384);
  const BlockHandle after = heap.allocate(1024);
  const uint64_t base = arena.offset_bytes;
  const memory::HeapExtent parts[] = {
      {base + 256, 100, 1}, {base + 512, 512, 2}, {base + 16384 - 256, 256, 3}};
  BlockHandle handles[3];
  REQUIRE(heap.carve(arena, parts, handles) == HeapStatus::kOk);
  CHECK_SOUND(heap);
  for (int k = 0; k < 3; ++k) {
    CHECK(handles[k].offset_bytes == parts[k].offset_bytes);
    CHECK(heap.tag(handles[k]) == parts[k].tag);
  }
  CHECK(heap.live_blocks() == 5);
  CHECK(heap.free(after) == HeapStatus::kOk);
  for (BlockHandle handle : handles) CHECK(heap.free(handle) == HeapStatus::kOk);
  CHECK(heap.live_bytes() == 1024);
  CHECK_SOUND(heap);
}

TEST_CASE("carve refuses parts that overlap, leave the block or are empty") {
  Heap heap = make_heap(1 << 20);
  const BlockHandle arena = heap.allocate(4096);
  BlockHandle handles[2];
  const memory::HeapExtent overlapping[] = {{0, 300, 0}, {256, 256, 0}};
  CHECK(heap.carve(arena, overlapping, handles) == HeapStatus::kBadArgument);
  const memory::HeapExtent outside[] = {{3840, 512, 0}};
  CHECK(heap.carve(arena, outside, handles) == HeapStatus::kBadArgument);
  const memory::HeapExtent empty[] = {{0, 0, 0}};
  CHECK(heap.carve(arena, empty, handles) == HeapStatus::kBadArgument);
  CHECK(heap.is_live(arena));
  CHECK_SOUND(heap);
}

TEST_CASE("resize grows at will and shrinks only over free space") {
  Heap heap = make_heap(0);
  CHECK(heap.allocate(1).status == HeapStatus::kNoSpace);
  CHECK(heap.resize(4096) == HeapStatus::kOk);
  const BlockHandle a = heap.allocate(4096);
  REQUIRE(a);
  CHECK(heap.resize(8192) == HeapStatus::kOk);
  CHECK(heap.resize(2048) == HeapStatus::kNoSpace);
  CHECK(heap.floor_bytes() == 4096);
  CHECK(heap.resize(4096) == HeapStatus::kOk);
  CHECK_SOUND(heap);
  CHECK(heap.free(a) == HeapStatus::kOk);
  CHECK(heap.resize(0) == HeapStatus::kOk);
  CHECK(heap.floor_bytes() == 0);
  CHECK(heap.resize(UINT64_MAX) == HeapStatus::kBadArgument);
  CHECK_SOUND(heap);
}

TEST_CASE("reset forgets every block") {
  Heap heap = make_heap(1 << 20);
  std::vector<BlockHandle> blocks;
  for (int k = 0; k < 100; ++k) blocks.push_back(heap.allocate(1000));
  for (size_t k = 0; k < 100; k += 2) CHECK(heap.free(blocks[k]) == HeapStatus::kOk);
  heap.reset();
  CHECK_SOUND(heap);
  CHECK(heap.live_blocks() == 0);
  CHECK(heap.largest_hole_bytes() == 1 << 20);
  CHECK_FALSE(heap.find(blocks[1].offset_bytes));
  CHECK(heap.free(blocks[99]) == HeapStatus::kBadArgument);
}

TEST_CASE("a moved heap keeps its blocks") {
  Heap heap = make_heap(1 << 20);
  const BlockHandle a = heap.allocate(1000, 0, 5);
  Heap other = std::move(heap);
  CHECK(other.tag(other.find(a.offset_bytes)) == 5);
  heap = std::move(other);
  CHECK(heap.free(a) == HeapStatus::kOk);
  CHECK_SOUND(heap);
}

TEST_CASE("an empty heap's metadata does not grow with its capacity") {
  CHECK(make_heap(1 << 20).metadata_bytes() == make_heap(uint64_t{1} << 50).metadata_bytes());
}

TEST_CASE("metadata stays within 48 bytes per live block") {
  Heap heap = make_heap(1 << 26, 256, 1u << 20);
  const uint64_t empty_bytes = heap.metadata_bytes();
  for (int k = 0; k < 100000; ++k) REQUIRE(heap.allocate(512));
  CHECK((heap.metadata_bytes() - empty_bytes) / 100000 <= 48);
}

TEST_CASE("blocks are listed in ascending offset and tile the heap") {
  Heap heap = make_heap(1 << 16);
  std::vector<BlockHandle> blocks;
  for (int k = 0; k < 8; ++k) blocks.push_back(heap.allocate(1024, 0, 42));
  CHECK(heap.free(blocks[3]) == HeapStatus::kOk);
  uint64_t end = 0;
  int live = 0;
  heap.for_each_block([&](const memory::HeapBlock& block) {
    CHECK(block.offset_bytes == end);
    end += block.size_bytes;
    live += block.live ? 1 : 0;
    CHECK(block.tag == (block.live ? 42u : 0u));
  });
  CHECK(end == 1 << 16);
  CHECK(live == 7);
}
