// no_memory.hpp: HOST_OUT_OF_MEMORY for where there is no memory to make a status: on threads of the library's own,
// which no exception may leave.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/status.hpp"

namespace gpushare::base {

// Makes the status. Called by whatever opens what may need it later (a device), while failing is still possible. Throws
// std::bad_alloc.
void prepare_no_memory();

// After prepare_no_memory(). Allocates nothing; nor does copying it.
const Status& no_memory() noexcept;

}  // namespace gpushare::base
