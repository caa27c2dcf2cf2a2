// fork.hpp: what the library does when the process forks. A child has the memory of its parent and only the thread that
// forked: objects with threads or a device are of no use there, and a lock that another thread held stays held. So locks of
// the process are taken before the fork and let go after it on both sides, and the objects of the parent are left alone
// in the child for good (docs/design/executor.md).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/mutex.hpp"

namespace gpushare::base {

// The functions that one part of the library runs around a fork, on the thread that forks. Static storage,
// never destroyed.
struct ForkHook {
  void (*before)(void* self) = nullptr;
  void (*after)(void* self, bool in_child) = nullptr;
  void* self = nullptr;
  ForkHook* next = nullptr;
};

// From now on the hook's functions are called at every fork. Before the fork the hook added last comes first; after it
// the hook added first does. Add a hook once only. Returns false without memory.
bool add_fork_hook(ForkHook& hook) noexcept;

// Number of forks between the first process that used the library and this one. An object that remembers another number
// belongs to an ancestor. Needs add_fork_hook() called once in the process.
uint32_t fork_depth() noexcept;

}  // namespace gpushare::base
