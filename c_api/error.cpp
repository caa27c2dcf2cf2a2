// Version, status names, last error, log.
// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <new>
#include <string>

#include "base/log.hpp"
#include "base/status.hpp"
#include "base/thread_exit.hpp"
#include "base/thread_local.hpp"
#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"

namespace gpushare::capi {
namespace {

GPUSHARE_THREAD_LOCAL base::ThreadStatus t_last_error;
// The thread's last error if it was told without allocating anything: goes before t_last_error. Static storage.
struct Plain {
  int32_t code;
  const char* message;
};
GPUSHARE_THREAD_LOCAL const Plain* t_plain = nullptr;
GPUSHARE_THREAD_LOCAL Plain t_refused{GPUSHARE_INVALID_STATE, ""};
constexpr Plain kNoMemory{GPUSHARE_HOST_OUT_OF_MEMORY, "the process is out of host memory"};

}  // namespace

int32_t report(const base::Status& status) noexcept {
  if (!status.ok()) {
    t_plain = nullptr;
    t_last_error.set(status);
  }
  return status.code();
}

base::Status last_error() {
  return t_plain == nullptr ? t_last_error.get() : base::Status(t_plain->code, t_plain->message);
}

void forget_last_error() noexcept {
  t_plain = nullptr;
  t_last_error.set({});
}

int32_t report_refused(const char* why) noexcept {
  t_refused.message = why;
  t_plain = &t_refused;
  return t_plain->code;
}

int32_t report_exception() noexcept {
  try {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      return report({GPUSHARE_INTERNAL, std::string("unexpected exception: ") + error.what()});
    } catch (...) {
      return report({GPUSHARE_INTERNAL, "unexpected exception of an unknown type"});
    }
  } catch (...) {  // no memory, for the call or for the message
    t_plain = &kNoMemory;
    return t_plain->code;
  }
}

base::Status stale(bool inherited, const char* noun) {
  if (inherited)
    return {GPUSHARE_INVALID_STATE,
            base::format(
                "the %s belongs to the process that forked this one, which cannot use it: open a runtime "
                "of this process",
                noun)};
  return {GPUSHARE_INVALID_HANDLE,
          base::format("%s is null, closed or released, or no %s handle", noun, noun)};
}

base::Status too_many_handles(const char* noun) {
  return {GPUSHARE_HOST_OUT_OF_MEMORY, base::format("too many %ss are open at once (16,777,216)", noun)};
}

}  // namespace gpushare::capi

using namespace gpushare;

extern "C" {

uint32_t gpushare_version(void) {
  return GPUSHARE_VERSION;
}

const char* gpushare_version_string(void) {
  return GPUSHARE_VERSION_STRING;
}

const char* gpushare_status_name(int32_t status) {
  return base::status_name(status);
}

const char* gpushare_last_error_message(void) {
  return capi::t_plain != nullptr ? capi::t_plain->message : capi::t_last_error.get().message().c_str();
}

int32_t gpushare_last_error(gpushare_error_info* out_info) {
  // This function does not use guard(), because reading the last error must not replace it.
  gpushare_error_info info = GPUSHARE_ERROR_INFO_INIT;
  const base::Status& last = capi::t_last_error.get();
  const capi::Plain* const plain = capi::t_plain;
  info.status = plain != nullptr ? plain->code : last.code();
  info.native_code = plain != nullptr ? 0 : last.native_code();
  info.message = gpushare_last_error_message();
  info.backend = plain != nullptr ? "" : last.backend().c_str();
  try {
    return capi::write_struct("out_info", info, out_info).code();
  } catch (...) {
    return GPUSHARE_HOST_OUT_OF_MEMORY;
  }
}

int32_t gpushare_log_set(gpushare_log_fn fn, void* user_data, int32_t level) {
  return capi::guard([&]() -> base::Status {
    if (level < GPUSHARE_LOG_ERROR || level > GPUSHARE_LOG_DEBUG)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("level is %d, allowed are 0 (error) to 3 (debug)", level)};
    base::set_log_sink(fn, user_data, level);
    return {};
  });
}

}  // extern "C"
