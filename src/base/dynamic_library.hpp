// dynamic_library.hpp: a shared library opened at run time, symbols looked up by name.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/status.hpp"

namespace gpushare::base {

// Owns the handle; closes it on destruction unless leaked on purpose with release(). Local binding, lazy.
class DynamicLibrary {
 public:
  // `name` as dlopen takes it. Errors: UNAVAILABLE with the loader's reason.
  static Result<DynamicLibrary> open(const std::string& name);
  DynamicLibrary(DynamicLibrary&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  DynamicLibrary& operator=(DynamicLibrary&& other) noexcept;
  DynamicLibrary(const DynamicLibrary&) = delete;
  DynamicLibrary& operator=(const DynamicLibrary&) = delete;
  ~DynamicLibrary();

  // null if the library has no such symbol.
  void* find(const char* symbol) const;
  // Keeps the library loaded for good (drivers must not be unloaded).
  void release() { handle_ = nullptr; }

 private:
  explicit DynamicLibrary(void* handle) : handle_(handle) {}
  void* handle_ = nullptr;
};

}  // namespace gpushare::base
