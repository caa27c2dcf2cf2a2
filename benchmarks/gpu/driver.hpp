// benchmarks/gpu: what gpushare costs and gains on a GPU, through the public C++ API, beside what people would use
// instead, in one run. Started by scripts/gpu-suite; the page docs/design/gpu-suite.md says what each figure means.
//
// driver.hpp: the driver, for the baselines and for device time. Opened as the library does: GPUSHARE_CUDA_DRIVER if set, else
// libcuda.so.1.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "device/cuda/driver_api.hpp"

namespace gpushare::gpu_suite {

using device::cuda::api::CUcontext;
using device::cuda::api::CUdevice;
using device::cuda::api::CUdeviceptr;
using device::cuda::api::CUdevResource;
using device::cuda::api::CUdevResourceDesc;
using device::cuda::api::CUevent;
using device::cuda::api::CUgraph;
using device::cuda::api::CUgreenCtx;
using device::cuda::api::CUhostFn;
using device::cuda::api::CUmemAccessDesc;
using device::cuda::api::CUmemAllocationProp;
using device::cuda::api::CUmemGenericAllocationHandle;
using device::cuda::api::CUresult;
using device::cuda::api::CUstream;

// The driver's functions by their names; the stream-ordered allocator's may be null.
class Driver {
 public:
  // Opens the library, makes the primary context of device 0 current to this thread. Throws std::runtime_error with the reason.
  Driver();
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

#define GPUSHARE_MEMBER(need, name, exported, version, parameters) CUresult(*name) parameters = nullptr;
  GPUSHARE_CUDA_SYMBOLS(GPUSHARE_MEMBER)
#undef GPUSHARE_MEMBER
  CUresult (*cuMemAllocAsync)(CUdeviceptr*, size_t, CUstream) = nullptr;
  CUresult (*cuMemFreeAsync)(CUdeviceptr, CUstream) = nullptr;
  CUresult (*cuDeviceGetDefaultMemPool)(void**, CUdevice) = nullptr;
  CUresult (*cuMemPoolSetAttribute)(void*, int, void*) = nullptr;

  std::string device_name() const {
    return device_name_;
  }
  std::string version() const;
  bool is_standin() const {
    return device_name_.rfind("CUDA stand-in", 0) == 0;
  }

 private:
  std::string device_name_;
  CUdevice device_ = 0;
};

// Throws if a driver call failed.
inline void must(CUresult result, const char* what) {
  if (result != 0) throw std::runtime_error(std::string(what) + ": CUDA error " + std::to_string(result));
}

// A stream of the driver's own, for baselines.
class PlainStream {
 public:
  explicit PlainStream(const Driver& driver) : driver_(driver) {
    must(driver.cuStreamCreateWithPriority(&handle_, 1, 0), "cuStreamCreateWithPriority");
  }
  ~PlainStream() { (void)driver_.cuStreamDestroy(handle_); }
  PlainStream(const PlainStream&) = delete;
  PlainStream& operator=(const PlainStream&) = delete;
  CUstream get() const { return handle_; }
  void synchronize() const { must(driver_.cuStreamSynchronize(handle_), "cuStreamSynchronize"); }

 private:
  const Driver& driver_;
  CUstream handle_ = nullptr;
};

// A block of the driver's own.
class PlainBlock {
 public:
  PlainBlock(const Driver& driver, uint64_t bytes) : driver_(driver) {
    must(driver.cuMemAlloc(&address_, bytes), "cuMemAlloc");
  }
  ~PlainBlock() { (void)driver_.cuMemFree(address_); }
  PlainBlock(const PlainBlock&) = delete;
  PlainBlock& operator=(const PlainBlock&) = delete;
  CUdeviceptr get() const { return address_; }

 private:
  const Driver& driver_;
  CUdeviceptr address_ = 0;
};

// A timing event.
class TimingEvent {
 public:
  explicit TimingEvent(const Driver& driver) : driver_(driver) {
    must(driver.cuEventCreate(&handle_, 0), "cuEventCreate");
  }
  ~TimingEvent() { (void)driver_.cuEventDestroy(handle_); }
  TimingEvent(const TimingEvent&) = delete;
  TimingEvent& operator=(const TimingEvent&) = delete;
  void record(CUstream stream) const { must(driver_.cuEventRecord(handle_, stream), "cuEventRecord"); }
  double microseconds_since(const TimingEvent& start) const {
    float ms = 0;
    must(driver_.cuEventElapsedTime(&ms, start.handle_, handle_), "cuEventElapsedTime");
    return static_cast<double>(ms) * 1e3;
  }

 private:
  const Driver& driver_;
  CUevent handle_ = nullptr;
};

}  // namespace gpushare::gpu_suite
