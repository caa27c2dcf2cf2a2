// cuda: the backend for NVIDIA GPUs, over the driver API alone. Nothing links to CUDA and no header of the
// toolkit is needed: libcuda.so.1 is opened at first use. Called through its ops table only
// (cuda_backend.hpp).
//   driver_api.hpp    the types and symbols that we use of the driver's ABI, in one table
//   driver.hpp        the opened library: finds the symbols, maps the errors
//   cuda_context.hpp  the context: made current for an op, and the place that remembers a lost device
//   cuda_memory.hpp   device memory, pinned memory, virtual memory;  cuda_stream.hpp  streams and events
//   nvml.hpp          what this process has of a GPU, its contexts too
//   cuda_partition.hpp  shares of the SMs;  cuda_device.hpp  the device that owns them all
//
// driver_api.hpp: declarations of the CUDA driver's public, stable C ABI. tests/unit/device/cuda/abi_test.cpp
// compares each with cuda.h where a toolkit is installed. Also used by the stand-in for the driver
// (tests/doubles).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpushare::device::cuda::api {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUgreenCtx = struct CUgreenCtx_st*;
using CUdevResourceDesc = struct CUdevResourceDesc_st*;
using CUgraph = struct CUgraph_st*;
using CUhostFn = void (*)(void*);

// The results that the code tells apart by name. The full list is in driver.cpp.
enum : CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
  CUDA_ERROR_LAUNCH_FAILED = 719,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
  CUDA_ERROR_CAPTURED_EVENT = 907,
  CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
};

enum : int {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
  CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
  CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
  CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134,                                   // since CUDA 12.2; -1: none
  CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141,  // since 12.8
  CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED = 142,               // the same
  CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 145,       // since 13.0
};
enum : unsigned {
  CU_STREAM_NON_BLOCKING = 1,
  CU_EVENT_BLOCKING_SYNC = 1,
  CU_EVENT_DISABLE_TIMING = 2,
  CU_MEMHOSTALLOC_PORTABLE = 1,
  CU_MEMHOSTALLOC_DEVICEMAP = 2,
  CU_GREEN_CTX_DEFAULT_STREAM = 1,
};
enum : int {
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
  CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
  CU_MEM_ALLOCATION_TYPE_PINNED = 1,
  CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
  CU_DEV_RESOURCE_TYPE_SM = 1,
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
  CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
};
// cuGetProcAddress: "all symbols except their per-thread-default-stream versions".
inline constexpr unsigned long long CU_GET_PROC_ADDRESS_LEGACY_STREAM = 1;

struct CUmemLocation {
  int type;
  int id;
};
struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
struct CUdevSmResource {
  unsigned smCount;
  unsigned minSmPartitionSize;      // named so since 13.0; before that, opaque bytes of the driver
  unsigned smCoscheduledAlignment;  // the same
};
// Aligned as since CUDA 13.1, whose header ends the union 8 bytes earlier and puts a pointer to a next resource there.
// Older drivers leave those bytes as they are: they must be zero, which CUdevResource{} sees to.
struct alignas(8) CUdevResource {
  int type;
  unsigned char internal_padding[92];
  union {
    CUdevSmResource sm;
    unsigned char oversize[48];
  };
};

}  // namespace gpushare::device::cuda::api

