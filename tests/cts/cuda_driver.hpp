// cuda_driver.hpp: the driver that the cuda backend of the test uses, called as the backend's user calls it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "cts.hpp"
#include "device/cuda/driver_api.hpp"

namespace gpushare::cts {

using namespace device::cuda::api;  // NOLINT(google-build-using-namespace): the driver's own type names

inline void* driver_library() {
  std::string path;
  const std::string spec = device_spec();
  if (const size_t at = spec.find("driver="); at != std::string::npos) {
    path = spec.substr(at + 7, spec.find('&', at) - at - 7);
  } else if (const char* named = std::getenv("GPUSHARE_CUDA_DRIVER"); named != nullptr) {
    path = named;
  }
  void* library = dlopen(path.empty() ? "libcuda.so.1" : path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  REQUIRE(library != nullptr);
  return library;
}

template <class Function>
Function* symbol(const char* name) {
  auto* found = reinterpret_cast<Function*>(dlsym(driver_library(), name));
  INFO(name);
  REQUIRE(found != nullptr);
  return found;
}

}  // namespace gpushare::cts
