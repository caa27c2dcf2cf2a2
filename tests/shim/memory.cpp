// Memory of one process against GPUSHARE_MEMORY=1G: every way of getting it counts, is refused above the limit with the
// driver's own code, and comes back when it is freed. Run with the shim preloaded over the recording driver.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <pthread.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "through_shim.hpp"

namespace {

constexpr uint64_t kMiB = 1 << 20, kLimit = 1024 * kMiB;

uint64_t free_bytes() {
  uint64_t free = 0, total = 0;
  REQUIRE(cu("cuMemGetInfo_v2", &free, &total) == kSuccess);
  CHECK(total == kLimit);
  return free;
}
void* no_pointer() {
  return nullptr;
}

struct Array {
  uint64_t width, height;
  uint32_t format, channels;
};
struct Array3 {
  uint64_t width, height, depth;
  uint32_t format, channels, flags;
};
struct Properties {
  int32_t type, handle_types, location_type, location_id;
  uint64_t rest[14];
};

// A way of getting `mebibytes` of memory and of giving it back.
struct Way {
  const char* name;
  std::function<Result(uint64_t mebibytes, uint64_t* out)> get;
  std::function<Result(uint64_t what)> give_back;
};

std::vector<Way> ways() {
  const auto free = [](uint64_t address) { return cu("cuMemFree_v2", address); };
  const auto free_async = [](uint64_t address) { return cu("cuMemFreeAsync", address, no_pointer()); };
  const auto handle = [](uint64_t value) { return reinterpret_cast<void*>(value); };
  return {
      {"plain", [](uint64_t m, uint64_t* out) { return cu("cuMemAlloc_v2", out, m * kMiB); }, free},
      {"managed", [](uint64_t m, uint64_t* out) { return cu("cuMemAllocManaged", out, m * kMiB, 1U); }, free},
      {"pitched",
       [](uint64_t m, uint64_t* out) {
         uint64_t pitch = 0;
         return cu("cuMemAllocPitch_v2", out, &pitch, uint64_t{1000}, m * 1024, 4U);
       },
       free},
      {"stream-ordered",
       [](uint64_t m, uint64_t* out) { return cu("cuMemAllocAsync", out, m * kMiB, no_pointer()); },
       free_async},
      {"stream-ordered, per thread",
       [](uint64_t m, uint64_t* out) { return cu("cuMemAllocAsync_ptsz", out, m * kMiB, no_pointer()); },
       [](uint64_t address) { return cu("cuMemFreeAsync_ptsz", address, no_pointer()); }},
      {"pool",
       [handle](uint64_t m, uint64_t* out) {
         return cu("cuMemAllocFromPoolAsync", out, m * kMiB, handle(7), no_pointer());
       },
       free_async},
      {"array",
       [](uint64_t m, uint64_t* out) {
         const Array shape{512, m * 512, 0x20, 1};  // floats
         return cu("cuArrayCreate_v2", out, &shape);
       },
       [handle](uint64_t array) { return cu("cuArrayDestroy", handle(array)); }},
      {"array of 3 dimensions",
       [](uint64_t m, uint64_t* out) {
         const Array3 shape{512, 512, m, 0x02, 2, 0};  // two 16-bit channels
         return cu("cuArray3DCreate_v2", out, &shape);
       },
       [handle](uint64_t array) { return cu("cuArrayDestroy", handle(array)); }},
      {"mipmapped array, one level",
       [](uint64_t m, uint64_t* out) {
         const Array3 shape{1024, m * 1024, 0, 0x01, 1, 0};
         return cu("cuMipmappedArrayCreate", out, &shape, 1U);
       },
       [handle](uint64_t array) { return cu("cuMipmappedArrayDestroy", handle(array)); }},
      {"virtual memory",
       [](uint64_t m, uint64_t* out) {
         const Properties properties{1, 0, 1, 0, {}};
         return cu("cuMemCreate", out, m * kMiB, &properties, uint64_t{0});
       },
       [](uint64_t value) { return cu("cuMemRelease", value); }},
      {"external memory",
       [](uint64_t m, uint64_t* out) {
         uint64_t words[13] = {1, 0, 0, m * kMiB};
         return cu("cuImportExternalMemory", out, &words[0]);
       },
       [handle](uint64_t value) { return cu("cuDestroyExternalMemory", handle(value)); }},
      {"a graph's allocation node",
       [handle](uint64_t m, uint64_t* out) {
         control<decltype(&recorder_set_graph_bytes)>("recorder_set_graph_bytes")(m * kMiB);
         return cu("cuGraphInstantiateWithFlags", out, handle(9), uint64_t{0});
       },
       [handle](uint64_t value) { return cu("cuGraphExecDestroy", handle(value)); }},
  };
}

}  // namespace

