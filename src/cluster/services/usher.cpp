// Usher, as the thesis on interference-aware serving describes it (section 5.2). Where devices differ, which the thesis
// does not have, a replica counts with the mean of those on which it is in time, until it is placed.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cluster/services/placement.hpp"

namespace gpushare::cluster::services {
namespace {

constexpr size_t kMostInGroup = 4;
constexpr uint32_t kReplicaSteps = 6;
constexpr double kHeavy = 1.2;
constexpr uint64_t kMostTried = 200'000;      // configurations of a group that are placed to see
constexpr uint64_t kMostSteps = 200'000'000;  // of all groups, in devices looked at
constexpr size_t kMostMatchedExactly = 14;

struct Choice {
  size_t configuration = 0;
  size_t replicas = 0;
  double most = 0;  // served if all replicas are placed
};

struct Room {
  double compute = 1;
  double memory = 1;
  bool used = false;
};

class Usher {
 public:
  Usher(const std::vector<Service>& services, const std::vector<Device>& devices, Metric metric)
      : services_(services),
        devices_(devices),
        metric_(static_cast<size_t>(metric)),
        rooms_(devices.size()) {}

  Placement run() {
    for (size_t s = 0; s < services_.size(); ++s) find_choices(s);
    const std::vector<std::vector<size_t>> all = groups();
    most_tried_ =
        std::clamp<uint64_t>(kMostSteps / std::max<size_t>(1, all.size() * devices_.size()), 50, kMostTried);
    for (const std::vector<size_t>& group : all)
      if (anything_fits(group)) place_group(group);
    Placement placement;
    std::vector<double> throughput(services_.size(), 0);
    placement.replicas = std::move(placed_);
    for (const Replica& replica : placement.replicas) throughput[replica.service] += replica.throughput_rps;
    for (size_t s = 0; s < services_.size(); ++s) {
      placement.goodput_rps += std::min(services_[s].rate_rps, throughput[s]);
      placement.bound_rps += services_[s].rate_rps;
      if (throughput[s] == 0)
        placement.unserved.emplace_back(
            s, choices_[s].empty() ? reasons_[s] : "no device has room when its turn comes");
    }
    placement.optimal = placement.goodput_rps >= placement.bound_rps * (1 - 1e-12);
    return placement;
  }

 private:
  double compute(size_t s, size_t c) const {
    return services_[s].configurations[c].compute_percent[metric_] / 100;
  }
  // Of a device, in the mean.
  double memory(size_t s, size_t c) const {
    double sum = 0;
    for (const Device& device : devices_) sum += services_[s].configurations[c].memory_fraction(device);
    return sum / static_cast<double>(devices_.size());
  }
  // The mean speed of the devices on which a configuration is in time; 0: on none.
  double speed(const Service& service, const Configuration& configuration) const {
    double sum = 0;
    size_t count = 0;
    for (const Device& device : devices_) {
      if (configuration.latency_ms > service.slo_ms * device.speed) continue;
      sum += device.speed;
      ++count;
    }
    return count == 0 ? 0 : sum / static_cast<double>(count);
  }

  // The batches in time, and the multiples of the fewest devices that serve the whole rate at the largest of them.
  void find_choices(size_t s) {
    const Service& service = services_[s];
    choices_.emplace_back();
    reasons_.emplace_back();
    largest_.push_back(std::numeric_limits<size_t>::max());
    std::vector<size_t> in_time;
    bool measured = false;
    for (size_t c = 0; c < service.configurations.size(); ++c) {
      const Configuration& configuration = service.configurations[c];
      if (configuration.compute_percent[metric_] < 0) continue;
      measured = true;
      if (speed(service, configuration) <= 0) continue;
      in_time.push_back(c);
      if (largest_[s] >= service.configurations.size() ||
          configuration.batch > service.configurations[largest_[s]].batch)
        largest_[s] = c;
    }
    if (in_time.empty()) {
      reasons_[s] = service.configurations.empty() ? "it has no configurations"
                    : !measured ? "no configuration has the metric of compute that this scheduler counts"
                                : "every configuration with the metric of compute is slower than slo_ms";
      return;
    }
    const Configuration& largest = service.configurations[largest_[s]];
    const double per_device = largest.throughput_rps * speed(service, largest);
    const double fewest = std::ceil(service.rate_rps / per_device - 1e-9);
    if (fewest > static_cast<double>(devices_.size())) {
      reasons_[s] = base::format("its rate needs %.0f devices at the largest batch, and there are %zu",
                                 fewest, devices_.size());
      return;
    }
    const auto step = static_cast<size_t>(std::max(1.0, fewest));
    for (const size_t c : in_time)
      for (size_t i = 1; i <= kReplicaSteps && i * step <= devices_.size(); ++i) {
        const double all = service.configurations[c].throughput_rps *
                           speed(service, service.configurations[c]) * static_cast<double>(i * step);
        choices_[s].push_back({c, i * step, std::min(service.rate_rps, all)});
      }
    std::stable_sort(choices_[s].begin(), choices_[s].end(),
                     [](const Choice& a, const Choice& b) { return a.most > b.most; });
  }

