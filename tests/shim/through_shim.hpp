// through_shim.hpp: calls of the driver as a program makes them, with the shim preloaded over the recording driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

#include "shim/table.hpp"
#include "through_recorder.hpp"

using gpushare::shim::find_entry;
using gpushare::shim::kInvalidValue, gpushare::shim::kOutOfMemory, gpushare::shim::kSuccess;
using gpushare::shim::Result;

inline void* entry(const char* name) {
  return dlsym(driver(), name);
}
template <class... A>
Result cu(const char* name, A... arguments) {
  return reinterpret_cast<Result (*)(A...)>(entry(name))(arguments...);
}
inline void arm(const char* name, int result) {
  control<decltype(&recorder_arm)>("recorder_arm")(name != nullptr ? find_entry(name) : -1, result);
}
