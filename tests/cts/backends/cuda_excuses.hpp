// cuda_excuses.hpp: what the cuda backend is excused from, on a GPU as on the stand-in: 16 tests.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cts.hpp"

namespace gpushare::cts {

inline std::vector<Excuse> cuda_excuses() {
  return {
      {"ipc: *", "not in the cuda backend yet"},
      {"work: *", "a GPU does real work; modelled work is for simulating devices"},
      {"faults: *",
       "scripted faults are for test devices; tests/unit/device/cuda makes the stand-in's driver fail "
       "instead"},
      {"launch: a function may enqueue on another stream",
       "CUDA forbids driver calls inside host functions; the backend answers INVALID_STATE"},
  };
}

}  // namespace gpushare::cts
