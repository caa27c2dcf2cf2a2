// memory.cpp: the entry points that keep books: contexts, memory, what programs are told about it, symbols.
// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>

#include "recorder.hpp"

using namespace recorder;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace {

constexpr uint64_t kTotalBytes = uint64_t{80} << 30;

struct Block {
  uint64_t bytes;
  int device;
  uint64_t context;
  bool on_host;
};
struct OfDevice {
  uint64_t used = 0, contexts = 0, modules = 0;
  uint64_t graph_used = 0, graph_reserved = 0;
};
struct Books {
  std::mutex mutex;
  uint64_t next = uint64_t{1} << 32;
  std::map<uint64_t, Block> live;  // by address or handle
  OfDevice devices[device::kMostDevices];
  uint64_t context_bytes = 0, module_bytes = 0;
  uint64_t graph_bytes = 0;             // of each node of every graph
  uint64_t graph_nodes = 1;             // the first of the first device, and so on
  std::map<uint64_t, uint64_t> graphs;  // executable graphs that were not launched yet: bytes of each node
  std::map<uint64_t, uint64_t> host;    // pinned memory: real addresses, of which no byte is used
  uint64_t host_bytes = 0;
  int pools = 0;  // as recorder_set_pools() says
  uint64_t kept = 0, trims = 0;
  uint64_t host_offset = 0;  // between a pinned block's address and the device's for it
};
Books& books() {
  static Books* all = [] {
    auto* made = new Books;
    if (const char* bytes = std::getenv("RECORDER_CONTEXT_BYTES"))
      made->context_bytes = std::strtoull(bytes, nullptr, 10);
    return made;
  }();
  return *all;
}
int g_capturing = 0;
std::atomic<int> g_nvml = 1;  // 0: refuses; 1: answers; 2: hangs; 3: answers without this process
std::atomic<uint64_t> g_nvml_looks = 0;

// Pools keep memory of the first device only.
uint64_t in_use(const Books& b, int device) {
  const OfDevice& has = b.devices[device];
  return has.used + has.graph_reserved + (device == 0 ? b.kept : 0) + has.contexts * b.context_bytes +
         has.modules * b.module_bytes;
}
// The shared device learns what this process has.
void tell(const Books& b, int device) {
  if (device::on()) device::set_memory(device, in_use(b, device), false);
}
void count_module(int change) {
  const int here = current_device();
  const std::lock_guard lock(books().mutex);
  books().devices[here].modules += static_cast<uint64_t>(change);
  tell(books(), here);
}
uint64_t total_bytes(int device) {
  return device::on() ? device::total_bytes(device) : kTotalBytes;
}
uint64_t used_bytes(int device) {
  return device::on() ? device::used_bytes(device) : recorder_used_bytes_of(device);
}

}  // namespace

uint64_t recorder::allocate(uint64_t bytes, int device, bool on_host) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  if (on_host) {
    b.host_bytes += bytes;
    b.next += 4096;
    b.live[b.next] = {bytes, device, current_context(), true};
    return b.next;
  }
  if (bytes > total_bytes(device) - b.devices[device].used ||
      (device::on() && !device::set_memory(device, in_use(b, device) + bytes, true)))
    return 0;
  const uint64_t address = b.next;
  b.next += (bytes + 4095) / 4096 * 4096 + 4096;
  b.devices[device].used += bytes;
  b.live[address] = {bytes, device, current_context(), false};
  return address;
}
void recorder::count_host(int64_t bytes) {
  const std::lock_guard lock(books().mutex);
  books().host_bytes += static_cast<uint64_t>(bytes);
}
Result recorder::release(uint64_t address) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  const auto it = b.live.find(address);
  if (it == b.live.end()) return kInvalidValue;
  const int device = it->second.device;
  (it->second.on_host ? b.host_bytes : b.devices[device].used) -= it->second.bytes;
  b.live.erase(it);
  tell(b, device);
  return kSuccess;
}

