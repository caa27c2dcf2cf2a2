// recorder.hpp: what the files of the recording driver share. See recorder.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstring>
#include <set>
#include <type_traits>

#include "device.hpp"
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

// An argument of a copy or fill, by what it may be: a handle, a number, something else.
struct Argument {
  char kind;  // 'P', 'L' or 0
  uint64_t value;
};
inline Argument argument(P value) {
  return {'P', reinterpret_cast<uint64_t>(value)};
}
template <class T>
Argument argument(T value) {
  if constexpr (std::is_integral_v<T>)
    return {'L', value};
  else
    return {0, 0};
}
// work.cpp: copies, fills and the like on the shared device. Bytes and stream are found by the name and the kinds of
// the arguments.
Result transfer(int entry, const Argument* arguments, int count);

// A body that does nothing but record, and gives the shared device its work where there is one.
template <int entry, Class cls>
struct Body {
  template <class... A>
  static Result call(A... arguments) {
    if (cls == Class::gate) g_work.fetch_add(1, std::memory_order_relaxed);
    if (__builtin_expect(g_armed == entry, 0)) {
      note(entry, arguments...);
      if (g_result != 0) return g_result;
    }
    if constexpr (cls == Class::gate && sizeof...(A) > 0) {
      if (device::on()) {
        const Argument all[] = {argument(arguments)...};
        return transfer(entry, all, sizeof...(A));
      }
    }
    return kSuccess;
  }
};

// contexts.cpp: the device of the calling thread's context. With one device all contexts are one, and every thread has it.
int current_device();
uint64_t current_context();
int device_of_stream(P stream);
// memory.cpp: a context comes and goes; the context was synchronised.
bool add_context(int device);
void drop_context(int device, uint64_t context);
void forget_context(int device);
void pools_synchronized();
// The same: memory of the device, or of the host, of so many bytes, 0: there is none; gives it back; notes pinned host memory
// that came or went.
uint64_t allocate(uint64_t bytes, int device, bool on_host = false);
Result release(uint64_t address);
void count_host(int64_t bytes);
// virtual_memory.cpp: physical memory, which outlives contexts; whether the address is mapped to memory of the host.
// Its lock is taken before that of memory.cpp.
std::set<uint64_t> physical_handles();
bool is_on_host(uint64_t address);
// work.cpp, on the shared device: a new stream, and a stream's context.
Result create_stream(P out_stream, uint32_t flags, int priority);
Result context_of_stream(P stream, uint64_t* out_context);
// The same: whether that stream is captured; graphs and what is made of them.
bool is_capturing(P stream, bool per_thread);
void instantiated(P exec, P graph);
// memory.cpp: the executable graph is launched, so its allocation nodes have memory.
void note_graph_launch(P exec);
// Whether a location in the driver's structures is the host's.
inline bool is_host_location(int type) {
  return type >= 2 && type <= 4;
}
void exec_destroyed(P exec);

}  // namespace recorder

// The beginning of a body that does something: records, and fails as scripted.
#define RECORDER_NOTE(name, ...)                                                 \
  if (__builtin_expect(recorder::g_armed == gpushare::shim::kEntry_##name, 0)) { \
    recorder::note(gpushare::shim::kEntry_##name, __VA_ARGS__);                  \
    if (recorder::g_result != 0) return recorder::g_result;                      \
  }
