// What a buffer type of ggml consists of: see ggml-backend.h here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ggml-backend.h"

struct ggml_backend_buffer_type_i {
  const char* (*get_name)(ggml_backend_buffer_type_t type);
  ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t type, size_t bytes);
  size_t (*get_alignment)(ggml_backend_buffer_type_t type);
  bool (*is_host)(ggml_backend_buffer_type_t type);
};

struct ggml_backend_buffer_type {
  ggml_backend_buffer_type_i iface;
  void* context;
};

struct ggml_backend_buffer_i {
  void (*free_buffer)(ggml_backend_buffer_t buffer);
};

struct ggml_backend_buffer {
  ggml_backend_buffer_i iface;
  ggml_backend_buffer_type_t buft;
  void* context;
  size_t size;
};
