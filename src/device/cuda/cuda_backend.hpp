// cuda_backend.hpp: the table of the cuda backend. Without a driver or a GPU probe and device_open answer
// UNAVAILABLE with the reason; nothing else changes.
//
// Options, with their defaults:
//   driver=                             absolute path of another libcuda, as tests give the stand-in's; the environment
//                                       variable GPUSHARE_CUDA_DRIVER does the same for a process
//   context=                            a CUcontext as a number, instead of the primary context
//   fraction, total_gib or total_bytes  capacity: all of the GPU
//   granularity=                        of mappings: the driver's
//   pool_bytes=64MiB                    released granules that are kept
//   pinned_chunk_bytes=8MiB
//   wait=block                          block, spin or callback: cuda_stream.hpp says how
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gpushare/backend.h"

namespace gpushare::device {

// The table; lives as long as the process.
const gpushare_backend_ops* cuda_backend();

}  // namespace gpushare::device