namespace {

Result get(void* out, uint64_t bytes, int device = current_device()) {
  if (out == nullptr) return kInvalidValue;
  const uint64_t address = allocate(bytes, device);
  if (address == 0) return kOutOfMemory;
  std::memcpy(out, &address, sizeof address);
  return kSuccess;
}
// A device's own pool, and where others take memory from.
constexpr uint64_t kOwnPool = 0x4000;
int device_of_pool(P pool) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  const auto it = b.live.find(reinterpret_cast<uint64_t>(pool));
  if (it != b.live.end()) return it->second.device;
  const uint64_t device = reinterpret_cast<uint64_t>(pool) - kOwnPool;
  return device < device::kMostDevices ? static_cast<int>(device) : current_device();
}
// A pool of the host, as the program has made it.
bool is_host_pool(P pool) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  const auto it = b.live.find(reinterpret_cast<uint64_t>(pool));
  return it != b.live.end() && it->second.on_host;
}
Result get_pooled(void* out, uint64_t bytes, int device) {
  {
    Books& b = books();
    const std::lock_guard lock(b.mutex);
    b.kept -= std::min(b.kept, bytes);
  }
  return get(out, bytes, device);
}
Result get_from_pool(void* out, uint64_t bytes, P pool) {
  if (!is_host_pool(pool)) return get_pooled(out, bytes, device_of_pool(pool));
  const uint64_t address = allocate(bytes, current_device(), true);
  std::memcpy(out, &address, sizeof address);
  return kSuccess;
}
Result release_pooled(uint64_t address) {
  Books& b = books();
  {
    const std::lock_guard lock(b.mutex);
    const auto it = b.live.find(address);
    if (b.pools != 0 && it != b.live.end() && !it->second.on_host) b.kept += it->second.bytes;
  }
  return release(address);
}
Result pin(void* out, uint64_t bytes) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  b.host[reinterpret_cast<uint64_t>(memory)] = bytes;
  b.host_bytes += bytes;
  std::memcpy(out, &memory, sizeof memory);
  return kSuccess;
}
// The pinned block in which an address lies; its end if there is none.
std::map<uint64_t, uint64_t>::iterator pinned(uint64_t address) {
  Books& b = books();
  auto it = b.host.upper_bound(address);
  if (it == b.host.begin() || address - std::prev(it)->first >= std::prev(it)->second) return b.host.end();
  return std::prev(it);
}
uint64_t number(void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

}  // namespace

bool recorder::add_context(int device) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  if (device::on() && !device::set_memory(device, in_use(b, device) + b.context_bytes, true)) return false;
  ++b.devices[device].contexts;
  return true;
}
void recorder::forget_context(int device) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  --b.devices[device].contexts;
  tell(b, device);
}
void recorder::drop_context(int device, uint64_t context) {
  const std::set<uint64_t> stays = physical_handles();
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  --b.devices[device].contexts;
  for (auto it = b.live.begin(); it != b.live.end();) {
    if (stays.count(it->first) != 0 || it->second.context != context) {
      ++it;
    } else {
      (it->second.on_host ? b.host_bytes : b.devices[it->second.device].used) -= it->second.bytes;
      it = b.live.erase(it);
    }
  }
  tell(b, device);
  for (const auto& [address, bytes] : b.host) {
    munmap(reinterpret_cast<P>(address), bytes);
    b.host_bytes -= bytes;
  }
  b.host.clear();
}

#define BODY(name, parameters, ...)     \
  RECORDER_API Result name parameters { \
    RECORDER_NOTE(name, __VA_ARGS__)

// clang-format off
BODY(cuStreamIsCapturing, (P a, P b), a, b) *static_cast<int*>(b) = g_capturing || is_capturing(a, false); return kSuccess; }
BODY(cuStreamIsCapturing_ptsz, (P a, P b), a, b) *static_cast<int*>(b) = g_capturing || is_capturing(a, true); return kSuccess; }
BODY(cuModuleLoadData, (P a, P b), a, b) count_module(1); *static_cast<void**>(a) = reinterpret_cast<void*>(uintptr_t{0x2000}); return kSuccess; }
BODY(cuModuleUnload, (P a), a) count_module(-1); return kSuccess; }

