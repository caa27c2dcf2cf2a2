// no_memory.hpp: HOST_OUT_OF_MEMORY for where there is no memory to make a status: on threads of the library's own, which no exception may
// leave.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/status.hpp"

namespace gpushare::base {

// Made when the library is loaded; copying it allocates nothing.
const Status& no_memory() noexcept;

}  // namespace gpushare::base
