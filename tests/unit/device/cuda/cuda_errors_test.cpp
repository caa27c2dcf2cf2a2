// Every way in which the driver fails, and what the backend makes of it.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "cuda_support.hpp"

using namespace cuda_test;     // NOLINT(google-build-using-namespace)
using namespace standin_test;  // NOLINT(google-build-using-namespace)

namespace {

// Collects error lines while it lives.
struct LogCapture {
  std::vector<std::string> lines;
  LogCapture() {
    gpushare::base::set_log_sink(
        [](void* self, int32_t, const char* message) {
          static_cast<LogCapture*>(self)->lines.emplace_back(message);
        },
        this, gpushare::base::kError);
  }
  ~LogCapture() { gpushare::base::set_log_sink(nullptr, nullptr, gpushare::base::kWarning); }
};

}  // namespace

TEST_CASE("out of memory of the driver is the device's, with the numbers", "[cuda]") {
  auto device = open();
  const uint64_t free_at_open = device->refresh_info()->free_bytes;
  standin_fail_call("cuMemAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY);
  const auto refused = device->alloc(4096);
  CHECK(refused.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(refused.status().native_code() == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(mentions(refused.status(), "4.00 KiB"));
  CHECK(device->refresh_info()->free_bytes == free_at_open);

  // Virtual memory, with nothing left behind.
  const uint64_t granule = device->info().mapping_granularity_bytes;
  standin_fail_call("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(device->phys_create(4 * granule).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  CHECK(device->refresh_info()->free_bytes == free_at_open);

  // Pinned memory is the host's.
  standin_fail_call("cuMemHostAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(device->host_alloc(4096).status().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a driver that has shut down with the process is no fault to be logged", "[cuda]") {
  auto device = open();
  const auto block = device->alloc(4096);
  CUcontext primary = nullptr;
  REQUIRE(cuDevicePrimaryCtxRetain(&primary, 0) == CUDA_SUCCESS);
  {
    LogCapture log;
    standin_fail_call("cuCtxGetCurrent", 1, CUDA_ERROR_DEINITIALIZED);
    const auto refused = device->alloc(4096).status();
    CHECK(refused.code() == GPUSHARE_DEVICE_LOST);
    CHECK(mentions(refused, "the process ends"));
    REQUIRE_OK(device->free(*block));
    REQUIRE_OK(device->close());
    CHECK(log.lines.empty());
  }
  // The test frees the block that the closed device could not give back.
  REQUIRE(cuCtxPushCurrent_v2(primary) == CUDA_SUCCESS);
  CHECK(cuMemFree_v2(*block) == CUDA_SUCCESS);
  REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
  REQUIRE(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
  check_clean();
}

TEST_CASE("a mapping that fails half-way is taken back", "[cuda]") {
  auto device = open();
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const auto range = device->va_reserve(4 * granule);
  const auto memory = device->phys_create(4 * granule);
  REQUIRE_OK(device->va_map(*range, granule, *memory, granule));  // so that it has four handles
  REQUIRE_OK(device->va_unmap(*range, granule));
  for (const uint64_t at : {1, 2, 4}) {
    standin_fail_call("cuMemMap", at, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(device->va_map(*range, 4 * granule, *memory, 0).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  }
  standin_fail_call("cuMemSetAccess", 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(device->va_map(*range, 4 * granule, *memory, 0).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  REQUIRE_OK(device->va_map(*range, 4 * granule, *memory, 0));
  REQUIRE_OK(device->va_unmap(*range, 4 * granule));
  REQUIRE_OK(device->phys_release(*memory));
  REQUIRE_OK(device->va_free(*range, 4 * granule));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("memory is split when a part of it is mapped, and is as it was when that fails", "[cuda]") {
  auto device = open("pool_bytes=0");
  const uint64_t free_at_open = device->refresh_info()->free_bytes;
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const auto range = device->va_reserve(4 * granule);
  // With bytes in it: these stay.
  const auto memory = device->phys_create(4 * granule);
  std::vector<uint8_t> written(4 * granule), read(granule);
  for (size_t i = 0; i < written.size(); ++i) written[i] = static_cast<uint8_t>(i / granule + 1);
  {
    const auto stream = device->create_stream();
    const auto at = [](const void* data) { return reinterpret_cast<uintptr_t>(data); };
    REQUIRE_OK(device->va_map(*range, 4 * granule, *memory, 0));
    REQUIRE_OK(stream->copy(*range, at(written.data()), written.size(), GPUSHARE_COPY_HOST_TO_DEVICE));
    REQUIRE_OK(stream->synchronize());
    const auto aside = device->va_reserve(granule);
    CHECK(device->va_map(*aside, granule, *memory, 0).code() == GPUSHARE_UNSUPPORTED);  // mapped as a whole
    REQUIRE_OK(device->va_free(*aside, granule));
    REQUIRE_OK(device->va_unmap(*range, 4 * granule));
    const uint64_t free = device->refresh_info()->free_bytes;
    for (const char* call :
         {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemcpyDtoDAsync"}) {
      INFO(call);
      standin_fail_call(call, 1, CUDA_ERROR_OUT_OF_MEMORY);
      CHECK(device->va_map(*range, granule, *memory, 2 * granule).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
      CHECK(device->refresh_info()->free_bytes == free);
    }
    REQUIRE_OK(device->va_map(*range, granule, *memory, 2 * granule));
    REQUIRE_OK(stream->copy(at(read.data()), *range, granule, GPUSHARE_COPY_DEVICE_TO_HOST));
    REQUIRE_OK(stream->synchronize());
    CHECK(read == std::vector<uint8_t>(granule, 3));
    CHECK(device->refresh_info()->free_bytes == free);
  }
  REQUIRE_OK(device->va_unmap(*range, granule));
  REQUIRE_OK(device->phys_release(*memory));
  // Without: it is not there twice. Where it cannot be had again, the next mapping of a part or of all of it tries anew.
  for (const uint64_t bytes : {granule, 4 * granule}) {
    const auto fresh = device->phys_create(4 * granule);
    standin_fail_call("cuMemCreate", 3, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(device->va_map(*range, granule, *fresh, 0).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    standin_fail_call("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(device->va_map(*range, bytes, *fresh, 0).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
    REQUIRE_OK(device->va_map(*range, bytes, *fresh, 0));
    REQUIRE_OK(device->va_unmap(*range, bytes));
    REQUIRE_OK(device->phys_release(*fresh));
  }
  const auto released = device->phys_create(4 * granule);  // while it is nowhere
  standin_fail_call("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(device->va_map(*range, granule, *released, 0).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  REQUIRE_OK(device->phys_release(*released));
  // Memory of the host: it is the host that has too little.
  const auto on_host = device->phys_create_host(4 * granule);
  standin_fail_call("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(device->va_map(*range, granule, *on_host, 0).code() == GPUSHARE_HOST_OUT_OF_MEMORY);
  REQUIRE_OK(device->va_map(*range, granule, *on_host, granule));
  REQUIRE_OK(device->va_unmap(*range, granule));
  REQUIRE_OK(device->phys_release(*on_host));
  REQUIRE_OK(device->va_free(*range, 4 * granule));
  CHECK(device->refresh_info()->free_bytes == free_at_open);
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("pooled handles serve a split, and give way to it", "[cuda]") {
  auto device = open("pool_bytes=64MiB");
  const uint64_t free_at_open = device->refresh_info()->free_bytes;
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const auto range = device->va_reserve(4 * granule);
  const auto split = device->phys_create(4 * granule);
  for (const uint64_t bytes : {granule, 2 * granule}) {
    const auto pooled = device->phys_create(bytes);
    REQUIRE_OK(pooled.status());
    REQUIRE_OK(device->phys_release(*pooled));
  }
  const uint64_t made = standin_calls("cuMemCreate");
  standin_fail_call("cuMemCreate", 2, CUDA_ERROR_OUT_OF_MEMORY);
  REQUIRE_OK(device->va_map(*range, granule, *split, 0));
  CHECK(standin_calls("cuMemCreate") == made + 4);  // one came from the pool, one was asked for twice
  REQUIRE_OK(device->va_unmap(*range, granule));
  REQUIRE_OK(device->phys_release(*split));
  REQUIRE_OK(device->va_free(*range, 4 * granule));
  CHECK(device->refresh_info()->free_bytes == free_at_open);
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a run that fails half-way is taken back, and one that is unmapped in part says how much",
          "[cuda]") {
  auto device = open();
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const auto range = device->va_reserve(4 * granule);
  std::vector<gpushare_backend_memory*> memories;
  for (int i = 0; i < 4; ++i) memories.push_back(*device->phys_create(granule));
  for (const uint64_t at : {1, 2, 4}) {
    standin_fail_call("cuMemMap", at, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(device->va_map_run(*range, granule, memories.data(), 4).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  }
  standin_fail_call("cuMemSetAccess", 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(device->va_map_run(*range, granule, memories.data(), 4).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  const uint64_t accesses = standin_calls("cuMemSetAccess"), unmaps = standin_calls("cuMemUnmap");
  REQUIRE_OK(device->va_map_run(*range, granule, memories.data(), 4));
  CHECK(standin_calls("cuMemSetAccess") == accesses + 1);
  uint64_t done = 9;
  standin_fail_call("cuMemUnmap", 1, CUDA_ERROR_NOT_PERMITTED);
  CHECK_FALSE(device->va_unmap_run(*range, granule, 4, &done).ok());
  CHECK(done == 0);
  CHECK(standin_calls("cuMemUnmap") == unmaps + 1);
  REQUIRE_OK(device->va_unmap_run(*range, granule, 2, &done));
  CHECK(done == 2);
  CHECK(standin_calls("cuMemUnmap") == unmaps + 2);
  REQUIRE_OK(device->va_unmap_run(*range + 2 * granule, granule, 2, &done));
  const auto shared = device->phys_create_shared(granule);
  REQUIRE_OK(shared.status());
  gpushare_backend_memory* const mixed[] = {memories[0], *shared};
  CHECK(device->va_map_run(*range, granule, mixed, 2).code() == GPUSHARE_INVALID_ARGUMENT);
  REQUIRE_OK(device->phys_release(*shared));
  for (gpushare_backend_memory* memory : memories) REQUIRE_OK(device->phys_release(memory));
  REQUIRE_OK(device->va_free(*range, 4 * granule));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("memory released while it is being mapped in vain goes when the attempt ends", "[cuda]") {
  auto device = open("pool_bytes=0");
  const uint64_t free_at_open = device->refresh_info()->free_bytes;
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const auto range = device->va_reserve(granule);
  const auto memory = device->phys_create(granule);
  standin_fail_call("cuMemSetAccess", 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_FALSE(device->va_map(*range, granule, *memory, 0).ok());
  REQUIRE_OK(device->phys_release(*memory));
  CHECK(device->refresh_info()->free_bytes == free_at_open);
  REQUIRE_OK(device->va_free(*range, granule));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("native errors keep their name and code", "[cuda]") {
  auto device = open();
  struct Case {
    CUresult result;
    int32_t status;
    const char* name;
  };
  for (const Case& c :
       {Case{1, GPUSHARE_INVALID_ARGUMENT, "CUDA_ERROR_INVALID_VALUE"},
        Case{801, GPUSHARE_UNSUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
        Case{304, GPUSHARE_IO_ERROR, "CUDA_ERROR_OPERATING_SYSTEM"}, Case{304, GPUSHARE_IO_ERROR, "(304)"},
        Case{999, GPUSHARE_UNKNOWN, "CUDA_ERROR_UNKNOWN"}, Case{4242, GPUSHARE_UNKNOWN, "(4242)"}}) {
    standin_fail_call("cuStreamCreateWithPriority", 1, c.result);
    const auto stream = device->create_stream();
    CHECK(stream.status().code() == c.status);
    CHECK(stream.status().native_code() == c.result);
    CHECK(mentions(stream.status(), c.name));
    CHECK(mentions(stream.status(), "cuStreamCreateWithPriority"));
  }
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a launch that fails leaves the stream usable", "[cuda]") {
  auto device = open();
  int runs = 0;
  const auto count = [](void* n) { ++*static_cast<int*>(n); };
  {
    const auto stream = device->create_stream();
    standin_fail_call("cuLaunchHostFunc", 1, CUDA_ERROR_INVALID_VALUE);
    CHECK(stream->launch_host(count, &runs).code() == GPUSHARE_INVALID_ARGUMENT);
    REQUIRE_OK(stream->launch_host(count, &runs));
    REQUIRE_OK(stream->synchronize());
  }
  CHECK(runs == 1);
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a sticky error is DEVICE_LOST with its cause, logged once, and the process closes cleanly",
          "[cuda]") {
  auto device = open();
  LogCapture log;
  const uint64_t granule = device->info().mapping_granularity_bytes;
  const auto block = device->alloc(4096);
  const auto pinned = device->host_alloc(4096);
  const auto range = device->va_reserve(granule);
  const auto memory = device->phys_create(granule);
  REQUIRE_OK(device->va_map(*range, granule, *memory, 0));
  auto stream = device->create_stream();
  auto other = device->create_stream();
  auto event = device->create_event(GPUSHARE_EVENT_TIMING);
  REQUIRE_OK(other->record(*event));

  standin_fail_work("cuMemsetD8Async", 1, CUDA_ERROR_ILLEGAL_ADDRESS);
  REQUIRE_OK(stream->fill(*block, 1, 4096));
  const Status found = stream->synchronize();
  CHECK(found.code() == GPUSHARE_DEVICE_LOST);
  CHECK(found.native_code() == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(mentions(found, "CUDA_ERROR_ILLEGAL_ADDRESS"));
  CHECK(mentions(found, "cuda:0"));

  // From now on every op that asks something of the device says the same, and calls no driver.
  const uint64_t calls = standin_calls("cuCtxGetCurrent");
  for (const Status& later :
       {stream->query(), other->synchronize(), event->query(), event->synchronize(),
        other->launch_host([](void*) {}, nullptr), device->alloc(64).status(),
        device->host_alloc(64).status(), device->create_stream().status(), device->create_event().status(),
        device->va_reserve(granule).status(), device->phys_create(granule).status(), other->record(*event),
        other->wait(*event), other->fill(*block, 0, 1), device->partition_info().status()}) {
    CHECK(later.code() == GPUSHARE_DEVICE_LOST);
    CHECK(later.message().find("CUDA_ERROR_ILLEGAL_ADDRESS") != std::string::npos);
  }
  CHECK(standin_calls("cuCtxGetCurrent") == calls);
  CHECK(device->refresh_info().ok());
  // The releases succeed without a message.
  REQUIRE_OK(device->va_unmap(*range, granule));
  REQUIRE_OK(device->phys_release(*memory));
  REQUIRE_OK(device->va_free(*range, granule));
  REQUIRE_OK(device->free(*block));
  REQUIRE_OK(device->host_free(*pinned));
  { auto gone = std::move(*stream); }
  { auto gone = std::move(*other); }
  { auto gone = std::move(*event); }
  REQUIRE_OK(device->close());
  CHECK(log.lines.size() == 1);
  // The primary context was released: the next user of the device gets a new one.
  auto fresh = open();
  REQUIRE_OK(fresh->free(*fresh->alloc(64)));
  REQUIRE_OK(fresh->close());
}

TEST_CASE("losing the device in any op is noticed there", "[cuda]") {
  for (const char* call :
       {"cuMemAlloc", "cuStreamCreateWithPriority", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent",
        "cuMemcpyHtoDAsync", "cuLaunchHostFunc", "cuMemGetInfo", "cuMemCreate"}) {
    INFO(call);
    auto device = open("wait=spin");
    LogCapture log;
    const auto block = device->alloc(64);
    {
      const auto stream = device->create_stream();
      const auto recorded = device->create_event();
      REQUIRE_OK(stream->record(*recorded));
      REQUIRE_OK(stream->synchronize());
      standin_fail_call(call, 1, CUDA_ERROR_LAUNCH_FAILED);
      char byte = 0;
      (void)device->alloc(64);
      (void)device->create_stream();
      (void)device->create_event(GPUSHARE_EVENT_TIMING);
      (void)stream->record(*recorded);
      (void)stream->wait(*recorded);
      (void)stream->copy(*block, reinterpret_cast<uint64_t>(&byte), 1, GPUSHARE_COPY_HOST_TO_DEVICE);
      (void)stream->launch_host([](void*) {}, nullptr);
      (void)device->refresh_info();
      (void)device->phys_create(device->info().mapping_granularity_bytes);
      CHECK(stream->query().code() == GPUSHARE_DEVICE_LOST);
      CHECK(log.lines.size() == 1);
      CHECK(log.lines.at(0).find(call) != std::string::npos);
      // The driver itself is fine; let it agree that the context is gone.
      standin_poison(0, CUDA_ERROR_LAUNCH_FAILED);
    }
    (void)device->close();
  }
  standin_clear_faults();
}

TEST_CASE("a wait by callback ends when the context is lost under it", "[cuda]") {
  auto device = open("wait=callback");
  LogCapture log;
  {
    const auto stream = device->create_stream();
    const auto event = device->create_event();
    Gate gate;
    REQUIRE_OK(stream->launch_host(Gate::block, &gate));
    REQUIRE_OK(stream->record(*event));
    int32_t told = GPUSHARE_OK;
    std::thread waits([&] { told = event->synchronize().code(); });
    standin_poison(0, CUDA_ERROR_LAUNCH_FAILED);
    gate.open();
    waits.join();
    CHECK(told == GPUSHARE_DEVICE_LOST);
  }
  (void)device->close();
  standin_clear_faults();
}

TEST_CASE("a wait whose driver calls are refused still waits", "[cuda]") {
  const char* mode = GENERATE("wait=block", "wait=callback", "wait=spin");
  const char* call =
      GENERATE("cuStreamQuery", "cuEventQuery", "cuEventCreate", "cuEventRecord", "cuEventSynchronize",
               "cuStreamCreateWithPriority", "cuStreamWaitEvent", "cuLaunchHostFunc");
  INFO(mode << ", " << call);
  const auto hold = [](void* done) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    *static_cast<std::atomic<bool>*>(done) = true;
  };
  auto device = open(mode);
  {
    const auto stream = device->create_stream();
    const auto event = device->create_event();
    std::atomic<bool> done{false};
    REQUIRE_OK(stream->launch_host(hold, &done));
    standin_fail_call(call, 1, CUDA_ERROR_OUT_OF_MEMORY);
    REQUIRE_OK(stream->synchronize());
    CHECK(done);
    standin_clear_faults();

    done = false;
    REQUIRE_OK(stream->launch_host(hold, &done));
    REQUIRE_OK(stream->record(*event));
    if (std::string_view(call) != "cuEventSynchronize") standin_fail_call(call, 1, CUDA_ERROR_OUT_OF_MEMORY);
    REQUIRE_OK(event->synchronize());
    CHECK(done);
    standin_clear_faults();
  }
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("a host function that throws fails its stream alone", "[cuda]") {
  auto device = open();
  int runs = 0;
  const auto count = [](void* n) { ++*static_cast<int*>(n); };
  {
    const auto stream = device->create_stream();
    const auto other = device->create_stream();
    const auto before = device->create_event();
    const auto after = device->create_event();
    // Held back so that all of this is enqueued before the function throws.
    Gate gate;
    REQUIRE_OK(stream->launch_host(Gate::block, &gate));
    REQUIRE_OK(stream->record(*before));
    REQUIRE_OK(stream->launch_host([](void*) { throw std::runtime_error("planted"); }, nullptr));
    REQUIRE_OK(stream->launch_host(count, &runs));
    REQUIRE_OK(stream->record(*after));
    gate.open();
    const Status failed = stream->synchronize();
    CHECK(failed.code() == GPUSHARE_CALLBACK_FAILED);
    CHECK(mentions(failed, "planted"));
    CHECK(runs == 0);
    CHECK(stream->launch_host(count, &runs).code() == GPUSHARE_CALLBACK_FAILED);
    CHECK(before->synchronize().ok());
    CHECK(after->synchronize().code() == GPUSHARE_CALLBACK_FAILED);
    REQUIRE_OK(other->launch_host(count, &runs));
    REQUIRE_OK(other->synchronize());
    CHECK(runs == 1);
  }
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("ops inside a host function are refused before the driver sees them", "[cuda]") {
  auto device = open();
  struct Data {
    Device* device;
    std::vector<int32_t> codes;
  } data{device.get(), {}};
  {
    const auto stream = device->create_stream();
    REQUIRE_OK(stream->launch_host(
        [](void* d) {
          Data& self = *static_cast<Data*>(d);
          self.codes.push_back(self.device->alloc(64).status().code());
          self.codes.push_back(self.device->create_stream().status().code());
          self.codes.push_back(self.device->create_event().status().code());
          self.codes.push_back(self.device->refresh_info().status().code());
        },
        &data));
    REQUIRE_OK(stream->synchronize());
  }
  CHECK(data.codes == std::vector<int32_t>(4, GPUSHARE_INVALID_STATE));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("memory of other users of the context can be copied and filled, memory of nobody cannot",
          "[cuda]") {
  auto device = open();
  CUcontext context = nullptr;
  REQUIRE(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
  REQUIRE(cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
  CUdeviceptr theirs = 0;
  void* pinned = nullptr;
  REQUIRE(cuMemAlloc_v2(&theirs, 4096) == CUDA_SUCCESS);
  REQUIRE(cuMemHostAlloc(&pinned, 4096, 0) == CUDA_SUCCESS);
  const auto ours = device->alloc(4096);
  {
    const auto stream = device->create_stream();
    REQUIRE_OK(stream->fill(theirs, 9, 4096));
    REQUIRE_OK(stream->copy(*ours, theirs, 4096, GPUSHARE_COPY_DEVICE_TO_DEVICE));
    // Host memory that the device can address, as blocks that were spilled there.
    REQUIRE_OK(stream->copy(reinterpret_cast<uint64_t>(pinned), *ours, 4096, GPUSHARE_COPY_DEVICE_TO_DEVICE));
    REQUIRE_OK(stream->synchronize());
    CHECK(static_cast<unsigned char*>(pinned)[4095] == 9);
    int nobody = 0;
    const Status refused = stream->fill(reinterpret_cast<uint64_t>(&nobody), 0, 4);
    CHECK(refused.code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(mentions(refused, "no memory that the driver knows"));
    const Status past = stream->fill(*ours + 4000, 0, 200);
    CHECK(past.code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(mentions(past, "passes the end of its allocation"));
  }
  CHECK(cuMemFree_v2(theirs) == CUDA_SUCCESS);
  CHECK(cuMemFreeHost(pinned) == CUDA_SUCCESS);
  REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
  REQUIRE(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
  REQUIRE_OK(device->free(*ours));
  REQUIRE_OK(device->close());
  check_clean();
}

TEST_CASE("sharing memory fails cleanly: no room, no descriptors, no parts, no support", "[cuda]") {
  auto device = open("total_bytes=64MiB&pool_bytes=64MiB");
  const uint64_t granule = device->info().mapping_granularity_bytes;
  REQUIRE(device->can(GPUSHARE_DEVICE_CAP_IPC));
  // Pooled granules give way to it.
  const auto pooled = device->phys_create(32 * granule);
  REQUIRE_OK(pooled.status());
  REQUIRE_OK(device->phys_release(*pooled));
  const auto shared = device->phys_create_shared(32 * granule);
  REQUIRE_OK(shared.status());
  CHECK(device->phys_create(granule).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  standin_fail_call("cuMemExportToShareableHandle", 1, CUDA_ERROR_NOT_SUPPORTED);
  CHECK(device->phys_export(*shared, GPUSHARE_ACCESS_READ).status().code() == GPUSHARE_IO_ERROR);
  const auto range = device->va_reserve(32 * granule);
  REQUIRE_OK(range.status());
  for (const uint64_t from : {uint64_t{0}, granule}) {
    const Status part = device->va_map(*range, granule, *shared, from);
    CHECK(part.code() == GPUSHARE_UNSUPPORTED);
    CHECK(mentions(part, "as a whole"));
  }
  standin_fail_call("cuMemMap", 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(device->va_map(*range, 32 * granule, *shared, 0).code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  REQUIRE_OK(device->va_map(*range, 32 * granule, *shared, 0));
  REQUIRE_OK(device->va_unmap(*range, 32 * granule));
  REQUIRE_OK(device->va_free(*range, 32 * granule));
  REQUIRE_OK(device->phys_release(*shared));
  standin_fail_call("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(device->phys_create_shared(granule).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  REQUIRE_OK(device->phys_release(*device->phys_create_shared(32 * granule)));
  REQUIRE_OK(device->close());
  check_clean();
  auto old = Device::open("cuda:0?driver=" GPUSHARE_CUDA_STANDIN_OLD);
  REQUIRE_OK(old.status());
  CHECK_FALSE((*old)->can(GPUSHARE_DEVICE_CAP_IPC));
  CHECK((*old)->phys_create_shared(1 << 21).status().code() == GPUSHARE_UNSUPPORTED);
  REQUIRE_OK((*old)->close());
}

TEST_CASE("the toolkit's stub of libcuda is named for what it is", "[cuda]") {
  const Status refused = Device::open("cuda:0?driver=" GPUSHARE_CUDA_TOOLKIT_STUB).status();
  CHECK(refused.code() == GPUSHARE_UNAVAILABLE);
  CHECK(mentions(refused, GPUSHARE_CUDA_TOOLKIT_STUB " is the CUDA toolkit's stub"));
  CHECK(mentions(refused, "LD_LIBRARY_PATH"));
  CHECK_FALSE(mentions(refused, "lacks"));
}

TEST_CASE("host memory behind device addresses is there where the driver really gives it", "[cuda]") {
  const auto configure = [](const char* key, int64_t value) {
    REQUIRE(standin_configure(key, static_cast<uint64_t>(value)) == 0);
  };
  struct Machine {
    const char* key;
    int64_t value, usual;
    bool can;
  };
  const Machine machines[] = {
      {"host_numa_id", -1, 0, true},           // no nodes: that of node 0
      {"host_numa_id", 1, 0, true},            //
      {"host_numa_memory", 0, 1, false},       // attribute 141
      {"driver_version", 12020, 13000, true},  // has the memory, but not attribute 141
      {"driver_version", 12010, 13000, false},
      {"host_create_fails", CUDA_ERROR_NOT_SUPPORTED, 0, false},
      {"host_create_fails", CUDA_ERROR_OUT_OF_MEMORY, 0, false}};
  for (const Machine& machine : machines) {
    INFO(machine.key << " = " << machine.value);
    configure(machine.key, machine.value);
    auto device = open();
    CHECK(device->can(GPUSHARE_DEVICE_CAP_HOST_PHYSICAL) == machine.can);
    const uint64_t granule = device->info().mapping_granularity_bytes;
    const auto memory = device->phys_create_host(granule);
    CHECK(memory.status().code() == (machine.can ? GPUSHARE_OK : GPUSHARE_UNSUPPORTED));
    if (memory.ok()) REQUIRE_OK(device->phys_release(*memory));
    REQUIRE_OK(device->close());
    configure(machine.key, machine.usual);
  }
  // It fails later.
  auto device = open();
  const uint64_t granule = device->info().mapping_granularity_bytes;
  configure("host_create_fails", CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(device->phys_create_host(granule).status().code() == GPUSHARE_HOST_OUT_OF_MEMORY);
  configure("host_create_fails", CUDA_ERROR_INVALID_DEVICE);
  CHECK(device->phys_create_host(granule).status().code() == GPUSHARE_UNSUPPORTED);
  configure("host_create_fails", 0);
  REQUIRE_OK(device->phys_release(*device->phys_create_host(granule)));
  REQUIRE_OK(device->close());
  check_clean();
}