BODY(cuMemAlloc_v2, (P a, L b), a, b) return get(a, b); }
BODY(cuMemAllocManaged, (P a, L b, I c), a, b, c) return get(a, b); }
BODY(cuMemAllocAsync, (P a, L b, P c), a, b, c) return get_pooled(a, b, device_of_stream(c)); }
BODY(cuMemAllocAsync_ptsz, (P a, L b, P c), a, b, c) return get_pooled(a, b, device_of_stream(c)); }
BODY(cuMemAllocFromPoolAsync, (P a, L b, P c, P d), a, b, c, d) return get_from_pool(a, b, c); }
BODY(cuMemAllocFromPoolAsync_ptsz, (P a, L b, P c, P d), a, b, c, d) return get_from_pool(a, b, c); }
BODY(cuMemPoolCreate, (P a, P b), a, b)
  int words[4] = {1, 0, 1, 0}; if (b != nullptr) std::memcpy(words, b, sizeof words);
  const bool on_host = words[0] != 2 && is_host_location(words[2]);  // 2: managed memory, which lies anywhere
  const uint64_t pool = allocate(0, words[2] == 1 ? words[3] : current_device(), on_host); std::memcpy(a, &pool, 8); return kSuccess; }
// Those of the host have a pool without the program's doing.
BODY(cuMemGetDefaultMemPool, (P a, P b, I c), a, b, c)
  int location[2] = {1, 0}; if (b != nullptr) std::memcpy(location, b, sizeof location);
  const bool on_host = c != 2 && is_host_location(location[0]);
  const uint64_t pool = allocate(0, location[0] == 1 ? location[1] : current_device(), on_host); std::memcpy(a, &pool, 8); return kSuccess; }
BODY(cuMemGetMemPool, (P a, P b, I c), a, b, c) return cuMemGetDefaultMemPool(a, b, c); }
// All pools are one, and none is in use: what is reserved is kept.
BODY(cuDeviceGetDefaultMemPool, (P a, I b), a, b) *static_cast<uint64_t*>(a) = kOwnPool + b; return kSuccess; }
BODY(cuMemPoolTrimTo, (P a, L b), a, b) const std::lock_guard lock(books().mutex); ++books().trims; if (books().pools == 1) books().kept = 0; return kSuccess; }
BODY(cuMemPoolGetAttribute, (P a, I b, P c), a, b, c) *static_cast<uint64_t*>(c) = b == 5 ? books().kept : 0; return kSuccess; }
BODY(cuMemAllocPitch_v2, (P a, P b, L c, L d, I e), a, b, c, d, e)
  const uint64_t pitch = (c + 511) / 512 * 512; std::memcpy(b, &pitch, sizeof pitch); return get(a, pitch * d); }
BODY(cuMemFree_v2, (L a), a) if (device::on()) device::wait_all(current_device()); return release(a); }
BODY(cuMemFreeAsync, (L a, P b), a, b) return release_pooled(a); }
BODY(cuMemFreeAsync_ptsz, (L a, P b), a, b) return release_pooled(a); }
BODY(cuMemHostAlloc, (P a, L b, I c), a, b, c) return pin(a, b); }
BODY(cuMemAllocHost_v2, (P a, L b), a, b) return pin(a, b); }
BODY(cuMemFreeHost, (P a), a)
  const std::lock_guard lock(books().mutex); const auto it = books().host.find(number(a)); if (it == books().host.end()) return kInvalidValue;
  munmap(a, it->second); books().host_bytes -= it->second; books().host.erase(it); return kSuccess; }
BODY(cuMemHostGetDevicePointer_v2, (P a, P b, I c), a, b, c)
  const uint64_t address = number(b) + books().host_offset; std::memcpy(a, &address, sizeof address); return kSuccess; }
