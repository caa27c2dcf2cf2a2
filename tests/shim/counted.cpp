// Where memory counts: on the device unless it is known to be the host's, and then as pinned memory. GPUSHARE_MEMORY=64M,
// GPUSHARE_PINNED=64M. Run with the shim preloaded over the recording driver.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "through_shim.hpp"

namespace {

constexpr uint64_t kMiB = 1 << 20, kLimit = 64 * kMiB;

struct Location {
  int32_t type, id;
};
struct Properties {  // of physical memory and of pools
  int32_t type, handle_types;
  Location location;
  uint64_t rest[14];
};
constexpr int32_t kPinnedMemory = 1, kManaged = 2;

bool is_host(int32_t location_type) {
  return location_type >= 2 && location_type <= 4;
}
uint64_t free_bytes() {
  uint64_t free = 0, total = 0;
  REQUIRE(cu("cuMemGetInfo_v2", &free, &total) == kSuccess);
  CHECK(total == kLimit);
  return free;
}
uint64_t on_device() {
  return control<decltype(&recorder_used_bytes)>("recorder_used_bytes")();
}
uint64_t on_host() {
  return control<decltype(&recorder_host_bytes)>("recorder_host_bytes")();
}
void* no_pointer() {
  return nullptr;
}

// Takes memory in steps of 16 MiB until it is refused, and gives it back.
template <class Get, class Free>
void take_all(Get get, Free give_back, bool host) {
  const uint64_t device_before = on_device(), host_before = on_host();
  std::vector<uint64_t> all;
  for (uint64_t one = 0; all.size() < 100 && get(&one) == kSuccess;) all.push_back(one);
  CHECK(all.size() == 4);
  CHECK(free_bytes() == (host ? kLimit : 0));
  CHECK(on_device() - device_before == (host ? 0 : kLimit));
  CHECK(on_host() - host_before == (host ? kLimit : 0));
  if (host) {  // one limit with what is pinned otherwise
    void* pinned = nullptr;
    CHECK(cu("cuMemHostAlloc", &pinned, uint64_t{4096}, 0U) == kOutOfMemory);
  }
  for (const uint64_t one : all) CHECK(give_back(one) == kSuccess);
  CHECK(free_bytes() == kLimit);
  CHECK(on_device() == device_before);
  CHECK(on_host() == host_before);
}

Result get_from(void* pool, uint64_t* out) {
  return cu("cuMemAllocFromPoolAsync", out, 16 * kMiB, pool, no_pointer());
}
Result give_back_to_pool(uint64_t address) {
  return cu("cuMemFreeAsync", address, no_pointer());
}

}  // namespace

TEST_CASE("physical memory counts on the device unless it is known to be the host's") {
  // Beyond 6 there are no types of a location yet.
  for (int32_t type = 0; type <= 9; ++type) {
    INFO("location " << type);
    const Properties properties{kPinnedMemory, 0, {type, type == 6 ? 3 << 8 : 0}, {}};
    take_all([&](uint64_t* out) { return cu("cuMemCreate", out, 16 * kMiB, &properties, uint64_t{0}); },
             [](uint64_t handle) { return cu("cuMemRelease", handle); }, is_host(type));
  }
}

TEST_CASE("memory of pools counts on the device unless the pool is known to be the host's") {
  for (const int32_t memory : {kPinnedMemory, kManaged})
    for (int32_t type = 0; type <= 7; ++type) {
      INFO("memory " << memory << ", location " << type);
      const bool host = memory != kManaged && is_host(type);
      const Properties properties{memory, 0, {type, 0}, {}};
      void* pool = nullptr;
      REQUIRE(cu("cuMemPoolCreate", &pool, &properties) == kSuccess);
      take_all([&](uint64_t* out) { return get_from(pool, out); }, give_back_to_pool, host);
      CHECK(cu("cuMemPoolDestroy", pool) == kSuccess);
      // The pools that the driver has without the program's doing.
      for (const char* name : {"cuMemGetDefaultMemPool", "cuMemGetMemPool"}) {
        REQUIRE(cu(name, &pool, &properties.location, static_cast<unsigned>(memory)) == kSuccess);
        take_all([&](uint64_t* out) { return get_from(pool, out); }, give_back_to_pool, host);
      }
    }
}

