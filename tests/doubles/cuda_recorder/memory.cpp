// memory.cpp: the entry points that keep books: contexts, memory, what programs are told about it, symbols.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "recorder.hpp"

using namespace recorder;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace {

constexpr uint64_t kTotalBytes = uint64_t{80} << 30;
constexpr const char* kAddress = "0000:3b:00.0";

struct Books {
  std::mutex mutex;
  uint64_t next = uint64_t{1} << 32;
  std::map<uint64_t, uint64_t> live;  // address or handle -> bytes
  uint64_t used = 0;
  uint64_t contexts = 0, modules = 0;
  uint64_t context_bytes = 0, module_bytes = 0;
  uint64_t primary = 0;      // references
  uint64_t graph_bytes = 0;  // of the only node of every graph
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
bool g_nvml = true;

uint64_t allocate(uint64_t bytes) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  if (bytes > kTotalBytes - b.used) return 0;
  const uint64_t address = b.next;
  b.next += (bytes + 4095) / 4096 * 4096 + 4096;
  b.used += bytes;
  b.live[address] = bytes;
  return address;
}
Result get(void* out, uint64_t bytes) {
  if (out == nullptr) return kInvalidValue;
  const uint64_t address = allocate(bytes);
  if (address == 0) return kOutOfMemory;
  std::memcpy(out, &address, sizeof address);
  return kSuccess;
}
Result release(uint64_t address) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  const auto it = b.live.find(address);
  if (it == b.live.end()) return kInvalidValue;
  b.used -= it->second;
  b.live.erase(it);
  return kSuccess;
}
uint64_t number(void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
Result made_context(void* out) {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  ++b.contexts;
  void* context = reinterpret_cast<void*>(uintptr_t{0x1000});
  if (out != nullptr) std::memcpy(out, &context, sizeof context);
  return kSuccess;
}

}  // namespace

#define BODY(name, parameters, ...)     \
  RECORDER_API Result name parameters { \
    RECORDER_NOTE(name, __VA_ARGS__)

// clang-format off
BODY(cuCtxGetCurrent, (P a), a) *static_cast<void**>(a) = reinterpret_cast<void*>(uintptr_t{0x1000}); return kSuccess; }
BODY(cuDeviceGetCount, (P a), a) *static_cast<int*>(a) = 1; return kSuccess; }
BODY(cuCtxGetDevice, (P a), a) *static_cast<int*>(a) = 0; return kSuccess; }
BODY(cuDeviceGetPCIBusId, (P a, I b, I c), a, b, c) std::strncpy(static_cast<char*>(a), kAddress, b); return kSuccess; }
BODY(cuStreamIsCapturing, (P a, P b), a, b) *static_cast<int*>(b) = g_capturing; return kSuccess; }
BODY(cuStreamIsCapturing_ptsz, (P a, P b), a, b) *static_cast<int*>(b) = g_capturing; return kSuccess; }
BODY(cuCtxCreate_v2, (P a, I b, I c), a, b, c) return made_context(a); }
BODY(cuCtxCreate_v4, (P a, P b, I c, I d), a, b, c, d) return made_context(a); }
// All contexts are one: with any that is destroyed go all blocks.
BODY(cuCtxDestroy_v2, (P a), a)
  const std::lock_guard lock(books().mutex); --books().contexts; books().live.clear(); books().used = 0; return kSuccess; }
BODY(cuDevicePrimaryCtxRetain, (P a, I b), a, b) return books().primary++ == 0 ? made_context(a) : kSuccess; }
BODY(cuDevicePrimaryCtxRelease_v2, (I a), a) if (books().primary > 0 && --books().primary == 0) --books().contexts; return kSuccess; }
BODY(cuDevicePrimaryCtxGetState, (I a, P b, P c), a, b, c) *static_cast<int*>(c) = books().primary > 0; return kSuccess; }
BODY(cuModuleLoadData, (P a, P b), a, b) ++books().modules; *static_cast<void**>(a) = reinterpret_cast<void*>(uintptr_t{0x2000}); return kSuccess; }
BODY(cuModuleUnload, (P a), a) --books().modules; return kSuccess; }

