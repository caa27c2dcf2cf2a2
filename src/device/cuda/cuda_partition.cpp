// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/cuda_partition.hpp"

#include <algorithm>
#include <cstring>

namespace gpushare::device::cuda {

base::Status PartitionTable::split() {
  const Driver& driver = context_.driver();
  if (!driver.has_partitions()) {
    return {GPUSHARE_UNSUPPORTED,
            base::format("SM partitions need a driver of CUDA 12.5; this one is CUDA %d.%d",
                         driver.version() / 1000, driver.version() % 1000 / 10)};
  }
  GPUSHARE_ENTER_CONTEXT(context_);
  api::CUdevResource all{};
  api::CUresult result = driver.cuDeviceGetDevResource(context_.device(), &all, api::CU_DEV_RESOURCE_TYPE_SM);
  unsigned count = 0;
  // The device rounds a group of 1 up to the smallest it can isolate.
  if (result == api::CUDA_SUCCESS)
    result = driver.cuDevSmResourceSplitByCount(nullptr, &count, &all, nullptr, 0, 1);
  if (result == api::CUDA_SUCCESS) {
    groups_.resize(count);
    result = driver.cuDevSmResourceSplitByCount(groups_.data(), &count, &all, nullptr, 0, 1);
  }
  if (result != api::CUDA_SUCCESS || count == 0) {
    groups_.clear();
    if (is_sticky(result)) return context_.status(result, "cuDevSmResourceSplitByCount");
    return {
        GPUSHARE_UNSUPPORTED,
        base::format("this device cannot be split into SM partitions: %s (%d)", result_name(result), result),
        result};
  }
  groups_.resize(count);
  taken_.assign(count, false);
  total_units_ = all.sm.smCount;
  return {};
}

base::Status PartitionTable::check_supported() {
  if (!tried_) {
    why_not_ = split();
    tried_ = why_not_.code() !=
             GPUSHARE_INVALID_STATE;  // a call from a host function says nothing about the device
  }
  return why_not_;
}

bool PartitionTable::supported() {
  base::MutexLock lock(mutex_);
  return check_supported().ok();
}

base::Status PartitionTable::info(gpushare_backend_partition_info* out_info) {
  base::MutexLock lock(mutex_);
  GPUSHARE_RETURN_IF_ERROR(check_supported());
  gpushare_backend_partition_info info{};
  info.struct_size = out_info->struct_size;
  info.compute_units = total_units_;
  info.granularity_units = groups_.front().sm.smCount;
  for (size_t i = 0; i < groups_.size(); ++i) {
    info.partitionable_units += groups_[i].sm.smCount;
    if (!taken_[i]) info.free_units += groups_[i].sm.smCount;
  }
  std::memcpy(out_info, &info, std::min<size_t>(out_info->struct_size, sizeof(info)));
  return {};
}

base::Result<PartitionTable::Share> PartitionTable::create(uint32_t compute_units) {
  base::MutexLock lock(mutex_);
  GPUSHARE_RETURN_IF_ERROR(check_supported());
  if (compute_units == 0) return base::Status(GPUSHARE_INVALID_ARGUMENT, "a partition of 0 compute units");
  Share share{};
  uint32_t free_units = 0;
  uint32_t all_units = 0;
  std::vector<api::CUdevResource> resources;
  for (uint32_t i = 0; i < groups_.size(); ++i) {
    all_units += groups_[i].sm.smCount;
    if (taken_[i]) continue;
    free_units += groups_[i].sm.smCount;
    if (share.compute_units >= compute_units) continue;
    share.groups.push_back(i);
    share.compute_units += groups_[i].sm.smCount;
    resources.push_back(groups_[i]);
  }
  if (compute_units > all_units) {
    return base::Status(GPUSHARE_EXCEEDS_CAPACITY,
                        base::format("a partition of %u compute units; %u of the device can be partitioned",
                                     compute_units, all_units));
  }
  if (share.compute_units < compute_units) {
    return base::Status(
        GPUSHARE_DEVICE_OUT_OF_MEMORY,
        base::format("a partition of %u compute units; %u are free, other partitions have the rest",
                     compute_units, free_units));
  }
  GPUSHARE_ENTER_CONTEXT(context_);
  const Driver& driver = context_.driver();
  api::CUdevResourceDesc desc = nullptr;
  GPUSHARE_RETURN_IF_ERROR(context_.status(
      driver.cuDevResourceGenerateDesc(&desc, resources.data(), static_cast<unsigned>(resources.size())),
      "cuDevResourceGenerateDesc"));
  GPUSHARE_RETURN_IF_ERROR(context_.status(
      driver.cuGreenCtxCreate(&share.handle, desc, context_.device(), api::CU_GREEN_CTX_DEFAULT_STREAM),
      "cuGreenCtxCreate"));
  for (const uint32_t group : share.groups) taken_[group] = true;
  return share;
}

base::Status PartitionTable::destroy(const Partition& partition) {
  base::MutexLock lock(mutex_);
  for (const uint32_t group : partition.groups()) taken_[group] = false;
  if (context_.lost()) return {};
  GPUSHARE_ENTER_CONTEXT(context_);
  return context_.status(context_.driver().cuGreenCtxDestroy(partition.handle()), "cuGreenCtxDestroy");
}

}  // namespace gpushare::device::cuda
