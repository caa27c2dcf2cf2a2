// The part of ggml's interface that bindings/ggml/buffer_type.hpp uses, for machines without ggml: names, types and contracts are those of ggml in
// August 2026. tests/unit/frameworks/ggml_test.cpp has the functions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

using ggml_backend_buffer_type_t = struct ggml_backend_buffer_type*;
using ggml_backend_buffer_t = struct ggml_backend_buffer*;

// Memory of the C library's, for the CPU.
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type();
// A buffer over memory of the caller's, which its end does not free.
ggml_backend_buffer_t ggml_backend_cpu_buffer_from_ptr(void* memory, size_t bytes);
// Ends a buffer: calls its interface's free_buffer, if there is one.
void ggml_backend_buffer_free(ggml_backend_buffer_t buffer);
