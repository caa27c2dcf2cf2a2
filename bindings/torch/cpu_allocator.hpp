// cpu_allocator.hpp: libtorch's CPU tensors in sessions of the host device. For programs that link libtorch.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gpushare::torch {

// Makes libtorch allocate the CPU tensors of threads that are bound to a Job (job.hpp) from that Job's session; all others stay
// with the allocator that was there before. For the whole process and for good; call it once, before other threads use libtorch.
// Tensors that were allocated before are freed as before. When the session has no memory the allocating call throws
// c10::Error with gpushare's message.
void install_cpu_allocator();

}  // namespace gpushare::torch
