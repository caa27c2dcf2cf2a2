// What no placement of services exceeds, for instances of any size.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cluster/services/placement.hpp"

namespace gpushare::cluster::services {
namespace {

constexpr int kWeights = 10;        // of compute against memory, for the bound
constexpr int kDuals = 8;           // dual feasible functions of compute, for the bound
constexpr size_t kPriced = 80'000;  // options that are priced for one measure of room
constexpr size_t kMostPriced = 8;   // classes with a price each

// Sizes whose sum is at most 1 keep a sum of at most 1 under this function (Fekete and Schepers 2001), and with k = 1
// two sizes above a half do not fit together.
double dual_feasible(double size, int k) {
  const double scaled = (k + 1) * size;
  return std::abs(scaled - std::round(scaled)) < 1e-9 ? size : std::floor(scaled) / k;
}

// How much room of a device an option takes, by some measure under which what a device holds adds up to at most 1: compute, memory
// and means of the two, and compute under dual feasible functions.
double area_of(const ExactOption& option, size_t c, int way) {
  if (way > kWeights) return dual_feasible(option.compute, way - kWeights);
  const double of_compute = static_cast<double>(way) / kWeights;
  return of_compute * option.compute + (1 - of_compute) * option.memory[c];
}

// What replicas of one option gain at most when room has a price in each class, and the replicas that gain it.
class PricedOption {
 public:
  PricedOption(const ExactService& service, const ExactOption& option, const std::vector<ExactClass>& classes,
               const std::vector<double>& prices, int way) {
    for (size_t c = 0; c < classes.size(); ++c) {
      const double one = option.throughput * classes[c].speed, costs = prices[c] * area_of(option, c, way);
      if (option.memory[c] <= 1 && classes[c].devices > 0 && costs < one)
        ways_.push_back({c, one, costs, static_cast<double>(classes[c].devices)});
    }
    std::sort(ways_.begin(), ways_.end(),
              [](const Way& a, const Way& b) { return a.costs * b.one < b.costs * a.one; });
    now_.assign(ways_.size(), 0);
    best_ = now_;
    descend(0, service.rate, 0);
    // Cut short: a fraction of a replica of the cheapest class costs no more.
    if (steps_ > kMostSteps) gain_ = std::max(gain_, service.rate * (1 - ways_[0].costs / ways_[0].one));
  }
  double gain() const { return gain_; }
  template <class F>
  void for_replicas(F&& take) const {
    for (size_t i = 0; i < best_.size(); ++i) take(ways_[i].of_class, best_[i]);
  }

 private:
  static constexpr int kMostSteps = 200;
  struct Way {
    size_t of_class;
    double one, costs, devices;
  };
  void descend(size_t i, double rate, double gained) {
    if (gained > gain_) {
      gain_ = gained;
      best_ = now_;
    }
    if (i == ways_.size() || rate <= 0 || ++steps_ > kMostSteps) return;
    const Way& way = ways_[i];
    if (gained + rate * (1 - way.costs / way.one) <= gain_) return;
    const double most = std::min(way.devices, std::ceil(rate / way.one));
    // Each whole replica of the last class gains.
    const double least = i + 1 == ways_.size() ? std::max(0.0, most - 1) : 0;
    for (double n = most; n >= least && steps_ <= kMostSteps; --n) {
      now_[i] = n;
      descend(i + 1, rate - n * way.one, gained + std::min(rate, n * way.one) - n * way.costs);
    }
    now_[i] = 0;
  }

