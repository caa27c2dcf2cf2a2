// Spilled blocks that move between host and device memory at their own addresses.
//
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <map>
#include <thread>
#include <vector>

#include "device/registry.hpp"
#include "support/bytes.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "unit/memory/device_memory_fixture.hpp"

using namespace gpushare;        // NOLINT
using namespace gpushare::test;  // NOLINT

namespace {

constexpr uint64_t kUnlimited = UINT64_MAX;

// A session whose blocks each hold a byte value of their own.
struct Spiller {
  Spiller(Fixture& the_fixture, memory::SessionId id, const device::Stream& the_stream,
          uint64_t promised_bytes = 0)
      : fixture(the_fixture), heap(the_fixture.heap(id, promised_bytes)), stream(the_stream) {
    heap->set_stream(&stream);
  }
  base::Status add(uint64_t bytes) { return hold(heap->alloc_spilled(Kind::kModel, bytes, 0), bytes); }
  // Within the promise.
  base::Status place(uint64_t bytes) { return hold(heap->alloc(Kind::kModel, bytes, 0), bytes); }
  base::Status hold(const base::Result<Address>& address, uint64_t bytes) {
    if (!address.ok()) return address.status();
    const auto value = static_cast<uint8_t>(1 + next++ % 250);
    CHECK_OK(stream.fill(*address, value, bytes));
    blocks[*address] = {bytes, value};
    return {};
  }
  void drop(size_t index) {
    auto block = blocks.begin();
    std::advance(block, static_cast<ptrdiff_t>(index % blocks.size()));
    CHECK_OK(fixture.memory->free(block->first));
    blocks.erase(block);
  }
  uint64_t move(bool home, uint64_t bytes = kUnlimited, uint64_t budget_ns = kUnlimited) {
    uint64_t moved = 0;
    last = heap->move_spilled(home, bytes, budget_ns, stream, &moved);
    return moved;
  }
  // Every byte is what was written last.
  void check() const {
    CHECK_OK(stream.synchronize());
    for (const auto& [address, block] : blocks) CHECK(holds(stream, address, block.bytes, block.value));
  }

  struct Block {
    uint64_t bytes;
    uint8_t value;
  };
  Fixture& fixture;
  PersistentHeap* heap;
  const device::Stream& stream;
  std::map<Address, Block> blocks;
  base::Status last;
  unsigned next = 0;
};

void set_fault(Fixture& f, uint32_t kind, uint64_t at_call) {
  gpushare_backend_fault fault{};
  fault.struct_size = sizeof fault;
  fault.kind = kind;
  fault.at_call = at_call;
  CHECK(f.device->ops().fault_set(f.device->get(), &fault) == GPUSHARE_OK);
}

// The host device, whose driver refuses to map memory at the calls from first_refused on, of so many. It counts the pieces of host
// memory that it makes.
struct LosingDriver {
  static inline int32_t (*map)(gpushare_backend_device*, gpushare_device_address, uint64_t,
                               gpushare_backend_memory*, uint64_t) = nullptr;
  static inline uint64_t calls = 0, first_refused = 0, refused = 0;
  static int32_t refuse(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes,
                        gpushare_backend_memory* memory, uint64_t offset) {
    ++calls;
    if (calls >= first_refused && calls < first_refused + refused) return GPUSHARE_DEVICE_OUT_OF_MEMORY;
    return map(device, address, bytes, memory, offset);
  }
  static inline int32_t (*map_run)(gpushare_backend_device*, gpushare_device_address, uint64_t,
                                   gpushare_backend_memory* const*, uint64_t) = nullptr;
  static int32_t refuse_run(gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes,
                            gpushare_backend_memory* const* memories, uint64_t count) {
    ++calls;
    if (calls >= first_refused && calls < first_refused + refused) return GPUSHARE_DEVICE_OUT_OF_MEMORY;
    return map_run(device, address, bytes, memories, count);
  }
  static inline int32_t (*create_host)(gpushare_backend_device*, uint64_t,
                                       gpushare_backend_memory**) = nullptr;
  static inline uint64_t created_on_host = 0;
  static int32_t count_created(gpushare_backend_device* device, uint64_t bytes,
                               gpushare_backend_memory** out_memory) {
    ++created_on_host;
    return create_host(device, bytes, out_memory);
  }
  static std::string spec(const char* size = "total_bytes=256MiB") {
    if (map == nullptr) {
      auto host = device::Device::open(test::host());
      REQUIRE(host.ok());
      static gpushare_backend_ops ops;
      ops = (*host)->ops();
      CHECK_OK((*host)->close());
      map = ops.va_map;
      map_run = ops.va_map_run;
      create_host = ops.phys_create_host;
      ops.name = "losing";
      ops.va_map = refuse;
      ops.va_map_run = refuse_run;
      ops.phys_create_host = count_created;
      CHECK_OK(device::register_backend(&ops));
    }
    refused = 0;
    return std::string("losing?") + size;
  }
  static void arm(uint64_t from, uint64_t count) {
    calls = 0;
    first_refused = from;
    refused = count;
  }
};

}  // namespace

