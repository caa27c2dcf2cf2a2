// standin_support.hpp: the driver's entry points as linked functions, and the stage that every test of the
// stand-in stands on.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "device/cuda/driver_api.hpp"
#include "standin.h"
#include "support/catch.hpp"
#include "support/gate.hpp"

namespace standin_test {

using namespace gpushare::device::cuda::api;  // NOLINT(google-build-using-namespace): the driver's own names
using gpushare::test::Gate;

constexpr uint64_t kContextBytes = 500ull << 20;  // as standin.h has it

#define GPUSHARE_DECLARE(need, name, exported, version, parameters) extern "C" CUresult exported parameters;
GPUSHARE_CUDA_SYMBOLS(GPUSHARE_DECLARE)
#undef GPUSHARE_DECLARE
using CUgraphExec = struct CUgraphExec_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
extern "C" {
CUresult cuCtxCreate_v2(CUcontext*, unsigned, CUdevice);
CUresult cuCtxDestroy_v2(CUcontext);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize();
CUresult cuMemAllocManaged(CUdeviceptr*, size_t, unsigned);
CUresult cuMemAllocAsync(CUdeviceptr*, size_t, CUstream);
CUresult cuMemFreeAsync(CUdeviceptr, CUstream);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamBeginCapture_v2(CUstream, int);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphExecDestroy(CUgraphExec);
CUresult cuModuleLoadData(CUmodule*, const void*);
CUresult cuModuleUnload(CUmodule);
CUresult cuModuleGetFunction(CUfunction*, CUmodule, const char*);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        CUstream, void**, void**);
CUresult cuGetErrorName(CUresult, const char**);
CUresult cuGetProcAddress_v2(const char*, void**, int, unsigned long long, int*);
}

// Ends the capture of `stream`; what it recorded, ready for launching.
inline CUgraphExec end_capture(CUstream stream) {
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  REQUIRE(cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS);
  REQUIRE(cuGraphInstantiateWithFlags(&exec, graph, 0) == CUDA_SUCCESS);
  REQUIRE(cuGraphDestroy(graph) == CUDA_SUCCESS);
  return exec;
}

// The next misuse, or "".
inline std::string take_misuse() {
  char text[512] = "";
  (void)standin_take_misuse(text, sizeof(text));
  return text;
}

// True if exactly one misuse is recorded, made by `call` and saying `what`. Takes it.
inline bool misused(const std::string& call, const std::string& what) {
  const size_t count = standin_misuse_count();
  const std::string text = take_misuse();
  UNSCOPED_INFO("misuse: '" << text << "', of " << count);
  const bool good = count == 1 && text.rfind(call + "#", 0) == 0 && text.find(what) != std::string::npos;
  while (standin_misuse_count() > 0) (void)take_misuse();
  return good;
}

// The driver's view after devices have closed: nothing is left, nothing was done wrong.
inline void check_clean() {
  standin_clear_faults();
  char leaks[512] = "";
  const size_t count = standin_leaks(leaks, sizeof(leaks));
  INFO(leaks);
  CHECK(count == 0);
  const std::string misuse = take_misuse();
  INFO(misuse);
  CHECK(misuse.empty());
}

// The primary context, current, and two streams. Checks on the way out that the test left nothing.
struct Stage {
  CUcontext context = nullptr;
  CUstream a = nullptr;
  CUstream b = nullptr;
  Stage() {
    REQUIRE(cuInit(0) == CUDA_SUCCESS);
    REQUIRE(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    REQUIRE(cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
    REQUIRE(cuStreamCreateWithPriority(&a, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
    REQUIRE(cuStreamCreateWithPriority(&b, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
  }
  ~Stage() {
    standin_clear_faults();
    CUstream streams[] = {a, b};
    for (CUstream stream : streams) (void)cuStreamDestroy_v2(stream);
    (void)cuCtxPopCurrent_v2(nullptr);
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    check_clean();
  }
  CUdeviceptr alloc(size_t bytes) {
    CUdeviceptr address = 0;
    REQUIRE(cuMemAlloc_v2(&address, bytes) == CUDA_SUCCESS);
    return address;
  }
};

inline constexpr size_t kGranule = 2u << 20;

// One reserved range with one granule mapped at its start.
struct Mapped {
  CUdeviceptr range = 0;
  CUmemGenericAllocationHandle memory = 0;
  explicit Mapped(bool access = true) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    REQUIRE(cuMemAddressReserve(&range, 2 * kGranule, 0, 0, 0) == CUDA_SUCCESS);
    REQUIRE(cuMemCreate(&memory, kGranule, &prop, 0) == CUDA_SUCCESS);
    REQUIRE(cuMemMap(range, kGranule, 0, memory, 0) == CUDA_SUCCESS);
    if (access) give_access();
  }
  void give_access() const {
    const CUmemAccessDesc desc{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    REQUIRE(cuMemSetAccess(range, kGranule, &desc, 1) == CUDA_SUCCESS);
  }
  void release() const {
    CHECK(cuMemUnmap(range, kGranule) == CUDA_SUCCESS);
    CHECK(cuMemRelease(memory) == CUDA_SUCCESS);
    CHECK(cuMemAddressFree(range, 2 * kGranule) == CUDA_SUCCESS);
  }
};

}  // namespace standin_test
