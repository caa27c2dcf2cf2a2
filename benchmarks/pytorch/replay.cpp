// Replays allocations through whatever allocator PyTorch has at the moment, its own or gpushare's, by the calls that
// tensors make. scripts/test-pytorch --replay builds it against the wheel; replay.py calls it.
// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#else
#define CALLGRIND_START_INSTRUMENTATION
#define CALLGRIND_STOP_INSTRUMENTATION
#endif

#include <cstddef>
#include <cstdint>

// `operations`: i allocates sizes[i], ~i frees it. `live` has room for each i.
extern "C" void replay(const int64_t* operations, size_t count, const uint64_t* sizes, void** live) {
  auto* const allocator = c10::cuda::CUDACachingAllocator::get();
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  for (size_t i = 0; i < count; ++i) {
    const int64_t operation = operations[i];
    if (operation >= 0)
      live[operation] = allocator->raw_alloc_with_stream(sizes[operation], stream);
    else
      allocator->raw_delete(live[~operation]);
  }
}

// Under callgrind (--instructions): what runs between the two is counted.
extern "C" void count(int on) {
  if (on != 0)
    CALLGRIND_START_INSTRUMENTATION;
  else
    CALLGRIND_STOP_INSTRUMENTATION;
}
