// src/cluster/application: dividing units among the services of one application by its end-to-end latency (Cilantro;
// thesis 002, sections 3.4.2 and 3.7.2): the application as it is played, the latency that is predicted from what services
// are seen to do, and the policies. application_kind.cpp calls it; it calls solve/ and learn/. No thread, no clock.
//
// network.hpp: the application as it is played: requests go from service to service and wait for a free unit at each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gpushare::cluster::application {

struct Service {
  std::string name;
  double work_s = 0;  // > 0, mean time of a visit on one unit
  double spread = 1;  // standard deviation of that time over its mean
  // From this round on a visit's time is multiplied by the factor.
  uint64_t change_round = 0;
  double change_factor = 1;
};

// A request of a kind goes through the kind's stages in order. It visits all services of a stage at the same time, and
// goes on when the last of them has answered. A unit is free again as soon as its own visit has ended.
struct RequestKind {
  double part = 1;                          // > 0, of all requests, relative to the other kinds' parts
  std::vector<std::vector<size_t>> stages;  // indices of services; no stage is empty
};

struct Application {
  std::vector<Service> services;
  std::vector<RequestKind> kinds;
  double slo_s = 0;  // the objective of a request's latency

  // Mean number of visits of each service by a request.
  std::vector<double> visits() const;
  // The application as it is in that round, without changes to come.
  Application at(uint64_t round) const;
};

// The use of a service in a round, as container runtimes report it.
struct Usage {
  double busy = 0;        // mean units at work
  double waiting = 0;     // mean visits that wait for a unit
  double visits_rps = 0;  // visits that ended, a second
};

struct Round {
  double load_rps = 0;                        // requests that came
  double answered_rps = 0;                    // requests that were answered within the round
  double mean_s = 0, p99_s = 0, in_time = 1;  // of the requests that came, from end to end; in_time is a part
  std::vector<Usage> usage;                   // [service]
};

// Plays `seconds` of requests that come at random (Poisson), from an empty application, with so many units for each
// service (at least one). A unit works on one visit at a time; the visit that has waited longest is next. All requests
// that came are answered, those of an overloaded round after its end. Deterministic by seed.
Round play_round(const Application& application, const std::vector<int64_t>& units, double load_rps,
                 double seconds, uint64_t seed);

}  // namespace gpushare::cluster::application
