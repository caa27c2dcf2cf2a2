// A machine of two devices in one process: GPUSHARE_MEMORY=3G, GPUSHARE_SOFT=1G, GPUSHARE_PINNED=2G,
// RECORDER_DEVICES=3c,3b. Each device has the limit for itself, and what is allocated counts where it lies, whichever
// context the thread has. Run with the shim preloaded over the recording driver.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "through_shim.hpp"

namespace {

constexpr uint64_t kMiB = 1 << 20, kOnDevice = 1024 * kMiB, kAll = 3072 * kMiB;

struct Location {
  int32_t type, handle_types, location_type, location_id;
  uint64_t rest[14];
};

uint64_t used(int device) {
  return control<decltype(&recorder_used_bytes_of)>("recorder_used_bytes_of")(device);
}
void* retain(unsigned device) {
  void* context = nullptr;
  REQUIRE(cu("cuDevicePrimaryCtxRetain", &context, device) == kSuccess);
  return context;
}
// As cudaSetDevice: the calling thread has the primary context of the device.
void use(unsigned device) {
  static void* const contexts[] = {retain(0), retain(1)};
  REQUIRE(cu("cuCtxSetCurrent", contexts[device]) == kSuccess);
}
uint64_t free_here() {
  uint64_t free = 0, total = 0;
  REQUIRE(cu("cuMemGetInfo_v2", &free, &total) == kSuccess);
  CHECK(total == kAll);
  return free;
}
uint64_t free_of(unsigned device) {
  use(device);
  return free_here();
}
uint64_t get(uint64_t mebibytes) {
  uint64_t address = 0;
  return cu("cuMemAlloc_v2", &address, mebibytes * kMiB) == kSuccess ? address : 0;
}
Result give_back(uint64_t address) {
  return cu("cuMemFree_v2", address);
}
void* make_stream(unsigned device) {
  use(device);
  void* stream = nullptr;
  REQUIRE(cu("cuStreamCreate", &stream, 1U) == kSuccess);
  return stream;
}

}  // namespace

TEST_CASE("each device has the limit for itself") {
  const uint64_t first = free_of(0), second = free_of(1);
  CHECK(first == second);
  use(0);
  const uint64_t a = get(900);
  REQUIRE(a != 0);
  CHECK(used(0) == 900 * kMiB);
  CHECK(free_of(0) == first - 900 * kMiB);
  CHECK(free_of(1) == second);
  const uint64_t b = get(1000);
  REQUIRE(b != 0);
  CHECK(used(1) == 1000 * kMiB);
  uint64_t total = 0;
  for (int device : {0, 1}) {
    REQUIRE(cu("cuDeviceTotalMem_v2", &total, device) == kSuccess);
    CHECK(total == kAll);
  }
  // Managed memory does not spill: the device's own part is what there is.
  uint64_t managed = 0;
  CHECK(cu("cuMemAllocManaged", &managed, 100 * kMiB, 1U) == kOutOfMemory);
  use(0);
  REQUIRE(cu("cuMemAllocManaged", &managed, 100 * kMiB, 1U) == kSuccess);
  // A free finds its device, whichever context the thread has.
  use(1);
  CHECK(give_back(managed) == kSuccess);
  CHECK(give_back(a) == kSuccess);
  use(0);
  CHECK(give_back(b) == kSuccess);
  CHECK(free_of(0) == first);
  CHECK(free_of(1) == second);
  CHECK(used(0) + used(1) == 0);
}

