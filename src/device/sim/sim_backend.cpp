// SPDX-License-Identifier: Apache-2.0
#include "device/sim/sim_backend.hpp"

#include "device/sim/sim_device.hpp"
#include "device/support/ops_table.hpp"

namespace gpushare::device {
namespace {

struct SimClasses {
  static constexpr const char* kName = "sim";
  using Device = sim::Device;
  using Stream = sim::Stream;
  using Event = sim::Event;
};

}  // namespace

const gpushare_backend_ops* sim_backend() {
  static const gpushare_backend_ops ops = [] {
    gpushare_backend_ops table = OpsTable<SimClasses>::make();
    table.work_launch = OpsTable<SimClasses>::work_launch;
    return table;
  }();
  return &ops;
}

}  // namespace gpushare::device
