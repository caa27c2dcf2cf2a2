// CUDA graphs: what ops do while a stream of the device captures one. See docs/design/device-cuda.md.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>
#include <vector>

#include "cuda_support.hpp"

using namespace cuda_test;     // NOLINT(google-build-using-namespace)
using namespace standin_test;  // NOLINT(google-build-using-namespace)

namespace {

// The user's side: the primary context is current, and a native stream of ours captures.
struct Capturing {
  std::unique_ptr<Device> device = open();
  gpushare::device::Stream stream = std::move(*device->create_stream());
  CUstream native = static_cast<CUstream>(stream.native());
  CUcontext context = nullptr;
  explicit Capturing(int mode) {
    REQUIRE(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    REQUIRE(cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
    REQUIRE(cuStreamBeginCapture_v2(native, mode) == CUDA_SUCCESS);
  }
  CUgraphExec end() const { return end_capture(native); }
  ~Capturing() {
    stream = {};
    CHECK(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    const Status closed = device->close();
    INFO(closed.to_string());
    CHECK(closed.ok());
    check_clean();
  }
};

}  // namespace

TEST_CASE("allocations during a capture happen at once and do not disturb it", "[cuda]") {
  for (const int mode :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
    INFO("mode " << mode);
    Capturing capturing(mode);
    Device& device = *capturing.device;
    const uint64_t granule = device.info().mapping_granularity_bytes;
    const auto block = device.alloc(4096);
    REQUIRE_OK(block.status());
    const auto pinned = device.host_alloc(4u << 20);
    REQUIRE_OK(pinned.status());
    const auto range = device.va_reserve(granule);
    const auto memory = device.phys_create(granule);
    REQUIRE_OK(device.va_map(*range, granule, *memory, 0));
    // From another thread too, which in global mode is just as forbidden to the driver's plain calls.
    std::thread([&] {
      const auto theirs = device.alloc(64);
      CHECK(theirs.ok());
      CHECK(device.free(*theirs).ok());
    }).join();
    REQUIRE_OK(capturing.stream.fill(*block, 5, 4096));
    REQUIRE_OK(capturing.stream.fill(*range, 6, granule));
    const CUgraphExec exec = capturing.end();

    std::vector<unsigned char> host(2);
    for (int i = 0; i < 2; ++i) {
      REQUIRE(cuGraphLaunch(exec, capturing.native) == CUDA_SUCCESS);
      REQUIRE_OK(capturing.stream.copy(reinterpret_cast<uint64_t>(&host[0]), *block + 4095, 1,
                                       GPUSHARE_COPY_DEVICE_TO_HOST));
      REQUIRE_OK(capturing.stream.copy(reinterpret_cast<uint64_t>(&host[1]), *range, 1,
                                       GPUSHARE_COPY_DEVICE_TO_HOST));
      REQUIRE_OK(capturing.stream.synchronize());
      CHECK(host == std::vector<unsigned char>{5, 6});
    }
    REQUIRE(cuGraphExecDestroy(exec) == CUDA_SUCCESS);
    REQUIRE_OK(device.va_unmap(*range, granule));
    REQUIRE_OK(device.phys_release(*memory));
    REQUIRE_OK(device.va_free(*range, granule));
    REQUIRE_OK(device.host_free(*pinned));
    REQUIRE_OK(device.free(*block));
  }
}

TEST_CASE("a capturing stream can be neither asked nor waited for, and its capture survives the attempt",
          "[cuda]") {
  Capturing capturing(CU_STREAM_CAPTURE_MODE_GLOBAL);
  const Status asked = capturing.stream.query();
  CHECK(asked.code() == GPUSHARE_INVALID_STATE);
  CHECK(mentions(asked, "captures a CUDA graph"));
  CHECK(capturing.stream.synchronize().code() == GPUSHARE_INVALID_STATE);
  REQUIRE(cuGraphExecDestroy(capturing.end()) == CUDA_SUCCESS);
  CHECK(capturing.stream.query().ok());
}

TEST_CASE("other streams and events of the device go on while one captures", "[cuda]") {
  Capturing capturing(CU_STREAM_CAPTURE_MODE_GLOBAL);
  Device& device = *capturing.device;
  int runs = 0;
  {
    const auto other = device.create_stream();
    REQUIRE_OK(other.status());
    const auto start = device.create_event(GPUSHARE_EVENT_TIMING);
    const auto end = device.create_event(GPUSHARE_EVENT_TIMING);
    REQUIRE_OK(other->record(*start));
    REQUIRE_OK(other->launch_host([](void* n) { ++*static_cast<int*>(n); }, &runs));
    REQUIRE_OK(other->record(*end));
    REQUIRE_OK(end->synchronize());
    CHECK(end->query().ok());
    CHECK(end->elapsed_since(*start).ok());
    REQUIRE_OK(other->synchronize());
  }
  CHECK(runs == 1);
  REQUIRE(cuGraphExecDestroy(capturing.end()) == CUDA_SUCCESS);
}

TEST_CASE("what would end a capture or outlive its graph is refused, and the capture goes on", "[cuda]") {
  Capturing capturing(CU_STREAM_CAPTURE_MODE_GLOBAL);
  Device& device = *capturing.device;
  {
    const auto event = device.create_event();
    const Status recorded = capturing.stream.record(*event);
    CHECK(recorded.code() == GPUSHARE_INVALID_STATE);
    CHECK(mentions(recorded, "event_record: the stream captures a CUDA graph"));
    CHECK(event->query().ok());  // never recorded
    const Status launched = capturing.stream.launch_host([](void*) {}, nullptr);
    CHECK(launched.code() == GPUSHARE_INVALID_STATE);
    CHECK(mentions(launched, "launch_host: the stream captures a CUDA graph"));
    REQUIRE(cuGraphExecDestroy(capturing.end()) == CUDA_SUCCESS);
    REQUIRE_OK(capturing.stream.record(*event));
    REQUIRE_OK(event->synchronize());
  }
}

TEST_CASE("a capturing stream may wait for what has passed, and for nothing else outside its graph",
          "[cuda]") {
  for (const char* options : {"wait=block", "wait=spin", "wait=callback"}) {
    INFO(options);
    auto device = open(options);
    CUcontext context = nullptr;
    REQUIRE(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    REQUIRE(cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
    {
      const auto stream = device->create_stream();
      const auto other = device->create_stream();
      const auto native = static_cast<CUstream>(stream->native());
      const auto pending = device->create_event();
      const auto never = device->create_event();
      Gate gate;
      REQUIRE_OK(other->launch_host(Gate::block, &gate));
      REQUIRE_OK(other->record(*pending));
      REQUIRE(cuStreamBeginCapture_v2(native, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
      REQUIRE_OK(stream->wait(*never));
      const Status refused = stream->wait(*pending);
      CHECK(refused.code() == GPUSHARE_INVALID_STATE);
      CHECK(mentions(refused, "cannot wait for work outside of it"));
      gate.open();
      REQUIRE_OK(pending->synchronize());
      REQUIRE_OK(stream->wait(*pending));
      CUgraph graph = nullptr;
      REQUIRE(cuStreamEndCapture(native, &graph) == CUDA_SUCCESS);
      REQUIRE(cuGraphDestroy(graph) == CUDA_SUCCESS);
    }
    REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
    REQUIRE(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    REQUIRE_OK(device->close());
    check_clean();
  }
}

TEST_CASE("a capture can be dropped, sound or invalid, but not from another thread", "[cuda]") {
  for (const bool invalid : {false, true}) {
    INFO("invalid " << invalid);
    Capturing capturing(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    Status elsewhere;
    std::thread([&] { elsewhere = capturing.stream.drop_capture().status(); }).join();
    CHECK(elsewhere.code() == GPUSHARE_INVALID_STATE);
    CHECK(mentions(elsewhere, "another thread began the capture"));
    CHECK(misused("cuStreamEndCapture", "another thread"));  // the driver answers this; nothing is spoilt
    if (invalid) {
      CHECK(cuStreamQuery(capturing.native) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
      CHECK(misused("cuStreamQuery", "captures"));
    }
    const auto dropped = capturing.stream.drop_capture();
    REQUIRE_OK(dropped.status());
    CHECK(*dropped);
    CHECK(capturing.stream.query().ok());
    const auto again = capturing.stream.drop_capture();
    REQUIRE_OK(again.status());
    CHECK_FALSE(*again);
  }
}