BODY(cuMemAlloc_v2, (P a, L b), a, b) return get(a, b); }
BODY(cuMemAllocManaged, (P a, L b, I c), a, b, c) return get(a, b); }
BODY(cuMemAllocAsync, (P a, L b, P c), a, b, c) return get(a, b); }
BODY(cuMemAllocAsync_ptsz, (P a, L b, P c), a, b, c) return get(a, b); }
BODY(cuMemAllocFromPoolAsync, (P a, L b, P c, P d), a, b, c, d) return get(a, b); }
BODY(cuMemAllocFromPoolAsync_ptsz, (P a, L b, P c, P d), a, b, c, d) return get(a, b); }
BODY(cuMemPoolCreate, (P a, P b), a, b) return get(a, 0); }
BODY(cuMemAllocPitch_v2, (P a, P b, L c, L d, I e), a, b, c, d, e)
  const uint64_t pitch = (c + 511) / 512 * 512; std::memcpy(b, &pitch, sizeof pitch); return get(a, pitch * d); }
BODY(cuMemFree_v2, (L a), a) return release(a); }
BODY(cuMemFreeAsync, (L a, P b), a, b) return release(a); }
BODY(cuMemFreeAsync_ptsz, (L a, P b), a, b) return release(a); }
BODY(cuArrayCreate_v2, (P a, P b), a, b)
  const auto* words = static_cast<const uint64_t*>(b); return get(a, words[0] * (words[1] ? words[1] : 1) * 4); }
BODY(cuArray3DCreate_v2, (P a, P b), a, b)
  const auto* words = static_cast<const uint64_t*>(b); return get(a, words[0] * (words[1] ? words[1] : 1) * (words[2] ? words[2] : 1) * 4); }
BODY(cuMipmappedArrayCreate, (P a, P b, I c), a, b, c) return get(a, 1 << 20); }
BODY(cuArrayDestroy, (P a), a) return release(number(a)); }
BODY(cuMipmappedArrayDestroy, (P a), a) return release(number(a)); }
BODY(cuMemCreate, (P a, L b, P c, L d), a, b, c, d) return get(a, b); }
BODY(cuMemImportFromShareableHandle, (P a, P b, I c), a, b, c) return get(a, 0); }
BODY(cuMemGetAllocationPropertiesFromHandle, (P a, L b), a, b)
  const int words[] = {1, 0, 1, 0}; std::memcpy(a, words, sizeof words); return kSuccess; }
// Retained handles are not counted here: the last release finds nothing.
BODY(cuMemRelease, (L a), a) release(a); return kSuccess; }
BODY(cuImportExternalMemory, (P a, P b), a, b) return get(a, 0); }
BODY(cuDestroyExternalMemory, (P a), a) return release(number(a)); }
BODY(cuIpcOpenMemHandle_v2, (P a, B64 b, I c), a, b, c) return get(a, 0); }
BODY(cuIpcCloseMemHandle, (L a), a) return release(a); }
BODY(cuMemPoolImportPointer, (P a, P b, P c), a, b, c) return get(a, 0); }
BODY(cuMemGetAddressRange_v2, (P a, P b, L c), a, b, c)
  const uint64_t bytes = 64 << 20; std::memcpy(a, &c, 8); std::memcpy(b, &bytes, 8); return kSuccess; }
BODY(cuGraphGetNodes, (P a, P b, P c), a, b, c)
  const uint64_t nodes = books().graph_bytes != 0; std::memcpy(c, &nodes, 8); if (b != nullptr && nodes != 0) std::memset(b, 1, 8); return kSuccess; }
