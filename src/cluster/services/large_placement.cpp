// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "cluster/services/placement.hpp"

namespace gpushare::cluster::services {
namespace {

constexpr size_t kMostTries = 64;  // devices looked at for one replica

struct Free {
  double compute = 1;
  double memory = 1;
};

}  // namespace

ExactResult large_placement(const std::vector<ExactService>& services,
                            const std::vector<ExactClass>& classes) {
  ExactResult result;
  result.feasible = true;
  std::vector<std::vector<Free>> rooms;
  std::vector<std::set<std::pair<double, size_t>>> by_room(classes.size());  // free compute, device
  double devices = 0;
  for (size_t c = 0; c < classes.size(); ++c) {
    rooms.emplace_back(classes[c].devices);
    for (size_t d = 0; d < classes[c].devices; ++d) by_room[c].emplace(1.0, d);
    devices += static_cast<double>(classes[c].devices);
  }
  struct Candidate {
    double density = 0;
    size_t service = 0;
    size_t option = 0;
  };
  // The option of a service that serves the most for its area. The area is what the replicas for the whole rate
  // take.
  std::vector<Candidate> order, others;  // others: every option, for services that got nothing
  std::vector<std::pair<double, double>> by_compute, by_memory;  // density, most value
  for (size_t s = 0; s < services.size(); ++s) {
    Candidate best{0, s, 0};
    double compute_density = 0, memory_density = 0, most = 0;
    for (size_t o = 0; o < services[s].options.size(); ++o) {
      const ExactOption& option = services[s].options[o];
      double memory = 2, speed = 0, throughput = 0;
      for (size_t c = 0; c < classes.size(); ++c) {
        if (option.memory[c] > 1) continue;
        memory = std::min(memory, option.memory[c]);
        speed = std::max(speed, classes[c].speed);
        throughput += option.throughput * classes[c].speed * static_cast<double>(classes[c].devices);
      }
      if (speed == 0) continue;
      const double one = option.throughput * speed;
      const double value = std::min(services[s].rate, throughput);
      const double replicas = std::ceil(services[s].rate / one);
      const double density = value / (replicas * std::max({option.compute, memory, 1e-6}));
      if (density > best.density) best = {density, s, o};
      others.push_back({density, s, o});
      compute_density = std::max(compute_density, one / std::max(option.compute, 1e-9));
      memory_density = std::max(memory_density, one / std::max(memory, 1e-9));
      most = std::max(most, value);
    }
    if (best.density > 0) order.push_back(best);
    by_compute.emplace_back(compute_density, most);
    by_memory.emplace_back(memory_density, most);
  }
  result.bound = 1e300;
  for (auto* relaxed : {&by_compute, &by_memory}) {
    std::sort(relaxed->begin(), relaxed->end(), std::greater<>());
    double room = devices, sum = 0;
    for (const auto& [density, most] : *relaxed) {
      if (density <= 0 || room <= 0) break;
      const double value = std::min(most, room * density);
      room -= value / density;
      sum += value;
    }
    result.bound = std::min(result.bound, sum);
  }
  const auto denser = [](const Candidate& a, const Candidate& b) { return a.density > b.density; };
  std::stable_sort(order.begin(), order.end(), denser);
  std::stable_sort(others.begin(), others.end(), denser);
  order.insert(order.end(), others.begin(), others.end());
  std::vector<bool> has(services.size(), false);
  for (const Candidate& candidate : order) {
    if (has[candidate.service]) continue;
    const ExactOption& option = services[candidate.service].options[candidate.option];
    double served = 0;
    const double rate = services[candidate.service].rate;
    for (size_t c = 0; c < classes.size() && served < rate; ++c) {
      if (option.memory[c] > 1) continue;
      std::vector<size_t> here;  // one replica a device
      auto at = by_room[c].lower_bound({option.compute - 1e-12, 0});
      for (size_t tries = 0; at != by_room[c].end() && served < rate && tries < kMostTries; ++at) {
        const size_t d = at->second;
        if (rooms[c][d].memory + 1e-12 < option.memory[c]) {
          ++tries;
          continue;
        }
        here.push_back(d);
        served += option.throughput * classes[c].speed;
      }
      for (const size_t d : here) {
        Free& room = rooms[c][d];
        by_room[c].erase({room.compute, d});
        room.compute -= option.compute;
        room.memory -= option.memory[c];
        by_room[c].emplace(room.compute, d);
        result.replicas.push_back({candidate.service, candidate.option, d, c});
      }
    }
    has[candidate.service] = served > 0;
    result.value += std::min(served, rate);
  }
  result.bound = std::max(result.bound, result.value);
  result.optimal = result.value >= result.bound * (1 - 1e-12);
  return result;
}

}  // namespace gpushare::cluster::services
