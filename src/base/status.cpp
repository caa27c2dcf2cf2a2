// SPDX-License-Identifier: Apache-2.0
#include "base/status.hpp"

#include <cstdarg>
#include <cstdio>

#include "base/no_destroy.hpp"

namespace gpushare::base {

const std::string& Status::empty() {
  static const NoDestroy<std::string> value;
  return *value;
}

Status Status::with_context(const std::string& context) const {
  if (ok()) return {};
  return {detail_->code, context + ": " + detail_->message, detail_->native_code, detail_->backend};
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