  std::vector<Way> ways_;  // the cheapest for what it serves first
  std::vector<double> now_, best_;
  double gain_ = 0;
  int steps_ = 0;
};

// No placement serves more than all room at its price and what services gain at these prices (Lagrangian relaxation of the room in each
// class). Good prices are found by subgradients with Polyak's step towards `value`, what a placement serves.
double bound_at_prices(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes,
                       int way, double value) {
  double speed = 0;
  for (const ExactClass& one : classes) speed += one.speed * static_cast<double>(one.devices);
  std::vector<double> prices, slack(classes.size());
  for (const ExactClass& one : classes) prices.push_back(value / std::max(speed, 1e-12) * one.speed);
  size_t options = 1;
  for (const ExactService& service : services) options += service.options.size();
  const size_t steps = std::clamp<size_t>(kPriced / options, 8, 80);
  double least = 1e300, part = 1;
  for (size_t step = 0; step < steps; ++step) {
    double sum = 0;
    for (size_t c = 0; c < classes.size(); ++c) {
      slack[c] = static_cast<double>(classes[c].devices);
      sum += prices[c] * slack[c];
    }
    for (const ExactService& service : services) {
      double gain = 0;
      std::vector<double> taken(classes.size());
      for (const ExactOption& option : service.options) {
        const PricedOption priced(service, option, classes, prices, way);
        if (priced.gain() <= gain) continue;
        gain = priced.gain();
        std::fill(taken.begin(), taken.end(), 0);
        priced.for_replicas([&](size_t c, double n) { taken[c] += n * area_of(option, c, way); });
      }
      sum += gain;
      for (size_t c = 0; c < classes.size(); ++c) slack[c] -= taken[c];
    }
    if (sum >= least) part *= 0.9;
    least = std::min(least, sum);
    double norm = 0;
    for (const double each : slack) norm += each * each;
    if (norm < 1e-12 || sum <= value) break;
    for (size_t c = 0; c < classes.size(); ++c)
      prices[c] = std::max(0.0, prices[c] - part * (sum - value) / norm * slack[c]);
  }
  return least;
}

// The same for one class: at the best price the cheapest pieces of the services' concave hulls fill the room.
double bound_of_equal(const std::vector<ExactService>& services, const ExactClass& devices, int way) {
  std::vector<std::pair<double, double>> pieces;  // served for an area, area
  for (const ExactService& service : services) {
    std::vector<std::pair<double, double>> points;  // area, less what is served
    for (const ExactOption& option : service.options) {
      if (option.memory[0] > 1) continue;
      const double one = option.throughput * devices.speed, area = std::max(area_of(option, 0, way), 1e-9);
      const auto most = static_cast<double>(devices.devices),
                 whole = std::min(most, std::floor(service.rate / one));
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
  double room = static_cast<double>(devices.devices), sum = 0;
  for (const auto& [density, area] : pieces) {
    if (room <= 0) break;
    sum += density * std::min(area, room);
    room -= area;
  }
  return sum;
}

}  // namespace

double placement_bound(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes,
                       double value) {
  if (classes.size() > kMostPriced) {
    std::vector<size_t> order(classes.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return classes[a].speed < classes[b].speed; });
    std::vector<ExactClass> groups(kMostPriced, ExactClass{0, 0});
    std::vector<ExactService> same = services;
    for (ExactService& service : same)
      for (ExactOption& option : service.options) option.memory.assign(kMostPriced, 2);
    for (size_t i = 0; i < order.size(); ++i) {
      const size_t c = order[i], group = i * kMostPriced / order.size();
      groups[group].devices += classes[c].devices;
      groups[group].speed = classes[c].speed;
      for (size_t s = 0; s < services.size(); ++s)
        for (size_t o = 0; o < services[s].options.size(); ++o) {
          double& memory = same[s].options[o].memory[group];
          memory = std::min(memory, services[s].options[o].memory[c]);
        }
    }
    return placement_bound(same, groups, value);
  }
  double least = 1e300;
  for (int way = 0; way <= kWeights + kDuals && least > value; ++way)
    least = std::min(least, classes.size() == 1 ? bound_of_equal(services, classes[0], way)
                                                : bound_at_prices(services, classes, way, value));
  return least;
}

}  // namespace gpushare::cluster::services
