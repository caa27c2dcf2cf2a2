// SPDX-License-Identifier: Apache-2.0
#include "device/support/device_options.hpp"

#include <algorithm>
#include <cstring>

#include "base/units.hpp"

namespace gpushare::device {

base::Status read_memory_options(Options& options, uint64_t default_total_bytes,
                                 AddressSpaceOptions* out_space) {
  constexpr uint64_t kGib = 1ull << 30;
  constexpr uint64_t kMostGib = 16ull * 1024;
  GPUSHARE_ASSIGN_OR_RETURN(const double total_gib, options.get_double("total_gib", 0, 1e-3, kMostGib));
  GPUSHARE_ASSIGN_OR_RETURN(const uint64_t total_bytes,
                            options.get_bytes("total_bytes", 0, AddressSpace::kPageBytes, kMostGib * kGib));
  GPUSHARE_ASSIGN_OR_RETURN(const uint64_t granularity,
                            options.get_bytes("granularity", 2 << 20, AddressSpace::kPageBytes, kGib));
  if (total_gib != 0 && total_bytes != 0) {
    return {GPUSHARE_INVALID_ARGUMENT, out_space->backend + ": give total_gib or total_bytes, not both"};
  }
  if ((granularity & (granularity - 1)) != 0) {
    return {GPUSHARE_INVALID_ARGUMENT, out_space->backend + ": option granularity is not a power of two"};
  }
  uint64_t total = default_total_bytes;
  if (total_gib != 0) total = static_cast<uint64_t>(total_gib * static_cast<double>(kGib));
  if (total_bytes != 0) total = total_bytes;
  out_space->total_bytes = total / AddressSpace::kPageBytes * AddressSpace::kPageBytes;
  out_space->granularity_bytes = granularity;
  return {};
}

void write_device_info(const gpushare_backend_device_info& info, gpushare_backend_device_info* out_info) {
  gpushare_backend_device_info copy = info;
  copy.struct_size = out_info->struct_size;
  std::memcpy(out_info, &copy, std::min<size_t>(out_info->struct_size, sizeof(copy)));
}

base::Status check_copy(uint64_t destination, uint64_t source, uint64_t bytes, uint32_t kind) {
  if (kind > GPUSHARE_COPY_DEVICE_TO_DEVICE) {
    return {GPUSHARE_INVALID_ARGUMENT, base::format("copy kind %u is unknown; allowed is 0 to 2", kind)};
  }
  if (bytes > 0 && (destination == 0 || source == 0)) {
    return {GPUSHARE_INVALID_ARGUMENT,
            "a copy of " + base::format_bytes(bytes) + " from or to a null address"};
  }
  return {};
}

base::Status device_lost(const char* backend) {
  return {GPUSHARE_DEVICE_LOST,
          base::format("the %s device was lost (scripted fault); close it and open another", backend)};
}

base::Status leak_report(const char* backend, size_t streams, size_t events, const std::string& memory) {
  std::string text = memory;
  if (events > 0) text = std::to_string(events) + " event(s)" + (text.empty() ? "" : ", ") + text;
  if (streams > 0) text = std::to_string(streams) + " stream(s)" + (text.empty() ? "" : ", ") + text;
  if (text.empty()) return {};
  return {GPUSHARE_INVALID_STATE,
          std::string(backend) + ": closed with " + text + " still open; they were released"};
}

}  // namespace gpushare::device
