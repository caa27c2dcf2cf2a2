// Memory above the soft limit: GPUSHARE_MEMORY=3G, GPUSHARE_SOFT=1G, GPUSHARE_PINNED=1536M. Blocks that do not fit on
// the device lie on the host; the program sees memory of the device. Run with the shim preloaded over the recording
// driver.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <vector>

#include "soft_limit.hpp"

namespace {

Result get_refused(uint64_t mebibytes) {
  uint64_t address = 0;
  const Result result = cu("cuMemAlloc_v2", &address, mebibytes * kMiB);
  CHECK(address == 0);
  return result;
}

}  // namespace

TEST_CASE("what does not fit on the device lies on the host, up to the hard limit and the pinned memory") {
  // The device's part and as much of the rest as may be pinned.
  const uint64_t all = kDevice + kPinned;
  CHECK(free_bytes() == all);
  arm("cuMemAllocManaged",
      kSuccess);  // managed memory is slow, and kernels compiled at run time may break on it
  const uint64_t first = get(1000);
  CHECK(on_host() == 0);
  const uint64_t second = get(1000);  // on the host
  CHECK(on_device() == 1000 * kMiB);
  CHECK(on_host() == 1000 * kMiB);
  CHECK(free_bytes() == all - 2000 * kMiB);
  const uint64_t third = get(24);  // there is room on the device for this
  CHECK(on_device() == 1024 * kMiB);
  CHECK(get_refused(600) == kOutOfMemory);
  CHECK(on_host() == 1000 * kMiB);
  const uint64_t fourth = get(536);
  CHECK(free_bytes() == 0);
  CHECK(get_refused(1) == kOutOfMemory);
  // The program's own pinned memory is part of the same quota.
  void* pinned = nullptr;
  CHECK(cu("cuMemHostAlloc", &pinned, uint64_t{4096}, 0U) == kOutOfMemory);
  // Each goes back to where it came from.
  CHECK(give_back(second) == kSuccess);
  CHECK(on_host() == 536 * kMiB);
  CHECK(on_device() == 1024 * kMiB);
  CHECK(cu("cuMemHostAlloc", &pinned, 500 * kMiB, 0U) == kSuccess);
  CHECK(free_bytes() == 500 * kMiB);
  CHECK(cu("cuMemFreeHost", pinned) == kSuccess);
  CHECK(give_back(first) == kSuccess);
  CHECK(on_device() == 24 * kMiB);
  for (const uint64_t address : {third, fourth}) CHECK(give_back(address) == kSuccess);
  CHECK(give_back(fourth) == kInvalidValue);
  CHECK(on_host() == 0);
  CHECK(free_bytes() == all);
  CHECK(control<decltype(&recorder_last)>("recorder_last")()->entry == -1);
  arm(nullptr, 0);
}

TEST_CASE("memory that is not plain is not spilled") {
  const uint64_t filler = get(1024);
  uint64_t address = 0;
  CHECK(cu("cuMemAllocAsync", &address, 4 * kMiB, static_cast<void*>(nullptr)) == kOutOfMemory);
  CHECK(cu("cuMemAllocManaged", &address, 4 * kMiB, 1U) == kOutOfMemory);
  CHECK(on_host() == 0);
  // Pitched memory is.
  uint64_t pitch = 0;
  REQUIRE(cu("cuMemAllocPitch_v2", &address, &pitch, uint64_t{1000}, uint64_t{2048}, 4U) == kSuccess);
  CHECK(pitch == 1024);
  CHECK(on_host() == 2 * kMiB);
  CHECK(give_back(address) == kSuccess);
  CHECK(cu("cuMemAllocPitch_v2", &address, &pitch, UINT64_MAX, uint64_t{2048}, 4U) == kOutOfMemory);
  CHECK(on_host() == 0);
  CHECK(give_back(filler) == kSuccess);
}

TEST_CASE("pointers into spilled memory look as those of the device") {
  const uint64_t filler = get(1024), plain = get(64);
  REQUIRE(on_host() == 64 * kMiB);
  for (const uint64_t address : {filler, plain, plain + 63 * kMiB}) {
    uint32_t type = 0;
    uint64_t host = 7;
    CHECK(cu("cuPointerGetAttribute", static_cast<void*>(&type), 2U, address) == kSuccess);
    CHECK(type == 2);
    CHECK(cu("cuPointerGetAttribute", static_cast<void*>(&host), 4U, address) == kInvalidValue);
    uint64_t values[2] = {7, 7};
    void* out[] = {&values[0], &values[1]};
    uint32_t attributes[] = {2, 4};
    CHECK(cu("cuPointerGetAttributes", 2U, static_cast<void*>(&attributes[0]), static_cast<void*>(&out[0]),
             address) == kSuccess);
    CHECK(static_cast<uint32_t>(values[0]) == 2);
    CHECK(values[1] == 0);
  }
  uint64_t base = 0, bytes = 0;
  CHECK(cu("cuMemGetAddressRange_v2", &base, &bytes, plain + 5) == kSuccess);
  CHECK(base == plain);
  CHECK(bytes == 64 * kMiB);
  // Memory that the program pinned itself is host memory.
  void* pinned = nullptr;
  uint32_t type = 0;
  REQUIRE(cu("cuMemHostAlloc", &pinned, uint64_t{4096}, 0U) == kSuccess);
  CHECK(cu("cuPointerGetAttribute", static_cast<void*>(&type), 2U, reinterpret_cast<uint64_t>(pinned)) ==
        kSuccess);
  CHECK(type == 1);
  CHECK(cu("cuMemFreeHost", pinned) == kSuccess);
  CHECK(give_back(plain) == kSuccess);
  CHECK(give_back(filler) == kSuccess);
}

