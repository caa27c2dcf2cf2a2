// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include "cluster/services/placement.hpp"

namespace gpushare::cluster::services {
namespace {

constexpr size_t kMostTries = 64;  // devices looked at for one replica
// Changes of the order are tried until they have looked at so many candidates and devices together: half a second.
constexpr size_t kWork = 6'000'000, kMostChanges = 6'000;
constexpr int kWeights = 10;  // of compute against memory, for the bound
constexpr int kDuals = 8;     // dual feasible functions of compute, for the bound

struct Free {
  double compute = 1;
  double memory = 1;
};

// A service with one of its options.
struct Candidate {
  double density = 0;  // served for its area, if it has the replicas for its whole rate
  size_t service = 0;
  size_t option = 0;
};

// Sizes whose sum is at most 1 keep a sum of at most 1 under this function (Fekete and Schepers 2001), and with k = 1
// two sizes above a half do not fit together.
double dual_feasible(double size, int k) {
  const double scaled = (k + 1) * size;
  return std::abs(scaled - std::round(scaled)) < 1e-9 ? size : std::floor(scaled) / k;
}

// No placement serves more: what is served takes area, of compute and of memory, and so of any mean of the two, and of
// compute under any dual feasible function.
double bound_of(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes) {
  double devices = 0, least = 1e300;
  for (const ExactClass& one : classes) devices += static_cast<double>(one.devices);
  for (int way = 0; way <= kWeights + kDuals; ++way) {
    const double of_compute = std::min(1.0, static_cast<double>(way) / kWeights);
    const auto area_of = [&](const ExactOption& option, size_t c) {
      return way > kWeights ? dual_feasible(option.compute, way - kWeights)
                            : of_compute * option.compute + (1 - of_compute) * option.memory[c];
    };
    // What a service is served with so much area is at most the concave hull over its options with whole replicas.
    std::vector<std::pair<double, double>> pieces;  // served for an area, area
    for (const ExactService& service : services) {
      std::vector<std::pair<double, double>> points;  // area, less what is served
      for (const ExactOption& option : service.options) {
        double one = 0, area = 1e300, most = 0;
        for (size_t c = 0; c < classes.size(); ++c) {
          if (option.memory[c] > 1) continue;
          one = std::max(one, option.throughput * classes[c].speed);
          area = std::min(area, std::max(area_of(option, c), 1e-9));
          most += static_cast<double>(classes[c].devices);
        }
        if (one <= 0 || most <= 0) continue;
        const double whole = std::min(most, std::floor(service.rate / one));
        if (whole > 0) points.emplace_back(whole * area, -whole * one);
        if (whole < most) points.emplace_back((whole + 1) * area, -std::min(service.rate, (whole + 1) * one));
      }
      std::sort(points.begin(), points.end());
      std::vector<std::pair<double, double>> hull{{0, 0}};  // area, served
      const auto slope = [](const auto& from, const auto& to) {
        return (to.second - from.second) / std::max(to.first - from.first, 1e-12);
      };
      for (const auto& [area, less] : points) {
        const std::pair<double, double> point{area, -less};
        if (point.second <= hull.back().second) continue;
        while (hull.size() > 1 && slope(hull[hull.size() - 2], hull.back()) <= slope(hull.back(), point))
          hull.pop_back();
        hull.push_back(point);
      }
      for (size_t i = 1; i < hull.size(); ++i)
        pieces.emplace_back(slope(hull[i - 1], hull[i]), hull[i].first - hull[i - 1].first);
    }
    std::sort(pieces.begin(), pieces.end(), std::greater<>());
    double room = devices, sum = 0;
    for (const auto& [density, area] : pieces) {
      if (room <= 0) break;
      sum += density * std::min(area, room);
      room -= area;
    }
    least = std::min(least, sum);
  }
  return least;
}

// Every option by falling density, that of the greatest density of each service first.
std::vector<Candidate> by_density(const std::vector<ExactService>& services,
                                  const std::vector<ExactClass>& classes) {
  std::vector<Candidate> order, others;
  for (size_t s = 0; s < services.size(); ++s) {
    Candidate best{0, s, 0};
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
      const double value = std::min(services[s].rate, throughput);
      const double replicas = std::ceil(services[s].rate / (option.throughput * speed));
      const double density = value / (replicas * std::max({option.compute, memory, 1e-6}));
      if (density > best.density) best = {density, s, o};
      others.push_back({density, s, o});
    }
    if (best.density > 0) order.push_back(best);
  }
  const auto denser = [](const Candidate& a, const Candidate& b) { return a.density > b.density; };
  std::stable_sort(order.begin(), order.end(), denser);
  std::stable_sort(others.begin(), others.end(), denser);
  order.insert(order.end(), others.begin(), others.end());
  return order;
}

// Each service in turn gets the replicas for its rate, best fit by compute; one that got none is tried again with the
// options behind.
ExactResult packed(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes,
                   const std::vector<Candidate>& order) {
  ExactResult result;
  result.feasible = true;
  std::vector<std::vector<Free>> rooms;
  std::vector<std::set<std::pair<double, size_t>>> by_room(classes.size());  // free compute, device
  for (size_t c = 0; c < classes.size(); ++c) {
    rooms.emplace_back(classes[c].devices);
    for (size_t d = 0; d < classes[c].devices; ++d) by_room[c].emplace(1.0, d);
  }
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
  return result;
}

}  // namespace

ExactResult large_placement(const std::vector<ExactService>& services,
                            const std::vector<ExactClass>& classes) {
  const double bound = bound_of(services, classes);
  std::vector<Candidate> order = by_density(services, classes);
  ExactResult best = packed(services, classes, order);
  size_t devices = 0, first = 0;  // `first` services have a best option, in front
  for (const ExactClass& one : classes) devices += one.devices;
  for (std::vector<bool> seen(services.size(), false); first < order.size() && !seen[order[first].service];
       ++first)
    seen[order[first].service] = true;
  // A service comes earlier or later, or with another option; what serves no less is kept.
  std::mt19937_64 random(1);
  const size_t changes = std::min(kMostChanges, kWork / (order.size() + devices + 1));
  for (size_t i = 0; i < changes && first > 1 && best.value < bound * (1 - 1e-12); ++i) {
    std::vector<Candidate> other = order;
    const size_t from = random() % first;
    if (random() % 3 == 0) {
      const size_t options = services[other[from].service].options.size();
      other[from].option = random() % options;
    }
    const size_t to = random() % first;
    const auto at = [&](size_t index) { return other.begin() + static_cast<std::ptrdiff_t>(index); };
    if (from < to)
      std::rotate(at(from), at(from + 1), at(to + 1));
    else
      std::rotate(at(to), at(from), at(from + 1));
    ExactResult result = packed(services, classes, other);
    if (result.value < best.value) continue;
    best = std::move(result);
    order = std::move(other);
  }
  best.bound = std::max(bound, best.value);
  best.optimal = best.value >= best.bound * (1 - 1e-12);
  return best;
}

}  // namespace gpushare::cluster::services
