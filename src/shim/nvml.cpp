// SPDX-License-Identifier: Apache-2.0
#include "shim/nvml.hpp"

#include <dlfcn.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <ctime>

#include "shim/books.hpp"
#include "shim/driver.hpp"
#include "shim/gate.hpp"
#include "shim/process.hpp"
#include "shim/table.hpp"
#include "shim/words.hpp"

// The types of nvml.h, as far as they are used here.
extern "C" {
struct gpushare_nvml_memory {
  uint64_t total;
  uint64_t free;
  uint64_t used;
};
struct gpushare_nvml_memory_v2 {
  uint32_t version;
  uint64_t total;
  uint64_t reserved;
  uint64_t free;
  uint64_t used;
};
#define GPUSHARE_SHIM_EXPORT __attribute__((visibility("default")))
GPUSHARE_SHIM_EXPORT int nvmlDeviceGetMemoryInfo(void* device, gpushare_nvml_memory* out_memory);
GPUSHARE_SHIM_EXPORT int nvmlDeviceGetMemoryInfo_v2(void* device, gpushare_nvml_memory_v2* out_memory);
// A list with the details of processes, 32 bytes each.
struct gpushare_nvml_details {
  uint32_t version, mode, count;
  void* processes;
};
GPUSHARE_SHIM_EXPORT int nvmlDeviceGetRunningProcessDetailList(void* device, gpushare_nvml_details* list);
// Lists of processes: name, bytes of an entry.
#define GPUSHARE_NVML_LISTS(X)                      \
  X(nvmlDeviceGetComputeRunningProcesses, 16)       \
  X(nvmlDeviceGetComputeRunningProcesses_v2, 24)    \
  X(nvmlDeviceGetComputeRunningProcesses_v3, 24)    \
  X(nvmlDeviceGetGraphicsRunningProcesses, 16)      \
  X(nvmlDeviceGetGraphicsRunningProcesses_v2, 24)   \
  X(nvmlDeviceGetGraphicsRunningProcesses_v3, 24)   \
  X(nvmlDeviceGetMPSComputeRunningProcesses, 16)    \
  X(nvmlDeviceGetMPSComputeRunningProcesses_v2, 24) \
  X(nvmlDeviceGetMPSComputeRunningProcesses_v3, 24) \
  X(nvmlDeviceGetAccountingPids, 4)
#define GPUSHARE_NVML_DECLARE(name, bytes) \
  GPUSHARE_SHIM_EXPORT int name(void* device, uint32_t* count, void* out_processes);
GPUSHARE_NVML_LISTS(GPUSHARE_NVML_DECLARE)
}

namespace gpushare::shim {
namespace {

struct PciInfo {
  char legacy[16];
  uint32_t domain, bus, device, id, subsystem;
  char address[32];
};
struct ProcessInfo {
  uint32_t process;
  uint64_t used_bytes;
  uint32_t instance, compute_instance;
};

constexpr int kNvmlUninitialized = 1;
constexpr int kNvmlInsufficientSize = 7;
constexpr int kNvmlLibraryNotFound = 12;
constexpr int kNvmlFunctionNotFound = 13;

void* g_library = nullptr;

void* library() {
  if (void* handle = load(g_library)) return handle;
  void* handle = libc_dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  // The driver's folder may be none that the loader searches, as in containers; NVML is part of the driver.
  const char* const slash = std::strrchr(driver_path(), '/');
  char path[512];
  if (handle == nullptr && slash != nullptr &&
      std::snprintf(path, sizeof path, "%.*s/libnvidia-ml.so.1", static_cast<int>(slash - driver_path()),
                    driver_path()) < static_cast<int>(sizeof path))
    handle = libc_dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  if (handle != nullptr) store(g_library, handle);
  return handle;
}

template <class... A>
int call(const char* name, A... arguments) {
  void* const handle = library();
  if (handle == nullptr) return kNvmlLibraryNotFound;
  void* const function = libc_dlsym(handle, name);
  if (function == nullptr) return kNvmlFunctionNotFound;
  return reinterpret_cast<int (*)(A...)>(function)(arguments...);
}

int place_of_nvml(void* device) {
  PciInfo info;
  std::memset(&info, 0, sizeof info);
  if (call("nvmlDeviceGetPciInfo_v3", device, &info) != 0) return -1;
  info.address[sizeof info.address - 1] = 0;
  return place_of_device(info.address);
}

void fit(int place, uint64_t* total, uint64_t* free, uint64_t* used) {
  const Told told = tell(place, *total, *free);
  *total = told.total;
  *free = told.free;
  *used = told.used;
}

// A list of NVML's, in memory that is made larger until all of it fits.
struct Entries {
  char* at = nullptr;
  size_t size = 0;
  uint32_t count = 0;
  Entries() = default;
  ~Entries() { give_back(); }
  Entries(const Entries&) = delete;
  Entries& operator=(const Entries&) = delete;
  void give_back() {
    if (at != nullptr) munmap(at, size);
    at = nullptr;
  }
};
template <class Ask>
int read_entries(size_t bytes, Entries* out, Ask ask) {
  constexpr uint32_t kFirst = 256, kMost = 1 << 20;
  for (uint32_t room = kFirst; room <= kMost; room *= 16) {
    out->give_back();
    out->size = room * bytes;
    void* memory = mmap(nullptr, out->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) break;
    out->at = static_cast<char*>(memory);
    out->count = room;
    const int result = ask(out->at, &out->count);
    if (out->count > room) out->count = room;
    if (result != kNvmlInsufficientSize) return result;
  }
  return kNvmlInsufficientSize;
}

// Gives the program the processes of the group alone: what others hold is no part of the device that the group is told
// of. An entry begins with the number of its process.
int keep_group(const Entries& all, size_t bytes, uint32_t* count, void* out_processes) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < all.count; ++i) {
    uint32_t process = 0;
    std::memcpy(&process, all.at + i * bytes, sizeof process);
    if (!is_of_group(process)) continue;
    if (kept < *count && out_processes != nullptr)
      std::memcpy(static_cast<char*>(out_processes) + kept * bytes, all.at + i * bytes, bytes);
    ++kept;
  }
  const bool fits = kept <= *count;
  *count = kept;
  return fits ? 0 : kNvmlInsufficientSize;
}

