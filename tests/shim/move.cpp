// Memory that changes places under its address: GPUSHARE_MEMORY=3G, GPUSHARE_SOFT=1G, GPUSHARE_PINNED=1536M, over a
// driver that has physical memory of the host. Blocks that did not fit on the device come there when there is room. The
// recording driver's virtual memory is real: bytes are checked.
// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "soft_limit.hpp"

namespace {

// A block whose pages know their places in it.
constexpr uint64_t kStep = 1 << 20;
void write(uint64_t address, uint64_t bytes, uint64_t mark) {
  for (uint64_t at = 0; at < bytes; at += kStep) *reinterpret_cast<uint64_t*>(address + at) = mark + at;
  *reinterpret_cast<char*>(address + bytes - 1) = 7;
}
bool holds(uint64_t address, uint64_t bytes, uint64_t mark) {
  for (uint64_t at = 0; at < bytes; at += kStep)
    if (*reinterpret_cast<uint64_t*>(address + at) != mark + at) return false;
  return *reinterpret_cast<char*>(address + bytes - 1) == 7;
}
uint64_t get_marked(uint64_t mebibytes) {
  const uint64_t address = get(mebibytes);
  write(address, mebibytes * kMiB, address);
  return address;
}
bool is_whole(uint64_t address, uint64_t mebibytes) {
  return holds(address, mebibytes * kMiB, address);
}
// As a program does that has begun to use the device: without a daemon it is alone from then on.
void begin() {
  void* context = nullptr;
  REQUIRE(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
}

}  // namespace

TEST_CASE("what did not fit on the device comes there when there is room") {
  begin();
  const uint64_t all = free_bytes();
  CHECK(all == kDevice + kPinned);
  const uint64_t first = get_marked(600), second = get_marked(600), third = get_marked(300),
                 fourth = get_marked(100);
  CHECK(on_device() == 1000 * kMiB);  // the first, the third and the fourth
  CHECK(on_host() == 600 * kMiB);
  CHECK(free_bytes() == all - 1600 * kMiB);
  CHECK(give_back(third) == kSuccess);  // not enough yet for the second
  CHECK(on_host() == 600 * kMiB);
  CHECK(give_back(first) == kSuccess);
  CHECK(on_host() == 0);
  CHECK(on_device() == 700 * kMiB);
  CHECK(free_bytes() == all - 700 * kMiB);
  CHECK(is_whole(second, 600));
  CHECK(is_whole(fourth, 100));
  CHECK(give_back(second) == kSuccess);
  CHECK(give_back(fourth) == kSuccess);
  CHECK(give_back(fourth) == kInvalidValue);
  CHECK(on_device() == 0);
  CHECK(free_bytes() == all);
}

TEST_CASE("what a program asks about such a block") {
  const uint64_t filler = get_marked(1000), spilled = get_marked(100);
  for (const uint64_t block : {filler, spilled}) {
    uint32_t type = 0;
    uint64_t host = 7, base = 0, bytes = 0;
    void* handle = nullptr;
    CHECK(cu("cuPointerGetAttribute", static_cast<void*>(&type), 2U, block + kMiB) == kSuccess);
    CHECK(type == 2);
    CHECK(cu("cuPointerGetAttribute", static_cast<void*>(&host), 4U, block) == kInvalidValue);
    CHECK(cu("cuMemGetAddressRange_v2", &base, &bytes, block + 5) == kSuccess);
    CHECK(base == block);
    CHECK(bytes == (block == filler ? 1000 : 100) * kMiB);
    CHECK(cu("cuMemRetainAllocationHandle", &handle, block) == kInvalidValue);
  }
  CHECK(give_back(filler) == kSuccess);
  CHECK(give_back(spilled) == kSuccess);
  // Small blocks, and those of an odd size.
  uint64_t small = 0, odd = 0, pitch = 0, rows = 0;
  REQUIRE(cu("cuMemAlloc_v2", &small, kMiB) == kSuccess);
  REQUIRE(cu("cuMemAlloc_v2", &odd, 3 * kMiB + 4096) == kSuccess);
  REQUIRE(cu("cuMemAllocPitch_v2", &rows, &pitch, uint64_t{1000}, uint64_t{4096}, 4U) == kSuccess);
  CHECK(pitch == 1024);
  CHECK(on_device() == (1 + 4 + 4) * kMiB);
  write(odd, 3 * kMiB + 4096, 1);
  write(rows, 4 * kMiB, 2);
  CHECK(holds(odd, 3 * kMiB + 4096, 1));
  for (const uint64_t block : {small, odd, rows}) CHECK(give_back(block) == kSuccess);
  CHECK(on_device() == 0);
}

TEST_CASE("the driver refuses a step of getting or moving: nothing is lost, and nothing counted") {
  begin();
  const uint64_t all = free_bytes();
  uint64_t address = 0;
  for (const char* call : {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}) {
    arm(call, 719);
    INFO(call);
    CHECK(cu("cuMemAlloc_v2", &address, 64 * kMiB) == 719);
    arm(nullptr, 0);
    CHECK(free_bytes() == all);
    CHECK(on_device() + on_host() == 0);
  }
  // Without addresses it is a plain block.
  arm("cuMemAddressReserve", 2);
  REQUIRE(cu("cuMemAlloc_v2", &address, 64 * kMiB) == kSuccess);
  arm(nullptr, 0);
  CHECK(on_device() == 64 * kMiB);
  CHECK(give_back(address) == kSuccess);
  // Without memory of the device it lies on the host, and the other way round for what moves.
  for (const char* call : {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
                           "cuMemcpyDtoD_v2", "cuCtxSynchronize"}) {
    INFO(call);
    const uint64_t filler = get_marked(1000), small = get_marked(8), spilled = get_marked(200);
    REQUIRE(on_host() == 200 * kMiB);
    uint64_t plain = 0;
    REQUIRE(cu("cuMemAlloc_v2", &plain, kMiB) == kSuccess);
    CHECK(give_back(filler) == kSuccess);  // comes home
    REQUIRE(on_host() == 0);
    const uint64_t again = get_marked(800), other = get_marked(100);
    REQUIRE(on_host() == 100 * kMiB);
    CHECK(give_back(again) == kSuccess);
    REQUIRE(on_host() == 0);
    const uint64_t last = get_marked(700), waits = get_marked(300);
    REQUIRE(on_host() == 300 * kMiB);
    arm(call, 2);
    CHECK(give_back(last) == kSuccess);
    arm(nullptr, 0);
    CHECK(on_host() == 300 * kMiB);
    for (const uint64_t block : {small, spilled, other, waits})
      CHECK(is_whole(block, block == small ? 8 : block == spilled ? 200 : block == other ? 100 : 300));
    CHECK(give_back(plain) == kSuccess);  // at the next chance it comes
    CHECK(on_host() == 0);
    CHECK(is_whole(waits, 300));
    arm("cuMemUnmap", 719);
    CHECK(give_back(waits) == 719);
    arm(nullptr, 0);
    for (const uint64_t block : {small, spilled, other, waits}) CHECK(give_back(block) == kSuccess);
    CHECK(on_device() + on_host() == 0);
    CHECK(free_bytes() == all);
  }
}

TEST_CASE("blocks go with their context, and a child of fork has none") {
  void* context = nullptr;
  REQUIRE(cu("cuCtxCreate_v2", &context, 0U, 0U) == kSuccess);
  const uint64_t all = free_bytes();
  get_marked(1000);
  const uint64_t spilled = get_marked(1000);
  const pid_t child = fork();
  if (child == 0) {
    uint64_t free = 0, total = 0;
    if (cu("cuMemGetInfo_v2", &free, &total) != kSuccess || free != kDevice + kPinned) _exit(1);
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  REQUIRE(cu("cuCtxDestroy_v2", context) == kSuccess);
  CHECK(free_bytes() == all);
  CHECK(on_device() + on_host() == 0);
  CHECK(give_back(spilled) == kInvalidValue);
}

TEST_CASE("threads that get and free while blocks move find their bytes") {
  begin();
  const uint64_t all = free_bytes();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      // Bytes go through the gate, as a program's do: some places of each block know which it is.
      struct Mine {
        uint64_t address, mark;
      };
      std::vector<Mine> mine;
      const uint64_t bytes = static_cast<uint64_t>(t + 1) * 48 * kMiB + 4096;
      uint64_t mark = static_cast<uint64_t>(t) << 32;
      const auto check = [&](const Mine& block) {
        for (uint64_t at = 0; at < bytes; at += bytes / 4) {
          uint64_t seen = 0;
          if (cu("cuMemcpyDtoH_v2", static_cast<void*>(&seen), block.address + at, uint64_t{8}) != kSuccess ||
              seen != block.mark + at)
            ++wrong;
        }
      };
      const auto end = [&](const Mine& block) {
        check(block);
        if (give_back(block.address) != kSuccess) ++wrong;
      };
      for (int i = 0; i < 60; ++i) {
        Mine block{0, ++mark};
        const Result result = cu("cuMemAlloc_v2", &block.address, bytes);
        if (result != kSuccess && result != kOutOfMemory) ++wrong;
        if (result == kSuccess) {
          for (uint64_t at = 0; at < bytes; at += bytes / 4) {
            uint64_t value = block.mark + at;
            if (cu("cuMemcpyHtoD_v2", block.address + at, static_cast<void*>(&value), uint64_t{8}) !=
                kSuccess)
              ++wrong;
          }
          mine.push_back(block);
        }
        if (!mine.empty()) check(mine.back());
        if (!mine.empty() && (i % 3 == 0 || result != kSuccess)) {
          end(mine.front());
          mine.erase(mine.begin());
        }
      }
      for (const Mine& block : mine) end(block);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(on_device() + on_host() == 0);
  CHECK(free_bytes() == all);
}

TEST_CASE("what does not fit lies in pinned memory where the driver gives no memory of the host") {
  const uint64_t all = free_bytes(), filler = get(1024);
  control<decltype(&recorder_set_host_limit)>("recorder_set_host_limit")(0);
  const uint64_t block = get(100);
  CHECK(on_host() == 100 * kMiB);
  CHECK(on_device() == 1024 * kMiB);
  CHECK(give_back(block) == kSuccess);
  CHECK(on_host() == 0);
  control<decltype(&recorder_set_host_limit)>("recorder_set_host_limit")(UINT64_MAX);
  CHECK(give_back(filler) == kSuccess);
  CHECK(free_bytes() == all);
}
