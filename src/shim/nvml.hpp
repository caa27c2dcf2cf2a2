// nvml.hpp: NVML, the library that tells programs (and nvidia-smi) how much of a device is in use. The shim's answers
// about memory agree with those of the driver's functions. Under a limit, lists of processes name only those of the
// group. The shim also asks NVML how much this process uses. Nothing depends on NVML being there. NVML's other values
// (utilisation, clocks, power) pass unchanged and are of the whole device. Threads: any.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::shim {

// The shim's function of that name; null: none.
void* nvml_hook(const char* name);
// The program has found NVML's own `function` of this name in a library. The hook calls it from now on. Returns the hook.
void* nvml_adopt(const char* name, void* function);
// Bytes that this process has in use on the device of that PCI address. False: NVML is not there, does not know, or does
// not answer. NVML is asked on a thread of its own, which is waited for a few seconds. No question is asked while such a
// thread hangs in NVML, or where no thread can be started.
bool nvml_process_bytes(const char* pci_address, uint64_t* out_bytes);

// The same, asked on the calling thread, which waits for as long as NVML takes.
bool ask_process_bytes(const char* pci_address, uint64_t* out_bytes);

// A child of fork has no thread that hangs in NVML.
void forget_nvml_in_child();

}  // namespace gpushare::shim
