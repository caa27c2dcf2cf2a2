// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"

namespace gpushare::cts {

const Backend& backend() {
  static const Backend host{
      "host",
      "host",
      {kExactMemory},
      {{"work: *", "the host device does real work; modelled work is for simulating devices"}},
      {}};
  return host;
}

}  // namespace gpushare::cts
