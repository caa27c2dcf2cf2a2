// fault_table.hpp: the scripted faults of one test device (group "faults" of backend.h). Thread-safe. With no
// fault set a check costs one relaxed load.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "gpushare/backend.h"

namespace gpushare::device {

class FaultTable {
 public:
  // Arms one fault a kind, replacing an earlier one of that kind; kind NONE disarms all. Errors:
  // INVALID_ARGUMENT (unknown kind, at_call 0, factor outside 1 to 1000, struct too small).
  base::Status set(const gpushare_backend_fault* fault);

  // Counts a call of `kind`. True if this call must fail; the fault is then spent.
  bool fires(uint32_t kind);

  // The fault that hits an enqueue: at most one of the three, in this order.
  struct Verdict {
    bool device_lost = false;
    bool launch_fails = false;
    double slow_factor = 0;  // 0: not slowed by this call
  };
  Verdict on_enqueue();

 private:
  struct Armed {
    uint64_t calls_left = 0;  // 0 = not armed
    double factor = 0;
  };
  bool count_down(uint32_t kind) GPUSHARE_REQUIRES(mutex_);

  static constexpr uint32_t kKinds = GPUSHARE_FAULT_HOST_OUT_OF_MEMORY + 1;
  std::atomic<uint32_t> armed_count_{0};
  base::Mutex mutex_;
  std::array<Armed, kKinds> armed_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::device
