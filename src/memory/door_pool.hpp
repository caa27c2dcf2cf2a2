// door_pool.hpp: the doors of one kind that nobody has now. Doors are never destroyed: see lane_door.hpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/no_destroy.hpp"
#include "memory/lane_door.hpp"

namespace gpushare::memory {

// Door: has `Door* next_`, and this pool as a friend.
template <class Door>
class DoorPool {
 public:
  static DoorPool& instance() {
    static base::NoDestroy<DoorPool> pool;
    return *pool;
  }
  DoorPool() {
    hook_.self = this;
    hook_.before = [](void* self)
                       GPUSHARE_NO_THREAD_SAFETY_ANALYSIS { static_cast<DoorPool*>(self)->mutex_.lock(); };
    hook_.after = [](void* self, bool in_child) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
      auto* forked = static_cast<DoorPool*>(self);
      if (in_child) {  // other threads may have held the locks of the parent's doors
        forked->free_ = nullptr;
        LaneDoor::last_used() = {};
      }
      forked->mutex_.unlock();
    };
    (void)base::add_fork_hook(hook_);
  }

  // Throws bad_alloc.
  Door& take() {
    {
      base::MutexLock lock(mutex_);
      if (Door* door = free_; door != nullptr) {
        free_ = door->next_;
        return *door;
      }
    }
    return *new Door;
  }
  void give_back(Door& door) noexcept {
    base::MutexLock lock(mutex_);
    door.next_ = std::exchange(free_, &door);
  }

 private:
  base::ForkHook hook_;
  base::Mutex mutex_;
  Door* free_ GPUSHARE_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace gpushare::memory
