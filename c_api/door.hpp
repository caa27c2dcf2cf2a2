// door.hpp: allocations and frees of an iteration past guard.hpp: one lock, the lane's, and no pin. A call that cannot be served here, or
// fails here, takes the ordinary way.
//
// pthread_cancel needs no attention: there is no cancellation point on this way.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "base/calls.hpp"
#include "c_api/tags.hpp"
#include "memory/lane_door.hpp"

namespace gpushare::capi {

// The door and key of an iteration's handle; no door where there is none, or the thread may make no call.
inline memory::LanePass pass_of(gpushare_iteration iteration) {
  uint64_t door = 0, key = 0;
  if (base::calls_refused() != nullptr || !table_of<gpushare_iteration>().read_note(iteration, &door, &key))
    return {};
  const memory::LanePass pass{reinterpret_cast<memory::LaneDoor*>(door),
                              key};  // NOLINT(performance-no-int-to-ptr)
  memory::LaneDoor::last_pass() = pass;
  return pass;
}

// `at` calls a method of the door; 0 or false if it lets nothing in.
template <class At>
[[gnu::always_inline]] inline auto at_door(At&& at) -> decltype(at()) {
  const base::CallScope inside(base::kInsideCall);
  try {
    return at();
  } catch (const std::bad_alloc&) {
    return {};
  }
}

inline bool alloc_at_door(gpushare_iteration iteration, uint64_t bytes, uint64_t alignment,
                          memory::Address* out) {
  const memory::LanePass pass = pass_of(iteration);
  return pass.door != nullptr && out != nullptr &&
         at_door([&] { return pass.door->alloc(pass.key, bytes, alignment, out); });
}

inline bool free_at_door(gpushare_runtime runtime, memory::Address address) {
  const memory::LanePass pass = memory::LaneDoor::last_pass();
  const executor::Runtime* owner = table_of<gpushare_runtime>().peek(runtime);
  return pass.door != nullptr && owner != nullptr && base::calls_refused() == nullptr &&
         at_door([&] { return pass.door->free(pass.key, owner, address); });
}

// How many of the requests were served, the first ones.
inline size_t alloc_many_at_door(gpushare_iteration iteration, const uint64_t* bytes, size_t count,
                                 uint64_t alignment, memory::Address* out) {
  const memory::LanePass pass = pass_of(iteration);
  if (pass.door == nullptr) return 0;
  return at_door([&] { return pass.door->alloc_many(pass.key, bytes, count, alignment, out); });
}

inline size_t free_many_at_door(gpushare_runtime runtime, const memory::Address* addresses, size_t count) {
  const memory::LanePass pass = memory::LaneDoor::last_pass();
  const executor::Runtime* owner = table_of<gpushare_runtime>().peek(runtime);
  if (pass.door == nullptr || owner == nullptr || base::calls_refused() != nullptr) return 0;
  return at_door([&] { return pass.door->free_many(pass.key, owner, addresses, count); });
}

}  // namespace gpushare::capi
