// short_lock.hpp: the lock of one heap or lane, for sections of some tens of nanoseconds: one atomic
// operation to take it and a store to give it back when nobody waits, inlined; waiters spin briefly, then sleep in
// the kernel. State changes are std::atomic's, so ThreadSanitizer sees them.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>

#include "base/mutex.hpp"

namespace gpushare::memory {

class GPUSHARE_CAPABILITY("mutex") ShortLock {
 public:
  [[gnu::always_inline]] void lock() GPUSHARE_ACQUIRE() {
    uint32_t expected = kFree;
    if (state_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire)) return;
    lock_slowly();
  }
  [[gnu::always_inline]] void unlock() GPUSHARE_RELEASE() {
    // A waiter may set kAwaited between the load and the store. Then nobody wakes it, and it looks again by itself.
    const bool awaited = state_.load(std::memory_order_relaxed) == kAwaited;
    state_.store(kFree, std::memory_order_release);
    if (awaited) [[unlikely]]
      futex(FUTEX_WAKE_PRIVATE, 1, nullptr);
  }

 private:
  static constexpr uint32_t kFree = 0, kHeld = 1, kAwaited = 2;

  [[gnu::noinline, gnu::cold]] void lock_slowly() {
    for (int spin = 0; spin < 100; ++spin) {
      uint32_t expected = kFree;
      if (state_.load(std::memory_order_relaxed) == kFree &&
          state_.compare_exchange_weak(expected, kHeld, std::memory_order_acquire))
        return;
    }
    constexpr timespec kLookAgain{0, 500'000};
    while (state_.exchange(kAwaited, std::memory_order_acquire) != kFree)
      futex(FUTEX_WAIT_PRIVATE, kAwaited, &kLookAgain);
  }
  // A bare system call, because that is no point where the thread could be cancelled.
  [[gnu::noinline, gnu::cold]] void futex(int operation, uint32_t value, const timespec* timeout) {
    static_assert(sizeof(state_) == sizeof(uint32_t));
    (void)syscall(SYS_futex, &state_, operation, value, timeout, nullptr, 0);
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
