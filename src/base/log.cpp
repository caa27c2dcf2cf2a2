// SPDX-License-Identifier: Apache-2.0
#include "base/log.hpp"

#include <atomic>
#include <cstdio>

#include "base/mutex.hpp"

namespace gpushare::base {
namespace {

struct Sink {
  Mutex mutex;
  LogFunction function GPUSHARE_GUARDED_BY(mutex) = nullptr;
  void* user_data GPUSHARE_GUARDED_BY(mutex) = nullptr;
};

Sink& sink() {
  // Never destroyed: backend threads may log while static destructors run.
  static Sink* instance = new Sink;
  return *instance;
}

std::atomic<int32_t> g_level{kWarning};

}  // namespace

void set_log_sink(LogFunction function, void* user_data, int32_t level) {
  MutexLock lock(sink().mutex);
  sink().function = function;
  sink().user_data = user_data;
  g_level.store(level, std::memory_order_relaxed);
}

bool log_enabled(int32_t level) {
  return level <= g_level.load(std::memory_order_relaxed);
}

void log(int32_t level, const std::string& message) {
  if (!log_enabled(level)) return;
  // Held during the call, so that a sink is never called after set_log_sink has replaced it.
  MutexLock lock(sink().mutex);
  if (sink().function != nullptr) {
    sink().function(sink().user_data, level, message.c_str());
    return;
  }
  static constexpr const char* kNames[] = {"error", "warning", "info", "debug"};
  std::fprintf(stderr, "gpushare: %s: %s\n", kNames[level < 0 ? 0 : (level > 3 ? 3 : level)],
               message.c_str());
}

}  // namespace gpushare::base
