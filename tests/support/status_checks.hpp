// status_checks.hpp: checks of statuses that show the message when it is not as it should be.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/status.hpp"
#include "support/catch.hpp"

#define CHECK_OK(expr)                                      \
  do {                                                      \
    const ::gpushare::base::Status checked_status = (expr); \
    INFO(checked_status.to_string());                       \
    CHECK(checked_status.ok());                             \
  } while (0)
#define REQUIRE_OK(expr)                                    \
  do {                                                      \
    const ::gpushare::base::Status checked_status = (expr); \
    INFO(checked_status.to_string());                       \
    REQUIRE(checked_status.ok());                           \
  } while (0)

namespace gpushare::test {

inline bool mentions(const base::Status& status, const std::string& text) {
  UNSCOPED_INFO(status.to_string());
  return status.message().find(text) != std::string::npos;
}

}  // namespace gpushare::test
