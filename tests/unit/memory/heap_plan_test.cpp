// SPDX-License-Identifier: Apache-2.0
#include "memory/plan.hpp"

#include <utility>

#include "support/catch.hpp"

using namespace gpushare;
using memory::BlockHandle;
using memory::Heap;
using memory::HeapStatus;
using memory::PlanRecorder;
using memory::PlanReplay;

namespace {

Heap make_heap(uint64_t capacity_bytes, uint32_t max_blocks = 1u << 12) {
  memory::HeapOptions options;
  options.capacity_bytes = capacity_bytes;
  options.max_blocks = max_blocks;
  return std::move(memory::Heap::create(options)).value();
}

// alloc a 1000, alloc b 2000, free a, alloc c 500, free c, free b
std::shared_ptr<const memory::Plan> small_plan() {
  PlanRecorder recorder;
  const uint32_t a = recorder.allocate(1000);
  const uint32_t b = recorder.allocate(2000);
  recorder.free(a);
  const uint32_t c = recorder.allocate(500);
  recorder.free(c);
  recorder.free(b);
  return *recorder.finish();
}

}  // namespace

TEST_CASE("an iteration that repeats is served from the plan, within its arena") {
  Heap heap = make_heap(1 << 16);
  const auto plan = small_plan();
  CHECK(plan->arena_bytes == 1024 + 2048);
  CHECK(plan->arena_bytes == plan->lower_bound_bytes);
  PlanReplay replay(&heap);
  for (int iteration = 0; iteration < 3; ++iteration) {
    REQUIRE(replay.begin(plan));
    CHECK(heap.live_bytes() == plan->arena_bytes);
    const BlockHandle a = replay.allocate(1000, 0, 7);
    const BlockHandle b = replay.allocate(2000);
    memory::HeapBlock found;
    REQUIRE(replay.find(a.offset_bytes, &found));
    CHECK(found.tag == 7);
    CHECK(replay.free_at(a.offset_bytes) == HeapStatus::kOk);
    CHECK_FALSE(replay.find(a.offset_bytes, &found));
    CHECK(replay.free_at(a.offset_bytes) == HeapStatus::kBadArgument);
    const BlockHandle c = replay.allocate(500);
    CHECK(replay.free_at(c.offset_bytes) == HeapStatus::kOk);
    CHECK(replay.free_at(b.offset_bytes) == HeapStatus::kOk);
    CHECK(replay.on_plan());
    CHECK(replay.end());
    CHECK(heap.live_bytes() == 0);
  }
  CHECK(replay.planned_allocations() == 9);
  CHECK(replay.deviations() == 0);
}

TEST_CASE(
    "no bytes are refused on plan, one byte is another size, and no block is found but at its beginning") {
  Heap heap = make_heap(1 << 16);
  PlanReplay replay(&heap);
  REQUIRE(replay.begin(small_plan()));
  const BlockHandle a = replay.allocate(1000), b = replay.allocate(2000);
  memory::HeapBlock found;
  for (const BlockHandle& block : {a, b}) {
    CHECK(replay.find(block.offset_bytes, &found));
    CHECK_FALSE(replay.find(block.offset_bytes + 256, &found));
  }
  CHECK(replay.allocate(0).status == HeapStatus::kBadArgument);
  CHECK(replay.on_plan());
  CHECK(replay.allocate(1).status == HeapStatus::kOk);
  CHECK_FALSE(replay.on_plan());
  CHECK(replay.deviations() == 1);
  CHECK(heap.live_blocks() == 3);
}

