// check.hpp: what the tests of the C++ API share: assertions that count their failures, with no test framework between
// the API and its user.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <gpushare/gpushare.hpp>
#include <string>

inline int failures = 0;

inline void check(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::fprintf(stderr, "failed: %s; last error: %s\n", what.c_str(), gpushare_last_error_message());
}
#define CHECK(condition) check(condition, "line " + std::to_string(__LINE__) + ": " #condition)

// The status that `body` throws, or OK.
template <class F>
int32_t status_of(F body) {
  try {
    body();
  } catch (const gpushare::Error& error) {
    return error.status();
  }
  return GPUSHARE_OK;
}
