// Streams that somebody else made (stream_adopt), for the cuda programs alone. The test makes them by the driver, as
// the backend's user does.
// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"
#include "cuda_driver.hpp"

namespace gpushare::cts {
namespace {

// The user's side: the primary context is current to this thread, and a stream of it that the backend has not made.
struct Foreign {
  Foreign() {
    CUcontext context = nullptr;
    REQUIRE(symbol<CUresult(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain")(&context, 0) == CUDA_SUCCESS);
    REQUIRE(symbol<CUresult(CUcontext)>("cuCtxPushCurrent_v2")(context) == CUDA_SUCCESS);
    REQUIRE(symbol<CUresult(CUstream*, unsigned, int)>("cuStreamCreateWithPriority")(
                &native, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
  }
  ~Foreign() {
    CUcontext context = nullptr;
    CHECK(symbol<CUresult(CUstream)>("cuStreamDestroy_v2")(native) == CUDA_SUCCESS);
    CHECK(symbol<CUresult(CUcontext*)>("cuCtxPopCurrent_v2")(&context) == CUDA_SUCCESS);
    CHECK(symbol<CUresult(CUdevice)>("cuDevicePrimaryCtxRelease_v2")(0) == CUDA_SUCCESS);
  }
  Foreign(const Foreign&) = delete;
  Foreign& operator=(const Foreign&) = delete;
  void fill(device::Address address, uint8_t value, uint64_t bytes) const {
    REQUIRE(symbol<CUresult(CUdeviceptr, unsigned char, size_t, CUstream)>("cuMemsetD8Async")(
                address, value, bytes, native) == CUDA_SUCCESS);
  }
  CUstream native = nullptr;
};

}  // namespace

CTS_TEST("cuda streams: an adopted stream is the native one, in order with work that its maker enqueues") {
  constexpr uint64_t kBytes = 1 << 16;
  const device::Address block = *cts.device->alloc(kBytes);
  {
    const Foreign foreign;
    const auto adopted = cts.device->adopt_stream(foreign.native);
    REQUIRE(adopted.ok());
    CHECK(adopted->native() == foreign.native);
    foreign.fill(block, 1, kBytes);
    REQUIRE_OK(adopted->fill(block, 2, kBytes / 2));
    foreign.fill(block, 3, kBytes / 4);
    const auto bytes = cts.download(*adopted, block, kBytes);
    CHECK(bytes[0] == 3);
    CHECK(bytes[kBytes / 4] == 2);
    CHECK(bytes[kBytes - 1] == 1);
    CHECK_OK(adopted->query());
  }
  REQUIRE_OK(cts.device->free(block));
}

CTS_TEST("cuda streams: events order an adopted stream and the backend's own") {
  constexpr uint64_t kBytes = 1 << 16;
  const device::Address block = *cts.device->alloc(kBytes);
  {
    const Foreign foreign;
    const auto adopted = cts.device->adopt_stream(foreign.native);
    REQUIRE(adopted.ok());
    const auto own = cts.stream();
    const auto there = cts.event(), back = cts.event();
    foreign.fill(block, 1, kBytes);
    REQUIRE_OK(adopted->record(there));
    REQUIRE_OK(own.wait(there));
    REQUIRE_OK(own.fill(block, 2, kBytes / 2));
    REQUIRE_OK(own.record(back));
    REQUIRE_OK(adopted->wait(back));
    foreign.fill(block, 3, kBytes / 4);
    const auto bytes = cts.download(*adopted, block, kBytes);
    CHECK((bytes[0] == 3 && bytes[kBytes / 4] == 2 && bytes[kBytes - 1] == 1));
  }
  REQUIRE_OK(cts.device->free(block));
}

CTS_TEST("cuda streams: an adopted stream goes without waiting and leaves the native one to its maker") {
  const device::Address block = *cts.device->alloc(4096);
  {
    const Foreign foreign;
    Gate gate;
    {
      const auto first = cts.device->adopt_stream(foreign.native);
      const auto second = cts.device->adopt_stream(foreign.native);  // two objects of one stream
      REQUIRE((first.ok() && second.ok()));
      REQUIRE_OK(first->launch_host(Gate::block, &gate));
      CHECK(second->query().code() == GPUSHARE_NOT_READY);
    }
    gate.open();
    foreign.fill(block, 5, 4096);
    const auto again = cts.device->adopt_stream(foreign.native);
    REQUIRE(again.ok());
    CHECK(cts.download(*again, block, 4096)[4095] == 5);
  }
  REQUIRE_OK(cts.device->free(block));
}

CTS_TEST("cuda streams: null is the legacy default stream") {
  const device::Address block = *cts.device->alloc(4096);
  const auto legacy = cts.device->adopt_stream(nullptr);
  REQUIRE(legacy.ok());
  CHECK(legacy->native() == nullptr);
  REQUIRE_OK(legacy->fill(block, 6, 4096));
  CHECK(cts.download(*legacy, block, 4096)[0] == 6);
  REQUIRE_OK(cts.device->free(block));
}

}  // namespace gpushare::cts
