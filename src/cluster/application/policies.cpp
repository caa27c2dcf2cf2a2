// SPDX-License-Identifier: Apache-2.0
#include "cluster/application/policies.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cluster/learn/gaussian_process.hpp"
#include "cluster/learn/load_forecast.hpp"
#include "cluster/shares/policy.hpp"
#include "cluster/solve/evolution.hpp"

namespace gpushare::cluster::application {
namespace {

class Equal : public Policy {
 public:
  explicit Equal(const Known& known)
      : known_(known), units_(shares::equal_shares(known.capacity, known.services)) {}
  std::vector<int64_t> decide() override { return units_; }
  void observe(const std::vector<int64_t>&, const Round&) override {}

 protected:
  const Known known_;
  std::vector<int64_t> units_;
};

class Proportional final : public Equal {
 public:
  using Equal::Equal;
  void observe(const std::vector<int64_t>&, const Round& seen) override {
    std::vector<double> busy;
    for (const Usage& usage : seen.usage) busy.push_back(usage.busy);
    units_ = proportional_division(busy, known_.capacity);
  }
};

class Evolutionary final : public Equal {
 public:
  explicit Evolutionary(const Known& known) : Equal(known), search_(units_, known.capacity, 1, known.seed) {}
  std::vector<int64_t> decide() override { return search_.next(); }
  void observe(const std::vector<int64_t>& units, const Round& seen) override {
    if (seen.p99_s > 0) search_.observe(units, -seen.p99_s);  // 0: no request came
  }

 private:
  EvolutionarySearch search_;
};

class EpsilonGreedy final : public Equal {
 public:
  explicit EpsilonGreedy(const Known& known) : Equal(known), random_(known.seed) {}
  std::vector<int64_t> decide() override {
    return least_s_ > 0 && random_part(random_) < kExplored
               ? random_division(known_.capacity, known_.services, 1, random_)
               : units_;
  }
  void observe(const std::vector<int64_t>& units, const Round& seen) override {
    if (seen.p99_s <= 0 || (least_s_ > 0 && seen.p99_s >= least_s_)) return;  // 0: no request came
    least_s_ = seen.p99_s;
    units_ = units;
  }

 private:
  static constexpr double kExplored = 1.0 / 3;
  std::mt19937_64 random_;
  double least_s_ = 0;
};

// The latency is learned as a logarithm, since the latencies of good and of overloaded units differ by orders of magnitude.
class Cilantro final : public Equal {
 public:
  explicit Cilantro(const Known& known) : Equal(known), random_(known.seed), load_(known.load_rps) {}

  std::vector<int64_t> decide() override {
    if (values_.size() < kFirstRounds) return units_;
    fit();
    std::vector<int64_t> best = units_;
    double least = lower_bound(best);
    const auto look_at = [&](std::vector<int64_t> units) {
      for (size_t s = 0; s < units.size(); ++s)
        if (std::abs(units[s] - units_[s]) > known_.max_step) return;
      const double bound = lower_bound(units);
      if (bound >= least) return;
      least = bound;
      best = std::move(units);
    };
    for (const auto& units : tried_) look_at(units);
    for (int candidate = 0; candidate < kCandidates; ++candidate) {
      std::vector<int64_t> units = best;
      mutate_division(units, random_);
      look_at(std::move(units));
    }
    return units_ = best;
  }

  void observe(const std::vector<int64_t>& units, const Round& seen) override {
    if (seen.p99_s <= 0) return;
    load_.observe(seen.load_rps);
    tried_.push_back(units);
    loads_.push_back(seen.load_rps);
    values_.push_back(std::log(seen.p99_s));
    if (values_.size() <= kWindow) return;
    tried_.erase(tried_.begin());
    loads_.erase(loads_.begin());
    values_.erase(values_.begin());
  }

 private:
  std::vector<double> point(const std::vector<int64_t>& units, double load_rps) const {
    std::vector<double> result;
    for (const int64_t one : units)
      result.push_back(double(one) * double(known_.services) / double(known_.capacity));
    result.push_back(load_rps / known_.load_rps);
    return result;
  }
  // The length of the kernel is the likeliest of some.
  void fit() {
    std::vector<double> points;
    for (size_t i = 0; i < values_.size(); ++i)
      for (const double x : point(tried_[i], loads_[i])) points.push_back(x);
    const double mean = std::accumulate(values_.begin(), values_.end(), 0.0) / double(values_.size());
    double square = 0;
    for (const double value : values_) square += (value - mean) * (value - mean) / double(values_.size());
    const double amplitude = std::max(0.1, std::sqrt(square));
    const std::vector<double> noise(values_.size(), kNoise);
    const auto fit_with = [&](double length) {
      model_.fit(known_.services + 1, points, values_, noise, length, amplitude, mean);
      return model_.log_likelihood();
    };
    if (round_++ % kRefit == 0) {
      double likeliest = -1e300;
      for (const double length : {0.5, 1.0, 2.0, 4.0, 8.0}) {
        const double likelihood = fit_with(length);
        if (likelihood <= likeliest) continue;
        likeliest = likelihood;
        length_ = length;
      }
    }
    fit_with(length_);
  }
  double lower_bound(const std::vector<int64_t>& units) const {
    const GaussianProcess::Prediction got = model_.at(point(units, load_.next().high).data());
    return got.mean - kDeviations * got.sd;
  }

