// host_device.hpp: one opened host device: its buses, and streams on threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "device/host/host_stream.hpp"

namespace gpushare::device::host {

class Device final : public SoftwareDevice<Device, Stream, Event, Op> {
 public:
  static base::Result<std::unique_ptr<Device>> open(const char* options);

  // Finishes and stops all streams, before the device is deleted. Errors: INVALID_STATE from a host function.
  base::Status finish();
  void info(gpushare_backend_device_info* out_info) const;
  uint64_t now_ns() const;

  base::Result<Stream*> create_stream(int32_t priority);
  base::Status destroy_stream(Stream* stream);
  base::Status enqueue_copy(Stream* stream, uint64_t destination, uint64_t source, uint64_t bytes,
                            uint32_t kind);

 private:
  friend SoftwareDevice;
  // Counts the enqueue for the fault table, then passes `op` on.
  base::Status enqueue(Stream& stream, Op op);
  Device(std::unique_ptr<AddressSpace> memory, double copy_gbps);

  Bus to_device_;
  Bus to_host_;
};

}  // namespace gpushare::device::host
