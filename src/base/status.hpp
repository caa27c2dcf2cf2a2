// base: general helpers that know nothing of devices or sessions: status and Result, mutex with thread-safety
// annotations, clock, unit parsing and printing, dynamic libraries, the log sink. May be called from every
// folder; includes none.
//
// status.hpp: the error type inside gpushare. The codes are those of the C ABI (gpushare/status.h), so an error crosses the ABI
// without translation.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "gpushare/status.h"

namespace gpushare::base {

// Codes that no call of the C ABI returns.
//
// The session's memory is not on the device now: the session is queued, or was paged out meanwhile. The caller waits
// until the session is resident and tries again. A session that has ended answers with another code.
inline constexpr int32_t kAway = -1;
// Blocks of the session move between host and device memory. The caller waits for the end of the move.
inline constexpr int32_t kMoving = -2;

// A status with its message. OK is a null pointer, so success costs nothing; copies share the detail. The code for failures is
// in status.cpp: every function of the project that may fail would otherwise repeat it.
//
// Making a status never throws: where the host has no memory for its message, the status keeps its code and says
// "(out of memory)". So a function that closes something may return a status, and tell two codes apart, whatever memory is left.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(int32_t code, std::string_view message, int64_t native_code = 0,
         std::string_view backend = {}) noexcept;
  Status(const Status& other) : detail_(other.detail_) {
    if (detail_ != nullptr) share();
  }
  Status(Status&& other) noexcept : detail_(std::exchange(other.detail_, nullptr)) {}
  Status& operator=(Status other) noexcept {
    std::swap(detail_, other.detail_);
    return *this;
  }
  ~Status() {
    if (detail_ != nullptr) drop();
  }

  bool ok() const { return detail_ == nullptr; }
  int32_t code() const { return ok() ? GPUSHARE_OK : failure_code(); }
  int64_t native_code() const;
  const std::string& message() const;
  const std::string& backend() const;

  // The same status with "context: " in front of the message.
  Status with_context(std::string_view context) const noexcept;
  // "DEVICE_OUT_OF_MEMORY: message".
  std::string to_string() const;

 private:
  struct Detail;
  int32_t failure_code() const;
  static Detail* without_memory(int32_t code) noexcept;
  void share() const noexcept;
  void drop() noexcept;
  Detail* detail_ = nullptr;
};

inline Status ok_status() {
  return {};
}

// Static name of a code: "OK", "NOT_READY", ... "UNRECOGNIZED" for a number that is none.
const char* status_name(int32_t code);

// A value or the status why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

// printf-style message building. Never throws: without memory it returns "(out of memory)".
std::string format(const char* format, ...) noexcept __attribute__((format(printf, 1, 2)));

}  // namespace gpushare::base

#define GPUSHARE_RETURN_IF_ERROR(expr)                                                                       \
  do {                                                                                                       \
    if (::gpushare::base::Status gpushare_status_ = (expr); !gpushare_status_.ok()) return gpushare_status_; \
  } while (0)

#define GPUSHARE_CONCAT_INNER_(a, b) a##b
#define GPUSHARE_CONCAT_(a, b) GPUSHARE_CONCAT_INNER_(a, b)
// GPUSHARE_ASSIGN_OR_RETURN(auto x, f()); declares x from f()'s value or returns f()'s status.
// NOLINTBEGIN(bugprone-macro-parentheses): a declaration cannot stand in parentheses
#define GPUSHARE_ASSIGN_OR_RETURN(declaration, expr)              \
  auto GPUSHARE_CONCAT_(gpushare_result_, __LINE__) = (expr);     \
  if (!GPUSHARE_CONCAT_(gpushare_result_, __LINE__).ok())         \
    return GPUSHARE_CONCAT_(gpushare_result_, __LINE__).status(); \
  declaration = std::move(*GPUSHARE_CONCAT_(gpushare_result_, __LINE__))
// NOLINTEND(bugprone-macro-parentheses)
