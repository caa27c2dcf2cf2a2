// job.hpp: one job of a trace, in the units of the scheduler.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "sched/types.hpp"

namespace gpushare::sim {

struct Job {
  std::string name;
  std::string config;  // key of the interference table; "" = not in any table
  sched::SessionClass cls = sched::SessionClass::kGuaranteed;
  uint64_t arrival_ns = 0;
  uint64_t iterations = 1;  // >= 1
  double iteration_ns = 0;  // device time of one, alone on the device; > 0
  // Above 0: the job waits for each iteration, and its host begins the next one so long after that. 0: it always has the
  // next iteration ready.
  uint64_t think_ns = 0;
  uint64_t persistent_bytes = 0;  // P
  uint64_t ephemeral_bytes = 0;   // E
  // False: it uses so many bytes but does not say so beforehand; a runtime profiles its first iterations. The simulator
  // schedules it as if it had said so.
  bool declares_persistent = true;
  bool declares_ephemeral = true;
  int32_t priority = 0;
  uint32_t gang =
      1;  // devices at once, for who has several; the simulation of one device does not look at it
  double weight = 1.0;
  double demand =
      0;  // share of the device's compute it keeps busy alone, in (0, 1]; 0 = unknown: the model's default

  double work_ns() const { return static_cast<double>(iterations) * iteration_ns; }
};

}  // namespace gpushare::sim
