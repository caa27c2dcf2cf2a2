// binding.hpp: the iterations that a thread has open. Other folders do not include it.
//
// A list of nodes per thread, behind a constant-initialised thread_local without a destructor, so that iterations begin and
// end also in the destructors of thread_locals and statics. When the thread exits, after those, its open iterations end as
// failed and the nodes go.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

namespace gpushare::executor {

class SessionImpl;

struct Binding {
  std::shared_ptr<SessionImpl> session;
  uint64_t serial = 0;       // of the iteration
  Binding* outer = nullptr;  // begun before it on this thread
};

// The calling thread's bindings, innermost first. A binding whose iteration another thread has ended may still be in
// the list: its serial then differs from the iteration's.
const Binding* thread_bindings();

// Call it before any other function here. After it, a thread that forks forgets its open iterations in the child. False
// without memory.
bool watch_forks();

// False without memory: the thread can begin no iteration now. Forgets bindings that other threads have ended.
bool prepare_binding();
// After prepare_binding() has returned true.
void bind(std::shared_ptr<SessionImpl> session, uint64_t serial);
void unbind(const SessionImpl& session, uint64_t serial);
void unbind_all(const SessionImpl& session);

}  // namespace gpushare::executor
