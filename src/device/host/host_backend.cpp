// SPDX-License-Identifier: Apache-2.0
#include "device/host/host_backend.hpp"

#include "device/host/host_device.hpp"
#include "device/support/ops_table.hpp"

namespace gpushare::device {
namespace {

struct HostClasses {
  static constexpr const char* kName = "host";
  using Device = host::Device;
  using Stream = host::Stream;
  using Event = host::Event;
};

}  // namespace

const gpushare_backend_ops* host_backend() {
  static const gpushare_backend_ops ops = [] {
    gpushare_backend_ops table = OpsTable<HostClasses>::make();
    OpsTable<HostClasses>::add_ipc(table);
    return table;
  }();
  return &ops;
}

}  // namespace gpushare::device
