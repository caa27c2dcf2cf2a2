// cuda_device.hpp: one opened CUDA device: context, memory, event pools, streams and partitions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>

#include "base/flat_hash.hpp"
#include "base/mutex.hpp"
#include "base/status.hpp"
#include "device/cuda/cuda_context.hpp"
#include "device/cuda/cuda_memory.hpp"
#include "device/cuda/cuda_partition.hpp"
#include "device/cuda/cuda_stream.hpp"
#include "gpushare/backend.h"

namespace gpushare::device::cuda {

// Takes the place of the test devices' scripted faults, because a real device has none to set. (Tests let the stand-in
// for the driver fail instead, which tests the paths that really run.)
struct NoFaults {
  static constexpr bool fires(uint32_t) { return false; }
  static base::Status set(const gpushare_backend_fault*) {
    return {GPUSHARE_UNSUPPORTED, "the cuda device has no scripted faults"};
  }
};

// Handles of backend.h are pointers to these objects; the device keeps each alive until its destroy op.
// Thread-safe.
class Device {
 public:
  static base::Result<std::unique_ptr<Device>> open(uint32_t index, const char* options);
  // Releases the remaining objects, as far as the context still serves.
  ~Device();

  // Waits for all streams, unless the context is lost. Errors: INVALID_STATE (in a host function; a stream
  // captures).
  base::Status finish();
  // Errors: INVALID_STATE naming what is still open.
  base::Status leaks() const;
  base::Status info(gpushare_backend_device_info* out_info);
  // The bytes of the GPU that this process has in addition to the memory of its open devices. Errors: those of open()
  // for its arguments, UNSUPPORTED.
  static base::Result<uint64_t> context_bytes(uint32_t index, const char* options);

  Context& context() { return *context_; }
  Memory& memory() { return *memory_; }
  EventPool& events() { return events_; }
  PartitionTable& partitions() { return partitions_; }
  WaitMode waits() const { return waits_; }
  // How long a wait polls before it sleeps.
  uint64_t spin_ns() const { return spin_ns_; }
  CallbackWaits& callback_waits() { return callback_waits_; }
  base::Status check_lost() const { return context_->check_lost(); }
  NoFaults faults() const { return {}; }
  uint64_t now_ns() const;

  base::Result<Stream*> create_stream(int32_t priority, Partition* partition = nullptr);
  base::Result<Stream*> adopt_stream(api::CUstream handle);
  base::Status destroy_stream(Stream* stream);
  base::Result<Event*> create_event(bool timing);
  base::Status destroy_event(Event* event);
  base::Result<Partition*> create_partition(uint32_t compute_units);
  // Errors: INVALID_STATE (it has streams).
  base::Status destroy_partition(Partition* partition);

  base::Status enqueue_copy(Stream* stream, uint64_t destination, uint64_t source, uint64_t bytes,
                            uint32_t kind);
  base::Status enqueue_fill(Stream* stream, gpushare_device_address address, uint8_t value, uint64_t bytes);
  base::Status enqueue_callback(Stream* stream, gpushare_host_function function, void* user_data);

 private:
  Device(std::unique_ptr<Context> context, std::unique_ptr<Memory> memory, WaitMode waits, uint64_t spin_ns);
  base::Status read_facts();

  const std::unique_ptr<Context> context_;
  const std::unique_ptr<Memory> memory_;
  const WaitMode waits_;
  const uint64_t spin_ns_;
  EventPool events_;
  CallbackWaits callback_waits_;
  PartitionTable partitions_;
  gpushare_backend_device_info facts_{};  // fixed at open
  std::atomic<bool> told_of_queues_{false};

  mutable base::Mutex mutex_;
  base::FlatHashMap<Stream*, std::unique_ptr<Stream>> streams_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<Event*, std::unique_ptr<Event>> live_events_ GPUSHARE_GUARDED_BY(mutex_);
  base::FlatHashMap<Partition*, std::unique_ptr<Partition>> live_partitions_ GPUSHARE_GUARDED_BY(mutex_);
};

}  // namespace gpushare::device::cuda
