// Blocks that outlive what they were made in: used on another stream, or kept beyond their iteration.
//
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <map>
#include <thread>
#include <vector>

#include "memory/lane.hpp"
#include "support/bytes.hpp"
#include "support/gate.hpp"
#include "support/random.hpp"
#include "unit/memory/device_memory_fixture.hpp"

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

TEMPLATE_TEST_CASE_SIG("a block used on another stream is reused only after that use", "", ((int V), V), 0,
                       1) {
  Fixture f(host(), V == 0 ? Layout::kContiguous : Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream(), side = f.stream();
  PersistentHeap* heap = f.heap(1, 4 * kMiB);
  Lane* lane = f.lane(0, 4 * kMiB, stream);
  Gate gate;
  CHECK_OK(lane->begin_iteration(*heap, false));
  heap->set_stream(&stream);
  const bool persistent = GENERATE(false, true);
  const Address a = must(persistent ? heap->alloc(Kind::kModel, 4 * kMiB, 0) : lane->alloc(4 * kMiB, 0));
  CHECK_OK(side.launch_host(Gate::block, &gate));
  CHECK_OK(f.memory->record_use(a, side));
  CHECK_OK(f.memory->free(a));
  CHECK(f.memory->free(a).code() == GPUSHARE_NOT_FOUND);
  // Nothing else is free: the stream waits for the side stream by event, the host does not.
  const Address b = must(persistent ? heap->alloc(Kind::kModel, 4 * kMiB, 0) : lane->alloc(4 * kMiB, 0));
  CHECK(a == b);
  CHECK_OK(stream.fill(b, 7, 256));
  CHECK(stream.query().code() == GPUSHARE_NOT_READY);
  gate.open();
  CHECK_OK(stream.synchronize());
  // At the boundary the whole lane comes after uses on other streams.
  if (!persistent) {
    Gate again;
    CHECK_OK(side.launch_host(Gate::block, &again));
    CHECK_OK(f.memory->record_use(b, side));
    CHECK_OK(lane->end_iteration(nullptr));
    CHECK(lane->stats().live_bytes == 0);
    CHECK_OK(stream.fill(b, 8, 256));
    CHECK(stream.query().code() == GPUSHARE_NOT_READY);
    again.open();
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

// All 64 MiB are promised: a kept block must find its bytes once, in the session's promise or in the lane.
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
  SECTION("freed in the middle of an iteration, it comes back with the lane's size at once") {
    CHECK_OK(lane->begin_iteration(*heap, false));
    REQUIRE(lane->alloc(kMiB, 0).ok());
    CHECK_OK(f.memory->free(kept));
    CHECK(heap->stats().lent_bytes == 8 * kMiB);
    CHECK_OK(lane->set_size(16 * kMiB));
    CHECK(lane->stats().lent_bytes == 0);
    CHECK(heap->stats().lent_bytes == 0);
    CHECK_OK(lane->end_iteration(nullptr));
    all_of_it();
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
  SECTION("its lane closes, and the next one takes over what it pins") {
    auto next = f.stream();
    std::atomic<bool> go{false};
    const struct Release {  // also when a check ends the test: streams wait for their work
      std::atomic<bool>& go;
      ~Release() { go = true; }
    } release{go};
    CHECK_OK(stream.launch_host(
        [](void* flag) {
          while (!static_cast<std::atomic<bool>*>(flag)->load()) {
          }
        },
        &go));
    CHECK_OK(f.memory->close_lane(lane));
    CHECK(f.memory->open_lane(1, 32 * kMiB, next).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    CHECK(f.memory->stats().pinned_bytes == 2 * kMiB);
    CHECK(f.memory->find(kept)->lane == 0);
    lane = f.lane(1, 16 * kMiB, next);
    CHECK(f.memory->stats().pinned_bytes == 0);
    CHECK(f.memory->stats().free_bytes == 0);
    CHECK(f.memory->find(kept)->lane == 1);
    CHECK(lane->stats().size_bytes == 16 * kMiB);
    CHECK(lane->stats().lent_bytes == 8 * kMiB);
    // After the work of the closed one.
    CHECK_OK(next.fill(kept, 7, 256));
    CHECK(next.query().code() == GPUSHARE_NOT_READY);
    go = true;
    CHECK_OK(next.synchronize());
    heap->set_stream(&next);
    other->set_stream(&next);
    all_of_it();
    CHECK_OK(f.memory->free(kept));
    CHECK_OK(heap->resize(16 * kMiB));
    CHECK(heap->stats().lent_bytes == 0);
    REQUIRE(heap->alloc(Kind::kModel, 16 * kMiB, 0).ok());
    all_of_it();
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
TEMPLATE_TEST_CASE_SIG("a size that kept blocks hold up takes effect when the last of them goes", "",
                       ((int V), V), 0, 1) {
  Fixture f(host(), V == 0 ? Layout::kContiguous : Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream(), other = f.stream();
  PersistentHeap* heap = f.heap(1, 4 * kMiB);
  heap->set_stream(&stream);
  Lane* lane = f.lane(0, 8 * kMiB, stream);
  Lane* below =
      f.lane(1, 4 * kMiB, other);  // so that the first cannot grow where it is, on the contiguous layout
  const bool grows = GENERATE(false, true);
  const bool with_session = GENERATE(false, true);
  const uint64_t wanted = grows ? 16 * kMiB : 2 * kMiB;
  CHECK_OK(lane->begin_iteration(*heap, false));
  (void)must(lane->alloc(6 * kMiB, 0));
  const Address kept = must(lane->alloc(kMiB, 0));
  CHECK_OK(lane->keep(kept));
  CHECK_OK(lane->set_size(wanted));
  CHECK_OK(lane->end_iteration(nullptr));
  // No iteration comes that would have a boundary.
  if (with_session)
    CHECK_OK(f.memory->close_heap(heap));
  else
    CHECK_OK(f.memory->free(kept));
  CHECK(lane->stats().size_bytes == wanted);
  CHECK(f.memory->stats().free_bytes == (64 - 4 - (with_session ? 0 : 4)) * kMiB - wanted);
  if (!with_session) CHECK_OK(f.memory->close_heap(heap));
  CHECK_OK(f.memory->close_lane(lane));
  CHECK_OK(f.memory->close_lane(below));
}

TEST_CASE("granules without memory at a lane's end do not hold up a smaller size") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 16 * kMiB);
  heap->set_stream(&stream);
  Lane* lane = f.lane(0, 16 * kMiB, stream);
  CHECK_OK(lane->begin_iteration(*heap, false));
  (void)must(lane->alloc(4 * kMiB, 0));
  const Address low = must(lane->alloc(2 * kMiB, 0));
  (void)must(lane->alloc(8 * kMiB, 0));
  const Address high = must(lane->alloc(2 * kMiB, 0));
  CHECK_OK(lane->keep(low));
  CHECK_OK(lane->keep(high));
  CHECK_OK(lane->end_iteration(nullptr));
  // The memory of the last granules between the two goes behind the second.
  CHECK_OK(lane->begin_iteration(*heap, false));
  uint64_t missing = UINT64_MAX;
  CHECK(!lane->alloc(10 * kMiB, 0).ok());
  CHECK(lane->gather(*heap, 10 * kMiB, &missing));
  CHECK(must(lane->alloc(10 * kMiB, 0)) == high + 2 * kMiB);
  CHECK_OK(lane->end_iteration(nullptr));
  // The device is at work, so no boundary puts memory there again.
  Gate gate;
  CHECK_OK(stream.launch_host(Gate::block, &gate));
  const bool one_is_left = GENERATE(false, true);
  if (!one_is_left) CHECK_OK(f.memory->free(low));
  CHECK_OK(f.memory->free(high));
  const uint64_t least = (one_is_left ? 4 : 2) * kMiB;  // the one pins what lies before it
  CHECK_OK(lane->set_size(least));
  CHECK(lane->stats().size_bytes == least);
  CHECK(f.memory->stats().free_bytes == 48 * kMiB - least);
  gate.open();
  if (one_is_left) CHECK_OK(f.memory->free(low));
  CHECK_OK(lane->begin_iteration(*heap, false));
  (void)must(lane->alloc(least, 0));
  CHECK_OK(lane->end_iteration(nullptr));
}

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

// Sessions with kept blocks go out and come in, their lanes close and open, and calls of the device fail.
TEST_CASE("kept blocks of sessions that are paged out and in keep their bytes and addresses") {
  Fixture f(GENERATE(host(), sim()), Layout::kVirtual, 96 * kMiB);
  const uint64_t from = seed();
  CAPTURE(from);
  Random random(from);
  auto stream = f.stream(), paging = f.stream();
  struct Block {
    uint64_t bytes;
    uint8_t value;
  };
  struct One {
    PersistentHeap* heap;
    std::map<Address, Block> kept;
    bool out = false;
  };
  std::vector<One> sessions;
  for (memory::SessionId id = 1; id <= 3; ++id) sessions.push_back({f.heap(id, 12 * kMiB), {}, false});
  for (One& one : sessions) one.heap->set_stream(&stream);
  Lane* lanes[2] = {};
  const auto fail_sometimes = [&](bool on) {
    gpushare_backend_fault fault{};
    fault.struct_size = sizeof fault;
    fault.kind = !on                          ? GPUSHARE_FAULT_NONE
                 : uniform(random, 0, 1) == 0 ? GPUSHARE_FAULT_MAP_FAILS
                                              : GPUSHARE_FAULT_LAUNCH_FAILS;
    fault.at_call = uniform(random, 1, 12);
    CHECK(f.device->ops().fault_set(f.device->get(), &fault) == GPUSHARE_OK);
  };
  const auto check = [&](const One& one) {
    for (const auto& [address, block] : one.kept) CHECK(holds(stream, address, block.bytes, block.value));
  };
  uint8_t next = 0;
  bool went_out = false;
  for (int step = 0; step < 500; ++step) {
    CAPTURE(step);
    One& one = sessions[uniform(random, 0, sessions.size() - 1)];
    Lane*& lane = lanes[uniform(random, 0, 1)];
    const uint64_t what = uniform(random, 0, 9);
    if (what == 0 && lane != nullptr) {
      CHECK_OK(f.memory->close_lane(lane));
      lane = nullptr;
    } else if (what < 3) {
      const bool out = !one.heap->paged_out();
      const uint64_t part = uniform(random, 0, 1) == 0 ? UINT64_MAX : uniform(random, 1, 6 * kMiB);
      fail_sometimes(uniform(random, 0, 3) == 0);
      if (!out && uniform(random, 0, 7) == 0) one.heap->stop_page_in();
      const base::Status status = out                     ? one.heap->page_out(paging, part)
                                  : one.heap->paged_out() ? one.heap->page_in(paging, part)
                                                          : base::Status();
      CHECK(status.code() != GPUSHARE_INTERNAL);
      fail_sometimes(false);
      one.out = out ? one.out || status.ok() : one.heap->paged_out();
      for (const auto& [address, block] : one.kept)
        went_out |= out && status.ok() && f.memory->find(address)->spilled;
    } else if (what == 3 && !one.kept.empty()) {
      auto block = one.kept.begin();
      std::advance(block, static_cast<ptrdiff_t>(uniform(random, 0, one.kept.size() - 1)));
      CHECK_OK(f.memory->free(block->first));
      one.kept.erase(block);
    } else if (!one.out) {
      if (lane == nullptr) {
        auto opened = f.memory->open_lane(0, 16 * kMiB, stream);
        if (!opened.ok()) continue;
        lane = *opened;
      }
      CHECK_OK(lane->begin_iteration(*one.heap, false));
      for (uint64_t i = uniform(random, 1, 6); i > 0; --i) {
        const Block block = {uniform(random, 1, 5 * kMiB), static_cast<uint8_t>(1 + next++ % 250)};
        const auto address = lane->alloc(block.bytes, 0);
        if (!address.ok()) continue;
        CHECK_OK(stream.fill(*address, block.value, block.bytes));
        if (uniform(random, 0, 3) == 0 && lane->keep(*address).ok()) one.kept[*address] = block;
      }
      CHECK_OK(lane->end_iteration(nullptr));
    }
    CHECK(f.memory->check() == "");
    if (step % 10 == 0)
      for (const One& each : sessions) check(each);
  }
  CHECK(went_out);
  for (One& each : sessions) {
    check(each);
    CHECK_OK(f.memory->close_heap(each.heap));
  }
}

TEST_CASE("a kept block that its paged-out session uses comes home after that use") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto own = f.stream(), of_lane = f.stream(), paging = f.stream();
  PersistentHeap *heap = f.heap(1, 8 * kMiB), *other = f.heap(2, 8 * kMiB);
  heap->set_stream(&own);
  Lane* lane = f.lane(0, 16 * kMiB, of_lane);
  CHECK_OK(lane->begin_iteration(*heap, false));
  const Address freed = must(lane->alloc(kMiB, 0)), used = must(lane->alloc(kMiB, 0));
  REQUIRE(freed / (2 * kMiB) == used / (2 * kMiB));  // one granule, which they fill
  CHECK_OK(lane->keep(freed));
  CHECK_OK(lane->keep(used));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK_OK(heap->page_out(paging));
  REQUIRE(f.memory->find(used)->spilled);
  CHECK_OK(
      f.memory->free(freed));  // the granule has room for iterations now: it comes home at the next boundary
  Gate gate;
  CHECK_OK(own.launch_host(Gate::block, &gate));
  CHECK_OK(own.fill(used, 7, kMiB));
  std::atomic<bool> opened{false};
  std::thread opener([&] {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(50));  // meanwhile a move that does not wait goes through
    opened = true;
    gate.open();
  });
  CHECK_OK(lane->begin_iteration(*other, false));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK(opened);
  CHECK_FALSE(f.memory->find(used)->spilled);
  opener.join();
  CHECK_OK(own.synchronize());
  CHECK(all_are(reinterpret_cast<const uint8_t*>(used), kMiB, 7));
  CHECK_OK(f.memory->close_heap(heap));
}

// Between two parts anything may happen that may happen to a session that is out.
TEST_CASE("kept blocks go out in parts after their session's own blocks, and come home in parts after them") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto own = f.stream(), of_lane = f.stream(), paging = f.stream();
  PersistentHeap *heap = f.heap(1, 16 * kMiB), *other = f.heap(2, 8 * kMiB);
  heap->set_stream(&own);
  other->set_stream(&of_lane);
  Lane* lane = f.lane(0, 16 * kMiB, of_lane);
  CHECK_OK(lane->begin_iteration(*heap, false));
  const Address kept = must(lane->alloc(8 * kMiB, 0)), freed = must(lane->alloc(2 * kMiB, 0));
  CHECK_OK(of_lane.fill(kept, 7, 8 * kMiB));
  CHECK_OK(lane->keep(kept));
  CHECK_OK(lane->keep(freed));
  CHECK_OK(lane->end_iteration(nullptr));
  const Address block = must(heap->alloc(Kind::kModel, 4 * kMiB, 0));
  CHECK_OK(own.fill(block, 8, 4 * kMiB));
  CHECK_OK(of_lane.synchronize());
  // The lane has its whole size beside kept blocks that are away.
  const auto others_iteration = [&](uint64_t bytes) {
    CHECK_OK(of_lane.synchronize());
    CHECK_OK(lane->begin_iteration(*other, false));
    CHECK_OK(of_lane.fill(must(lane->alloc(bytes, 0)), 0xEE, bytes));
    CHECK_OK(lane->end_iteration(nullptr));
    CHECK(f.memory->check() == "");
  };
  const auto fail_copy = [&] {
    gpushare_backend_fault fault{sizeof(fault), GPUSHARE_FAULT_LAUNCH_FAILS, 1, 0};
    CHECK_OK(f.device->set_fault(fault));
  };
  enum class Then { kNothing, kFree, kIterate, kFail, kLaneCloses, kHeapCloses };
  const Then then = GENERATE(Then::kNothing, Then::kFree, Then::kIterate, Then::kFail, Then::kLaneCloses,
                             Then::kHeapCloses);
  const bool at_home = GENERATE(false, true);  // the same on the way home
  uint64_t given = 0, away = 0;
  CHECK_OK(heap->page_out(paging, 2 * kMiB, &given));
  CHECK_FALSE(heap->own_blocks_out());
  CHECK_OK(heap->page_out(paging, 2 * kMiB, &given));
  CHECK(heap->own_blocks_out());
  CHECK_FALSE(heap->paged_out());
  CHECK(given >= 4 * kMiB);
  CHECK(heap->kept_away_bytes() == 0);
  CHECK(lane->begin_iteration(*heap, false).code() == GPUSHARE_INVALID_STATE);
  const auto happens = [&] {
    if (then == Then::kFree) CHECK_OK(f.memory->free(freed));
    if (then == Then::kIterate) others_iteration(heap->kept_away_bytes() + 6 * kMiB);
    if (then == Then::kFail) fail_copy();
    if (then == Then::kLaneCloses) CHECK_OK(f.memory->close_lane(lane));
    if (then == Then::kHeapCloses) CHECK_OK(f.memory->close_heap(heap));
    CHECK(f.memory->check() == "");
    return then != Then::kHeapCloses;
  };
  for (int parts = 0; !heap->paged_out(); ++parts) {
    if (parts == 2 && !at_home && !happens()) return;
    CHECK_OK(heap->page_out(paging, 3 * kMiB, &given));  // a granule
    if (then == Then::kFail && parts == 2 && !at_home) break;
    if (then != Then::kLaneCloses) CHECK(heap->kept_away_bytes() <= away + 2 * kMiB);
    away = heap->kept_away_bytes();
    CHECK(f.memory->check() == "");
  }
  CHECK(heap->paged_out());
  CHECK(given >= 4 * kMiB);
  const bool without = then == Then::kFree && !at_home;
  if (then != Then::kFail || at_home) CHECK(heap->kept_away_bytes() == (without ? 8 : 10) * kMiB);
  CHECK(all_are(reinterpret_cast<const uint8_t*>(kept), 8 * kMiB, 7));
  CHECK(heap->page_out(paging).code() == GPUSHARE_INVALID_STATE);
  away = heap->kept_away_bytes();
  while (heap->own_blocks_out()) CHECK_OK(heap->page_in(paging, 2 * kMiB));
  CHECK(heap->paged_out());
  CHECK(heap->kept_away_bytes() == away);
  CHECK(heap->alloc(Kind::kModel, 1, 0).status().code() == base::kAway);
  CHECK(all_are(reinterpret_cast<const uint8_t*>(block), 4 * kMiB, 8));
  for (int parts = 0; heap->paged_out(); ++parts) {
    if (parts == 2 && at_home && !happens()) return;
    CHECK_OK(heap->page_in(paging, 3 * kMiB));
    CHECK(heap->kept_away_bytes() + (then == Then::kFree ? 4 : 2) * kMiB >= away);
    away = heap->kept_away_bytes();
    CHECK(f.memory->check() == "");
  }
  // A copy that failed leaves its blocks where they are, which the session reads there.
  CHECK((away > 0) == (then == Then::kFail && at_home));
  CHECK(all_are(reinterpret_cast<const uint8_t*>(kept), 8 * kMiB, 7));
  CHECK_OK(heap->page_out(paging));
  CHECK_OK(heap->page_in(paging));
  CHECK(heap->kept_away_bytes() == 0);
  CHECK(all_are(reinterpret_cast<const uint8_t*>(kept), 8 * kMiB, 7));
  CHECK(all_are(reinterpret_cast<const uint8_t*>(block), 4 * kMiB, 8));
  CHECK(f.memory->check() == "");
  CHECK_OK(f.memory->close_heap(heap));
}

TEST_CASE("a page-in that is stopped when only kept blocks are missing has ended") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto own = f.stream(), of_lane = f.stream(), paging = f.stream();
  PersistentHeap* heap = f.heap(1, 16 * kMiB);
  heap->set_stream(&own);
  Lane* lane = f.lane(0, 16 * kMiB, of_lane);
  CHECK_OK(lane->begin_iteration(*heap, false));
  const Address kept = must(lane->alloc(8 * kMiB, 0));
  CHECK_OK(of_lane.fill(kept, 7, 8 * kMiB));
  CHECK_OK(lane->keep(kept));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK_OK(of_lane.synchronize());
  CHECK_OK(heap->page_out(paging));
  CHECK_OK(heap->page_in(paging, 2 * kMiB));
  CHECK(heap->paged_out());
  CHECK(heap->kept_away_bytes() == 6 * kMiB);
  heap->stop_page_in();
  CHECK_FALSE(heap->paged_out());
  CHECK(heap->kept_away_bytes() == 6 * kMiB);
  CHECK(f.memory->check() == "");
  // It runs as it is, and the lane has its size.
  CHECK_OK(of_lane.synchronize());
  CHECK_OK(lane->begin_iteration(*heap, false));
  CHECK_OK(of_lane.fill(must(lane->alloc(16 * kMiB, 0)), 0xEE, 16 * kMiB));
  CHECK_OK(of_lane.fill(kept, 9, 8 * kMiB));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK(f.memory->check() == "");
  CHECK_OK(of_lane.synchronize());
  // A block that is away stays there when it is paged out, and comes home when it is paged in.
  CHECK_OK(heap->page_out(paging));
  CHECK(heap->kept_away_bytes() == 8 * kMiB);
  CHECK_OK(heap->page_in(paging));
  CHECK(heap->kept_away_bytes() == 0);
  CHECK(all_are(reinterpret_cast<const uint8_t*>(kept), 8 * kMiB, 9));
  CHECK(f.memory->check() == "");
  CHECK_OK(f.memory->close_heap(heap));
}

// Kept blocks of a paged-out session go to host memory when their lane closes, after the device's last use of them.
TEST_CASE("others open and close sessions while kept blocks of a closed lane are copied") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto own = f.stream(), of_lane = f.stream(), paging = f.stream(), side = f.stream();
  PersistentHeap* heap = f.heap(1, 8 * kMiB);
  heap->set_stream(&own);
  Lane* lane = f.lane(0, 16 * kMiB, of_lane);
  CHECK_OK(lane->begin_iteration(*heap, false));
  const Address kept = must(lane->alloc(kMiB, 0));
  CHECK_OK(of_lane.fill(kept, 7, kMiB));
  CHECK_OK(lane->keep(kept));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK_OK(heap->page_out(paging));
  REQUIRE_FALSE(f.memory->find(kept)->spilled);  // iterations may use the rest of its granule
  CHECK(heap->kept_away_bytes() == 0);
  Gate gate;
  CHECK_OK(side.launch_host(Gate::block, &gate));
  CHECK_OK(f.memory->record_use(kept, side));
  std::atomic<bool> closed{false}, rescued{false}, done{false};
  base::Status close_status;
  std::thread closes([&] {
    close_status = f.memory->close_lane(lane);
    closed = true;
  });
  // Opens the gate if the others wait for the copy, which waits for the gate.
  std::thread rescue([&] {
    for (int i = 0; i < 3'000 && !done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    rescued = !done;
    gate.open();
  });
  while (lane->impl().is_open()) std::this_thread::yield();
  PersistentHeap* other = f.heap(2, 8 * kMiB);
  CHECK_FALSE(f.memory->report(1).empty());  // as for each allocation that fails
  CHECK_OK(f.memory->close_heap(other));
  CHECK_FALSE(closed);
  done = true;
  rescue.join();
  CHECK_FALSE(rescued);
  closes.join();
  CHECK_OK(close_status);
  CHECK(f.memory->find(kept)->spilled);
  CHECK(heap->kept_away_bytes() == kMiB);
  CHECK_OK(heap->page_in(paging));
  CHECK(heap->kept_away_bytes() == 0);
  CHECK(all_are(reinterpret_cast<const uint8_t*>(kept), kMiB, 7));
  CHECK_OK(side.synchronize());
  CHECK_OK(f.memory->close_heap(heap));
}

TEST_CASE("a granule in which an open iteration may place blocks does not come home under it") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap *const owner = f.heap(1, 8 * kMiB), *const other = f.heap(2, 4 * kMiB);
  owner->set_stream(&stream);
  other->set_stream(&stream);
  Lane* const lane = f.lane(0, 8 * kMiB, stream);
  CHECK_OK(lane->begin_iteration(*owner, false));
  const Address kept = must(lane->alloc(kMiB, 0)), freed = must(lane->alloc(kMiB, 0));
  REQUIRE(freed == kept + kMiB);  // the two fill a granule
  CHECK_OK(lane->keep(kept));
  CHECK_OK(lane->keep(freed));
  CHECK_OK(stream.fill(kept, 0x11, kMiB));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK_OK(owner->page_out(stream));
  REQUIRE(owner->paged_out());
  REQUIRE(f.memory->find(kept)->spilled);
  CHECK_OK(lane->begin_iteration(*other, false));
  CHECK_OK(f.memory->free(freed));
  CHECK_OK(owner->page_in(stream));
  CHECK(owner->is_resident());
  // It has not moved, so whoever places a block there meanwhile loses no byte.
  CHECK(f.memory->find(kept)->spilled);
  const Address beside = must(lane->alloc(kMiB, 0));
  CHECK(beside == freed);
  CHECK_OK(stream.fill(beside, 0x22, kMiB));
  CHECK(holds(stream, beside, kMiB, 0x22));
  CHECK_OK(lane->end_iteration(nullptr));
  CHECK(holds(stream, kept, kMiB, 0x11));
  CHECK(f.memory->check() == "");
  // Without an iteration it comes home with its session.
  CHECK_OK(owner->page_out(stream));
  CHECK_OK(owner->page_in(stream));
  CHECK_FALSE(f.memory->find(kept)->spilled);
  CHECK(holds(stream, kept, kMiB, 0x11));
}