TEST_CASE("every way of getting memory is counted, refused above the limit, and given back") {
  REQUIRE(free_bytes() == kLimit);
  for (const Way& way : ways()) {
    INFO(way.name);
    uint64_t first = 0, second = 0;
    const uint64_t used = control<decltype(&recorder_used_bytes)>("recorder_used_bytes")();
    REQUIRE(way.get(700, &first) == kSuccess);
    const uint64_t left = free_bytes();
    CHECK(left <= 324 * kMiB);
    CHECK(left >= (std::strcmp(way.name, "pitched") == 0 ? 300 : 324) * kMiB);
    // Refused with the driver's code, and the driver was not asked.
    const uint64_t before = control<decltype(&recorder_used_bytes)>("recorder_used_bytes")();
    CHECK(way.get(700, &second) == kOutOfMemory);
    CHECK(control<decltype(&recorder_used_bytes)>("recorder_used_bytes")() == before);
    CHECK(free_bytes() == left);
    // A size too large for any machine is refused too, without harm to the books.
    CHECK(way.get(uint64_t{1} << 40, &second) != kSuccess);
    CHECK(way.get(200, &second) == kSuccess);
    CHECK(way.give_back(second) == kSuccess);
    CHECK(free_bytes() == left);
    CHECK(way.give_back(first) == kSuccess);
    CHECK(free_bytes() == kLimit);
    CHECK(control<decltype(&recorder_used_bytes)>("recorder_used_bytes")() == used);
  }
}

TEST_CASE("a free that the driver refuses leaves the block counted") {
  uint64_t address = 0;
  REQUIRE(cu("cuMemAlloc_v2", &address, 100 * kMiB) == kSuccess);
  const uint64_t left = free_bytes();
  arm("cuMemFree_v2", 1);
  CHECK(cu("cuMemFree_v2", address) == kInvalidValue);
  arm(nullptr, 0);
  CHECK(free_bytes() == left);
  CHECK(cu("cuMemFree_v2", address) == kSuccess);
  CHECK(free_bytes() == kLimit);
  CHECK(cu("cuMemFree_v2", address) == kInvalidValue);
  CHECK(free_bytes() == kLimit);
}

TEST_CASE("an allocation that the driver refuses is not counted") {
  uint64_t address = 0;
  for (const char* name : {"cuMemAlloc_v2", "cuMemAllocAsync"}) {
    arm(name, 719);
    CHECK(cu(name, &address, 100 * kMiB, no_pointer()) == 719);
    arm(nullptr, 0);
    CHECK(free_bytes() == kLimit);
  }
}

TEST_CASE("memory of the host is not charged to the device") {
  uint64_t handle = 0;
  const Properties host{1, 0, 2, 0, {}};
  CHECK(cu("cuMemCreate", &handle, 2048 * kMiB, &host, uint64_t{0}) == kSuccess);
  CHECK(free_bytes() == kLimit);
  CHECK(cu("cuMemRelease", handle) == kSuccess);
  // A pool of the host.
  void* pool = nullptr;
  uint64_t address = 0;
  REQUIRE(cu("cuMemPoolCreate", &pool, &host) == kSuccess);
  CHECK(cu("cuMemAllocFromPoolAsync", &address, 2048 * kMiB, pool, no_pointer()) == kSuccess);
  CHECK(free_bytes() == kLimit);
  CHECK(cu("cuMemFreeAsync", address, no_pointer()) == kSuccess);
  CHECK(free_bytes() == kLimit);
  CHECK(cu("cuMemPoolDestroy", pool) == kSuccess);
}

