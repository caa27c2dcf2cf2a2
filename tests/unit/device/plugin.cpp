// A backend plug-in as a third party would build it: one exported function.
// SPDX-License-Identifier: Apache-2.0
#include "fake_backend.hpp"

extern "C" __attribute__((visibility("default"))) const gpushare_backend_ops* gpushare_backend_entry_v1() {
  static const gpushare_backend_ops ops = gpushare::test::fake_backend("from-plugin");
  return &ops;
}
