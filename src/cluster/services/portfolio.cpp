// SPDX-License-Identifier: Apache-2.0
#include "cluster/services/portfolio.hpp"

#include <algorithm>
#include <numeric>

#include "cluster/portfolio.hpp"
#include "cluster/services/serving.hpp"

namespace gpushare::cluster::services {
namespace {

constexpr uint64_t kBelievedSeed = 0x6770;  // the requests that are believed to come are not those that come
constexpr double kMostCompared = 40'000;    // requests played for each candidate
constexpr double kMostTried = 6'000;        // and for each change
constexpr double kMostSeconds = 120;
constexpr double kLeastSlos = 20;     // SLOs that must pass for a figure to mean something
constexpr double kMostWork = 3e6;     // requests of all changes together
constexpr double kChangeGain = 2e-3;  // part of the requests that a change must gain: less is chance
constexpr double kCandidateGain = 1e-3;

class Improver {
 public:
  Improver(const std::vector<Service>& services, const std::vector<Device>& devices)
      : services_(services), devices_(devices) {
    for (const Service& service : services) {
      rate_ += service.rate_rps;
      longest_s_ = std::max(longest_s_, service.slo_ms / 1e3);
    }
  }

  Placement run(std::vector<Placement> candidates) {
    const double compare_s = std::min(kMostSeconds, kMostCompared / rate_);
    if (compare_s < kLeastSlos * longest_s_) return std::move(candidates.front());
    Portfolio<size_t> portfolio(kCandidateGain);
    for (size_t c = 0; c < candidates.size(); ++c)
      portfolio.offer(rate_ - answered(candidates[c], compare_s, kBelievedSeed), c);
    Placement best = std::move(candidates[portfolio.best()]);
    const double before = rate_ - portfolio.cost();
    Placement improved = best;
    improve(improved);
    const double after = answered(improved, compare_s, kBelievedSeed);
    if (after > before + kCandidateGain * rate_) {
      best = std::move(improved);
      best.goodput_rps = after;
    } else if (portfolio.best() != 0) {
      best.goodput_rps = before;
    } else {
      return best;
    }
    best.goodput_rps = std::min(best.goodput_rps, rate_);
    best.bound_rps = rate_;  // the solvers' bounds are of rules that this does not keep
    best.optimal = false;
    return best;
  }

 private:
  double answered(const Placement& placement, double duration_s, uint64_t seed,
                  std::vector<ServedService>* rows = nullptr) const {
    base::Result<ServingResult> played =
        serve(services_, devices_, placement, {duration_s, 0, seed}, nullptr);
    if (!played.ok()) return 0;
    // The requests that happened to come, in proportion to those that come in the mean.
    const double value = played->offered_rps > 0 ? played->goodput_rps * rate_ / played->offered_rps : 0;
    if (rows != nullptr) *rows = std::move(played->services);
    return value;
  }

  double memory_left(const Placement& placement, size_t device) const {
    double left = 1;
    for (const Replica& replica : placement.replicas)
      if (replica.device == device) left -= of(replica).memory_fraction(devices_[device]);
    return left;
  }
  const Configuration& of(const Replica& replica) const {
    for (const Configuration& configuration : services_[replica.service].configurations)
      if (configuration.batch == replica.batch) return configuration;
    static const Configuration none{};
    return none;
  }
  bool in_time(size_t service, const Configuration& configuration, size_t device) const {
    return configuration.latency_ms <= services_[service].slo_ms * devices_[device].speed;
  }
  Replica replica_of(size_t service, const Configuration& configuration, size_t device) const {
    double compute = 0;
    for (const double percent : configuration.compute_percent) compute = percent >= 0 ? percent : compute;
    const double speed = devices_[device].speed;
    return {service,
            device,
            configuration.batch,
            compute,
            configuration.throughput_rps * speed,
            configuration.latency_ms / speed};
  }
  static bool has(const Placement& placement, size_t service, size_t device) {
    return std::any_of(placement.replicas.begin(), placement.replicas.end(), [&](const Replica& replica) {
      return replica.service == service && replica.device == device;
    });
  }

