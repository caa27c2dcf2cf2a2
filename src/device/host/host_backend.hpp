// host: the oracle. A device made of CPU threads and host memory that does what backend.h says, for real, on
// any machine. Called through its ops table only.
//
// Options: total_gib or total_bytes (capacity, default 1 GiB), granularity (of mappings, default 2 MiB),
// copy_gbps (bandwidth of each direction between host and device, 10^9 bytes a second; 0, the default, is as
// fast as memcpy goes).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gpushare/backend.h"

namespace gpushare::device {

// The table; lives as long as the process.
const gpushare_backend_ops* host_backend();

}  // namespace gpushare::device
