// SPDX-License-Identifier: Apache-2.0
#include "cluster/model/device.hpp"

namespace gpushare::cluster {

std::vector<Device> read_devices(Fields& document) {
  std::vector<Device> devices;
  const Json* value = document.find("devices");
  if (value == nullptr || !value->is_array()) {
    devices.resize(document.whole("devices", 1, kMaxElements));
    for (size_t i = 0; i < devices.size(); ++i) devices[i].id = std::to_string(i);
    return devices;
  }
  Fields::Names seen;
  document.each("devices", 1, [&](Fields& fields, size_t index) {
    Device device;
    device.id = fields.name(seen, index, "id");
    device.memory_bytes = fields.whole("memory_bytes", 1, uint64_t{1} << 50);
    device.compute_units = fields.number_or("compute_units", kPositive, 0);
    device.node = fields.text_or("node", "");
    device.speed = fields.number_or("speed", {0, 1e6, true}, 1);
    devices.push_back(std::move(device));
  });
  return devices;
}

}  // namespace gpushare::cluster
