// door.hpp: allocations and frees of an iteration past guard.hpp: one lock, the lane's, and no pin. A call that cannot
// be served here, or fails here, takes the ordinary way.
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
  last = {};
  last.pass = {reinterpret_cast<memory::LaneDoor*>(door), key};  // NOLINT(performance-no-int-to-ptr)
  last.iteration = iteration;
  return door != 0;
}

// Whether `last` has the pass of the iteration. The door refuses the pass of an iteration that has ended, and no handle
// comes twice.
[[gnu::always_inline]] inline bool has_pass(gpushare_iteration iteration, memory::LaneDoor::LastUsed& last) {
  return (last.iteration == iteration && last.pass.door != nullptr) || use_other(iteration, last);
}

// The door of `last` found out to be one of this runtime; a stale or foreign handle is refused.
[[gnu::noinline]] inline bool use_runtime(gpushare_runtime runtime, memory::LaneDoor::LastUsed& last) {
  const executor::Runtime* owner = table_of<gpushare_runtime>().peek(runtime);
  if (last.pass.door == nullptr || owner == nullptr || !last.pass.door->belongs_to(last.pass.key, owner))
    return false;
  last.runtime = runtime;
  return true;
}

// Whether the pass of `last` is of the runtime. It stays so while the door takes its key, and no handle comes twice.
[[gnu::always_inline]] inline bool has_runtime(gpushare_runtime runtime, memory::LaneDoor::LastUsed& last) {
  return (last.runtime == runtime && runtime != nullptr) || use_runtime(runtime, last);
}

inline bool alloc_at_door(gpushare_iteration iteration, uint64_t bytes, uint64_t alignment,
                          memory::Address* out) {
  return out != nullptr && at_door([&](auto& last) __attribute__((always_inline)) {
           return has_pass(iteration, last) && last.pass.door->alloc(last.pass.key, bytes, alignment, out);
         });
}

inline bool free_at_door(gpushare_runtime runtime, memory::Address address) {
  return at_door([&](auto& last) __attribute__((always_inline)) {
    return has_runtime(runtime, last) && last.pass.door->free(last.pass.key, address);
  });
}

// How many of the requests were served, the first ones.
inline size_t alloc_many_at_door(gpushare_iteration iteration, const uint64_t* bytes, size_t count,
                                 uint64_t alignment, memory::Address* out) {
  return at_door([&](auto& last) -> size_t {
    return has_pass(iteration, last) ? last.pass.door->alloc_many(last.pass.key, bytes, count, alignment, out)
                                     : 0;
  });
}

inline size_t free_many_at_door(gpushare_runtime runtime, const memory::Address* addresses, size_t count) {
  return at_door([&](auto& last) -> size_t {
    return has_runtime(runtime, last) ? last.pass.door->free_many(last.pass.key, addresses, count) : 0;
  });
}

}  // namespace gpushare::capi
