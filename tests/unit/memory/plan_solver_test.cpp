// Plans solved on the solver's thread, and by lanes of devices without virtual time.
// SPDX-License-Identifier: Apache-2.0
#include <thread>
#include <vector>

#include "memory/plan_solver.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "unit/memory/device_memory_fixture.hpp"

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

namespace {

// Blocks of many sizes of which every other is freed soon: nothing that the simple orders place without a gap.
memory::PlanRecorder recording(uint32_t blocks) {
  Random random(7);
  memory::PlanRecorder recorder;
  for (uint32_t i = 0; i < blocks; ++i) {
    recorder.allocate(uniform(random, 1, 1'000'000));
    if (i % 2 == 1) recorder.free(i - static_cast<uint32_t>(uniform(random, 0, 1)));
  }
  return recorder;
}

}  // namespace

TEST_CASE("a task is solved beside the caller, one after the other") {
  memory::PlanSolver solver(false);
  std::vector<std::shared_ptr<memory::PlanTask>> tasks;
  for (uint32_t blocks : {10u, 50u, 200u}) {
    tasks.push_back(std::make_shared<memory::PlanTask>(recording(blocks)));
    solver.solve(tasks.back());
  }
  for (const auto& task : tasks) {
    while (!task->done) std::this_thread::yield();
    REQUIRE(task->plan != nullptr);
    CHECK(task->plan->arena_bytes >= task->plan->lower_bound_bytes);
  }
}

TEST_CASE("what is not solvable is done without a plan") {
  memory::PlanSolver solver(GENERATE(false, true));
  memory::PlanRecorder recorder;
  recorder.allocate(100, 3);  // no power of two
  const auto task = std::make_shared<memory::PlanTask>(std::move(recorder));
  solver.solve(task);
  while (!task->done) std::this_thread::yield();
  CHECK(task->plan == nullptr);
}

TEST_CASE("a solver that ends abandons what is not done") {
  std::vector<std::shared_ptr<memory::PlanTask>> tasks;
  {
    memory::PlanSolver solver(false);
    for (int i = 0; i < 3; ++i) {
      tasks.push_back(std::make_shared<memory::PlanTask>(recording(30'000)));
      solver.solve(tasks.back());
    }
  }
  CHECK_FALSE(tasks.back()->done);
  CHECK(tasks.back()->plan == nullptr);
}

TEST_CASE("an abandoned task is given up: its plan is cancelled") {
  std::atomic<bool> cancelled{true};
  const auto solved = recording(5'000).finish(1'000'000'000, {}, &cancelled);
  CHECK(solved.status().code() == GPUSHARE_CANCELLED);
}

TEST_CASE("iterations go on while their plan is solved, and it is taken over at a boundary") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 4 * kMiB);
  Lane* lane = f.lane(0, 32 * kMiB, stream);
  constexpr uint64_t kBlocks = kThreadSanitizer ? 5'000 : 20'000;
  const auto iterate = [&] {
    bool planned = false;
    REQUIRE(lane->begin_iteration(*heap, true).ok());
    Address last = 0;
    uint64_t failed = 0;
    for (uint64_t i = 0; i < kBlocks; ++i) {
      const auto block = lane->alloc(256 + i % 7 * 1000, 0);
      failed += block.ok() ? 0 : 1;
      if (i % 2 == 1) failed += f.memory->free(last).ok() ? 0 : 1;
      if (i % 3 == 2) failed += block.ok() && f.memory->free(*block).ok() ? 0 : 1;
      last = i % 3 == 2 ? must(lane->alloc(300, 0)) : *block;
    }
    CHECK(failed == 0);
    REQUIRE(lane->end_iteration(&planned).ok());
    return planned;
  };
  CHECK_FALSE(iterate());
  CHECK_FALSE(iterate());
  while (!iterate()) {
  }
  CHECK(iterate());
  CHECK(lane->stats().planned_allocs >= 2 * kBlocks);
  CHECK_OK(stream.synchronize());
}

TEST_CASE("a session may end, and all of memory, while its plan is solved") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 4 * kMiB);
  Lane* lane = f.lane(0, 48 * kMiB, stream);
  for (int iteration = 0; iteration < 3; ++iteration) {
    CHECK_OK(lane->begin_iteration(*heap, true));
    for (uint64_t i = 0; i < 20'000; ++i) (void)lane->alloc(256 + i % 13 * 300, 0);
    CHECK_OK(lane->end_iteration(nullptr));
  }
  if (GENERATE(true, false)) CHECK_OK(f.memory->close_heap(heap));
  CHECK_OK(stream.synchronize());
}
