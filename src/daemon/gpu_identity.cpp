// SPDX-License-Identifier: Apache-2.0
#include "daemon/gpu_identity.hpp"

#include <chrono>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>

#include "base/dynamic_library.hpp"
#include "base/log.hpp"
#include "base/patient.hpp"
#include "base/status.hpp"

namespace gpushare::daemon {
namespace {

// As nvml.h declares them; an instance has a handle like a GPU's. Results are 0 for success.
using Handle = void*;
struct MemoryInfo {
  uint64_t total_bytes, free_bytes, used_bytes;
};
struct Functions {
  int (*init)();
  int (*count)(unsigned* out_count);
  int (*by_index)(unsigned index, Handle* out_gpu);
  int (*by_address)(const char* address, Handle* out_gpu);
  int (*uuid)(Handle, char* out, unsigned size);
  int (*name)(Handle, char* out, unsigned size);
  int (*memory)(Handle, MemoryInfo* out);
  int (*driver_version)(char* out, unsigned size);
  int (*mig_mode)(Handle, unsigned* out_current, unsigned* out_pending);
  int (*most_instances)(Handle, unsigned* out_count);
  int (*instance)(Handle, unsigned index, Handle* out_instance);
};

template <class Function>
bool find(const base::DynamicLibrary& library, const char* name, Function& out_function) {
  out_function = reinterpret_cast<Function>(library.find(name));
  return out_function != nullptr;
}

std::optional<Functions> load(const std::string& path) {
  auto library = base::DynamicLibrary::open(path);
  if (!library.ok()) return std::nullopt;
  Functions out{};
  const bool complete =
      find(*library, "nvmlInit_v2", out.init) && find(*library, "nvmlDeviceGetCount_v2", out.count) &&
      find(*library, "nvmlDeviceGetHandleByIndex_v2", out.by_index) &&
      find(*library, "nvmlDeviceGetHandleByPciBusId_v2", out.by_address) &&
      find(*library, "nvmlDeviceGetUUID", out.uuid) && find(*library, "nvmlDeviceGetName", out.name) &&
      find(*library, "nvmlDeviceGetMemoryInfo", out.memory) &&
      find(*library, "nvmlSystemGetDriverVersion", out.driver_version);
  if (!complete || out.init() != 0) return std::nullopt;
  // Drivers before 450 have no MIG.
  (void)find(*library, "nvmlDeviceGetMigMode", out.mig_mode);
  (void)find(*library, "nvmlDeviceGetMaxMigDeviceCount", out.most_instances);
  (void)find(*library, "nvmlDeviceGetMigDeviceHandleByIndex", out.instance);
  library->release();
  return out;
}

// A driver library that the operator chose may have NVML's functions itself.
const std::optional<Functions>& nvml() {
  static const auto* const loaded = new std::optional<Functions>([] {
    const char* const driver = std::getenv("GPUSHARE_CUDA_DRIVER");
    std::optional<Functions> out;
    if (driver != nullptr && *driver == '/') out = load(driver);
    return out ? out : load("libnvidia-ml.so.1");
  }());
  return *loaded;
}

template <class Ask>
std::string text_of(Ask&& ask) {
  char text[96] = {};
  return ask(text, static_cast<unsigned>(sizeof text - 1)) == 0 ? std::string(text) : std::string();
}

GpuIdentity describe(const Functions& of, Handle handle) {
  GpuIdentity out;
  out.uuid = text_of([&](char* text, unsigned size) { return of.uuid(handle, text, size); });
  out.product = text_of([&](char* text, unsigned size) { return of.name(handle, text, size); });
  out.driver_version = text_of([&](char* text, unsigned size) { return of.driver_version(text, size); });
  MemoryInfo memory{};
  if (of.memory(handle, &memory) == 0) out.total_bytes = memory.total_bytes;
  return out;
}

std::vector<GpuIdentity> instances(const Functions& of, Handle gpu) {
  std::vector<GpuIdentity> out;
  unsigned on = 0, pending = 0, most = 0;
  if (of.mig_mode == nullptr || of.most_instances == nullptr || of.instance == nullptr ||
      of.mig_mode(gpu, &on, &pending) != 0 || on == 0 || of.most_instances(gpu, &most) != 0)
    return out;
  const GpuIdentity parent = describe(of, gpu);
  for (unsigned index = 0; index < most; ++index) {
    Handle handle = nullptr;
    if (of.instance(gpu, index, &handle) != 0) continue;  // a place without an instance
    GpuIdentity found = describe(of, handle);
    constexpr std::string_view kMark = " MIG ";
    if (const size_t mark = found.product.find(kMark); mark != std::string::npos)
      found.mig_profile = found.product.substr(mark + kMark.size());
    found.product = parent.product;
    found.parent_uuid = parent.uuid;
    out.push_back(std::move(found));
  }
  return out;
}

GpuIdentity find_identity(uint32_t pci_address) {
  if (!nvml()) return {};
  const std::string address = base::format("%04x:%02x:%02x.%x", pci_address >> 16, pci_address >> 8 & 0xff,
                                           pci_address >> 3 & 0x1f, pci_address & 7);
  Handle gpu = nullptr;
  if (nvml()->by_address(address.c_str(), &gpu) != 0) return {};
  const std::vector<GpuIdentity> parts = instances(*nvml(), gpu);
  if (parts.empty()) return describe(*nvml(), gpu);
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  // CUDA shows only the first instance of a list. The beginning of a uuid names a device, too.
  const std::string_view names = visible != nullptr ? visible : "", first = names.substr(0, names.find(','));
  for (const GpuIdentity& part : parts)
    if (first.starts_with("MIG-") && part.uuid.starts_with(first)) return part;
  return parts.front();
}

std::vector<GpuIdentity> find_all() {
  std::vector<GpuIdentity> out;
  unsigned count = 0;
  if (!nvml() || nvml()->count(&count) != 0) return out;
  for (unsigned index = 0; index < count; ++index) {
    Handle gpu = nullptr;
    if (nvml()->by_index(index, &gpu) != 0) continue;
    std::vector<GpuIdentity> parts = instances(*nvml(), gpu);
    if (parts.empty()) parts.push_back(describe(*nvml(), gpu));
    out.insert(out.end(), parts.begin(), parts.end());
  }
  return out;
}

template <class T>
T patiently(std::function<base::Result<T>()> ask) {
  constexpr std::chrono::seconds kPatience{20};  // an NVML that starts its GPUs takes some seconds
  static base::Hangs hangs;
  base::Result<T> found = base::ask_patiently<T>(hangs, "NVML", kPatience, std::move(ask));
  if (found.ok()) return *std::move(found);
  base::log(base::kWarning, found.status().with_context("names of GPUs are not known").to_string());
  return {};
}

}  // namespace

GpuIdentity identity_of(uint32_t pci_address) {
  if (pci_address == 0) return {};
  return patiently<GpuIdentity>([pci_address] { return find_identity(pci_address); });
}

std::vector<GpuIdentity> all_gpus() {
  return patiently<std::vector<GpuIdentity>>(find_all);
}

}  // namespace gpushare::daemon
