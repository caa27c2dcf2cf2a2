// Backends and devices.
// SPDX-License-Identifier: Apache-2.0
#include "device/device.hpp"

#include <vector>

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "device/registry.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

extern "C" {

int32_t gpushare_backend_register(const gpushare_backend_ops* ops) {
  return capi::guard([&]() -> base::Status {
    if (ops == nullptr) return capi::null_argument("ops");
    return device::register_backend(ops);
  });
}

int32_t gpushare_backend_load(const char* absolute_path) {
  return capi::guard([&]() -> base::Status {
    if (absolute_path == nullptr) return capi::null_argument("absolute_path");
    const base::CallbackCalls may_call;  // the plug-in's initialisers
    return device::load_backend(absolute_path);
  });
}

int32_t gpushare_device_count(uint32_t* out_count) {
  return capi::guard([&]() -> base::Status {
    if (out_count == nullptr) return capi::null_argument("out_count");
    *out_count = static_cast<uint32_t>(device::list_devices().size());
    return {};
  });
}

int32_t gpushare_device_get_info(uint32_t index, gpushare_device_info* out_info) {
  return capi::guard([&]() -> base::Status {
    const std::vector<device::Listed> all = device::list_devices();
    if (index >= all.size())
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("index is %u, there are %zu devices", index, all.size())};
    const std::string& spec = all[index].spec;
    gpushare_device_info info = GPUSHARE_DEVICE_INFO_INIT;
    capi::copy_text(info.spec, spec);
    base::Status status = all[index].status;
    if (status.ok()) {
      base::Result<std::unique_ptr<device::Device>> opened = device::Device::open(spec);
      if (opened.ok()) {
        const gpushare_backend_device_info& facts = (*opened)->info();
        capi::copy_text(info.name, facts.name);
        info.capabilities = facts.capabilities;
        info.compute_units = facts.compute_units;
        info.total_bytes = facts.total_bytes;
        info.free_bytes = facts.free_bytes;
      } else {
        status = opened.status();
      }
    }
    info.status = status.code();
    capi::copy_text(info.reason, status.message());
    return capi::write_struct("out_info", info, out_info);
  });
}

}  // extern "C"
