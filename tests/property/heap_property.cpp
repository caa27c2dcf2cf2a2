// Heap and PlanReplay against a reference model, over random steps. Seed: GPUSHARE_TEST_SEED.
// SPDX-License-Identifier: Apache-2.0
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "memory/heap.hpp"
#include "memory/plan.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using memory::BlockHandle;
using memory::Heap;
using memory::HeapSide;
using memory::HeapStatus;
using test::uniform;

namespace {

// The reference for a heap: a map of live blocks, and holes derived from it.
struct Model {
  struct Block {
    uint64_t size_bytes;
    uint64_t tag;
    BlockHandle handle;
  };
  std::map<uint64_t, Block> live;  // by offset
  uint64_t capacity_bytes = 0;

  // False if it overlaps a live block or leaves the heap.
  bool add(const BlockHandle& handle, uint64_t size_bytes, uint64_t tag) {
    const uint64_t offset = handle.offset_bytes;
    if (offset + size_bytes > capacity_bytes) return false;
    const auto next = live.lower_bound(offset);
    if (next != live.end() && next->first < offset + size_bytes) return false;
    if (next != live.begin() && std::prev(next)->first + std::prev(next)->second.size_bytes > offset)
      return false;
    live[offset] = {size_bytes, tag, handle};
    return true;
  }
  uint64_t largest_hole() const {
    uint64_t end = 0, largest = 0;
    for (const auto& [offset, block] : live) {
      largest = std::max(largest, offset - end);
      end = offset + block.size_bytes;
    }
    return std::max(largest, capacity_bytes - end);
  }
  // Whether any hole takes an aligned block.
  bool fits(uint64_t size_bytes, uint64_t alignment) const {
    uint64_t end = 0;
    const auto hole_fits = [&](uint64_t begin, uint64_t stop) {
      const uint64_t at = (begin + alignment - 1) / alignment * alignment;
      return at < stop && stop - at >= size_bytes;
    };
    for (const auto& [offset, block] : live) {
      if (hole_fits(end, offset)) return true;
      end = offset + block.size_bytes;
    }
    return hole_fits(end, capacity_bytes);
  }
  uint64_t end() const { return live.empty() ? 0 : live.rbegin()->first + live.rbegin()->second.size_bytes; }
};

void check_equal(const Heap& heap, const Model& model) {
  const base::Status status = heap.check();
  INFO(status.message());
  REQUIRE(status.ok());
  REQUIRE(heap.live_blocks() == model.live.size());
  REQUIRE(heap.largest_hole_bytes() == model.largest_hole());
  REQUIRE(heap.floor_bytes() == model.end());
  auto expected = model.live.begin();
  heap.for_each_block([&](const memory::HeapBlock& block) {
    if (!block.live) return;
    REQUIRE(expected != model.live.end());
    REQUIRE(block.offset_bytes == expected->first);
    REQUIRE(block.size_bytes == expected->second.size_bytes);
    REQUIRE(block.tag == expected->second.tag);
    ++expected;
  });
  REQUIRE(expected == model.live.end());
}

uint64_t random_size(test::Random& random) {
  switch (uniform(random, 0, 3)) {
    case 0:
      return uniform(random, 1, 2000);
    case 1:
      return 256 * uniform(random, 1, 64);
    case 2:
      return uint64_t{256} << uniform(random, 0, 12);
    default:
      return uniform(random, 1, 1 << 20);
  }
}

}  // namespace

