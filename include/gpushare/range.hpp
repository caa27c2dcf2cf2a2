// range.hpp: elastic ranges in C++: RAII over range.h. Included by gpushare.hpp, whose rules hold here too.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_RANGE_HPP_
#define GPUSHARE_RANGE_HPP_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "gpushare/gpushare.hpp"

namespace gpushare {

// Addresses of a session that memory is committed behind and decommitted from. Closed with the object.
class Range {
 public:
  // Gives bytes back within a time and returns how many; an exception counts as no answer. gpushare_give_back_fn has the rules.
  using GiveBack = std::function<uint64_t(uint64_t bytes, Nanoseconds within)>;
  struct Params {
    std::string name;
    uint64_t reserved_bytes = 0;
    GiveBack give_back;
    Nanoseconds answer{0};
    double price_ns_per_byte = 0;
  };

  Range() = default;
  Range(const Session& session, Params params)
      : give_back_(std::make_unique<GiveBack>(std::move(params.give_back))) {
    gpushare_range_params in = GPUSHARE_RANGE_PARAMS_INIT;
    in.name = params.name.empty() ? nullptr : params.name.c_str();
    in.reserved_bytes = params.reserved_bytes;
    in.answer_ns = static_cast<uint64_t>(params.answer.count());
    in.price_ns_per_byte = params.price_ns_per_byte;
    if (*give_back_) {
      in.user_data = give_back_.get();
      in.give_back = [](void* of, uint64_t bytes, uint64_t within_ns) -> uint64_t {
        try {
          return (*static_cast<GiveBack*>(of))(bytes, Nanoseconds(within_ns));
        } catch (const std::exception&) {
          return GPUSHARE_RANGE_NO_ANSWER;
        }
      };
    }
    gpushare_range out = nullptr;
    check(gpushare_range_open(session.get(), &in, &out));
    handle_ = Handle(out);
  }
  gpushare_range get() const noexcept { return handle_.get(); }

  // Waits for room as long as `timeout` says; throws with status timed_out or device_out_of_memory where there is none.
  void commit(uint64_t offset_bytes, uint64_t bytes, Nanoseconds timeout = Nanoseconds(0)) {
    check(gpushare_range_commit(get(), offset_bytes, bytes, detail::timeout_ns(timeout)));
  }
  void decommit(uint64_t offset_bytes, uint64_t bytes) {
    check(gpushare_range_decommit(get(), offset_bytes, bytes));
  }
  gpushare_range_info info() const {
    gpushare_range_info out = GPUSHARE_RANGE_INFO_INIT;
    check(gpushare_range_get_info(get(), &out));
    return out;
  }

 private:
  using Handle = detail::Handle<gpushare_range, gpushare_range_close>;
  std::unique_ptr<GiveBack> give_back_;  // goes after the handle
  Handle handle_;
};

}  // namespace gpushare

#endif  // GPUSHARE_RANGE_HPP_
