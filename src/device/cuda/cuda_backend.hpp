// cuda_backend.hpp: the table of the cuda backend. Without a driver or a GPU probe and device_open answer
// UNAVAILABLE with the reason; nothing else changes.
//
// Options: driver (absolute path of another libcuda; tests give the stand-in's; the environment variable
// GPUSHARE_CUDA_DRIVER does the same for a process), context (a CUcontext as a number, instead of the primary
// context), fraction, total_gib or total_bytes (capacity, default all of the GPU), granularity (of mappings,
// default the driver's), pool_bytes (released granules kept, default 64 MiB), pinned_chunk_bytes (default 8
// MiB), wait (block, the default, spin, or callback: cuda_stream.hpp says how).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gpushare/backend.h"

namespace gpushare::device {

// The table; lives as long as the process.
const gpushare_backend_ops* cuda_backend();

}  // namespace gpushare::device
