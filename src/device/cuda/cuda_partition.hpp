// cuda_partition.hpp: shares of a device's SMs, as green contexts (CUDA 12.5).
//
// The SMs are split once into groups of the smallest size that the device allows. A partition takes whole groups, no
// group serves two partitions, and the groups of a closed partition serve again. There is only one split, because the
// driver joins only groups of the same split into one green context.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "device/cuda/cuda_context.hpp"
#include "gpushare/backend.h"

namespace gpushare::device::cuda {

class Device;

class Partition {
 public:
  Partition(Device& device, api::CUgreenCtx handle, std::vector<uint32_t> groups, uint32_t compute_units)
      : device_(device), handle_(handle), groups_(std::move(groups)), compute_units_(compute_units) {}
  Device& device() const { return device_; }
  api::CUgreenCtx handle() const { return handle_; }
  const std::vector<uint32_t>& groups() const { return groups_; }
  uint32_t compute_units() const { return compute_units_; }

 private:
  Device& device_;
  const api::CUgreenCtx handle_;
  const std::vector<uint32_t> groups_;
  const uint32_t compute_units_;
};

// The groups of one device and their holders. Thread-safe.
class PartitionTable {
 public:
  explicit PartitionTable(Context& context) : context_(context) {}

  // Whether the driver and the device have green contexts. Splits at the first call.
  bool supported();
  // Errors: UNSUPPORTED.
  base::Status info(gpushare_backend_partition_info* out_info);
  // Takes groups that have together at least `compute_units`. Errors: UNSUPPORTED, INVALID_ARGUMENT (0),
  // EXCEEDS_CAPACITY, DEVICE_OUT_OF_MEMORY (too few units are free now).
  struct Share {
    api::CUgreenCtx handle;
    std::vector<uint32_t> groups;
    uint32_t compute_units;
  };
  base::Result<Share> create(uint32_t compute_units);
  // Destroys the green context and frees its groups.
  base::Status destroy(const Partition& partition);

 private:
  base::Status split() GPUSHARE_REQUIRES(mutex_);
  base::Status check_supported() GPUSHARE_REQUIRES(mutex_);

  Context& context_;
  base::Mutex mutex_;
  bool tried_ GPUSHARE_GUARDED_BY(mutex_) = false;
  base::Status why_not_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<api::CUdevResource> groups_ GPUSHARE_GUARDED_BY(mutex_);
  std::vector<bool> taken_ GPUSHARE_GUARDED_BY(mutex_);
  uint32_t total_units_ GPUSHARE_GUARDED_BY(mutex_) = 0;
};

}  // namespace gpushare::device::cuda