// Every symbol of the driver that the backend calls: X(need, name, exported name, CUDA version that brought
// this signature, parameters). `required`: a driver without it is UNAVAILABLE. Any other word names the group
// that the driver has or has not as a whole; without it, what the group serves is UNSUPPORTED and all else
// works.
#define GPUSHARE_CUDA_SYMBOLS(X)                                                                            \
  X(required, cuInit, cuInit, 2000, (unsigned flags))                                                       \
  X(required, cuDriverGetVersion, cuDriverGetVersion, 2020, (int* version))                                 \
  X(required, cuDeviceGetCount, cuDeviceGetCount, 2000, (int* count))                                       \
  X(required, cuDeviceGet, cuDeviceGet, 2000, (CUdevice * device, int ordinal))                             \
  X(required, cuDeviceGetName, cuDeviceGetName, 2000, (char* name, int length, CUdevice device))            \
  X(required, cuDeviceGetAttribute, cuDeviceGetAttribute, 2000,                                             \
    (int* value, int attribute, CUdevice device))                                                           \
  X(required, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000,                                     \
    (CUcontext * context, CUdevice device))                                                                 \
  X(required, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000, (CUdevice device))            \
  X(required, cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000,                                 \
    (CUdevice device, unsigned* flags, int* active))                                                        \
  X(required, cuCtxGetCurrent, cuCtxGetCurrent, 4000, (CUcontext * context))                                \
  X(required, cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000, (CUcontext context))                             \
  X(required, cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000, (CUcontext * context))                             \
  X(required, cuCtxGetDevice, cuCtxGetDevice, 2000, (CUdevice * device))                                    \
  X(required, cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, 5050, (int* least, int* greatest))  \
  X(required, cuMemGetInfo, cuMemGetInfo_v2, 3020, (size_t * free, size_t * total))                         \
  X(required, cuMemAlloc, cuMemAlloc_v2, 3020, (CUdeviceptr * address, size_t bytes))                       \
  X(required, cuMemFree, cuMemFree_v2, 3020, (CUdeviceptr address))                                         \
  X(required, cuPointerGetAttribute, cuPointerGetAttribute, 4000,                                           \
    (void* data, int attribute, CUdeviceptr address))                                                       \
  X(required, cuMemHostAlloc, cuMemHostAlloc, 2020, (void** pointer, size_t bytes, unsigned flags))         \
  X(required, cuMemFreeHost, cuMemFreeHost, 2000, (void* pointer))                                          \
  X(required, cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050,                                 \
    (CUstream * stream, unsigned flags, int priority))                                                      \
  X(required, cuStreamDestroy, cuStreamDestroy_v2, 4000, (CUstream stream))                                 \
  X(required, cuStreamQuery, cuStreamQuery, 2000, (CUstream stream))                                        \
  X(required, cuStreamSynchronize, cuStreamSynchronize, 2000, (CUstream stream))                            \
  X(required, cuStreamWaitEvent, cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned flags)) \
  X(required, cuEventCreate, cuEventCreate, 2000, (CUevent * event, unsigned flags))                        \
  X(required, cuEventDestroy, cuEventDestroy_v2, 4000, (CUevent event))                                     \
  X(required, cuEventRecord, cuEventRecord, 2000, (CUevent event, CUstream stream))                         \
  X(required, cuEventQuery, cuEventQuery, 2000, (CUevent event))                                            \
  X(required, cuEventSynchronize, cuEventSynchronize, 2000, (CUevent event))                                \
  X(required, cuEventElapsedTime, cuEventElapsedTime, 2000,                                                 \
    (float* milliseconds, CUevent start, CUevent end))                                                      \
  X(required, cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020,                                                \
    (CUdeviceptr destination, const void* source, size_t bytes, CUstream stream))                           \
  X(required, cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020,                                                \
    (void* destination, CUdeviceptr source, size_t bytes, CUstream stream))                                 \
  X(required, cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020,                                                \
    (CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream))                           \
  X(required, cuMemsetD8Async, cuMemsetD8Async, 3020,                                                       \
    (CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream))                              \
  X(required, cuLaunchHostFunc, cuLaunchHostFunc, 10000,                                                    \
    (CUstream stream, CUhostFn function, void* user_data))                                                  \
  X(capture, cuStreamEndCapture, cuStreamEndCapture, 10000, (CUstream stream, CUgraph * graph))             \
  X(capture, cuGraphDestroy, cuGraphDestroy, 10000, (CUgraph graph))                                        \
  X(capture, cuStreamIsCapturing, cuStreamIsCapturing, 10000, (CUstream stream, int* status))               \
  X(capture, cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010, (int* mode))      \
  X(virtual_memory, cuMemAddressReserve, cuMemAddressReserve, 10020,                                        \
    (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags))    \
  X(virtual_memory, cuMemAddressFree, cuMemAddressFree, 10020, (CUdeviceptr address, size_t bytes))         \
  X(virtual_memory, cuMemCreate, cuMemCreate, 10020,                                                        \
    (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp* prop,                  \
     unsigned long long flags))                                                                             \
  X(virtual_memory, cuMemRelease, cuMemRelease, 10020, (CUmemGenericAllocationHandle handle))               \
  X(virtual_memory, cuMemMap, cuMemMap, 10020,                                                              \
    (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,                 \
     unsigned long long flags))                                                                             \
  X(virtual_memory, cuMemUnmap, cuMemUnmap, 10020, (CUdeviceptr address, size_t bytes))                     \
  X(virtual_memory, cuMemSetAccess, cuMemSetAccess, 10020,                                                  \
    (CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count))                       \
  X(virtual_memory, cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, 10020,                    \
    (size_t * bytes, const CUmemAllocationProp* prop, int option))                                          \
  X(shareable, cuMemExportToShareableHandle, cuMemExportToShareableHandle, 10020,                           \
    (void* shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags))             \
  X(shareable, cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020,                       \
    (CUmemGenericAllocationHandle * handle, void* shareable, int type))                                     \
  X(partitions, cuDeviceGetDevResource, cuDeviceGetDevResource, 12040,                                      \
    (CUdevice device, CUdevResource * resource, int type))                                                  \
  X(partitions, cuDevSmResourceSplitByCount, cuDevSmResourceSplitByCount, 12040,                            \
    (CUdevResource * groups, unsigned* group_count, const CUdevResource* input, CUdevResource* remaining,   \
     unsigned flags, unsigned min_count))                                                                   \
  X(partitions, cuDevResourceGenerateDesc, cuDevResourceGenerateDesc, 12040,                                \
    (CUdevResourceDesc * desc, CUdevResource * resources, unsigned count))                                  \
  X(partitions, cuGreenCtxCreate, cuGreenCtxCreate, 12040,                                                  \
    (CUgreenCtx * green, CUdevResourceDesc desc, CUdevice device, unsigned flags))                          \
  X(partitions, cuGreenCtxDestroy, cuGreenCtxDestroy, 12040, (CUgreenCtx green))                            \
  X(partitions, cuGreenCtxStreamCreate, cuGreenCtxStreamCreate, 12050,                                      \
    (CUstream * stream, CUgreenCtx green, unsigned flags, int priority))
