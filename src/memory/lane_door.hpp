// lane_door.hpp: the way to a lane's blocks for callers that hold only a pass: no pin, no gate, one lock.
//
// A door has the lane's lock and says which iteration of the lane is open. Doors are never destroyed, so a caller with
// an old pass may come to the door of a lane that is gone: the lock is still a lock, and the key on the pass no longer
// matches the door's.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/thread_local.hpp"
#include "memory/device_memory.hpp"
#include "memory/journal.hpp"
#include "memory/short_lock.hpp"

namespace gpushare::memory {

class LaneImpl;
template <class Door>
class DoorPool;

// All methods may be called from any thread at any time, with any pass that a door of this process ever gave.
class alignas(64) LaneDoor {
 public:
  // Whether the key's iteration is open here and belongs to this owner. Keys never come twice, so a yes holds for as
  // long as the key opens the door.
  bool belongs_to(uint64_t key, const void* owner);
  // The block of an allocation or free at the door, or false: nothing has happened, and the ordinary call does it or
  // says why not. Throws bad_alloc.
  bool alloc(uint64_t key, uint64_t bytes, uint64_t alignment, Address* out);
  bool free(uint64_t key, Address address);
  // The first `count` of the requests, under one lock for some of them together; returns how many were served.
  size_t alloc_many(uint64_t key, const uint64_t* bytes, size_t count, uint64_t alignment, Address* out);
  size_t free_many(uint64_t key, const Address* addresses, size_t count);

  // For a framework's allocator, which names a block by the native handle of the lane's stream. The journal is listed in
  // until the iteration of the key has ended, or take_back(). False: the iteration has ended, or another journal is there.
  bool lend(uint64_t key, Journal& journal);
  // Afterwards no thread is at work on the journal.
  void take_back(const Journal& journal);
  // As alloc() and free(), in an iteration that lists in a journal of `owner`, for the lane's own stream alone. False also
  // for an allocation that is expected to outlive the iteration.
  bool alloc_listed(uint64_t key, uint64_t owner, const void* native, uint64_t bytes, uint64_t alignment,
                    Address* out);
  bool free_listed(uint64_t key, uint64_t owner, const void* native, Address address);
  // How many entries are left without those at the end whose blocks are no ordinary live blocks of the iteration in this
  // lane. The entries are the caller's.
  size_t skip_dead(uint64_t key, const Journal::Entry* entries, size_t count);

  // Who lists in journals: a framework's allocator. Never destroyed.
  struct Lister {
    std::atomic<const void*> name{nullptr};  // its handle; null: none, or given back
    std::atomic<uint64_t> owner{0};          // of its journals, while doors may serve it; else 0
  };
  // The iteration in which the calling thread allocated last: its next allocation and most of its frees are of the
  // same. Empty in the child of a fork.
  struct LastUsed {
    LanePass pass;
    const void* iteration =
        nullptr;                    // the handle that the pass was given for; null: none, or there is no pass
    const void* runtime = nullptr;  // the handle of the pass's runtime, once a free has named it
    const Lister* lister = nullptr;    // who lists in the pass's iteration; null: nobody
    HeapDoor* heap = nullptr;          // of the session that the thread allocated persistent blocks of last
    std::array<HeapDoor*, 2> heaps{};  // of the sessions before it, the last first

    void use(LanePass other) {
      if (other.door == pass.door && other.key == pass.key) return;
      pass = other;
      iteration = runtime = nullptr;
      lister = nullptr;
    }
    void use(HeapDoor* door) {
      HeapDoor* before = std::exchange(heap, door);
      for (HeapDoor*& each : heaps) {
        if (before == door) return;
        std::swap(before, each);
      }
    }
  };
  static LastUsed& last_used() {
    static GPUSHARE_THREAD_LOCAL LastUsed last;
    return last;
  }

 private:
  friend class DoorPool<LaneDoor>;
  friend class LaneImpl;

  // A door that no lane has. Throws bad_alloc.
  static LaneDoor& take(LaneImpl& lane, const void* owner);
  void give_back() noexcept;

  ShortLock lock_;
  std::atomic<uint64_t> key_{0};  // of the open iteration; 0: none. Changes under the lock
  uint64_t last_key_ GPUSHARE_GUARDED_BY(lock_) = 0;
  LaneImpl* lane_ GPUSHARE_GUARDED_BY(lock_) = nullptr;
  const void* owner_ GPUSHARE_GUARDED_BY(lock_) = nullptr;  // DeviceMemoryOptions::owner
  Journal* journal_ GPUSHARE_GUARDED_BY(lock_) = nullptr;   // of the open iteration
  LaneDoor* next_ = nullptr;                                // of those without a lane
};

}  // namespace gpushare::memory
