// serving.hpp: requests that arrive at random, served by placed replicas on virtual time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/kinds.hpp"
#include "cluster/services/model.hpp"

namespace gpushare::cluster::services {

struct ServingOptions {
  double duration_s = 60;  // of arrivals; what is queued then is served to its end
  double noise = 0;        // relative standard deviation of a batch's time
  uint64_t seed = 1;
  // Devices that fail at duration_s: what they have not answered by then is lost, and counts as dropped.
  std::vector<bool> fails = {};
};

struct ServedService {
  uint64_t requests = 0;
  uint64_t in_time = 0;  // answered within the SLO
  uint64_t late = 0;
  uint64_t dropped = 0;   // could not be answered in time any more when its turn came
  uint64_t unplaced = 0;  // no replica to go to
  double latency_p50_ms = 0, latency_p99_ms = 0;
  std::vector<float> latencies_ms;  // in any order
  double batch_mean = 0;
};

struct ServingResult {
  std::vector<ServedService> services;
  double offered_rps = 0;  // requests that came a second of arrivals
  double goodput_rps = 0;  // answered within the SLO a second of arrivals
  double throughput_rps = 0;
};

// Requests are Poisson at each service's rate and go to the replica with the least work queued, relative to its
// throughput. A replica collects a batch until it is full or until its oldest request would be late if it waited
// longer, drops what would be late even in the smallest batch, and works on one batch at a time; a
// batch that is not full takes the time of the service's smallest profiled one that holds it. Batches under way on a device whose
// compute (WSM where it is known, else WAO, else AO; the replica's share without any) sums to more than 100% when one
// begins are slower by that factor. Deterministic. Errors: EXCEEDS_CAPACITY for more than kMostRequests.
constexpr double kMostRequests = 2e7;
base::Result<ServingResult> serve(const std::vector<Service>& services, const std::vector<Device>& devices,
                                  const Placement& placement, const ServingOptions& options,
                                  std::vector<PlaySpan>* spans);

// The value at that rank, nearest; 0 of none. Reorders the values.
double percentile(std::vector<float>& values, double part);

}  // namespace gpushare::cluster::services
