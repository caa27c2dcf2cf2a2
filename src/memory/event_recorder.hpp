// event_recorder.hpp: the allocations and frees of a device's memory, in order, when somebody asked for them
// to be recorded (DeviceMemoryOptions.record_allocations). Off, it costs one test of a constant.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <vector>

#include "base/mutex.hpp"
#include "device/device.hpp"
#include "memory/device_memory.hpp"

namespace gpushare::memory {

// Thread-safe. Keeps the last `max_events`.
class EventRecorder {
 public:
  // Before the first event only.
  void enable(const device::Device& device, size_t max_events) {
    device_ = &device;
    max_events_ = max_events;
  }
  bool enabled() const { return device_ != nullptr; }
  void record(AllocationEvent::Action action, Kind kind, Address address, uint64_t bytes,
              const device::Stream* stream, SessionId session);
  std::vector<AllocationEvent> events() const;

 private:
  const device::Device* device_ = nullptr;
  size_t max_events_ = 0;
  mutable base::Mutex mutex_;
  std::deque<AllocationEvent> events_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::memory
