// driver.hpp: finds the real driver, and the C library's own dlsym and dlopen behind the shim's.
// Threads: every function may be called from any thread. Nothing here holds a lock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

namespace gpushare::shim {

// Comparisons by hand: a sanitizer's runtime asks for functions before its own strcmp works.
inline bool same(const char* text, const char* other) {
  while (*text == *other && *text != 0) ++text, ++other;
  return *text == *other;
}
inline bool begins(const char* text, const char* with) {
  while (*with != 0 && *text == *with) ++text, ++with;
  return *with == 0;
}

// The C library's own functions, found in its symbol table: a call by name would come back to the shim.
// find_libc() fills gpushare_shim_dlsym, _dlvsym and _dlopen, where entries.S goes on to.
void find_libc();
void* libc_dlsym(void* handle, const char* name);
void* libc_dlopen(const char* path, int flags);
// The function of the C library, or that of a program or library before it that stands in for it: what a call by name
// would be bound to, found without the loader's lock. Null: there is none of that name.
void* bound_symbol(const char* name);
bool libc_dladdr(const void* address, Dl_info* out_info);

// The driver's handle; null when there is none on this machine. `may_load` = false: only if the process has it already.
// The driver is looked for in this order: the file to which the program is linked, GPUSHARE_CUDA_DRIVER, libcuda.so.1 as
// the loader finds it, and, where that is the proxy, the folders of LD_LIBRARY_PATH and those where systems keep it.
void* driver_handle(bool may_load);
// The program has found this function in a library. If the library's name is that of a CUDA driver, the library becomes
// the process's driver, unless the process has one: a second driver would not be held. False: the library is no driver,
// or it is the proxy and no driver is there yet.
bool adopt_driver(const void* function);
// Whether the handle is that of this library's proxy of libcuda.so.1.
bool is_proxy(void* handle);
// Forgets what dlerror() would say of a look-up that this library has answered.
void forget_error();
// The driver's path, for messages; "none" without a driver.
const char* driver_path();

// Writes "gpushare: ..." and a newline to stderr in one piece.
void log_line(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace gpushare::shim