TEST_CASE("another size leaves the plan: live blocks stay where they are and new ones avoid them") {
  Heap heap = make_heap(1 << 16);
  PlanReplay replay(&heap);
  REQUIRE(replay.begin(small_plan()));
  const BlockHandle a = replay.allocate(1000, 0, 1);
  const BlockHandle other = replay.allocate(2001, 0, 2);  // the plan has 2000
  REQUIRE(other);
  CHECK_FALSE(replay.on_plan());
  CHECK(replay.deviations() == 1);
  CHECK(heap.live_blocks() == 2);
  CHECK(heap.tag(heap.find(a.offset_bytes)) == 1);
  CHECK((other.offset_bytes >= a.offset_bytes + 1024 || other.offset_bytes + 2048 <= a.offset_bytes));
  CHECK(replay.free_at(a.offset_bytes) == HeapStatus::kOk);
  CHECK(replay.free_at(other.offset_bytes) == HeapStatus::kOk);
  CHECK_FALSE(replay.end());
  CHECK(heap.live_bytes() == 0);
  CHECK(heap.check().ok());
}

TEST_CASE("a late free, a longer iteration and leave() fall back; an early free does not") {
  Heap heap = make_heap(1 << 16);
  PlanReplay replay(&heap);
  const auto plan = small_plan();

  REQUIRE(replay.begin(plan));
  BlockHandle a = replay.allocate(1000), b = replay.allocate(2000);
  REQUIRE(replay.allocate(500));  // `a` should have been freed by now: its room may be planned for this one
  CHECK_FALSE(replay.on_plan());
  heap.reset();

  REQUIRE(replay.begin(plan));
  a = replay.allocate(1000);
  b = replay.allocate(2000);
  CHECK(replay.free_at(b.offset_bytes) == HeapStatus::kOk);  // recorded last
  CHECK(replay.on_plan());
  CHECK(replay.free_at(a.offset_bytes) == HeapStatus::kOk);
  CHECK(replay.free_at(replay.allocate(500).offset_bytes) == HeapStatus::kOk);
  CHECK(replay.on_plan());
  REQUIRE(replay.allocate(64));  // beyond the recording
  CHECK_FALSE(replay.on_plan());
  heap.reset();

  REQUIRE(replay.begin(plan));
  a = replay.allocate(1000, 0, 9);
  CHECK(replay.leave() == HeapStatus::kOk);
  CHECK(replay.leave() == HeapStatus::kOk);
  CHECK(heap.tag(heap.find(a.offset_bytes)) == 9);
  CHECK_FALSE(replay.end());
}

TEST_CASE("the next step of a plan is served by a comparison, and what lives is known all the same") {
  Heap heap = make_heap(1 << 16);
  PlanReplay replay(&heap);
  uint64_t a = 0, b = 0, c = 0;
  CHECK_FALSE(replay.allocate_next(1000, 0, 1, &a));  // no plan
  CHECK_FALSE(replay.free_next(0));
  for (int iteration = 0; iteration < 3; ++iteration) {
    REQUIRE(replay.begin(small_plan()));
    memory::HeapBlock found;
    CHECK_FALSE(replay.find(0, &found));  // what lived at the end of the iteration before is gone
    CHECK_FALSE(replay.allocate_next(0, 0, 1, &a));
    CHECK_FALSE(replay.allocate_next(1001, 0, 1, &a));
    CHECK_FALSE(replay.allocate_next(1000, 512, 1, &a));
    REQUIRE(replay.allocate_next(1000, 0, 1, &a));
    CHECK_FALSE(replay.free_next(a));  // recorded later
    REQUIRE(replay.allocate_next(2000, 0, 2, &b));
    CHECK_FALSE(replay.free_next(b));
    CHECK(replay.planned_allocations() == 3u * static_cast<unsigned>(iteration) + 2);
    REQUIRE(replay.find(a, &found));
    CHECK(found.tag == 1);
    CHECK(found.size_bytes == 1000);
    if (iteration == 1) {  // the last free of the plan, early: the steps until then are looked at one by one
      CHECK(replay.free_at(b) == HeapStatus::kOk);
      CHECK_FALSE(replay.find(b, &found));
      CHECK_FALSE(replay.free_next(a));
      CHECK(replay.free_at(a) == HeapStatus::kOk);
      CHECK_FALSE(replay.allocate_next(500, 0, 3, &c));
      c = replay.allocate(500, 0, 3).offset_bytes;
      REQUIRE(replay.find(c, &found));
      CHECK(found.tag == 3);
      CHECK(replay.free_at(c) == HeapStatus::kOk);
    } else {
      REQUIRE(replay.free_next(a));
      CHECK_FALSE(replay.find(a, &found));
      CHECK_FALSE(replay.free_next(a));
      REQUIRE(replay.allocate_next(500, 0, 3, &c));
      REQUIRE(replay.free_next(c));
      if (iteration == 2) REQUIRE(replay.free_next(b));
    }
    CHECK_FALSE(replay.allocate_next(64, 0, 4, &a));  // beyond the recording
    CHECK(replay.on_plan());
    CHECK(replay.end());
    CHECK(replay.planned_allocations() == 3u * static_cast<unsigned>(iteration + 1));
    CHECK(heap.live_bytes() == 0);
  }
  REQUIRE(replay.begin(small_plan()));
  REQUIRE(replay.allocate_next(1000, 0, 5, &a));
  CHECK(replay.leave() == HeapStatus::kOk);
  CHECK(heap.tag(heap.find(a)) == 5);
  CHECK_FALSE(replay.allocate_next(2000, 0, 6, &b));
  CHECK(replay.planned_allocations() == 10);
}

