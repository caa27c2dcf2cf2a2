// symbols.cpp: the ways by which programs come to functions of the driver: dlsym and dlvsym, dlopen, cuGetProcAddress.
// Each asks the C library or the driver first, with what the program gave, and answers with the shim's entry of the
// function that came back.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <unistd.h>

#include <cstring>

#include "shim/books.hpp"
#include "shim/driver.hpp"
#include "shim/group.hpp"
#include "shim/nvml.hpp"
#include "shim/settings.hpp"
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

// A function's name without the suffixes of its version and its stream variant, in `out`; false: it does not fit.
bool base_of(const char* name, char* out, size_t room) {
  size_t length = std::strlen(name);
  if (length >= room) return false;
  std::memcpy(out, name, length + 1);
  if (length > 5 && (same(out + length - 5, "_ptsz") || same(out + length - 5, "_ptds")))
    out[length -= 5] = 0;
  size_t digits = length;
  while (digits > 2 && out[digits - 1] >= '0' && out[digits - 1] <= '9') --digits;
  if (digits < length && out[digits - 1] == 'v' && out[digits - 2] == '_') out[digits - 2] = 0;
  return true;
}
// Whether this is a function that the table does not list at all, or a newer version of one before which the shim stands.
// Either may give memory that nobody counts.
bool is_newer(const char* name) {
  char base[128], other[128];
  if (!base_of(name, base, sizeof base)) return false;
  bool listed = false;
  for (int i = 0; i < kEntries; ++i) {
    if (!base_of(kEntryInfo[i].name, other, sizeof other) || !same(other, base)) continue;
    if (classified(i)) return true;
    listed = true;
  }
  return !listed;
}

Result refused() {
  return kNotSupported;
}

// `function` came after this library. Its parameters are unknown, so it can have no hook. Returns what the program gets
// instead.
__attribute__((noinline)) void* newer_function(const char* name, void* function, void* refusal) {
  group();  // reads the settings
  const bool closed = load_settings().fails_closed;
  static bool told = false;
  if (!__atomic_exchange_n(&told, true, __ATOMIC_RELAXED))
    log_line("process %d: the driver's %s is newer than this library: %s", static_cast<int>(getpid()), name,
             closed ? "it is refused (GPUSHARE_SHIM_FAIL=closed)"
                    : "what it does is neither counted nor held back");
  return closed ? refusal : function;
}

// A driver that is newer than the table has functions that the table does not know.
void* check_age(const char* name, void* function) {
  if (function == nullptr || !is_newer(name)) return function;
  return newer_function(name, function, reinterpret_cast<void*>(refused));
}

// NVML's answers under a limit are the group's; those of a version that the shim does not know would be the whole device's.
int nvml_refused() {
  constexpr int kNvmlNotSupported = 3;
  return kNvmlNotSupported;
}
// The shim's answer for a function of NVML; null: the C library's answer holds.
void* answer_of_nvml(void* handle, const char* name) {
  if (handle == RTLD_NEXT || handle == RTLD_DEFAULT) return nullptr;
  char base[128];
  const bool known = nvml_hook(name) != nullptr;
  if (!known && (!base_of(name, base, sizeof base) || nvml_hook(base) == nullptr)) return nullptr;
  void* const found = libc_dlsym(handle, name);
  if (found == nullptr) return nullptr;
  if (known) return nvml_adopt(name, found);
  group();  // reads the settings
  return limited() ? newer_function(name, found, reinterpret_cast<void*>(nvml_refused)) : nullptr;
}

