// host_device.hpp: one opened host device: its memory, buses, scripted faults and live objects.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "base/flat_hash.hpp"
#include "base/mutex.hpp"
#include "base/status.hpp"
#include "device/host/host_stream.hpp"
#include "device/support/address_space.hpp"
#include "device/support/fault_table.hpp"
#include "gpushare/backend.h"

namespace gpushare::device::host {

// Handles of backend.h are pointers to these objects; the device keeps each alive until its destroy op, and a
// queued op beyond that where it needs one.
class Device {
 public:
  static base::Result<std::unique_ptr<Device>> open(const char* options);

  // Finishes and stops all streams, before the device is deleted. Errors: INVALID_STATE from a host function.
  base::Status finish();
  // OK, or INVALID_STATE naming what is still open.
  base::Status leaks() const;
  void info(gpushare_backend_device_info* out_info) const;

  uint64_t now_ns() const;
  AddressSpace& memory() { return *memory_; }
  FaultTable& faults() { return faults_; }
  base::Status check_lost() const;

  base::Result<Stream*> create_stream(int32_t priority);
  base::Status destroy_stream(Stream* stream);
  base::Result<Event*> create_event(bool timing);
  base::Status destroy_event(Event* event);

  base::Status enqueue_copy(Stream* stream, uint64_t destination, uint64_t source, uint64_t bytes,
                            uint32_t kind);
  base::Status enqueue_fill(Stream* stream, gpushare_device_address address, uint8_t value, uint64_t bytes);
  base::Status enqueue_callback(Stream* stream, gpushare_host_function function, void* user_data);

 private:
  // Counts the enqueue for the fault table, then passes `op` on.
  base::Status enqueue(Stream* stream, Op op);
  Device(std::unique_ptr<AddressSpace> memory, double copy_gbps);

  const std::unique_ptr<AddressSpace> memory_;
  FaultTable faults_;
  std::atomic<bool> lost_{false};
  Bus to_device_;
  Bus to_host_;
  mutable base::Mutex mutex_;
  base::FlatHashMap<Stream*, std::shared_ptr<Stream>> streams_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<Event*, std::shared_ptr<Event>> events_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::device::host
