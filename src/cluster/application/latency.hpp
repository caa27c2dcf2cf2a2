// latency.hpp: the end-to-end latency of an application, predicted for any units from what its services are seen to do, and the
// division of the units that makes it least.
//
// A service with n units is a queue with n servers (Erlang's C formula), so that the busy time and the visits of one
// division say what every other one would bring: none has to be tried for that. The latency is the sum over the services
// that a request visits, and its 99th percentile is taken as mean + tail x standard deviation.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cluster/application/network.hpp"

namespace gpushare::cluster::application {

struct Belief {
  double visits = 0;  // mean, of a request
  double work_s = 0;  // mean time of a visit on one unit
  // How long visits wait, as part of how long they would with exponential work at random times. (1 + spread^2) / 2 is the
  // usual approximation.
  double wait_factor = 1;
};

// The moments of a request's time, all its visits together. Times in seconds.
struct Moments {
  double mean = 0;
  double variance = 0;
};

// The time that a service adds to a request's, with 1, 2, ... `most` units. Where a unit would be busy more than 98% of the
// time, a backlog grows for the whole round, and visits wait for half of what there is at its end.
std::vector<Moments> time_by_units(const Belief& belief, double load_rps, int64_t most, double round_s);

Moments end_to_end(const std::vector<Belief>& beliefs, double load_rps, const std::vector<int64_t>& units,
                   double round_s);

struct Division {
  int64_t capacity = 0;
  double load_rps = 0;
  double round_s = 0;
  double tail = 0;
  // Empty, or for each service the units that it had; they change by at most max_step.
  std::vector<int64_t> previous;
  int64_t max_step = 0;
};

// All units, at least one for each service, so that mean + tail x standard deviation is least: a sequence of divisions
// that are each exact (maximise_sum) for mean + weight x variance. A weight comes from the deviation before it, so the
// sequence never gets worse, and it ends when it gets no better. Beyond about 10^7 steps of work the sums are maximised
// by hulls.
std::vector<int64_t> divide(const std::vector<Belief>& beliefs, const Division& division);

// All units in proportion to `weights`, at least one each.
std::vector<int64_t> proportional_division(const std::vector<double>& weights, int64_t capacity);

}  // namespace gpushare::cluster::application
