// SPDX-License-Identifier: Apache-2.0
#include "cluster/model/device.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "cluster/never.hpp"

namespace gpushare::cluster {

std::vector<uint32_t> number_nodes(const std::vector<Device>& devices) {
  std::unordered_map<std::string, uint32_t> seen;
  std::vector<uint32_t> numbers;
  for (const Device& device : devices)
    numbers.push_back(seen.emplace(device.node, static_cast<uint32_t>(seen.size())).first->second);
  return numbers;
}

bool is_up(const Device& device, double at_s) {
  return std::none_of(device.down.begin(), device.down.end(),
                      [&](const Device::Down& down) { return down.from_s <= at_s && at_s < down.until_s; });
}

std::vector<DeviceChange> device_changes(const std::vector<Device>& devices) {
  std::vector<DeviceChange> changes;
  for (uint32_t d = 0; d < devices.size(); ++d) {
    std::vector<std::pair<double, int>> events;  // one more or one less of the times in which it is down
    for (const Device::Down& down : devices[d].down) {
      if (down.from_s >= down.until_s) continue;
      events.emplace_back(down.from_s, 1);
      if (down.until_s < kNever) events.emplace_back(down.until_s, -1);
    }
    std::sort(events.begin(), events.end());
    bool before = true;
    int down = 0;
    for (size_t i = 0; i < events.size(); ++i) {
      down += events[i].second;
      const bool same_time = i + 1 < events.size() && events[i + 1].first == events[i].first;
      if (same_time || (down == 0) == before) continue;
      before = !before;
      changes.push_back({events[i].first, d, before});
    }
  }
  std::stable_sort(changes.begin(), changes.end(),
                   [](const DeviceChange& a, const DeviceChange& b) { return a.at_s < b.at_s; });
  return changes;
}

namespace {

std::vector<Device::Down> read_down(Fields& device) {
  std::vector<Device::Down> out;
  device.about("down", "For run: when the device has failed. Without until_s it does not come back.");
  device.each("down", 1, [&](Fields& fields, size_t) {
    Device::Down down;
    const double earliest = out.empty() ? 0 : out.back().until_s;
    down.from_s = fields.number("from_s", kNotNegative);
    down.until_s = fields.has("until_s") ? fields.number("until_s", kPositive) : kNever;
    if (fields.ok() && down.from_s < earliest)
      fields.refuse(
          "from_s",
          "the device is down already; give the times in order, and an until_s to all but the last");
    if (fields.ok() && down.until_s <= down.from_s) fields.refuse("until_s", "it must be after from_s");
    out.push_back(down);
  });
  return out;
}

}  // namespace

std::vector<Device> read_devices(Fields& document, bool may_fail) {
  document.about("devices", "A number of equal devices of 16 GiB, or a list of them.");
  std::vector<Device> devices(document.whole_or_list("devices", 1, kMaxElements));
  for (size_t i = 0; i < devices.size(); ++i) devices[i].id = std::to_string(i);
  if (!devices.empty()) return devices;
  Fields::Names seen;
  // Without a speed, a device has that of its compute units: as many a speed of 1 as the first device with both has, or
  // as the device with the most has, which then is the one that profiles are of.
  double stated = 0, most = 0;
  std::vector<bool> has_speed;
  document.each("devices", 1, [&](Fields& fields, size_t index) {
    Device device;
    device.id = fields.name(seen, index, "id");
    device.memory_bytes = fields.whole("memory_bytes", 1, uint64_t{1} << 50);
    fields.about("compute_units",
                 "Says the speed of a device that has none: over those of a device of speed 1, as the first "
                 "device says that has both, or else over the most.");
    device.compute_units = fields.number_or("compute_units", kPositive, 0);
    fields.about("node", "Gangs of training jobs are placed on as few nodes as possible.");
    device.node = fields.text_or("node", "");
    if (!may_fail) fields.never("down", "documents of this kind do not say when devices fail");
    if (may_fail && fields.has("down")) device.down = read_down(fields);
    fields.about("speed", "Relative to the device that profiles are of.");
    device.speed = fields.number_or("speed", {0, 1e6, true}, 1);
    has_speed.push_back(fields.has("speed"));
    most = std::max(most, device.compute_units);
    if (stated == 0 && has_speed.back()) stated = device.compute_units / device.speed;
    devices.push_back(std::move(device));
  });
  for (size_t i = 0; i < devices.size(); ++i)
    if (!has_speed[i] && devices[i].compute_units > 0)
      devices[i].speed = devices[i].compute_units / (stated > 0 ? stated : most);
  return devices;
}

}  // namespace gpushare::cluster