TEST_CASE("imported memory counts as far as its mappings reach") {
  uint64_t handle = 0, other = 0;
  const uint64_t base = uint64_t{1} << 41;
  const auto map = [&](uint64_t at, uint64_t mebibytes, uint64_t offset) {
    return cu("cuMemMap", at, mebibytes * kMiB, offset * kMiB, handle, uint64_t{0});
  };
  REQUIRE(cu("cuMemImportFromShareableHandle", &handle, no_pointer(), 1U) == kSuccess);
  REQUIRE(map(base, 2, 0) == kSuccess);
  CHECK(free_bytes() == kLimit - 2 * kMiB);
  REQUIRE(map(base + 64 * kMiB, 16, 16) == kSuccess);
  CHECK(free_bytes() == kLimit - 32 * kMiB);
  REQUIRE(map(base + 128 * kMiB, 8, 0) == kSuccess);
  CHECK(free_bytes() == kLimit - 32 * kMiB);
  CHECK(map(base + 256 * kMiB, 32, 48) == kOutOfMemory);
  CHECK(free_bytes() == kLimit - 32 * kMiB);
  REQUIRE(cu("cuMemUnmap", base, 2 * kMiB) == kSuccess);
  REQUIRE(cu("cuMemUnmap", base + 64 * kMiB, 16 * kMiB) == kSuccess);
  REQUIRE(cu("cuMemUnmap", base + 128 * kMiB, 8 * kMiB) == kSuccess);
  REQUIRE(cu("cuMemRelease", handle) == kSuccess);
  CHECK(free_bytes() == kLimit);
  // A mapping that the driver refuses leaves what was known of the memory.
  REQUIRE(cu("cuMemImportFromShareableHandle", &other, no_pointer(), 1U) == kSuccess);
  handle = other;
  arm("cuMemMap", 719);
  CHECK(map(base, 2, 0) == 719);
  arm(nullptr, 0);
  REQUIRE(cu("cuMemRelease", handle) == kSuccess);
  CHECK(free_bytes() == kLimit);
}

TEST_CASE("memory of a graph outlives the executable graph until the driver gives it back") {
  control<decltype(&recorder_set_graph_bytes)>("recorder_set_graph_bytes")(40 * kMiB);
  const uint64_t before = on_device();
  const auto instantiate = [](uint64_t* out) {
    return cu("cuGraphInstantiateWithFlags", out, reinterpret_cast<void*>(9), uint64_t{0});
  };
  const auto destroy = [](uint64_t exec) { return cu("cuGraphExecDestroy", reinterpret_cast<void*>(exec)); };
  uint64_t exec = 0, address = 0;
  // One that was never launched has no memory.
  REQUIRE(instantiate(&exec) == kSuccess);
  CHECK(free_bytes() == 24 * kMiB);
  REQUIRE(destroy(exec) == kSuccess);
  CHECK(free_bytes() == kLimit);
  REQUIRE(instantiate(&exec) == kSuccess);
  REQUIRE(cu("cuGraphLaunch", reinterpret_cast<void*>(exec), no_pointer()) == kSuccess);
  REQUIRE(destroy(exec) == kSuccess);
  CHECK(free_bytes() == 24 * kMiB);
  CHECK(instantiate(&exec) == kOutOfMemory);
  CHECK(cu("cuMemAlloc_v2", &address, 32 * kMiB) == kOutOfMemory);
  CHECK(on_device() == before + 40 * kMiB);
  // Freed, the driver keeps it for graphs. The next allocation that needs it has it given back.
  const auto free_all = control<decltype(&recorder_free_graph_memory)>("recorder_free_graph_memory");
  free_all();
  CHECK(free_bytes() == 24 * kMiB);
  REQUIRE(cu("cuMemAlloc_v2", &address, 32 * kMiB) == kSuccess);
  CHECK(on_device() == before + 32 * kMiB);
  REQUIRE(cu("cuMemFree_v2", address) == kSuccess);
  // Or the program does.
  REQUIRE(instantiate(&exec) == kSuccess);
  REQUIRE(cu("cuGraphLaunch_ptsz", reinterpret_cast<void*>(exec), no_pointer()) == kSuccess);
  REQUIRE(destroy(exec) == kSuccess);
  free_all();
  REQUIRE(cu("cuDeviceGraphMemTrim", 0U) == kSuccess);
  CHECK(free_bytes() == kLimit);
  CHECK(on_device() == before);
  control<decltype(&recorder_set_graph_bytes)>("recorder_set_graph_bytes")(0);
}

