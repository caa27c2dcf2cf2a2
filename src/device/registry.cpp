// SPDX-License-Identifier: Apache-2.0
#include "device/registry.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>

#include "base/dynamic_library.hpp"
#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/thread_local.hpp"
#include "device/cuda/cuda_backend.hpp"
#include "device/host/host_backend.hpp"
#include "device/sim/sim_backend.hpp"
#include "device/unsupported.hpp"

namespace gpushare::device {
namespace {

using BackendGetter = const gpushare_backend_ops* (*)();

// The built-in backends, in the order that backends() lists them.
constexpr BackendGetter kBuiltIns[] = {host_backend, sim_backend, cuda_backend};

GPUSHARE_THREAD_LOCAL bool t_unsupported = false;

template <class... Arguments>
int32_t unsupported_op(Arguments...) {
  t_unsupported = true;
  return GPUSHARE_UNSUPPORTED;
}

template <class... Arguments>
void fill_unsupported(int32_t (*&op)(Arguments...)) {
  op = &unsupported_op<Arguments...>;
}

// One name a registered table: the table must live for good, so must its copy of the name.
struct Entry {
  gpushare_backend_ops ops{};
  std::string name;
};

struct Registry {
  base::Mutex mutex;
  std::vector<std::unique_ptr<Entry>> entries GPUSHARE_GUARDED_BY(mutex);
};

base::Status invalid(const std::string& name, const std::string& reason) {
  return {GPUSHARE_INVALID_ARGUMENT, "backend '" + name + "': " + reason};
}

bool good_name(const char* name) {
  if (name == nullptr) return false;
  const size_t length = std::strlen(name);
  if (length == 0 || length > 31 || std::strcmp(name, "auto") == 0) return false;
  return std::all_of(name, name + length, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
}

// clang-format off
#define GPUSHARE_MANDATORY_OPS(X)                                                                   \
  X(probe)                                                                                          \
  X(device_open)                                                                                    \
  X(device_close)                                                                                   \
  X(device_info) X(clock_now) X(last_error) X(mem_alloc) X(mem_free) X(host_alloc) X(host_free)     \
      X(stream_create) X(stream_destroy) X(stream_query) X(stream_synchronize) X(stream_wait_event) \
          X(stream_native) X(event_create) X(event_destroy) X(event_record) X(event_query)          \
              X(event_synchronize) X(event_elapsed) X(copy_async) X(fill_async) X(launch_host)
// clang-format on
#define GPUSHARE_VIRTUAL_MEMORY_OPS(X) \
  X(va_reserve) X(va_free) X(phys_create) X(phys_release) X(va_map) X(va_unmap)
#define GPUSHARE_PARTITION_OPS(X) \
  X(partition_info) X(partition_create) X(partition_destroy) X(partition_stream_create)

#define GPUSHARE_IPC_OPS(X) X(phys_create_shared) X(phys_export) X(phys_import)
#define GPUSHARE_RUN_OPS(X) X(va_map_run) X(va_unmap_run)

// Refuses a half-filled group, fills an absent one.
#define GPUSHARE_COUNT_OP(op) \
  present += ops.op != nullptr ? 1 : 0, total += 1, missing += ops.op != nullptr ? "" : " " #op;
#define GPUSHARE_FILL_OP(op) fill_unsupported(ops.op);
#define GPUSHARE_COMPLETE_GROUP(group, title)                                       \
  present = total = 0;                                                              \
  missing.clear();                                                                  \
  group(GPUSHARE_COUNT_OP);                                                         \
  if (present == 0) {                                                               \
    group(GPUSHARE_FILL_OP);                                                        \
  } else if (present != total) {                                                    \
    return invalid(name, "group \"" title "\" is all or none; missing:" + missing); \
  }

base::Status complete(const std::string& name, gpushare_backend_ops& ops) {
  int present = 0;
  int total = 0;
  std::string missing;
  GPUSHARE_MANDATORY_OPS(GPUSHARE_COUNT_OP)
  if (present != total) return invalid(name, "mandatory ops are missing:" + missing);
  GPUSHARE_COMPLETE_GROUP(GPUSHARE_VIRTUAL_MEMORY_OPS, "virtual memory")
  const bool has_virtual_memory = present > 0;
  GPUSHARE_COMPLETE_GROUP(GPUSHARE_PARTITION_OPS, "partitions")
  GPUSHARE_COMPLETE_GROUP(GPUSHARE_IPC_OPS, "ipc")
  if (present > 0 && !has_virtual_memory)
    return invalid(name, "group \"ipc\" needs group \"virtual memory\"");
  GPUSHARE_COMPLETE_GROUP(GPUSHARE_RUN_OPS, "runs")
  if (present > 0 && !has_virtual_memory)
    return invalid(name, "group \"runs\" needs group \"virtual memory\"");
  // Groups of one op cannot be half-filled.
  if (ops.work_launch == nullptr) fill_unsupported(ops.work_launch);
  if (ops.fault_set == nullptr) fill_unsupported(ops.fault_set);
  if (ops.stream_capture_drop == nullptr) fill_unsupported(ops.stream_capture_drop);
  if (ops.stream_adopt == nullptr) fill_unsupported(ops.stream_adopt);
  if (ops.context_bytes == nullptr) fill_unsupported(ops.context_bytes);
  if (ops.phys_create_host != nullptr && !has_virtual_memory)
    return invalid(name, "phys_create_host needs group \"virtual memory\"");
  if (ops.phys_create_host == nullptr) fill_unsupported(ops.phys_create_host);
  return {};
}

base::Status add(Registry& registry, const gpushare_backend_ops* ops) {
  if (ops == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "the backend's ops table is null"};
  // struct_size and abi_version come first in every version of the table; nothing else may be read before
  // they are known.
  const uint32_t major = ops->abi_version >> 16;
  if (major != GPUSHARE_BACKEND_ABI_MAJOR) {
    return invalid("?", base::format("ABI major version is %u, this runtime's is %u; rebuild the backend",
                                     major, GPUSHARE_BACKEND_ABI_MAJOR));
  }
  if (ops->struct_size < GPUSHARE_BACKEND_OPS_V1_SIZE) {
    return invalid("?", base::format("struct_size is %u, the first published table has %zu", ops->struct_size,
                                     GPUSHARE_BACKEND_OPS_V1_SIZE));
  }
  if (!good_name(ops->name)) {
    return invalid("?", "the name must be 1 to 31 of a-z, 0-9, '_', '-', and not \"auto\"");
  }
  auto entry = std::make_unique<Entry>();
  entry->name = ops->name;
  // Only whole ops: the table holds nothing but pointers behind its first version, and a size may end inside one.
  std::memcpy(&entry->ops, ops,
              std::min<size_t>(ops->struct_size / sizeof(void*) * sizeof(void*), sizeof(entry->ops)));
  entry->ops.struct_size = sizeof(entry->ops);
  entry->ops.name = entry->name.c_str();
  GPUSHARE_RETURN_IF_ERROR(complete(entry->name, entry->ops));
  base::MutexLock lock(registry.mutex);
  for (const auto& known : registry.entries) {
    if (known->name == entry->name) {
      return {GPUSHARE_ALREADY_EXISTS, "a backend named '" + entry->name + "' is registered already"};
    }
  }
  registry.entries.push_back(std::move(entry));
  return {};
}

Registry& registry() {
  // Never destroyed: devices may close while static destructors run.
  static Registry* instance = [] {
    auto owned = std::make_unique<Registry>();
    for (const BackendGetter built_in : kBuiltIns) {
      // A built-in table that breaks the rules is a bug; the registry's unit test looks for each of them by
      // name.
      (void)add(*owned, built_in());
    }
    Registry* const fresh = owned.release();
    static constinit base::ForkHook hook;
    hook = {[](void* self) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { static_cast<Registry*>(self)->mutex.lock(); },
            [](void* self, bool)
                GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { static_cast<Registry*>(self)->mutex.unlock(); },
            fresh};
    (void)base::add_fork_hook(hook);  // without memory for it a child may find the lock held
    return fresh;
  }();
  return *instance;
}

}  // namespace

bool take_unsupported() {
  const bool was = t_unsupported;
  t_unsupported = false;
  return was;
}

base::Status register_backend(const gpushare_backend_ops* ops) {
  return add(registry(), ops);
}

base::Status load_backend(const std::string& absolute_path) {
  if (absolute_path.empty() || absolute_path.front() != '/') {
    return {GPUSHARE_INVALID_ARGUMENT, "backend path '" + absolute_path + "' is not absolute"};
  }
  base::Result<base::DynamicLibrary> library = base::DynamicLibrary::open(absolute_path);
  if (!library.ok()) return {GPUSHARE_NOT_FOUND, library.status().message()};
  const auto entry = reinterpret_cast<gpushare_backend_entry>(library->find(GPUSHARE_BACKEND_ENTRY_NAME));
  if (entry == nullptr) {
    return {GPUSHARE_MALFORMED_INPUT,
            absolute_path + " has no symbol " GPUSHARE_BACKEND_ENTRY_NAME ": it is not a gpushare backend"};
  }
  GPUSHARE_RETURN_IF_ERROR(register_backend(entry()).with_context(absolute_path));
  library->release();
  return {};
}

const gpushare_backend_ops* find_backend(const std::string& name) {
  Registry& all = registry();
  base::MutexLock lock(all.mutex);
  for (const auto& entry : all.entries) {
    if (entry->name == name) return &entry->ops;
  }
  return nullptr;
}

std::vector<const gpushare_backend_ops*> backends() {
  Registry& all = registry();
  base::MutexLock lock(all.mutex);
  std::vector<const gpushare_backend_ops*> list;
  for (const auto& entry : all.entries) list.push_back(&entry->ops);
  return list;
}

std::vector<Listed> list_devices() {
  std::vector<Listed> list;
  for (const gpushare_backend_ops* ops : backends()) {
    const std::string name = ops->name;
    const auto spec = [&](uint32_t index) {
      return index > 0 || name == "cuda" ? name + ":" + std::to_string(index) : name;
    };
    uint32_t count = 0;
    if (const int32_t code = ops->probe(&count); code != GPUSHARE_OK) {
      gpushare_backend_error error{};
      error.struct_size = sizeof error;
      (void)ops->last_error(&error);
      list.push_back({spec(0), {code, error.message, error.native_code, ops->name}});
      continue;
    }
    for (uint32_t index = 0; index < count; ++index) list.push_back({spec(index), {}});
  }
  return list;
}

}  // namespace gpushare::device
