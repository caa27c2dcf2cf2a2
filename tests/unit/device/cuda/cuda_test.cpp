// The cuda backend's use of a driver: finding it, contexts, capacity, pools, waits.
// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "cuda_support.hpp"
#include "device/registry.hpp"

using namespace cuda_test;     // NOLINT(google-build-using-namespace)
using namespace standin_test;  // NOLINT(google-build-using-namespace)

TEST_CASE("no driver is UNAVAILABLE with the reason, and probe agrees", "[cuda]") {
  const auto device = Device::open("cuda?driver=/no/such/libcuda.so.1");
  CHECK(device.status().code() == GPUSHARE_UNAVAILABLE);
  CHECK(mentions(device.status(), "/no/such/libcuda.so.1"));

  const gpushare_backend_ops* ops = gpushare::device::find_backend("cuda");
  REQUIRE(ops != nullptr);
  REQUIRE(setenv("GPUSHARE_CUDA_DRIVER", "/no/such/libcuda.so.2", 1) == 0);
  uint32_t count = 77;
  CHECK(ops->probe(&count) == GPUSHARE_UNAVAILABLE);
  CHECK(count == 77);
  // The failure is not remembered, because a driver may appear.
  REQUIRE(setenv("GPUSHARE_CUDA_DRIVER", GPUSHARE_CUDA_STANDIN, 1) == 0);
  CHECK(ops->probe(&count) == GPUSHARE_OK);
  CHECK(count == 1);
  REQUIRE(unsetenv("GPUSHARE_CUDA_DRIVER") == 0);
}

TEST_CASE("a library that is no driver is UNAVAILABLE and what it lacks is named", "[cuda]") {
  const auto device = Device::open("cuda?driver=/lib/x86_64-linux-gnu/libm.so.6");
  CHECK(device.status().code() == GPUSHARE_UNAVAILABLE);
  CHECK((mentions(device.status(), "cuCtxPushCurrent_v2 (CUDA 4.0)") ||
         mentions(device.status(), "cannot open")));
}

TEST_CASE("a driver that cannot start or shows no device is UNAVAILABLE", "[cuda]") {
  REQUIRE(standin_configure("devices", 1) == 0);
  const auto missing = Device::open(spec("", "5"));
  CHECK(missing.status().code() == GPUSHARE_UNAVAILABLE);
  CHECK(mentions(missing.status(), "shows 1 device; asked for index 5"));
  check_clean();
}

TEST_CASE("memory that other threads take and return meanwhile is not taken for the context's", "[cuda]") {
  REQUIRE(standin_configure("context_bytes", 5 << 20) == 0);
  {
    const auto device = open(), other = open();
    std::atomic<bool> stop{false};
    std::thread thread([&] {
      while (!stop) {
        const auto block = other->alloc(4 << 20);
        const auto granule = other->phys_create(2 << 20), shared = other->phys_create_shared(4 << 20);
        std::this_thread::yield();
        if (block.ok()) (void)other->free(*block);
        if (granule.ok()) (void)other->phys_release(*granule);
        if (shared.ok()) (void)other->phys_release(*shared);
        std::this_thread::sleep_for(std::chrono::microseconds(300));
      }
    });
    uint64_t wrong = 0, measured = 0;
    for (int i = 0; i < 2000; ++i) {
      const auto bytes = device->context_bytes();
      if (bytes.ok()) {
        ++measured;
        if (*bytes != 5 << 20) ++wrong;
      } else if (bytes.status().code() != GPUSHARE_NOT_READY) {
        ++wrong;
      }
    }
    stop = true;
    thread.join();
    CHECK(wrong == 0);
    CHECK(measured > 0);
  }
  REQUIRE(standin_configure("context_bytes", kContextBytes) == 0);
  check_clean();
}

