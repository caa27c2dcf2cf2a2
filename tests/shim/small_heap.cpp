// Small plain allocations from chunks of the shim's: GPUSHARE_MEMORY=1G, GPUSHARE_SMALL_HEAP=1. Blocks are apart from
// each other, the program is told of them as of the driver's, a freed one rests until the device has finished what it
// had, and nothing of it is kept where memory would be refused. Run with the shim preloaded over the recording driver.
// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "through_shim.hpp"

namespace {

constexpr uint64_t kMiB = 1 << 20, kLimit = 1024 * kMiB, kChunk = 2 * kMiB;
constexpr Result kNotFound = 500, kNotSupported = 801, kIllegal = 719;

uint64_t on_device() {
  return control<decltype(&recorder_used_bytes)>("recorder_used_bytes")();
}
uint64_t free_bytes() {
  uint64_t free = 0, total = 0;
  REQUIRE(cu("cuMemGetInfo_v2", &free, &total) == kSuccess);
  return free;
}
uint64_t get(uint64_t bytes) {
  uint64_t address = 0;
  REQUIRE(cu("cuMemAlloc_v2", &address, bytes) == kSuccess);
  return address;
}
Result give_back(uint64_t address) {
  return cu("cuMemFree_v2", address);
}
// Each test has a context of its own, and finds all memory free.
class Context {
 public:
  Context() {
    REQUIRE(free_bytes() == kLimit);
    REQUIRE(cu("cuCtxCreate_v2", &context_, 0U, 0U) == kSuccess);
  }
  ~Context() {
    CHECK(cu("cuCtxDestroy_v2", context_) == kSuccess);
    CHECK(free_bytes() == kLimit);
    CHECK(on_device() == 0);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 private:
  void* context_ = nullptr;
};

}  // namespace

TEST_CASE("small blocks lie apart in few chunks, and the program is told of each as of the driver's own") {
  const Context context;
  std::mt19937_64 random(1);
  std::map<uint64_t, uint64_t> live;
  uint64_t bytes = 0;
  for (int i = 0; i < 4000; ++i) {
    const uint64_t size = 1 + random() % (i % 2 == 0 ? 4096 : 32768);
    const uint64_t address = get(size);
    CHECK(address % 512 == 0);
    live[address] = size;
    bytes += size;
  }
  REQUIRE(live.size() == 4000);
  uint64_t end = 0;
  for (const auto& [address, size] : live) {
    CHECK(address >= end);
    end = address + size;
    uint64_t base = 0, told = 0;
    CHECK(cu("cuMemGetAddressRange_v2", &base, &told, address + size / 2) == kSuccess);
    CHECK(base == address);
    CHECK(told == size);
  }
  // Above 4 KiB at most a third of a block is unused, and below at most 511 bytes.
  CHECK(on_device() % kChunk == 0);
  CHECK(on_device() < bytes * 3 / 2 + 4 * kChunk);
  CHECK(free_bytes() == kLimit - on_device());

  const auto [address, size] = *std::next(live.begin(), 7);
  uint64_t begin = 0, length = 0;
  uint32_t type = 0;
  CHECK(cu("cuPointerGetAttribute", &begin, 11U, address + size - 1) == kSuccess);
  CHECK(begin == address);
  CHECK(cu("cuPointerGetAttribute", &begin, 4U, address) == kInvalidValue);  // no host pointer
  uint32_t attributes[] = {2, 12, 11};
  void* values[] = {&type, &length, &begin};
  CHECK(cu("cuPointerGetAttributes", 3U, &attributes[0], &values[0], address + 1) == kSuccess);
  CHECK(type == 2);
  CHECK(length == size);
  CHECK(begin == address);
  char handle[64];
  CHECK(cu("cuIpcGetMemHandle", &handle[0], address) == kNotSupported);

  // An address in no block of the program is refused, as by the driver.
  CHECK(give_back(address + 512) == kInvalidValue);
  CHECK(give_back(address) == kSuccess);
  CHECK(give_back(address) == kInvalidValue);
  CHECK(cu("cuMemGetAddressRange_v2", &begin, &length, address) == kNotFound);
  CHECK(cu("cuPointerGetAttribute", &type, 2U, address) == kInvalidValue);
  CHECK(cu("cuPointerGetAttributes", 3U, &attributes[0], &values[0], address) == kSuccess);
  CHECK(type == 0);
  live.erase(address);
  for (const auto& block : live) CHECK(give_back(block.first) == kSuccess);
}

TEST_CASE("larger allocations, and those of no bytes, are the driver's") {
  const Context context;
  const uint64_t large = get(32769);
  CHECK(on_device() == 32769);
  CHECK(give_back(large) == kSuccess);
  CHECK(on_device() == 0);
  const auto last = control<decltype(&recorder_last)>("recorder_last");
  uint64_t address = 0;
  arm("cuMemAlloc_v2", kInvalidValue);
  CHECK(cu("cuMemAlloc_v2", &address, uint64_t{0}) == kInvalidValue);
  CHECK(last()->entry == find_entry("cuMemAlloc_v2"));
  arm(nullptr, 0);
}

TEST_CASE("a freed block is used again only after the context was synchronised") {
  const Context context;
  std::set<uint64_t> freed;
  std::vector<uint64_t> kept;
  // While the wait fails nothing that was freed comes back, and the free that waited says so.
  arm("cuCtxSynchronize", kIllegal);
  int failed = 0;
  for (int i = 0; i < 2000; ++i) {
    const uint64_t address = get(4096);
    CHECK(freed.count(address) == 0);
    const Result result = give_back(address);
    failed += result == kIllegal ? 1 : 0;
    CHECK((result == kSuccess || result == kIllegal));
    freed.insert(address);
  }
  CHECK(failed > 0);
  const uint64_t grown = on_device();
  CHECK(grown >= 2000 * 4096);
  // Afterwards the same memory is enough.
  arm(nullptr, 0);
  int again = 0;
  for (int i = 0; i < 20000; ++i) {
    const uint64_t address = get(4096);
    again += freed.count(address) != 0 ? 1 : 0;
    CHECK(give_back(address) == kSuccess);
  }
  CHECK(again > 0);
  CHECK(on_device() <= grown);
}

TEST_CASE("memory is refused only after the heap has given back what it keeps") {
  const Context context;
  std::vector<uint64_t> blocks;
  for (uint64_t held = 0; held < 900 * kMiB; held += 32768) blocks.push_back(get(32768));
  for (const uint64_t block : blocks) CHECK(give_back(block) == kSuccess);
  const uint64_t large = get(1000 * kMiB);
  // A small block that finds no room for a chunk is the driver's.
  const uint64_t rest = get(23 * kMiB);
  const uint64_t small = get(5000);
  CHECK(on_device() == 1023 * kMiB + 5000);
  CHECK(give_back(small) == kSuccess);
  const uint64_t last = get(kMiB);
  uint64_t address = 0;
  CHECK(cu("cuMemAlloc_v2", &address, uint64_t{1}) == kOutOfMemory);
  CHECK(address == 0);
  for (const uint64_t block : {large, rest, last}) CHECK(give_back(block) == kSuccess);
}

TEST_CASE("while a stream is captured nothing is waited for, and freed blocks rest") {
  const Context context;
  void* stream = nullptr;
  REQUIRE(cu("cuStreamBeginCapture_v2", stream, 0U) == kSuccess);
  arm("cuCtxSynchronize", kIllegal);
  std::set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) {
    const uint64_t address = get(4096);
    CHECK(seen.insert(address).second);
    CHECK(give_back(address) == kSuccess);
  }
  arm(nullptr, 0);
  void* graph = nullptr;
  REQUIRE(cu("cuStreamEndCapture", stream, &graph) == kSuccess);
}