// Attributes: 2 the type of memory (1 host, 2 device), 4 the host's pointer, which memory of the device has not got.
BODY(cuPointerGetAttribute, (P a, I b, L c), a, b, c)
  const bool mapped = is_on_host(c);
  const std::lock_guard lock(books().mutex); const bool host = mapped || pinned(c) != books().host.end();
  if (b == 2) { const uint32_t type = host ? 1 : 2; std::memcpy(a, &type, sizeof type); }
  if (b == 4 && !host) return kInvalidValue;
  if (b == 4) std::memcpy(a, &c, sizeof c);
  if (const auto it = books().live.find(c); b == 9 && it != books().live.end()) std::memcpy(a, &it->second.device, 4);
  return kSuccess; }
BODY(cuPointerGetAttributes, (I a, P b, P c, L d), a, b, c, d)
  for (I i = 0; i < a && i < 8; ++i)
    if (P to = static_cast<P*>(c)[i]; to != nullptr && cuPointerGetAttribute(to, static_cast<I*>(b)[i], d) != kSuccess) std::memset(to, 0, 8);
  return kSuccess; }
BODY(cuArrayCreate_v2, (P a, P b), a, b)
  const auto* words = static_cast<const uint64_t*>(b); return get(a, words[0] * (words[1] ? words[1] : 1) * 4); }
BODY(cuArray3DCreate_v2, (P a, P b), a, b)
  const auto* words = static_cast<const uint64_t*>(b); return get(a, words[0] * (words[1] ? words[1] : 1) * (words[2] ? words[2] : 1) * 4); }
BODY(cuMipmappedArrayCreate, (P a, P b, I c), a, b, c) return get(a, 1 << 20); }
BODY(cuArrayDestroy, (P a), a) return release(number(a)); }
BODY(cuMipmappedArrayDestroy, (P a), a) return release(number(a)); }
BODY(cuMemImportFromShareableHandle, (P a, P b, I c), a, b, c) return get(a, 0); }
BODY(cuMemGetAllocationPropertiesFromHandle, (P a, L b), a, b)
  const int words[] = {1, 0, 1, 0}; std::memcpy(a, words, sizeof words); return kSuccess; }
BODY(cuImportExternalMemory, (P a, P b), a, b) return get(a, 0); }
BODY(cuDestroyExternalMemory, (P a), a) return release(number(a)); }
// The first byte of a handle is the device.
BODY(cuIpcOpenMemHandle_v2, (P a, B64 b, I c), a, b, c) return get(a, 0, b.bytes[0] < device::count() ? b.bytes[0] : current_device()); }
BODY(cuIpcCloseMemHandle, (L a), a) return release(a); }
BODY(cuMemPoolImportPointer, (P a, P b, P c), a, b, c) return get(a, 0); }
BODY(cuMemGetAddressRange_v2, (P a, P b, L c), a, b, c)
  const uint64_t bytes = 64 << 20; std::memcpy(a, &c, 8); std::memcpy(b, &bytes, 8); return kSuccess; }
BODY(cuGraphGetNodes, (P a, P b, P c), a, b, c)
  const uint64_t nodes = books().graph_bytes != 0 ? books().graph_nodes : 0; std::memcpy(c, &nodes, 8);
  for (uint64_t i = 0; b != nullptr && i < nodes; ++i) static_cast<uint64_t*>(b)[i] = i + 1;
  return kSuccess; }
BODY(cuGraphNodeGetType, (P a, P b), a, b) *static_cast<int*>(b) = 10; return kSuccess; }
BODY(cuGraphMemAllocNodeGetParams, (P a, P b), a, b)
  const int words[] = {1, 0, 1, static_cast<int>(number(a)) - 1}; std::memcpy(b, words, sizeof words); std::memcpy(static_cast<char*>(b) + 104, &books().graph_bytes, 8); return kSuccess; }
BODY(cuGraphInstantiateWithFlags, (P a, P b, L c), a, b, c)
  const Result result = get(a, 0); if (result != kSuccess) return result;
  { const std::lock_guard lock(books().mutex); books().graphs[number(*static_cast<void**>(a))] = books().graph_bytes; }
  instantiated(*static_cast<void**>(a), b); return result; }
