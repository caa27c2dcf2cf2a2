// recorder.hpp: what the two files of the recording driver share. See recorder.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstring>

#include "recorder.h"
#include "shim/table.hpp"

#define RECORDER_API extern "C" __attribute__((visibility("default")))

namespace recorder {

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the kinds of parameters

extern recorder_call g_last;
extern int g_armed;
extern int g_result;
extern std::atomic<uint64_t> g_work;

template <class... A>
void note(int entry, A... arguments) {
  g_last.entry = entry;
  g_last.arguments = 0;
  std::memset(g_last.values, 0, sizeof g_last.values);
  ((std::memcpy(g_last.values[g_last.arguments++], &arguments, sizeof arguments)), ...);
}

// A body that does nothing but record.
template <int entry, Class cls>
struct Body {
  template <class... A>
  static Result call(A... arguments) {
    if (cls == Class::gate) g_work.fetch_add(1, std::memory_order_relaxed);
    if (__builtin_expect(g_armed != entry, 1)) return kSuccess;
    note(entry, arguments...);
    return g_result;
  }
};

}  // namespace recorder

// The beginning of a body that does something: records, and fails as scripted.
#define RECORDER_NOTE(name, ...)                                                 \
  if (__builtin_expect(recorder::g_armed == gpushare::shim::kEntry_##name, 0)) { \
    recorder::note(gpushare::shim::kEntry_##name, __VA_ARGS__);                  \
    if (recorder::g_result != 0) return recorder::g_result;                      \
  }
