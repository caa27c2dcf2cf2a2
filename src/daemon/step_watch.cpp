// SPDX-License-Identifier: Apache-2.0
#include "daemon/step_watch.hpp"

#include <chrono>
#include <system_error>
#include <utility>

#include "base/no_signals.hpp"

namespace gpushare::daemon {

namespace {
constexpr uint64_t kLooks = 4;  // that find the same step before it counts as one that hangs
}

StepWatch::~StepWatch() {
  if (!thread_.joinable()) return;
  {
    base::MutexLock lock(mutex_);
    ending_ = true;
    ends_.notify_all();
  }
  thread_.join();
}

base::Status StepWatch::start(uint64_t patience_ns, OnHang on_hang) {
  try {
    const base::NoSignals no_signals;
    thread_ = std::thread(
        [this, every_ns = patience_ns / kLooks, on_hang = std::move(on_hang)] { look(every_ns, on_hang); });
  } catch (const std::system_error& error) {
    return {GPUSHARE_HOST_OUT_OF_MEMORY,
            std::string("cannot start the thread that watches the daemon: ") + error.what()};
  }
  return {};
}

void StepWatch::begin_last() {
  base::MutexLock lock(mutex_);
  begin();
}

void StepWatch::look(uint64_t every_ns, const OnHang& on_hang) {
  uint64_t seen = 0, same = 0;
  while (sleep(every_ns)) {
    const uint64_t step = step_.load();
    same = step == seen && step % 2 != 0 ? same + 1 : 0;
    seen = step;
    if (same < kLooks) continue;
    std::string name;
    {
      base::MutexLock lock(mutex_);
      if (const std::string* const device = device_.load()) name = *device;
    }
    return on_hang(name);
  }
}

bool StepWatch::sleep(uint64_t time_ns) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(time_ns);
  base::MutexLock lock(mutex_);
  while (!ending_ && ends_.wait_until(mutex_, until)) {
  }
  return !ending_;
}

}  // namespace gpushare::daemon
