// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <utility>

#include "cluster/services/placement.hpp"

namespace gpushare::cluster::services {
namespace {

constexpr double kRounding = 1e-12, kFastest = 1e300;
constexpr size_t kMostTries = 64;  // devices looked at for one replica
// The search tries changes until it has looked at so many devices and services for each that there is, and at most at so many: about
// a second.
constexpr uint64_t kWorkEach = 200'000, kMostWork = 30'000'000;

// A placement that changes: what is free on every device, and each service's option and replicas.
class Fleet {
 public:
  struct At {
    size_t of_class = 0, device = 0;
    bool operator==(const At&) const = default;
  };

  Fleet(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes)
      : services_(services), classes_(classes), by_room_(classes.size()), placed_(services.size()) {
    for (size_t c = 0; c < classes.size(); ++c) {
      devices_.emplace_back(classes[c].devices);
      for (size_t d = 0; d < classes[c].devices; ++d) by_room_[c].emplace(1.0, d);
    }
  }

  double value() const { return value_; }
  uint64_t work() const { return work_; }
  size_t option(size_t service) const { return placed_[service].option; }
  const std::vector<At>& replicas(size_t service) const { return placed_[service].at; }
  const std::vector<size_t>& services_on(At at) const { return devices_[at.of_class][at.device].services; }
  double served(size_t service) const { return placed_[service].served; }
  // What one more replica on the fastest device that takes the option would add, at most.
  double next_gain(size_t service, double speed) const {
    const Placed& placed = placed_[service];
    const ExactOption& option = services_[service].options[placed.option];
    return served_by(service, placed.throughput + option.throughput * speed,
                     std::min(placed.slowest, speed)) -
           placed.served;
  }
  double served_by(size_t service, double throughput, double slowest) const {
    const ExactOption& option = services_[service].options[placed_[service].option];
    const double most = std::min(services_[service].rate, throughput);
    return option.served && throughput > 0 ? std::min(most, option.served(throughput, slowest)) : most;
  }

  void choose(size_t service, size_t option) { placed_[service].option = option; }  // it has no replicas
  void put(size_t service, At at) {
    devices_[at.of_class][at.device].services.push_back(service);
    placed_[service].at.push_back(at);
    changed(service, at);
  }
  void remove(size_t service, At at) {
    std::erase(devices_[at.of_class][at.device].services, service);
    std::erase(placed_[service].at, at);
    changed(service, at);
  }
  // One more replica of the service's option, where it fits best by compute, in the first class from `first` on that has
  // room. False: nowhere.
  bool add(size_t service, size_t first, At* out) {
    const ExactOption& option = services_[service].options[placed_[service].option];
    for (size_t i = 0; i < classes_.size(); ++i) {
      const size_t c = (first + i) % classes_.size();
      ++work_;
      if (option.memory[c] > 1) continue;
      auto room = by_room_[c].lower_bound({option.compute - kRounding, 0});
      for (size_t tries = 0; room != by_room_[c].end() && tries < kMostTries; ++room) {
        ++work_;
        const At at{c, room->second};
        const auto& there = devices_[c][at.device];
        if (std::find(there.services.begin(), there.services.end(), service) != there.services.end())
          continue;
        if (there.memory + kRounding < option.memory[c]) {
          ++tries;
          continue;
        }
        put(service, at);
        *out = at;
        return true;
      }
    }
    return false;
  }

 private:
  struct Device {
    double compute = 1, memory = 1;  // free
    std::vector<size_t> services;    // a replica of each
  };
  struct Placed {
    size_t option = 0;
    std::vector<At> at;
    double throughput = 0, slowest = kFastest, served = 0;
  };

