// short_lock.hpp: the lock of one heap or lane, for sections of some tens of nanoseconds: one atomic exchange
// to take it and one to give it back when nobody waits, inlined; waiters spin briefly, then sleep in the
// kernel. Built on std::atomic alone, so ThreadSanitizer sees it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

#include "base/mutex.hpp"

namespace gpushare::memory {

class GPUSHARE_CAPABILITY("mutex") ShortLock {
 public:
  void lock() GPUSHARE_ACQUIRE() {
    uint32_t expected = kFree;
    if (state_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire)) return;
    lock_slowly();
  }
  void unlock() GPUSHARE_RELEASE() {
    if (state_.exchange(kFree, std::memory_order_release) == kAwaited) state_.notify_one();
  }

 private:
  static constexpr uint32_t kFree = 0, kHeld = 1, kAwaited = 2;

  void lock_slowly() {
    for (int spin = 0; spin < 100; ++spin) {
      uint32_t expected = kFree;
      if (state_.load(std::memory_order_relaxed) == kFree &&
          state_.compare_exchange_weak(expected, kHeld, std::memory_order_acquire))
        return;
    }
    while (state_.exchange(kAwaited, std::memory_order_acquire) != kFree) state_.wait(kAwaited);
  }

  std::atomic<uint32_t> state_{kFree};
};

class GPUSHARE_SCOPED_CAPABILITY ShortLockGuard {
 public:
  explicit ShortLockGuard(ShortLock& lock) GPUSHARE_ACQUIRE(lock) : lock_(lock) { lock_.lock(); }
  ~ShortLockGuard() GPUSHARE_RELEASE() { lock_.unlock(); }
  ShortLockGuard(const ShortLockGuard&) = delete;
  ShortLockGuard& operator=(const ShortLockGuard&) = delete;

 private:
  ShortLock& lock_;
};

}  // namespace gpushare::memory