TEST_CASE("physical memory is held by its handle and by every mapping") {
  const Properties properties{1, 0, 1, 0, {}};
  uint64_t handle = 0;
  REQUIRE(cu("cuMemCreate", &handle, 64 * kMiB, &properties, uint64_t{0}) == kSuccess);
  const auto map = [&](uint64_t at) {
    return cu("cuMemMap", at, 64 * kMiB, uint64_t{0}, handle, uint64_t{0});
  };
  const uint64_t base = uint64_t{1} << 40;
  REQUIRE(map(base) == kSuccess);
  REQUIRE(map(base + 64 * kMiB) == kSuccess);
  uint64_t again = handle;
  REQUIRE(cu("cuMemRetainAllocationHandle", &again, reinterpret_cast<void*>(base)) == kSuccess);
  CHECK(free_bytes() == kLimit - 64 * kMiB);
  REQUIRE(cu("cuMemRelease", handle) == kSuccess);
  CHECK(free_bytes() == kLimit - 64 * kMiB);
  // One call takes both mappings.
  REQUIRE(cu("cuMemUnmap", base, 128 * kMiB) == kSuccess);
  CHECK(free_bytes() == kLimit - 64 * kMiB);
  arm("cuMemRelease", 719);  // refused: nothing changes
  CHECK(cu("cuMemRelease", handle) == 719);
  arm(nullptr, 0);
  CHECK(free_bytes() == kLimit - 64 * kMiB);
  CHECK(cu("cuMemRelease", handle) == kSuccess);
  CHECK(free_bytes() == kLimit);
}

TEST_CASE("memory of other processes counts when it is opened or mapped") {
  const uint64_t at_first = free_bytes();
  uint64_t address = 0, handle = 0;
  REQUIRE(cu("cuIpcOpenMemHandle_v2", &address, gpushare::shim::B64{}, 1U) == kSuccess);
  CHECK(free_bytes() == at_first - 64 * kMiB);
  REQUIRE(cu("cuIpcCloseMemHandle", address) == kSuccess);
  CHECK(free_bytes() == at_first);
  REQUIRE(cu("cuMemImportFromShareableHandle", &handle, no_pointer(), 1U) == kSuccess);
  CHECK(free_bytes() == at_first);
  REQUIRE(cu("cuMemMap", uint64_t{1} << 41, 32 * kMiB, uint64_t{0}, handle, uint64_t{0}) == kSuccess);
  CHECK(free_bytes() == at_first - 32 * kMiB);
  CHECK(cu("cuMemMap", uint64_t{1} << 42, 32 * kMiB, uint64_t{0}, handle, uint64_t{0}) == kSuccess);
  CHECK(free_bytes() == at_first - 32 * kMiB);
  REQUIRE(cu("cuMemUnmap", uint64_t{1} << 41, 32 * kMiB) == kSuccess);
  REQUIRE(cu("cuMemUnmap", uint64_t{1} << 42, 32 * kMiB) == kSuccess);
  REQUIRE(cu("cuMemRelease", handle) == kSuccess);
  CHECK(free_bytes() == at_first);
}

TEST_CASE("allocations on a stream that is captured are charged with the graph, not before") {
  const uint64_t at_first = free_bytes();
  control<decltype(&recorder_set_capturing)>("recorder_set_capturing")(1);
  uint64_t address = 0;
  CHECK(cu("cuMemAllocAsync", &address, 512 * kMiB, no_pointer()) == kSuccess);
  CHECK(free_bytes() == at_first);
  CHECK(cu("cuMemFreeAsync", address, no_pointer()) == kSuccess);
  control<decltype(&recorder_set_capturing)>("recorder_set_capturing")(0);
  CHECK(free_bytes() == at_first);
}

