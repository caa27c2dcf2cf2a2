// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"

namespace gpushare::cts {

const Backend& backend() {
  static const Backend sim{"sim", "sim?total_gib=1", {kExactMemory}, {}, {}};
  return sim;
}

}  // namespace gpushare::cts
