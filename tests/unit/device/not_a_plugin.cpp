// A library without the entry point.
// SPDX-License-Identifier: Apache-2.0
extern "C" __attribute__((visibility("default"))) int unrelated() {
  return 1;
}