  // Sums are made anew from their terms, so that no error of rounding grows.
  void changed(size_t service, At at) {
    Placed& placed = placed_[service];
    value_ -= placed.served;
    placed.throughput = 0;
    placed.slowest = kFastest;
    for (const At& each : placed.at) {
      placed.throughput +=
          services_[service].options[placed.option].throughput * classes_[each.of_class].speed;
      placed.slowest = std::min(placed.slowest, classes_[each.of_class].speed);
    }
    placed.served = served_by(service, placed.throughput, placed.slowest);
    value_ += placed.served;
    Device& device = devices_[at.of_class][at.device];
    by_room_[at.of_class].erase({device.compute, at.device});
    device.compute = device.memory = 1;
    for (const size_t each : device.services) {
      const ExactOption& option = services_[each].options[placed_[each].option];
      device.compute -= option.compute;
      device.memory -= option.memory[at.of_class];
    }
    by_room_[at.of_class].emplace(device.compute, at.device);
    work_ += 1 + placed.at.size() + device.services.size();
  }

  const std::vector<ExactService>& services_;
  const std::vector<ExactClass>& classes_;
  std::vector<std::vector<Device>> devices_;                  // a class
  std::vector<std::set<std::pair<double, size_t>>> by_room_;  // a class: free compute, device
  std::vector<Placed> placed_;
  double value_ = 0;
  uint64_t work_ = 0;
};

// Large neighbourhood search (Shaw 1998): what some devices and services have is taken away, and the room is given to what serves
// most for its area, with some chance in the order; what serves no less is kept.
class NeighbourhoodSearch {
 public:
  NeighbourhoodSearch(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes)
      : services_(services),
        classes_(classes),
        fleet_(services, classes),
        facts_(services.size()),
        marked_(services.size(), 0) {
    for (size_t c = 0; c < classes.size(); ++c)
      for (size_t d = 0; d < classes[c].devices; ++d) all_devices_.push_back({c, d});
    for (size_t s = 0; s < services.size(); ++s) {
      if (!services[s].options.empty()) wanted_.push_back(s);
      for (const ExactOption& option : services[s].options) {
        Fact fact;
        double memory = 2;
        for (size_t c = 0; c < classes.size(); ++c) {
          if (option.memory[c] > 1 || classes[c].devices == 0) continue;
          memory = std::min(memory, option.memory[c]);
          fact.speed = std::max(fact.speed, classes[c].speed);
        }
        fact.area = std::max({option.compute, memory, 1e-6});
        facts_[s].push_back(fact);
      }
    }
    touched_ = wanted_;
    fill(0);
    best_ = result();
  }

  double value() const { return best_.value; }

  ExactResult run(double bound, uint64_t work) {
    if (all_devices_.empty() || wanted_.empty()) return best_;
    const double temperature = 0.0005 * bound;
    for (uint64_t tries = 0; fleet_.work() + tries < work && best_.value < bound * (1 - kRounding); ++tries) {
      const double before = fleet_.value();
      log_.clear();
      touched_.clear();
      take_away();
      fill(0.4);
      const double part = static_cast<double>(fleet_.work()) / static_cast<double>(work);
      const double allowed = temperature * (1 - part) * (1 - part) * -std::log(unit());
      if (fleet_.value() < before - allowed)
        undo();
      else if (fleet_.value() > best_.value * (1 + kRounding))
        best_ = result();
    }
    return best_;
  }

 private:
  struct Change {
    size_t service = 0, option = 0;
    Fleet::At at;
    bool put = false;
  };
  struct Fact {
    double speed = 0;  // of the fastest devices that take the option; 0: none
    double area = 1;   // of a device, in its dearest resource
  };

  double unit() { return (static_cast<double>(random_() >> 11) + 0.5) * 0x1p-53; }
  size_t below(size_t n) { return random_() % n; }

  void touch(size_t service) {
    if (!std::exchange(marked_[service], 1)) touched_.push_back(service);
  }
  void remove(size_t service, Fleet::At at) {
    log_.push_back({service, fleet_.option(service), at, false});
    fleet_.remove(service, at);
    touch(service);
  }
  void remove_all(size_t service) {
    while (!fleet_.replicas(service).empty()) remove(service, fleet_.replicas(service).back());
    touch(service);
  }
  void undo() {
    for (; !log_.empty(); log_.pop_back()) {
      const Change& change = log_.back();
      if (change.put) {
        fleet_.remove(change.service, change.at);
      } else {
        if (fleet_.replicas(change.service).empty()) fleet_.choose(change.service, change.option);
        fleet_.put(change.service, change.at);
      }
    }
  }

