// bindings/onnxruntime/allocator.hpp, called as ONNX Runtime calls an OrtAllocator. The four functions of ONNX Runtime that it calls are stand-ins.
// SPDX-License-Identifier: Apache-2.0
#include "onnxruntime/allocator.hpp"

#include <cstring>
#include <gpushare/allocator.hpp>
#include <gpushare/gpushare.hpp>
#include <string>

#include "support/catch.hpp"

struct OrtStatus {
  std::string message;
};
struct OrtMemoryInfo {
  std::string name;
};

namespace {

int ort_statuses = 0, ort_infos = 0;  // alive
bool ort_refuses = false;

OrtApi ort_api() {
  OrtApi api{};
  api.CreateMemoryInfo = [](const char* name, OrtAllocatorType, int, OrtMemType,
                            OrtMemoryInfo** out) noexcept -> OrtStatus* {
    if (ort_refuses) return ++ort_statuses, new OrtStatus{"no such memory"};
    return ++ort_infos, *out = new OrtMemoryInfo{name}, nullptr;
  };
  api.GetErrorMessage = [](const OrtStatus* status) noexcept { return status->message.c_str(); };
  api.ReleaseStatus = [](OrtStatus* status) { delete status, --ort_statuses; };
  api.ReleaseMemoryInfo = [](OrtMemoryInfo* info) { delete info, --ort_infos; };
  return api;
}

struct OrtFixture {
  const OrtApi api = ort_api();
  gpushare::Runtime runtime = gpushare::Runtime::open({"host"});
  gpushare::Session session = [this] {
    gpushare::SessionOptions limits;
    limits.name = "model";
    limits.quota_bytes = 8 << 20;
    return runtime.open_session(limits);
  }();
  gpushare::Allocator allocator{runtime};
  gpushare::OrtSessionAllocator memory{&api, allocator.get()};
  OrtAllocator* const ort = &memory;  // as ONNX Runtime has it

  // What an allocation throws, caught as ONNX Runtime catches it.
  std::string refusal(size_t bytes) {
    try {
      (void)ort->Alloc(ort, bytes);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "no exception";
  }
};

}  // namespace

TEST_CASE_METHOD(OrtFixture, "ONNX Runtime's weights and temporary tensors are memory of the session") {
  REQUIRE(ort->version == ORT_API_VERSION);
  REQUIRE(ort->Info(ort)->name == "Cpu");
  allocator.bind_thread(&session);
  void* const weights = ort->Reserve(ort, 100'000);
  REQUIRE(reinterpret_cast<uintptr_t>(weights) % 64 == 0);
  std::memset(weights, 1, 100'000);
  const uint64_t persistent_bytes = session.info().persistent_bytes;
  REQUIRE(persistent_bytes >= 100'000);
  {
    gpushare::Iteration iteration = session.begin_iteration();
    void* const tensor = ort->Alloc(ort, 300'000);
    std::memset(tensor, 2, 300'000);
    REQUIRE(session.info().ephemeral_bytes >= 300'000);
    ort->Free(ort, tensor);
  }
  REQUIRE(session.info().persistent_bytes == persistent_bytes);
  REQUIRE(session.info().ephemeral_bytes == 0);
  ort->Free(ort, weights);
  REQUIRE(session.info().persistent_bytes == 0);
  REQUIRE(ort->Alloc(ort, 0) == nullptr);
  ort->Free(ort, nullptr);
  allocator.bind_thread(nullptr);
}

TEST_CASE_METHOD(OrtFixture, "ONNX Runtime gets an exception that says who holds the memory") {
  allocator.bind_thread(&session);
  REQUIRE(refusal(16 << 20).find("session 'model' asked for 16.00 MiB") != std::string::npos);
  allocator.bind_thread(nullptr);
  REQUIRE(refusal(64).find("the allocation has no session") != std::string::npos);
}

TEST_CASE_METHOD(OrtFixture, "ONNX Runtime may free a block after its session has ended") {
  gpushare::Session ended = runtime.open_session({"ended"});
  allocator.bind_thread(&ended);
  void* const block = ort->Alloc(ort, 1000);
  allocator.bind_thread(nullptr);
  ended = gpushare::Session();
  ort->Free(ort, block);
}

TEST_CASE_METHOD(OrtFixture, "ONNX Runtime's refusal to describe its memory is the constructor's error") {
  REQUIRE(ort_infos == 1);
  ort_refuses = true;
  REQUIRE_THROWS_WITH(gpushare::OrtSessionAllocator(&api, allocator.get()), "no such memory");
  ort_refuses = false;
  REQUIRE(ort_statuses == 0);
  { const gpushare::OrtSessionAllocator other(&api, allocator.get()); }
  REQUIRE(ort_infos == 1);
}
