// Ops while a stream captures a CUDA graph (docs/design/device-cuda.md), for the cuda programs alone. The capture is
// the driver's; the test opens the driver as the backend does.
// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include "cts.hpp"
#include "cuda_driver.hpp"

namespace gpushare::cts {
namespace {

using CUgraphExec = struct CUgraphExec_st*;

// The user's side: the primary context is current to this thread, and a stream of the device captures.
struct Capturing {
  Capturing(Context& cts, int mode) : stream(cts.stream()), native(static_cast<CUstream>(stream.native())) {
    CUcontext context = nullptr;
    REQUIRE(symbol<CUresult(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain")(&context, 0) == CUDA_SUCCESS);
    REQUIRE(symbol<CUresult(CUcontext)>("cuCtxPushCurrent_v2")(context) == CUDA_SUCCESS);
    REQUIRE(symbol<CUresult(CUstream, int)>("cuStreamBeginCapture_v2")(native, mode) == CUDA_SUCCESS);
  }
  ~Capturing() {
    CUcontext context = nullptr;
    CHECK(symbol<CUresult(CUcontext*)>("cuCtxPopCurrent_v2")(&context) == CUDA_SUCCESS);
    CHECK(symbol<CUresult(CUdevice)>("cuDevicePrimaryCtxRelease_v2")(0) == CUDA_SUCCESS);
  }
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;
  CUgraphExec end() const {
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    REQUIRE(symbol<CUresult(CUstream, CUgraph*)>("cuStreamEndCapture")(native, &graph) == CUDA_SUCCESS);
    REQUIRE(symbol<CUresult(CUgraphExec*, CUgraph, unsigned long long)>("cuGraphInstantiateWithFlags")(
                &exec, graph, 0) == CUDA_SUCCESS);
    REQUIRE(symbol<CUresult(CUgraph)>("cuGraphDestroy")(graph) == CUDA_SUCCESS);
    return exec;
  }
  void launch(CUgraphExec exec) const {
    REQUIRE(symbol<CUresult(CUgraphExec, CUstream)>("cuGraphLaunch")(exec, native) == CUDA_SUCCESS);
  }
  static void destroy(CUgraphExec exec) {
    REQUIRE(symbol<CUresult(CUgraphExec)>("cuGraphExecDestroy")(exec) == CUDA_SUCCESS);
  }
  device::Stream stream;
  CUstream native;
};

constexpr int kModes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                          CU_STREAM_CAPTURE_MODE_RELAXED};

}  // namespace

CTS_TEST("cuda graphs: allocations and waits beside a capture do not disturb it") {
  for (const int mode : kModes) {
    INFO("mode " << mode);
    device::Device& device = *cts.device;
    const uint64_t granule = device.info().mapping_granularity_bytes;
    const auto beside = cts.stream();
    const auto event = cts.event(GPUSHARE_EVENT_TIMING);
    {
      const Capturing capturing(cts, mode);
      const auto block = device.alloc(4096);
      REQUIRE_OK(block.status());
      const auto pinned = device.host_alloc(4u << 20);
      REQUIRE_OK(pinned.status());
      const auto range = device.va_reserve(granule);
      REQUIRE_OK(range.status());
      const auto memory = device.phys_create(granule);
      REQUIRE_OK(memory.status());
      REQUIRE_OK(device.va_map(*range, granule, *memory, 0));
      bool theirs_good = false;
      std::thread([&] {
        const auto theirs = device.alloc(64);
        theirs_good = theirs.ok() && device.free(*theirs).ok();
      }).join();
      CHECK(theirs_good);
      REQUIRE_OK(beside.fill(*block, 1, 4096));
      REQUIRE_OK(beside.record(event));
      REQUIRE_OK(event.synchronize());
      REQUIRE_OK(event.query());
      REQUIRE_OK(beside.synchronize());
      REQUIRE_OK(capturing.stream.fill(*block, 5, 4096));
      REQUIRE_OK(capturing.stream.fill(*range, 6, granule));
      const CUgraphExec exec = capturing.end();
      CHECK(cts.download(beside, *block, 4096) == std::vector<uint8_t>(4096, 1));  // nothing of it has run
      for (int launch = 0; launch < 2; ++launch) {
        capturing.launch(exec);
        CHECK(cts.download(capturing.stream, *block, 4096) == std::vector<uint8_t>(4096, 5));
        CHECK(cts.download(capturing.stream, *range + granule - 16, 16) == std::vector<uint8_t>(16, 6));
      }
      Capturing::destroy(exec);
      REQUIRE_OK(device.va_unmap(*range, granule));
      REQUIRE_OK(device.phys_release(*memory));
      REQUIRE_OK(device.va_free(*range, granule));
      REQUIRE_OK(device.host_free(*pinned));
      REQUIRE_OK(device.free(*block));
    }
  }
}

CTS_TEST("cuda graphs: what would end the capture is refused and the capture intact") {
  const device::Address block = *cts.device->alloc(4096);
  {
    const auto beside = cts.stream();
    const auto event = cts.event();
    const auto passed = cts.event();
    REQUIRE_OK(beside.record(passed));
    REQUIRE_OK(beside.synchronize());
    const Capturing capturing(cts, CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK(capturing.stream.query().code() == GPUSHARE_INVALID_STATE);
    CHECK(capturing.stream.synchronize().code() == GPUSHARE_INVALID_STATE);
    CHECK(capturing.stream.record(event).code() == GPUSHARE_INVALID_STATE);
    CHECK(capturing.stream.launch_host([](void*) {}, nullptr).code() == GPUSHARE_INVALID_STATE);
    CHECK_OK(capturing.stream.wait(passed));
    REQUIRE_OK(capturing.stream.fill(block, 9, 4096));
    const CUgraphExec exec = capturing.end();
    capturing.launch(exec);
    CHECK(cts.download(capturing.stream, block, 4096) == std::vector<uint8_t>(4096, 9));
    Capturing::destroy(exec);
  }
  CHECK_OK(cts.device->free(block));
}

CTS_TEST("cuda graphs: a capture that is dropped leaves a stream that works") {
  const device::Address block = *cts.device->alloc(4096);
  for (const int mode : kModes) {
    const Capturing capturing(cts, mode);
    REQUIRE_OK(capturing.stream.fill(block, 3, 4096));
    const auto dropped = capturing.stream.drop_capture();
    REQUIRE_OK(dropped.status());
    CHECK(*dropped);
    CHECK_FALSE(*capturing.stream.drop_capture());
    REQUIRE_OK(capturing.stream.fill(block, 4, 4096));
    CHECK(cts.download(capturing.stream, block, 4096) == std::vector<uint8_t>(4096, 4));
  }
  CHECK_OK(cts.device->free(block));
}

}  // namespace gpushare::cts