BODY(cuGraphExecDestroy, (P a), a)
  { const std::lock_guard lock(books().mutex); books().graphs.erase(number(a)); }
  exec_destroyed(a); return release(number(a)); }
// Attributes of a device's graph memory: 0 what is used, 2 what the driver keeps for graphs.
BODY(cuDeviceGetGraphMemAttribute, (I a, I b, P c), a, b, c)
  const std::lock_guard lock(books().mutex); const OfDevice& has = books().devices[a];
  if (b == 0 || b == 2) std::memcpy(c, b == 0 ? &has.graph_used : &has.graph_reserved, 8);
  return kSuccess; }
BODY(cuDeviceGraphMemTrim, (I a), a)
  const std::lock_guard lock(books().mutex); books().devices[a].graph_reserved = books().devices[a].graph_used; tell(books(), static_cast<int>(a)); return kSuccess; }
// clang-format on

void recorder::note_graph_launch(P exec) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  const auto it = b.graphs.find(number(exec));
  if (it == b.graphs.end()) return;
  for (uint64_t device = 0; it->second != 0 && device < b.graph_nodes; ++device) {
    OfDevice& has = b.devices[device];
    has.graph_used += it->second;
    has.graph_reserved = std::max(has.graph_reserved, has.graph_used);
    tell(b, static_cast<int>(device));
  }
  b.graphs.erase(it);
}
RECORDER_API void recorder_free_graph_memory() {
  const std::lock_guard lock(books().mutex);
  for (OfDevice& has : books().devices) has.graph_used = 0;
}
RECORDER_API uint64_t recorder_used_bytes_of(int device) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  return in_use(b, device);
}
RECORDER_API uint64_t recorder_used_bytes() {
  return recorder_used_bytes_of(0);
}
RECORDER_API Result cuMemGetInfo_v2(P a, P b) {
  RECORDER_NOTE(cuMemGetInfo_v2, a, b)
  if (a != nullptr) *static_cast<uint64_t*>(a) = total_bytes(current_device()) - used_bytes(current_device());
  if (b != nullptr) *static_cast<uint64_t*>(b) = total_bytes(current_device());
  return kSuccess;
}
RECORDER_API Result cuDeviceTotalMem_v2(P a, I b) {
  RECORDER_NOTE(cuDeviceTotalMem_v2, a, b)
  *static_cast<uint64_t*>(a) = total_bytes(static_cast<int>(b));
  return kSuccess;
}

// ---- symbols ------------------------------------------------------------------------------------------------------------------------

namespace {
struct Row {
  const char* name;
  const char* base;
  int version;
};
constexpr Row kRows[] = {
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) {#name, #base, version},
#define GPUSHARE_NAME(cls, name)
#include "shim/driver_table.inc"
#undef GPUSHARE_ENTRY
#undef GPUSHARE_NAME
};
void* find(const char* base, int version, uint64_t flags) {
  void* found = nullptr;
  int best = 0;
  for (int i = 0; i < static_cast<int>(sizeof kRows / sizeof *kRows); ++i) {
    if (std::strcmp(kRows[i].base, base) != 0 || kRows[i].version > version) continue;
    const bool per_thread = std::strstr(kRows[i].name, "_pt") != nullptr;
    if (per_thread && (flags & 2) == 0) continue;
    const int rank = kRows[i].version + (per_thread ? 1000000 : 0);
    if (rank < best) continue;
    best = rank;
    found = recorder_function(i);
  }
  return found;
}
}  // namespace

