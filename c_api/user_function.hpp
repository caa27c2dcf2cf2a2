// user_function.hpp: a function of the caller's that works in an iteration, with its data.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "c_api/guard.hpp"
#include "c_api/tags.hpp"

namespace gpushare::capi {

// Fn: int32_t (*)(void* user_data, gpushare_iteration, ...). The data are given back exactly once, if owned.
template <class Fn>
class UserFunction {
 public:
  UserFunction(Fn fn, void* user_data, void (*release)(void*))
      : fn_(fn), user_data_(user_data), release_(release) {}
  UserFunction(const UserFunction&) = delete;
  UserFunction& operator=(const UserFunction&) = delete;
  ~UserFunction() {
    if (!owned_ || release_ == nullptr) return;
    try {
      const base::CallbackCalls may_call;
      release_(user_data_);
    } catch (...) {  // NOLINT(bugprone-empty-catch): nobody is left to tell
    }
  }
  // Until then user_data is the caller's.
  void own(bool owned = true) { owned_ = owned; }

  // Runs it with a handle of the iteration, which is good until it returns. `whose`: for the message.
  template <class... Arguments>
  base::Status run(const std::shared_ptr<executor::Iteration>& iteration, const char* whose,
                   Arguments... arguments) const {
    gpushare_iteration handle = nullptr;
    GPUSHARE_RETURN_IF_ERROR(publish_iteration(iteration, &handle));
    struct Remove {
      gpushare_iteration handle;
      ~Remove() { table_of<gpushare_iteration>().remove(handle); }
    } remove{handle};
    forget_last_error();
    const base::CallbackCalls may_call;
    const int32_t code = fn_(user_data_, handle, arguments...);
    if (code == GPUSHARE_OK) return {};
    // The message of the function's own failing call, if that is what it returned.
    base::Status failure = last_error();
    if (failure.code() != code) {
      failure = {code,
                 base::format("the %s's function returned %s (%d)", whose, base::status_name(code), code)};
    }
    // Codes of the group "try again later" say that a call which waits for the outcome may be repeated. This outcome is final.
    if (code / 100 == GPUSHARE_NOT_READY / 100) return {GPUSHARE_CALLBACK_FAILED, failure.to_string()};
    return failure;
  }

 private:
  const Fn fn_;
  void* const user_data_;
  void (*const release_)(void*);
  bool owned_ = false;
};

}  // namespace gpushare::capi
