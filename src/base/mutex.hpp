// mutex.hpp: std::mutex with clang's thread-safety annotations, so that `-Wthread-safety` proves which lock guards
// what. std::mutex and not absl::Mutex: distribution builds of Abseil are not instrumented, and ThreadSanitizer would report
// every lock of theirs as a race.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/clock.hpp"
#include "base/waits.hpp"

#if defined(__clang__)
#define GPUSHARE_TSA_(x) __attribute__((x))
#else
#define GPUSHARE_TSA_(x)
#endif
#define GPUSHARE_CAPABILITY(x) GPUSHARE_TSA_(capability(x))
#define GPUSHARE_SCOPED_CAPABILITY GPUSHARE_TSA_(scoped_lockable)
#define GPUSHARE_GUARDED_BY(x) GPUSHARE_TSA_(guarded_by(x))
#define GPUSHARE_PT_GUARDED_BY(x) GPUSHARE_TSA_(pt_guarded_by(x))
#define GPUSHARE_REQUIRES(...) GPUSHARE_TSA_(requires_capability(__VA_ARGS__))
#define GPUSHARE_ACQUIRE(...) GPUSHARE_TSA_(acquire_capability(__VA_ARGS__))
#define GPUSHARE_RELEASE(...) GPUSHARE_TSA_(release_capability(__VA_ARGS__))
#define GPUSHARE_TRY_ACQUIRE(...) GPUSHARE_TSA_(try_acquire_capability(__VA_ARGS__))
#define GPUSHARE_EXCLUDES(...) GPUSHARE_TSA_(locks_excluded(__VA_ARGS__))
#define GPUSHARE_NO_THREAD_SAFETY_ANALYSIS GPUSHARE_TSA_(no_thread_safety_analysis)

namespace gpushare::base {

class GPUSHARE_CAPABILITY("mutex") Mutex {
 public:
  void lock() GPUSHARE_ACQUIRE() {
    mutex_.lock();
    count_lock(1);
  }
  void unlock() GPUSHARE_RELEASE() {
    count_lock(-1);
    mutex_.unlock();
  }
  bool try_lock() GPUSHARE_TRY_ACQUIRE(true) {
    const bool taken = mutex_.try_lock();
    if (taken) count_lock(1);
    return taken;
  }
  std::mutex& native() { return mutex_; }

 private:
  std::mutex mutex_;
};

class GPUSHARE_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) GPUSHARE_ACQUIRE(mutex) : mutex_(&mutex) { mutex_->lock(); }
  ~MutexLock() GPUSHARE_RELEASE() {
    if (held_) mutex_->unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  // For a short stretch without the lock (calling out, notifying).
  void unlock() GPUSHARE_RELEASE() {
    held_ = false;
    mutex_->unlock();
  }
  void lock() GPUSHARE_ACQUIRE() {
    mutex_->lock();
    held_ = true;
  }

 private:
  Mutex* mutex_;
  bool held_ = true;
};

// While one lives, a mutex is let go; it is taken again at the end, also after an exception.
class GPUSHARE_SCOPED_CAPABILITY Unlocked {
 public:
  explicit Unlocked(Mutex& mutex) GPUSHARE_RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~Unlocked() GPUSHARE_RELEASE() { mutex_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Mutex& mutex_;
};

// Waits only in loops of the caller's, which test the guarded state themselves. A wait that is unwound (pthread_cancel) has
// let the mutex go.
class ConditionVariable {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }
  void wait(Mutex& mutex) GPUSHARE_REQUIRES(mutex) {
    check_wait("another thread", 1);
    LetGo let_go;
    std::unique_lock<std::mutex> lock(mutex.native(), std::adopt_lock);
    condition_.wait(lock);
    lock.release();
    let_go.has_it_again = true;
  }
  // False when the time point passed first.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline) GPUSHARE_REQUIRES(mutex) {
    check_wait("another thread", 1);
    LetGo let_go;
    std::unique_lock<std::mutex> lock(mutex.native(), std::adopt_lock);
    const bool in_time = condition_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    let_go.has_it_again = true;
    return in_time;
  }
  // False when the deadline passed first.
  bool wait(Mutex& mutex, const Deadline& deadline) GPUSHARE_REQUIRES(mutex) {
    if (!deadline.never()) return wait_until(mutex, deadline.at());
    wait(mutex);
    return true;
  }

 private:
  // The mutex does not count while the wait has let it go.
  struct LetGo {
    LetGo() { count_lock(-1); }
    ~LetGo() {
      if (has_it_again) count_lock(1);
    }
    bool has_it_again = false;
  };

  std::condition_variable condition_;
};

}  // namespace gpushare::base