TEST_CASE("what the process's context takes is told apart from the memory of its devices", "[cuda]") {
  REQUIRE(standin_configure("context_bytes", 5 << 20) == 0);
  {
    const auto device = open();
    const auto context_bytes = [&] {
      const auto bytes = device->context_bytes();
      INFO(bytes.status().to_string());
      return bytes.ok() ? *bytes : 0;
    };
    CHECK(context_bytes() == 5 << 20);
    // In a namespace of process ids NVML lists another number: not known is not zero.
    REQUIRE(standin_configure("nvml_lists_process", 0) == 0);
    CHECK(device->context_bytes().status().code() == GPUSHARE_UNSUPPORTED);
    REQUIRE(standin_configure("nvml_lists_process", 1) == 0);
    // However many processes others have.
    REQUIRE(standin_configure("nvml_others", 5000) == 0);
    CHECK(context_bytes() == 5 << 20);
    REQUIRE(standin_configure("nvml_others", 0) == 0);
    const auto block = device->alloc(4 << 20);  // whole pages of the driver, which counts those
    REQUIRE_OK(block.status());
    const auto memory = device->phys_create(2 << 20);
    REQUIRE_OK(memory.status());
    CHECK(context_bytes() == 5 << 20);
    {
      const auto second = open();  // of the same GPU, so also of the same context
      const auto other = second->alloc(2 << 20);
      REQUIRE_OK(other.status());
      CHECK(context_bytes() == 5 << 20);
      CHECK_OK(second->free(*other));
    }
    CHECK_OK(device->phys_release(*memory));  // into the pool
    CHECK(context_bytes() == 5 << 20);
    // Another process's memory may count for this one or not.
    const auto shared = device->phys_create_shared(2 << 20);
    REQUIRE_OK(shared.status());
    CHECK(context_bytes() == 5 << 20);
    const auto exported = device->phys_export(*shared, GPUSHARE_ACCESS_READ_WRITE);
    REQUIRE_OK(exported.status());
    const auto imported = device->phys_import(*exported, 2 << 20, GPUSHARE_ACCESS_READ_WRITE);
    REQUIRE_OK(imported.status());
    CHECK(device->context_bytes().status().code() == GPUSHARE_UNSUPPORTED);
    CHECK_OK(device->phys_release(*imported));
    CHECK(context_bytes() == 5 << 20);
    close(*exported);
    CHECK_OK(device->phys_release(*shared));
    CHECK_OK(device->free(*block));
    {
      const auto second = open();
      CHECK_OK(device->close());
      CHECK(context_bytes() == 5 << 20);
    }
    CHECK(context_bytes() == 0);
    CUcontext of_library = nullptr;
    REQUIRE(cuDevicePrimaryCtxRetain(&of_library, 0) == CUDA_SUCCESS);
    CHECK(context_bytes() == 5 << 20);
    REQUIRE(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
  }
  REQUIRE(standin_configure("context_bytes", kContextBytes) == 0);
  const auto host = Device::open("host");
  REQUIRE_OK(host.status());
  CHECK((*host)->context_bytes().status().code() == GPUSHARE_UNSUPPORTED);
  check_clean();
}

TEST_CASE("an NVML that hangs holds up nobody, and is asked again when it has answered", "[cuda]") {
  auto device = open();
  REQUIRE(standin_configure("nvml_hangs", 1) == 0);
  for (const char* why : {"3 s", "another call", "another call"}) {
    const Status unknown = device->context_bytes().status();
    CHECK(unknown.code() == GPUSHARE_NOT_READY);
    CHECK(mentions(unknown, why));
  }
  REQUIRE(standin_configure("nvml_hangs", 0) == 0);
  while (!device->context_bytes().ok()) std::this_thread::yield();
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("an old driver serves without what it lacks", "[cuda]") {
  const auto device = Device::open("cuda?driver=" GPUSHARE_CUDA_STANDIN_OLD);
  REQUIRE_OK(device.status());
  CHECK_FALSE((*device)->can(GPUSHARE_DEVICE_CAP_VIRTUAL_MEMORY));
  CHECK_FALSE((*device)->can(GPUSHARE_DEVICE_CAP_PARTITIONS));
  CHECK((*device)->info().mapping_granularity_bytes == 0);
  const auto range = (*device)->va_reserve(2 << 20);
  CHECK(range.status().code() == GPUSHARE_UNSUPPORTED);
  CHECK(mentions(range.status(), "CUDA 10.2"));
  CHECK((*device)->partition_info().status().code() == GPUSHARE_UNSUPPORTED);
  const auto block = (*device)->alloc(4096);
  REQUIRE_OK(block.status());
  {
    const auto stream = (*device)->create_stream();
    REQUIRE_OK(stream->fill(*block, 1, 4096));
    REQUIRE_OK(stream->synchronize());
  }
  REQUIRE_OK((*device)->free(*block));
  REQUIRE_OK((*device)->close());
}

TEST_CASE("options out of range are named", "[cuda]") {
  for (const char* options :
       {"driver=relative.so", "wait=sometimes", "fraction=0", "fraction=1.5", "fraction=0.5&total_gib=1",
        "total_bytes=0", "granularity=3MiB", "granularity=6MiB", "total_bytes=1MiB", "no_such_option=1",
        "context=not_a_number", "pinned_chunk_bytes=1"}) {
    INFO(options);
    const bool names_driver = std::strncmp(options, "driver", 6) == 0;
    const auto device = Device::open(names_driver ? std::string("cuda?") + options : spec(options));
    CHECK(device.status().code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(mentions(device.status(), "cuda"));
  }
  check_clean();
}

TEST_CASE("the caller's current context is as it was, on every thread", "[cuda]") {
  auto device = open();
  CUcontext other = nullptr;
  CUcontext current = nullptr;
  REQUIRE(cuCtxCreate_v2(&other, 0, 0) == CUDA_SUCCESS);
  {
    const auto stream = device->create_stream();
    REQUIRE_OK(stream.status());
    const auto block = device->alloc(4096);
    REQUIRE_OK(stream->fill(*block, 1, 4096));
    REQUIRE_OK(stream->synchronize());
    REQUIRE_OK(device->free(*block));
    CHECK(device->alloc(1ull << 50).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    REQUIRE(cuCtxGetCurrent(&current) == CUDA_SUCCESS);
    CHECK(current == other);
    std::thread([&] {
      CHECK(stream->query().ok());
      REQUIRE(cuCtxGetCurrent(&current) == CUDA_SUCCESS);
      CHECK(current == nullptr);
    }).join();
  }
  REQUIRE_OK(device->close());
  REQUIRE(cuCtxGetCurrent(&current) == CUDA_SUCCESS);
  CHECK(current == other);
  REQUIRE(cuCtxDestroy_v2(other) == CUDA_SUCCESS);
  check_clean();
}

TEST_CASE("when the context is current already, no op pushes it", "[cuda]") {
  auto device = open();
  CUcontext primary = nullptr;
  REQUIRE(cuDevicePrimaryCtxRetain(&primary, 0) == CUDA_SUCCESS);
  REQUIRE(cuCtxPushCurrent_v2(primary) == CUDA_SUCCESS);
  const uint64_t pushes = standin_calls("cuCtxPushCurrent");
  {
    const auto stream = device->create_stream();
    for (int i = 0; i < 10; ++i) CHECK(stream->query().ok());
  }
  CHECK(standin_calls("cuCtxPushCurrent") == pushes);
  REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
  REQUIRE(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a given context is used and not released", "[cuda]") {
  CUcontext given = nullptr;
  REQUIRE(cuInit(0) == CUDA_SUCCESS);
  REQUIRE(cuCtxCreate_v2(&given, 0, 0) == CUDA_SUCCESS);
  REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
  auto device = open("context=" + std::to_string(reinterpret_cast<uintptr_t>(given)));
  const auto block = device->alloc(64);
  REQUIRE_OK(block.status());
  // The block belongs to the given context: the context cannot go unnoticed before it.
  REQUIRE(cuCtxDestroy_v2(nullptr) != CUDA_SUCCESS);
  CHECK(misused("cuCtxDestroy", "not a context"));
  REQUIRE_OK(device->free(*block));
  REQUIRE_OK(device->close());
  REQUIRE(cuCtxDestroy_v2(given) == CUDA_SUCCESS);
  check_clean();
}

TEST_CASE("capacity can be a share, and follows the other users of the GPU", "[cuda]") {
  auto device = open("fraction=0.5");
  CHECK(device->info().total_bytes == 512u << 20);
  CHECK(device->refresh_info()->free_bytes == 512u << 20);
  const auto refused = device->alloc(513u << 20);
  CHECK(refused.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(mentions(refused.status(), "512.00 MiB"));
  // Somebody else takes 400 of the 1024 MiB, and the context 500: what is free is less than our share.
  REQUIRE(standin_configure("other_user_bytes", 400ull << 20) == 0);
  CHECK(device->refresh_info()->free_bytes == 124u << 20);
  const auto taken = device->alloc(200u << 20);
  CHECK(taken.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(mentions(taken.status(), "other"));
  REQUIRE(standin_configure("other_user_bytes", 0) == 0);
  const auto block = device->alloc(200u << 20);
  REQUIRE_OK(block.status());
  CHECK(device->refresh_info()->free_bytes == 312u << 20);
  REQUIRE_OK(device->free(*block));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("events come from a pool and forget their last owner", "[cuda]") {
  auto device = open();
  {
    const auto stream = device->create_stream();
    { REQUIRE_OK(stream->record(*device->create_event(GPUSHARE_EVENT_TIMING))); }
    const uint64_t created = standin_calls("cuEventCreate");
    for (int i = 0; i < 20; ++i) {
      const auto event = device->create_event(GPUSHARE_EVENT_TIMING);
      CHECK(event->query().ok());
      CHECK(event->elapsed_since(*event).status().code() == GPUSHARE_INVALID_STATE);
      REQUIRE_OK(stream->record(*event));
    }
    CHECK(standin_calls("cuEventCreate") == created);
    // The two kinds do not mix.
    const auto plain = device->create_event();
    CHECK(standin_calls("cuEventCreate") == created + 1);
    CHECK(plain->elapsed_since(*plain).status().code() == GPUSHARE_INVALID_STATE);
  }
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("pinned memory is cut from chunks that are given back", "[cuda]") {
  auto device = open("pinned_chunk_bytes=1MiB");
  const uint64_t before = standin_calls("cuMemHostAlloc");
  std::vector<void*> blocks;
  for (int i = 0; i < 40; ++i) {
    const auto block = device->host_alloc(static_cast<uint64_t>(1000 + i * 977));
    REQUIRE_OK(block.status());
    std::memset(*block, i, static_cast<size_t>(1000 + i * 977));
    for (void* other : blocks) CHECK(*block != other);
    blocks.push_back(*block);
  }
  CHECK(standin_calls("cuMemHostAlloc") == before + 1);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(blocks[i]);
    CHECK((bytes[0] == i && bytes[999 + i * 977] == i));
  }
  for (size_t i = 0; i < blocks.size(); i += 2) REQUIRE_OK(device->host_free(blocks[i]));
  for (size_t i = 1; i < blocks.size(); i += 2) REQUIRE_OK(device->host_free(blocks[i]));
  CHECK(device->host_free(blocks[0]).code() == GPUSHARE_NOT_FOUND);
  // All holes joined again: the biggest block that a chunk serves fits.
  const auto quarter = device->host_alloc(256u << 10);
  REQUIRE_OK(quarter.status());
  CHECK(standin_calls("cuMemHostAlloc") == before + 1);
  const auto large = device->host_alloc(2u << 20);
  CHECK(standin_calls("cuMemHostAlloc") == before + 2);
  REQUIRE_OK(device->host_free(*large));
  REQUIRE_OK(device->host_free(*quarter));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("pinned memory is mapped: the device reads what the host wrote, at the same address", "[cuda]") {
  auto device = open();
  const auto host = device->host_alloc(256);
  const auto block = device->alloc(256);
  {
    const auto stream = device->create_stream();
    std::memset(*host, 9, 256);
    REQUIRE_OK(stream->copy(*block, reinterpret_cast<uint64_t>(*host), 256, GPUSHARE_COPY_DEVICE_TO_DEVICE));
    REQUIRE_OK(stream->fill(reinterpret_cast<uint64_t>(*host), 1, 256));
    REQUIRE_OK(stream->copy(reinterpret_cast<uint64_t>(*host), *block, 1, GPUSHARE_COPY_DEVICE_TO_HOST));
    REQUIRE_OK(stream->synchronize());
  }
  CHECK(static_cast<unsigned char*>(*host)[0] == 9);
  CHECK(static_cast<unsigned char*>(*host)[255] == 1);
  REQUIRE_OK(device->free(*block));
  REQUIRE_OK(device->host_free(*host));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("released handles are reused, and give way when memory is short", "[cuda]") {
  auto device = open("pool_bytes=64MiB");
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const uint64_t free = device->refresh_info()->free_bytes;
  auto memory = device->phys_create(4 * granule);
  REQUIRE_OK(memory.status());
  const uint64_t created = standin_calls("cuMemCreate");
  REQUIRE_OK(device->phys_release(*memory));
  CHECK(device->refresh_info()->free_bytes == free);  // pooled is free
  memory = device->phys_create(4 * granule);
  CHECK(standin_calls("cuMemCreate") == created);
  REQUIRE_OK(device->phys_release(*memory));
  const uint64_t released = standin_calls("cuMemRelease");
  const auto all = device->alloc(free);
  REQUIRE_OK(all.status());
  CHECK(standin_calls("cuMemRelease") == released + 1);
  REQUIRE_OK(device->free(*all));
  // Above its limit the pool gives handles back at once.
  memory = device->phys_create(40 * granule);
  REQUIRE_OK(device->phys_release(*memory));
  CHECK(standin_calls("cuMemRelease") == released + 2);
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("the granularity can be raised, and a mapping is one driver call", "[cuda]") {
  auto device = open("granularity=8MiB");
  const uint64_t granule = device->info().mapping_granularity_bytes;
  CHECK(granule == 8u << 20);
  const auto range = device->va_reserve(4 * granule);
  const auto memory = device->phys_create(2 * granule);
  const uint64_t maps = standin_calls("cuMemMap");
  const uint64_t accesses = standin_calls("cuMemSetAccess");
  const uint64_t unmaps = standin_calls("cuMemUnmap");
  REQUIRE_OK(device->va_map(*range + granule, 2 * granule, *memory, 0));
  CHECK(standin_calls("cuMemMap") == maps + 1);
  CHECK(standin_calls("cuMemSetAccess") == accesses + 1);
  REQUIRE_OK(device->va_unmap(*range + granule, 2 * granule));
  CHECK(standin_calls("cuMemUnmap") == unmaps + 1);
  REQUIRE_OK(device->phys_release(*memory));
  REQUIRE_OK(device->va_free(*range, 4 * granule));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("waits block, spin or are called back by option", "[cuda]") {
  for (const char* options : {"wait=block", "wait=spin", "wait=callback"}) {
    INFO(options);
    auto device = open(options);
    int runs = 0;
    {
      const auto stream = device->create_stream();
      const uint64_t spins = standin_calls("cuStreamSynchronize");
      for (int i = 0; i < 50; ++i)
        REQUIRE_OK(stream->launch_host([](void* n) { ++*static_cast<int*>(n); }, &runs));
      REQUIRE_OK(stream->synchronize());
      CHECK(runs == 50);
      CHECK((standin_calls("cuStreamSynchronize") != spins) == (std::string(options) == "wait=spin"));
    }
    REQUIRE_OK(device->close());
  }
  check_clean();
}

TEST_CASE("waits by callback end with their event, not with what comes behind it, from many threads",
          "[cuda]") {
  auto device = open("wait=callback");
  const uint64_t sleeps = standin_calls("cuEventSynchronize");
  {
    const auto stream = device->create_stream();
    const auto event = device->create_event();
    Gate first, second;
    REQUIRE_OK(stream->launch_host(Gate::block, &first));
    REQUIRE_OK(stream->record(*event));
    REQUIRE_OK(stream->launch_host(Gate::block, &second));
    std::atomic<int> passed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] {
        if (event->synchronize().ok()) ++passed;
      });
    first.open();
    for (std::thread& thread : threads) thread.join();
    CHECK(passed == 4);
    CHECK(stream->query().code() == GPUSHARE_NOT_READY);
    second.open();
    REQUIRE_OK(stream->synchronize());
    REQUIRE_OK(event->synchronize());
  }
  CHECK(standin_calls("cuEventSynchronize") == sleeps);
  REQUIRE_OK(device->close());
  check_clean();
}

// The driver may keep a query waiting while another thread's free waits for the context, host functions included: a wait that
// queried under the lock that its host function takes would never end.
TEST_CASE("a wait by callback ends beside a free that waits for its host function", "[cuda]") {
  auto device = open("wait=callback");
  const auto block = device->alloc(4096);
  {
    const auto stream = device->create_stream();
    const auto event = device->create_event();
    Gate gate;
    REQUIRE_OK(stream->launch_host(Gate::block, &gate));
    REQUIRE_OK(stream->record(*event));
    const uint64_t frees = standin_calls("cuMemFree");
    const uint64_t functions = standin_calls("cuLaunchHostFunc");
    std::atomic<bool> waited{false}, freed{false};
    std::thread waiter([&] { waited = event->synchronize().ok(); });
    while (standin_calls("cuLaunchHostFunc") == functions) std::this_thread::yield();
    std::thread freer([&] { freed = device->free(*block).ok(); });
    while (standin_calls("cuMemFree") == frees) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the waiter comes to ask
    gate.open();
    waiter.join();
    freer.join();
    CHECK(waited);
    CHECK(freed);
    REQUIRE_OK(stream->synchronize());
  }
  REQUIRE_OK(device->close());
  check_clean();
}

namespace {

// Holds the thread that runs it, and says that it has come there.
struct Held {
  Gate gate;
  std::atomic<bool> inside{false};
  static void stay(void* held) {
    static_cast<Held*>(held)->inside = true;
    Gate::block(&static_cast<Held*>(held)->gate);
  }
  void await() const {
    while (!inside) std::this_thread::yield();
  }
};

// A kernel that holds its stream until the Held of its parameter is open.
void hold_stream(const standin_launch* launch) {
  Held::stay(*static_cast<void**>(launch->params[0]));
}

}  // namespace

// Host functions of all streams run one at a time here: those of two waits come long after the waits have ended, and their
// streams serve later waits.
TEST_CASE("streams of waits whose host functions came late are used again", "[cuda]") {
  auto device = open("wait=callback");
  CUcontext context = nullptr;
  REQUIRE(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
  REQUIRE(cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
  CUmodule module = nullptr;
  CUfunction kernel = nullptr;
  const size_t param_bytes = sizeof(void*);
  standin_register_kernel("hold", hold_stream, &param_bytes, 1, nullptr);
  REQUIRE(cuModuleLoadData(&module, "image") == CUDA_SUCCESS);
  REQUIRE(cuModuleGetFunction(&kernel, module, "hold") == CUDA_SUCCESS);
  {
    const auto busy = device->create_stream(), work = device->create_stream();
    const auto event = device->create_event();
    // Ends once the waits of so many threads for the event have begun and the kernel before it has ended.
    const auto wait_behind_kernel = [&](int waits) {
      Held held;
      void* argument = &held;
      void* params[] = {&argument};
      REQUIRE(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, static_cast<CUstream>(work->native()), params,
                             nullptr) == CUDA_SUCCESS);
      REQUIRE_OK(work->record(*event));
      const uint64_t functions = standin_calls("cuLaunchHostFunc");
      std::atomic<int> passed{0};
      std::vector<std::thread> threads;
      for (int i = 0; i < waits; ++i)
        threads.emplace_back([&] {
          if (event->synchronize().ok()) ++passed;
        });
      while (standin_calls("cuLaunchHostFunc") < functions + static_cast<uint64_t>(waits))
        std::this_thread::yield();
      held.gate.open();
      for (std::thread& thread : threads) thread.join();
      CHECK(passed == waits);
    };
    Held first;
    REQUIRE_OK(busy->launch_host(Held::stay, &first));
    first.await();
    const uint64_t streams = standin_calls("cuStreamCreateWithPriority");
    wait_behind_kernel(2);
    CHECK(standin_calls("cuStreamCreateWithPriority") == streams + 2);
    first.gate.open();
    REQUIRE_OK(busy->synchronize());
    // A wait that comes before a late function has a stream of its own, which serves later waits too.
    int rounds = 0;
    for (uint64_t before = 0; before != standin_calls("cuStreamCreateWithPriority"); ++rounds) {
      before = standin_calls("cuStreamCreateWithPriority");
      wait_behind_kernel(2);
    }
    CHECK(rounds < 100);
  }
  REQUIRE(cuModuleUnload(module) == CUDA_SUCCESS);
  REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
  REQUIRE(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("the native handle is the driver's stream", "[cuda]") {
  auto device = open();
  {
    const auto stream = device->create_stream(device->info().priority_highest);
    const auto native = static_cast<CUstream>(stream->native());
    CUcontext primary = nullptr;
    REQUIRE(cuDevicePrimaryCtxRetain(&primary, 0) == CUDA_SUCCESS);
    REQUIRE(cuCtxPushCurrent_v2(primary) == CUDA_SUCCESS);
    CHECK(cuStreamQuery(native) == CUDA_SUCCESS);
    REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
    REQUIRE(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    CHECK(device->create_stream(device->info().priority_highest - 1).status().code() ==
          GPUSHARE_INVALID_ARGUMENT);
  }
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("where the driver unmaps one handle a call, a run is unmapped one by one", "[cuda]") {
  auto device = open();
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const auto range = device->va_reserve(4 * granule);
  gpushare_backend_memory* memories[2];
  for (auto& memory : memories) memory = *device->phys_create(2 * granule);
  uint64_t done = 0;
  for (const bool in_parts : {false, true}) {
    if (in_parts) {  // memory of two handles from now on
      REQUIRE_OK(device->va_map(*range, granule, memories[1], granule));
      REQUIRE_OK(device->va_unmap(*range, granule));
    }
    REQUIRE_OK(device->va_map_run(*range, 2 * granule, memories, 2));
    const uint64_t calls = standin_calls("cuMemUnmap");
    standin_fail_call("cuMemUnmap", 1, CUDA_ERROR_INVALID_VALUE);
    REQUIRE_OK(device->va_unmap_run(*range, 2 * granule, 2, &done));
    CHECK(standin_calls("cuMemUnmap") == calls + (in_parts ? 4 : 3));
    // Really unmapped: the range takes a mapping again.
    REQUIRE_OK(device->va_map(*range, 2 * granule, memories[0], 0));
    REQUIRE_OK(device->va_unmap(*range, 2 * granule));
  }
  // A mapping of one handle has no parts: what the driver says is the answer.
  REQUIRE_OK(device->va_map(*range, 2 * granule, memories[0], 0));
  const uint64_t calls = standin_calls("cuMemUnmap");
  standin_fail_call("cuMemUnmap", 1, CUDA_ERROR_INVALID_VALUE);
  CHECK_FALSE(device->va_unmap(*range, 2 * granule).ok());
  CHECK(standin_calls("cuMemUnmap") == calls + 1);
  REQUIRE_OK(device->va_unmap(*range, 2 * granule));
  for (auto* memory : memories) REQUIRE_OK(device->phys_release(memory));
  REQUIRE_OK(device->va_free(*range, 4 * granule));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a wait asks for spin_us before it sleeps", "[cuda]") {
  for (const char* mode : {"block", "callback"}) {
    for (const bool spins : {true, false}) {
      INFO(mode << (spins ? ", asks" : ", sleeps"));
      auto device = open(std::string("wait=") + mode + (spins ? "&spin_us=60000000" : "&spin_us=0"));
      auto stream = device->create_stream();
      auto event = device->create_event();
      REQUIRE_OK(stream.status());
      REQUIRE_OK(event.status());
      for (const bool by_event : {true, false}) {
        Gate gate;
        REQUIRE_OK(stream->launch_host(&Gate::block, &gate));
        REQUIRE_OK(stream->record(*event));
        const bool sleeps = std::string(mode) == "block";
        const auto slept = [&] { return standin_calls(sleeps ? "cuEventSynchronize" : "cuStreamWaitEvent"); };
        const auto asked = [&] { return standin_calls(by_event ? "cuEventQuery" : "cuStreamQuery"); };
        const uint64_t slept_before = slept(), asked_before = asked();
        std::thread opens([&] {
          while (spins ? asked() < asked_before + 10 : slept() == slept_before) std::this_thread::yield();
          gate.open();
        });
        CHECK_OK(by_event ? event->synchronize() : stream->synchronize());
        opens.join();
        CHECK((slept() == slept_before) == spins);
      }
      *event = {};
      *stream = {};
      REQUIRE_OK(device->close());
    }
  }
  check_clean();
}

TEST_CASE("the stream that first shares a hardware queue is told of, once a device", "[cuda]") {
  const char* const before = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const std::string kept = before != nullptr ? before : "";
  for (const size_t queues : {8, 12}) {
    REQUIRE(setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(queues).c_str(), 1) == 0);
    std::vector<std::string> lines;
    gpushare::base::set_log_sink(
        [](void* data, int32_t, const char* line) {
          static_cast<std::vector<std::string>*>(data)->push_back(line);
        },
        &lines, gpushare::base::kWarning);
    auto device = open();
    std::vector<gpushare::device::Stream> streams;
    for (size_t i = 0; i < queues + 4; ++i) {
      CHECK(lines.size() == (i > queues ? 1 : 0));
      streams.push_back(std::move(*device->create_stream()));
    }
    CHECK(lines.size() == 1);
    CHECK(lines[0].find("CUDA_DEVICE_MAX_CONNECTIONS") != std::string::npos);
    streams.clear();
    REQUIRE_OK(device->close());
    gpushare::base::set_log_sink(nullptr, nullptr, gpushare::base::kWarning);
  }
  if (before != nullptr)
    REQUIRE(setenv("CUDA_DEVICE_MAX_CONNECTIONS", kept.c_str(), 1) == 0);
  else
    REQUIRE(unsetenv("CUDA_DEVICE_MAX_CONNECTIONS") == 0);
  check_clean();
}