TEST_CASE("no room for the arena means the heap serves the iteration") {
  Heap heap = make_heap(2048);
  PlanReplay replay(&heap);
  CHECK_FALSE(replay.begin(small_plan()));
  CHECK_FALSE(replay.begin(nullptr));
  const BlockHandle block = replay.allocate(1000);
  REQUIRE(block);
  CHECK(heap.is_live(block));
  CHECK(replay.free_at(block.offset_bytes) == HeapStatus::kOk);
  CHECK(replay.free_at(123) == HeapStatus::kBadArgument);
}

TEST_CASE("blocks still live at the end go with the arena") {
  Heap heap = make_heap(1 << 16);
  PlanReplay replay(&heap);
  REQUIRE(replay.begin(small_plan()));
  REQUIRE(replay.allocate(1000));
  CHECK_FALSE(replay.begin(small_plan()));  // within an iteration
  CHECK(replay.end());
  CHECK(heap.live_blocks() == 0);
}

TEST_CASE("a heap without records left keeps the plan in force and says so") {
  Heap heap = make_heap(1 << 20, 8);
  PlanRecorder recorder;
  for (int k = 0; k < 8; ++k) recorder.allocate(1000);
  PlanReplay replay(&heap);
  REQUIRE(replay.begin(*recorder.finish()));
  for (int k = 0; k < 8; ++k) REQUIRE(replay.allocate(1000));
  CHECK(replay.allocate(77).status == HeapStatus::kNoRecords);
  CHECK(replay.on_plan());
  CHECK(heap.check().ok());
}

TEST_CASE("alignments are kept in the plan") {
  PlanRecorder recorder;
  recorder.allocate(100);
  recorder.allocate(100, 4096);
  const auto plan = *recorder.finish();
  Heap heap = make_heap(1 << 16);
  REQUIRE(heap.allocate(256));
  PlanReplay replay(&heap);
  REQUIRE(replay.begin(plan));
  REQUIRE(replay.allocate(100));
  CHECK(replay.allocate(100, 4096).offset_bytes % 4096 == 0);
  CHECK(replay.on_plan());
}

TEST_CASE("recordings that cannot be placed are refused") {
  PlanRecorder recorder;
  recorder.allocate(100, 3);
  CHECK(recorder.finish().status().code() == GPUSHARE_INVALID_ARGUMENT);
  recorder.clear();
  recorder.allocate(0);
  CHECK(recorder.finish().status().code() == GPUSHARE_INVALID_ARGUMENT);
  recorder.clear();
  recorder.allocate(UINT64_MAX);
  CHECK(recorder.finish().status().code() == GPUSHARE_INVALID_ARGUMENT);
  recorder.clear();
  REQUIRE(recorder.finish().ok());
  CHECK((*recorder.finish())->steps.empty());
}
