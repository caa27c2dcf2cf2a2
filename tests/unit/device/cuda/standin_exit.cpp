// A program that is wrong in one way, for the stand-in's check at exit.
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/driver_api.hpp"
#include "standin.h"

using namespace gpushare::device::cuda::api;
#define DECLARE(need, name, exported, version, parameters) extern "C" CUresult exported parameters;
GPUSHARE_CUDA_SYMBOLS(DECLARE)

int main() {
  CUcontext context = nullptr;
  CUdeviceptr block = 0;
  bool ok = cuInit(0) == CUDA_SUCCESS && cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS &&
            cuCtxPushCurrent_v2(context) == CUDA_SUCCESS && cuMemAlloc_v2(&block, 4096) == CUDA_SUCCESS;
#ifndef WRONG_leak
  ok = ok && cuMemFree_v2(block) == CUDA_SUCCESS;
#ifdef WRONG_misuse
  ok = ok && cuMemFree_v2(block) != CUDA_SUCCESS;
#endif
  ok = ok && cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS && cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS;
#endif
  return ok ? 0 : 1;
}
