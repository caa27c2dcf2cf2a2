// nvml.hpp: NVML, the library that tells programs (and nvidia-smi) how much of a device is in use. The shim answers the questions for memory
// so that they fit what the driver's functions say, and under a limit lists of processes have those of the group alone. It asks for what this process has in
// use itself. Nothing depends on NVML being there. What else NVML says (utilisation, clocks, power) is of the whole device and passes.
// Threads: any.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::shim {

// The shim's function of that name; null: none.
void* nvml_hook(const char* name);
// The program has found `function` for `name` in a library: NVML's own, from now on behind the hook. The hook.
void* nvml_adopt(const char* name, void* function);
// Bytes that this process has in use on the device of that PCI address. False: NVML is not there, or does not know.
bool nvml_process_bytes(const char* pci_address, uint64_t* out_bytes);

}  // namespace gpushare::shim
