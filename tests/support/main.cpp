// SPDX-License-Identifier: Apache-2.0
#include "support/run_tests.hpp"

int main(int argc, char** argv) {
  return gpushare::test::run_tests(argc, argv);
}
