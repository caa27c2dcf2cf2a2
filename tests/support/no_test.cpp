// A program without tests: see gpushare_test_headers in tests/CMakeLists.txt.
// SPDX-License-Identifier: Apache-2.0
int main() {
  return 0;
}
