// The stand-in without misuse: faults on demand, kernels, graphs, the symbol table, virtual memory.
// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "standin_support.hpp"

using namespace standin_test;  // NOLINT(google-build-using-namespace)

namespace {

void scale(const standin_launch* launch) {
  auto* const values = static_cast<float*>(
      standin_storage(reinterpret_cast<uint64_t>(*static_cast<float**>(launch->params[0]))));
  const float factor = *static_cast<float*>(launch->params[1]);
  const unsigned count = launch->grid[0] * launch->block[0];
  for (unsigned i = 0; i < count; ++i) values[i] *= factor;
}
void scale_accesses(const standin_launch* launch, standin_touch touch, void* sink) {
  touch(sink, reinterpret_cast<uint64_t>(*static_cast<float**>(launch->params[0])),
        uint64_t{4} * launch->grid[0] * launch->block[0], 1);
}

struct ScaleKernel {
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  ScaleKernel() {
    const size_t param_bytes[] = {sizeof(float*), sizeof(float)};
    standin_register_kernel("scale", scale, param_bytes, 2, scale_accesses);
    REQUIRE(cuModuleLoadData(&module, "image") == CUDA_SUCCESS);
    REQUIRE(cuModuleGetFunction(&function, module, "scale") == CUDA_SUCCESS);
  }
  ~ScaleKernel() { CHECK(cuModuleUnload(module) == CUDA_SUCCESS); }
  CUresult launch(CUstream stream, CUdeviceptr values, float factor, unsigned count) const {
    void* params[] = {&values, &factor};
    return cuLaunchKernel(function, 1, 1, 1, count, 1, 1, 0, stream, params, nullptr);
  }
};

}  // namespace

