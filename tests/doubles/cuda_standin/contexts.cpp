// Initialisation, devices, contexts, green contexts, the symbol table.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "memory.hpp"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

namespace standin {

Context* make_context(const std::string& call, int device) {
  World& w = world();
  auto owned = std::make_unique<Context>();
  Context* context = owned.get();
  context->born = call;
  context->device = device;
  context->multiprocessors = static_cast<unsigned>(w.setting("multiprocessors"));
  context->hardware.resize(static_cast<size_t>(w.setting("hardware_queues")));
  cost(Cost::kContext);
  w.contexts[context] = std::move(owned);
  context->legacy = make_stream(call + " (default stream)", context, 0, /*blocking=*/true);
  return context;
}

std::string held_by(const Context* context) {
  World& w = world();
  std::string text;
  const auto add = [&](const char* what, const std::string& born) {
    text += (text.empty() ? "" : ", ") + (what + born);
  };
  for (const auto& [raw, stream] : w.streams) {
    if (stream->context == context && stream->alive() && stream.get() != context->legacy)
      add("stream of ", stream->born);
  }
  for (const auto& [raw, event] : w.events) {
    if (event->context == context && event->alive()) add("event of ", event->born);
  }
  for (const auto& [address, block] : w.blocks) {
    if (block.context == context) add("memory of ", block.born);
  }
  for (const auto& [raw, green] : w.contexts) {
    if (green->parent == context && green->alive()) add("green context of ", green->born);
  }
  return text;
}

void end_context(Call& frame, Context* context) {
  World& w = world();
  const std::string& call = frame.text();
  context->died = call;
  std::vector<Stream*> streams;
  for (const auto& [raw, stream] : w.streams) {
    if (stream->context == context && stream->alive()) streams.push_back(stream.get());
  }
  for (Stream* stream : streams) stop_stream(frame, stream);
  // The remaining streams die with the context, so that each leak is reported once.
  for (const auto& [raw, stream] : w.streams) {
    if (stream->context == context && stream->alive()) stream->died = call;
  }
  for (const auto& [raw, event] : w.events) {
    if (event->context == context && event->alive()) event->died = call;
  }
  if (w.devices[static_cast<size_t>(context->device)].primary == context)
    w.devices[static_cast<size_t>(context->device)].primary = nullptr;
}

namespace {

bool valid_device(CUdevice device) {
  return device >= 0 && static_cast<uint64_t>(device) < world().setting("devices");
}

// The tag in the padding of a CUdevResource of ours.
struct ResourceTag {
  uint32_t magic;
  int32_t device;
  uint32_t split;  // 0: the whole device
  uint32_t group;
};
constexpr uint32_t kResourceMagic = 0x5e50417c;

struct Desc {
  uint32_t magic;
  int device;
  unsigned multiprocessors;
};

bool read_tag(const CUdevResource& resource, ResourceTag* out_tag) {
  std::memcpy(out_tag, resource.internal_padding, sizeof(*out_tag));
  return resource.type == CU_DEV_RESOURCE_TYPE_SM && out_tag->magic == kResourceMagic;
}

CUdevResource make_resource(ResourceTag tag, unsigned count) {
  CUdevResource resource{};
  resource.type = CU_DEV_RESOURCE_TYPE_SM;
  resource.sm.smCount = count;
  tag.magic = kResourceMagic;
  std::memcpy(resource.internal_padding, &tag, sizeof(tag));
  return resource;
}

}  // namespace
}  // namespace standin

