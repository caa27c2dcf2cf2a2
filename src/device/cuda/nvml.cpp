// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/nvml.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <vector>

#include "base/dynamic_library.hpp"
#include "base/mutex.hpp"
#include "base/patient.hpp"

namespace gpushare::device::cuda {
namespace {

// As nvml.h declares them.
struct ProcessInfo {
  uint32_t process;
  uint64_t used_bytes;
  uint32_t instance, compute_instance;
};
struct Nvml {
  int (*init)() = nullptr;
  int (*find_device)(const char* address, void** out_device) = nullptr;
  int (*list_processes)(void* device, uint32_t* count, ProcessInfo* out_processes) = nullptr;
};
constexpr int kInsufficientSize = 7;
constexpr uint32_t kFirstProcesses = 256, kMostProcesses = 1 << 20;  // that a list has room for
constexpr uint64_t kNotAvailable = UINT64_MAX;
constexpr std::chrono::seconds kPatience{3};

base::Status unsupported(const std::string& why) {
  return {GPUSHARE_UNSUPPORTED, "what this process has of the device is not known: " + why};
}

template <class Function>
void find(const base::DynamicLibrary& library, const char* name, Function* out_function) {
  *out_function = reinterpret_cast<Function>(library.find(name));
}

base::Result<Nvml> load(const std::string& path) {
  GPUSHARE_ASSIGN_OR_RETURN(base::DynamicLibrary library, base::DynamicLibrary::open(path));
  Nvml nvml;
  find(library, "nvmlInit_v2", &nvml.init);
  find(library, "nvmlDeviceGetHandleByPciBusId_v2", &nvml.find_device);
  find(library, "nvmlDeviceGetComputeRunningProcesses_v3", &nvml.list_processes);
  if (nvml.init == nullptr || nvml.find_device == nullptr || nvml.list_processes == nullptr)
    return unsupported(path + " lacks a function of NVML");
  if (const int failed = nvml.init(); failed != 0)
    return unsupported(base::format("nvmlInit of %s failed (%d)", path.c_str(), failed));
  library.release();
  return nvml;
}

base::Result<Nvml> nvml_of(const std::string& driver_path) {
  struct Loaded {
    base::Mutex mutex;
    std::map<std::string, Nvml> of GPUSHARE_GUARDED_BY(mutex);
  };
  static Loaded* loaded = new Loaded;  // never destroyed, as drivers
  base::MutexLock lock(loaded->mutex);
  if (const auto known = loaded->of.find(driver_path); known != loaded->of.end()) return known->second;
  base::Result<Nvml> nvml = unsupported("no such driver");
  if (driver_path.starts_with('/')) nvml = load(driver_path);
  if (!nvml.ok()) nvml = load("libnvidia-ml.so.1");
  if (nvml.ok()) loaded->of[driver_path] = *nvml;
  return nvml;
}

// Asks NVML, which may hang.
base::Result<uint64_t> ask(const std::string& driver_path, uint32_t pci_address) {
  GPUSHARE_ASSIGN_OR_RETURN(const Nvml nvml, nvml_of(driver_path));
  const std::string address = base::format("%04x:%02x:%02x.%x", pci_address >> 16, pci_address >> 8 & 0xff,
                                           pci_address >> 3 & 0x1f, pci_address & 7);
  void* device = nullptr;
  if (const int failed = nvml.find_device(address.c_str(), &device); failed != 0)
    return unsupported(base::format("NVML knows no device at %s (%d)", address.c_str(), failed));
  std::vector<ProcessInfo> processes;
  int failed = kInsufficientSize;
  for (uint32_t room = kFirstProcesses; failed == kInsufficientSize && room <= kMostProcesses; room *= 16) {
    processes.resize(room);
    uint32_t count = room;
    failed = nvml.list_processes(device, &count, processes.data());
    processes.resize(std::min(count, room));
  }
  if (failed != 0) return unsupported(base::format("NVML lists no processes (%d)", failed));
  for (const ProcessInfo& each : processes)
    if (each.process == static_cast<uint32_t>(getpid()) && each.used_bytes != kNotAvailable)
      return each.used_bytes;
  return unsupported("NVML does not list this process");
}

base::Hangs g_hangs;

}  // namespace

base::Result<uint64_t> process_bytes(const std::string& driver_path, uint32_t pci_address) {
  return base::ask_patiently<uint64_t>(g_hangs, "NVML", kPatience,
                                       [=] { return ask(driver_path, pci_address); });
}

}  // namespace gpushare::device::cuda