TEST_CASE("memory counts where it lies, not where the thread is") {
  const uint64_t first = free_of(0), second = free_of(1);
  void *pool = nullptr, *own = nullptr, *const there = make_stream(1), *const none = nullptr;
  uint64_t handle = 0, address = 0;
  Location location{1, 0, 1, 1, {}};
  use(0);
  // Physical memory, by its location.
  REQUIRE(cu("cuMemCreate", &handle, 600 * kMiB, &location, uint64_t{0}) == kSuccess);
  CHECK(used(1) == 600 * kMiB);
  CHECK(free_here() == first);
  CHECK(free_of(1) == second - 600 * kMiB);
  use(0);
  CHECK(cu("cuMemCreate", &address, 600 * kMiB, &location, uint64_t{0}) == kOutOfMemory);
  CHECK(cu("cuMemRelease", handle) == kSuccess);
  // A pool of the other device, that device's own pool, and a stream of that device.
  REQUIRE(cu("cuMemPoolCreate", &pool, &location) == kSuccess);
  REQUIRE(cu("cuDeviceGetDefaultMemPool", &own, 1) == kSuccess);
  for (void* each : {pool, own}) {
    use(0);
    REQUIRE(cu("cuMemAllocFromPoolAsync", &address, 500 * kMiB, each, none) == kSuccess);
    CHECK(free_here() == first);
    CHECK(free_of(1) == second - 500 * kMiB);
    CHECK(cu("cuMemFreeAsync", address, none) == kSuccess);
  }
  use(0);
  REQUIRE(cu("cuMemAllocAsync", &address, 500 * kMiB, there) == kSuccess);
  CHECK(free_here() == first);
  CHECK(free_of(1) == second - 500 * kMiB);
  use(0);
  CHECK(cu("cuMemFreeAsync", address, there) == kSuccess);
  CHECK(cu("cuMemPoolDestroy", pool) == kSuccess);
  // A graph with nodes of both devices.
  control<decltype(&recorder_set_graph_bytes)>("recorder_set_graph_bytes")(400 * kMiB);
  control<decltype(&recorder_set_graph_devices)>("recorder_set_graph_devices")(2);
  REQUIRE(cu("cuGraphInstantiateWithFlags", &handle, reinterpret_cast<void*>(9), uint64_t{0}) == kSuccess);
  CHECK(free_of(0) == first - 400 * kMiB);
  CHECK(free_of(1) == second - 400 * kMiB);
  // One of which the second device has no room for the node: nothing is left charged.
  uint64_t filler = 0;
  REQUIRE(cu("cuMemAllocManaged", &filler, 400 * kMiB, 1U) == kSuccess);
  CHECK(cu("cuGraphInstantiateWithFlags", &address, reinterpret_cast<void*>(9), uint64_t{0}) == kOutOfMemory);
  CHECK(free_of(0) == first - 400 * kMiB);
  CHECK(give_back(filler) == kSuccess);
  arm("cuGraphExecDestroy", 719);
  CHECK(cu("cuGraphExecDestroy", reinterpret_cast<void*>(handle)) == 719);
  arm(nullptr, 0);
  CHECK(free_of(1) == second - 400 * kMiB);
  CHECK(cu("cuGraphExecDestroy", reinterpret_cast<void*>(handle)) == kSuccess);
  control<decltype(&recorder_set_graph_bytes)>("recorder_set_graph_bytes")(0);
  control<decltype(&recorder_set_graph_devices)>("recorder_set_graph_devices")(1);
  CHECK(free_of(0) == first);
  CHECK(free_of(1) == second);
  CHECK(cu("cuStreamDestroy_v2", there) == kSuccess);
}

TEST_CASE("what a device has no room for goes to the host, and comes back when that device has room") {
  const uint64_t host = control<decltype(&recorder_host_bytes)>("recorder_host_bytes")();
  const auto on_host = [host] {
    return control<decltype(&recorder_host_bytes)>("recorder_host_bytes")() - host;
  };
  use(1);
  const uint64_t a = get(900), b = get(300);
  REQUIRE((a != 0 && b != 0));
  CHECK(used(1) == 900 * kMiB);
  CHECK(on_host() == 300 * kMiB);
  std::memset(reinterpret_cast<void*>(b), 0x5a, 4096);
  use(0);
  const uint64_t c = get(500);
  CHECK(used(0) == 500 * kMiB);
  CHECK(give_back(c) == kSuccess);  // room on the wrong device
  CHECK(on_host() == 300 * kMiB);
  CHECK(give_back(a) == kSuccess);
  CHECK(on_host() == 0);
  CHECK(used(1) == 300 * kMiB);
  CHECK(*reinterpret_cast<unsigned char*>(b + 4095) == 0x5a);
  CHECK(give_back(b) == kSuccess);
}

TEST_CASE("a device that another may reach gives it access to blocks that move") {
  use(1);
  const uint64_t before = get(64);
  void* const peer = retain(1);
  use(0);
  // Blocks that are there already, and from then on each new one: its own device and the other.
  arm("cuMemSetAccess", 0);
  REQUIRE(cu("cuCtxEnablePeerAccess", peer, 0U) == kSuccess);
  const auto given = [] {
    const recorder_call* call = control<decltype(&recorder_last)>("recorder_last")();
    uint64_t count = 0;
    std::memcpy(&count, call->values[3], sizeof count);
    return call->entry >= 0 ? count : 0;
  };
  CHECK(given() == 2);
  use(1);
  arm("cuMemSetAccess", 0);
  const uint64_t after = get(64);
  CHECK(given() == 2);
  use(0);
  arm("cuMemSetAccess", 0);
  const uint64_t own = get(64);
  CHECK(given() == 1);
  arm(nullptr, 0);
  for (const uint64_t block : {before, after, own}) CHECK(give_back(block) == kSuccess);
  CHECK(cu("cuDevicePrimaryCtxRelease_v2", 1U) == kSuccess);
}

