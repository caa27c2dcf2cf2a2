// cuda_support.hpp: the cuda backend opened on the stand-in for its driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "device/device.hpp"
#include "standin_support.hpp"
#include "support/status_checks.hpp"

namespace cuda_test {

using gpushare::base::Status;
using gpushare::device::Device;
using gpushare::test::mentions;

inline std::string spec(const std::string& options = "", const std::string& index = "0") {
  return "cuda:" + index + "?driver=" GPUSHARE_CUDA_STANDIN + (options.empty() ? "" : "&" + options);
}
inline std::unique_ptr<Device> open(const std::string& options = "") {
  auto device = Device::open(spec(options));
  INFO(device.status().to_string());
  REQUIRE(device.ok());
  return std::move(*device);
}

}  // namespace cuda_test
