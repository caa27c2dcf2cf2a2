// cuGetProcAddress: all entry points with the CUDA version that brought each signature; the names of results.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <cstring>

#include "world.hpp"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points live in the global namespace

// The entry points beyond those that the backend uses: X(name, exported name, version).
#define STANDIN_MORE_SYMBOLS(X)                                      \
  X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020)                     \
  X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010)                  \
  X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000)    \
  X(cuCtxCreate, cuCtxCreate_v2, 3020)                               \
  X(cuCtxDestroy, cuCtxDestroy_v2, 4000)                             \
  X(cuCtxSetCurrent, cuCtxSetCurrent, 4000)                          \
  X(cuCtxSynchronize, cuCtxSynchronize, 2000)                        \
  X(cuCtxFromGreenCtx, cuCtxFromGreenCtx, 12040)                     \
  X(cuStreamCreate, cuStreamCreate, 2000)                            \
  X(cuStreamGetPriority, cuStreamGetPriority, 5050)                  \
  X(cuMemAllocManaged, cuMemAllocManaged, 6000)                      \
  X(cuMemAllocAsync, cuMemAllocAsync, 11020)                         \
  X(cuMemFreeAsync, cuMemFreeAsync, 11020)                           \
  X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020)   \
  X(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020)                             \
  X(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020)                             \
  X(cuMemcpyDtoD, cuMemcpyDtoD_v2, 3020)                             \
  X(cuMemsetD8, cuMemsetD8_v2, 3020)                                 \
  X(cuModuleLoadData, cuModuleLoadData, 2000)                        \
  X(cuModuleUnload, cuModuleUnload, 2000)                            \
  X(cuLibraryLoadData, cuLibraryLoadData, 12000)                     \
  X(cuLibraryUnload, cuLibraryUnload, 12000)                         \
  X(cuGetExportTable, cuGetExportTable, 3000)                        \
  X(cuModuleGetFunction, cuModuleGetFunction, 2000)                  \
  X(cuLaunchKernel, cuLaunchKernel, 4000)                            \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010)            \
  X(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, 11040) \
  X(cuGraphGetNodes, cuGraphGetNodes, 10000)                         \
  X(cuGraphLaunch, cuGraphLaunch, 10000)                             \
  X(cuGraphExecDestroy, cuGraphExecDestroy, 10000)                   \
  X(cuGetErrorName, cuGetErrorName, 6000)

namespace standin {
namespace {

struct Row {
  const char* name;
  const char* exported;
  int version;
};
constexpr Row kRows[] = {
#define ROW(name, exported, version) {#name, #exported, version},
#define ROW_USED(need, name, exported, version, parameters) {#name, #exported, version},
    STANDIN_MORE_SYMBOLS(ROW) GPUSHARE_CUDA_SYMBOLS(ROW_USED)
#undef ROW
#undef ROW_USED
};

// This library's own symbol, whatever else the process has loaded.
void* own_symbol(const char* exported) {
  static void* self = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&world), &info);
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  return self != nullptr ? dlsym(self, exported) : nullptr;
}

// What a driver of the future has under a known name: another signature, so nobody may call it who asked for the known one.
CUresult newer_signature() {
  Call call("newer_signature", false);
  return call.misuse(CUDA_ERROR_INVALID_VALUE, "a function of CUDA 14 was called with an older signature");
}

// 0 found, 1 no such symbol, 2 newer than asked for. *out_function: null unless it is found.
int look_up(const char* name, int version, void** out_function) {
  constexpr int kFuture = 14000;
  const auto driver = static_cast<int>(world().setting("driver_version"));
  *out_function = nullptr;
  int answer = 1;
  if (driver >= kFuture && version >= kFuture) {
    for (const Row& row : kRows)
      if (std::strcmp(row.name, name) == 0) {
        *out_function = reinterpret_cast<void*>(&newer_signature);
        return 0;
      }
  }
  for (const Row& row : kRows) {
    if (std::strcmp(row.name, name) != 0 || row.version > driver) continue;
    answer = 2;
    if (row.version > version) continue;
    *out_function = own_symbol(row.exported);
    return *out_function != nullptr ? 0 : 1;
  }
  return answer;
}

}  // namespace
}  // namespace standin

STANDIN_API CUresult cuGetProcAddress_v2(const char* name, void** out_function, int version,
                                         unsigned long long flags, int* out_found) {
  Call call("cuGetProcAddress", false);
  if (call.verdict() != CUDA_SUCCESS) return call.verdict();
  if (name == nullptr || out_function == nullptr || flags > 2)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "bad arguments");
  const int found = look_up(name, version, out_function);
  // Whoever takes the status has success and a null pointer for what is absent.
  if (out_found != nullptr) *out_found = found;
  return found == 0 || out_found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

STANDIN_API CUresult cuGetProcAddress(const char* name, void** out_function, int version,
                                      unsigned long long flags) {
  Call call("cuGetProcAddress", false);
  if (call.verdict() != CUDA_SUCCESS) return call.verdict();
  if (name == nullptr || out_function == nullptr || flags > 2)
    return call.misuse(CUDA_ERROR_INVALID_VALUE, "bad arguments");
  return look_up(name, version, out_function) == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

STANDIN_API CUresult cuGetErrorName(CUresult result, const char** out_name) {
  Call call("cuGetErrorName", false);
  struct Name {
    CUresult result;
    const char* name;
  };
  static constexpr Name kNames[] = {
#define X(value, name, status) {value, #name},
#include "device/cuda/result_table.inc"
#undef X
  };
  for (const Name& row : kNames) {
    if (row.result != result) continue;
    *out_name = row.name;
    return CUDA_SUCCESS;
  }
  *out_name = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}
