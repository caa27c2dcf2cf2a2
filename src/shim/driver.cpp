// SPDX-License-Identifier: Apache-2.0
#include "shim/driver.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "shim/process.hpp"
#include "shim/table.hpp"
#include "shim/words.hpp"

extern "C" {
// The addresses to which entries.S goes on.
void* gpushare_shim_dlsym;
void* gpushare_shim_dlvsym;
void* gpushare_shim_dlopen;
void* gpushare_shim_resolve_slot(void** slot);
}

#ifdef GPUSHARE_SHIM_SANITIZED
// The sanitizers' runtimes ask for their options here, since programs may clear the environment. The shim is preloaded before
// AddressSanitizer's runtime. ThreadSanitizer cannot know of the locks of programs that were built without it, such as shells and
// Python, and would end a child of fork that starts a thread.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "verify_asan_link_order=0";
}
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "ignore_noninstrumented_modules=1:die_after_fork=0";
}
#endif

namespace gpushare::shim {
namespace {

// A function in the symbol table of one loaded library.
void* find_in(const link_map& library, const char* name) {
  const ElfW(Sym)* symbols = nullptr;
  const char* strings = nullptr;
  const uint32_t* hashes = nullptr;
  for (const ElfW(Dyn)* dynamic = library.l_ld; dynamic->d_tag != DT_NULL; ++dynamic) {
    // glibc has relocated it in memory, other than that of the kernel's own library (vdso).
    const uintptr_t address =
        dynamic->d_un.d_ptr + (dynamic->d_un.d_ptr < library.l_addr ? library.l_addr : 0);
    if (dynamic->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(address);
    if (dynamic->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(address);
    if (dynamic->d_tag == DT_GNU_HASH) hashes = reinterpret_cast<const uint32_t*>(address);
  }
  if (symbols == nullptr || strings == nullptr || hashes == nullptr) return nullptr;
  uint32_t hash = 5381;
  for (const char* c = name; *c != 0; ++c) hash = hash * 33 + static_cast<unsigned char>(*c);
  const uint32_t buckets = hashes[0], first = hashes[1], bloom_words = hashes[2];
  const uint32_t* const bucket = hashes + 4 + bloom_words * (sizeof(ElfW(Addr)) / 4);
  const uint32_t* const chain = bucket + buckets;
  uint32_t index = bucket[hash % buckets];
  if (index < first) return nullptr;
  for (;; ++index) {
    const uint32_t entry = chain[index - first];
    const ElfW(Sym)& symbol = symbols[index];
    if ((entry | 1U) == (hash | 1U) && symbol.st_shndx != SHN_UNDEF && same(strings + symbol.st_name, name))
      return reinterpret_cast<void*>(library.l_addr + symbol.st_value);
    if ((entry & 1U) != 0) return nullptr;
  }
}

bool is_libc(const link_map& library) {
  const char* slash = std::strrchr(library.l_name, '/');
  const char* file = slash != nullptr ? slash + 1 : library.l_name;
  // Until glibc 2.34 the functions were in libraries of their own.
  static const char* const names[] = {"libc.so", "libc-",         "libdl.so",
                                      "libdl-",  "libpthread.so", "libpthread-"};
  for (const char* name : names)
    if (begins(file, name)) return true;
  return false;
}
// The C library's own function. The loader's list of libraries is read without its lock: those up to the C library are there from
// the start and stay. (dl_iterate_phdr takes the lock. ThreadSanitizer's runtime replaces it and asks for functions before its own is ready.)
void* libc_function(void** slot, const char* name) {
  void* function = load(*slot);
  if (function != nullptr) return function;
  const link_map* library = _r_debug.r_map;
  for (; function == nullptr && library != nullptr; library = library->l_next)
    if (is_libc(*library)) function = find_in(*library, name);
  store(*slot, function);
  return function;
}

void* g_handle = nullptr;
char g_path[512] = "none";

// Opens `path` unless it is the proxy of this library.
void* open_driver(const char* path, bool may_load) {
  void* handle = libc_dlopen(path, RTLD_LAZY | RTLD_LOCAL | (may_load ? 0 : RTLD_NOLOAD));
  return handle != nullptr && !is_proxy(handle) ? handle : nullptr;
}

// The first driver in a list of folders, separated by ':'.
void* open_in(const char* folders, bool may_load) {
  for (const char* at = folders; at != nullptr && *at != 0;) {
    const char* end = std::strchr(at, ':');
    const int length = static_cast<int>(end != nullptr ? end - at : static_cast<ptrdiff_t>(std::strlen(at)));
    char path[512];
    const int written = std::snprintf(path, sizeof path, "%.*s/libcuda.so.1", length, at);
    if (length > 0 && written < static_cast<int>(sizeof path))
      if (void* handle = open_driver(path, may_load)) return handle;
    at = end != nullptr ? end + 1 : nullptr;
  }
  return nullptr;
}

void publish(void* handle) {
  void* expected = nullptr;
  if (!__atomic_compare_exchange_n(&g_handle, &expected, handle, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    return;
  Dl_info info;
  void* init = libc_dlsym(handle, "cuInit");
  if (init != nullptr && libc_dladdr(init, &info) && info.dli_fname != nullptr)
    std::snprintf(g_path, sizeof g_path, "%s", info.dli_fname);
}

// A library is a CUDA driver by its own name, or by that of its file.
bool is_driver_name(const char* name) {
  const char* const slash = std::strrchr(name, '/');
  return begins(slash != nullptr ? slash + 1 : name, "libcuda");
}
// The library's own name (DT_SONAME), as it lies in memory; null: it has none.
const char* own_name(const void* base) {
  const auto* const header = static_cast<const ElfW(Ehdr)*>(base);
  if (header->e_type != ET_DYN) return nullptr;  // a program, whose addresses are not from its base on
  const auto address = reinterpret_cast<uintptr_t>(base);
  const auto* const segments = reinterpret_cast<const ElfW(Phdr)*>(address + header->e_phoff);
  for (int i = 0; i < header->e_phnum; ++i) {
    if (segments[i].p_type != PT_DYNAMIC) continue;
    const char* strings = nullptr;
    uint64_t name = 0;
    for (const auto* at = reinterpret_cast<const ElfW(Dyn)*>(address + segments[i].p_vaddr);
         at->d_tag != DT_NULL; ++at) {
      if (at->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(at->d_un.d_ptr);
      if (at->d_tag == DT_SONAME) name = at->d_un.d_val;
    }
    return strings != nullptr && name != 0 ? strings + name : nullptr;
  }
  return nullptr;
}
// Where a function of a driver comes from; null: from a library that is none.
const char* file_of_driver(const void* function) {
  Dl_info info;
  if (!libc_dladdr(function, &info) || info.dli_fname == nullptr || info.dli_fbase == nullptr) return nullptr;
  const char* const own = own_name(info.dli_fbase);
  return is_driver_name(info.dli_fname) || (own != nullptr && is_driver_name(own)) ? info.dli_fname : nullptr;
}

Result missing() {
  return kNotFound;
}
Result no_driver() {
  return kNoDevice;
}

}  // namespace

void find_libc() {
  libc_function(&gpushare_shim_dlsym, "dlsym");
  libc_function(&gpushare_shim_dlvsym, "dlvsym");
  libc_function(&gpushare_shim_dlopen, "dlopen");
}

void* libc_dlsym(void* handle, const char* name) {
  return reinterpret_cast<void* (*)(void*, const char*)>(libc_function(&gpushare_shim_dlsym, "dlsym"))(handle,
                                                                                                       name);
}
void* bound_symbol(const char* name) {
  void* function = nullptr;
  bool past = false;  // libraries behind the C library may be unloaded meanwhile
  for (const link_map* at = _r_debug.r_map; function == nullptr && at != nullptr; at = at->l_next) {
    past = past || is_libc(*at);
    if (!past || is_libc(*at)) function = find_in(*at, name);
  }
  return function;
}
bool libc_dladdr(const void* address, Dl_info* out_info) {
  // By name it would be a symbol of glibc 2.34, where it moved from libdl to libc.
  static void* slot = nullptr;
  auto* function = reinterpret_cast<int (*)(const void*, Dl_info*)>(libc_function(&slot, "dladdr"));
  return function != nullptr && function(address, out_info) != 0;
}
void* libc_dlopen(const char* path, int flags) {
  return reinterpret_cast<void* (*)(const char*, int)>(libc_function(&gpushare_shim_dlopen, "dlopen"))(path,
                                                                                                       flags);
}

void* driver_handle(bool may_load) {
  if (void* handle = load(g_handle)) return handle;
  // A program that is linked to a driver has that one.
  if (const void* linked = libc_dlsym(RTLD_DEFAULT, "cuInit"); linked != nullptr && adopt_driver(linked))
    return load(g_handle);
  void* handle = nullptr;
  if (const char* named = setting("GPUSHARE_CUDA_DRIVER"); named != nullptr && *named != 0) {
    handle = open_driver(named, may_load);
    static bool told = false;
    if (handle == nullptr && may_load && !__atomic_exchange_n(&told, true, __ATOMIC_RELAXED))
      log_line("cannot open GPUSHARE_CUDA_DRIVER=%s", named);
  } else {
    handle = open_driver("libcuda.so.1", may_load);
    if (handle == nullptr) handle = open_in(secure_getenv("LD_LIBRARY_PATH"), may_load);
    if (handle == nullptr)
      handle = open_in(
          "/usr/lib/x86_64-linux-gnu:/usr/lib64:/usr/lib:/usr/local/nvidia/lib64:/usr/local/cuda/compat:/usr/"
          "lib/wsl/lib:"
          "/run/opengl-driver/lib",
          may_load);
  }
  if (handle != nullptr) publish(handle);
  return load(g_handle);
}

bool adopt_driver(const void* function) {
  const char* const file = file_of_driver(function);
  if (file == nullptr) return false;
  if (load(g_handle) != nullptr) return true;
  void* const handle = open_driver(file, true);  // it may be in a namespace of its own (dlmopen)
  if (handle != nullptr) publish(handle);
  return handle != nullptr;
}

bool is_proxy(void* handle) {
  return libc_dlsym(handle, "gpushare_shim_is_proxy") != nullptr;
}

void forget_error() {
  static void* slot = nullptr;  // as dladdr
  if (auto* function = reinterpret_cast<char* (*)()>(libc_function(&slot, "dlerror"))) function();
}

const char* driver_path() {
  return g_path;
}

void* resolve(int entry) {
  void* const handle = driver_handle(true);
  void* function = nullptr;
  if (handle != nullptr) function = libc_dlsym(handle, kEntryInfo[entry].name);
  if (function == nullptr) function = reinterpret_cast<void*>(handle != nullptr ? missing : no_driver);
  // Without a driver the next call looks again: it may have been installed, or the program opens it by a path of its own.
  if (handle != nullptr) store(gpushare_shim_real[entry], function);
  return function;
}

bool driver_has(int entry) {
  void* const handle = driver_handle(true);
  return handle != nullptr && libc_dlsym(handle, kEntryInfo[entry].name) != nullptr;
}

void log_line(const char* format, ...) {
  char text[640] = "gpushare: ";
  va_list arguments;
  va_start(arguments, format);
  int length = 10 + std::vsnprintf(text + 10, sizeof text - 11, format, arguments);
  va_end(arguments);
  if (length > static_cast<int>(sizeof text) - 2) length = static_cast<int>(sizeof text) - 2;
  text[length] = '\n';
  if (write(STDERR_FILENO, text, static_cast<size_t>(length) + 1) < 0) return;  // nobody reads it
}

}  // namespace gpushare::shim

void* gpushare_shim_resolve_slot(void** slot) {
  return gpushare::shim::resolve(static_cast<int>(slot - gpushare_shim_real));
}
