// portfolio.hpp: the placement of services that is played through: the best of all solvers' by a run of the requests
// that are believed to come, then improved.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cluster/services/model.hpp"

namespace gpushare::cluster::services {

// `candidates` is not empty; an earlier one is taken unless a later one answers more in time. Then one change after the
// other is made that answers more: a replica is added, taken away or moved, a service's batch changed. Replicas share a
// device by duty cycle there: what counts is how often their batches meet, not the sum of their compute. Memory always
// fits. Deterministic; the work is bounded, so that nothing is improved among thousands of services.
Placement best_played(const std::vector<Service>& services, const std::vector<Device>& devices,
                      std::vector<Placement> candidates);

}  // namespace gpushare::cluster::services
