// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/nvml.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/dynamic_library.hpp"
#include "base/mutex.hpp"
#include "base/no_signals.hpp"

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

// Of the thread that asks NVML and the one that waits for it; whoever is last destroys it.
struct Question {
  base::Mutex mutex;
  base::ConditionVariable answered;
  bool done GPUSHARE_GUARDED_BY(mutex) = false;
  bool given_up GPUSHARE_GUARDED_BY(mutex) = false;
  base::Result<uint64_t> answer GPUSHARE_GUARDED_BY(mutex) = unsupported("NVML has not answered");
};
// The threads of this process that hang in NVML. A child of fork has none.
std::atomic<int> g_hang{0};
std::atomic<pid_t> g_hang_in{0};

void answer(const std::shared_ptr<Question>& question, const std::string& driver_path, uint32_t pci_address) {
  base::Result<uint64_t> found = unsupported("no host memory");
  try {
    found = ask(driver_path, pci_address);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is not known then
  }
  base::MutexLock lock(question->mutex);
  question->answer = std::move(found);
  question->done = true;
  if (question->given_up) --g_hang;
  question->answered.notify_all();
}

}  // namespace

base::Result<uint64_t> process_bytes(const std::string& driver_path, uint32_t pci_address) {
  if (g_hang_in.exchange(getpid()) != getpid()) g_hang = 0;
  if (g_hang > 0) return unsupported("NVML hangs in another call");
  const auto question = std::make_shared<Question>();
  std::thread thread;
  try {
    const base::NoSignals no_signals;
    thread = std::thread([=] { answer(question, driver_path, pci_address); });
  } catch (const std::system_error&) {
    return unsupported("no thread can be started that asks NVML");
  }
  const auto until = std::chrono::steady_clock::now() + kPatience;
  base::MutexLock lock(question->mutex);
  while (!question->done && question->answered.wait_until(question->mutex, until)) {
  }
  if (!question->done) {
    question->given_up = true;
    ++g_hang;
    thread.detach();
    return unsupported("NVML has not answered for 3 s");
  }
  base::Result<uint64_t> found = std::move(question->answer);
  lock.unlock();
  thread.join();
  return found;
}

}  // namespace gpushare::device::cuda