  double imbalance(const std::vector<size_t>& group) const {
    double difference = 0;
    for (const size_t s : group) difference += compute(s, largest_[s]) - memory(s, largest_[s]);
    return std::abs(difference);
  }

  static std::vector<size_t> joined(const std::vector<size_t>& a, const std::vector<size_t>& b) {
    std::vector<size_t> both = a;
    both.insert(both.end(), b.begin(), b.end());
    return both;
  }

  // Rounds of matchings: as many pairs as possible, of the least sum of imbalances; among equal sums the one with the
  // least single imbalance, then the next (the thesis's local objective). Exact by dynamic programming over sets for
  // few groups, else greedy.
  std::vector<std::vector<size_t>> groups() const {
    std::vector<std::vector<size_t>> groups;
    for (size_t s = 0; s < services_.size(); ++s)
      if (!choices_[s].empty()) groups.push_back({s});
    for (size_t size = 1; size < kMostInGroup && groups.size() > 1; size *= 2) groups = matched(groups);
    std::stable_sort(groups.begin(), groups.end(),
                     [](const auto& a, const auto& b) { return a.size() > b.size(); });
    return groups;
  }

  std::vector<std::vector<size_t>> matched(const std::vector<std::vector<size_t>>& groups) const {
    const size_t n = groups.size();
    std::vector<size_t> partner(n, n);
    if (n <= kMostMatchedExactly) {
      match_exactly(groups, partner);
    } else {
      std::vector<size_t> order(n);
      std::iota(order.begin(), order.end(), size_t{0});
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t a, size_t b) { return imbalance(groups[a]) < imbalance(groups[b]); });
      for (size_t i = 0; i + 1 < n; i += 2)
        if (groups[order[i]].size() + groups[order[i + 1]].size() <= kMostInGroup) {
          partner[order[i]] = order[i + 1];
          partner[order[i + 1]] = order[i];
        }
    }
    std::vector<std::vector<size_t>> out;
    for (size_t g = 0; g < n; ++g) {
      if (partner[g] == n) out.push_back(groups[g]);
      if (partner[g] < n && partner[g] > g) out.push_back(joined(groups[g], groups[partner[g]]));
    }
    return out;
  }

  struct Matching {
    size_t pairs = 0;
    double sum = 0;
    std::vector<double> single;  // ascending
    std::vector<std::pair<size_t, size_t>> matched;
    bool better_than(const Matching& other) const {
      if (pairs != other.pairs) return pairs > other.pairs;
      if (std::abs(sum - other.sum) > 1e-9) return sum < other.sum;
      for (size_t i = 0; i < single.size(); ++i)
        if (std::abs(single[i] - other.single[i]) > 1e-9) return single[i] < other.single[i];
      return false;
    }
  };

  void match_exactly(const std::vector<std::vector<size_t>>& groups, std::vector<size_t>& partner) const {
    const size_t n = groups.size();
    std::vector<Matching> best(size_t{1} << n);  // of the groups of a set
    for (size_t set = 1; set < best.size(); ++set) {
      size_t first = 0;
      while ((set >> first & 1) == 0) ++first;
      const size_t rest = set ^ (size_t{1} << first);
      best[set] = best[rest];
      for (size_t other = first + 1; other < n; ++other) {
        if ((set >> other & 1) == 0 || groups[first].size() + groups[other].size() > kMostInGroup) continue;
        Matching with = best[rest ^ (size_t{1} << other)];
        const double weight = imbalance(joined(groups[first], groups[other]));
        ++with.pairs;
        with.sum += weight;
        with.single.insert(std::upper_bound(with.single.begin(), with.single.end(), weight), weight);
        with.matched.emplace_back(first, other);
        if (with.better_than(best[set])) best[set] = std::move(with);
      }
    }
    for (const auto& [a, b] : best.back().matched) {
      partner[a] = b;
      partner[b] = a;
    }
  }

  struct Trial {
    double goodput = 0;
    size_t devices = 0;  // that hold nothing before
    std::vector<Replica> replicas;
  };

