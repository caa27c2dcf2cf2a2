// door.hpp: allocations and frees past guard.hpp, of an iteration or of a session: one lock, the lane's or the session's heap's,
// and no pin. A call that cannot be served here, or fails here, takes the ordinary way.
//
// pthread_cancel needs no attention: there is no cancellation point on this way.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "base/calls.hpp"
#include "c_api/tags.hpp"
#include "memory/lane_inner.hpp"
#include "memory/persistent_heap_inner.hpp"

namespace gpushare::capi {

// `at` gets the thread's LastUsed and calls a method of its door; 0 or false if the thread may make no call or the door
// lets nothing in. The thread is inside of a call before `at` looks, so no signal handler changes what it sees.
template <class At>
[[gnu::always_inline]] inline auto at_door(At&& at) -> decltype(at(memory::LaneDoor::last_used())) {
  if (base::calls_refused() != nullptr) return {};
  const base::CallScope inside(base::kInsideCall);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  try {
    return at(memory::LaneDoor::last_used());
  } catch (const std::bad_alloc&) {
    return {};
  }
}

// The pass of another iteration than the thread's last one.
[[gnu::noinline]] inline bool use_other(gpushare_iteration iteration, memory::LaneDoor::LastUsed& last) {
  uint64_t door = 0, key = 0;
  if (!table_of<gpushare_iteration>().read_note(iteration, &door, &key)) return false;
  last.use({reinterpret_cast<memory::LaneDoor*>(door), key});  // NOLINT(performance-no-int-to-ptr)
  last.iteration = door != 0 ? iteration : nullptr;
  return door != 0;
}

// Whether `last` has the pass of the iteration. The door refuses the pass of an iteration that has ended, and no handle
// comes twice. A pass that a framework's allocator left there is of no handle: its iteration is null, as a caller's may be.
[[gnu::always_inline]] inline bool has_pass(gpushare_iteration iteration, memory::LaneDoor::LastUsed& last) {
  return (last.iteration == iteration && iteration != nullptr) || use_other(iteration, last);
}

// The door of `last` found out to be one of this runtime; a stale or foreign handle is refused.
[[gnu::noinline]] inline bool use_runtime(gpushare_runtime runtime, memory::LaneDoor::LastUsed& last) {
  const executor::Runtime* owner = table_of<gpushare_runtime>().peek(runtime);
  if (owner == nullptr || !last.pass.door->belongs_to(last.pass.key, owner)) return false;
  last.runtime = runtime;
  return true;
}

// Whether the pass of `last` is of the runtime. It stays so while the door takes its key, and no handle comes twice.
[[gnu::always_inline]] inline bool has_runtime(gpushare_runtime runtime, memory::LaneDoor::LastUsed& last) {
  return last.pass.door != nullptr &&
         ((last.runtime == runtime && runtime != nullptr) || use_runtime(runtime, last));
}

inline bool alloc_at_door(gpushare_iteration iteration, uint64_t bytes, uint64_t alignment,
                          memory::Address* out) {
  return out != nullptr && at_door([&](auto& last) __attribute__((always_inline)) {
           return has_pass(iteration, last) && last.pass.door->alloc(last.pass.key, bytes, alignment, out);
         });
}

inline bool free_at_door(gpushare_runtime runtime, memory::Address address) {
  return at_door([&](auto& last) __attribute__((always_inline)) {
    if (has_runtime(runtime, last) && last.pass.door->free(last.pass.key, address)) return true;
    if (last.heap == nullptr) return false;
    const executor::Runtime* owner = table_of<gpushare_runtime>().peek(runtime);
    return owner != nullptr && last.heap->free(owner, address);
  });
}

// A persistent block of the session that the thread allocated such blocks of last. Its handle may be given back while the
// session lives on, so the handle is looked at each time.
inline bool alloc_at_door(gpushare_session session, memory::Kind kind, uint64_t bytes, uint64_t alignment,
                          memory::Address* out) {
  return out != nullptr && at_door([&](auto& last) __attribute__((always_inline)) {
           return last.heap != nullptr && table_of<gpushare_session>().is_live(session) &&
                  last.heap->alloc(session, kind, bytes, alignment, out);
         });
}

// The same for another session than the thread's last one, if a door of it has been opened: its handle says which.
inline bool alloc_at_other_door(gpushare_session session, memory::Kind kind, uint64_t bytes,
                                uint64_t alignment, memory::Address* out) {
  return out != nullptr && at_door([&](auto& last) {
           uint64_t note = 0, unused = 0;
           if (!table_of<gpushare_session>().read_note(session, &note, &unused)) return false;
           auto* const door = reinterpret_cast<memory::HeapDoor*>(note);  // NOLINT(performance-no-int-to-ptr)
           if (door == nullptr || door == last.heap || !door->alloc(session, kind, bytes, alignment, out))
             return false;
           last.use(door);
           return true;
         });
}

// A block of a session whose door the thread has used before its last one's.
inline bool free_at_other_doors(gpushare_runtime runtime, memory::Address address) {
  return at_door([&](auto& last) {
    const executor::Runtime* const owner =
        last.heaps.front() == nullptr ? nullptr : table_of<gpushare_runtime>().peek(runtime);
    if (owner == nullptr) return false;
    for (memory::HeapDoor* const door : last.heaps) {
      if (door == nullptr) return false;
      if (!door->free(owner, address)) continue;
      last.use(door);
      return true;
    }
    return false;
  });
}

// Persistent blocks of the session may be had at its door from now on. Called inside of a call.
template <class Pin>
void remember(gpushare_session handle, const Pin& session) {
  memory::HeapDoor* const door = session->open_door(handle);
  if (door == nullptr) return;
  session.leave_note(reinterpret_cast<uint64_t>(door));
  memory::LaneDoor::last_used().use(door);
}

// The owner of the journal in which the allocator's blocks are listed where the thread allocated last; 0: none.
[[gnu::always_inline]] inline uint64_t owner_of_journal(gpushare_allocator allocator,
                                                        const memory::LaneDoor::LastUsed& last) {
  if (last.lister == nullptr || allocator == nullptr) return 0;
  return last.lister->name.load(std::memory_order_relaxed) == allocator
             ? last.lister->owner.load(std::memory_order_relaxed)
             : 0;
}

// Blocks that a framework's allocator lists.
inline bool alloc_at_door(gpushare_allocator allocator, uint64_t bytes, uint64_t alignment, void* native,
                          memory::Address* out) {
  return out != nullptr && at_door([&](auto& last) __attribute__((always_inline)) {
           const uint64_t owner = owner_of_journal(allocator, last);
           return owner != 0 &&
                  last.pass.door->alloc_listed(last.pass.key, owner, native, bytes, alignment, out);
         });
}

inline bool free_at_door(gpushare_allocator allocator, memory::Address address, void* native) {
  return at_door([&](auto& last) __attribute__((always_inline)) {
    const uint64_t owner = owner_of_journal(allocator, last);
    return owner != 0 && last.pass.door->free_listed(last.pass.key, owner, native, address);
  });
}

// How many of the requests were served, the first ones.
inline size_t alloc_many_at_door(gpushare_iteration iteration, const uint64_t* bytes, size_t count,
                                 uint64_t alignment, memory::Address* out) {
  return at_door([&](auto& last) __attribute__((always_inline))->size_t {
    return has_pass(iteration, last) ? last.pass.door->alloc_many(last.pass.key, bytes, count, alignment, out)
                                     : 0;
  });
}

inline size_t free_many_at_door(gpushare_runtime runtime, const memory::Address* addresses, size_t count) {
  return at_door([&](auto& last) __attribute__((always_inline))->size_t {
    return has_runtime(runtime, last) ? last.pass.door->free_many(last.pass.key, addresses, count) : 0;
  });
}

}  // namespace gpushare::capi
