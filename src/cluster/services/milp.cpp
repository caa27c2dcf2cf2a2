// Exact placement (thesis on interference-aware serving, its integer programs under AO, WAO and WSM), and ours, which
// chooses among its equal optima.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <map>

#include "cluster/services/placement.hpp"
#include "cluster/services/queueing.hpp"

namespace gpushare::cluster::services {
namespace {

// Beyond, large_placement.
constexpr size_t kMostExactServices = 64;
constexpr size_t kMostExactDevices = 128;
constexpr uint64_t kNodesOfTies = 20'000, kWorkOfTies = 30'000'000;
constexpr uint64_t kWorkAtFirst = 60'000'000;

struct Instance {
  DeviceClasses devices;
  std::vector<ExactService> services;
};

// `metric_of(configuration)` is the part of the compute in percent, below 0 if it is not known.
template <class F>
Instance instance_of(const std::vector<Service>& services, const std::vector<Device>& devices, F&& metric_of,
                     Placement* placement) {
  Instance out{classify(devices), {}};
  for (size_t s = 0; s < services.size(); ++s) {
    const Service& service = services[s];
    ExactService one{service.rate_rps, {}};
    bool measured = false, fits = false, in_time = false;
    for (size_t c = 0; c < service.configurations.size(); ++c) {
      const Configuration& configuration = service.configurations[c];
      const double compute = metric_of(configuration);
      if (compute < 0) continue;
      measured = true;
      if (compute > 100) continue;
      fits = true;
      ExactOption option{c, configuration.throughput_rps, compute / 100, {}, 0};
      bool anywhere = false;
      for (size_t k = 0; k < out.devices.classes.size(); ++k) {
        const bool soon = configuration.latency_ms / out.devices.classes[k].speed <= service.slo_ms;
        in_time |= soon;
        option.memory.push_back(soon ? configuration.memory_fraction(devices[out.devices.members[k][0]]) : 2);
        anywhere |= option.memory.back() <= 1;
      }
      if (anywhere) one.options.push_back(std::move(option));
    }
    if (one.options.empty())
      placement->unserved.emplace_back(
          s, service.configurations.empty() ? "it has no configurations"
             : !measured ? "no configuration has the metric of compute that this scheduler counts"
             : !fits     ? "every configuration takes more compute than a device has"
             : !in_time  ? "every configuration is slower than slo_ms on every device"
                         : "every configuration in time needs more memory than a device has");
    out.services.push_back(std::move(one));
  }
  return out;
}

bool is_large(const Instance& instance) {
  size_t devices = 0;
  for (const ExactClass& one : instance.devices.classes) devices += one.devices;
  return instance.services.size() > kMostExactServices || devices > kMostExactDevices ||
         instance.devices.classes.size() > 4;
}

ExactResult solve(const Instance& instance, const ExactLimits& limits) {
  if (is_large(instance)) return large_placement(instance.services, instance.devices.classes);
  return solve_exact(instance.services, instance.devices.classes, limits);
}

// The most that can be served: a short exact search, which ends most instances; what it leaves open goes on from what
// the search for large instances finds.
ExactResult solve_most(const Instance& instance) {
  ExactLimits limits;
  limits.work = kWorkAtFirst;
  ExactResult first = solve(instance, limits);
  if (first.optimal || is_large(instance)) return first;
  ExactResult start = large_placement(instance.services, instance.devices.classes);
  if (first.value > start.value) {
    start.replicas = std::move(first.replicas);
    start.value = first.value;
  }
  start.bound = std::max(start.value, std::min(start.bound, first.bound));
  ExactLimits more;
  more.start = &start;
  return solve_exact(instance.services, instance.devices.classes, more);
}

void write(const Instance& instance, const ExactResult& found, const std::vector<Service>& services,
           Placement& placement) {
  std::vector<double> throughput(services.size(), 0);
  placement.replicas.clear();
  for (const ExactReplicas& replica : found.replicas) {
    const ExactOption& option = instance.services[replica.service].options[replica.option];
    const Configuration& configuration = services[replica.service].configurations[option.tag];
    const double speed = instance.devices.classes[replica.of_class].speed;
    placement.replicas.push_back({replica.service, instance.devices.members[replica.of_class][replica.device],
                                  configuration.batch, option.compute * 100, option.throughput * speed,
                                  configuration.latency_ms / speed});
    throughput[replica.service] += option.throughput * speed;
  }
  placement.goodput_rps = 0;
  for (size_t s = 0; s < services.size(); ++s) {
    placement.goodput_rps += std::min(services[s].rate_rps, throughput[s]);
    if (throughput[s] == 0 && !instance.services[s].options.empty())
      placement.unserved.emplace_back(s, "no room is left: others serve more with it");
  }
}

}  // namespace

DeviceClasses classify(const std::vector<Device>& devices) {
  DeviceClasses out;
  std::map<std::pair<double, uint64_t>, size_t> known;
  for (size_t d = 0; d < devices.size(); ++d) {
    const auto [at, added] =
        known.emplace(std::pair(devices[d].speed, devices[d].memory_bytes), out.classes.size());
    if (added) {
      out.classes.push_back({0, devices[d].speed});
      out.members.emplace_back();
    }
    ++out.classes[at->second].devices;
    out.members[at->second].push_back(d);
  }
  return out;
}

Placement place_exactly(const std::vector<Service>& services, const std::vector<Device>& devices,
                        Metric metric) {
  Placement placement;
  const Instance instance = instance_of(
      services, devices,
      [&](const Configuration& configuration) {
        return configuration.compute_percent[static_cast<size_t>(metric)];
      },
      &placement);
  const ExactResult found = solve_most(instance);
  write(instance, found, services, placement);
  placement.bound_rps = std::max(found.bound, placement.goodput_rps);
  placement.optimal = found.optimal;
  return placement;
}

Placement place_best(const std::vector<Service>& services, const std::vector<Device>& devices, Goal goal) {
  using Order = std::array<Metric, kMetrics>;
  const Order order = goal == Goal::kInTime ? Order{Metric::kWsm, Metric::kWao, Metric::kAo}
                                            : Order{Metric::kWao, Metric::kWsm, Metric::kAo};
  Placement placement;
  Instance instance = instance_of(
      services, devices,
      [&](const Configuration& configuration) {
        for (const Metric metric : order)
          if (configuration.compute_percent[static_cast<size_t>(metric)] >= 0)
            return configuration.compute_percent[static_cast<size_t>(metric)];
        return -1.0;
      },
      &placement);
  if (goal == Goal::kInTime)
    for (size_t s = 0; s < services.size(); ++s)
      for (ExactOption& option : instance.services[s].options)
        option.served = [&service = services[s], &configuration = services[s].configurations[option.tag]](
                            double throughput, double speed) {
          return service.rate_rps * part_in_time(service, configuration, throughput, speed);
        };
  const ExactResult most = solve_most(instance);
  placement.bound_rps = most.bound;
  placement.optimal = most.optimal;
  ExactResult best = most;
  if (most.optimal && services.size() <= kMostExactServices) {
    // The best worst ratio that still serves as much: the ratio is one of finitely many, and bisection finds it to a thousandth.
    ExactLimits limits;
    limits.nodes = kNodesOfTies;
    limits.work = kWorkOfTies;
    limits.target = most.value * (1 - 1e-9);
    double low = 0, high = 1;
    for (int i = 0; i < 10; ++i) {
      limits.least_ratio = i == 0 ? 1 : (low + high) / 2;
      ExactResult found = solve(instance, limits);
      if (found.feasible && found.value >= limits.target) {
        best = std::move(found);
        low = limits.least_ratio;
        if (i == 0) break;
      } else {
        high = limits.least_ratio;
      }
    }
    // Then the smallest batches: a penalty too small to change what is served by more than a part in a million.
    double batches = 0;
    for (const Service& service : services)
      for (const Configuration& configuration : service.configurations)
        batches = std::max(batches, static_cast<double>(configuration.batch));
    const double unit = 1e-6 * most.value / (batches * static_cast<double>(services.size()) + 1);
    for (size_t s = 0; s < services.size(); ++s)
      for (ExactOption& option : instance.services[s].options)
        option.penalty = unit * services[s].configurations[option.tag].batch;
    limits.least_ratio = low;
    limits.target = 0;
    ExactResult smallest = solve(instance, limits);
    if (smallest.feasible && smallest.value >= most.value * (1 - 2e-6)) best = std::move(smallest);
  }
  write(instance, best, services, placement);
  placement.bound_rps = std::max(placement.bound_rps, placement.goodput_rps);
  return placement;
}

}  // namespace gpushare::cluster::services
