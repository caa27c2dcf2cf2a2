// Compares driver_api.hpp with cuda.h at compile time: the shape of every signature, every constant and every
// struct.
// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <type_traits>

#include "device/cuda/driver.hpp"
#include "support/catch.hpp"

// Behind ours: cuda.h renames functions and constants by macros.
#include <cuda.h>

#include <cudaTypedefs.h>

namespace api = gpushare::device::cuda::api;

namespace {

// Two parameter types are the same in the ABI if both are pointers, or integers (or enums) of one size.
template <class Ours, class Theirs>
constexpr bool same_parameter() {
  if (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>)
    return std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  return sizeof(Ours) == sizeof(Theirs) && std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
}

template <class Ours, class Theirs>
struct SameSignature : std::false_type {};
template <class OurResult, class... Ours, class TheirResult, class... Theirs>
struct SameSignature<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> {
  static constexpr bool same() {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
      return sizeof(OurResult) == sizeof(TheirResult) && (same_parameter<Ours, Theirs>() && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = same();
};

using gpushare::device::cuda::Driver;
#define CHECK_SIGNATURE(need, name, exported, version, parameters)                     \
  static_assert(SameSignature<decltype(Driver::name), PFN_##name##_v##version>::value, \
                #name " of CUDA " #version);
// cuda.h renames functions by macros, which must not reach our table.
#undef cuDevicePrimaryCtxRelease
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuMemGetInfo
#undef cuMemAlloc
#undef cuMemFree
#undef cuStreamDestroy
#undef cuEventDestroy
#undef cuEventElapsedTime
#undef cuMemcpyHtoDAsync
#undef cuMemcpyDtoHAsync
#undef cuMemcpyDtoDAsync
GPUSHARE_CUDA_SYMBOLS(CHECK_SIGNATURE)

#define CHECK_CONSTANT(name) \
  static_assert(static_cast<long long>(api::name) == static_cast<long long>(::name), #name)
CHECK_CONSTANT(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
CHECK_CONSTANT(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
CHECK_CONSTANT(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
CHECK_CONSTANT(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
CHECK_CONSTANT(CU_MEM_ACCESS_FLAGS_PROT_READ);
CHECK_CONSTANT(CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
CHECK_CONSTANT(CU_STREAM_NON_BLOCKING);
CHECK_CONSTANT(CU_EVENT_BLOCKING_SYNC);
CHECK_CONSTANT(CU_EVENT_DISABLE_TIMING);
CHECK_CONSTANT(CU_GREEN_CTX_DEFAULT_STREAM);
CHECK_CONSTANT(CU_MEM_LOCATION_TYPE_DEVICE);
CHECK_CONSTANT(CU_MEM_ALLOCATION_TYPE_PINNED);
CHECK_CONSTANT(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
CHECK_CONSTANT(CU_MEM_ALLOC_GRANULARITY_MINIMUM);
CHECK_CONSTANT(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
CHECK_CONSTANT(CU_DEV_RESOURCE_TYPE_SM);
CHECK_CONSTANT(CU_STREAM_CAPTURE_STATUS_NONE);
CHECK_CONSTANT(CU_STREAM_CAPTURE_STATUS_ACTIVE);
CHECK_CONSTANT(CU_STREAM_CAPTURE_STATUS_INVALIDATED);
CHECK_CONSTANT(CU_STREAM_CAPTURE_MODE_GLOBAL);
CHECK_CONSTANT(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
CHECK_CONSTANT(CU_STREAM_CAPTURE_MODE_RELAXED);
CHECK_CONSTANT(CU_GET_PROC_ADDRESS_LEGACY_STREAM);
// Macros in cuda.h, so that our names cannot be written beside them.
static_assert(CU_MEMHOSTALLOC_PORTABLE == 1 && CU_MEMHOSTALLOC_DEVICEMAP == 2);

#define X(value, name, status) static_assert(static_cast<int>(::name) == (value), #name);
#include "device/cuda/result_table.inc"
#undef X

#define CHECK_FIELD(type, field)                                         \
  static_assert(offsetof(api::type, field) == offsetof(::type, field) && \
                sizeof(api::type::field) == sizeof(::type::field))
static_assert(sizeof(api::CUmemLocation) == sizeof(::CUmemLocation));
CHECK_FIELD(CUmemLocation, type);
CHECK_FIELD(CUmemLocation, id);
static_assert(sizeof(api::CUmemAllocationProp) == sizeof(::CUmemAllocationProp));
CHECK_FIELD(CUmemAllocationProp, type);
CHECK_FIELD(CUmemAllocationProp, requestedHandleTypes);
CHECK_FIELD(CUmemAllocationProp, location);
CHECK_FIELD(CUmemAllocationProp, win32HandleMetaData);
CHECK_FIELD(CUmemAllocationProp, allocFlags);
static_assert(sizeof(api::CUmemAccessDesc) == sizeof(::CUmemAccessDesc));
CHECK_FIELD(CUmemAccessDesc, location);
CHECK_FIELD(CUmemAccessDesc, flags);
static_assert(sizeof(api::CUdevResource) == sizeof(::CUdevResource));
CHECK_FIELD(CUdevResource, type);
CHECK_FIELD(CUdevResource, sm);
static_assert(alignof(api::CUdevResource) >= alignof(::CUdevResource) && alignof(api::CUdevResource) == 8);
static_assert(offsetof(api::CUdevSmResource, smCount) == offsetof(::CUdevSmResource, smCount));

}  // namespace

TEST_CASE("the checks of the ABI are made by the compiler; the table of results is found at run time",
          "[cuda]") {
  using namespace gpushare::device::cuda;
  CHECK(std::string(result_name(::CUDA_ERROR_ILLEGAL_ADDRESS)) == "CUDA_ERROR_ILLEGAL_ADDRESS");
  CHECK(result_status(::CUDA_ERROR_OUT_OF_MEMORY) == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(is_sticky(::CUDA_ERROR_ILLEGAL_ADDRESS));
  CHECK_FALSE(is_sticky(::CUDA_ERROR_INVALID_VALUE));
}
