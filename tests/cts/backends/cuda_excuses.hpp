// cuda_excuses.hpp: what the cuda backend is excused from, on a GPU as on the stand-in: 19 tests.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cts.hpp"

namespace gpushare::cts {

inline std::vector<Excuse> cuda_excuses() {
  return {
      {"ipc: another process maps part of the memory",
       "a descriptor stands for one handle of the driver, and cuMemMap accepts no offset into one"},
      {"ipc: what was exported for reading cannot be imported for writing",
       "descriptors of the driver carry no access; backend.h leaves it to the import's"},
      {"ipc: an import names the bytes that were created",
       "the driver does not tell the size behind a descriptor; mapping more than there is fails there"},
      {"work: *", "a GPU does real work; modelled work is for simulating devices"},
      {"faults: *",
       "scripted faults are for test devices; tests/unit/device/cuda makes the stand-in's driver fail "
       "instead"},
      {"launch: a function may enqueue on another stream",
       "CUDA forbids driver calls inside host functions; the backend answers INVALID_STATE"},
  };
}

}  // namespace gpushare::cts
