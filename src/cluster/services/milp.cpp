// Exact placement (thesis on interference-aware serving, its integer programs under AO, WAO and WSM).
// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <tuple>

#include "cluster/services/exact.hpp"
#include "cluster/services/placement.hpp"

namespace gpushare::cluster::services {

Placement place_exactly(const std::vector<Service>& services, const std::vector<Device>& devices,
                        Metric metric) {
  // Equal devices are one class.
  std::map<std::pair<double, uint64_t>, size_t> known;
  std::vector<ExactClass> classes;
  std::vector<std::vector<size_t>> members;
  for (size_t d = 0; d < devices.size(); ++d) {
    const auto [at, added] =
        known.emplace(std::pair(devices[d].speed, devices[d].memory_bytes), classes.size());
    if (added) {
      classes.push_back({0, devices[d].speed});
      members.emplace_back();
    }
    ++classes[at->second].devices;
    members[at->second].push_back(d);
  }
  std::vector<ExactService> exact;
  for (const Service& service : services) {
    ExactService one{service.rate_rps, {}};
    for (size_t c = 0; c < service.configurations.size(); ++c) {
      const Configuration& configuration = service.configurations[c];
      const double compute = configuration.compute_percent[static_cast<size_t>(metric)];
      if (compute < 0 || compute > 100) continue;
      ExactOption option{c, configuration.throughput_rps, compute / 100, {}, 0};
      for (size_t k = 0; k < classes.size(); ++k) {
        const bool in_time = configuration.latency_ms / classes[k].speed <= service.slo_ms;
        option.memory.push_back(in_time ? configuration.memory_fraction(devices[members[k][0]]) : 2);
      }
      one.options.push_back(std::move(option));
    }
    exact.push_back(std::move(one));
  }
  const ExactResult found = solve_exact(exact, classes, {});
  Placement placement;
  placement.goodput_rps = found.value;
  placement.bound_rps = found.bound;
  placement.optimal = found.optimal;
  for (const ExactReplicas& replica : found.replicas) {
    const ExactOption& option = exact[replica.service].options[replica.option];
    placement.replicas.push_back(
        {replica.service, members[replica.of_class][replica.device], option.tag, option.compute * 100});
  }
  return placement;
}

}  // namespace gpushare::cluster::services
