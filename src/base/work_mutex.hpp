// work_mutex.hpp: a mutex that may be held while the device, another process or a function of the caller's is waited
// for. It orders the long work of one owner, such as the moves of a session's blocks or the resizing of a lane. Whoever
// waits for it waits for that work, so a thread takes it with no other lock held, and a function that the device waits
// for (may_not_wait()) does not wait for it at all: the work may be waiting for that very function.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "base/waits.hpp"

namespace gpushare::base {

class GPUSHARE_CAPABILITY("mutex") WorkMutex {
 public:
  void lock() GPUSHARE_ACQUIRE() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    check_wait("work of another thread");
    MutexLock lock(mutex_);
    while (taken_) free_again_.wait(mutex_);
    taken_ = true;
  }
  bool try_lock() GPUSHARE_TRY_ACQUIRE(true) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    MutexLock lock(mutex_);
    if (taken_) return false;
    taken_ = true;
    return true;
  }
  void unlock() GPUSHARE_RELEASE() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    MutexLock lock(mutex_);
    taken_ = false;
    free_again_.notify_one();
  }

 private:
  Mutex mutex_;
  ConditionVariable free_again_;
  bool taken_ GPUSHARE_GUARDED_BY(mutex_) = false;
};

// For work that cannot be left out: WorkLock waits even in a function that the device waits for.
struct MustWait {};
inline constexpr MustWait kMustWait;

// Holds a WorkMutex. Empty, and refused() says why, where nothing may be waited for and another thread has it.
class GPUSHARE_SCOPED_CAPABILITY WorkLock {
 public:
  explicit WorkLock(WorkMutex& mutex) GPUSHARE_ACQUIRE(mutex) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS
      : mutex_(&mutex) {
    if (may_not_wait())
      held_ = mutex.try_lock();
    else
      mutex.lock();
  }
  WorkLock(WorkMutex& mutex, MustWait) GPUSHARE_ACQUIRE(mutex) : mutex_(&mutex) { mutex.lock(); }
  ~WorkLock() GPUSHARE_RELEASE() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    if (held_) mutex_->unlock();
  }
  WorkLock(const WorkLock&) = delete;
  WorkLock& operator=(const WorkLock&) = delete;
  explicit operator bool() const { return held_; }
  void unlock() GPUSHARE_RELEASE() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
    held_ = false;
    mutex_->unlock();
  }
  static Status refused() {
    return {GPUSHARE_INVALID_STATE,
            "this call would wait for the device inside a function that the device or the runtime waits for "
            "(progress function, host function): make it from another thread"};
  }

 private:
  WorkMutex* mutex_;
  bool held_ = true;
};

}  // namespace gpushare::base
