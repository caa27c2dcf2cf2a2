// device.hpp: the devices of a cluster, as a document lists them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/fields.hpp"

namespace gpushare::cluster {

inline constexpr uint64_t kDefaultMemoryBytes = uint64_t{16} << 30;

struct Device {
  std::string id;
  uint64_t memory_bytes = kDefaultMemoryBytes;
  double compute_units = 0;  // 0: not said; says the speed where none is given
  std::string node;          // "" is one too: gangs are placed on few nodes
  double speed = 1;          // relative to the device that the profiles are of
  struct Down {
    double from_s = 0;
    double until_s = 0;  // kNever: it does not come back
  };
  std::vector<Down> down;    // when it has failed; in any order, and may overlap
  bool joins_later = false;  // a part of a mix gets it, or so much of it, by a later division than the first
};

bool is_up(const Device& device, double at_s);

// A device fails or comes back.
struct DeviceChange {
  double at_s = 0;
  uint32_t device = 0;
  bool up = true;
};
// All changes in order of time, then of devices. Each device is taken to be up before: one that is not up at 0 fails then.
std::vector<DeviceChange> device_changes(const std::vector<Device>& devices);

// Numbers for the devices' nodes, from 0 in the order of their first device.
std::vector<uint32_t> number_nodes(const std::vector<Device>& devices);

// Reads the field "devices": a number of equal ones, named "0", "1", ..., or a list. Where `may_fail`, a device may say when
// it is down. Errors go to `document`.
std::vector<Device> read_devices(Fields& document, bool may_fail);

}  // namespace gpushare::cluster
