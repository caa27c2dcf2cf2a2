// gpu_identity.hpp: what NVML, the library that comes with NVIDIA's driver, says of GPUs and of the instances into which MIG divides
// them. For people and for a cluster's scheduler; nothing here is decided by it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gpushare::daemon {

struct GpuIdentity {
  std::string uuid;            // GPU-..., or MIG-... of an instance
  std::string parent_uuid;     // of an instance: its GPU's
  std::string product;         // NVIDIA H100 80GB HBM3
  std::string mig_profile;     // of an instance: 1g.10gb
  std::string driver_version;  // 550.54.15
  uint64_t total_bytes = 0;
};

// Of the CUDA device at that PCI address (as gpushare_backend_device_info has it). On a GPU in MIG mode it is the instance that
// CUDA_VISIBLE_DEVICES names, else the first one, since CUDA shows a process one instance. Empty where there is no NVML. May block.
GpuIdentity identity_of(uint32_t pci_address);
// All GPUs of the machine that this process may see; a GPU in MIG mode as its instances.
std::vector<GpuIdentity> all_gpus();

}  // namespace gpushare::daemon
