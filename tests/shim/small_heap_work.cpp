// The small heap while the device works: a freed block is given out again only when all work that the device had at the
// free has ended, in every stream and every context that may have used it. On the recording driver's shared device,
// whose clock tells what has ended. Run with the shim preloaded, with GPUSHARE_SMALL_HEAP=1: as it is, with a soft
// limit, and with memory that may be paged.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "through_shim.hpp"

namespace {

constexpr uint64_t kMiB = 1 << 20, kBlock = 32 << 10;

// Before the driver is asked for the first time.
void make_device() {
  static const std::string path = [] {
    std::string name = "/dev/shm/gpushare-test-XXXXXX";
    close(mkstemp(name.data()));
    setenv("RECORDER_DEVICE", name.c_str(), 1);
    return name;
  }();
  static const bool registered = std::atexit([] {
                                   for (const char* bus : {"", ".3b", ".3c"}) unlink((path + bus).c_str());
                                 }) == 0;
  REQUIRE(registered);
}
bool has_soft_limit() {
  return std::getenv("GPUSHARE_SOFT") != nullptr;
}
bool is_virtual() {
  return std::getenv("RECORDER_HOST_NODES") != nullptr;
}

class Program {
 public:
  Program() {
    make_device();
    REQUIRE(cu("cuCtxCreate_v2", &context_, 0U, 0U) == kSuccess);
    void* module = nullptr;
    REQUIRE(cu("cuModuleLoadData", &module, static_cast<const void*>("image")) == kSuccess);
    REQUIRE(cu("cuModuleGetFunction", &kernel_, module, static_cast<const void*>("spin_100us")) == kSuccess);
    for (void*& stream : streams_) REQUIRE(cu("cuStreamCreate", &stream, 1U) == kSuccess);
  }
  ~Program() { CHECK(cu("cuCtxDestroy_v2", context_) == kSuccess); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // A kernel on one of the streams; the event behind it.
  void* work(size_t stream) {
    void* const none = nullptr;
    void* event = nullptr;
    REQUIRE(cu("cuLaunchKernel", kernel_, 1U, 1U, 1U, 1U, 1U, 1U, 0U, streams_[stream], none, none) ==
            kSuccess);
    REQUIRE(cu("cuEventCreate", &event, 0U) == kSuccess);
    REQUIRE(cu("cuEventRecord", event, streams_[stream]) == kSuccess);
    return event;
  }
  void* stream(size_t number) const { return streams_[number]; }

 private:
  void *context_ = nullptr, *kernel_ = nullptr;
  std::array<void*, 4> streams_{};
};

}  // namespace

TEST_CASE("a block that is freed while work uses it comes back when that work has ended") {
  Program program;
  std::mt19937_64 random(1);
  std::map<uint64_t, std::vector<void*>> used_by;  // the events of the work that had the block
  int again = 0, in_flight = 0;
  for (int i = 0; i < 1500; ++i) {
    uint64_t block = 0;
    REQUIRE(cu("cuMemAlloc_v2", &block, kBlock) == kSuccess);
    if (const auto it = used_by.find(block); it != used_by.end()) {
      ++again;
      for (void* event : it->second) CHECK(cu("cuEventQuery", event) == kSuccess);
      for (void* event : it->second) REQUIRE(cu("cuEventDestroy_v2", event) == kSuccess);
      used_by.erase(it);
    }
    // Work in two streams has it.
    std::vector<void*>& events = used_by[block];
    for (int times = 0; times < 2; ++times) events.push_back(program.work(random() % 4));
    in_flight += cu("cuEventQuery", events.back()) != kSuccess ? 1 : 0;
    if (random() % 2 == 0)
      REQUIRE(cu("cuMemFree_v2", block) == kSuccess);
    else
      REQUIRE(cu("cuMemFreeAsync", block, program.stream(random() % 4)) == kSuccess);
  }
  CHECK(again > 500);
  CHECK(in_flight > 500);
}

TEST_CASE("work of another device that reaches the block is waited for too") {
  if (std::getenv("RECORDER_DEVICES") == nullptr) return;
  Program program;
  void *first = nullptr, *second = nullptr, *module = nullptr, *kernel = nullptr, *stream = nullptr;
  void* const none = nullptr;
  REQUIRE(cu("cuCtxGetCurrent", &first) == kSuccess);
  REQUIRE(cu("cuCtxCreate_v2", &second, 0U, 1U) == kSuccess);  // on the second device
  REQUIRE(cu("cuCtxEnablePeerAccess", first, 0U) == kSuccess);
  REQUIRE(cu("cuModuleLoadData", &module, static_cast<const void*>("image")) == kSuccess);
  REQUIRE(cu("cuModuleGetFunction", &kernel, module, static_cast<const void*>("spin_3ms")) == kSuccess);
  REQUIRE(cu("cuStreamCreate", &stream, 1U) == kSuccess);
  std::map<uint64_t, void*> used_by;
  int again = 0;
  for (int i = 0; i < 200; ++i) {
    uint64_t block = 0;
    void* event = nullptr;
    REQUIRE(cu("cuCtxSetCurrent", first) == kSuccess);
    REQUIRE(cu("cuMemAlloc_v2", &block, kBlock) == kSuccess);
    if (const auto it = used_by.find(block); it != used_by.end()) {
      ++again;
      CHECK(cu("cuEventQuery", it->second) == kSuccess);
    }
    REQUIRE(cu("cuCtxSetCurrent", second) == kSuccess);
    REQUIRE(cu("cuLaunchKernel", kernel, 1U, 1U, 1U, 1U, 1U, 1U, 0U, stream, none, none) == kSuccess);
    REQUIRE(cu("cuEventCreate", &event, 0U) == kSuccess);
    REQUIRE(cu("cuEventRecord", event, stream) == kSuccess);
    used_by[block] = event;
    REQUIRE(cu("cuMemFree_v2", block) == kSuccess);
  }
  CHECK(again > 50);
  CHECK(cu("cuCtxDestroy_v2", second) == kSuccess);
  REQUIRE(cu("cuCtxSetCurrent", first) == kSuccess);
}

TEST_CASE("blocks hold what was written while chunks change places") {
  if (!is_virtual()) return;  // the driver has no virtual memory then, and no bytes behind addresses
  Program program;
  std::mt19937_64 random(2);
  uint64_t large = 0, free = 0, total = 0;
  REQUIRE(cu("cuMemGetInfo_v2", &free, &total) == kSuccess);
  // With a soft limit the device's part is taken, so that the first chunks begin on the host; they come home when it is free.
  if (has_soft_limit()) REQUIRE(cu("cuMemAlloc_v2", &large, 62 * kMiB) == kSuccess);
  const auto on_host = control<decltype(&recorder_host_bytes)>("recorder_host_bytes");
  std::map<uint64_t, uint64_t> live;  // what is written there
  const auto add = [&] {
    uint64_t block = 0;
    REQUIRE(cu("cuMemAlloc_v2", &block, 1 + random() % kBlock) == kSuccess);
    REQUIRE(live.count(block) == 0);
    live[block] = random();
    std::memcpy(reinterpret_cast<void*>(block), &live[block], sizeof(uint64_t));
  };
  const auto look = [&] {
    int wrong = 0;
    for (const auto& [block, value] : live)
      wrong += std::memcmp(reinterpret_cast<void*>(block), &value, sizeof value) != 0 ? 1 : 0;
    return wrong;
  };
  for (int i = 0; i < 600; ++i) add();
  CHECK((on_host() != 0) == has_soft_limit());
  for (int i = 0; i < 2000; ++i) {
    program.work(random() % 4);
    add();
    auto it = live.lower_bound(random() % (live.rbegin()->first - live.begin()->first) + live.begin()->first);
    REQUIRE(cu("cuMemFree_v2", it->first) == kSuccess);
    live.erase(it);
  }
  CHECK(look() == 0);
  if (large != 0) REQUIRE(cu("cuMemFree_v2", large) == kSuccess);
  CHECK(on_host() == 0);
  CHECK(look() == 0);
  for (const auto& each : live) REQUIRE(cu("cuMemFree_v2", each.first) == kSuccess);
  uint64_t after = 0;
  REQUIRE(cu("cuMemGetInfo_v2", &after, &total) == kSuccess);
  CHECK(after + 4 * kMiB >= free);  // but for a chunk that the heap keeps
}
