// SPDX-License-Identifier: Apache-2.0
#include "base/no_memory.hpp"

#include "base/no_destroy.hpp"

namespace gpushare::base {
namespace {

const Status& made() {
  static const NoDestroy<Status> status(GPUSHARE_HOST_OUT_OF_MEMORY, "the process is out of host memory");
  return *status;
}

}  // namespace

void prepare_no_memory() {
  (void)made();
}

const Status& no_memory() noexcept {
  return made();
}

}  // namespace gpushare::base
