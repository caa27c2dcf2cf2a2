// cuda_excuses.hpp: what the cuda backend is excused from, on a GPU as on the stand-in.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cts.hpp"

namespace gpushare::cts {

inline std::vector<Excuse> cuda_excuses() {
  return {
      {"work: *", "a GPU does real work; modelled work is for simulating devices"},
      {"faults: *",
       "scripted faults are for test devices; tests/unit/device/cuda makes the stand-in's driver fail "
       "instead"},
      {"launch: a function may enqueue on another stream",
       "CUDA forbids driver calls inside host functions; the backend answers INVALID_STATE"},
      {"errors: copies and fills outside live memory are refused",
       "copies may name memory of other users of the context (cudaMalloc); the driver checks it, and not on "
       "every path"},
      {"errors: reserved but unmapped addresses are refused",
       "as above: only the driver knows every address in use"},
  };
}

}  // namespace gpushare::cts
