// placement.hpp: the solvers for services.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "base/status.hpp"
#include "cluster/services/model.hpp"

namespace gpushare::cluster::services {

// Most served under one metric of compute, by exact.hpp. A configuration without the metric, or slower than the SLO on a device, is not
// used there.
Placement place_exactly(const std::vector<Service>& services, const std::vector<Device>& devices,
                        Metric metric);

}  // namespace gpushare::cluster::services