TEST_CASE("the driver refuses: nothing is counted, and what comes back is the driver's answer") {
  const uint64_t all = free_bytes(), filler = get(1024), left = free_bytes();
  arm("cuMemHostAlloc", 2);
  CHECK(get_refused(64) == kOutOfMemory);
  arm("cuMemHostAlloc", 700);  // a context that is lost
  CHECK(get_refused(64) == 700);
  arm("cuMemHostGetDevicePointer_v2", 1);
  CHECK(get_refused(64) == kOutOfMemory);
  arm(nullptr, 0);
  // A device that sees the memory under another address.
  control<decltype(&recorder_set_host_offset)>("recorder_set_host_offset")(4096);
  CHECK(get_refused(64) == kOutOfMemory);
  control<decltype(&recorder_set_host_offset)>("recorder_set_host_offset")(0);
  CHECK(on_host() == 0);
  CHECK(free_bytes() == left);
  const uint64_t spilled = get(64);
  arm("cuMemFreeHost", 719);
  CHECK(give_back(spilled) == 719);
  arm(nullptr, 0);
  CHECK(free_bytes() == left - 64 * kMiB);
  uint64_t base = 0, bytes = 0;
  CHECK(cu("cuMemGetAddressRange_v2", &base, &bytes, spilled + 5) == kSuccess);
  CHECK(base == spilled);
  CHECK(give_back(spilled) == kSuccess);
  CHECK(give_back(filler) == kSuccess);
  // The device is full of others' memory: below the soft limit, the host helps too.
  arm("cuMemAlloc_v2", 2);
  const uint64_t other = get(64);
  arm(nullptr, 0);
  CHECK(on_host() == 64 * kMiB);
  CHECK(give_back(other) == kSuccess);
  CHECK(free_bytes() == all);
}

TEST_CASE("every question for memory has the same answer") {
  const uint64_t filler = get(1024), spilled = get(256), left = free_bytes();
  uint64_t total = 0, memory[3] = {};
  CHECK(cu("cuDeviceTotalMem_v2", &total, 0U) == kSuccess);
  CHECK(total == kTotal);
  void* nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  REQUIRE(nvml != nullptr);
  CHECK(reinterpret_cast<int (*)(void*, uint64_t*)>(dlsym(nvml, "nvmlDeviceGetMemoryInfo"))(nullptr,
                                                                                            memory) == 0);
  CHECK(memory[0] == kTotal);
  CHECK(memory[1] == left);
  CHECK(memory[2] == 1280 * kMiB);
  CHECK(give_back(spilled) == kSuccess);
  CHECK(give_back(filler) == kSuccess);
}

TEST_CASE("spilled memory goes with its context, and a child of fork has none") {
  void* context = nullptr;
  REQUIRE(cu("cuCtxCreate_v2", &context, 0U, 0U) == kSuccess);
  const uint64_t all = free_bytes();
  get(1000);
  const uint64_t spilled = get(1000);
  const pid_t child = fork();
  if (child == 0) {
    uint64_t free = 0, total = 0, address = 0;
    if (cu("cuMemGetInfo_v2", &free, &total) != kSuccess || free != kDevice + kPinned) _exit(1);
    if (cu("cuMemAlloc_v2", &address, 1000 * kMiB) != kSuccess) _exit(2);
    if (cu("cuMemAlloc_v2", &address, 1500 * kMiB) != kSuccess) _exit(3);
    if (cu("cuMemFree_v2", address) != kSuccess) _exit(4);
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  REQUIRE(cu("cuCtxDestroy_v2", context) == kSuccess);
  CHECK(free_bytes() == all);
  CHECK(on_host() == 0);
  CHECK(give_back(spilled) == kInvalidValue);
}

TEST_CASE("threads that spill at once stay within the limits") {
  const uint64_t all = free_bytes();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::vector<uint64_t> mine;
      for (int i = 0; i < 1000; ++i) {
        uint64_t address = 0;
        const Result result = cu("cuMemAlloc_v2", &address, static_cast<uint64_t>(t + 1) * 32 * kMiB);
        if (result == kSuccess)
          mine.push_back(address);
        else if (result != kOutOfMemory)
          ++wrong;
        if (on_host() > kPinned + 512 * kMiB) ++wrong;  // counted before it is freed
        if (!mine.empty() && (i % 4 == 0 || result != kSuccess)) {
          if (give_back(mine.front()) != kSuccess) ++wrong;
          mine.erase(mine.begin());
        }
      }
      for (const uint64_t address : mine)
        if (give_back(address) != kSuccess) ++wrong;
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(on_host() == 0);
  CHECK(free_bytes() == all);
}
