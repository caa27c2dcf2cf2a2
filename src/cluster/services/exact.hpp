// exact.hpp: which batch each service runs with, on how many devices and which, so that the most requests are served:
// branch and bound.
//
// The integer program (thesis on interference-aware serving, chapter 5): maximise the sum over services of w, w <= rate and
// w <= throughput x replicas, one batch a service, at most one replica of a service a device, compute and memory at
// most 100% a device. (The thesis prints the coupling of w and replicas with the wrong sign; its solutions satisfy this
// form.)
//
// A node decides one service: its batch and its replicas on each class of equal devices. Bounds are the linear
// relaxations of multiple-choice knapsacks over the total area, and over areas under dual feasible functions (Martello
// and Toth 1990: sizes above 1 - x count as 1, sizes below x as 0), which know that two replicas above a half do not
// fit together. Nodes whose replicas cannot be packed are cut.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace gpushare::cluster::services {

// One way to run a service on a device of speed 1, and the part of each class's device that a replica takes.
struct ExactOption {
  size_t tag = 0;              // the caller's
  double throughput = 0;       // > 0, on a device of speed 1
  double compute = 0;          // in [0, 1]
  std::vector<double> memory;  // in [0, 1] for each class; above 1: does not fit there, or is too slow there
  double penalty = 0;          // taken off the value of a service that runs this way: to tell ties apart
  // The requests served by replicas of `throughput` together, on devices no slower than `speed`: at most the throughput
  // and at most the rate. Empty: the less of the two.
  std::function<double(double throughput, double speed)> served = {};
};
struct ExactService {
  double rate = 0;  // > 0
  std::vector<ExactOption> options;
};
struct ExactClass {
  size_t devices = 0;
  double speed = 1;
};
struct ExactResult;
struct ExactLimits {
  uint64_t nodes = 200'000;  // of the search; when they are spent, what was found is returned with its bound
  uint64_t work = 500'000'000;  // likewise, of steps of bounds and packings: some seconds
  const ExactResult* start =
      nullptr;             // a placement that is known, with its bound; not with least_ratio or penalties
  double target = 0;       // > 0: stop as soon as the value reaches it
  double least_ratio = 0;  // every service with options is served at least this part of its rate
};
struct ExactReplicas {
  size_t service = 0;
  size_t option = 0;  // index into its options
  size_t device = 0;  // of its class
  size_t of_class = 0;
};
struct ExactResult {
  std::vector<ExactReplicas> replicas;
  double value = 0;  // 0 with no replicas if nothing meets the limits
  double bound = 0;  // no placement has more
  bool optimal = false;
  bool feasible = false;  // something meets least_ratio
  uint64_t nodes = 0;
};

// Deterministic. Time: for up to some ten services on ten devices milliseconds; beyond, limits.nodes and limits.work.
ExactResult solve_exact(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes,
                        const ExactLimits& limits);

}  // namespace gpushare::cluster::services
