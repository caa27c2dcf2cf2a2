// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"

namespace gpushare::cts {

const Backend& backend() {
  static const Backend sim{
      "sim", "sim?total_gib=1", {kExactMemory}, {{"ipc: *", "simulated memory belongs to one process"}}, {}};
  return sim;
}

}  // namespace gpushare::cts
