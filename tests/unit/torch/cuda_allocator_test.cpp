// PyTorch's calls of libgpushare_torch.so, in PyTorch's order, over the stand-in for the CUDA driver.
// SPDX-License-Identifier: Apache-2.0
#include "cuda_allocator.hpp"

#include <dlfcn.h>

#include <string>
#include <thread>

#include "support/catch.hpp"

namespace {

using Stream = gpushare_torch_stream;

void ok(int32_t status) {
  INFO(gpushare_last_error_message());
  REQUIRE(status == GPUSHARE_OK);
}

// The driver, as PyTorch uses it beside gpushare.
struct Driver {
  Driver() : library(dlopen(GPUSHARE_CUDA_STANDIN, RTLD_NOW)) {
    REQUIRE(library != nullptr);
    void* context = nullptr;
    REQUIRE(call<int(unsigned)>("cuInit")(0) == 0);
    REQUIRE(call<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0) == 0);
    REQUIRE(call<int(void*)>("cuCtxSetCurrent")(context) == 0);
  }
  ~Driver() {
    (void)call<int(void*)>("cuCtxSetCurrent")(nullptr);
    (void)call<int(int)>("cuDevicePrimaryCtxRelease_v2")(0);
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  template <class F>
  F* call(const char* name) const {
    void* found = dlsym(library, name);
    REQUIRE(found != nullptr);
    return reinterpret_cast<F*>(found);
  }
  Stream make_stream() const {
    Stream stream = nullptr;
    REQUIRE(call<int(Stream*, unsigned)>("cuStreamCreate")(&stream, 1) == 0);
    return stream;
  }
  void fill(void* pointer, size_t bytes, Stream stream) const {
    REQUIRE(call<int(unsigned long long, unsigned char, size_t, Stream)>("cuMemsetD8Async")(
                reinterpret_cast<uintptr_t>(pointer), 7, bytes, stream) == 0);
  }
  void drop(Stream stream) const {
    REQUIRE(call<int(Stream)>("cuStreamSynchronize")(stream) == 0);
    REQUIRE(call<int(Stream)>("cuStreamDestroy_v2")(stream) == 0);
  }
  void* library;
};

// The message of an allocation that must fail.
std::string failure(size_t bytes, int device, Stream stream) {
  try {
    (void)gpushare_torch_alloc(bytes, device, stream);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "it succeeded";
}

struct Attached {
  Attached() {
    gpushare_runtime_params opened = GPUSHARE_RUNTIME_PARAMS_INIT;
    const std::string device = std::string("cuda?driver=") + GPUSHARE_CUDA_STANDIN;
    opened.device = device.c_str();
    opened.capacity_bytes = 128u << 20;
    ok(gpushare_runtime_open(&opened, &runtime));
    gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
    ok(gpushare_allocator_create(runtime, &params, &allocator));
    (void)gpushare_torch_attach(0, allocator);
  }
  ~Attached() {
    (void)gpushare_torch_attach(0, nullptr);
    (void)gpushare_runtime_close(runtime);
    (void)gpushare_allocator_release(allocator);
  }
  Attached(const Attached&) = delete;
  Attached& operator=(const Attached&) = delete;
  gpushare_session open_session(const char* name) const {
    gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
    params.name = name;
    params.persistent_bytes = 8u << 20;
    params.ephemeral_bytes = 16u << 20;
    gpushare_session session = nullptr;
    ok(gpushare_session_open(runtime, &params, &session));
    return session;
  }
  gpushare_block_info block(void* pointer) const {
    gpushare_block_info info = GPUSHARE_BLOCK_INFO_INIT;
    ok(gpushare_memory_get_info(runtime, reinterpret_cast<uintptr_t>(pointer), &info));
    return info;
  }
  gpushare_runtime runtime = nullptr;
  gpushare_allocator allocator = nullptr;
};

// A training step's turn, with the stream that the step's work goes to.
struct Step {
  explicit Step(gpushare_session session) {
    gpushare_stream lane = nullptr;
    ok(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration));
    ok(gpushare_iteration_get_stream(iteration, &lane));
    ok(gpushare_stream_get_native(lane, &stream));
  }
  gpushare_iteration iteration = nullptr;
  Stream stream = nullptr;
};

}  // namespace

