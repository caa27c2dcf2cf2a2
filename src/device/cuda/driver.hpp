// driver.hpp: the opened driver library and the meaning of its results.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "base/status.hpp"
#include "device/cuda/driver_api.hpp"

namespace gpushare::device::cuda {

// One opened libcuda. Loaded at first use and never unloaded (drivers do not survive it). Immutable once
// made, so every member may be used from any thread.
class Driver {
 public:
  // `path` empty: GPUSHARE_CUDA_DRIVER of the environment if set (ignored in set-user-id programs), else
  // libcuda.so.1, then libcuda.so. The library is opened and cuInit called once a path; later calls answer
  // from memory. Errors: UNAVAILABLE (no library, a required symbol missing, cuInit failed), which is tried
  // again at the next call.
  static base::Result<const Driver*> get(const std::string& path);

  // The driver's functions, null where an optional one is absent: driver.cuMemAlloc(...).
  // NOLINTBEGIN(bugprone-macro-parentheses): members' names and parameter lists
#define GPUSHARE_CUDA_MEMBER(need, name, exported, version, parameters) \
  api::CUresult(*name) parameters = nullptr;
  // NOLINTEND(bugprone-macro-parentheses)
  using CUdevice = api::CUdevice;
  using CUdeviceptr = api::CUdeviceptr;
  using CUcontext = api::CUcontext;
  using CUstream = api::CUstream;
  using CUevent = api::CUevent;
  using CUgreenCtx = api::CUgreenCtx;
  using CUgraph = api::CUgraph;
  using CUhostFn = api::CUhostFn;
  using CUdevResource = api::CUdevResource;
  using CUdevResourceDesc = api::CUdevResourceDesc;
  using CUmemAccessDesc = api::CUmemAccessDesc;
  using CUmemAllocationProp = api::CUmemAllocationProp;
  using CUmemGenericAllocationHandle = api::CUmemGenericAllocationHandle;
  GPUSHARE_CUDA_SYMBOLS(GPUSHARE_CUDA_MEMBER)
#undef GPUSHARE_CUDA_MEMBER

  // Whether all symbols of the optional group are there.
  bool has_virtual_memory() const {
    return has_virtual_memory_;
  }
  bool has_shareable() const {
    return has_shareable_;
  }
  bool has_partitions() const {
    return has_partitions_;
  }
  bool has_capture() const {
    return has_capture_;
  }
  int version() const {
    return version_;
  }  // 13000 = CUDA 13.0
  const std::string& path() const {
    return path_;
  }

 private:
  static base::Result<Driver*> open(const std::string& path);
  bool has_virtual_memory_ = false;
  bool has_shareable_ = false;
  bool has_partitions_ = false;
  bool has_capture_ = false;
  int version_ = 0;
  std::string path_;
};

// Name of a result as cuda.h spells it; "CUDA_ERROR_?" for a number that our table lacks.
const char* result_name(api::CUresult result);

// The status that a result means; UNKNOWN for one without a mapping.
int32_t result_status(api::CUresult result);

// True if the context is gone for good after such a result, so that every later call on it fails.
bool is_sticky(api::CUresult result);

// "what: CUDA_ERROR_INVALID_VALUE (1)", with the native code kept. OK for CUDA_SUCCESS.
base::Status to_status(api::CUresult result, const std::string& what);

}  // namespace gpushare::device::cuda
