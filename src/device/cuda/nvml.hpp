// nvml.hpp: NVML, the library that comes with the driver and tells what each process has of a GPU. Nothing but
// context_bytes depends on it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "base/status.hpp"

namespace gpushare::device::cuda {

// All device memory that this process has in use on the GPU with the PCI address (as in gpushare_backend_device_info).
// NVML is loaded at the first call: the library at `driver_path` if it has NVML's functions itself, else
// libnvidia-ml.so.1. NVML is asked on a thread of its own, which is waited for 3 s; while such a thread hangs in NVML no other
// question is asked. Errors: UNSUPPORTED (no NVML; or it does not list this process, as where the process has process
// numbers of its own); NOT_READY (it hangs: ask again later). Thread-safe.
base::Result<uint64_t> process_bytes(const std::string& driver_path, uint32_t pci_address);

}  // namespace gpushare::device::cuda
