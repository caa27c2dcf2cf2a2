// SPDX-License-Identifier: Apache-2.0
#include "support/run_tests.hpp"

#include <cstdlib>

#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

int gpushare::test::run_tests(int argc, char** argv) {
  setenv("GPUSHARE_BAD_WAIT", "abort", 0);  // a wait with a lock held ends the test (base/waits.hpp)
  return Catch::Session().run(argc, argv);
}
