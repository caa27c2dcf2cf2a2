// The part of ONNX Runtime's C API that bindings/onnxruntime/allocator.hpp uses, for machines without ONNX Runtime's headers: names, types and
// contracts are those of the API's version 29. OrtApi has four of its functions, at other places: a program that is compiled with this header
// works with the stand-ins of its own tests, not with the library.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#define ORT_API_VERSION 29

struct OrtMemoryInfo;
struct OrtStatus;

enum OrtAllocatorType { OrtDeviceAllocator = 0, OrtArenaAllocator = 1 };
enum OrtMemType { OrtMemTypeDefault = 0 };

// What a program implements to give memory to models. ONNX Runtime calls Reserve for memory that it keeps, such as weights.
struct OrtAllocator {
  uint32_t version;
  void* (*Alloc)(OrtAllocator* self, size_t bytes);
  void (*Free)(OrtAllocator* self, void* block);
  const OrtMemoryInfo* (*Info)(const OrtAllocator* self);
  void* (*Reserve)(OrtAllocator* self, size_t bytes);
};

// A status that is not null is an error, and the caller releases it.
struct OrtApi {
  OrtStatus* (*CreateMemoryInfo)(const char* name, OrtAllocatorType type, int id, OrtMemType memory,
                                 OrtMemoryInfo** out) noexcept;
  const char* (*GetErrorMessage)(const OrtStatus* status) noexcept;
  void (*ReleaseStatus)(OrtStatus* status);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo* info);
};
