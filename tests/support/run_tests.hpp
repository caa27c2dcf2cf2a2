// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gpushare::test {

// Runs the program's tests as Catch2's options say; the exit status. Catch2 v2's own code is compiled with it, so it is
// a file of its own.
int run_tests(int argc, char** argv);

}  // namespace gpushare::test