STANDIN_API CUresult cuInit(unsigned flags) {
  Call call("cuInit", false);
  if (call.verdict() != CUDA_SUCCESS) return call.verdict();
  if (flags != 0) return call.misuse(CUDA_ERROR_INVALID_VALUE, "flags are not 0");
  World& w = world();
  if (w.setting("devices") == 0) return CUDA_ERROR_NO_DEVICE;
  w.initialised = true;
  if (w.devices.empty()) w.devices.resize(static_cast<size_t>(w.setting("devices")));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDriverGetVersion(int* version) {
  Call call("cuDriverGetVersion", false);
  if (call.verdict() != CUDA_SUCCESS) return call.verdict();
  *version = static_cast<int>(world().setting("driver_version"));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGetCount(int* count) {
  STANDIN_ENTRY(cuDeviceGetCount);
  *count = world().setting("mig_instances") > 0 ? 1 : static_cast<int>(world().setting("devices"));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  STANDIN_ENTRY(cuDeviceGet);
  if (!valid_device(ordinal))
    return call.misuse(CUDA_ERROR_INVALID_DEVICE, "no device " + std::to_string(ordinal));
  *device = ordinal;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  STANDIN_ENTRY(cuDeviceGetName);
  if (!valid_device(device) || length <= 0)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "no such device, or no room");
  std::snprintf(name, static_cast<size_t>(length), "CUDA stand-in %d", device);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  STANDIN_ENTRY(cuDeviceGetPCIBusId);
  if (!valid_device(device) || length < 13)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "no such device, or no room");
  std::snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", static_cast<unsigned>(device + 1) & 0xff);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  STANDIN_ENTRY(cuDeviceTotalMem);
  if (!valid_device(device)) return call.misuse(CUDA_ERROR_INVALID_DEVICE, "no such device");
  *bytes = world().device_bytes();
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  STANDIN_ENTRY(cuDeviceGetAttribute);
  if (!valid_device(device)) return call.misuse(CUDA_ERROR_INVALID_DEVICE, "no such device");
  World& w = world();
  const uint64_t version = w.setting("driver_version");
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = static_cast<int>(w.setting("multiprocessors"));
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      *value = w.setting("granularity_bytes") != 0 ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      *value = w.setting("granularity_bytes") != 0 ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
      if (version < 12020) return CUDA_ERROR_INVALID_VALUE;
      *value = static_cast<int>(static_cast<int64_t>(w.setting("host_numa_id")));
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED:
      if (version < 12080) return CUDA_ERROR_INVALID_VALUE;
      *value = w.setting("granularity_bytes") != 0 &&
               w.setting(attribute == CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
                             ? "host_numa_memory"
                             : "host_numa_pools") != 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      if (version < 13000) return CUDA_ERROR_INVALID_VALUE;
      *value = w.setting("granularity_bytes") != 0 && w.setting("host_memory") != 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:  // as cuDeviceGetPCIBusId says
      *value = device + 1;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
      *value = 0;
      return CUDA_SUCCESS;
    case 41:  // UNIFIED_ADDRESSING
      *value = 1;
      return CUDA_SUCCESS;
    case 75:  // COMPUTE_CAPABILITY_MAJOR
      *value = 9;
      return CUDA_SUCCESS;
    case 76:  // COMPUTE_CAPABILITY_MINOR
      *value = 0;
      return CUDA_SUCCESS;
    default:
      return call.misuse(CUDA_ERROR_INVALID_VALUE,
                         "attribute " + std::to_string(attribute) + " is not known to the stand-in");
  }
}

// Waits until the world says no more that something hangs. Call without its mutex.
static void hang_while(const char* key, uint64_t value) {
  std::unique_lock<std::mutex> lock(world().mutex);
  while (world().setting(key) == value) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
}

