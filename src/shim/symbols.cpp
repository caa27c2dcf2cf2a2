// symbols.cpp: the ways by which programs come to functions of the driver: dlsym and dlvsym, dlopen, cuGetProcAddress.
// Each asks the C library or the driver first, with what the program gave, and answers with the shim's entry of the
// function that came back.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <cstring>

#include "shim/driver.hpp"
#include "shim/nvml.hpp"
#include "shim/table.hpp"

extern "C" {
// The arguments as entries.S saved them, in reverse order.
struct gpushare_shim_arguments {
  void* third;
  void* second;
  void* first;
};
void* gpushare_shim_look_dlsym(gpushare_shim_arguments* saved);
void* gpushare_shim_look_dlvsym(gpushare_shim_arguments* saved);
void* gpushare_shim_look_dlopen(gpushare_shim_arguments* saved);
extern void* gpushare_shim_dlsym;
extern void* gpushare_shim_dlvsym;
extern void* gpushare_shim_dlopen;
void* dlsym(void* handle, const char* name) noexcept;
void* dlvsym(void* handle, const char* name, const char* version) noexcept;
void* dlopen(const char* path, int flags) noexcept;
}

namespace gpushare::shim {
namespace {

bool classified(int entry) {
  return kEntryInfo[entry].cls != Class::pass;
}

// The shim's answer for `name` in `handle`; null: the C library's answer holds.
void* answer(void* handle, const char* name) {
  if (name == nullptr) return nullptr;
  if (name[0] == 'd' && name[1] == 'l') {
    // A program that asks the C library for these by hand gets the shim's too.
    void* own = same(name, "dlsym")    ? reinterpret_cast<void*>(&dlsym)
                : same(name, "dlvsym") ? reinterpret_cast<void*>(&dlvsym)
                : same(name, "dlopen") ? reinterpret_cast<void*>(&dlopen)
                                       : nullptr;
    if (own == nullptr || handle == RTLD_NEXT) return nullptr;
    void* found = libc_dlsym(handle, name);
    return found == gpushare_shim_dlsym || found == gpushare_shim_dlvsym || found == gpushare_shim_dlopen
               ? own
               : nullptr;
  }
  const bool nvml = begins(name, "nvml");
  if (!nvml && (name[0] != 'c' || name[1] != 'u')) return nullptr;
  const int entry = nvml ? -1 : find_entry(name);
  if (nvml ? nvml_hook(name) == nullptr : entry < 0 || !classified(entry)) return nullptr;

  if (handle == RTLD_NEXT || handle == RTLD_DEFAULT) {
    // The caller does not matter here: the next definition is the shim's, and the driver is behind it.
    if (nvml) return nullptr;
    return driver_handle(false) != nullptr && libc_dlsym(driver_handle(false), name) != nullptr
               ? gpushare_shim_entries[entry]
               : nullptr;
  }
  void* const found = libc_dlsym(handle, name);
  if (found == nullptr) return nullptr;
  if (nvml) return nvml_adopt(name, found);
  adopt_driver(found);
  void* const driver = driver_handle(false);
  return driver != nullptr && libc_dlsym(driver, name) == found ? gpushare_shim_entries[entry] : nullptr;
}

// The entry for a function that the driver returned for `base`.
void* hook_of(const char* base, void* function, int version, uint64_t flags) {
  // The functions of that name: all versions and stream variants.
  int fallback = -1, best = 0;
  for (int i = 0; i < kEntries && kEntryInfo[i].base != nullptr; ++i) {
    if (std::strcmp(kEntryInfo[i].base, base) != 0) continue;
    if (!classified(i)) continue;
    if (real_function(i) == function) return gpushare_shim_entries[i];
    // A driver may return another address than it exports. Then the version and the flags decide as they do for the driver: the
    // newest that is not newer than asked for, of the stream variant asked for where there is one. The driver may be
    // older than the version asked for, so only what it has counts.
    const char* name = kEntryInfo[i].name;
    const size_t length = std::strlen(name);
    const bool per_thread = length > 5 && (std::strcmp(name + length - 5, "_ptsz") == 0 ||
                                           std::strcmp(name + length - 5, "_ptds") == 0);
    const bool asked_per_thread = (flags & 2U) != 0;
    if (kEntryInfo[i].version > version || (per_thread && !asked_per_thread)) continue;
    const int rank = kEntryInfo[i].version + (per_thread ? 1000000 : 0);
    if (rank >= best && driver_has(i)) fallback = i, best = rank;
  }
  return fallback >= 0 ? gpushare_shim_entries[fallback] : function;
}

}  // namespace
}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

void* gpushare_shim_look_dlsym(gpushare_shim_arguments* saved) {
  find_libc();
  return answer(saved->first, static_cast<const char*>(saved->second));
}
// Neither the driver nor NVML versions its symbols: with a version the answer is the same.
void* gpushare_shim_look_dlvsym(gpushare_shim_arguments* saved) {
  find_libc();
  const auto* name = static_cast<const char*>(saved->second);
  return name != nullptr && name[0] == 'd' ? nullptr : answer(saved->first, name);
}
// A library opened with RTLD_DEEPBIND would see the driver and the C library before the shim: the flag is taken away.
void* gpushare_shim_look_dlopen(gpushare_shim_arguments* saved) {
  find_libc();
  saved->second =
      reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(saved->second) & ~uintptr_t{RTLD_DEEPBIND});
  return nullptr;
}

extern "C" {

Result gpushare_hook_cuGetProcAddress(P name, P out_function, I version, L flags) {
  const Result result = real(kEntry_cuGetProcAddress, name, out_function, version, flags);
  auto** function = static_cast<void**>(out_function);
  if (result == kSuccess && name != nullptr && function != nullptr && *function != nullptr)
    *function = hook_of(static_cast<const char*>(name), *function, static_cast<int>(version), flags);
  return result;
}

Result gpushare_hook_cuGetProcAddress_v2(P name, P out_function, I version, L flags, P out_status) {
  const Result result = real(kEntry_cuGetProcAddress_v2, name, out_function, version, flags, out_status);
  auto** function = static_cast<void**>(out_function);
  if (result == kSuccess && name != nullptr && function != nullptr && *function != nullptr)
    *function = hook_of(static_cast<const char*>(name), *function, static_cast<int>(version), flags);
  return result;
}
}
