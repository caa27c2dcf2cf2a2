// SPDX-License-Identifier: Apache-2.0
#include "base/thread_exit.hpp"
#include "base/thread_local.hpp"

#include <pthread.h>

#include <new>
#include <type_traits>
#include <utility>

namespace gpushare::base {
namespace {

GPUSHARE_THREAD_LOCAL ThreadExitHook* t_hooks = nullptr;  // registered last, first

// The value of the key is not used: it is set so that the system calls run_hooks when the thread exits.
void run_hooks(void*) {
  while (t_hooks != nullptr) {
    ThreadExitHook& hook = *t_hooks;
    t_hooks = hook.next;
    void (*const run)(void*) = std::exchange(hook.run, nullptr);
    run(hook.self);
  }
}

struct Key {
  Key() : made(pthread_key_create(&key, run_hooks) == 0) {}
  pthread_key_t key = 0;
  bool made;
};

}  // namespace

bool at_thread_exit(ThreadExitHook& hook, void (*run)(void* self), void* self) noexcept {
  if (hook.run != nullptr) return true;
  static const Key key;
  static const char value = 0;
  if (!key.made || pthread_setspecific(key.key, &value) != 0) return false;
  hook.run = run;
  hook.self = self;
  hook.next = std::exchange(t_hooks, &hook);
  return true;
}

static_assert(std::is_trivially_destructible_v<ThreadStatus>);

Status& ThreadStatus::live() noexcept {
  if (!live_) {
    new (static_cast<void*>(storage_)) Status;
    live_ = true;
  }
  return *std::launder(reinterpret_cast<Status*>(storage_));
}

const Status& ThreadStatus::get() noexcept {
  return live();
}

void ThreadStatus::set(Status status) noexcept {
  // Without memory to register the hook, the thread's last message is never freed.
  if (!status.ok())
    (void)at_thread_exit(
        hook_, [](void* self) { static_cast<ThreadStatus*>(self)->live() = Status(); }, this);
  live() = std::move(status);
}

}  // namespace gpushare::base
