// buffer_type.hpp: a buffer type of ggml over a gpushare allocator, so that weights, caches and compute buffers of ggml's CPU backend are memory of a
// session of the host device. A program takes this header into its build, with ggml's sources: ggml-backend-impl.h is in ggml's folder src.
//
//   gpushare::GgmlBufferType memory(allocator.get());                              // gpushare::Allocator
//   ggml_backend_alloc_ctx_tensors_from_buft(weights, memory.get());               // while the thread is bound to a session: persistent
//   ggml_gallocr_t compute = ggml_gallocr_new(memory.get());                       // in an iteration: ephemeral, unless it is kept
//
// Whose memory: that of the calling thread's iteration, else of the session that the thread is bound to, else of the default session. Where there
// is none, ggml's call answers null, and gpushare_last_error_message() says why.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ggml-backend-impl.h>
#include <ggml-backend.h>
#include <gpushare/allocator.h>

#include <cstddef>
#include <cstdint>

namespace gpushare {

// May be used from any thread. It and its allocator must live until the last buffer has been freed.
class GgmlBufferType {
 public:
  explicit GgmlBufferType(gpushare_allocator allocator) : type_(*ggml_backend_cpu_buffer_type()) {
    type_.context = allocator;
    type_.iface.get_name = [](ggml_backend_buffer_type_t) { return "gpushare"; };
    type_.iface.alloc_buffer = &GgmlBufferType::allocate;
    type_.iface.get_alignment = [](ggml_backend_buffer_type_t) { return kAlignment; };
  }
  GgmlBufferType(const GgmlBufferType&) = delete;
  GgmlBufferType& operator=(const GgmlBufferType&) = delete;

  ggml_backend_buffer_type_t get() { return &type_; }

 private:
  static constexpr size_t kAlignment = 64;

  // ggml's buffer over memory of the caller's, whose end frees it.
  static ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t bytes) {
    gpushare_device_address address = 0;
    if (gpushare_allocator_alloc(static_cast<gpushare_allocator>(type->context), bytes, kAlignment,
                                 GPUSHARE_NO_NATIVE_STREAM, &address) != GPUSHARE_OK)
      return nullptr;
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(
        reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), bytes);
    buffer->buft = type;
    buffer->iface.free_buffer = [](ggml_backend_buffer_t freed) {
      (void)gpushare_allocator_free(static_cast<gpushare_allocator>(freed->buft->context),
                                    reinterpret_cast<std::uintptr_t>(freed->context),
                                    GPUSHARE_NO_NATIVE_STREAM);
    };
    return buffer;
  }

  ggml_backend_buffer_type type_;
};

}  // namespace gpushare
