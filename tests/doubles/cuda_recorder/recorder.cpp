// recorder.cpp: a body for every row of the table. memory.cpp replaces those that do something.
// SPDX-License-Identifier: Apache-2.0
#include "recorder.hpp"

namespace recorder {
recorder_call g_last = {-1, 0, {}};
int g_armed = -1;
int g_result = 0;
std::atomic<uint64_t> g_work{0};
}  // namespace recorder

using namespace recorder;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) \
  RECORDER_API __attribute__((weak)) Result name parameters {           \
    return Body<kEntry_##name, Class::cls>::call arguments;             \
  }
#define GPUSHARE_NAME(cls, name)                     \
  RECORDER_API __attribute__((weak)) Result name() { \
    return kNotSupported;                            \
  }
#include "shim/driver_table.inc"
#undef GPUSHARE_ENTRY
#undef GPUSHARE_NAME

RECORDER_API void recorder_arm(int entry, int result) {
  g_armed = entry;
  g_result = result;
  g_last.entry = -1;
}
RECORDER_API const recorder_call* recorder_last() {
  return &g_last;
}
RECORDER_API void* recorder_function(int entry) {
  static void* const functions[] = {
#define GPUSHARE_ENTRY(cls, name, base, version, parameters, arguments) reinterpret_cast<void*>(&name),
#define GPUSHARE_NAME(cls, name) reinterpret_cast<void*>(&name),
#include "shim/driver_table.inc"
#undef GPUSHARE_ENTRY
#undef GPUSHARE_NAME
  };
  return functions[entry];
}
RECORDER_API uint64_t recorder_work() {
  return g_work.load();
}