  static constexpr size_t kFirstRounds = 2, kWindow = 200, kRefit = 10;
  static constexpr int kCandidates = 150;
  static constexpr double kDeviations = 1.645;  // of 90% bounds
  static constexpr double kNoise = 0.1;         // of the logarithm of a round's latency
  std::mt19937_64 random_;
  LoadForecast load_;
  GaussianProcess model_;
  std::vector<std::vector<int64_t>> tried_;
  std::vector<double> loads_, values_;
  double length_ = 1;
  size_t round_ = 0;
};

class ByProxies final : public Equal {
 public:
  explicit ByProxies(const Known& known) : Equal(known), load_(known.load_rps), sums_(known.services) {}

  std::vector<int64_t> decide() override {
    if (beliefs_.empty()) return units_;
    units_ = divide(beliefs_,
                    {known_.capacity, load_.next().high, known_.round_s, tail_, units_, known_.max_step});
    return units_;
  }

  void observe(const std::vector<int64_t>& units, const Round& seen) override {
    load_.observe(seen.load_rps);
    came_ = kKept * came_ + seen.load_rps;
    answered_ = kKept * answered_ + seen.answered_rps;
    for (size_t s = 0; s < sums_.size(); ++s) {
      sums_[s].busy = kKept * sums_[s].busy + seen.usage[s].busy;
      sums_[s].visits = kKept * sums_[s].visits + seen.usage[s].visits_rps;
    }
    if (came_ <= 0) return;
    beliefs_.resize(sums_.size());
    for (size_t s = 0; s < sums_.size(); ++s) {
      const Sums& sums = sums_[s];
      // Visits are counted for requests that were answered: where a service is overloaded, those behind it see fewer.
      // Where no visit has ended, the busy time is taken as that of one visit by each request that came.
      if (sums.visits > 0) {
        beliefs_[s].visits = sums.visits / (answered_ > 0 ? answered_ : came_);
        beliefs_[s].work_s = sums.busy / sums.visits;
      } else if (sums.busy > 0) {
        beliefs_[s].visits = 1;
        beliefs_[s].work_s = sums.busy / came_;
      }
    }
    if (answered_ <= 0) return;
    learn_waits(units, seen);
    learn_tail(units, seen);
  }

  std::optional<double> expected_p99_s(double load_rps) const override {
    if (answered_ <= 0) return {};
    const Moments time = end_to_end(beliefs_, load_rps, units_, known_.round_s);
    return time.mean + tail_ * std::sqrt(time.variance);
  }

 private:
  struct Sums {
    double busy = 0, visits = 0;       // newer rounds count more
    double waiting = 0, expected = 0;  // mean visits that waited, and that would with exponential work
  };

  bool steady(size_t s, const std::vector<int64_t>& units, double load_rps) const {
    return load_rps * beliefs_[s].visits * beliefs_[s].work_s <= kSteady * double(units[s]);
  }
  void learn_waits(const std::vector<int64_t>& units, const Round& seen) {
    for (size_t s = 0; s < sums_.size(); ++s) {
      if (beliefs_[s].visits <= 0 || !steady(s, units, seen.load_rps)) continue;
      Belief plain = beliefs_[s];
      plain.wait_factor = 1;
      const double time = time_by_units(plain, seen.load_rps, units[s], known_.round_s).back().mean;
      sums_[s].waiting = kKept * sums_[s].waiting + seen.usage[s].waiting;
      sums_[s].expected = kKept * sums_[s].expected + seen.load_rps * (time - plain.visits * plain.work_s);
      beliefs_[s].wait_factor =
          std::clamp((sums_[s].waiting + kPrior) / (sums_[s].expected + kPrior), kLeastFactor, kMostFactor);
    }
  }
  void learn_tail(const std::vector<int64_t>& units, const Round& seen) {
    for (size_t s = 0; s < sums_.size(); ++s)
      if (!steady(s, units, seen.load_rps)) return;
    const Moments time = end_to_end(beliefs_, seen.load_rps, units, known_.round_s);
    if (time.variance <= 0) return;
    const double now = std::clamp((seen.p99_s - time.mean) / std::sqrt(time.variance), kLeastTail, kMostTail);
    tail_ = kKept * tail_ + (1 - kKept) * now;
  }

  static constexpr double kKept = 0.8;    // of what was seen, a round later
  static constexpr double kSteady = 0.9;  // busier services do not come to their mean queue within a round
  static constexpr double kPrior = 1;     // visits that wait
  static constexpr double kLeastFactor = 0.1, kMostFactor = 10, kLeastTail = 1, kMostTail = 10;
  LoadForecast load_;
  double came_ = 0, answered_ = 0;  // requests a second; newer rounds count more
  double tail_ = kTail;
  std::vector<Sums> sums_;
  std::vector<Belief> beliefs_;  // empty until something was seen
};

}  // namespace

std::unique_ptr<Policy> make_policy(std::string_view name, const Known& known) {
  if (name == "gpushare") return std::make_unique<ByProxies>(known);
  if (name == "cilantro") return std::make_unique<Cilantro>(known);
  if (name == "fair") return std::make_unique<Equal>(known);
  if (name == "proportional") return std::make_unique<Proportional>(known);
  if (name == "evolutionary") return std::make_unique<Evolutionary>(known);
  if (name == "epsilon-greedy") return std::make_unique<EpsilonGreedy>(known);
  return nullptr;
}

}  // namespace gpushare::cluster::application
