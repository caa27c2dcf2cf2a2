// spill.hpp: memory that a program asked of the device and got from the host: pinned, and under one address for both.
// It has the answers to the program's questions about such memory, and the quota of pinned host memory.
// Threads: any. Calls the driver; no lock is held then.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "shim/device.hpp"
#include "shim/ranges.hpp"
#include "shim/table.hpp"

namespace gpushare::shim {

// The device has no room for `bytes`: gets them from the host, where the limits allow it. kOutOfMemory: they do not, or
// the driver does not.
Result spill(const Current& at, uint64_t bytes, void* out_address);
// Frees a block that is not in the table any more. After an error it is there again.
Result free_range(const Range& range);
// Gives back the bytes counted for it.
void discharge_range(const Range& range);
// A context is gone, and its blocks go with it.
void forget_ranges(uint64_t context);

}  // namespace gpushare::shim
