// SPDX-License-Identifier: Apache-2.0
#include "base/dynamic_library.hpp"

#include <dlfcn.h>

namespace gpushare::base {

Result<DynamicLibrary> DynamicLibrary::open(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return Status(GPUSHARE_UNAVAILABLE, "cannot open " + name + ": " + (reason ? reason : "unknown reason"));
  }
  return DynamicLibrary(handle);
}

DynamicLibrary& DynamicLibrary::operator=(DynamicLibrary&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

DynamicLibrary::~DynamicLibrary() {
  if (handle_ != nullptr) dlclose(handle_);
}

void* DynamicLibrary::find(const char* symbol) const {
  return dlsym(handle_, symbol);
}

}  // namespace gpushare::base