TEST_CASE(
    "what pools keep of freed memory is trimmed before the limit is exceeded, and the driver is asked only "
    "then") {
  const auto pools = control<decltype(&recorder_set_pools)>("recorder_set_pools");
  const auto physical = control<decltype(&recorder_used_bytes)>("recorder_used_bytes");
  const uint64_t at_first = free_bytes(), used_at_first = physical();
  const auto count = control<decltype(&recorder_trims)>("recorder_trims");
  const auto trims = [count, before = count()] { return count() - before; };
  const auto used = [&] { return physical() - used_at_first; };
  const auto get = [](const char* name, uint64_t mebibytes) {
    uint64_t address = 0;
    return cu(name, &address, mebibytes * kMiB, no_pointer()) == kSuccess ? address : 0;
  };
  const auto keep = [&](uint64_t mebibytes) {
    const uint64_t address = get("cuMemAllocAsync", mebibytes);
    REQUIRE(address != 0);
    REQUIRE(cu("cuMemFreeAsync", address, no_pointer()) == kSuccess);
  };
  pools(1);
  // A program that takes again what it gave to its pool.
  for (int i = 0; i < 5; ++i) keep(600 + static_cast<uint64_t>(i) * 50);
  CHECK(used() == 800 * kMiB);
  uint64_t address = get("cuMemAlloc_v2", 200);
  REQUIRE(address != 0);
  CHECK(trims() == 0);
  // Other memory, for which the pool has to give back what it keeps.
  uint64_t other = get("cuMemAlloc_v2", 300);
  REQUIRE(other != 0);
  CHECK(trims() == 1);
  CHECK(used() == 500 * kMiB);
  REQUIRE(cu("cuMemFree_v2", other) == kSuccess);
  // Pools that the program has made are asked too, while they live.
  const Properties properties{1, 0, 1, 0, {}};
  void* pool = nullptr;
  REQUIRE(cu("cuMemPoolCreate", &pool, &properties) == kSuccess);
  keep(600);
  REQUIRE(cu("cuMemFree_v2", get("cuMemAlloc_v2", 500)) == kSuccess);
  CHECK(trims() == 3);
  REQUIRE(cu("cuMemPoolDestroy", pool) == kSuccess);
  // Memory whose free has not happened yet on its stream is waited for.
  pools(2);
  keep(600);
  REQUIRE(cu("cuMemFree_v2", get("cuMemAlloc_v2", 500)) == kSuccess);
  CHECK(trims() == 5);
  CHECK(used() == 200 * kMiB);
  // No trim happens while a stream is being captured, because a trim would end the capture.
  keep(600);
  REQUIRE(cu("cuStreamBeginCapture_v2", no_pointer(), 0U) == kSuccess);
  REQUIRE(cu("cuMemFree_v2", get("cuMemAlloc_v2", 500)) == kSuccess);
  REQUIRE(cu("cuStreamEndCapture", no_pointer(), static_cast<void*>(&pool)) == kSuccess);
  CHECK(trims() == 5);
  // Memory that a pool does not give back counts.
  pools(3);
  keep(600);
  CHECK(get("cuMemAlloc_v2", 300) == 0);
  CHECK(used() == 800 * kMiB);
  // Blocks of the pool come out of it, also those for which it has to grow.
  other = get("cuMemAllocAsync", 700);
  REQUIRE(other != 0);
  CHECK(used() == 900 * kMiB);
  REQUIRE(cu("cuMemFreeAsync", other, no_pointer()) == kSuccess);
  pools(1);
  // Memory that was measured as a module's does not count twice.
  keep(600);
  void* module = nullptr;
  REQUIRE(cu("cuModuleLoadData", &module, no_pointer()) == kSuccess);
  CHECK(free_bytes() <= at_first - 800 * kMiB);
  other = get("cuMemAllocAsync", 700);
  REQUIRE(other != 0);
  CHECK(used() == 900 * kMiB);
  REQUIRE(cu("cuMemFree_v2", other) == kSuccess);
  REQUIRE(cu("cuMemFree_v2", address) == kSuccess);
  cu("cuModuleUnload", module);
  // What was trimmed is known where nothing can be measured.
  control<decltype(&recorder_set_nvml)>("recorder_set_nvml")(0);
  for (int i = 0; i < 2; ++i) {
    keep(600);
    other = get("cuMemAlloc_v2", 500);
    REQUIRE(other != 0);
    REQUIRE(cu("cuMemFree_v2", other) == kSuccess);
  }
  control<decltype(&recorder_set_nvml)>("recorder_set_nvml")(1);
  pools(0);
  CHECK(free_bytes() == at_first);
}

