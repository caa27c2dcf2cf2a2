// SPDX-License-Identifier: Apache-2.0
#include "base/fork.hpp"

#include <pthread.h>

#include <atomic>
#include <utility>

namespace gpushare::base {
namespace {

constinit Mutex g_mutex;  // held from before a fork until after it
constinit ForkHook* g_hooks GPUSHARE_GUARDED_BY(g_mutex) = nullptr;
constinit bool g_installed GPUSHARE_GUARDED_BY(g_mutex) = false;
constinit std::atomic<uint32_t> g_depth{0};

void before() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  g_mutex.lock();
  for (ForkHook* hook = g_hooks; hook != nullptr; hook = hook->next) hook->before(hook->self);
}

void after(bool in_child) GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
  ForkHook* reversed = nullptr;
  for (ForkHook* hook = g_hooks; hook != nullptr;) {
    ForkHook* const next = std::exchange(hook->next, reversed);
    reversed = std::exchange(hook, next);
  }
  g_hooks = nullptr;
  while (reversed != nullptr) {  // first added, first called, and back into the order that it was in
    ForkHook* const hook = std::exchange(reversed, reversed->next);
    hook->after(hook->self, in_child);
    hook->next = std::exchange(g_hooks, hook);
  }
  g_mutex.unlock();
}

void after_in_parent() {
  after(false);
}

void after_in_child() {
  g_depth.fetch_add(1, std::memory_order_relaxed);
  after(true);
}

}  // namespace

bool add_fork_hook(ForkHook& hook) noexcept {
  const MutexLock lock(g_mutex);
  if (!g_installed) g_installed = pthread_atfork(before, after_in_parent, after_in_child) == 0;
  if (!g_installed) return false;
  hook.next = std::exchange(g_hooks, &hook);
  return true;
}

uint32_t fork_depth() noexcept {
  return g_depth.load(std::memory_order_relaxed);
}

}  // namespace gpushare::base