  // All placements that one change of the service makes.
  std::vector<Placement> changes(const Placement& from, size_t service) const {
    std::vector<Placement> out;
    const auto offer = [&](Placement placement) {
      for (size_t d = 0; d < devices_.size(); ++d)
        if (memory_left(placement, d) < -1e-9) return;
      out.push_back(std::move(placement));
    };
    for (const Configuration& configuration : services_[service].configurations) {
      // Another batch on all its devices, and on one more.
      Placement other = from;
      bool possible = true, there = false;
      for (Replica& replica : other.replicas) {
        if (replica.service != service) continue;
        there = true;
        possible = possible && in_time(service, configuration, replica.device);
        replica = replica_of(service, configuration, replica.device);
      }
      if (!possible) continue;
      if (there) offer(other);
      for (size_t d = 0; d < devices_.size(); ++d) {
        if (has(from, service, d) || !in_time(service, configuration, d)) continue;
        Placement more = other;
        more.replicas.push_back(replica_of(service, configuration, d));
        offer(std::move(more));
      }
    }
    for (size_t r = 0; r < from.replicas.size(); ++r) {
      if (from.replicas[r].service != service) continue;
      Placement less = from;
      less.replicas.erase(less.replicas.begin() + static_cast<std::ptrdiff_t>(r));
      for (size_t d = 0; d < devices_.size(); ++d) {
        if (has(from, service, d) || !in_time(service, of(from.replicas[r]), d)) continue;
        Placement moved = less;
        moved.replicas.push_back(replica_of(service, of(from.replicas[r]), d));
        offer(std::move(moved));
      }
      offer(std::move(less));
    }
    return out;
  }

  void improve(Placement& placement) const {
    const double tried_s = std::max(std::min(kMostSeconds, kMostTried / rate_), kLeastSlos * longest_s_);
    double work = kMostWork;
    std::vector<ServedService> rows;
    double value = answered(placement, tried_s, kBelievedSeed + 1, &rows);
    for (bool better = true; better && work > 0;) {
      better = false;
      if (value >= rate_ * (1 - kChangeGain)) break;
      // Services that lose the most requests first; then those beside them, which may stand in the way.
      std::vector<size_t> order(services_.size());
      std::iota(order.begin(), order.end(), size_t{0});
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return rows[a].requests - rows[a].in_time > rows[b].requests - rows[b].in_time;
      });
      for (const size_t service : order) {
        Portfolio<Placement> portfolio;
        for (Placement& change : changes(placement, service)) {
          if (work <= 0) break;
          work -= rate_ * tried_s;
          const double got = answered(change, tried_s, kBelievedSeed + 1);
          if (got > value + kChangeGain * rate_) portfolio.offer(rate_ - got, std::move(change));
        }
        if (portfolio.empty()) continue;
        placement = std::move(portfolio.best());
        value = answered(placement, tried_s, kBelievedSeed + 1, &rows);
        better = true;
        break;
      }
    }
    tell_unserved(placement);
  }

  void tell_unserved(Placement& placement) const {
    std::vector<std::pair<size_t, std::string>> unserved;
    for (size_t s = 0; s < services_.size(); ++s) {
      if (std::any_of(placement.replicas.begin(), placement.replicas.end(),
                      [&](const Replica& replica) { return replica.service == s; }))
        continue;
      std::string reason = "no room is left: others answer more in time with it";
      for (const auto& [service, told] : placement.unserved)
        if (service == s) reason = told;
      unserved.emplace_back(s, std::move(reason));
    }
    placement.unserved = std::move(unserved);
  }

  const std::vector<Service>& services_;
  const std::vector<Device>& devices_;
  double rate_ = 0, longest_s_ = 0;
};

}  // namespace

Placement best_played(const std::vector<Service>& services, const std::vector<Device>& devices,
                      std::vector<Placement> candidates) {
  return Improver(services, devices).run(std::move(candidates));
}

}  // namespace gpushare::cluster::services