TEST_CASE("a model trains: forward here, backward on another thread, gradients that stay", "[torch]") {
  const Driver driver;
  const Attached attached;
  const gpushare_session session = attached.open_session("resnet");
  gpushare_torch_init(1);
  ok(gpushare_allocator_bind_thread(attached.allocator, session));
  CHECK(gpushare_torch_alloc(0, 0, nullptr) == nullptr);
  void* weights =
      gpushare_torch_alloc(1 << 20, 0, nullptr);  // on the legacy default stream, before the first step
  CHECK(reinterpret_cast<uintptr_t>(weights) % 512 == 0);
  CHECK(attached.block(weights).kind == GPUSHARE_KIND_MODEL);
  driver.fill(weights, 1 << 20, nullptr);
  REQUIRE(driver.call<int(Stream)>("cuStreamSynchronize")(nullptr) == 0);
  void* gradient = nullptr;
  for (int i = 0; i < 4; ++i) {
    const Step step(session);
    void* activation = gpushare_torch_alloc(2 << 20, 0, step.stream);
    CHECK(attached.block(activation).kind == GPUSHARE_KIND_EPHEMERAL);
    driver.fill(activation, 2 << 20, step.stream);
    void* made = nullptr;
    std::thread backward([&] {
      made = gpushare_torch_alloc(1 << 20, 0, step.stream);
      void* scratch = gpushare_torch_alloc(1 << 20, 0, step.stream);
      gpushare_torch_free(activation, 2 << 20, 0, step.stream);
      gpushare_torch_free(scratch, 1 << 20, 0, step.stream);
    });
    backward.join();
    CHECK(attached.block(made).session_id == attached.block(weights).session_id);
    CHECK(attached.block(made).kind ==
          (i < 2 ? GPUSHARE_KIND_EPHEMERAL : GPUSHARE_KIND_FRAMEWORK));  // learned
    driver.fill(made, 1 << 20, step.stream);
    gpushare_torch_free(gradient, 1 << 20, 0, step.stream);  // null at first
    gradient = made;
    ok(gpushare_allocator_end_iteration(attached.allocator, step.iteration));
    gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
    ok(gpushare_session_get_info(session, &info));
    CHECK(info.ephemeral_bytes == 0);
    CHECK(info.persistent_bytes == 2u << 20);
  }
  size_t bytes = 0;
  CHECK(gpushare_torch_get_base_address(weights, &bytes) == weights);
  CHECK(bytes == 1u << 20);
  gpushare_torch_memory_fraction(0.1, 0);
  CHECK(failure(64 << 20, 0, nullptr).find("memory fraction") != std::string::npos);
  gpushare_torch_memory_fraction(1.0, 0);
  gpushare_torch_reset();
  gpushare_torch_free(gradient, 1 << 20, 0, nullptr);
  // The session is given up while a tensor of it lives; its last free closes it, frees after that are ignored.
  ok(gpushare_allocator_close_session(attached.allocator, session));
  gpushare_torch_free(weights, 1 << 20, 0, nullptr);
  gpushare_torch_free(weights, 1 << 20, 0, nullptr);
  gpushare_runtime_info left = GPUSHARE_RUNTIME_INFO_INIT;
  ok(gpushare_runtime_get_info(attached.runtime, &left));
  CHECK(left.sessions_resident == 0);
  CHECK(left.persistent_bytes == 0);
  ok(gpushare_allocator_bind_thread(attached.allocator, nullptr));
}