STANDIN_API CUresult cuDevicePrimaryCtxRetain(CUcontext* out_context, CUdevice device) {
  hang_while("hanging_device", static_cast<uint64_t>(device) + 1);
  STANDIN_ENTRY(cuDevicePrimaryCtxRetain);
  if (!valid_device(device)) return call.misuse(CUDA_ERROR_INVALID_DEVICE, "no such device");
  Context*& primary = world().devices[static_cast<size_t>(device)].primary;
  if (primary == nullptr) {
    primary = make_context(call.text(), device);
    primary->primary = true;
  }
  ++primary->references;
  *out_context = reinterpret_cast<CUcontext>(primary);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  STANDIN_ENTRY(cuDevicePrimaryCtxRelease);
  if (!valid_device(device)) return call.misuse(CUDA_ERROR_INVALID_DEVICE, "no such device");
  Context* primary = world().devices[static_cast<size_t>(device)].primary;
  if (primary == nullptr || primary->references == 0)
    return call.misuse(CUDA_ERROR_INVALID_CONTEXT, "double free: the primary context is not retained");
  if (--primary->references > 0) return CUDA_SUCCESS;
  if (const std::string held = held_by(primary); !held.empty() && primary->error == CUDA_SUCCESS)
    record_misuse(call.text(), "leak: the last release of the primary context leaves " + held);
  end_context(call, primary);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  STANDIN_ENTRY(cuDevicePrimaryCtxGetState);
  if (!valid_device(device)) return call.misuse(CUDA_ERROR_INVALID_DEVICE, "no such device");
  *flags = 0;
  *active = world().devices[static_cast<size_t>(device)].primary != nullptr ? 1 : 0;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxCreate_v2(CUcontext* out_context, unsigned flags, CUdevice device) {
  STANDIN_ENTRY(cuCtxCreate);
  if (!valid_device(device) || flags > 0x1f)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "no such device or flag");
  Context* context = make_context(call.text(), device);
  context_stack().push_back(context);
  *out_context = reinterpret_cast<CUcontext>(context);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxDestroy_v2(CUcontext handle) {
  STANDIN_ENTRY(cuCtxDestroy);
  const auto it = world().contexts.find(handle);
  if (it == world().contexts.end()) return call.misuse(CUDA_ERROR_INVALID_CONTEXT, "not a context");
  Context* context = it->second.get();
  if (!context->alive())
    return call.misuse(CUDA_ERROR_CONTEXT_IS_DESTROYED, "double free: destroyed by " + context->died);
  if (context->primary || context->parent != nullptr)
    return call.misuse(CUDA_ERROR_INVALID_CONTEXT, "a primary or green context is released otherwise");
  if (const std::string held = held_by(context); !held.empty() && context->error == CUDA_SUCCESS)
    record_misuse(call.text(), "leak: the context is destroyed with " + held);
  end_context(call, context);
  if (!context_stack().empty() && context_stack().back() == context) context_stack().pop_back();
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxGetCurrent(CUcontext* out_context) {
  STANDIN_ENTRY(cuCtxGetCurrent);
  *out_context = context_stack().empty() ? nullptr : reinterpret_cast<CUcontext>(context_stack().back());
  return CUDA_SUCCESS;
}

namespace {
// Null with `*out` set for a null handle; the misuse otherwise.
CUresult find_context(Call& call, CUcontext handle, Context** out) {
  *out = nullptr;
  if (handle == nullptr) return CUDA_SUCCESS;
  const auto it = world().contexts.find(handle);
  if (it == world().contexts.end())
    return call.misuse(CUDA_ERROR_INVALID_CONTEXT, "wrong context: not a context");
  if (!it->second->alive())
    return call.misuse(CUDA_ERROR_CONTEXT_IS_DESTROYED,
                       "wrong context: it was destroyed by " + it->second->died);
  *out = it->second.get();
  return CUDA_SUCCESS;
}
}  // namespace

STANDIN_API CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  STANDIN_ENTRY(cuCtxPushCurrent);
  Context* context = nullptr;
  if (const CUresult found = find_context(call, handle, &context); found != CUDA_SUCCESS) return found;
  if (context == nullptr) return call.misuse(CUDA_ERROR_INVALID_CONTEXT, "wrong context: null is no context");
  context_stack().push_back(context);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxPopCurrent_v2(CUcontext* out_context) {
  STANDIN_ENTRY(cuCtxPopCurrent);
  if (context_stack().empty())
    return call.misuse(CUDA_ERROR_INVALID_CONTEXT, "wrong context: nothing was pushed");
  if (out_context != nullptr) *out_context = reinterpret_cast<CUcontext>(context_stack().back());
  context_stack().pop_back();
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxSetCurrent(CUcontext handle) {
  STANDIN_ENTRY(cuCtxSetCurrent);
  Context* context = nullptr;
  if (const CUresult found = find_context(call, handle, &context); found != CUDA_SUCCESS) return found;
  if (!context_stack().empty()) context_stack().pop_back();
  if (context != nullptr) context_stack().push_back(context);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxGetDevice(CUdevice* device) {
  STANDIN_ENTRY(cuCtxGetDevice);
  STANDIN_CONTEXT();
  *device = context->device;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  STANDIN_ENTRY(cuCtxGetStreamPriorityRange);
  STANDIN_CONTEXT();
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource* resource, int type) {
  STANDIN_ENTRY(cuDeviceGetDevResource);
  if (!valid_device(device) || type != CU_DEV_RESOURCE_TYPE_SM)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "no such device or type of resource");
  World& w = world();
  if (w.setting("sm_granularity") == 0) return CUDA_ERROR_NOT_SUPPORTED;
  *resource = make_resource({0, device, 0, 0}, static_cast<unsigned>(w.setting("multiprocessors")));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDevSmResourceSplitByCount(CUdevResource* groups, unsigned* group_count,
                                                 const CUdevResource* input, CUdevResource* remaining,
                                                 unsigned flags, unsigned min_count) {
  STANDIN_ENTRY(cuDevSmResourceSplitByCount);
  ResourceTag tag{};
  if (input == nullptr || group_count == nullptr || flags > 3 || !read_tag(*input, &tag))
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "the input is no SM resource");
  const auto granularity = static_cast<unsigned>(world().setting("sm_granularity"));
  const unsigned size = std::max(1u, (min_count + granularity - 1) / granularity) * granularity;
  const unsigned possible = input->sm.smCount / size;
  if (possible == 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  if (groups == nullptr) {
    *group_count = possible;
    return CUDA_SUCCESS;
  }
  static uint32_t next_split = 1;
  const uint32_t split = next_split++;
  *group_count = std::min(*group_count, possible);
  for (unsigned i = 0; i < *group_count; ++i) groups[i] = make_resource({0, tag.device, split, i}, size);
  if (remaining != nullptr)
    *remaining = make_resource({0, tag.device, split, UINT32_MAX}, input->sm.smCount - *group_count * size);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* out_desc, CUdevResource* resources,
                                               unsigned count) {
  STANDIN_ENTRY(cuDevResourceGenerateDesc);
  if (out_desc == nullptr || resources == nullptr || count == 0)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "no resources");
  unsigned total = 0;
  ResourceTag first{};
  std::set<uint32_t> seen;
  for (unsigned i = 0; i < count; ++i) {
    ResourceTag tag{};
    if (!read_tag(resources[i], &tag)) return call.misuse(CUDA_ERROR_INVALID_VALUE, "not an SM resource");
    if (i == 0) first = tag;
    if (tag.device != first.device || tag.split != first.split)
      return call.misuse(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
                         "the resources come from different splits");
    if (!seen.insert(tag.group).second)
      return call.misuse(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "a resource is given twice");
    total += resources[i].sm.smCount;
  }
  // Descriptors have no destroy call; the driver's live as long as the process too.
  static std::deque<Desc> descs;
  descs.push_back({kResourceMagic, first.device, total});
  *out_desc = reinterpret_cast<CUdevResourceDesc>(&descs.back());
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGreenCtxCreate(CUgreenCtx* out_green, CUdevResourceDesc handle, CUdevice device,
                                      unsigned flags) {
  STANDIN_ENTRY(cuGreenCtxCreate);
  const Desc* desc = reinterpret_cast<const Desc*>(handle);
  if (desc == nullptr || desc->magic != kResourceMagic || desc->device != device)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "the descriptor is not one of this device");
  if (flags != CU_GREEN_CTX_DEFAULT_STREAM)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "CU_GREEN_CTX_DEFAULT_STREAM is required");
  Context*& primary = world().devices[static_cast<size_t>(device)].primary;
  if (primary == nullptr) {
    primary = make_context(call.text(), device);
    primary->primary = true;
  }
  ++primary->references;
  Context* green = make_context(call.text(), device);
  green->parent = primary;
  green->multiprocessors = desc->multiprocessors;
  *out_green = reinterpret_cast<CUgreenCtx>(green);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGreenCtxDestroy(CUgreenCtx handle) {
  STANDIN_ENTRY(cuGreenCtxDestroy);
  const auto it = world().contexts.find(handle);
  if (it == world().contexts.end() || it->second->parent == nullptr)
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not a green context");
  Context* green = it->second.get();
  if (!green->alive())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "double free: destroyed by " + green->died);
  if (const std::string held = held_by(green); !held.empty() && root(green)->error == CUDA_SUCCESS)
    record_misuse(call.text(), "leak: the green context is destroyed with " + held);
  end_context(call, green);
  --green->parent->references;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGreenCtxStreamCreate(CUstream* out_stream, CUgreenCtx handle, unsigned flags,
                                            int priority) {
  STANDIN_ENTRY(cuGreenCtxStreamCreate);
  const auto it = world().contexts.find(handle);
  if (it == world().contexts.end() || it->second->parent == nullptr || !it->second->alive())
    return call.misuse(CUDA_ERROR_INVALID_HANDLE, "not a live green context");
  if (flags != CU_STREAM_NON_BLOCKING)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "CU_STREAM_NON_BLOCKING is required");
  *out_stream = reinterpret_cast<CUstream>(make_stream(call.text(), it->second.get(), priority, false));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxFromGreenCtx(CUcontext* out_context, CUgreenCtx handle) {
  STANDIN_ENTRY(cuCtxFromGreenCtx);
  *out_context = reinterpret_cast<CUcontext>(handle);
  return CUDA_SUCCESS;
}

// ---- NVML, which the driver's package brings: its handles are a device's number and 1. -------------------------

STANDIN_API int nvmlInit_v2() {
  return 0;
}

STANDIN_API int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** out_device) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  unsigned domain = 0, bus = 0;
  if (std::sscanf(address, "%x:%x:", &domain, &bus) != 2 || domain != 0 || bus == 0 ||
      bus > world().devices.size())
    return 6;  // NVML_ERROR_NOT_FOUND
  *out_device = reinterpret_cast<void*>(static_cast<uintptr_t>(bus));
  return 0;
}

STANDIN_API int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, void* out_processes) {
  struct Info {
    unsigned process;
    unsigned long long used_bytes;
    unsigned instance, compute_instance;
  };
  hang_while("nvml_hangs", 1);
  const std::lock_guard<std::mutex> lock(world().mutex);
  // Those of others come first.
  const auto others = static_cast<unsigned>(world().setting("nvml_others"));
  const unsigned room = std::exchange(*count, others + 1);
  if (room < *count) return 7;  // NVML_ERROR_INSUFFICIENT_SIZE
  // Of another namespace, where the process has another number.
  const bool listed = world().setting("nvml_lists_process") != 0;
  const Info other{1, 1 << 20, 0, 0};
  const Info own{listed ? static_cast<unsigned>(getpid()) : 1,
                 used_here(static_cast<int>(reinterpret_cast<uintptr_t>(device)) - 1), 0, 0};
  auto* const out = static_cast<Info*>(out_processes);
  std::fill(out, out + others, other);
  out[others] = own;
  return 0;
}