TEST_CASE("a heap agrees with a map of its blocks over random steps") {
  INFO("seed " << test::seed());
  test::Random random(test::seed());
  constexpr uint64_t kGranule = 256;
  memory::HeapOptions options;
  options.capacity_bytes = 1 << 22;
  options.max_blocks = 4096;
  Heap heap = std::move(memory::Heap::create(options)).value();
  Model model;
  model.capacity_bytes = options.capacity_bytes;
  uint64_t tag = 0, refused = 0, high_water = 0;
  for (int step = 0; step < 150'000; ++step) {
    const uint64_t choice = uniform(random, 0, 999);
    if (choice < 480) {
      const uint64_t bytes = random_size(random);
      const uint64_t size = (bytes + kGranule - 1) / kGranule * kGranule;
      const uint64_t alignment = choice < 60 ? uint64_t{1} << uniform(random, 0, 17) : 0;
      const HeapSide side = choice % 8 == 0 ? HeapSide::kHigh : HeapSide::kLow;
      const BlockHandle block = heap.allocate(bytes, alignment, ++tag, side);
      if (block) {
        REQUIRE(block.offset_bytes % std::max(alignment, kGranule) == 0);
        REQUIRE(model.add(block, size, tag));
        high_water = std::max(high_water, block.offset_bytes + size);
      } else {  // never refuses what fits
        REQUIRE(block.status == HeapStatus::kNoSpace);
        REQUIRE_FALSE(model.fits(size, std::max(alignment, kGranule)));
        ++refused;
      }
    } else if (choice < 950) {
      if (model.live.empty()) continue;
      auto victim = model.live.lower_bound(uniform(random, 0, model.capacity_bytes));
      if (victim == model.live.end()) victim = model.live.begin();
      REQUIRE(heap.tag(victim->second.handle) == victim->second.tag);
      REQUIRE(heap.find(victim->first).index == victim->second.handle.index);
      const bool by_offset = choice % 2 == 0;
      REQUIRE((by_offset ? heap.free_at(victim->first) : heap.free(victim->second.handle)) ==
              HeapStatus::kOk);
      REQUIRE(heap.free(victim->second.handle) == HeapStatus::kBadArgument);
      model.live.erase(victim);
    } else if (choice < 970) {
      const uint64_t offset = kGranule * uniform(random, 0, model.capacity_bytes / kGranule);
      const uint64_t size = kGranule * uniform(random, 1, 64);
      const BlockHandle block = heap.allocate_at(offset, size, ++tag);
      Model copy = model;
      const bool possible = copy.add({offset, 1, HeapStatus::kOk}, size, tag);
      REQUIRE(static_cast<bool>(block) == possible);
      if (block) {
        model.add(block, size, tag);
        high_water = std::max(high_water, offset + size);
      }
    } else if (choice < 985) {
      const uint64_t capacity = kGranule * uniform(random, 0, (1 << 23) / kGranule);
      const HeapStatus status = heap.resize(capacity);
      REQUIRE((status == HeapStatus::kOk) == (capacity >= model.end()));
      if (status == HeapStatus::kOk) model.capacity_bytes = capacity;
    } else if (choice < 998) {  // carve a block into random parts
      if (model.live.empty()) continue;
      auto victim = model.live.lower_bound(uniform(random, 0, model.capacity_bytes));
      if (victim == model.live.end()) victim = model.live.begin();
      std::vector<memory::HeapExtent> parts;
      for (uint64_t at = 0; at < victim->second.size_bytes;) {
        const uint64_t size = kGranule * uniform(random, 1, 40);
        if (at + size <= victim->second.size_bytes && uniform(random, 0, 1) == 0)
          parts.push_back({victim->first + at, size, ++tag});
        at += size;
      }
      std::vector<BlockHandle> handles(parts.size());
      const HeapStatus status = heap.carve(victim->second.handle, parts, handles);
      if (status == HeapStatus::kNoRecords) continue;
      REQUIRE(status == HeapStatus::kOk);
      model.live.erase(victim);
      for (size_t k = 0; k < parts.size(); ++k)
        REQUIRE(model.add(handles[k], parts[k].size_bytes, parts[k].tag));
    } else {
      heap.reset();
      model.live.clear();
      high_water = 0;
    }
    REQUIRE(heap.high_water_bytes() >= high_water);
    if (step % 16 == 0) check_equal(heap, model);
  }
  check_equal(heap, model);
  CHECK(refused > 100);  // the space did run out
}

