// SPDX-License-Identifier: Apache-2.0
#include "cluster/kinds.hpp"

namespace gpushare::cluster {

// One line a kind.
const std::vector<const Kind*>& kinds() {
  static const std::vector<const Kind*> all = {
      &services_kind(),
      &trials_kind(),
      &retraining_kind(),
      &shares_kind(),
  };
  return all;
}

}  // namespace gpushare::cluster