// Handles of instances: the GPU's handle, and the instance's number and 1 above it.
STANDIN_API int nvmlDeviceGetCount_v2(unsigned* count) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  *count = static_cast<unsigned>(world().setting("devices"));
  return 0;
}

STANDIN_API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** out_device) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  if (index >= world().setting("devices")) return 2;  // NVML_ERROR_INVALID_ARGUMENT
  *out_device = reinterpret_cast<void*>(static_cast<uintptr_t>(index) + 1);
  return 0;
}

STANDIN_API int nvmlDeviceGetUUID(void* device, char* uuid, unsigned length) {
  const auto handle = reinterpret_cast<uintptr_t>(device);
  std::snprintf(uuid, length, "%s-0000000%x-000%x-0000-0000-000000000000", handle > 0xff ? "MIG" : "GPU",
                static_cast<unsigned>(handle >> 8), static_cast<unsigned>(handle & 0xff));
  return 0;
}

STANDIN_API int nvmlDeviceGetName(void* device, char* name, unsigned length) {
  const auto handle = reinterpret_cast<uintptr_t>(device);
  std::snprintf(name, length, "CUDA stand-in%s", handle > 0xff ? " MIG 1g.1gb" : "");
  return 0;
}

STANDIN_API int nvmlDeviceGetMemoryInfo(void* device, unsigned long long* out_total_free_used) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  const bool instance = reinterpret_cast<uintptr_t>(device) > 0xff;
  out_total_free_used[0] = out_total_free_used[1] =
      instance ? world().device_bytes() : world().setting("memory_bytes");
  out_total_free_used[2] = 0;
  return 0;
}