int list_group(const char* name, size_t bytes, void* device, uint32_t* count, void* out_processes) {
  if (!limited() || count == nullptr) return call(name, device, count, out_processes);
  Entries all;
  const int result = read_entries(bytes, &all, [&](char* at, uint32_t* room) {
    return call(name, device, room, static_cast<void*>(at));
  });
  return result != 0 ? result : keep_group(all, bytes, count, out_processes);
}

}  // namespace

void* nvml_hook(const char* name) {
  if (std::strcmp(name, "nvmlDeviceGetMemoryInfo") == 0)
    return reinterpret_cast<void*>(&nvmlDeviceGetMemoryInfo);
  if (std::strcmp(name, "nvmlDeviceGetMemoryInfo_v2") == 0)
    return reinterpret_cast<void*>(&nvmlDeviceGetMemoryInfo_v2);
  if (std::strcmp(name, "nvmlDeviceGetRunningProcessDetailList") == 0)
    return reinterpret_cast<void*>(&nvmlDeviceGetRunningProcessDetailList);
#define GPUSHARE_NVML_HOOK(list, bytes) \
  if (std::strcmp(name, #list) == 0) return reinterpret_cast<void*>(&list);
  GPUSHARE_NVML_LISTS(GPUSHARE_NVML_HOOK)
  return nullptr;
}

void* nvml_adopt(const char* name, void* function) {
  void* const hook = nvml_hook(name);
  if (load(g_library) == nullptr && function != hook) {
    Dl_info info;
    if (libc_dladdr(function, &info) && info.dli_fname != nullptr)
      if (void* handle = libc_dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) store(g_library, handle);
  }
  return hook;
}

bool ask_process_bytes(const char* pci_address, uint64_t* out_bytes) {
  void* device = nullptr;
  int result = call("nvmlDeviceGetHandleByPciBusId_v2", pci_address, &device);
  if (result == kNvmlUninitialized) {
    if (call("nvmlInit_v2") != 0) return false;
    result = call("nvmlDeviceGetHandleByPciBusId_v2", pci_address, &device);
  }
  if (result != 0) return false;
  Entries all;
  if (read_entries(sizeof(ProcessInfo), &all, [device](char* at, uint32_t* room) {
        return call("nvmlDeviceGetComputeRunningProcesses_v3", device, room, static_cast<void*>(at));
      }) != 0)
    return false;
  for (uint32_t i = 0; i < all.count; ++i) {
    ProcessInfo info;
    std::memcpy(&info, all.at + i * sizeof info, sizeof info);
    if (info.process != static_cast<uint32_t>(getpid()) || info.used_bytes == UINT64_MAX) continue;
    *out_bytes = info.used_bytes;
    return true;
  }
  return false;
}

namespace {

// A question, on a page of its own: the thread may answer long after the one that asked has gone. The last of the two
// gives the page back.
struct Question {
  uint32_t state;  // a futex
  char address[32];
  bool known;
  uint64_t bytes;
};
enum : uint32_t { kAsked, kAnswered, kGivenUp };
constexpr uint64_t kPatienceNs = 3'000'000'000;
uint32_t g_hang;  // threads of this process that hang in NVML

void* answer(void* argument) {
  auto* question = static_cast<Question*>(argument);
  question->known = ask_process_bytes(question->address, &question->bytes);
  if (__atomic_exchange_n(&question->state, kAnswered, __ATOMIC_ACQ_REL) == kGivenUp) {
    munmap(question, sizeof *question);
    __atomic_sub_fetch(&g_hang, 1U, __ATOMIC_ACQ_REL);
  } else {
    syscall(SYS_futex, &question->state, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }
  return nullptr;
}

void say_unknown() {
  static bool said = false;
  if (__atomic_exchange_n(&said, true, __ATOMIC_RELAXED)) return;
  log_line(
      "process %d: NVML does not tell how much device memory this process has (it is not there, or lists "
      "other "
      "numbers of processes, as in a container): what contexts and modules take of their own is not counted",
      static_cast<int>(getpid()));
}

}  // namespace

void forget_nvml_in_child() {
  store(g_hang, 0);
}

bool nvml_process_bytes(const char* pci_address, uint64_t* out_bytes) {
  group();  // a child of fork forgets first
  if (load(g_hang) != 0) return false;
  void* page = mmap(nullptr, sizeof(Question), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return false;
  auto* question = static_cast<Question*>(page);
  std::snprintf(question->address, sizeof question->address, "%s", pci_address);
  if (!start_thread(answer, question)) {
    munmap(page, sizeof(Question));
    return false;
  }
  const uint64_t until_ns = host_ns() + kPatienceNs;
  for (uint64_t now_ns = host_ns(); load(question->state) == kAsked && now_ns < until_ns;
       now_ns = host_ns()) {
    const timespec left = timespec_of(until_ns - now_ns);
    syscall(SYS_futex, &question->state, FUTEX_WAIT_PRIVATE, kAsked, &left, nullptr, 0);
  }
  if (__atomic_exchange_n(&question->state, kGivenUp, __ATOMIC_ACQ_REL) == kAsked) {
    __atomic_add_fetch(&g_hang, 1U, __ATOMIC_ACQ_REL);
    log_line("process %d: NVML does not answer: contexts' own memory is not measured until it does",
             static_cast<int>(getpid()));
    return false;
  }
  const bool known = question->known;
  *out_bytes = question->bytes;
  munmap(page, sizeof(Question));
  if (!known && limited()) say_unknown();
  return known;
}

}  // namespace gpushare::shim

int nvmlDeviceGetMemoryInfo(void* device, gpushare_nvml_memory* out_memory) {
  using namespace gpushare::shim;  // NOLINT(google-build-using-namespace)
  const int result = call("nvmlDeviceGetMemoryInfo", device, out_memory);
  if (result == 0 && limited())
    if (const int place = place_of_nvml(device); place >= 0)
      fit(place, &out_memory->total, &out_memory->free, &out_memory->used);
  return result;
}

int nvmlDeviceGetMemoryInfo_v2(void* device, gpushare_nvml_memory_v2* out_memory) {
  using namespace gpushare::shim;  // NOLINT(google-build-using-namespace)
  const int result = call("nvmlDeviceGetMemoryInfo_v2", device, out_memory);
  if (result == 0 && limited())
    if (const int place = place_of_nvml(device); place >= 0)
      fit(place, &out_memory->total, &out_memory->free, &out_memory->used);
  return result;
}

int nvmlDeviceGetRunningProcessDetailList(void* device, gpushare_nvml_details* list) {
  using namespace gpushare::shim;  // NOLINT(google-build-using-namespace)
  constexpr const char* kName = "nvmlDeviceGetRunningProcessDetailList";
  constexpr size_t kDetail = 32;
  if (!limited() || list == nullptr) return call(kName, device, list);
  Entries all;
  const int result = read_entries(kDetail, &all, [&](char* at, uint32_t* room) {
    gpushare_nvml_details own = *list;
    own.count = *room;
    own.processes = at;
    const int answer = call(kName, device, &own);
    *room = own.count;
    return answer;
  });
  return result != 0 ? result : keep_group(all, kDetail, &list->count, list->processes);
}

#define GPUSHARE_NVML_LIST(name, bytes)                                            \
  int name(void* device, uint32_t* count, void* out_processes) {                   \
    return gpushare::shim::list_group(#name, bytes, device, count, out_processes); \
  }
GPUSHARE_NVML_LISTS(GPUSHARE_NVML_LIST)
