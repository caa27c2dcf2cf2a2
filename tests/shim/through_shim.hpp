// through_shim.hpp: calls of the driver as a program makes them, with the shim preloaded over the recording driver; in builds with sanitizers, where the
// shim is linked to the test, through the shim's entries.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

#include <cstdlib>

#include "doubles/cuda_recorder/recorder.h"
#include "shim/table.hpp"

using gpushare::shim::find_entry;
using gpushare::shim::kInvalidValue, gpushare::shim::kOutOfMemory, gpushare::shim::kSuccess;
using gpushare::shim::Result;

inline void* driver() {
  static void* handle = dlopen(std::getenv("GPUSHARE_CUDA_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  return handle;
}
inline void* entry(const char* name) {
#ifdef GPUSHARE_SHIM_LINKED
  return gpushare_shim_entries[find_entry(name)];
#else
  return dlsym(driver(), name);
#endif
}
template <class... A>
Result cu(const char* name, A... arguments) {
  return reinterpret_cast<Result (*)(A...)>(entry(name))(arguments...);
}
// A function of the recording driver's control interface.
template <class F>
F control(const char* name) {
  return reinterpret_cast<F>(dlsym(driver(), name));
}
inline void arm(const char* name, int result) {
  control<decltype(&recorder_arm)>("recorder_arm")(name != nullptr ? find_entry(name) : -1, result);
}
