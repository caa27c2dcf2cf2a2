// gpu_identity.hpp: the names and versions that NVML (a library of NVIDIA's driver) has for GPUs and for the instances
// into which MIG divides them. For people and for a cluster's scheduler; gpushare decides nothing by them.
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

// The identity of the CUDA device at a PCI address (as in gpushare_backend_device_info). On a GPU in MIG mode: of the
// instance that CUDA_VISIBLE_DEVICES names, else of the first one, because CUDA shows a process one instance. Empty
// where there is no NVML. Blocks for 20 s at most: an NVML that hangs counts as none. Thread-safe.
GpuIdentity identity_of(uint32_t pci_address);
// All GPUs of the machine that this process may see; a GPU in MIG mode as its instances. Blocks as identity_of does.
std::vector<GpuIdentity> all_gpus();

}  // namespace gpushare::daemon
