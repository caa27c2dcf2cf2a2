// step_watch.hpp: notices that work of the service's thread at one device does not end, as where its driver hangs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "base/mutex.hpp"
#include "base/status.hpp"

namespace gpushare::daemon {

// A thread of its own looks four times in the patience whether the step is still the same, so it notices after one to
// one and a quarter times the patience. It counts looks and compares no clocks: a process that is stopped for a while is
// taken for nothing else. begin(), at(), at_none() and end() are for one thread at a time and cost a few stores.
class StepWatch {
 public:
  // Called once, on the watch's thread, with the name of the device that the step is at; empty: at none.
  using OnHang = std::function<void(const std::string& device)>;

  StepWatch() = default;
  ~StepWatch();  // waits for `on_hang` if it runs
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  // Errors: HOST_OUT_OF_MEMORY (there is no thread).
  base::Status start(uint64_t patience_ns, OnHang on_hang);

  void begin() {
    device_.store(nullptr);
    step_.fetch_add(1);
  }
  // Each begins a step anew. The name lives until begin_last().
  void at(const std::string& device) { next(&device); }
  void at_none() { next(nullptr); }
  void end() { step_.fetch_add(1); }
  // The last step, in which the names of devices go.
  void begin_last();

 private:
  void next(const std::string* device) {
    device_.store(device);
    step_.fetch_add(2);
  }
  void look(uint64_t every_ns, const OnHang& on_hang);
  bool sleep(uint64_t time_ns);  // false: the watch ends

  std::atomic<uint64_t> step_{0};  // odd: a step is under way
  std::atomic<const std::string*> device_{nullptr};
  base::Mutex mutex_;
  base::ConditionVariable ends_;
  bool ending_ GPUSHARE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace gpushare::daemon
