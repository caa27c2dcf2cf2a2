// heap_door.hpp: the way to a session's persistent blocks for callers that hold only the door: as lane_door.hpp, but for a
// heap, and with names instead of keys. Whoever opens the door gives it a name that never comes twice (a handle), and the door
// serves callers who know the name until the heap closes it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "memory/device_memory.hpp"
#include "memory/short_lock.hpp"

namespace gpushare::memory {

template <class Door>
class DoorPool;

// All methods may be called from any thread at any time, with any door of this process.
class alignas(64) HeapDoor {
 public:
  // The block of an allocation or free at the door, or false: nothing has happened, and the ordinary call does it or says
  // why not. A free names the owner of the memory (DeviceMemoryOptions::owner) alone: an address is of one heap. Defined in persistent_heap_inner.hpp.
  bool alloc(const void* name, Kind kind, uint64_t bytes, uint64_t alignment, Address* out);
  bool free(const void* owner, Address address);

 private:
  friend class DoorPool<HeapDoor>;
  friend class PersistentHeapImpl;

  // A door that no heap has. Throws bad_alloc.
  static HeapDoor& take(PersistentHeapImpl& heap, const void* owner);
  void give_back() noexcept;

  ShortLock lock_;
  const void* name_ GPUSHARE_GUARDED_BY(lock_) = nullptr;  // null: the door is closed
  PersistentHeapImpl* heap_ GPUSHARE_GUARDED_BY(lock_) = nullptr;
  const void* owner_ GPUSHARE_GUARDED_BY(lock_) = nullptr;  // DeviceMemoryOptions::owner
  HeapDoor* next_ = nullptr;                                // of those without a heap
};

}  // namespace gpushare::memory
