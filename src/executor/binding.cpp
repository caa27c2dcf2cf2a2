// SPDX-License-Identifier: Apache-2.0
#include "executor/binding.hpp"

#include <new>
#include <utility>

#include "base/fork.hpp"
#include "base/thread_exit.hpp"
#include "base/thread_local.hpp"
#include "executor/internal.hpp"

namespace gpushare::executor {
namespace {

GPUSHARE_THREAD_LOCAL Binding* t_open = nullptr;
GPUSHARE_THREAD_LOCAL Binding* t_spare = nullptr;  // kept from one iteration to the next
GPUSHARE_THREAD_LOCAL base::ThreadExitHook t_exit;
// In the child of a fork: the bindings of the thread that forked. They stay reachable, so that a leak checker in the
// child does not report what the parent uses.
Binding* g_of_ancestors = nullptr;

// Moves the bindings for which `gone` is true to the spare nodes.
template <class Gone>
void forget(Gone&& gone) {
  Binding* forgotten = nullptr;
  for (Binding** at = &t_open; *at != nullptr;) {
    Binding* const node = *at;
    if (!gone(*node)) {
      at = &node->outer;
      continue;
    }
    *at = node->outer;
    node->outer = std::exchange(forgotten, node);
  }
  while (forgotten != nullptr) {
    Binding* const node = std::exchange(forgotten, forgotten->outer);
    const std::shared_ptr<SessionImpl> session = std::move(node->session);  // the last pointer, perhaps
    node->outer = std::exchange(t_spare, node);
  }
}

void thread_exits(void*) {
  while (t_open != nullptr) {
    Binding* const node = t_open;
    t_open = node->outer;
    const std::unique_ptr<Binding> owned(node);
    IterationImpl::abandon(*node);
  }
  while (t_spare != nullptr) {
    const std::unique_ptr<Binding> owned(t_spare);
    t_spare = owned->outer;
  }
}

}  // namespace

const Binding* thread_bindings() {
  return t_open;
}

bool watch_forks() {
  // The child leaves the parent's sessions alone, because their threads and their device are not in the child.
  static constinit base::ForkHook hook{[](void*) {},
                                       [](void*, bool in_child) {
                                         if (!in_child) return;
                                         while (t_open != nullptr) {
                                           Binding* const node = std::exchange(t_open, t_open->outer);
                                           node->outer = std::exchange(g_of_ancestors, node);
                                         }
                                       }};
  static const bool added = base::add_fork_hook(hook);
  return added;
}

bool prepare_binding() {
  forget([](const Binding& binding) { return !IterationImpl::is_open(binding); });
  if (t_spare == nullptr) t_spare = new (std::nothrow) Binding;
  return t_spare != nullptr && base::at_thread_exit(t_exit, thread_exits, nullptr);
}

void bind(std::shared_ptr<SessionImpl> session, uint64_t serial) {
  Binding* const node = std::exchange(t_spare, t_spare->outer);
  node->session = std::move(session);
  node->serial = serial;
  node->outer = std::exchange(t_open, node);
}

void unbind(const SessionImpl& session, uint64_t serial) {
  forget(
      [&](const Binding& binding) { return binding.session.get() == &session && binding.serial == serial; });
}

void unbind_all(const SessionImpl& session) {
  forget([&](const Binding& binding) { return binding.session.get() == &session; });
}

}  // namespace gpushare::executor
