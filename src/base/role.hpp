// role.hpp: what guards the members of an object that belongs to the owner of a mutex. clang's analysis cannot see that
// "the mutex of the object's device" and "my mutex", which a function of the device holds, are one mutex. So both name
// a role: the thread that locks the mutex takes the role. A role serves where each object has one owner and no thread
// holds the mutexes of two owners.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/mutex.hpp"

namespace gpushare::base {

class GPUSHARE_CAPABILITY("role") Role {};

class GPUSHARE_SCOPED_CAPABILITY RoleLock {
 public:
  RoleLock(Mutex& mutex, [[maybe_unused]] const Role& role)
      GPUSHARE_ACQUIRE(mutex, role) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS : lock_(mutex) {}
  ~RoleLock() GPUSHARE_RELEASE() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {}
  RoleLock(const RoleLock&) = delete;
  RoleLock& operator=(const RoleLock&) = delete;
  void unlock() GPUSHARE_RELEASE() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { lock_.unlock(); }
  void lock() GPUSHARE_ACQUIRE() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { lock_.lock(); }

 private:
  MutexLock lock_;
};

}  // namespace gpushare::base
