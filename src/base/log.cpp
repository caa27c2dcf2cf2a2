// SPDX-License-Identifier: Apache-2.0
#include "base/log.hpp"

#include <atomic>
#include <cstdio>
#include <new>
#include <type_traits>

#include "base/calls.hpp"
#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/thread_local.hpp"
#include "base/utf8.hpp"

namespace gpushare::base {
namespace {

// Constant-initialised and never destroyed: threads may log while static destructors run.
struct Sink {
  Mutex mutex;
  LogFunction function GPUSHARE_GUARDED_BY(mutex) = nullptr;
  void* user_data GPUSHARE_GUARDED_BY(mutex) = nullptr;
};
static_assert(std::is_trivially_destructible_v<Sink>);
constinit Sink g_sink;
// The thread is inside of the sink's function, with the mutex held.
GPUSHARE_THREAD_LOCAL bool t_inside = false;

std::atomic<int32_t> g_level{kWarning};

// A fork waits for lines that are under way on other threads.
void watch_forks() {
  static constinit ForkHook hook{[](void*) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
                                   if (!t_inside) g_sink.mutex.lock();
                                 },
                                 [](void*, bool) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
                                   if (!t_inside) g_sink.mutex.unlock();
                                 }};
  static const bool added = add_fork_hook(hook);
  (void)added;  // without memory for it a child may find the sink in use
}

}  // namespace

void set_log_sink(LogFunction function, void* user_data, int32_t level) {
  watch_forks();
  MutexLock lock(g_sink.mutex);
  g_sink.function = function;
  g_sink.user_data = user_data;
  g_level.store(level, std::memory_order_relaxed);
}

bool log_enabled(int32_t level) {
  return level <= g_level.load(std::memory_order_relaxed);
}

void log(int32_t level, const std::string& message) {
  if (!log_enabled(level)) return;
  watch_forks();
  if (t_inside) return;  // a line about what the sink's function does to itself
  // Held during the call, so that a sink is never called after set_log_sink has replaced it.
  MutexLock lock(g_sink.mutex);
  if (g_sink.function != nullptr) {
    struct Inside {
      Inside() { t_inside = true; }
      ~Inside() { t_inside = false; }
    };
    const CallScope refused("a log function cannot call gpushare");
    const Inside inside;
    g_sink.function(g_sink.user_data, level, message.c_str());
    return;
  }
  static constexpr const char* kNames[] = {"error", "warning", "info", "debug"};
  const char* const name = kNames[level < 0 ? 0 : (level > 3 ? 3 : level)];
  try {
    std::fprintf(stderr, "gpushare: %s: %s\n", name, to_printable_lines(message).c_str());
  } catch (const std::bad_alloc&) {  // destructors log, too
    std::fprintf(stderr, "gpushare: %s: (out of memory)\n", name);
  }
}

}  // namespace gpushare::base