TEST_CASE("blocks that are freed on a stream") {
  const Context context;
  void* stream = nullptr;
  const uint64_t address = get(100);
  CHECK(cu("cuMemFreeAsync", address, stream) == kSuccess);
  CHECK(give_back(address) == kInvalidValue);
  const uint64_t pooled = [] {
    uint64_t made = 0;
    REQUIRE(cu("cuMemAllocAsync", &made, uint64_t{100}, static_cast<void*>(nullptr)) == kSuccess);
    return made;
  }();
  CHECK(cu("cuMemFreeAsync", pooled, stream) == kSuccess);
}

TEST_CASE("what a program has not freed goes with its context") {
  const Context context;
  for (int i = 0; i < 3000; ++i) get(2000);
  CHECK(on_device() >= 3000 * 2048);
}

TEST_CASE("a child of fork has no blocks of its parent's") {
  const Context context;
  const uint64_t first = get(100), second = get(100);
  const pid_t child = fork();
  if (child == 0) {
    if (free_bytes() != kLimit) _exit(1);
    if (give_back(second) == kSuccess) _exit(2);
    const uint64_t mine = get(100);
    if (free_bytes() != kLimit - kChunk) _exit(3);
    _exit(give_back(mine) == kSuccess && give_back(mine) == kInvalidValue ? 0 : 4);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(give_back(first) == kSuccess);
  CHECK(give_back(second) == kSuccess);
}

TEST_CASE("threads: no block is two threads' at once") {
  constexpr int kThreads = 4, kRounds = 20000;
  std::vector<std::thread> threads;
  std::vector<uint64_t> wrong(kThreads, 0);
  static std::atomic<uint8_t> owners[1 << 20];
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([t, &wrong] {
      std::mt19937_64 random(static_cast<uint64_t>(t));
      std::vector<uint64_t> live;
      for (int i = 0; i < kRounds; ++i) {
        if (live.size() < 200 && random() % 2 == 0) {
          uint64_t address = 0;
          if (cu("cuMemAlloc_v2", &address, 1 + random() % 8000) != kSuccess) continue;
          auto& owner = owners[address / 512 % (1 << 20)];
          wrong[static_cast<size_t>(t)] += owner.exchange(static_cast<uint8_t>(t + 1)) != 0 ? 1U : 0U;
          live.push_back(address);
        } else if (!live.empty()) {
          const size_t at = random() % live.size();
          auto& owner = owners[live[at] / 512 % (1 << 20)];
          wrong[static_cast<size_t>(t)] += owner.exchange(0) != t + 1 ? 1U : 0U;
          if (give_back(live[at]) != kSuccess) ++wrong[static_cast<size_t>(t)];
          live[at] = live.back();
          live.pop_back();
        }
      }
      for (const uint64_t address : live) {
        owners[address / 512 % (1 << 20)] = 0;
        give_back(address);
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const uint64_t count : wrong) CHECK(count == 0);
}