  void take_away() {
    const size_t devices = 1 + below(3);
    for (size_t i = 0; i < devices; ++i) {
      const Fleet::At at = all_devices_[below(all_devices_.size())];
      const std::vector<size_t> there = fleet_.services_on(at);
      const bool whole = below(2) == 0;
      for (const size_t service : there) {
        if (whole)
          remove_all(service);
        else
          remove(service, at);
      }
    }
    for (size_t i = 0; i < 4; ++i) {
      const size_t service = wanted_[below(wanted_.size())];
      if (i < 2 || fleet_.served(service) < services_[service].rate) remove_all(service);
    }
  }

  // The densest option, with whole replicas for at most or at least the rate.
  void choose_option(size_t service, double noise) {
    double best = 0;
    const ExactService& of = services_[service];
    for (size_t o = 0; o < of.options.size(); ++o) {
      const Fact& fact = facts_[service][o];
      const double one = of.options[o].throughput * fact.speed;
      if (one <= 0) continue;
      const double most = std::ceil(of.rate / one), least = std::floor(of.rate / one);
      const double served = std::max(of.rate / most, least > 0 ? one : 0);
      const double density = served / fact.area * std::exp(noise * (unit() - 0.5) * 2);
      if (density <= best) continue;
      best = density;
      fleet_.choose(service, o);
    }
  }

  // Gives the free room to the services that were touched.
  void fill(double noise) {
    std::vector<std::pair<double, size_t>> heap;  // density, service
    const auto push = [&](size_t service) {
      if (fleet_.served(service) >= services_[service].rate * (1 - kRounding)) return;
      const Fact& fact = facts_[service][fleet_.option(service)];
      const double density = fleet_.next_gain(service, fact.speed) / fact.area;
      if (density <= 0) return;
      heap.emplace_back(density * std::exp(noise * (unit() - 0.5) * 2), service);
      std::push_heap(heap.begin(), heap.end());
    };
    for (size_t i = 0; i < 8 && noise > 0; ++i) touch(wanted_[below(wanted_.size())]);
    for (const size_t service : touched_) {
      marked_[service] = 0;
      if (fleet_.replicas(service).empty()) choose_option(service, noise);
      push(service);
    }
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end());
      const size_t service = heap.back().second;
      heap.pop_back();
      Fleet::At at;
      if (!fleet_.add(service, classes_.size() > 1 && noise > 0 ? below(classes_.size()) : 0, &at)) continue;
      log_.push_back({service, fleet_.option(service), at, true});
      push(service);
    }
  }

  ExactResult result() const {
    ExactResult out;
    out.feasible = true;
    for (size_t s = 0; s < services_.size(); ++s) {
      out.value += fleet_.served(s);
      for (const Fleet::At& at : fleet_.replicas(s))
        out.replicas.push_back({s, fleet_.option(s), at.device, at.of_class});
    }
    return out;
  }

  const std::vector<ExactService>& services_;
  const std::vector<ExactClass>& classes_;
  Fleet fleet_;
  std::vector<std::vector<Fact>> facts_;  // a service: of its options
  std::vector<Fleet::At> all_devices_;
  std::vector<size_t> wanted_;   // services with options
  std::vector<size_t> touched_;  // since the last try
  std::vector<char> marked_;
  std::vector<Change> log_;
  ExactResult best_;
  std::mt19937_64 random_{1};
};

}  // namespace

ExactResult large_placement(const std::vector<ExactService>& services,
                            const std::vector<ExactClass>& classes) {
  double all = 0;
  uint64_t size = services.size();
  for (const ExactService& service : services)
    if (!service.options.empty()) all += service.rate;
  for (const ExactClass& one : classes) size += one.devices;
  NeighbourhoodSearch search(services, classes);
  const double bound = std::min(all, placement_bound(services, classes, search.value()));
  ExactResult best = search.run(bound, std::min(kMostWork, kWorkEach * size));
  best.bound = std::max(bound, best.value);
  best.optimal = best.value >= best.bound * (1 - kRounding);
  return best;
}

}  // namespace gpushare::cluster::services
