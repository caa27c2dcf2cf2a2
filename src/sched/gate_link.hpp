// gate_link.hpp: leads from the gate of a session to what another process says to it, across the replacement of that process: the
// terms in shared memory (base/gate_slot.hpp), and whether launches need ask at all.
// Threads: any. Lock order: the runtime's lock, the listener's, the gate's, the slot's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "base/gate_slot.hpp"
#include "base/mutex.hpp"

namespace gpushare::sched {

class GateLink {
 public:
  using Asks = std::function<void(bool asks)>;

  // ---- the gate
  // Null: nobody decides now, and nothing is limited.
  std::shared_ptr<base::GateSlot> slot() const {
    const base::MutexLock lock(mutex_);
    return slot_;
  }
  // `asks` is called now and whenever the answer changes. Not from inside the gate's lock.
  void listen(Asks asks) {
    const base::MutexLock lock(listener_mutex_);
    listener_ = std::move(asks);
    if (listener_) listener_(asks_);
  }

  // ---- who hears of the other process
  // Whoever waits at the old slot's bell looks again.
  void set(std::shared_ptr<base::GateSlot> slot) {
    {
      const base::MutexLock lock(mutex_);
      slot_.swap(slot);
    }
    if (slot != nullptr) slot->bell().ring();
  }
  // False: nothing is limited until the other process says so, and launches need not ask.
  void set_asks(bool asks) {
    const base::MutexLock lock(listener_mutex_);
    asks_ = asks;
    if (listener_) listener_(asks);
  }

 private:
  mutable base::Mutex mutex_;
  std::shared_ptr<base::GateSlot> slot_ GPUSHARE_GUARDED_BY(mutex_);
  base::Mutex listener_mutex_;
  bool asks_ GPUSHARE_GUARDED_BY(listener_mutex_) = true;
  Asks listener_ GPUSHARE_GUARDED_BY(listener_mutex_);
};

}  // namespace gpushare::sched