STANDIN_API int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  std::snprintf(version, length, "535.104.05");
  return 0;
}

STANDIN_API int nvmlDeviceGetMigMode(void*, unsigned* current, unsigned* pending) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  *current = *pending = world().setting("mig_instances") > 0 ? 1 : 0;
  return 0;
}

STANDIN_API int nvmlDeviceGetMaxMigDeviceCount(void*, unsigned* count) {
  *count = 7;
  return 0;
}

STANDIN_API int nvmlDeviceGetMigDeviceHandleByIndex(void* device, unsigned index, void** out_instance) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  if (index >= world().setting("mig_instances")) return 6;  // NVML_ERROR_NOT_FOUND
  *out_instance =
      reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(device) + ((uintptr_t{index} + 1) << 8));
  return 0;
}

// ---- the runtime's private tables
// -------------------------------------------------------------------------------------------------------

// The table that CUDA's runtime reads first: values that it keeps for each context, by key. A table begins with its size.
namespace {
using Destroy = void (*)(CUcontext context, void* key, void* value);
struct Kept {
  void* value;
  Destroy destroy;
};
std::map<std::pair<const void*, const void*>, Kept>& kept() {
  static auto* all = new std::map<std::pair<const void*, const void*>, Kept>;
  return *all;
}
// Null: the current one.
CUresult context_of(Call& call, CUcontext* context) {
  if (*context == nullptr) *context = reinterpret_cast<CUcontext>(call.context());
  if (*context == nullptr) return call.verdict();
  const auto known = world().contexts.find(*context);
  if (known == world().contexts.end() || !known->second->alive())
    return call.misuse(CUDA_ERROR_INVALID_CONTEXT, "a private value of no living context");
  return CUDA_SUCCESS;
}
CUresult put_value(CUcontext context, void* key, void* value, Destroy destroy) {
  STANDIN_ENTRY(contextLocalStoragePut);
  if (const CUresult found = context_of(call, &context); found != CUDA_SUCCESS) return found;
  kept()[{context, key}] = {value, destroy};
  return CUDA_SUCCESS;
}
CUresult remove_value(CUcontext context, void* key) {
  STANDIN_ENTRY(contextLocalStorageDelete);
  if (const CUresult found = context_of(call, &context); found != CUDA_SUCCESS) return found;
  kept().erase({context, key});
  return CUDA_SUCCESS;
}
CUresult get_value(void** out_value, CUcontext context, void* key) {
  STANDIN_ENTRY(contextLocalStorageGet);
  if (const CUresult found = context_of(call, &context); found != CUDA_SUCCESS) return found;
  const auto value = kept().find({context, key});
  if (value == kept().end()) return CUDA_ERROR_INVALID_HANDLE;
  *out_value = value->second.value;
  return CUDA_SUCCESS;
}
struct LocalStorage {
  size_t bytes;
  CUresult (*put)(CUcontext, void*, void*, Destroy);
  CUresult (*remove)(CUcontext, void*);
  CUresult (*get)(void**, CUcontext, void*);
};
constexpr LocalStorage kLocalStorage{sizeof(LocalStorage), put_value, remove_value, get_value};
constexpr unsigned char kLocalStorageId[16] = {0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11,
                                               0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93};
}  // namespace

STANDIN_API CUresult cuGetExportTable(const void** out_table, const void* id) {
  Call call("cuGetExportTable", false);
  if (call.verdict() != CUDA_SUCCESS) return call.verdict();
  if (out_table == nullptr || id == nullptr)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "no table asked for, or no output");
  *out_table = nullptr;
  if (std::memcmp(id, kLocalStorageId, sizeof kLocalStorageId) != 0) return CUDA_ERROR_INVALID_VALUE;
  *out_table = &kLocalStorage;
  return CUDA_SUCCESS;
}
