// SPDX-License-Identifier: Apache-2.0
#include "base/status.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <iterator>
#include <new>

#include "base/no_destroy.hpp"

namespace gpushare::base {

struct Status::Detail {
  std::atomic<uint32_t> copies{1};
  int32_t code = GPUSHARE_UNKNOWN;
  int64_t native_code = 0;
  std::string message;
  std::string backend;
};

namespace {

struct Failure {
  int32_t code;
  const char* name;
};
constexpr Failure kFailures[] = {
    {GPUSHARE_NOT_READY, "NOT_READY"},
    {GPUSHARE_TIMED_OUT, "TIMED_OUT"},
    {GPUSHARE_QUEUE_FULL, "QUEUE_FULL"},
    {GPUSHARE_HOST_OUT_OF_MEMORY, "HOST_OUT_OF_MEMORY"},
    {GPUSHARE_DEVICE_OUT_OF_MEMORY, "DEVICE_OUT_OF_MEMORY"},
    {GPUSHARE_QUOTA_EXCEEDED, "QUOTA_EXCEEDED"},
    {GPUSHARE_INVALID_ARGUMENT, "INVALID_ARGUMENT"},
    {GPUSHARE_INVALID_STATE, "INVALID_STATE"},
    {GPUSHARE_INVALID_HANDLE, "INVALID_HANDLE"},
    {GPUSHARE_NOT_FOUND, "NOT_FOUND"},
    {GPUSHARE_ALREADY_EXISTS, "ALREADY_EXISTS"},
    {GPUSHARE_UNSUPPORTED, "UNSUPPORTED"},
    {GPUSHARE_EXCEEDS_CAPACITY, "EXCEEDS_CAPACITY"},
    {GPUSHARE_MALFORMED_INPUT, "MALFORMED_INPUT"},
    {GPUSHARE_UNAVAILABLE, "UNAVAILABLE"},
    {GPUSHARE_CANCELLED, "CANCELLED"},
    {GPUSHARE_DEVICE_LOST, "DEVICE_LOST"},
    {GPUSHARE_CALLBACK_FAILED, "CALLBACK_FAILED"},
    {GPUSHARE_IO_ERROR, "IO_ERROR"},
    {GPUSHARE_INTERNAL, "INTERNAL"},
    {GPUSHARE_UNKNOWN, "UNKNOWN"},
};
constexpr size_t kUnknown = std::size(kFailures) - 1;
static_assert(kFailures[kUnknown].code == GPUSHARE_UNKNOWN);

// Its place in the table; kUnknown for a code that is none.
size_t place_of(int32_t code) {
  const auto* const found = std::find_if(std::begin(kFailures), std::end(kFailures),
                                         [code](const Failure& failure) { return failure.code == code; });
  return found == std::end(kFailures) ? kUnknown : static_cast<size_t>(found - kFailures);
}

const std::string& empty() {
  static const NoDestroy<std::string> value;
  return *value;
}

// Short enough for a std::string that allocates nothing.
constexpr const char* kNoMemory = "(out of memory)";

}  // namespace

// The details of statuses that had no memory for their own, one for each code: in static storage, each with a copy that
// never goes.
Status::Detail* Status::without_memory(int32_t code) noexcept {
  struct Table {
    Table() {
      for (size_t i = 0; i < std::size(kFailures); ++i) {
        details[i].code = kFailures[i].code;
        details[i].message = kNoMemory;
      }
    }
    std::array<Detail, std::size(kFailures)> details;
  };
  static NoDestroy<Table> table;
  Detail* const detail = &table->details[place_of(code)];
  detail->copies.fetch_add(1, std::memory_order_relaxed);
  return detail;
}

Status::Status(int32_t code, std::string_view message, int64_t native_code,
               std::string_view backend) noexcept {
  if (code == GPUSHARE_OK) return;
  try {
    detail_ = new Detail{{1}, code, native_code, std::string(message), std::string(backend)};
  } catch (const std::bad_alloc&) {
    detail_ = without_memory(code);
  }
}

void Status::share() const noexcept {
  detail_->copies.fetch_add(1, std::memory_order_relaxed);
}

void Status::drop() noexcept {
  if (detail_->copies.fetch_sub(1, std::memory_order_acq_rel) == 1) delete detail_;
}

int32_t Status::failure_code() const {
  return detail_->code;
}

int64_t Status::native_code() const {
  return ok() ? 0 : detail_->native_code;
}

const std::string& Status::message() const {
  return ok() ? empty() : detail_->message;
}

const std::string& Status::backend() const {
  return ok() ? empty() : detail_->backend;
}

Status Status::with_context(std::string_view context) const noexcept {
  if (ok()) return {};
  try {
    return {detail_->code, std::string(context) + ": " + detail_->message, detail_->native_code,
            detail_->backend};
  } catch (const std::bad_alloc&) {
    return *this;
  }
}

std::string Status::to_string() const {
  if (ok()) return "OK";
  return format("%s: %s", status_name(detail_->code), detail_->message.c_str());
}

const char* status_name(int32_t code) {
  if (code == GPUSHARE_OK) return "OK";
  const Failure& failure = kFailures[place_of(code)];
  return failure.code == code ? failure.name : "UNRECOGNIZED";
}

std::string format(const char* format, ...) noexcept {
  va_list arguments;
  va_start(arguments, format);
  va_list again;
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, arguments);
  va_end(arguments);
  std::string out;
  try {
    if (length > 0) {
      out.resize(static_cast<size_t>(length));
      std::vsnprintf(out.data(), out.size() + 1, format, again);
    }
  } catch (const std::bad_alloc&) {
    out = kNoMemory;
  }
  va_end(again);
  return out;
}

}  // namespace gpushare::base
