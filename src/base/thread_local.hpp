// thread_local.hpp: how the library declares a thread_local.
//
// A thread_local with a destructor is destroyed before the older ones of the same thread, whose destructors would then use a
// destroyed object. Also, the runtime library ends the process if it has no memory to register the destructor, or to allocate
// the object at the thread's first access. So every thread_local of the library is constant-initialised, trivially
// destructible, and in the block that a thread has from its start. scripts/check-static-init holds this in the built library.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#define GPUSHARE_THREAD_LOCAL constinit thread_local __attribute__((tls_model("initial-exec")))
