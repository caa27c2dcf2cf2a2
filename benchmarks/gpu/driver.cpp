// SPDX-License-Identifier: Apache-2.0
#include "driver.hpp"

#include <dlfcn.h>

#include <cstdlib>

namespace gpushare::gpu_suite {
namespace {

void* open_library() {
  if (const char* path = std::getenv("GPUSHARE_CUDA_DRIVER"); path != nullptr && *path != '\0')
    return dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  return library != nullptr ? library : dlopen("libcuda.so", RTLD_LAZY | RTLD_LOCAL);
}

}  // namespace

Driver::Driver() {
  void* library = open_library();
  if (library == nullptr) throw std::runtime_error(std::string("no driver: ") + dlerror());
#define GPUSHARE_FIND(need, name, exported, version, parameters) \
  name = reinterpret_cast<decltype(name)>(dlsym(library, #exported));
  GPUSHARE_CUDA_SYMBOLS(GPUSHARE_FIND)
#undef GPUSHARE_FIND
  cuMemAllocAsync = reinterpret_cast<decltype(cuMemAllocAsync)>(dlsym(library, "cuMemAllocAsync"));
  cuMemFreeAsync = reinterpret_cast<decltype(cuMemFreeAsync)>(dlsym(library, "cuMemFreeAsync"));
  cuDeviceGetDefaultMemPool =
      reinterpret_cast<decltype(cuDeviceGetDefaultMemPool)>(dlsym(library, "cuDeviceGetDefaultMemPool"));
  cuMemPoolSetAttribute =
      reinterpret_cast<decltype(cuMemPoolSetAttribute)>(dlsym(library, "cuMemPoolSetAttribute"));
  if (cuInit == nullptr || cuCtxPushCurrent == nullptr)
    throw std::runtime_error("no driver: symbols are missing");
  must(cuInit(0), "no device: cuInit");
  must(cuDeviceGet(&device_, 0), "no device: cuDeviceGet");
  CUcontext context = nullptr;
  must(cuDevicePrimaryCtxRetain(&context, device_), "cuDevicePrimaryCtxRetain");
  must(cuCtxPushCurrent(context), "cuCtxPushCurrent");
  char name[96] = "";
  must(cuDeviceGetName(name, sizeof(name), device_), "cuDeviceGetName");
  device_name_ = name;
}

Driver::~Driver() {
  CUcontext context = nullptr;
  (void)cuCtxPopCurrent(&context);
  (void)cuDevicePrimaryCtxRelease(device_);
}

std::string Driver::version() const {
  int version = 0;
  (void)cuDriverGetVersion(&version);
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace gpushare::gpu_suite