TEST_CASE("side streams, record_stream, the pool of a captured graph", "[torch]") {
  const Driver driver;
  const Attached attached;
  const gpushare_session session = attached.open_session("graph");
  ok(gpushare_allocator_set_default_session(attached.allocator, session));
  const Stream side = driver.make_stream();
  const Step step(session);
  void* loaded = gpushare_torch_alloc(1 << 20, 0, side);  // a prefetched batch, used by the step
  driver.fill(loaded, 1 << 20, side);
  gpushare_torch_record_stream(loaded, step.stream);
  gpushare_torch_free(loaded, 1 << 20, 0, side);
  void* next = gpushare_torch_alloc(1 << 20, 0, step.stream);
  driver.fill(next, 1 << 20, step.stream);
  gpushare_torch_free(next, 1 << 20, 0, step.stream);

  // torch.cuda.graph: a pool for what its stream allocates, then the capture.
  const gpushare_torch_pool_id pool{0, 1};
  void *graph = nullptr, *kept = nullptr;
  gpushare_torch_begin_allocate_to_pool(0, pool, [side](Stream stream) { return stream == side; });
  REQUIRE(driver.call<int(Stream, int)>("cuStreamBeginCapture_v2")(side, 0) == 0);
  void* temporary = gpushare_torch_alloc(1 << 20, 0, side);
  driver.fill(temporary, 1 << 20, side);
  gpushare_torch_free(temporary, 1 << 20, 0, side);
  kept = gpushare_torch_alloc(1 << 20, 0, side);
  CHECK(kept == temporary);  // of the pool, in the order of its stream
  REQUIRE(driver.call<int(Stream, void**)>("cuStreamEndCapture")(side, &graph) == 0);
  gpushare_torch_end_allocate_to_pool(0, pool);
  void* ordinary = gpushare_torch_alloc(1 << 20, 0, side);
  size_t bytes = 0;
  CHECK(gpushare_torch_get_base_address(kept, &bytes) != kept);
  CHECK(bytes == 2u << 20);
  CHECK(gpushare_torch_get_base_address(ordinary, &bytes) == ordinary);
  gpushare_torch_free(ordinary, 1 << 20, 0, side);
  REQUIRE(driver.call<int(void*)>("cuGraphDestroy")(graph) == 0);
  gpushare_torch_free(kept, 1 << 20, 0, side);
  gpushare_torch_release_pool(0, pool);
  gpushare_torch_release_pool(0, pool);  // once too often: ignored
  ok(gpushare_allocator_end_iteration(attached.allocator, step.iteration));
  gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
  ok(gpushare_session_get_info(session, &info));
  CHECK(info.persistent_bytes + info.ephemeral_bytes == 0);
  ok(gpushare_allocator_forget_stream(attached.allocator, side));
  driver.drop(side);
}

TEST_CASE("allocations that cannot be are exceptions, frees after the end are ignored", "[torch]") {
  void* left = nullptr;
  {
    const Attached attached;
    CHECK(failure(1, 0, nullptr).find("default session") != std::string::npos);
    ok(gpushare_allocator_set_default_session(attached.allocator, attached.open_session("one")));
    CHECK_THROWS_AS(gpushare_torch_alloc(size_t{1} << 40, 0, nullptr), std::bad_alloc);
    left = gpushare_torch_alloc(100, 0, nullptr);
  }
  gpushare_torch_free(left, 100, 0, nullptr);
  CHECK(gpushare_torch_get_base_address(left, nullptr) == left);
  CHECK(failure(1, 0, nullptr).find("no session of the device was opened, or all were closed") !=
        std::string::npos);
  CHECK_THROWS_AS(gpushare_torch_alloc(1, 64, nullptr), std::runtime_error);
  CHECK_THROWS_AS(gpushare_torch_alloc(1, -1, nullptr), std::runtime_error);
  gpushare_torch_free(left, 100, -1, nullptr);
  CHECK(gpushare_torch_attach(64, nullptr) == nullptr);
}
