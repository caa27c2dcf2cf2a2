// Plants every class of misuse and sees the stand-in catch it, with the call that did it.
// SPDX-License-Identifier: Apache-2.0
#include <thread>
#include <vector>

#include "standin_support.hpp"

using namespace standin_test;  // NOLINT(google-build-using-namespace)

TEST_CASE("double free", "[misuse]") {
  Stage stage;
  const CUdeviceptr block = stage.alloc(1000);
  REQUIRE(cuMemFree_v2(block) == CUDA_SUCCESS);
  CHECK(cuMemFree_v2(block) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemFree", "double free"));

  void* pinned = nullptr;
  REQUIRE(cuMemHostAlloc(&pinned, 1000, CU_MEMHOSTALLOC_PORTABLE) == CUDA_SUCCESS);
  REQUIRE(cuMemFreeHost(pinned) == CUDA_SUCCESS);
  CHECK(cuMemFreeHost(pinned) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemFreeHost", "double free"));

  CUevent event = nullptr;
  REQUIRE(cuEventCreate(&event, 0) == CUDA_SUCCESS);
  REQUIRE(cuEventDestroy_v2(event) == CUDA_SUCCESS);
  CHECK(cuEventDestroy_v2(event) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(misused("cuEventDestroy", "destroyed by cuEventDestroy#"));

  const Mapped mapped;
  mapped.release();
  CHECK(cuMemUnmap(mapped.range, kGranule) != CUDA_SUCCESS);
  CHECK(misused("cuMemUnmap", ""));
  CHECK(cuMemRelease(mapped.memory) != CUDA_SUCCESS);
  CHECK(misused("cuMemRelease", "double free"));
  CHECK(cuMemAddressFree(mapped.range, 2 * kGranule) != CUDA_SUCCESS);
  CHECK(misused("cuMemAddressFree", "double free"));
}

TEST_CASE("freeing what was never allocated, and from its middle", "[misuse]") {
  Stage stage;
  int nothing = 0;
  CHECK(cuMemFree_v2(reinterpret_cast<CUdeviceptr>(&nothing)) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemFree", "not the start"));
  const CUdeviceptr block = stage.alloc(4096);
  CHECK(cuMemFree_v2(block + 512) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemFree", "not the start"));
  CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
}

TEST_CASE("use after free, past the end, after unmap and before access", "[misuse]") {
  Stage stage;
  const CUdeviceptr block = stage.alloc(1000);
  CHECK(cuMemsetD8Async(block, 0, 1001, stage.a) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemsetD8Async", "past the end"));
  REQUIRE(cuMemFree_v2(block) == CUDA_SUCCESS);
  CHECK(cuMemsetD8Async(block, 0, 10, stage.a) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemsetD8Async", "freed by cuMemFree#"));

  const Mapped mapped(/*access=*/false);
  CHECK(cuMemsetD8Async(mapped.range, 0, 10, stage.a) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemsetD8Async", "no access yet"));
  mapped.give_access();
  CHECK(cuMemsetD8Async(mapped.range, 0, kGranule, stage.a) == CUDA_SUCCESS);
  CHECK(cuMemsetD8Async(mapped.range, 0, kGranule + 1, stage.a) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemsetD8Async", "not mapped"));
  REQUIRE(cuStreamSynchronize(stage.a) == CUDA_SUCCESS);
  REQUIRE(cuMemUnmap(mapped.range, kGranule) == CUDA_SUCCESS);
  CHECK(cuMemsetD8Async(mapped.range, 0, 10, stage.a) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemsetD8Async", "unmapped by cuMemUnmap#"));
  CHECK(cuMemRelease(mapped.memory) == CUDA_SUCCESS);
  CHECK(cuMemAddressFree(mapped.range, 2 * kGranule) == CUDA_SUCCESS);
}

TEST_CASE("unmapping under work that the host has not seen finish", "[misuse]") {
  Stage stage;
  const Mapped mapped;
  REQUIRE(cuMemsetD8Async(mapped.range, 1, kGranule, stage.a) == CUDA_SUCCESS);
  mapped.release();
  CHECK(misused("cuMemUnmap", "unmap under work"));
}

TEST_CASE("freeing a range that is still mapped, mapping over a mapping", "[misuse]") {
  Stage stage;
  const Mapped mapped;
  CHECK(cuMemAddressFree(mapped.range, 2 * kGranule) != CUDA_SUCCESS);
  CHECK(misused("cuMemAddressFree", "still has the mapping"));
  CHECK(cuMemMap(mapped.range, kGranule, 0, mapped.memory, 0) != CUDA_SUCCESS);
  CHECK(misused("cuMemMap", "mapped already"));
  CHECK(cuMemMap(mapped.range + 2 * kGranule, kGranule, 0, mapped.memory, 0) != CUDA_SUCCESS);
  CHECK(misused("cuMemMap", "no reserved range"));
  CHECK(cuMemMap(mapped.range + kGranule, kGranule, kGranule, mapped.memory, 0) != CUDA_SUCCESS);
  CHECK(misused("cuMemMap", "offset"));
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  CUmemGenericAllocationHandle larger = 0;
  REQUIRE(cuMemCreate(&larger, 2 * kGranule, &prop, 0) == CUDA_SUCCESS);
  CHECK(cuMemMap(mapped.range + kGranule, kGranule, 0, larger, 0) != CUDA_SUCCESS);
  CHECK(misused("cuMemMap", "a part of the physical memory"));
  CHECK(cuMemRelease(larger) == CUDA_SUCCESS);
  mapped.release();
  CHECK(cuMemMap(mapped.range, kGranule, 0, mapped.memory, 0) != CUDA_SUCCESS);
  CHECK(misused("cuMemMap", "use after release"));
}

TEST_CASE("unordered access by two streams to one block", "[misuse]") {
  Stage stage;
  const CUdeviceptr block = stage.alloc(4096);
  const CUdeviceptr other = stage.alloc(4096);
  CUevent event = nullptr;
  REQUIRE(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);

  SECTION("write after write") {
    CHECK(cuMemsetD8Async(block, 1, 4096, stage.a) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(block + 100, 2, 10, stage.b) == CUDA_SUCCESS);
    CHECK(misused("cuMemsetD8Async", "unordered access: it writes"));
  }
  SECTION("read after write") {
    CHECK(cuMemsetD8Async(block, 1, 4096, stage.a) == CUDA_SUCCESS);
    CHECK(cuMemcpyDtoDAsync_v2(other, block, 64, stage.b) == CUDA_SUCCESS);
    CHECK(misused("cuMemcpyDtoDAsync", "unordered access: it reads"));
  }
  SECTION("write after read") {
    CHECK(cuMemcpyDtoDAsync_v2(other, block, 64, stage.b) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(block, 1, 4096, stage.a) == CUDA_SUCCESS);
    CHECK(misused("cuMemsetD8Async", "reads on another stream"));
  }
  SECTION("reads beside reads, and other bytes of the block, are fine") {
    CHECK(cuMemcpyDtoDAsync_v2(other, block, 64, stage.b) == CUDA_SUCCESS);
    CHECK(cuMemcpyDtoDAsync_v2(other + 64, block, 64, stage.a) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(block + 64, 1, 64, stage.a) == CUDA_SUCCESS);
  }
  SECTION("an event orders them") {
    CHECK(cuMemsetD8Async(block, 1, 4096, stage.a) == CUDA_SUCCESS);
    CHECK(cuEventRecord(event, stage.a) == CUDA_SUCCESS);
    CHECK(cuStreamWaitEvent(stage.b, event, 0) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(block, 2, 4096, stage.b) == CUDA_SUCCESS);
  }
  SECTION("an event that was recorded too early does not") {
    CHECK(cuEventRecord(event, stage.a) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(block, 1, 4096, stage.a) == CUDA_SUCCESS);
    CHECK(cuStreamWaitEvent(stage.b, event, 0) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(block, 2, 4096, stage.b) == CUDA_SUCCESS);
    CHECK(misused("cuMemsetD8Async", "unordered access"));
  }
  SECTION("order is handed on from stream to stream") {
    CUstream c = nullptr;
    REQUIRE(cuStreamCreateWithPriority(&c, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(block, 1, 4096, stage.a) == CUDA_SUCCESS);
    CHECK(cuEventRecord(event, stage.a) == CUDA_SUCCESS);
    CHECK(cuStreamWaitEvent(stage.b, event, 0) == CUDA_SUCCESS);
    CHECK(cuEventRecord(event, stage.b) == CUDA_SUCCESS);
    CHECK(cuStreamWaitEvent(c, event, 0) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(block, 2, 4096, c) == CUDA_SUCCESS);
    CHECK(cuStreamDestroy_v2(c) == CUDA_SUCCESS);
  }
  SECTION("a wait of the host orders them, on whatever thread") {
    CHECK(cuMemsetD8Async(block, 1, 4096, stage.a) == CUDA_SUCCESS);
    std::thread([&] {
      (void)cuCtxPushCurrent_v2(stage.context);
      (void)cuStreamSynchronize(stage.a);
      (void)cuCtxPopCurrent_v2(nullptr);
    }).join();
    CHECK(cuMemsetD8Async(block, 2, 4096, stage.b) == CUDA_SUCCESS);
  }
  SECTION("pinned memory is a block like others") {
    void* pinned = nullptr;
    REQUIRE(cuMemHostAlloc(&pinned, 64, 0) == CUDA_SUCCESS);
    CHECK(cuMemcpyDtoHAsync_v2(pinned, block, 64, stage.a) == CUDA_SUCCESS);
    CHECK(cuMemcpyHtoDAsync_v2(other, pinned, 64, stage.b) == CUDA_SUCCESS);
    CHECK(misused("cuMemcpyHtoDAsync", "unordered access"));
    CHECK(cuMemFreeHost(pinned) == CUDA_SUCCESS);
  }
  CHECK(cuEventDestroy_v2(event) == CUDA_SUCCESS);
  CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
  CHECK(cuMemFree_v2(other) == CUDA_SUCCESS);
}

TEST_CASE("wrong context", "[misuse]") {
  Stage stage;
  CUdeviceptr block = 0;
  SECTION("none is current") {
    REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
    CHECK(cuMemAlloc_v2(&block, 64) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(misused("cuMemAlloc", "no context is current"));
    REQUIRE(cuCtxPushCurrent_v2(stage.context) == CUDA_SUCCESS);
  }
  SECTION("another one is current") {
    CUcontext other = nullptr;
    REQUIRE(cuCtxCreate_v2(&other, 0, 0) == CUDA_SUCCESS);
    CHECK(cuStreamQuery(stage.a) == CUDA_ERROR_INVALID_HANDLE);
    CHECK(misused("cuStreamQuery", "wrong context"));
    REQUIRE(cuCtxDestroy_v2(other) == CUDA_SUCCESS);
    CHECK(cuCtxPushCurrent_v2(other) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    CHECK(misused("cuCtxPushCurrent", "destroyed by cuCtxDestroy#"));
  }
  SECTION("pop without push") {
    REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
    CHECK(cuCtxPopCurrent_v2(nullptr) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(misused("cuCtxPopCurrent", "nothing was pushed"));
    REQUIRE(cuCtxPushCurrent_v2(stage.context) == CUDA_SUCCESS);
  }
}

TEST_CASE("leaks when a context goes", "[misuse]") {
  Stage stage;
  CUcontext other = nullptr;
  CUstream stream = nullptr;
  CUdeviceptr block = 0;
  REQUIRE(cuCtxCreate_v2(&other, 0, 0) == CUDA_SUCCESS);
  REQUIRE(cuStreamCreate(&stream, 0) == CUDA_SUCCESS);
  REQUIRE(cuMemAlloc_v2(&block, 64) == CUDA_SUCCESS);
  char text[256];
  CHECK(standin_leaks(text, sizeof(text)) > 0);
  CHECK(std::string(text).find("leaked: ") != std::string::npos);
  CHECK(cuCtxDestroy_v2(other) == CUDA_SUCCESS);
  CHECK(misused("cuCtxDestroy", "leak: the context is destroyed with stream of cuStreamCreate#"));
  CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
}

TEST_CASE("driver calls from a host function", "[misuse]") {
  Stage stage;
  CUresult answer = CUDA_SUCCESS;
  REQUIRE(cuLaunchHostFunc(
              stage.a, [](void* data) { *static_cast<CUresult*>(data) = cuCtxSynchronize(); }, &answer) ==
          CUDA_SUCCESS);
  REQUIRE(cuStreamSynchronize(stage.a) == CUDA_SUCCESS);
  CHECK(answer == CUDA_ERROR_NOT_PERMITTED);
  CHECK(misused("cuCtxSynchronize", "host function"));
}

TEST_CASE("events used as they are not made for", "[misuse]") {
  Stage stage;
  CUevent plain = nullptr;
  CUevent timed = nullptr;
  float ms = 0;
  REQUIRE(cuEventCreate(&plain, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
  REQUIRE(cuEventCreate(&timed, 0) == CUDA_SUCCESS);
  CHECK(cuEventElapsedTime(&ms, timed, timed) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(misused("cuEventElapsedTime", "never recorded"));
  CHECK(cuEventElapsedTime(&ms, plain, timed) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(misused("cuEventElapsedTime", "no timing"));
  CHECK(cuEventDestroy_v2(plain) == CUDA_SUCCESS);
  CHECK(cuEventDestroy_v2(timed) == CUDA_SUCCESS);
}

TEST_CASE("what a capture forbids", "[misuse]") {
  Stage stage;
  CUgraph graph = nullptr;
  CUdeviceptr block = 0;
  SECTION("an allocation ends it") {
    REQUIRE(cuStreamBeginCapture_v2(stage.a, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
    CHECK(cuMemAlloc_v2(&block, 64) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(misused("cuMemAlloc", "captures a graph"));
    CHECK(cuStreamEndCapture(stage.a, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  SECTION("so does a wait for the stream") {
    REQUIRE(cuStreamBeginCapture_v2(stage.a, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(stage.a) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(misused("cuStreamSynchronize", "captures a graph"));
    CHECK(cuStreamEndCapture(stage.a, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  SECTION("a fork that never joins") {
    CUevent event = nullptr;
    block = stage.alloc(64);
    REQUIRE(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    REQUIRE(cuStreamBeginCapture_v2(stage.a, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS);
    CHECK(cuEventRecord(event, stage.a) == CUDA_SUCCESS);
    CHECK(cuStreamWaitEvent(stage.b, event, 0) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(block, 1, 64, stage.b) == CUDA_SUCCESS);
    CHECK(cuEventQuery(event) == CUDA_ERROR_CAPTURED_EVENT);
    CHECK(misused("cuEventQuery", "part of a graph"));
    CHECK(cuStreamEndCapture(stage.a, &graph) == 904);
    CHECK(misused("cuStreamEndCapture", "never joined"));
    CHECK(cuEventDestroy_v2(event) == CUDA_SUCCESS);
    CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
  }
  SECTION("an event from outside") {
    CUevent event = nullptr;
    REQUIRE(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    CHECK(cuEventRecord(event, stage.b) == CUDA_SUCCESS);
    REQUIRE(cuStreamBeginCapture_v2(stage.a, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS);
    CHECK(cuStreamWaitEvent(stage.a, event, 0) == 905);
    CHECK(misused("cuStreamWaitEvent", "from outside"));
    CHECK(cuStreamEndCapture(stage.a, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(cuEventDestroy_v2(event) == CUDA_SUCCESS);
  }
  SECTION("an end by another thread") {
    REQUIRE(cuStreamBeginCapture_v2(stage.a, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == CUDA_SUCCESS);
    CUresult ended = CUDA_SUCCESS;
    std::thread([&] {
      (void)cuCtxPushCurrent_v2(stage.context);
      CUgraph none = nullptr;
      ended = cuStreamEndCapture(stage.a, &none);
      (void)cuCtxPopCurrent_v2(nullptr);
    }).join();
    CHECK(ended == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    CHECK(misused("cuStreamEndCapture", "another thread"));
    CHECK(cuStreamEndCapture(stage.a, &graph) == CUDA_SUCCESS);
    CHECK(cuGraphDestroy(graph) == CUDA_SUCCESS);
  }
  SECTION("an end without a begin") {
    CHECK(cuStreamEndCapture(stage.a, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    CHECK(misused("cuStreamEndCapture", "no capture"));
  }
}

TEST_CASE("arguments that the driver refuses", "[misuse]") {
  Stage stage;
  CUdeviceptr block = 0;
  CHECK(cuMemAlloc_v2(&block, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemAlloc", "0 bytes"));
  CHECK(cuMemAddressReserve(&block, 4096, 0, 0, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemAddressReserve", "granularity"));
  CUstream stream = nullptr;
  CHECK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuStreamCreateWithPriority", "priority"));
  CHECK(cuStreamQuery(reinterpret_cast<CUstream>(&stream)) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(misused("cuStreamQuery", "not a stream"));
}

TEST_CASE("memory shared between processes, used as it was not made for", "[misuse]") {
  Stage stage;
  const Mapped plain;
  int descriptor = -1;
  CHECK(cuMemExportToShareableHandle(&descriptor, plain.memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                     0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemExportToShareableHandle", "not created to be exported"));
  const CUmemAccessDesc reads{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READ};
  REQUIRE(cuMemSetAccess(plain.range, kGranule, &reads, 1) == CUDA_SUCCESS);
  CHECK(cuMemsetD8Async(plain.range, 0, 10, stage.a) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemsetD8Async", "for reading only"));
  plain.release();
  // A descriptor may come from anybody: refused, and no misuse.
  CUmemGenericAllocationHandle handle = 0;
  CHECK(cuMemImportFromShareableHandle(&handle, nullptr, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ==
        CUDA_ERROR_INVALID_VALUE);
  CHECK(standin_misuse_count() == 0);
}
