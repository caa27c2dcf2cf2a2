// allocator.hpp: ONNX Runtime's OrtAllocator over a gpushare allocator, so that weights and temporary tensors of a model on the CPU are memory of a
// session of the host device. A program takes this header into its build; it was compiled with the C API of version 29.
//
//   gpushare::OrtSessionAllocator memory(OrtGetApiBase()->GetApi(ORT_API_VERSION), allocator.get());  // gpushare::Allocator
//   api->RegisterAllocator(env, &memory);                                    // before the first model
//   api->AddSessionConfigEntry(options, "session.use_env_allocators", "1");  // of each model
//
// Whose memory: that of the calling thread's iteration, else of the session that the thread is bound to (Allocator::bind_thread), else of the
// default session. So a model that is made while the thread is bound has its weights there, and a Run in an iteration its temporary tensors.
// Beyond the session's limit the call of ONNX Runtime fails, and its status says who holds the memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gpushare/allocator.h>
#include <onnxruntime_c_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace gpushare {

// ONNX Runtime's kernels do not look whether an allocator answered null: they write there. Its own allocator throws, and so does this one. The
// exception becomes the status of the call.
class OrtOutOfMemory final : public std::bad_alloc {
 public:
  explicit OrtOutOfMemory(const char* message) : message_(std::make_shared<const std::string>(message)) {}
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  std::shared_ptr<const std::string> message_;  // copying an exception must not throw
};

// All methods may be called from any thread. It and its allocator must live until ONNX Runtime's environment and all its values are gone.
class OrtSessionAllocator final : public OrtAllocator {
 public:
  // Throws std::runtime_error if ONNX Runtime does not describe memory of the CPU.
  OrtSessionAllocator(const OrtApi* api, gpushare_allocator allocator)
      : OrtAllocator{}, api_(api), allocator_(allocator) {
    OrtAllocator::version = ORT_API_VERSION;
    OrtAllocator::Alloc = [](OrtAllocator* self, size_t bytes) { return of(self).allocate(bytes); };
    OrtAllocator::Reserve = OrtAllocator::Alloc;
    OrtAllocator::Free = [](OrtAllocator* self, void* block) { of(self).free(block); };
    OrtAllocator::Info = [](const OrtAllocator* self) -> const OrtMemoryInfo* {
      return static_cast<const OrtSessionAllocator*>(self)->info_;
    };
    OrtStatus* const status = api_->CreateMemoryInfo("Cpu", OrtDeviceAllocator, 0, OrtMemTypeDefault, &info_);
    if (status == nullptr) return;
    const std::string message = api_->GetErrorMessage(status);
    api_->ReleaseStatus(status);
    throw std::runtime_error(message);
  }
  OrtSessionAllocator(const OrtSessionAllocator&) = delete;
  OrtSessionAllocator& operator=(const OrtSessionAllocator&) = delete;
  ~OrtSessionAllocator() { api_->ReleaseMemoryInfo(info_); }

 private:
  static constexpr uint64_t kAlignment = 64;  // what its kernels load at once

  static OrtSessionAllocator& of(OrtAllocator* self) { return *static_cast<OrtSessionAllocator*>(self); }

  void* allocate(size_t bytes) {
    gpushare_device_address address = 0;
    if (gpushare_allocator_alloc(allocator_, bytes, kAlignment, GPUSHARE_NO_NATIVE_STREAM, &address) ==
        GPUSHARE_OK)
      return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
    throw OrtOutOfMemory(gpushare_last_error_message());
  }
  // A block whose session has ended is ignored.
  void free(void* block) {
    (void)gpushare_allocator_free(allocator_, reinterpret_cast<std::uintptr_t>(block),
                                  GPUSHARE_NO_NATIVE_STREAM);
  }

  const OrtApi* api_;
  gpushare_allocator allocator_;
  OrtMemoryInfo* info_ = nullptr;
};

}  // namespace gpushare
