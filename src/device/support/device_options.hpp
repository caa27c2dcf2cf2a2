// device_options.hpp: small pieces that the host and sim devices have in common.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "base/status.hpp"
#include "device/support/address_space.hpp"
#include "device/support/options.hpp"
#include "gpushare/backend.h"

namespace gpushare::device {

// Reads total_gib, total_bytes and granularity. Errors: INVALID_ARGUMENT (both totals given, out of range,
// granularity not a power of two, capacity below one granule).
base::Status read_memory_options(Options& options, uint64_t default_total_bytes,
                                 AddressSpaceOptions* out_space);

// Copies `info` into the caller's struct, at most as many bytes as its struct_size says.
void write_device_info(const gpushare_backend_device_info& info, gpushare_backend_device_info* out_info);

// Errors: INVALID_ARGUMENT (unknown kind, null side of a copy of more than 0 bytes).
base::Status check_copy(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t kind);

// DEVICE_LOST: a scripted fault ended the device.
base::Status device_lost(const char* backend);

// OK, or INVALID_STATE that names what is still open when a device closes.
base::Status leak_report(const char* backend, size_t streams, size_t events, const std::string& memory);

}  // namespace gpushare::device