TEST_CASE("a kernel is a host function whose accesses are checked", "[standin]") {
  Stage stage;
  const ScaleKernel kernel;
  std::vector<float> host(64, 2.0f);
  const CUdeviceptr block = stage.alloc(64 * 4);
  REQUIRE(cuMemcpyHtoDAsync_v2(block, host.data(), 256, stage.a) == CUDA_SUCCESS);
  CHECK(kernel.launch(stage.a, block, 3.0f, 64) == CUDA_SUCCESS);
  CHECK(kernel.launch(stage.a, block, 3.0f, 65) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuLaunchKernel", "past the end"));
  CHECK(kernel.launch(stage.b, block, 1.0f, 64) == CUDA_SUCCESS);
  CHECK(misused("cuLaunchKernel", "unordered access"));
  REQUIRE(cuStreamSynchronize(stage.b) == CUDA_SUCCESS);
  REQUIRE(cuMemcpyDtoHAsync_v2(host.data(), block, 256, stage.a) == CUDA_SUCCESS);
  REQUIRE(cuStreamSynchronize(stage.a) == CUDA_SUCCESS);
  CHECK(host == std::vector<float>(64, 6.0f));
  CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
}

TEST_CASE("calls fail on demand at call n", "[standin]") {
  Stage stage;
  CUdeviceptr block = 0;
  standin_fail_call("cuMemAlloc", 2, CUDA_ERROR_OUT_OF_MEMORY);
  REQUIRE(cuMemAlloc_v2(&block, 64) == CUDA_SUCCESS);
  CUdeviceptr second = 0;
  CHECK(cuMemAlloc_v2(&second, 64) == CUDA_ERROR_OUT_OF_MEMORY);
  REQUIRE(cuMemAlloc_v2(&second, 64) == CUDA_SUCCESS);
  standin_fail_call("", 1, 999);
  CHECK(cuMemFree_v2(block) == 999);
  CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
  CHECK(cuMemFree_v2(second) == CUDA_SUCCESS);
}

TEST_CASE("work that fails poisons its context, which a new one cures", "[standin]") {
  {
    Stage stage;
    CUdeviceptr block = stage.alloc(64);
    int runs = 0;
    const auto count = [](void* runs_so_far) { ++*static_cast<int*>(runs_so_far); };
    standin_fail_work("cuMemsetD8Async", 1, CUDA_ERROR_LAUNCH_FAILED);
    CHECK(cuMemsetD8Async(block, 0, 64, stage.a) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(stage.a) == CUDA_ERROR_LAUNCH_FAILED);
    CHECK(cuMemAlloc_v2(&block, 64) == CUDA_ERROR_LAUNCH_FAILED);
    CHECK(cuLaunchHostFunc(stage.a, count, &runs) == CUDA_ERROR_LAUNCH_FAILED);
    CHECK(runs == 0);
  }
  Stage stage;
  CHECK(cuMemFree_v2(stage.alloc(64)) == CUDA_SUCCESS);
}

TEST_CASE("slow copies take their time", "[standin]") {
  Stage stage;
  const CUdeviceptr block = stage.alloc(1u << 20);
  void* pinned = nullptr;
  REQUIRE(cuMemHostAlloc(&pinned, 1u << 20, 0) == CUDA_SUCCESS);
  CUevent start = nullptr;
  CUevent end = nullptr;
  REQUIRE(cuEventCreate(&start, 0) == CUDA_SUCCESS);
  REQUIRE(cuEventCreate(&end, 0) == CUDA_SUCCESS);
  REQUIRE(standin_configure("copy_bytes_per_s", 100u << 20) == 0);  // 10 ms
  REQUIRE(cuEventRecord(start, stage.a) == CUDA_SUCCESS);
  REQUIRE(cuMemcpyHtoDAsync_v2(block, pinned, 1u << 20, stage.a) == CUDA_SUCCESS);
  REQUIRE(cuEventRecord(end, stage.a) == CUDA_SUCCESS);
  CHECK(cuStreamQuery(stage.a) == CUDA_ERROR_NOT_READY);
  REQUIRE(cuEventSynchronize(end) == CUDA_SUCCESS);
  REQUIRE(standin_configure("copy_bytes_per_s", 0) == 0);
  float ms = 0;
  REQUIRE(cuEventElapsedTime(&ms, start, end) == CUDA_SUCCESS);
  CHECK(ms >= 10.0f);  // a sleep never ends early
  CHECK(cuEventDestroy_v2(start) == CUDA_SUCCESS);
  CHECK(cuEventDestroy_v2(end) == CUDA_SUCCESS);
  CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
  CHECK(cuMemFreeHost(pinned) == CUDA_SUCCESS);
  CHECK(standin_configure("no such key", 1) == -1);
}

TEST_CASE("a graph runs what was captured, each time it is launched", "[standin]") {
  Stage stage;
  const ScaleKernel kernel;
  std::vector<float> host(8, 1.0f);
  const CUdeviceptr block = stage.alloc(32);
  CUevent fork = nullptr;
  CUevent joined = nullptr;
  REQUIRE(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
  REQUIRE(cuEventCreate(&joined, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
  REQUIRE(cuMemcpyHtoDAsync_v2(block, host.data(), 32, stage.a) == CUDA_SUCCESS);
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  REQUIRE(cuStreamBeginCapture_v2(stage.a, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  CHECK(kernel.launch(stage.a, block, 2.0f, 8) == CUDA_SUCCESS);
  CHECK(cuEventRecord(fork, stage.a) == CUDA_SUCCESS);
  CHECK(cuStreamWaitEvent(stage.b, fork, 0) == CUDA_SUCCESS);
  CHECK(kernel.launch(stage.b, block, 3.0f, 8) == CUDA_SUCCESS);
  CHECK(cuEventRecord(joined, stage.b) == CUDA_SUCCESS);
  CHECK(cuStreamWaitEvent(stage.a, joined, 0) == CUDA_SUCCESS);
  REQUIRE(cuStreamEndCapture(stage.a, &graph) == CUDA_SUCCESS);
  REQUIRE(cuGraphInstantiateWithFlags(&exec, graph, 0) == CUDA_SUCCESS);
  CHECK(cuGraphDestroy(graph) == CUDA_SUCCESS);
  for (int i = 0; i < 2; ++i) CHECK(cuGraphLaunch(exec, stage.a) == CUDA_SUCCESS);
  REQUIRE(cuMemcpyDtoHAsync_v2(host.data(), block, 32, stage.a) == CUDA_SUCCESS);
  REQUIRE(cuStreamSynchronize(stage.a) == CUDA_SUCCESS);
  CHECK(host == std::vector<float>(8, 36.0f));
  CHECK(cuGraphExecDestroy(exec) == CUDA_SUCCESS);
  CHECK(cuEventDestroy_v2(fork) == CUDA_SUCCESS);
  CHECK(cuEventDestroy_v2(joined) == CUDA_SUCCESS);
  CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
}

TEST_CASE("stream-ordered allocation and managed memory", "[standin]") {
  Stage stage;
  CUdeviceptr block = 0;
  REQUIRE(cuMemAllocAsync(&block, 4096, stage.a) == CUDA_SUCCESS);
  CHECK(cuMemsetD8Async(block, 1, 4096, stage.a) == CUDA_SUCCESS);
  CHECK(cuMemsetD8Async(block, 1, 4096, stage.b) == CUDA_SUCCESS);
  CHECK(misused("cuMemsetD8Async", "unordered access"));
  REQUIRE(cuStreamSynchronize(stage.b) == CUDA_SUCCESS);
  CHECK(cuMemFreeAsync(block, stage.a) == CUDA_SUCCESS);
  CHECK(cuMemsetD8Async(block, 1, 4096, stage.a) == CUDA_ERROR_INVALID_VALUE);
  CHECK(misused("cuMemsetD8Async", "freed by cuMemFreeAsync#"));

  CUdeviceptr managed = 0;
  REQUIRE(cuMemAllocManaged(&managed, 64, 1) == CUDA_SUCCESS);
  std::memset(reinterpret_cast<void*>(managed), 5, 64);
  CHECK(cuMemFree_v2(managed) == CUDA_SUCCESS);
}

TEST_CASE("the legacy default stream and blocking streams order each other", "[standin]") {
  Stage stage;
  CUstream blocking = nullptr;
  REQUIRE(cuStreamCreate(&blocking, 0) == CUDA_SUCCESS);
  const CUdeviceptr block = stage.alloc(64);
  CHECK(cuMemsetD8Async(block, 1, 64, blocking) == CUDA_SUCCESS);
  CHECK(cuMemsetD8Async(block, 2, 64, nullptr) == CUDA_SUCCESS);
  CHECK(cuMemsetD8Async(block, 3, 64, blocking) == CUDA_SUCCESS);
  CHECK(cuMemsetD8Async(block, 4, 64, stage.a) == CUDA_SUCCESS);  // non-blocking: not ordered
  CHECK(misused("cuMemsetD8Async", "unordered access"));
  CHECK(cuStreamDestroy_v2(blocking) == CUDA_SUCCESS);
  CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
}

TEST_CASE("cuGetProcAddress hands out the version that was asked for", "[standin]") {
  Stage stage;
  void* function = nullptr;
  int found = -1;
  CHECK(cuGetProcAddress_v2("cuMemAlloc", &function, 3020, 1, &found) == CUDA_SUCCESS);
  CHECK(function == reinterpret_cast<void*>(&cuMemAlloc_v2));
  // Of what is absent whoever takes the status has success and null, as the driver answers.
  CHECK(cuGetProcAddress_v2("cuMemAlloc", &function, 2000, 1, &found) == CUDA_SUCCESS);
  CHECK(found == 2);
  CHECK(function == nullptr);
  CHECK(cuGetProcAddress_v2("cuNoSuchThing", &function, 13000, 1, &found) == CUDA_SUCCESS);
  CHECK(found == 1);
  CHECK(function == nullptr);
  CHECK(cuGetProcAddress_v2("cuNoSuchThing", &function, 13000, 1, nullptr) == CUDA_ERROR_NOT_FOUND);
  REQUIRE(standin_configure("driver_version", 12020) == 0);
  CHECK(cuGetProcAddress_v2("cuGreenCtxCreate", &function, 13000, 1, &found) == CUDA_SUCCESS);
  CHECK(function == nullptr);
  REQUIRE(standin_configure("driver_version", 13000) == 0);
  CHECK(cuGetProcAddress_v2("cuGreenCtxCreate", &function, 13000, 1, &found) == CUDA_SUCCESS);
  const char* name = nullptr;
  CHECK(cuGetErrorName(700, &name) == CUDA_SUCCESS);
  CHECK(std::string(name) == "CUDA_ERROR_ILLEGAL_ADDRESS");
}

TEST_CASE("host functions of independent streams run one at a time", "[standin]") {
  Stage stage;
  struct Shared {
    std::atomic<int> running{0}, most{0}, runs{0};
    static void run(void* data) {
      auto& self = *static_cast<Shared*>(data);
      const int now = ++self.running;
      self.most = std::max(self.most.load(), now);
      std::this_thread::yield();
      --self.running;
      ++self.runs;
    }
  } shared;
  for (int i = 0; i < 100; ++i) {
    REQUIRE(cuLaunchHostFunc(stage.a, &Shared::run, &shared) == CUDA_SUCCESS);
    REQUIRE(cuLaunchHostFunc(stage.b, &Shared::run, &shared) == CUDA_SUCCESS);
  }
  CHECK(cuStreamSynchronize(stage.a) == CUDA_SUCCESS);
  CHECK(cuStreamSynchronize(stage.b) == CUDA_SUCCESS);
  CHECK(shared.runs == 200);
  CHECK(shared.most == 1);
}

TEST_CASE("a free that waits keeps the calls of other threads waiting", "[standin]") {
  Stage stage;
  const CUdeviceptr block = stage.alloc(64);
  Gate gate;
  std::atomic<bool> asked{false};
  REQUIRE(cuLaunchHostFunc(stage.a, Gate::block, &gate) == CUDA_SUCCESS);
  const uint64_t frees = standin_calls("cuMemFree");
  CUresult freed = CUDA_ERROR_INVALID_VALUE;
  std::thread freer([&] {
    (void)cuCtxPushCurrent_v2(stage.context);
    freed = cuMemFree_v2(block);
    (void)cuCtxPopCurrent_v2(nullptr);
  });
  while (standin_calls("cuMemFree") == frees) std::this_thread::yield();
  std::thread asker([&] {
    int version = 0;
    asked = cuDriverGetVersion(&version) == CUDA_SUCCESS;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK_FALSE(asked);
  gate.open();
  freer.join();
  asker.join();
  CHECK(asked);
  CHECK(freed == CUDA_SUCCESS);
}

TEST_CASE("new memory is not zero, and shares pages of 2 MiB", "[standin]") {
  Stage stage;
  size_t before = 0, after = 0, total = 0;
  REQUIRE(cuMemGetInfo_v2(&before, &total) == CUDA_SUCCESS);
  const CUdeviceptr large = stage.alloc(kGranule - 1);
  REQUIRE(cuMemGetInfo_v2(&after, &total) == CUDA_SUCCESS);
  CHECK(before - after == kGranule);
  const CUdeviceptr blocks[3] = {large, stage.alloc(100), stage.alloc(1000)};
  REQUIRE(cuMemGetInfo_v2(&after, &total) == CUDA_SUCCESS);
  CHECK(before - after <= 2 * kGranule);  // the small ones share a page
  std::vector<unsigned char> seen(100);
  for (const CUdeviceptr block : blocks) {
    REQUIRE(cuMemcpyDtoHAsync_v2(seen.data(), block, 100, stage.a) == CUDA_SUCCESS);
    REQUIRE(cuStreamSynchronize(stage.a) == CUDA_SUCCESS);
    CHECK(seen == std::vector<unsigned char>(100, 0xA5));
    CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
  }
  const Mapped mapped;
  REQUIRE(cuMemcpyDtoHAsync_v2(seen.data(), mapped.range + kGranule - 100, 100, stage.a) == CUDA_SUCCESS);
  REQUIRE(cuStreamSynchronize(stage.a) == CUDA_SUCCESS);
  CHECK(seen == std::vector<unsigned char>(100, 0xA5));
  mapped.release();
  REQUIRE(cuMemGetInfo_v2(&after, &total) == CUDA_SUCCESS);
  CHECK(before == after);
}

TEST_CASE("the host cannot touch device memory, only pinned memory", "[standin]") {
  Stage stage;
  const auto readable = [](const void* at) {
    // As a system call reads it, which fails where a load would end the process.
    const int file = memfd_create("probe", MFD_CLOEXEC);
    REQUIRE(file >= 0);
    const bool could = write(file, at, 1) == 1;
    close(file);
    return could;
  };
  const CUdeviceptr block = stage.alloc(64);
  const Mapped mapped;
  CHECK_FALSE(readable(reinterpret_cast<const void*>(block)));
  CHECK_FALSE(readable(reinterpret_cast<const void*>(mapped.range)));
  CHECK(readable(standin_storage(block)));
  CHECK(readable(standin_storage(mapped.range)));
  void* pinned = nullptr;
  REQUIRE(cuMemHostAlloc(&pinned, 64, 0) == CUDA_SUCCESS);
  CHECK(readable(pinned));
  CHECK(standin_storage(reinterpret_cast<uint64_t>(pinned)) == pinned);
  CHECK(cuMemFreeHost(pinned) == CUDA_SUCCESS);
  mapped.release();
  CHECK(cuMemFree_v2(block) == CUDA_SUCCESS);
}

TEST_CASE("streams share eight hardware queues, where one that waits holds up the others", "[standin]") {
  Stage stage;
  REQUIRE(standin_configure("serial_host_functions", 0) == 0);
  Gate gate;
  // The default stream, a and b have three queues; of nine more streams the last has that of the first.
  CUstream more[9];
  for (CUstream& stream : more)
    REQUIRE(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
  const auto pass = [](void* data) { static_cast<std::atomic<bool>*>(data)->store(true); };
  std::atomic<bool> ran[2] = {false, false};
  REQUIRE(cuLaunchHostFunc(more[0], &Gate::block, &gate) == CUDA_SUCCESS);
  REQUIRE(cuLaunchHostFunc(more[0], pass, &ran[0]) == CUDA_SUCCESS);
  REQUIRE(cuLaunchHostFunc(more[8], pass, &ran[1]) ==
          CUDA_SUCCESS);  // behind a function that waits for the gate
  std::atomic<bool> other{false};
  REQUIRE(cuLaunchHostFunc(more[1], pass, &other) == CUDA_SUCCESS);
  REQUIRE(cuStreamSynchronize(more[1]) == CUDA_SUCCESS);
  CHECK(other.load());
  CHECK_FALSE(ran[1].load());
  CHECK(cuStreamQuery(more[8]) == CUDA_ERROR_NOT_READY);
  gate.open();
  REQUIRE(cuStreamSynchronize(more[8]) == CUDA_SUCCESS);
  REQUIRE(cuStreamSynchronize(more[0]) == CUDA_SUCCESS);
  CHECK(ran[0].load());
  for (const CUstream stream : more) CHECK(cuStreamDestroy_v2(stream) == CUDA_SUCCESS);
  REQUIRE(standin_configure("serial_host_functions", 1) == 0);
}

extern "C" {
CUresult cuGetExportTable(const void**, const void*);
CUresult cuLibraryLoadData(void**, const void*, void*, void**, unsigned, void*, void**, unsigned);
CUresult cuLibraryUnload(void*);
}
TEST_CASE("the runtime's private table keeps values for a context, and libraries take memory", "[standin]") {
  Stage stage;
  constexpr unsigned char kId[16] = {0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11,
                                     0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93};
  struct Table {
    size_t bytes;
    CUresult (*put)(CUcontext, void*, void*, void (*)(CUcontext, void*, void*));
    CUresult (*remove)(CUcontext, void*);
    CUresult (*get)(void**, CUcontext, void*);
  };
  const void* found = nullptr;
  int key = 0, value = 0;
  void* back = nullptr;
  CHECK(cuGetExportTable(&found, "another one's id") == CUDA_ERROR_INVALID_VALUE);
  REQUIRE(cuGetExportTable(&found, kId) == CUDA_SUCCESS);
  const auto* const table = static_cast<const Table*>(found);
  REQUIRE(table->bytes == sizeof(Table));
  CHECK(table->get(&back, nullptr, &key) == CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(table->put(nullptr, &key, &value, nullptr) == CUDA_SUCCESS);  // of the current context
  REQUIRE(table->get(&back, nullptr, &key) == CUDA_SUCCESS);
  CHECK(back == &value);
  CHECK(table->put(reinterpret_cast<CUcontext>(&key), &key, &value, nullptr) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(misused("contextLocalStoragePut", "no living context"));
  REQUIRE(table->remove(nullptr, &key) == CUDA_SUCCESS);
  void* library = nullptr;
  REQUIRE(cuLibraryLoadData(&library, "image", nullptr, nullptr, 0, nullptr, nullptr, 0) == CUDA_SUCCESS);
  REQUIRE(cuLibraryUnload(library) == CUDA_SUCCESS);
  CHECK(cuLibraryUnload(library) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(misused("cuLibraryUnload", "double free"));
}

TEST_CASE("what calls would cost is counted, not spent", "[standin]") {
  REQUIRE(standin_configure("costs", 1) == 0);
  Stage stage;
  const uint64_t before = standin_cost_ns();
  const Mapped mapped;
  mapped.release();
  CHECK(standin_cost_ns() - before == (29 + 8 + 38 + 34 + 23) * 1000);
  REQUIRE(standin_configure("costs", 0) == 0);
}
