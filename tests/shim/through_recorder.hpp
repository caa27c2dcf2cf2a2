// through_recorder.hpp: the recording driver as tests use it: its own functions, past anything that is preloaded.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

#include <cstdlib>

#include "doubles/cuda_recorder/recorder.h"

inline void* driver() {
  static void* handle = dlopen(std::getenv("GPUSHARE_CUDA_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  return handle;
}
// A function of the recording driver's control interface.
template <class F>
F control(const char* name) {
  return reinterpret_cast<F>(dlsym(driver(), name));
}
