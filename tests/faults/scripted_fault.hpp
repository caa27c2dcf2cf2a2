// scripted_fault.hpp: arms the scripted faults of a runtime's device, and tells whether one has fired.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "support/executor_fixture.hpp"

namespace gpushare::test {

inline void arm(executor::Runtime& runtime, uint32_t kind, uint64_t at_call, double factor = 0) {
  gpushare_backend_fault fault{};
  fault.struct_size = sizeof fault;
  fault.kind = kind;
  fault.at_call = at_call;
  fault.factor = factor;
  REQUIRE(runtime.device().set_fault(fault).ok());
}

// One call of the kind, straight to the device. True if it failed: the fault had not fired before.
inline bool fires(device::Device& device, uint32_t kind) {
  switch (kind) {
    case GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY: {
      const auto block = device.alloc(4096);
      if (block.ok()) REQUIRE(device.free(*block).ok());
      return !block.ok();
    }
    case GPUSHARE_FAULT_MAP_FAILS: {
      const uint64_t granule = device.info().mapping_granularity_bytes;
      const auto range = device.va_reserve(granule);
      const auto memory = device.phys_create(granule);
      REQUIRE((range.ok() && memory.ok()));
      const base::Status mapped = device.va_map(*range, granule, *memory, 0);
      if (mapped.ok()) REQUIRE(device.va_unmap(*range, granule).ok());
      REQUIRE(device.phys_release(*memory).ok());
      REQUIRE(device.va_free(*range, granule).ok());
      return !mapped.ok();
    }
    case GPUSHARE_FAULT_STREAM_CREATE_FAILS:
      return !device.create_stream().ok();
    case GPUSHARE_FAULT_HOST_OUT_OF_MEMORY: {
      const auto block = device.host_alloc(64);
      if (block.ok()) REQUIRE(device.host_free(*block).ok());
      return !block.ok();
    }
    default: {
      const auto stream = device.create_stream();
      REQUIRE(stream.ok());
      const base::Status launched = stream->launch_host([](void*) {}, nullptr);
      REQUIRE(stream->synchronize().ok());
      return !launched.ok();
    }
  }
}

// The fault armed for call n has fired: it does not at any of n more calls.
inline bool has_fired(executor::Runtime& runtime, uint32_t kind, uint64_t n) {
  bool fired = true;
  for (uint64_t call = 0; call < n && fired; ++call) fired = !fires(runtime.device(), kind);
  arm(runtime, GPUSHARE_FAULT_NONE, 0);
  return fired;
}

}  // namespace gpushare::test
