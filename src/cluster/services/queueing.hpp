// queueing.hpp: which part of a service's requests is answered in time when they come at random and wait for a batch to fill.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cluster/services/model.hpp"

namespace gpushare::cluster::services {

// The expected part, in [0, 1], of the requests that are answered within the SLO. `throughput_rps` is what all replicas
// of `configuration` can do together, and `speed` that of the slowest device among theirs. A request waits until its
// batch is full or due, or until the batch before it has ended; then it takes the batch's time: batch wait + queue +
// service must be at most the SLO. An overloaded replica begins every batch with requests that are nearly late, so that
// a large batch answers most of them too late. Transfers are part of the profiled latency. Never decreases as the
// throughput grows by more replicas of the same configuration.
double part_in_time(const Service& service, const Configuration& configuration, double throughput_rps,
                    double speed);

}  // namespace gpushare::cluster::services