TEST_CASE("a limit of the context that makes it grow counts at once") {
  const auto overhead = control<decltype(&recorder_set_overhead)>("recorder_set_overhead");
  void* context = nullptr;
  uint64_t address = 0;
  overhead(8 * kMiB, 0);
  REQUIRE(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
  CHECK(free_bytes() == 56 * kMiB);
  overhead(48 * kMiB, 0);
  REQUIRE(cu("cuCtxSetLimit", 2U, uint64_t{40 * kMiB}) == kSuccess);
  CHECK(free_bytes() == 16 * kMiB);
  CHECK(cu("cuMemAlloc_v2", &address, 17 * kMiB) == kOutOfMemory);
  // Beyond what the group may have: it is there, so nothing else is given.
  overhead(80 * kMiB, 0);
  REQUIRE(cu("cuCtxSetLimit", 2U, uint64_t{72 * kMiB}) == kSuccess);
  CHECK(free_bytes() == 0);
  CHECK(cu("cuMemAlloc_v2", &address, uint64_t{512}) == kOutOfMemory);
  overhead(0, 0);
  REQUIRE(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
  CHECK(free_bytes() == kLimit);
}

TEST_CASE("NVML's lists have the group's processes alone, however many others there are") {
  struct Details {
    uint32_t version, mode, count;
    void* processes;
  };
  control<decltype(&recorder_set_nvml_others)>("recorder_set_nvml_others")(5000);
  void* const nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  REQUIRE(nvml != nullptr);
  void* context = nullptr;
  control<decltype(&recorder_set_overhead)>("recorder_set_overhead")(8 * kMiB, 0);
  REQUIRE(cu("cuDevicePrimaryCtxRetain", &context, 0U) == kSuccess);
  CHECK(free_bytes() == 56 * kMiB);  // found among them
  using List = int (*)(void*, uint32_t*, void*);
  for (const char* name : {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetAccountingPids"}) {
    INFO(name);
    uint32_t count = 2, processes[12] = {};
    CHECK(reinterpret_cast<List>(dlsym(nvml, name))(nullptr, &count, processes) == 0);
    CHECK(count == 1);
    CHECK(processes[0] == static_cast<uint32_t>(getpid()));
  }
  uint32_t processes[16] = {};
  Details details{1, 3, 2, processes};
  using Detailed = int (*)(void*, Details*);
  const auto list = reinterpret_cast<Detailed>(dlsym(nvml, "nvmlDeviceGetRunningProcessDetailList"));
  CHECK(list(nullptr, &details) == 0);
  CHECK(details.count == 1);
  CHECK(processes[0] == static_cast<uint32_t>(getpid()));
  details = {1, 3, 0, nullptr};
  CHECK(list(nullptr, &details) == 7);  // insufficient size
  CHECK(details.count == 1);
  control<decltype(&recorder_set_overhead)>("recorder_set_overhead")(0, 0);
  control<decltype(&recorder_set_nvml_others)>("recorder_set_nvml_others")(0);
  REQUIRE(cu("cuDevicePrimaryCtxRelease_v2", 0U) == kSuccess);
}

TEST_CASE("each entry that makes or opens something is counted, or is known to have no memory of its own") {
  // Without memory, or of memory that counts by another entry.
  const std::vector<std::string> without = {
      "cuMemAddressReserve",                 // addresses
      "cuMemPoolImportFromShareableHandle",  // of which only pointers are taken: cuMemPoolImportPointer
      "cuMulticastCreate",                   // memory is bound to it that cuMemCreate has made
      "cuLogicalEndpointCreate",             // the same
      "cuLogicalEndpointImport",             // a name of memory on another machine
      "cuGraphAddMemAllocNode",              // counts when the graph is instantiated
      "cuGraphCreate",
      "cuGraphConditionalHandleCreate",
      "cuGraphRetainUserObject",
      "cuUserObjectRetain",
      "cuStreamCreate",
      "cuStreamCreateWithPriority",
      "cuEventCreate",
      "cuEventCreateFromEGLSync",
      "cuGreenCtxStreamCreate",  // measured with the context, as streams and events
      "cuTexRefCreate",
      "cuTexObjectCreate",
      "cuSurfObjectCreate",
      "cuUserObjectCreate",
      "cuLinkCreate",
      "cuImportExternalSemaphore",
      "cuIpcOpenEventHandle",
      "cuGLCtxCreate",
      "cuVDPAUCtxCreate",  // joined at first sight
      "cuFuncLoad",        // measured again and again
      "cuStreamAttachMemAsync",
      "cuModuleGetLoadingMode",
      "cuFuncIsLoaded",
      "cuLinkAddData",
      "cuLinkAddFile",
      "cuLinkComplete",
      "cuLinkDestroy"};
  const std::vector<std::string> makers = {"Alloc",       "Create", "Import", "Open",
                                           "Instantiate", "Retain", "Load",   "HostRegister"};
  int counted = 0;
  for (const auto& row : gpushare::shim::kEntryInfo) {
    const std::string name = row.name;
    const std::string base = row.base != nullptr ? row.base : name.substr(0, name.find("_v"));
    if (std::none_of(makers.begin(), makers.end(),
                     [&](const std::string& part) { return base.find(part) != std::string::npos; }))
      continue;
    if (std::find(without.begin(), without.end(), base) != without.end()) continue;
    // Answers on these things, and what sets or frees them.
    const char* const asks[] = {"Get", "Properties", "TensorMap", "Unregister", "Destroy"};
    if (row.cls == gpushare::shim::Class::pass &&
        std::any_of(std::begin(asks), std::end(asks),
                    [&](const char* part) { return base.find(part) != std::string::npos; }))
      continue;
    INFO(name);
    CHECK((row.cls == gpushare::shim::Class::charge || row.cls == gpushare::shim::Class::count));
    ++counted;
  }
  CHECK(counted > 40);
}
