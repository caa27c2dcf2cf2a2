// gate_link.hpp: leads from the gate of a session to what another process says to it (base/gate_slot.hpp), across the
// replacement of that process. Threads: any.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "base/gate_slot.hpp"
#include "base/mutex.hpp"

namespace gpushare::sched {

class GateLink {
 public:
  // Null: nobody decides now, and nothing is limited.
  std::shared_ptr<base::GateSlot> slot() const {
    const base::MutexLock lock(mutex_);
    return slot_;
  }
  // Whoever waits at the old slot's bell looks again.
  void set(std::shared_ptr<base::GateSlot> slot) {
    {
      const base::MutexLock lock(mutex_);
      slot_.swap(slot);
    }
    if (slot != nullptr) slot->bell().ring();
  }

 private:
  mutable base::Mutex mutex_;
  std::shared_ptr<base::GateSlot> slot_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::sched