TEST_CASE("a context's memory goes with the context") {
  void* context = nullptr;
  REQUIRE(cu("cuCtxCreate_v2", &context, 0U, 0U) == kSuccess);
  const uint64_t at_first = free_bytes();
  uint64_t address = 0;
  for (int i = 0; i < 300; ++i) REQUIRE(cu("cuMemAlloc_v2", &address, 1 * kMiB) == kSuccess);
  CHECK(free_bytes() == at_first - 300 * kMiB);
  REQUIRE(cu("cuCtxDestroy_v2", context) == kSuccess);
  CHECK(free_bytes() == at_first);
}

TEST_CASE("the context's own memory is measured, and one that does not fit is refused") {
  const uint64_t at_first = free_bytes();
  const auto overhead = control<decltype(&recorder_set_overhead)>("recorder_set_overhead");
  void* context = nullptr;
  overhead(300 * kMiB, 0);
  REQUIRE(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
  // Memory that the double still has from earlier tests counts as overhead too: it is in NVML's figure for the process
  // and in no block.
  CHECK(free_bytes() <= at_first - 300 * kMiB);
  REQUIRE(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
  overhead(2000 * kMiB, 0);
  CHECK(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kOutOfMemory);
  overhead(0, 0);
  REQUIRE(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
  const uint64_t alone = free_bytes();
  // A module brings its own.
  overhead(0, 100 * kMiB);
  void* module = nullptr;
  REQUIRE(cu("cuModuleLoadData", &module, no_pointer()) == kSuccess);
  CHECK(free_bytes() == alone - 100 * kMiB);
  overhead(0, 900 * kMiB);
  CHECK(cu("cuModuleLoadData", &module, no_pointer()) == kOutOfMemory);
  cu("cuModuleUnload", module);
  overhead(0, 0);
  REQUIRE(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
}

TEST_CASE("a green context is measured, and its memory is that of the primary context") {
  const uint64_t at_first = free_bytes();
  const auto overhead = control<decltype(&recorder_set_overhead)>("recorder_set_overhead");
  void *green = nullptr, *context = nullptr, *primary = nullptr;
  overhead(2000 * kMiB, 0);
  CHECK(cu("cuGreenCtxCreate", &green, no_pointer(), 0U, 1U) == kOutOfMemory);
  overhead(0, 0);
  CHECK(cu("cuDevicePrimaryCtxRetain", &primary, 0U) == kSuccess);
  CHECK(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
  overhead(300 * kMiB, 0);
  arm("cuGreenCtxCreate", 719);
  CHECK(cu("cuGreenCtxCreate", &green, no_pointer(), 0U, 1U) == 719);
  arm(nullptr, 0);
  REQUIRE(cu("cuGreenCtxCreate", &green, no_pointer(), 0U, 1U) == kSuccess);
  const uint64_t alone = free_bytes();
  CHECK(alone <= at_first - 300 * kMiB);
  REQUIRE(cu("cuCtxFromGreenCtx", &context, green) == kSuccess);
  REQUIRE(cu("cuCtxSetCurrent", context) == kSuccess);
  uint64_t address = 0;
  REQUIRE(cu("cuMemAlloc_v2", &address, 100 * kMiB) == kSuccess);
  CHECK(free_bytes() == alone - 100 * kMiB);
  REQUIRE(cu("cuCtxSetCurrent", no_pointer()) == kSuccess);
  // The program retains the primary context too: what was allocated outlives the green one.
  REQUIRE(cu("cuDevicePrimaryCtxRetain", &primary, 0U) == kSuccess);
  arm("cuGreenCtxDestroy", 719);
  CHECK(cu("cuGreenCtxDestroy", green) == 719);
  arm(nullptr, 0);
  REQUIRE(cu("cuGreenCtxDestroy", green) == kSuccess);
  CHECK(free_bytes() == alone - 100 * kMiB);
  REQUIRE(cu("cuMemFree_v2", address) == kSuccess);
  CHECK(free_bytes() == alone);
  // With the last reference to the primary context everything goes, here the green context's.
  REQUIRE(cu("cuGreenCtxCreate", &green, no_pointer(), 0U, 1U) == kSuccess);
  REQUIRE(cu("cuCtxSetCurrent", context) == kSuccess);
  REQUIRE(cu("cuMemAlloc_v2", &address, 100 * kMiB) == kSuccess);
  REQUIRE(cu("cuCtxSetCurrent", no_pointer()) == kSuccess);
  REQUIRE(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
  CHECK(free_bytes() == alone - 100 * kMiB);
  REQUIRE(cu("cuGreenCtxDestroy", green) == kSuccess);
  // The double keeps the block, which now is overhead.
  REQUIRE(cu("cuMemFree_v2", address) == kSuccess);
  overhead(0, 0);
  REQUIRE(cu("cuDevicePrimaryCtxRetain", &primary, 0U) == kSuccess);
  REQUIRE(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
  CHECK(free_bytes() >= at_first);
}

TEST_CASE("limits hold while NVML does not answer") {
  control<decltype(&recorder_set_nvml)>("recorder_set_nvml")(0);
  void* context = nullptr;
  uint64_t address = 0;
  CHECK(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
  CHECK(cu("cuMemAlloc_v2", &address, 2 * kLimit) == kOutOfMemory);
  CHECK(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
  control<decltype(&recorder_set_nvml)>("recorder_set_nvml")(1);
}

TEST_CASE("an NVML that hangs holds up no program and no limit, and counts again when it answers") {
  const auto set_nvml = control<decltype(&recorder_set_nvml)>("recorder_set_nvml");
  const auto overhead = control<decltype(&recorder_set_overhead)>("recorder_set_overhead");
  void *context = nullptr, *module = nullptr;
  uint64_t address = 0;
  const uint64_t at_first = free_bytes();
  overhead(100 * kMiB, 50 * kMiB);
  set_nvml(2);
  // The first context waits for a while; what comes then, in other threads too, asks no more.
  CHECK(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
  REQUIRE(cu("cuCtxSetCurrent", context) == kSuccess);
  CHECK(free_bytes() == at_first);
  CHECK(cu("cuMemAlloc_v2", &address, 2 * kLimit) == kOutOfMemory);
  std::vector<std::thread> threads;
  std::atomic<int> done = 0;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      void* loaded = nullptr;
      done += static_cast<int>(cu("cuModuleLoadData", &loaded, "image") == kSuccess &&
                               cu("cuModuleUnload", loaded) == kSuccess);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(done == 4);
#ifndef __SANITIZE_THREAD__  // it starts no threads in a child of fork
  // A child of fork asks anew. The double may still have more bytes from earlier tests than the limit: then the context is refused.
  const pid_t child = fork();
  if (child == 0) {
    set_nvml(1);
    void* own = nullptr;
    const Result result = cu("cuDevicePrimaryCtxRetain", &own, 0U);
    _exit(result == kOutOfMemory || free_bytes() <= kLimit - 100 * kMiB ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
#endif
  set_nvml(1);
  for (bool measured = false; !measured;) {
    REQUIRE(cu("cuModuleLoadData", &module, "image") == kSuccess);
    measured = free_bytes() < at_first;
    REQUIRE(cu("cuModuleUnload", module) == kSuccess);
  }
  CHECK(free_bytes() <= at_first - 100 * kMiB);
  REQUIRE(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
  overhead(0, 0);
}

#if !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)  // a sanitizer needs a thread's stack itself
TEST_CASE("a program that can start no thread asks NVML nothing, for it may hang, and counts once it can") {
  const auto overhead = control<decltype(&recorder_set_overhead)>("recorder_set_overhead");
  const auto looks = control<decltype(&recorder_nvml_looks)>("recorder_nvml_looks");
  void *context = nullptr, *module = nullptr;
  const uint64_t at_first = free_bytes(), looked = looks();
  overhead(100 * kMiB, 0);
  pthread_attr_t usual, huge;
  REQUIRE(pthread_getattr_default_np(&usual) == 0);
  REQUIRE(pthread_getattr_default_np(&huge) == 0);
  REQUIRE(pthread_attr_setstacksize(&huge, size_t{1} << 47) == 0);  // more than there are addresses
  REQUIRE(pthread_setattr_default_np(&huge) == 0);
  CHECK(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
  REQUIRE(cu("cuCtxSetCurrent", context) == kSuccess);
  CHECK(looks() == looked);
  CHECK(free_bytes() == at_first);
  REQUIRE(pthread_setattr_default_np(&usual) == 0);
  REQUIRE(cu("cuModuleLoadData", &module, "image") == kSuccess);
  CHECK(looks() > looked);
  CHECK(free_bytes() <= at_first - 100 * kMiB);
  REQUIRE(cu("cuModuleUnload", module) == kSuccess);
  REQUIRE(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
  overhead(0, 0);
  REQUIRE(pthread_attr_destroy(&usual) == 0);
  REQUIRE(pthread_attr_destroy(&huge) == 0);
}
#endif

TEST_CASE("every question for memory has the same answer") {
  uint64_t address = 0, total = 0, memory[3] = {}, memory_v2[5] = {};
  const uint64_t at_first = free_bytes();
  REQUIRE(cu("cuMemAlloc_v2", &address, 256 * kMiB) == kSuccess);
  CHECK(cu("cuDeviceTotalMem_v2", &total, 0U) == kSuccess);
  CHECK(total == kLimit);
  void* nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  REQUIRE(nvml != nullptr);
  using Query = int (*)(void*, uint64_t*);
  CHECK(reinterpret_cast<Query>(dlsym(nvml, "nvmlDeviceGetMemoryInfo"))(nullptr, memory) == 0);
  CHECK(reinterpret_cast<Query>(dlsym(nvml, "nvmlDeviceGetMemoryInfo_v2"))(nullptr, memory_v2) == 0);
  CHECK(memory[0] == kLimit);
  CHECK(memory[1] == at_first - 256 * kMiB);
  CHECK(memory[2] == kLimit - memory[1]);
  CHECK(memory_v2[1] == kLimit);
  CHECK(memory_v2[3] == memory[1]);
  CHECK(memory_v2[4] == memory[2]);
  REQUIRE(cu("cuMemFree_v2", address) == kSuccess);
}

TEST_CASE("pinned host memory has a limit of its own") {
  // A quarter of the host's memory, as nothing else is set.
  const auto host_bytes = control<decltype(&recorder_host_bytes)>("recorder_host_bytes");
  struct sysinfo host {};
  REQUIRE(sysinfo(&host) == 0);
  const uint64_t limit = uint64_t{host.totalram} * host.mem_unit / 4 / 4096 * 4096;
  const uint64_t at_first = free_bytes();
  std::vector<char> own(64);
  for (const char* name : {"cuMemHostAlloc", "cuMemAllocHost_v2"}) {
    INFO(name);
    void *first = nullptr, *second = nullptr;
    REQUIRE(cu(name, &first, limit - 8192, 0U) == kSuccess);
    CHECK(cu(name, &second, uint64_t{16384}, 0U) == kOutOfMemory);
    CHECK(cu("cuMemHostRegister_v2", static_cast<void*>(own.data()), uint64_t{16384}, 0U) == kOutOfMemory);
    CHECK(cu("cuMemHostRegister_v2", static_cast<void*>(own.data()), uint64_t{4096}, 0U) == kSuccess);
    CHECK(host_bytes() == limit - 8192);
    CHECK(free_bytes() == at_first);
    arm("cuMemFreeHost", 719);
    CHECK(cu("cuMemFreeHost", first) == 719);
    arm(nullptr, 0);
    CHECK(cu(name, &second, uint64_t{16384}, 0U) == kOutOfMemory);
    REQUIRE(cu("cuMemHostUnregister", static_cast<void*>(own.data())) == kSuccess);
    REQUIRE(cu("cuMemFreeHost", first) == kSuccess);
    arm(name, 304);
    CHECK(cu(name, &second, limit - 4096, 0U) == 304);
    arm(nullptr, 0);
    CHECK(cu(name, &second, limit - 4096, 0U) == kSuccess);
    REQUIRE(cu("cuMemFreeHost", second) == kSuccess);
  }
  CHECK(host_bytes() == 0);
}

TEST_CASE("a child of fork has books of its own") {
  const uint64_t at_first = free_bytes();
  uint64_t address = 0;
  REQUIRE(cu("cuMemAlloc_v2", &address, 600 * kMiB) == kSuccess);
  const pid_t child = fork();
  if (child == 0) {
    uint64_t free = 0, total = 0, mine = 0;
    const auto get = reinterpret_cast<Result (*)(uint64_t*, uint64_t)>(entry("cuMemAlloc_v2"));
    const auto info = reinterpret_cast<Result (*)(uint64_t*, uint64_t*)>(entry("cuMemGetInfo_v2"));
    if (info(&free, &total) != kSuccess || free != kLimit) _exit(1);
    if (get(&mine, 700 * kMiB) != kSuccess) _exit(2);
    if (get(&mine, 700 * kMiB) != kOutOfMemory) _exit(3);
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(free_bytes() == at_first - 600 * kMiB);
  REQUIRE(cu("cuMemFree_v2", address) == kSuccess);
}

TEST_CASE("100,000 live blocks are each known until they are freed, in any order, and no longer") {
  const uint64_t at_first = free_bytes();
  std::vector<uint64_t> live(100'000);
  for (uint64_t& address : live)
    if (cu("cuMemAlloc_v2", &address, 4096) != kSuccess) FAIL("no memory");
  CHECK(free_bytes() == at_first - live.size() * 4096);
  std::mt19937_64 random(1);
  std::shuffle(live.begin(), live.end(), random);
  for (size_t i = 0; i < live.size(); ++i) {
    if (cu("cuMemFree_v2", live[i]) != kSuccess) FAIL("block " << i);
    if (i % 10'000 == 0) CHECK(free_bytes() == at_first - (live.size() - i - 1) * 4096);
  }
  CHECK(free_bytes() == at_first);
}

TEST_CASE("threads that allocate at once never get more than the limit, and lose nothing") {
  const uint64_t at_first = free_bytes();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::vector<uint64_t> mine;
      for (int i = 0; i < 3000; ++i) {
        uint64_t address = 0;
        const Result result = cu("cuMemAlloc_v2", &address, static_cast<uint64_t>(t + 1) * 8 * kMiB);
        if (result == kSuccess)
          mine.push_back(address);
        else if (result != kOutOfMemory)
          ++wrong;
        if (control<decltype(&recorder_used_bytes)>("recorder_used_bytes")() >
            kLimit + (kLimit - at_first) + 64 * kMiB)
          ++wrong;
        if (!mine.empty() && (i % 3 != 0 || result != kSuccess)) {
          if (cu("cuMemFree_v2", mine.back()) != kSuccess) ++wrong;
          mine.pop_back();
        }
      }
      for (const uint64_t address : mine)
        if (cu("cuMemFree_v2", address) != kSuccess) ++wrong;
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(free_bytes() == at_first);
}
