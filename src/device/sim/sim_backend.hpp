// sim: a device on virtual time: fixed memory, a cost model for work, copies and their interference, scripted
// faults; deterministic. Called through its ops table only. How its clock moves is in sim_device.hpp.
//
// Options, with their defaults:
//   total_gib=16 or total_bytes  capacity
//   granularity=2MiB             of mappings
//   data=1                       0: copies and fills cost time but move nothing, and no host memory is used
//   copy_gbps=12                 bandwidth of each direction between host and device, 10^9 bytes a second
//   copy_latency_ns=10000        added to every copy between host and device, during which its bus is taken
//   memory_gbps=700              bandwidth of the device's own memory: fills, and copies inside it (read and written)
//   contention=share             the effect of overlapping work: share (see contention.hpp) or none (full speed always)
//   overhead=0                   share: every further work slows all by this fraction of their speed
//   pairs=A:B:RA:RB,...          measured co-location: class A runs at RA of its speed beside class B, B at RB beside A
//   jitter=0                     work lasts up to this fraction more or less, by the seed
//   seed=1
//   polls=16                     NOT_READY answers in a row after which a query moves the clock
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gpushare/backend.h"

namespace gpushare::device {

// The table; lives as long as the process.
const gpushare_backend_ops* sim_backend();

}  // namespace gpushare::device