TEST_CASE(
    "iterations replayed from a plan, with and without deviations, never overlap and leave nothing behind") {
  INFO("seed " << test::seed());
  test::Random random(test::seed() + 1);
  uint64_t deviated = 0, planned = 0;
  size_t steps = 0;
  for (int round = 0; round < 60; ++round) {
    // A random iteration: sizes from a few classes, lifetimes mostly nested.
    struct Call {
      uint64_t size_bytes;  // 0: free
      uint64_t alignment_bytes;
      uint32_t block;
    };
    std::vector<Call> calls;
    std::vector<uint32_t> live;
    memory::PlanRecorder recorder;
    uint32_t count = 0;
    for (int k = 0; k < 120; ++k) {
      if (live.empty() || uniform(random, 0, 99) < 55) {
        const uint64_t size = random_size(random);
        const uint64_t alignment = uniform(random, 0, 9) == 0 ? uint64_t{1} << uniform(random, 0, 14) : 0;
        REQUIRE(recorder.allocate(size, alignment) == count);
        calls.push_back({size, alignment, count});
        live.push_back(count++);
      } else {
        const size_t pick =
            uniform(random, 0, 3) == 0 ? uniform(random, 0, live.size() - 1) : live.size() - 1;
        recorder.free(live[pick]);
        calls.push_back({0, 0, live[pick]});
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(pick));
      }
    }
    auto plan = recorder.finish(1'000'000);
    REQUIRE(plan.ok());
    REQUIRE((*plan)->arena_bytes >= (*plan)->lower_bound_bytes);

    memory::HeapOptions options;
    options.capacity_bytes = 1 << 25;
    Heap heap = std::move(memory::Heap::create(options)).value();
    const BlockHandle resident = heap.allocate(12345);  // something else lives in the heap
    memory::PlanReplay replay(&heap);
    // Each way now and then: they are the same for the next step of the plan.
    const auto allocate = [&](uint64_t bytes, uint64_t alignment, uint64_t tag) {
      uint64_t offset = 0;
      if (uniform(random, 0, 1) == 0 && replay.allocate_next(bytes, alignment, tag, &offset))
        return BlockHandle{offset, memory::PlanReplay::kPlannedIndex, HeapStatus::kOk};
      return replay.allocate(bytes, alignment, tag);
    };
    const auto free_at = [&](uint64_t offset) {
      return uniform(random, 0, 1) == 0 && replay.free_next(offset) ? HeapStatus::kOk
                                                                    : replay.free_at(offset);
    };
    for (int iteration = 0; iteration < 20; ++iteration) {
      REQUIRE(replay.begin(*plan));
      Model model;
      model.capacity_bytes = options.capacity_bytes;
      REQUIRE(model.add(resident, heap.size_bytes(resident), 0));
      std::map<uint32_t, uint64_t> offset_of;
      const bool deviates = iteration % 2 == 1;
      const size_t from = deviates ? uniform(random, 0, calls.size() - 1) : calls.size();
      for (size_t k = 0; k < calls.size(); ++k, ++steps) {
        Call call = calls[k];
        if (k >= from && call.size_bytes != 0 && uniform(random, 0, 3) == 0)
          call.size_bytes += uniform(random, 1, 9000);
        if (call.size_bytes == 0) {
          if (k >= from && uniform(random, 0, 3) == 0) continue;  // kept longer than recorded
          const auto found = offset_of.find(call.block);
          if (found == offset_of.end()) continue;  // freed early
          REQUIRE(free_at(found->second) == HeapStatus::kOk);
          model.live.erase(found->second);
          offset_of.erase(found);
          continue;
        }
        const BlockHandle block = allocate(call.size_bytes, call.alignment_bytes, call.block);
        REQUIRE(block);
        REQUIRE(block.offset_bytes % std::max<uint64_t>(call.alignment_bytes, 256) == 0);
        REQUIRE(model.add(block, (call.size_bytes + 255) / 256 * 256, call.block));
        offset_of[call.block] = block.offset_bytes;
        if (uniform(random, 0, 299) == 0 &&
            !offset_of.empty()) {  // a free earlier than recorded is no deviation
          const auto early = offset_of.begin();
          if (replay.free_at(early->second) == HeapStatus::kOk) {
            CHECK(replay.free_at(early->second) == HeapStatus::kBadArgument);
            model.live.erase(early->second);
            offset_of.erase(early);
          }
        }
        if (replay.on_plan()) {
          memory::HeapBlock found;
          REQUIRE(replay.find(block.offset_bytes, &found) == (offset_of.count(call.block) != 0));
        }
      }
      if (replay.on_plan())
        ++planned;
      else
        ++deviated;
      if (!replay.on_plan() || uniform(random, 0, 1) == 0) {
        REQUIRE(replay.leave() == HeapStatus::kOk);
        check_equal(heap, [&] {
          Model known = model;  // tags and handles of what the plan had are the heap's now
          return known;
        }());
        for (const auto& [block, offset] : offset_of) REQUIRE(heap.free_at(offset) == HeapStatus::kOk);
        REQUIRE_FALSE(replay.end());
      } else {
        REQUIRE(replay.end());
      }
      REQUIRE(heap.live_blocks() == 1);
      REQUIRE(heap.check().ok());
    }
  }
  CHECK(steps >= 100'000);
  CHECK(planned > 100);
  CHECK(deviated > 100);
}