BODY(cuGraphNodeGetType, (P a, P b), a, b) *static_cast<int*>(b) = 10; return kSuccess; }
BODY(cuGraphMemAllocNodeGetParams, (P a, P b), a, b)
  const int words[] = {1, 0, 1, 0}; std::memcpy(b, words, sizeof words); std::memcpy(static_cast<char*>(b) + 104, &books().graph_bytes, 8); return kSuccess; }
BODY(cuGraphInstantiateWithFlags, (P a, P b, L c), a, b, c) return get(a, 0); }
BODY(cuGraphExecDestroy, (P a), a) return release(number(a)); }
// clang-format on

RECORDER_API uint64_t recorder_used_bytes() {
  Books& b = books();
  const std::lock_guard lock(b.mutex);
  return b.used + b.contexts * b.context_bytes + b.modules * b.module_bytes;
}
RECORDER_API Result cuMemGetInfo_v2(P a, P b) {
  RECORDER_NOTE(cuMemGetInfo_v2, a, b)
  if (a != nullptr) *static_cast<uint64_t*>(a) = kTotalBytes - recorder_used_bytes();
  if (b != nullptr) *static_cast<uint64_t*>(b) = kTotalBytes;
  return kSuccess;
}
RECORDER_API Result cuDeviceTotalMem_v2(P a, I b) {
  RECORDER_NOTE(cuDeviceTotalMem_v2, a, b)
  *static_cast<uint64_t*>(a) = kTotalBytes;
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

RECORDER_API Result cuGetProcAddress_v2(P a, P b, I c, L d, P e) {
  RECORDER_NOTE(cuGetProcAddress_v2, a, b, c, d, e)
  void* found = find(static_cast<const char*>(a), static_cast<int>(c), d);
  if (e != nullptr) *static_cast<int*>(e) = found != nullptr ? 0 : 1;
  if (found != nullptr) *static_cast<void**>(b) = found;
  return found != nullptr ? kSuccess : kNotFound;
}
RECORDER_API Result cuGetProcAddress(P a, P b, I c, L d) {
  RECORDER_NOTE(cuGetProcAddress, a, b, c, d)
  return cuGetProcAddress_v2(a, b, c, d, nullptr);
}

// ---- NVML ---------------------------------------------------------------------------------------------------------------------------

RECORDER_API int nvmlInit_v2() {
  return g_nvml ? 0 : 9;
}
RECORDER_API int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** out_device) {
  *out_device = &books();
  return g_nvml && std::strcmp(address, kAddress) == 0 ? 0 : 6;
}
RECORDER_API int nvmlDeviceGetPciInfo_v3(void*, char* info) {
  std::strcpy(info + 36, "00000000:3B:00.0");
  return 0;
}
RECORDER_API int nvmlDeviceGetComputeRunningProcesses_v3(void*, uint32_t* count, char* processes) {
  if (!g_nvml || *count < 1) return 9;
  *count = 1;
  const auto process = static_cast<uint32_t>(getpid());
  const uint64_t used = recorder_used_bytes();
  std::memcpy(processes, &process, sizeof process);
  std::memcpy(processes + 8, &used, sizeof used);
  return 0;
}
RECORDER_API int nvmlDeviceGetMemoryInfo(void*, uint64_t* memory) {
  const uint64_t used = recorder_used_bytes();
  memory[0] = kTotalBytes;
  memory[1] = kTotalBytes - used;
  memory[2] = used;
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

RECORDER_API void recorder_set_overhead(uint64_t context_bytes, uint64_t module_bytes) {
  books().context_bytes = context_bytes;
  books().module_bytes = module_bytes;
}
RECORDER_API void recorder_set_capturing(int capturing) {
  g_capturing = capturing;
}
RECORDER_API void recorder_set_nvml(int answers) {
  g_nvml = answers != 0;
}
RECORDER_API void recorder_set_graph_bytes(uint64_t bytes) {
  books().graph_bytes = bytes;
}
