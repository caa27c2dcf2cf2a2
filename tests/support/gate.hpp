// gate.hpp: holds a stream for as long as a test wants.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <mutex>

namespace gpushare::test {

// Launch `block` with a Gate as user data; work behind it waits until open(). Opens when it dies.
class Gate {
 public:
  ~Gate() { open(); }
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  static void block(void* gate) {
    Gate& self = *static_cast<Gate*>(gate);
    std::unique_lock<std::mutex> lock(self.mutex_);
    self.changed_.wait(lock, [&] { return self.is_open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

}  // namespace gpushare::test