// Names that the table has not got: recorder.h.
RECORDER_API Result cuOfTomorrow() {
  return kSuccess;
}
RECORDER_API Result cuMemAlloc_v9() {
  return kSuccess;
}
RECORDER_API Result cuGetProcAddress_v2(P a, P b, I c, L d, P e) {
  RECORDER_NOTE(cuGetProcAddress_v2, a, b, c, d, e)
  void* found = std::strcmp(static_cast<const char*>(a), "cuOfTomorrow") == 0
                    ? reinterpret_cast<void*>(cuOfTomorrow)
                    : find(static_cast<const char*>(a), static_cast<int>(c), d);
  static const char* const newest = std::getenv("RECORDER_VERSION");
  if (newest != nullptr && found != nullptr && static_cast<int>(c) >= std::atoi(newest))
    found = reinterpret_cast<void*>(cuMemAlloc_v9);
  if (e != nullptr) *static_cast<int*>(e) = found != nullptr ? 0 : 1;
  if (found != nullptr) *static_cast<void**>(b) = found;
  return found != nullptr ? kSuccess : kNotFound;
}
RECORDER_API Result cuGetProcAddress(P a, P b, I c, L d) {
  RECORDER_NOTE(cuGetProcAddress, a, b, c, d)
  return cuGetProcAddress_v2(a, b, c, d, nullptr);
}

// ---- NVML ---------------------------------------------------------------------------------------------------------------------------

namespace {
bool nvml_answers() {
  while (g_nvml == 2) usleep(1000);
  return g_nvml != 0;
}
// A device's handle is its number and 1; no handle: the first.
int device_of(void* handle) {
  return handle == nullptr ? 0 : static_cast<int>(number(handle)) - 1;
}
}  // namespace
RECORDER_API int nvmlInit_v2() {
  return nvml_answers() ? 0 : 9;
}
RECORDER_API int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** out_device) {
  for (int device = 0; nvml_answers() && device < device::count(); ++device)
    if (std::strtoul(address + 5, nullptr, 16) == device::bus_of(device)) {
      *out_device = reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
      return 0;
    }
  return 6;
}
RECORDER_API int nvmlDeviceGetPciInfo_v3(void* device, char* info) {
  std::snprintf(info + 36, 32, "00000000:%02X:00.0", device::bus_of(device_of(device)));
  return 0;
}
// This process and others, without a shared device; 7: there is no room for all.
namespace {
int g_nvml_others = 0;
int list_processes(uint32_t* count, char* processes, size_t bytes, uint64_t used) {
  const uint32_t room = *count, all = static_cast<uint32_t>(g_nvml_others) + 1;
  *count = all;
  for (uint32_t i = 0; i < all && all <= room; ++i) {
    const int32_t process = i + 1 < all || g_nvml == 3 ? 1 : getpid();
    std::memset(processes + i * bytes, 0, bytes);
    std::memcpy(processes + i * bytes, &process, sizeof process);
    if (bytes > 8) std::memcpy(processes + i * bytes + 8, &used, sizeof used);
  }
  return all <= room ? 0 : 7;
}
}  // namespace
RECORDER_API void recorder_set_nvml_others(int processes) {
  g_nvml_others = processes;
}
RECORDER_API int nvmlDeviceGetAccountingPids(void*, uint32_t* count, char* processes) {
  return list_processes(count, processes, 4, 0);
}
RECORDER_API int nvmlDeviceGetRunningProcessDetailList(void* handle, char* list) {
  char* processes = nullptr;
  std::memcpy(&processes, list + 16, sizeof processes);
  return list_processes(reinterpret_cast<uint32_t*>(list + 8), processes, 32,
                        recorder_used_bytes_of(device_of(handle)));
}
RECORDER_API int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, uint32_t* count, char* processes) {
  ++g_nvml_looks;
  if (!nvml_answers() || *count < 1) return 9;
  if (!device::on()) return list_processes(count, processes, 24, recorder_used_bytes_of(device_of(handle)));
  recorder_process all[32] = {};
  recorder_device device;
  const int known = recorder_device_read(device::path_of(device_of(handle)).c_str(), &device, all, 32);
  int live = 0;
  for (int i = 0; i < known; ++i)
    if (all[i].alive != 0) all[live++] = all[i];
  constexpr uint32_t kInsufficientSize = 7;
  const uint32_t room = *count;
  *count = static_cast<uint32_t>(live);
  for (uint32_t i = 0; i < *count && i < room; ++i) {
    std::memcpy(processes + 24 * i, &all[i].pid, sizeof all[i].pid);
    std::memcpy(processes + 24 * i + 8, &all[i].memory_bytes, sizeof all[i].memory_bytes);
  }
  return room < *count ? kInsufficientSize : 0;
}
RECORDER_API int nvmlDeviceGetMemoryInfo(void* device, uint64_t* memory) {
  const uint64_t used = used_bytes(device_of(device));
  memory[0] = total_bytes(device_of(device));
  memory[1] = memory[0] - used;
  memory[2] = used;
  return 0;
}
// Of an NVML of the future.
RECORDER_API int nvmlDeviceGetMemoryInfo_v9() {
  return 0;
}
RECORDER_API int nvmlDeviceGetMemoryInfo_v2(void* device, uint64_t* memory) {
  memory[2] = 0;
  uint64_t old[3];
  nvmlDeviceGetMemoryInfo(device, old);
  memory[1] = old[0];
  memory[3] = old[1];
  memory[4] = old[2];
  return 0;
}