// The same as answer(), for a library that the program has opened.
void* answer_of_library(void* handle, const char* name, int entry) {
  void* const found = libc_dlsym(handle, name);
  void* const driver = driver_handle(false);
  if (found == nullptr) {
    // A driver may have functions that the proxy lacks.
    if (entry >= 0 || !is_proxy(handle) || driver_handle(true) == nullptr) return nullptr;
    void* const real = check_age(name, libc_dlsym(driver_handle(true), name));
    if (real != nullptr) forget_error();
    return real;
  }
  if (driver == nullptr || libc_dlsym(driver, name) != found) {
    if (!adopt_driver(found)) return nullptr;
    // Every function of a second driver is the first one's.
    void* const first = libc_dlsym(driver_handle(true), name);
    if (first != found) return entry >= 0 ? gpushare_shim_entries[entry] : check_age(name, first);
  }
  if (entry < 0) return check_age(name, found);
  return classified(entry) ? gpushare_shim_entries[entry] : nullptr;
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
  if (begins(name, "nvml")) return answer_of_nvml(handle, name);
  // cuInit, but neither cudaMalloc nor cublasCreate.
  if (name[0] != 'c' || name[1] != 'u' || name[2] < 'A' || name[2] > 'Z') return nullptr;
  const int entry = find_entry(name);
  if (handle == RTLD_NEXT || handle == RTLD_DEFAULT) {
    // The caller does not matter here: the next definition is the shim's, and the driver is behind it.
    return entry >= 0 && classified(entry) && driver_handle(false) != nullptr &&
                   libc_dlsym(driver_handle(false), name) != nullptr
               ? gpushare_shim_entries[entry]
               : nullptr;
  }
  return answer_of_library(handle, name, entry);
}

bool is_per_thread(int entry) {
  const char* const name = kEntryInfo[entry].name;
  const size_t length = std::strlen(name);
  return length > 5 && (same(name + length - 5, "_ptsz") || same(name + length - 5, "_ptds"));
}

// Asks the driver for a function by its version; null: it has none.
void* driver_find(const char* base, int version, uint64_t flags) {
  const auto name = const_cast<char*>(base);
  void* function = nullptr;
  const Result result = driver_has(kEntry_cuGetProcAddress_v2)
                            ? real(kEntry_cuGetProcAddress_v2, name, &function, version, flags, nullptr)
                            : real(kEntry_cuGetProcAddress, name, &function, version, flags);
  return result == kSuccess ? function : nullptr;
}

// The entry for a function that the driver returned for `base`, or the function itself where the shim stands before
// none of that name; null: one that the table does not know.
void* hook_of(const char* base, void* function, int version, uint64_t flags) {
  const bool asked_per_thread = (flags & 2U) != 0;
  int known = -1, best = 0;
  bool any = false;
  // The functions of that name: all versions and stream variants.
  for (int i = 0; i < kEntries && kEntryInfo[i].base != nullptr; ++i) {
    if (std::strcmp(kEntryInfo[i].base, base) != 0) continue;
    if (real_function(i) == function) return classified(i) ? gpushare_shim_entries[i] : function;
    any = any || classified(i);
    const int rank = kEntryInfo[i].version + (is_per_thread(i) ? 1000000 : 0);
    if (kEntryInfo[i].version > version || (is_per_thread(i) && !asked_per_thread) || rank < best ||
        !driver_has(i))
      continue;
    known = i;
    best = rank;
  }
  if (!any) return is_newer(base) ? nullptr : function;
  // A driver may return another address than it exports. The function is then the newest version of the table that is
  // not newer than asked for, if the driver returns the same for that version.
  if (known < 0 || driver_find(base, kEntryInfo[known].version, flags) != function) return nullptr;
  return classified(known) ? gpushare_shim_entries[known] : function;
}

// The answer for the program, from the driver's answer.
Result answer_version(Result result, const char* base, void** function, int version, uint64_t flags,
                      int* out_status) {
  if (result != kSuccess || base == nullptr || function == nullptr || *function == nullptr) return result;
  if (void* const hook = hook_of(base, *function, version, flags)) {
    *function = hook;
    return result;
  }
  if (check_age(base, *function) == *function) return result;
  constexpr int kVersionNotSufficient = 2;
  *function = nullptr;
  if (out_status != nullptr) *out_status = kVersionNotSufficient;
  return kNotFound;
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
  return answer_version(real(kEntry_cuGetProcAddress, name, out_function, version, flags),
                        static_cast<const char*>(name), static_cast<void**>(out_function),
                        static_cast<int>(version), flags, nullptr);
}

Result gpushare_hook_cuGetProcAddress_v2(P name, P out_function, I version, L flags, P out_status) {
  return answer_version(real(kEntry_cuGetProcAddress_v2, name, out_function, version, flags, out_status),
                        static_cast<const char*>(name), static_cast<void**>(out_function),
                        static_cast<int>(version), flags, static_cast<int*>(out_status));
}
}
