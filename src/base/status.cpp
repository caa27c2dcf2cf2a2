// SPDX-License-Identifier: Apache-2.0
#include "base/status.hpp"

#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "base/no_destroy.hpp"

namespace gpushare::base {

struct Status::Detail {
  std::atomic<uint32_t> copies{1};
  int32_t code;
  int64_t native_code;
  std::string message;
  std::string backend;
};

namespace {
const std::string& empty() {
  static const NoDestroy<std::string> value;
  return *value;
}
}  // namespace

Status::Status(int32_t code, std::string_view message, int64_t native_code, std::string_view backend)
    : detail_(code == GPUSHARE_OK
                  ? nullptr
                  : new Detail{{1}, code, native_code, std::string(message), std::string(backend)}) {}

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

Status Status::with_context(std::string_view context) const {
  if (ok()) return {};
  return {detail_->code, std::string(context) + ": " + detail_->message, detail_->native_code,
          detail_->backend};
}

std::string Status::to_string() const {
  if (ok()) return "OK";
  return std::string(status_name(detail_->code)) + ": " + detail_->message;
}

const char* status_name(int32_t code) {
  switch (code) {
    case GPUSHARE_OK:
      return "OK";
    case GPUSHARE_NOT_READY:
      return "NOT_READY";
    case GPUSHARE_TIMED_OUT:
      return "TIMED_OUT";
    case GPUSHARE_QUEUE_FULL:
      return "QUEUE_FULL";
    case GPUSHARE_HOST_OUT_OF_MEMORY:
      return "HOST_OUT_OF_MEMORY";
    case GPUSHARE_DEVICE_OUT_OF_MEMORY:
      return "DEVICE_OUT_OF_MEMORY";
    case GPUSHARE_QUOTA_EXCEEDED:
      return "QUOTA_EXCEEDED";
    case GPUSHARE_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case GPUSHARE_INVALID_STATE:
      return "INVALID_STATE";
    case GPUSHARE_INVALID_HANDLE:
      return "INVALID_HANDLE";
    case GPUSHARE_NOT_FOUND:
      return "NOT_FOUND";
    case GPUSHARE_ALREADY_EXISTS:
      return "ALREADY_EXISTS";
    case GPUSHARE_UNSUPPORTED:
      return "UNSUPPORTED";
    case GPUSHARE_EXCEEDS_CAPACITY:
      return "EXCEEDS_CAPACITY";
    case GPUSHARE_MALFORMED_INPUT:
      return "MALFORMED_INPUT";
    case GPUSHARE_UNAVAILABLE:
      return "UNAVAILABLE";
    case GPUSHARE_CANCELLED:
      return "CANCELLED";
    case GPUSHARE_DEVICE_LOST:
      return "DEVICE_LOST";
    case GPUSHARE_CALLBACK_FAILED:
      return "CALLBACK_FAILED";
    case GPUSHARE_IO_ERROR:
      return "IO_ERROR";
    case GPUSHARE_INTERNAL:
      return "INTERNAL";
    case GPUSHARE_UNKNOWN:
      return "UNKNOWN";
    default:
      return "UNRECOGNIZED";
  }
}

std::string format(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  va_list again;
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, arguments);
  va_end(arguments);
  std::string out;
  if (length > 0) {
    out.resize(static_cast<size_t>(length));
    std::vsnprintf(out.data(), out.size() + 1, format, again);
  }
  va_end(again);
  return out;
}

}  // namespace gpushare::base
