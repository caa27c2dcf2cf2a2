// thread_exit.hpp: hooks that run when a thread exits. A thread_local of the library has no destructor
// (thread_local.hpp), so a hook gives back what the thread still holds. Hooks run after the destructors of all
// thread_locals.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "base/status.hpp"

namespace gpushare::base {

// A function to call when the calling thread exits. Lives in a GPUSHARE_THREAD_LOCAL, zeros at first.
struct ThreadExitHook {
  void (*run)(void* self) = nullptr;
  void* self = nullptr;
  ThreadExitHook* next = nullptr;
};

// Has hook.run(hook.self) called when the calling thread exits; the hook registered last is called first, and may be
// registered again from then on. Does nothing for a registered hook. The main thread's hooks run only if it calls
// pthread_exit, not when the process exits. Returns false without memory to register it. Allocates nothing itself.
bool at_thread_exit(ThreadExitHook& hook, void (*run)(void* self), void* self) noexcept;

// A status that belongs to a thread: OK at first. Declare it as a GPUSHARE_THREAD_LOCAL.
class ThreadStatus {
 public:
  constexpr ThreadStatus() = default;
  // Valid until the next set() on this thread.
  const Status& get() noexcept;
  void set(Status status) noexcept;

 private:
  Status& live() noexcept;

  alignas(Status) std::byte storage_[sizeof(Status)] = {};
  bool live_ = false;
  ThreadExitHook hook_;
};

}  // namespace gpushare::base
