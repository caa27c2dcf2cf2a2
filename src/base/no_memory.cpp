// SPDX-License-Identifier: Apache-2.0
#include "base/no_memory.hpp"

namespace gpushare::base {
namespace {

// Never destroyed: threads may still run while static destructors do.
const Status* const g_no_memory =
    new Status(GPUSHARE_HOST_OUT_OF_MEMORY, "the process is out of host memory");

}  // namespace

const Status& no_memory() noexcept {
  return *g_no_memory;
}

}  // namespace gpushare::base
