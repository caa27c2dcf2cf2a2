// bindings/ggml/buffer_type.hpp, used as ggml uses a buffer type. The functions of ggml that it calls are stand-ins.
// SPDX-License-Identifier: Apache-2.0
#include "ggml/buffer_type.hpp"

#include <cstring>
#include <gpushare/allocator.hpp>
#include <gpushare/gpushare.hpp>
#include <string>

#include "support/catch.hpp"

ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type() {
  static ggml_backend_buffer_type type = {
      {[](ggml_backend_buffer_type_t) { return "CPU"; },
       [](ggml_backend_buffer_type_t, size_t) -> ggml_backend_buffer_t { return nullptr; },
       [](ggml_backend_buffer_type_t) { return size_t{32}; },
       [](ggml_backend_buffer_type_t) { return true; }},
      nullptr};
  return &type;
}
ggml_backend_buffer_t ggml_backend_cpu_buffer_from_ptr(void* memory, size_t bytes) {
  return new ggml_backend_buffer{{nullptr}, ggml_backend_cpu_buffer_type(), memory, bytes};
}
void ggml_backend_buffer_free(ggml_backend_buffer_t buffer) {
  if (buffer->iface.free_buffer != nullptr) buffer->iface.free_buffer(buffer);
  delete buffer;
}

namespace {

struct GgmlFixture {
  gpushare::Runtime runtime = gpushare::Runtime::open({"host"});
  gpushare::Session session = [this] {
    gpushare::SessionOptions limits;
    limits.name = "llm";
    limits.quota_bytes = 8 << 20;
    return runtime.open_session(limits);
  }();
  gpushare::Allocator allocator{runtime};
  gpushare::GgmlBufferType memory{allocator.get()};

  ggml_backend_buffer_t buffer(size_t bytes) { return memory.get()->iface.alloc_buffer(memory.get(), bytes); }
};

}  // namespace

TEST_CASE_METHOD(GgmlFixture, "ggml's buffers are memory of the session") {
  REQUIRE(std::string(memory.get()->iface.get_name(memory.get())) == "gpushare");
  REQUIRE(memory.get()->iface.is_host(memory.get()));  // so ggml's CPU backend takes it
  REQUIRE(memory.get()->iface.get_alignment(memory.get()) == 64);
  allocator.bind_thread(&session);
  ggml_backend_buffer_t const weights = buffer(100'000);
  REQUIRE(weights != nullptr);
  REQUIRE(weights->buft == memory.get());
  REQUIRE(weights->size == 100'000);
  REQUIRE(reinterpret_cast<uintptr_t>(weights->context) % 64 == 0);
  std::memset(weights->context, 1, 100'000);
  const uint64_t persistent_bytes = session.info().persistent_bytes;
  REQUIRE(persistent_bytes >= 100'000);
  {
    gpushare::Iteration iteration = session.begin_iteration();
    ggml_backend_buffer_t const compute = buffer(300'000);
    REQUIRE(compute != nullptr);
    REQUIRE(session.info().ephemeral_bytes >= 300'000);
    ggml_backend_buffer_free(compute);
  }
  REQUIRE(session.info().persistent_bytes == persistent_bytes);
  ggml_backend_buffer_free(weights);
  REQUIRE(session.info().persistent_bytes == 0);
  allocator.bind_thread(nullptr);
}

TEST_CASE_METHOD(GgmlFixture,
                 "ggml gets null above the limit and without a session, and the message says why") {
  allocator.bind_thread(&session);
  REQUIRE(buffer(16 << 20) == nullptr);
  REQUIRE(std::string(gpushare_last_error_message()).find("session 'llm' asked for 16.00 MiB") !=
          std::string::npos);
  allocator.bind_thread(nullptr);
  REQUIRE(buffer(64) == nullptr);
  REQUIRE(std::string(gpushare_last_error_message()).find("the allocation has no session") !=
          std::string::npos);
}

TEST_CASE_METHOD(GgmlFixture, "a buffer of ggml may end after its session") {
  gpushare::Session ended = runtime.open_session({"ended"});
  allocator.bind_thread(&ended);
  ggml_backend_buffer_t const late = buffer(1000);
  allocator.bind_thread(nullptr);
  REQUIRE(late != nullptr);
  ended = gpushare::Session();
  ggml_backend_buffer_free(late);
}
