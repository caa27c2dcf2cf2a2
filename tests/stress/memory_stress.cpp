// Many threads on one DeviceMemory, for ThreadSanitizer: sessions that open, allocate, run iterations with
// helper threads and close, beside threads that free by address, trim, report and snapshot. The assertions
// hold in every order: no call fails in a way that it may not, blocks of one owner never overlap, and at the
// end everything is back.
//
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.hpp"
#include "memory/device_memory.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "support/sizes.hpp"

using namespace gpushare;
using memory::Address;
using memory::DeviceMemory;
using memory::Kind;
using memory::Layout;
using test::kMiB;
using test::Random;

namespace {

constexpr int kRounds = test::kSanitized ? 60 : 600;

// Catch's macros are not thread-safe: threads count what they saw go wrong and keep the first.
class Failures {
 public:
  void check(bool ok, const std::string& what) {
    if (ok) return;
    base::MutexLock lock(mutex_);
    if (first_.empty()) first_ = what;
    ++count_;
  }
  void check(const base::Status& status, const char* what, int32_t allowed = GPUSHARE_OK) {
    check(status.ok() || status.code() == allowed, std::string(what).append(": ").append(status.to_string()));
  }
  std::string first() {
    base::MutexLock lock(mutex_);
    return first_;
  }

 private:
  base::Mutex mutex_;
  std::string first_ GPUSHARE_GUARDED_BY(mutex_);
  int count_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

struct World {
  std::unique_ptr<device::Device> device;
  std::unique_ptr<DeviceMemory> memory;
  Failures failures;
  std::atomic<bool> done{false};
};

// Blocks handed from the thread that allocates to one that frees.
struct Exchange {
  base::Mutex mutex;
  std::vector<Address> blocks GPUSHARE_GUARDED_BY(mutex);
  std::atomic<int> in_flight{0};
  void put(Address address) {
    ++in_flight;
    base::MutexLock lock(mutex);
    blocks.push_back(address);
  }
  bool take(Address* out) {
    base::MutexLock lock(mutex);
    if (blocks.empty()) return false;
    *out = blocks.back();
    blocks.pop_back();
    return true;
  }
};

// One lane and the sessions that take turns in it.
void drive_lane(World& world, uint32_t id, Exchange& exchange) {
  Random random(test::seed() + id);
  auto stream = world.device->create_stream();
  auto side = world.device->create_stream();
  if (!stream.ok() || !side.ok()) {
    world.failures.check(false, "no stream");
    return;
  }
  DeviceMemory& memory = *world.memory;
  for (int round = 0; round < kRounds; ++round) {
    auto lane = memory.open_lane(id, 8 * kMiB, *stream);
    auto heap = memory.open_heap(uint64_t{id} * 1000000 + static_cast<uint64_t>(round), "stress", 6 * kMiB);
    world.failures.check(lane.status(), "open_lane", GPUSHARE_DEVICE_OUT_OF_MEMORY);
    world.failures.check(heap.status(), "open_heap", GPUSHARE_DEVICE_OUT_OF_MEMORY);
    if (lane.ok() && heap.ok()) {
      (*heap)->set_stream(&*stream);
      for (int k = 0; k < 3; ++k) {
        auto block = (*heap)->alloc(Kind::kModel, test::uniform(random, 1, kMiB), 0);
        world.failures.check(block.status(), "alloc", GPUSHARE_DEVICE_OUT_OF_MEMORY);
        if (block.ok() && k == 0) world.failures.check(memory.record_use(*block, *side), "record_use");
        if (block.ok() && k < 2) exchange.put(*block);
      }
      Address kept = 0;  // large enough to be lent for
      for (int i = 0; i < 3; ++i) {
        world.failures.check((*lane)->begin_iteration(**heap, true), "begin_iteration");
        if (i == 0) {
          auto block = (*lane)->alloc(2 * kMiB, 0);
          world.failures.check(block.status(), "lane alloc", GPUSHARE_DEVICE_OUT_OF_MEMORY);
          if (block.ok() && (*lane)->keep(*block).ok()) kept = *block;
        }
        if (i == 2 && kept != 0) world.failures.check(memory.free(kept), "free of a kept block");
        const auto helper = [&](uint64_t seed) {
          Random own(seed);
          for (int k = 0; k < 20; ++k) {
            auto block = (*lane)->alloc(test::uniform(own, 1, 256 * 1024), 0);
            world.failures.check(block.status(), "lane alloc", GPUSHARE_DEVICE_OUT_OF_MEMORY);
            if (!block.ok()) continue;
            const auto info = memory.find(*block);
            world.failures.check(info.status(), "find");
            if (k % 7 == 0)
              world.failures.check((*lane)->keep(*block), "keep", GPUSHARE_DEVICE_OUT_OF_MEMORY);
            if (k % 5 == 0) world.failures.check(memory.record_use(*block, *side), "record_use");
            if (k % 2 == 0) world.failures.check(memory.free(*block), "free");
          }
        };
        std::thread second([&, seed = random()] {
          helper(seed);
          world.failures.check((*heap)->resize(6 * kMiB), "resize", GPUSHARE_DEVICE_OUT_OF_MEMORY);
        });
        helper(random());
        second.join();
        world.failures.check((*lane)->end_iteration(nullptr), "end_iteration");
        world.failures.check((*lane)->set_size(test::uniform(random, 6, 10) * kMiB), "set_size",
                             GPUSHARE_DEVICE_OUT_OF_MEMORY);
      }
      if (memory.can_page()) {
        const auto out = (*heap)->page_out(*stream);
        world.failures.check(out, "page_out");
        if (out.ok())
          world.failures.check((*heap)->page_in(*stream), "page_in", GPUSHARE_DEVICE_OUT_OF_MEMORY);
      }
    }
    if (lane.ok()) world.failures.check(memory.close_lane(*lane), "close_lane");
    // An address must not be freed once its session is gone: it may be another's by then.
    while (exchange.in_flight.load() > 0) std::this_thread::yield();
    if (heap.ok()) world.failures.check(memory.close_heap(*heap), "close_heap");
  }
  world.failures.check(stream->synchronize(), "synchronize");
  world.failures.check(side->synchronize(), "synchronize");
}

void run(Layout layout, const char* spec) {
  World world;
  auto device = device::Device::open(spec);
  REQUIRE(device.ok());
  world.device = std::move(*device);
  memory::DeviceMemoryOptions options;
  options.capacity_bytes = 64 * kMiB;
  options.layout = layout;
  options.record_allocations = true;
  options.max_recorded_events = 1000;
  auto memory = DeviceMemory::open(*world.device, options);
  REQUIRE(memory.ok());
  world.memory = std::move(*memory);
  Exchange exchanges[3];
  std::vector<std::thread> threads;
  for (uint32_t id = 0; id < 3; ++id)
    threads.emplace_back(drive_lane, std::ref(world), id, std::ref(exchanges[id]));
  std::thread freer([&] {
    Address address = 0;
    while (!world.done.load()) {
      for (Exchange& exchange : exchanges)
        if (exchange.take(&address)) {
          world.failures.check(world.memory->free(address), "free");
          --exchange.in_flight;
        }
      std::this_thread::yield();
    }
  });
  std::thread observer([&] {
    while (!world.done.load()) {
      world.failures.check(!world.memory->report().empty(), "report");
      const auto snapshot = world.memory->snapshot();
      for (const auto& segment : snapshot.segments) {
        Address end = segment.address;
        for (const auto& block : segment.blocks) {
          world.failures.check(block.address >= end || segment.name.rfind("lane", 0) == 0, "blocks overlap");
          end = block.address + block.bytes;
        }
      }
      world.memory->stats();
      world.memory->trim();
      world.memory->compact();
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  world.done = true;
  freer.join();
  observer.join();
  CHECK(world.failures.first() == "");
  CHECK(world.memory->check() == "");
  CHECK(world.memory->stats().persistent_bytes == 0);
  CHECK(world.memory->stats().ephemeral_bytes == 0);
  world.memory.reset();
  CHECK(world.device->close().ok());
}

}  // namespace

TEST_CASE("contiguous layout under many threads") {
  run(Layout::kContiguous, "host?total_bytes=128MiB");
}
TEST_CASE("virtual layout under many threads") {
  run(Layout::kVirtual, "host?total_bytes=128MiB");
}
TEST_CASE("contiguous layout under many threads, cuda on the stand-in for its driver") {
  run(Layout::kContiguous, "cuda?total_bytes=128MiB&driver=" GPUSHARE_CUDA_STANDIN);
}
TEST_CASE("virtual layout under many threads, cuda on the stand-in for its driver") {
  run(Layout::kVirtual, "cuda?total_bytes=128MiB&driver=" GPUSHARE_CUDA_STANDIN);
}
