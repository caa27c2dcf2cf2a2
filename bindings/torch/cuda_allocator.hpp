// cuda_allocator.hpp: PyTorch's CUDA memory from sessions of gpushare. The shared library libgpushare_torch.so exports what
// torch.cuda.memory.CUDAPluggableAllocator takes (PyTorch 2.11 to 2.15), over the C ABI alone: it is built without PyTorch.
//
//   allocator = torch.cuda.memory.CUDAPluggableAllocator("libgpushare_torch.so", "gpushare_torch_alloc", "gpushare_torch_free")
//
// The others go to set_init_fn and following of its allocator() (gpushare.torch does so). A device whose allocator was
// not attached gets a runtime and a session of its own at its first allocation.
//
// Threads: all functions from any. Errors: an allocation that finds no memory throws c10::OutOfMemoryError, which Python
// sees as torch.OutOfMemoryError, with PyTorch's first words and gpushare's message; in a process without PyTorch
// std::bad_alloc. An allocation without a session, and any other failure, throws std::runtime_error (RuntimeError). No
// other function throws; frees of what has gone with its session are ignored.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gpushare/gpushare.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

// PyTorch's names for these types are c10::cuda::MempoolId_t and cudaStream_t.
using gpushare_torch_pool_id = std::pair<unsigned long long, unsigned long long>;
using gpushare_torch_stream = void*;

extern "C" {

// From now on memory of CUDA device `device` comes from `allocator`, which must serve that device; null: from none,
// allocations fail. Returns the allocator before. The caller releases both when PyTorch is done with them.
GPUSHARE_API gpushare_allocator gpushare_torch_attach(int device, gpushare_allocator allocator);

// Asked when an allocation of `bytes` on `device` finds no memory, on the allocating thread and without locks: nonzero
// says that something was freed, and the allocation is tried again. Null: nobody. Returns what was asked before.
using gpushare_torch_reclaim = int (*)(int device, uint64_t bytes);
GPUSHARE_API gpushare_torch_reclaim gpushare_torch_set_reclaim(gpushare_torch_reclaim reclaim);

GPUSHARE_API void* gpushare_torch_alloc(size_t bytes, int device, gpushare_torch_stream stream);
GPUSHARE_API void gpushare_torch_free(void* pointer, size_t bytes, int device, gpushare_torch_stream stream);
GPUSHARE_API void gpushare_torch_init(int device_count);
GPUSHARE_API void gpushare_torch_reset();  // empty_cache
GPUSHARE_API void gpushare_torch_memory_fraction(double fraction, int device);
GPUSHARE_API void* gpushare_torch_get_base_address(void* pointer, size_t* bytes);
GPUSHARE_API void gpushare_torch_record_stream(void* pointer, gpushare_torch_stream stream);
GPUSHARE_API void gpushare_torch_begin_allocate_to_pool(int device, gpushare_torch_pool_id id,
                                                        std::function<bool(gpushare_torch_stream)> filter);
GPUSHARE_API void gpushare_torch_end_allocate_to_pool(int device, gpushare_torch_pool_id id);
GPUSHARE_API void gpushare_torch_release_pool(int device, gpushare_torch_pool_id id);

}  // extern "C"
