// cuda_support.hpp: the cuda backend opened on the stand-in for its driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "device/device.hpp"
#include "standin_support.hpp"

namespace cuda_test {

using gpushare::base::Status;
using gpushare::device::Device;

inline std::string spec(const std::string& options = "", const std::string& index = "0") {
  return "cuda:" + index + "?driver=" GPUSHARE_CUDA_STANDIN + (options.empty() ? "" : "&" + options);
}
inline std::unique_ptr<Device> open(const std::string& options = "") {
  auto device = Device::open(spec(options));
  INFO(device.status().to_string());
  REQUIRE(device.ok());
  return std::move(*device);
}
inline bool mentions(const Status& status, const std::string& text) {
  UNSCOPED_INFO(status.to_string());
  return status.message().find(text) != std::string::npos;
}
// The driver's view after a device has closed: nothing is left, nothing was done wrong.
inline void check_clean() {
  standin_clear_faults();
  char leaks[512] = "";
  const size_t count = standin_leaks(leaks, sizeof(leaks));
  INFO(leaks);
  CHECK(count == 0);
  const std::string misuse = standin_test::take_misuse();
  INFO(misuse);
  CHECK(misuse.empty());
}

}  // namespace cuda_test

#define REQUIRE_OK(expr)                               \
  do {                                                 \
    const ::gpushare::base::Status status_of = (expr); \
    INFO(status_of.to_string());                       \
    REQUIRE(status_of.ok());                           \
  } while (0)
