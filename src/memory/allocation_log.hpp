// allocation_log.hpp: writes recorded allocations as RMM's CSV log (header
// Thread,Time,Action,Pointer,Size,Stream), which RMM's replay benchmark and `gpushare replay` read.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "base/status.hpp"
#include "memory/device_memory.hpp"

namespace gpushare::memory {

// Time is the device's clock as hours:minutes:seconds.microseconds; Pointer and Stream are hexadecimal. When
// a recording has lost its beginning, frees of blocks that it does not hold are left out, so that the log
// replays. Blocks on the disk. Errors: IO_ERROR with errno.
base::Status write_allocation_log(std::span<const AllocationEvent> events, const std::string& path);

}  // namespace gpushare::memory