TEST_CASE("contexts of the devices and what they take are apart") {
  const auto overhead = control<decltype(&recorder_set_overhead)>("recorder_set_overhead");
  const uint64_t first = free_of(0), second = free_of(1);
  overhead(0, 100 * kMiB);
  void *made = nullptr, *module = nullptr;
  REQUIRE(cu("cuCtxCreate_v2", &made, 0U, 1U) == kSuccess);  // current from now on
  REQUIRE(get(200) != 0);
  CHECK(free_here() == second - 200 * kMiB);
  REQUIRE(cu("cuModuleLoadData", &module, static_cast<void*>(nullptr)) == kSuccess);
  CHECK(free_here() == second - 300 * kMiB);
  CHECK(free_of(0) == first);
  REQUIRE(cu("cuCtxSetCurrent", made) == kSuccess);
  CHECK(cu("cuModuleUnload", module) == kSuccess);
  overhead(0, 0);
  CHECK(cu("cuCtxDestroy_v2", made) == kSuccess);
  CHECK(free_of(1) == second);
  CHECK(cu("cuDevicePrimaryCtxRetain", &made, 2U) == gpushare::shim::kInvalidDevice);
}

TEST_CASE("memory of another process counts on the device on which it lies") {
  use(1);
  const uint64_t first[] = {free_of(0), free_of(1)};
  for (const int owner : {0, 1})
    for (const unsigned opener : {0U, 1U}) {
      INFO(owner << " opened on " << opener);
      gpushare::shim::B64 handle{};
      handle.bytes[0] = static_cast<char>(owner);
      uint64_t address = 0;
      use(opener);
      REQUIRE(cu("cuIpcOpenMemHandle_v2", &address, handle, 1U) == kSuccess);
      CHECK(free_of(0) == first[0] - (owner == 0 ? 64 * kMiB : 0));
      CHECK(free_of(1) == first[1] - (owner == 1 ? 64 * kMiB : 0));
      REQUIRE(cu("cuIpcCloseMemHandle", address) == kSuccess);
      CHECK(free_of(0) == first[0]);
      CHECK(free_of(1) == first[1]);
    }
}

TEST_CASE("a process gets no more contexts than its turn can watch") {
  use(0);
  for (int round = 0; round < 2; ++round) {
    std::vector<void*> contexts;
    void* context = nullptr;
    while (contexts.size() < 100 && cu("cuCtxCreate_v2", &context, 0U, 1U) == kSuccess)
      contexts.push_back(context);
    CHECK(contexts.size() > 50);
    CHECK(contexts.size() < 64);
    for (void* each : contexts) CHECK(cu("cuCtxDestroy_v2", each) == kSuccess);
  }
  use(0);
}

TEST_CASE("NVML says of each device what the driver says") {
  use(1);
  const uint64_t block = get(100);
  for (const auto& [bus, device] : {std::pair{"0000:3c:00.0", 0U}, std::pair{"0000:3b:00.0", 1U}}) {
    void* handle = nullptr;
    uint64_t told[3] = {};
    const uint64_t free = free_of(device);
    void* const nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    REQUIRE(nvml != nullptr);
    REQUIRE(reinterpret_cast<int (*)(const char*, void**)>(dlsym(nvml, "nvmlDeviceGetHandleByPciBusId_v2"))(
                bus, &handle) == 0);
    REQUIRE(reinterpret_cast<int (*)(void*, uint64_t*)>(dlsym(nvml, "nvmlDeviceGetMemoryInfo"))(handle,
                                                                                                told) == 0);
    CHECK(told[0] == kAll);
    CHECK(told[1] == free);
  }
  CHECK(give_back(block) == kSuccess);
}

TEST_CASE("threads with contexts of their own devices") {
  const uint64_t first = free_of(0), second = free_of(1);
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 8; ++t) {
    void* const context = retain(t % 2);
    threads.emplace_back([context, t, &failed] {
      if (cu("cuCtxSetCurrent", context) != kSuccess) ++failed;
      for (unsigned i = 0; i < 500; ++i) {
        uint64_t address = 0;
        if (cu("cuMemAlloc_v2", &address, (1 + (i + t) % 7) * kMiB) != kSuccess ||
            cu("cuMemFree_v2", address) != kSuccess)
          ++failed;
        if (cu("cuLaunchKernel", static_cast<void*>(nullptr), 1U, 1U, 1U, 1U, 1U, 1U, 0U,
               static_cast<void*>(nullptr), static_cast<void*>(nullptr),
               static_cast<void*>(nullptr)) != kSuccess)
          ++failed;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(failed == 0);
  for (unsigned t = 0; t < 8; ++t) CHECK(cu("cuDevicePrimaryCtxRelease_v2", t % 2) == kSuccess);
  CHECK(free_of(0) == first);
  CHECK(free_of(1) == second);
}

TEST_CASE("a child of fork has nothing on either device") {
  use(0);
  const uint64_t a = get(500);
  use(1);
  const uint64_t b = get(400), left = free_here();
  const pid_t child = fork();
  if (child == 0) {
    uint64_t total = 0;
    void* context = nullptr;
    const bool right = cu("cuDevicePrimaryCtxRetain", &context, 1U) == kSuccess &&
                       cu("cuCtxSetCurrent", context) == kSuccess && get(1000) != 0 &&
                       cu("cuDeviceTotalMem_v2", &total, 0) == kSuccess && total == kAll;
    _exit(right ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(free_here() == left);
  CHECK(give_back(a) == kSuccess);
  CHECK(give_back(b) == kSuccess);
}