  // Places one configuration of a group: heavy services of both kinds in turns, the most demanding first, neutral ones
  // last; on the group's own devices, then on used ones, then on empty ones.
  Trial place(const std::vector<size_t>& group, const std::vector<Choice>& chosen) const {
    std::vector<size_t> kinds[3];  // compute-heavy, memory-heavy, neutral: positions in the group
    for (size_t i = 0; i < group.size(); ++i) {
      const double c = compute(group[i], chosen[i].configuration),
                   m = memory(group[i], chosen[i].configuration);
      kinds[c >= kHeavy * m ? 0 : m >= kHeavy * c ? 1 : 2].push_back(i);
    }
    const auto demand = [&](size_t i) {
      return compute(group[i], chosen[i].configuration) + memory(group[i], chosen[i].configuration);
    };
    for (auto& kind : kinds)
      std::stable_sort(kind.begin(), kind.end(), [&](size_t a, size_t b) { return demand(a) > demand(b); });
    std::vector<size_t> order;
    for (size_t i = 0; i < std::max(kinds[0].size(), kinds[1].size()); ++i)
      for (int kind = 0; kind < 2; ++kind)
        if (i < kinds[kind].size()) order.push_back(kinds[kind][i]);
    order.insert(order.end(), kinds[2].begin(), kinds[2].end());

    Trial trial;
    std::vector<Room> rooms = rooms_;
    std::vector<bool> own(rooms.size(), false);
    for (const size_t i : order) {
      const size_t s = group[i];
      const Configuration& configuration = services_[s].configurations[chosen[i].configuration];
      const double c = configuration.compute_percent[metric_] / 100;
      double served = 0;
      size_t replicas = 0;
      std::vector<bool> here(rooms.size(), false);
      for (int pass = 0; pass < 3; ++pass)
        for (size_t d = 0;
             d < rooms.size() && replicas < chosen[i].replicas && served < services_[s].rate_rps; ++d) {
          if (here[d] || (pass == 0 && !own[d]) || (pass == 1 && !rooms[d].used)) continue;
          const double m = configuration.memory_fraction(devices_[d]);
          if (rooms[d].compute + 1e-9 < c || rooms[d].memory + 1e-9 < m) continue;
          if (configuration.latency_ms > services_[s].slo_ms * devices_[d].speed) continue;
          rooms[d].compute -= c;
          rooms[d].memory -= m;
          if (!rooms[d].used) ++trial.devices;
          rooms[d].used = own[d] = here[d] = true;
          ++replicas;
          const double one = configuration.throughput_rps * devices_[d].speed;
          served += one;
          trial.replicas.push_back(
              {s, d, configuration.batch, c * 100, one, configuration.latency_ms / devices_[d].speed});
        }
      trial.goodput += std::min(services_[s].rate_rps, served);
    }
    return trial;
  }

  bool anything_fits(const std::vector<size_t>& group) const {
    double least = 2;
    for (const size_t s : group)
      for (const Choice& choice : choices_[s]) least = std::min(least, compute(s, choice.configuration));
    return std::any_of(rooms_.begin(), rooms_.end(),
                       [&](const Room& room) { return room.compute + 1e-9 >= least; });
  }

  void place_group(const std::vector<size_t>& group) {
    Trial best;
    uint64_t tried = 0;
    std::vector<Choice> chosen(group.size());
    std::vector<double> most_after(group.size() + 1, 0);
    for (size_t i = group.size(); i-- > 0;)
      most_after[i] = most_after[i + 1] + choices_[group[i]].front().most;
    const auto next = [&](auto&& self, size_t i, double most) -> void {
      if (most + most_after[i] < best.goodput - 1e-9 || tried > most_tried_) return;
      if (i == group.size()) {
        ++tried;
        Trial trial = place(group, chosen);
        if (trial.goodput > best.goodput + 1e-9 ||
            (trial.goodput > best.goodput - 1e-9 && trial.devices < best.devices))
          best = std::move(trial);
        return;
      }
      for (const Choice& choice : choices_[group[i]]) {
        chosen[i] = choice;
        self(self, i + 1, most + choice.most);
      }
    };
    next(next, 0, 0);
    for (const Replica& replica : best.replicas) {
      Room& room = rooms_[replica.device];
      room.used = true;
      room.compute -= replica.share_percent / 100;
      for (const Configuration& configuration : services_[replica.service].configurations)
        if (configuration.batch == replica.batch &&
            configuration.compute_percent[metric_] == replica.share_percent) {
          room.memory -= configuration.memory_fraction(devices_[replica.device]);
          break;
        }
      placed_.push_back(replica);
    }
  }

  const std::vector<Service>& services_;
  const std::vector<Device>& devices_;
  const size_t metric_;
  std::vector<std::vector<Choice>> choices_;  // a service; empty: not served
  std::vector<std::string> reasons_;
  std::vector<size_t> largest_;  // a service's configuration of the largest batch in time
  std::vector<Room> rooms_;
  uint64_t most_tried_ = kMostTried;
  std::vector<Replica> placed_;
};

}  // namespace

Placement place_by_usher(const std::vector<Service>& services, const std::vector<Device>& devices,
                         Metric metric) {
  return Usher(services, devices, metric).run();
}

}  // namespace gpushare::cluster::services