TEST_CASE(
    "a granule of a heap that the driver loses on its way home or out is told of, counts for nothing, and "
    "moves no more") {
  const bool home = GENERATE(true, false);
  Fixture f(LosingDriver::spec(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  Spiller s(f, 1, stream, 8 * kMiB);
  for (int i = 0; i < 4; ++i) CHECK_OK(s.place(2 * kMiB));
  if (home) CHECK(s.move(false) == 8 * kMiB);
  const uint64_t before = home ? 0 : 8 * kMiB;
  CHECK(s.heap->stats().promised_bytes == before);
  // For one granule: the window, then the new memory at its addresses, then the old one again.
  LosingDriver::arm(2, 2);
  CHECK(s.move(home, 2 * kMiB) == 0);
  CHECK(s.last.code() == GPUSHARE_INTERNAL);
  CHECK(f.memory->check() == "");
  CHECK(s.heap->stats().promised_bytes == (home ? 0 : 6 * kMiB));
  LosingDriver::arm(0, 0);
  CHECK(s.move(true) == (home ? 6 * kMiB : 0));  // the others can
  CHECK_OK(s.last);
  CHECK(s.heap->stats().promised_bytes == 6 * kMiB);
  CHECK(f.memory->check() == "");
  CHECK_OK(stream.synchronize());
  CHECK_OK(f.memory->close_heap(s.heap));
  CHECK(f.memory->stats().free_bytes == 64 * kMiB);
}

TEST_CASE("the first granule of a large heap, which is made of small ones, moves and is lost as a whole") {
  const bool home = GENERATE(true, false);
  constexpr uint64_t kCapacity = uint64_t{32} << 30;
  Fixture f(LosingDriver::spec("total_gib=32"), Layout::kVirtual, kCapacity);
  const uint64_t granule = f.memory->granularity_bytes();
  REQUIRE(granule == 8 * kMiB);
  auto stream = f.stream();
  Spiller s(f, 1, stream, granule);
  for (int i = 0; i < 4; ++i) CHECK_OK(s.place(2 * kMiB));
  if (home) CHECK(s.move(false) == granule);
  for (const uint64_t refused : {1, 2}) {  // the window; the new memory, after which the old one comes back
    LosingDriver::arm(refused, 1);
    CHECK(s.move(home) == 0);
    CHECK_FALSE(s.last.ok());
    CHECK(f.memory->check() == "");
    LosingDriver::arm(0, 0);
    s.check();
  }
  LosingDriver::arm(2, 2);
  CHECK(s.move(home) == 0);
  CHECK(s.last.code() == GPUSHARE_INTERNAL);
  CHECK(f.memory->check() == "");
  CHECK(s.heap->stats().promised_bytes == 0);
  LosingDriver::arm(0, 0);
  CHECK(s.move(true) == 0);
  CHECK_OK(stream.synchronize());
  CHECK_OK(f.memory->close_heap(s.heap));
  CHECK(f.memory->stats().free_bytes == kCapacity);
}

TEST_CASE("host memory of a granule that came home serves the next that goes out, a heap's first one too") {
  constexpr uint64_t kCapacity = uint64_t{32} << 30;
  Fixture f(LosingDriver::spec("total_gib=32"), Layout::kVirtual, kCapacity);
  const uint64_t granule = f.memory->granularity_bytes();
  auto stream = f.stream();
  Spiller s(f, 1, stream, 2 * granule);
  for (uint64_t placed = 0; placed < 2 * granule; placed += 2 * kMiB) CHECK_OK(s.place(2 * kMiB));
  CHECK(s.move(false) == 2 * granule);
  CHECK(s.move(true) == 2 * granule);
  const uint64_t created = LosingDriver::created_on_host;
  CHECK(s.move(false) == 2 * granule);
  CHECK(s.move(true) == 2 * granule);
  CHECK(LosingDriver::created_on_host == created);
  CHECK(f.memory->check() == "");
  s.check();
}

TEST_CASE("spilled blocks come home under their addresses and go out again") {
  Fixture f(GENERATE(host(), sim()), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  Spiller s(f, 1, stream);
  CHECK_OK(s.add(5 * kMiB));
  for (int i = 0; i < 20; ++i) CHECK_OK(s.add(100'000));
  const Address first = s.blocks.begin()->first;
  CHECK(f.memory->find(first)->spilled);
  CHECK(s.heap->stats().spilled_bytes >= 6 * kMiB);
  CHECK(f.memory->stats().free_bytes == 64 * kMiB);
  // Two granules first: a part of a block may be home.
  CHECK(s.move(true, 4 * kMiB) == 4 * kMiB);
  CHECK(f.memory->check() == "");
  CHECK(s.move(true) > 0);
  CHECK_OK(s.last);
  CHECK(s.heap->away_bytes() == 0);
  CHECK_FALSE(f.memory->find(first)->spilled);
  CHECK(s.heap->stats().home_bytes == 8 * kMiB);
  CHECK(f.memory->stats().free_bytes == 56 * kMiB);
  s.check();
  // The device's memory serves others once they are out.
  CHECK(s.move(false, 2 * kMiB) == 2 * kMiB);
  CHECK(s.move(false) == 6 * kMiB);
  CHECK(f.memory->stats().free_bytes == 64 * kMiB);
  PersistentHeap* other = f.heap(2, 64 * kMiB);
  const Address all = must(other->alloc(Kind::kModel, 64 * kMiB, 0));
  CHECK_OK(stream.fill(all, 0xEE, 64 * kMiB));
  CHECK(s.move(true) == 0);
  CHECK(s.last.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  s.check();
}

TEST_CASE("what was used last comes home first, and device memory of freed blocks goes back") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream(), other = f.stream();
  Spiller s(f, 1, stream);
  std::vector<Address> granules;
  for (int i = 0; i < 4; ++i)
    granules.push_back(must(s.heap->alloc_spilled(Kind::kModel, 2 * kMiB, 2 * kMiB)));
  CHECK_OK(f.memory->record_use(granules[1], other));
  CHECK(s.move(true, 2 * kMiB) == 2 * kMiB);
  for (size_t i = 0; i < 4; ++i) CHECK(f.memory->find(granules[i])->spilled == (i != 1));
  CHECK(s.move(true, 2 * kMiB) == 2 * kMiB);
  CHECK_FALSE(f.memory->find(granules[3])->spilled);
  // The one used longest ago goes out first.
  CHECK(s.move(false, 2 * kMiB) == 2 * kMiB);
  CHECK(f.memory->find(granules[3])->spilled);
  CHECK_OK(f.memory->free(granules[1]));
  CHECK_OK(stream.synchronize());
  CHECK_OK(other.synchronize());
  CHECK(s.heap->release_home() == 0);
  CHECK(f.memory->stats().free_bytes == 64 * kMiB);
}

TEST_CASE("host memory for spilled blocks has a limit") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB, false, 8 * kMiB);
  auto stream = f.stream();
  auto* heap = *f.memory->open_heap(1, "s", 0);
  heap->set_stream(&stream);
  must(heap->alloc_spilled(Kind::kModel, 6 * kMiB, 0));
  CHECK(heap->alloc_spilled(Kind::kModel, 4 * kMiB, 0).status().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
  uint64_t moved = 0;
  CHECK_OK(heap->move_spilled(true, 4 * kMiB, kUnlimited, stream, &moved));
  CHECK(moved == 4 * kMiB);
  must(heap->alloc_spilled(Kind::kModel, 4 * kMiB, 0));
  // Only as much as the limit leaves goes out; what does not stays where it is.
  CHECK(heap->move_spilled(false, kUnlimited, kUnlimited, stream, &moved).code() ==
        GPUSHARE_HOST_OUT_OF_MEMORY);
  CHECK(moved == 2 * kMiB);
  CHECK(f.memory->check() == "");
  CHECK_OK(f.memory->close_heap(heap));
  CHECK(f.memory->check() == "");
}

TEST_CASE("on the contiguous layout spilled blocks stay where they are") {
  Fixture f(host(), Layout::kContiguous, 64 * kMiB);
  auto stream = f.stream();
  PersistentHeap* heap = f.heap(1, 2 * kMiB);
  must(heap->alloc_spilled(Kind::kModel, kMiB, 0));
  uint64_t moved = 1;
  CHECK(heap->move_spilled(true, kUnlimited, kUnlimited, stream, &moved).code() == GPUSHARE_UNSUPPORTED);
  CHECK(moved == 0);
  CHECK(heap->away_bytes() == 0);
}

TEST_CASE("a move that fails anywhere leaves every byte in its place") {
  Fixture f(GENERATE(host(), sim()), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  Spiller s(f, 1, stream);
  for (int i = 0; i < 12; ++i) CHECK_OK(s.add(kMiB + 5000));
  for (const uint32_t kind :
       {uint32_t{GPUSHARE_FAULT_MAP_FAILS}, uint32_t{GPUSHARE_FAULT_LAUNCH_FAILS},
        uint32_t{GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY}, uint32_t{GPUSHARE_FAULT_HOST_OUT_OF_MEMORY}}) {
    for (uint64_t at = 1; at <= 16; at += kFaultStep) {
      CAPTURE(kind, at);
      // Cached granules would keep the device from being asked.
      (void)f.memory->trim();
      set_fault(f, kind, at);
      (void)s.move(true);
      set_fault(f, GPUSHARE_FAULT_NONE, 1);
      CHECK(f.memory->check() == "");
      CHECK((s.last.ok() || s.last.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY ||
             s.last.code() == GPUSHARE_UNKNOWN));
      (void)s.move(true);
      CHECK_OK(s.last);
      set_fault(f, kind, at);
      (void)s.move(false);
      set_fault(f, GPUSHARE_FAULT_NONE, 1);
      CHECK(f.memory->check() == "");
      CHECK(s.last.code() != GPUSHARE_INTERNAL);
      (void)s.move(false);
      CHECK_OK(s.last);
      CHECK(s.heap->stats().home_bytes == 0);
    }
    s.check();
  }
}

TEST_CASE("a session that closes with blocks home and away leaves nothing") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream(), used = f.stream();
  for (int round = 0; round < 3; ++round) {
    Spiller s(f, 1, stream);
    for (int i = 0; i < 10; ++i) CHECK_OK(s.add(kMiB));
    CHECK_OK(f.memory->record_use(s.blocks.begin()->first, used));
    CHECK(s.move(true, 4 * kMiB) == 4 * kMiB);
    CHECK_OK(f.memory->close_heap(s.heap));
    CHECK(f.memory->stats().free_bytes == 64 * kMiB);
    CHECK(f.memory->check() == "");
    CHECK_OK(stream.synchronize());
    (void)f.memory->trim();
  }
}

TEST_CASE("granules of the heap go out to host memory and come home under their addresses") {
  Fixture f(GENERATE(host(), sim()), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  Spiller s(f, 1, stream, 24 * kMiB);
  for (int i = 0; i < 8; ++i) CHECK_OK(s.place(5 * kMiB / 2));
  CHECK(s.move(false, 16 * kMiB) == 16 * kMiB);
  CHECK_OK(s.last);
  CHECK(f.memory->stats().free_bytes == 56 * kMiB);
  auto stats = s.heap->stats();
  CHECK(stats.promised_bytes == 8 * kMiB);
  CHECK(stats.live_bytes + stats.spilled_bytes == 20 * kMiB);
  CHECK(s.heap->away_bytes() == stats.spilled_bytes);
  CHECK(f.memory->find(s.blocks.begin()->first)->spilled);
  CHECK(f.memory->check() == "");
  s.check();
  // Others have what it gave.
  PersistentHeap* other = f.heap(2, 56 * kMiB);
  CHECK_OK(stream.fill(must(other->alloc(Kind::kModel, 56 * kMiB, 0)), 0xEE, 56 * kMiB));
  CHECK(s.move(true) == 0);
  CHECK(s.last.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  s.check();
  CHECK_OK(f.memory->close_heap(other));
  // While some is away, blocks come and go, the promise changes, and the rest is paged.
  s.drop(0);
  CHECK_OK(s.heap->resize(12 * kMiB));
  while (s.place(kMiB).ok()) {
  }
  CHECK(f.memory->check() == "");
  CHECK_OK(s.heap->page_out(stream));
  CHECK(f.memory->stats().free_bytes == 64 * kMiB);
  CHECK_OK(f.memory->check() == "" ? base::Status() : base::Status(GPUSHARE_INTERNAL, f.memory->check()));
  CHECK_OK(s.heap->page_in(stream));
  s.check();
  CHECK(s.move(true) > 0);
  CHECK_OK(s.last);
  CHECK(s.heap->away_bytes() == 0);
  s.check();
  while (!s.blocks.empty()) s.drop(0);
  CHECK_OK(stream.synchronize());
  CHECK_OK(s.heap->resize(0));
  CHECK(f.memory->stats().free_bytes == 64 * kMiB);
}

TEST_CASE("granules without live blocks go out first, and nothing is copied for them") {
  Fixture f(sim(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream(), other = f.stream();
  Spiller s(f, 1, stream, 16 * kMiB);
  for (int i = 0; i < 8; ++i) CHECK_OK(s.place(2 * kMiB));
  std::vector<Address> at;
  for (const auto& [address, block] : s.blocks) at.push_back(address);
  for (const size_t i : {6u, 4u, 2u}) s.drop(i);
  CHECK_OK(f.memory->record_use(at[0], other));
  CHECK(s.move(false, 6 * kMiB) == 6 * kMiB);
  CHECK(s.heap->away_bytes() == 0);
  // Then the block used longest ago: the second, as the first was used since.
  CHECK(s.move(false, 2 * kMiB) == 2 * kMiB);
  CHECK(f.memory->find(at[1])->spilled);
  CHECK_FALSE(f.memory->find(at[0])->spilled);
  // The block that the last move left behind comes home now.
  CHECK(s.move(true) == 2 * kMiB);
  CHECK(s.heap->stats().promised_bytes == 10 * kMiB);
  s.check();
}

TEST_CASE("a move of the heap that fails anywhere leaves every byte in its place") {
  Fixture f(GENERATE(host(), sim()), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  Spiller s(f, 1, stream, 16 * kMiB);
  for (int i = 0; i < 12; ++i) CHECK_OK(s.place(kMiB + 5120));
  CHECK_OK(s.add(3 * kMiB));
  for (const uint32_t kind :
       {uint32_t{GPUSHARE_FAULT_MAP_FAILS}, uint32_t{GPUSHARE_FAULT_LAUNCH_FAILS},
        uint32_t{GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY}, uint32_t{GPUSHARE_FAULT_HOST_OUT_OF_MEMORY}}) {
    for (uint64_t at = 1; at <= 12; at += kFaultStep) {
      CAPTURE(kind, at);
      for (const bool home : {false, true}) {
        (void)f.memory->trim();
        set_fault(f, kind, at);
        (void)s.move(home);
        set_fault(f, GPUSHARE_FAULT_NONE, 1);
        CHECK(f.memory->check() == "");
        CHECK(s.last.code() != GPUSHARE_INTERNAL);
        (void)s.move(home);
        CHECK_OK(s.last);
      }
      CHECK(s.heap->away_bytes() == 0);
      CHECK(s.heap->stats().promised_bytes == 14 * kMiB);  // an empty granule does not come home
    }
    s.check();
  }
}

TEST_CASE("the limit of host memory holds for a heap's granules, and a session that closes gives them back") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB, false, 8 * kMiB);
  auto stream = f.stream();
  for (int life = 0; life < 3; ++life) {
    auto* heap = *f.memory->open_heap(1, "s", 20 * kMiB);
    heap->set_stream(&stream);
    must(heap->alloc(Kind::kModel, 20 * kMiB, 0));
    uint64_t moved = 0;
    CHECK(heap->move_spilled(false, kUnlimited, kUnlimited, stream, &moved).code() ==
          GPUSHARE_HOST_OUT_OF_MEMORY);
    CHECK(moved == 8 * kMiB);
    CHECK(heap->alloc_spilled(Kind::kModel, kMiB, 0).status().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
    CHECK(f.memory->check() == "");
    CHECK_OK(f.memory->close_heap(heap));
    CHECK(f.memory->stats().free_bytes == 64 * kMiB);
    CHECK(f.memory->check() == "");
  }
}

TEST_CASE("blocks are placed and freed by other threads while granules move") {
  Fixture f(host(), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  Spiller s(f, 1, stream, 32 * kMiB);
  for (int i = 0; i < 6; ++i) CHECK_OK(s.place(3 * kMiB));
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0}, placed{0};
  std::thread other([&] {
    std::vector<Address> mine;
    while (!stop) {
      const auto block = s.heap->alloc(Kind::kModel, 300'000, 0);
      if (block.ok()) mine.push_back(*block);
      placed += block.ok() ? 1 : 0;
      if (mine.empty() || (mine.size() <= 4 && block.ok())) continue;
      if (!f.memory->free(mine.front()).ok()) ++wrong;
      mine.erase(mine.begin());
    }
    for (const Address block : mine)
      if (!f.memory->free(block).ok()) ++wrong;
  });
  while (placed == 0) std::this_thread::yield();
  for (int round = 0; round < 60; ++round) {
    // Nobody writes blocks while they move, so the other thread only places and frees.
    (void)s.move(round % 2 == 1, 20 * kMiB);
    CHECK_OK(s.last);
  }
  stop = true;
  other.join();
  CHECK(wrong == 0);
  CHECK(placed > 0);
  CHECK_OK(stream.synchronize());
  s.check();
  CHECK(f.memory->check() == "");
}

TEST_CASE("random allocations, frees and moves of several sessions keep all bytes") {
  Fixture f(GENERATE(host(), sim()), Layout::kVirtual, 64 * kMiB);
  const uint64_t from = seed();
  CAPTURE(from);
  Random random(from);
  auto stream = f.stream();
  std::vector<Spiller> sessions;
  for (memory::SessionId id = 1; id <= 3; ++id) sessions.emplace_back(f, id, stream, 8 * kMiB);
  for (int step = 0; step < 400; ++step) {
    Spiller& s = sessions[uniform(random, 0, sessions.size() - 1)];
    const uint64_t what = uniform(random, 0, 9);
    if (what < 4 && s.blocks.size() < 12) {
      const uint64_t bytes = uniform(random, 1, 3 * kMiB);
      if (uniform(random, 0, 1) == 0 || !s.place(bytes).ok()) CHECK_OK(s.add(bytes));
    } else if (what < 6 && !s.blocks.empty()) {
      s.drop(uniform(random, 0, 100));
    } else {
      if (uniform(random, 0, 3) == 0)
        set_fault(f, uniform(random, 0, 1) == 0 ? GPUSHARE_FAULT_MAP_FAILS : GPUSHARE_FAULT_LAUNCH_FAILS,
                  uniform(random, 1, 6));
      const uint64_t most = uniform(random, 0, 12) * 2 * kMiB;
      const uint64_t free_before = f.memory->stats().free_bytes;
      const bool home = uniform(random, 0, 2) > 0;
      const uint64_t moved = s.move(home, most, uniform(random, 0, 1) == 0 ? kUnlimited : 1);
      CHECK(moved <= most);
      CHECK(f.memory->stats().free_bytes == (home ? free_before - moved : free_before + moved));
      set_fault(f, GPUSHARE_FAULT_NONE, 1);
      (void)s.heap->release_home();
    }
    if (step % 20 == 0) {
      CHECK(f.memory->check() == "");
      for (const Spiller& one : sessions) one.check();
    }
  }
  for (const Spiller& one : sessions) one.check();
}

TEST_CASE("a heap that gave its first granule back sends the others out and brings them home") {
  Fixture f(GENERATE(host(), sim()), Layout::kVirtual, 64 * kMiB);
  auto stream = f.stream();
  Spiller s(f, 1, stream, 8 * kMiB);
  for (int i = 0; i < 3; ++i) CHECK_OK(s.place(2 * kMiB));
  s.drop(0);
  CHECK_OK(s.heap->give_back_free());
  REQUIRE(s.heap->stats().promised_bytes == 4 * kMiB);
  CHECK(s.move(false) == 4 * kMiB);
  CHECK_OK(s.last);
  CHECK(f.memory->stats().free_bytes == 64 * kMiB);
  CHECK(f.memory->check() == "");
  s.check();
  CHECK(s.move(true) == 4 * kMiB);
  CHECK(s.heap->away_bytes() == 0);
  s.check();
}
