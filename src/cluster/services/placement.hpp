// placement.hpp: the solvers for services, a file each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "base/status.hpp"
#include "cluster/services/exact.hpp"
#include "cluster/services/model.hpp"

namespace gpushare::cluster::services {

// Devices that are equal in speed and memory.
struct DeviceClasses {
  std::vector<ExactClass> classes;
  std::vector<std::vector<size_t>> members;  // indices of devices
};
DeviceClasses classify(const std::vector<Device>& devices);

// Most served under one metric of compute: by exact.hpp, for large instances by large_placement. A configuration
// without the metric, or slower than the SLO on a device, is not used there.
Placement place_exactly(const std::vector<Service>& services, const std::vector<Device>& devices,
                        Metric metric);

// The requests that place_best counts as served. kCapacity: the replicas' throughput, as place_exactly does, with
// compute counted by WAO where a service has it, else by WSM, else by AO. kInTime: the requests expected to be answered
// in time when requests come at random (queueing.hpp), with compute counted by WSM where a service has it, since
// batches slow each other when their SM utilisation exceeds a device, else by WAO, else by AO.
enum class Goal { kCapacity, kInTime };

// Ours: most served, among equals the best worst-served service (as part of its rate), among equals the smallest batches.
Placement place_best(const std::vector<Service>& services, const std::vector<Device>& devices, Goal goal);

// Usher as the thesis describes it (its section 5.2): services are grouped in rounds of minimum-weight matching on |sum Creq - sum Mreq|,
// at most four a group; each group tries all its batches and replicas and places compute- and memory-heavy services in turns.
Placement place_by_usher(const std::vector<Service>& services, const std::vector<Device>& devices,
                         Metric metric);

// No placement serves more. `value`: what one serves. The room of each class of devices has a price, by the best of several
// measures of room (Lagrangian relaxation); many classes are taken together, by speed, and count as the best of each group.
double placement_bound(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes,
                       double value);

// For instances too large for an exact search: large neighbourhood search, with the bound of placement_bound(). Deterministic. Time: about
// a second, less for small instances.
ExactResult large_placement(const std::vector<ExactService>& services,
                            const std::vector<ExactClass>& classes);

}  // namespace gpushare::cluster::services