// Limits of cgroups, as of r615: the last that was asked for. Others than root, and older drivers, refuse (recorder_set_limits).
namespace {
std::atomic<int> g_limits_answer = 0;
struct CgroupLimits {
  char cgroup[256] = "";
  uint64_t soft = 0, hard = 0, calls = 0;
} g_limits;
std::mutex g_limits_mutex;
}  // namespace
RECORDER_API int nvmlDeviceSetMemoryLimits_v1(void*, const void* limits) {
  struct {
    const char* cgroup;
    uint64_t soft, hard;
  } asked{};
  std::memcpy(&asked, limits, sizeof asked);
  const std::lock_guard lock(g_limits_mutex);
  ++g_limits.calls;
  if (g_limits_answer != 0) return g_limits_answer;
  std::snprintf(g_limits.cgroup, sizeof g_limits.cgroup, "%s", asked.cgroup);
  g_limits.soft = asked.soft;
  g_limits.hard = asked.hard;
  return 0;
}
RECORDER_API void recorder_set_limits(int answer) {
  g_limits_answer = answer;
}
RECORDER_API uint64_t recorder_limits(char* cgroup, uint64_t size, uint64_t* soft, uint64_t* hard) {
  const std::lock_guard lock(g_limits_mutex);
  std::snprintf(cgroup, size, "%s", g_limits.cgroup);
  *soft = g_limits.soft;
  *hard = g_limits.hard;
  return g_limits.calls;
}

RECORDER_API void recorder_set_overhead(uint64_t context_bytes, uint64_t module_bytes) {
  const std::lock_guard lock(books().mutex);
  books().context_bytes = context_bytes;
  books().module_bytes = module_bytes;
}
RECORDER_API uint64_t recorder_host_bytes() {
  const std::lock_guard lock(books().mutex);
  return books().host_bytes;
}
RECORDER_API void recorder_set_host_offset(uint64_t bytes) {
  books().host_offset = bytes;
}
void recorder::pools_synchronized() {
  if (books().pools == 2) books().pools = 1;
}
RECORDER_API void recorder_set_pools(int mode) {
  books().pools = mode;
  books().kept = 0;
}
RECORDER_API uint64_t recorder_trims() {
  return books().trims;
}
RECORDER_API void recorder_set_capturing(int capturing) {
  g_capturing = capturing;
}
RECORDER_API void recorder_set_nvml(int answers) {
  g_nvml = answers;
}
RECORDER_API uint64_t recorder_nvml_looks() {
  return g_nvml_looks;
}
RECORDER_API void recorder_set_graph_bytes(uint64_t bytes) {
  books().graph_bytes = bytes;
}
RECORDER_API void recorder_set_graph_devices(int devices) {
  books().graph_nodes = static_cast<uint64_t>(devices);
}
