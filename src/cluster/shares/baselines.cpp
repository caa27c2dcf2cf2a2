// The baselines that Cilantro is compared with (thesis 002, section 3.7.1), each as that section describes it. Ernest,
// Quasar, Parties and MIAD give demands, which are water-filled. The published code of Parties and MIAD falls back to
// equal shares; this code does not.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "cluster/shares/policy.hpp"
#include "cluster/solve/evolution.hpp"

namespace gpushare::cluster::shares {
namespace {

class Fair : public Policy {
 public:
  explicit Fair(const Known& known)
      : known_(known), units_(equal_shares(known.capacity, known.jobs.size())) {}
  std::vector<int64_t> decide() override { return units_; }
  void observe(const std::vector<Observed>&) override {}

 protected:
  double utility(size_t job, double performance) const {
    return utility_of(known_.jobs[job].utility, performance, 1);
  }
  void fill(const std::vector<double>& wanted) {
    std::vector<Demand> demands;
    for (const double units : wanted) {
      const double whole = std::clamp(std::ceil(units - 1e-9), 0.0, double(known_.capacity) + 1);
      demands.push_back({int64_t(whole), 0, INT64_MAX});
    }
    units_ = *max_min_shares(demands, known_.capacity);
  }

  const Known known_;
  std::vector<int64_t> units_;
};

// The half with the greater utilities gives one unit each to the other half.
class Greedy final : public Fair {
 public:
  using Fair::Fair;
  void observe(const std::vector<Observed>& jobs) override {
    std::vector<size_t> order(jobs.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::vector<double> utilities;
    for (size_t j = 0; j < jobs.size(); ++j) utilities.push_back(utility(j, jobs[j].performance));
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return utilities[a] > utilities[b]; });
    for (size_t i = 0; i < order.size() / 2; ++i) {
      if (units_[order[i]] == 0) continue;
      --units_[order[i]];
      ++units_[order[order.size() - 1 - i]];
    }
  }
};

// Shares in proportion to share / utility.
class Minerva final : public Fair {
 public:
  using Fair::Fair;
  void observe(const std::vector<Observed>& jobs) override {
    std::vector<double> weight;
    double sum = 0;
    for (size_t j = 0; j < jobs.size(); ++j) {
      weight.push_back(std::max(1.0, double(jobs[j].units)) /
                       std::max(0.05, utility(j, jobs[j].performance)));
      sum += weight.back();
    }
    int64_t rest = known_.capacity;
    for (size_t j = 0; j < jobs.size(); ++j) {
      units_[j] = int64_t(std::floor(double(known_.capacity) * weight[j] / sum));
      rest -= units_[j];
    }
    for (size_t j = 0; j < jobs.size() && rest > 0; ++j, --rest) ++units_[j];
  }
};

// Demands by steps: up by 20 of 1,000 units where the objective is missed or nearly so, down by 5 where it is met with ease.
class Parties final : public Fair {
 public:
  explicit Parties(const Known& known) : Fair(known), demand_(units_.begin(), units_.end()) {}
  void observe(const std::vector<Observed>& jobs) override {
    const double up = std::max(1.0, 0.02 * double(known_.capacity)),
                 down = std::max(1.0, 0.005 * double(known_.capacity));
    for (size_t j = 0; j < jobs.size(); ++j) {
      if (jobs[j].performance < 1.01) demand_[j] = std::min(demand_[j] + up, double(known_.capacity));
      if (jobs[j].performance > 1.03) demand_[j] = std::max(demand_[j] - down, 1.0);
    }
    fill(demand_);
  }

 private:
  std::vector<double> demand_;
};

class Miad final : public Fair {
 public:
  using Fair::Fair;
  void observe(const std::vector<Observed>& jobs) override {
    std::vector<double> demand;
    for (const Observed& job : jobs)
      demand.push_back(job.performance < 1 ? 1.5 * double(std::max<int64_t>(job.units, 1))
                                           : std::max(1.0, double(job.units - 1)));
    fill(demand);
  }
};

// Ernest: the time of a unit of work (1 / performance) as non-negative combination of 1, 1/x, log x and x, x the units per load.
class Ernest final : public Fair {
 public:
  explicit Ernest(const Known& known) : Fair(known), sums_(known.jobs.size()) {}
  void observe(const std::vector<Observed>& jobs) override {
    std::vector<double> demand;
    for (size_t j = 0; j < jobs.size(); ++j) {
      const double scale = double(known_.capacity) / double(jobs.size()) / known_.jobs[j].load;
      Sums& sums = sums_[j];
      const Features x = features(std::max(0.5, double(jobs[j].units)) / jobs[j].load / scale);
      const double time = 1 / std::max(0.02, jobs[j].performance);
      for (size_t a = 0; a < x.size(); ++a) {
        sums.target[a] += x[a] * time;
        for (size_t b = 0; b < x.size(); ++b) sums.square[a][b] += x[a] * x[b];
      }
      // Non-negative least squares by coordinate descent: the programme is convex.
      Features w{};
      for (int round = 0; round < 200; ++round)
        for (size_t a = 0; a < w.size(); ++a) {
          double rest = sums.target[a];
          for (size_t b = 0; b < w.size(); ++b)
            if (b != a) rest -= sums.square[a][b] * w[b];
          w[a] = std::max(0.0, rest / (sums.square[a][a] + 1e-9));
        }
      double found = double(known_.capacity);
      const int64_t step = std::max<int64_t>(1, known_.capacity / 1000);
      for (int64_t units = 1; units <= known_.capacity; units += step) {
        const Features at = features(double(units) / jobs[j].load / scale);
        if (std::inner_product(at.begin(), at.end(), w.begin(), 0.0) > 1) continue;
        found = double(units);
        break;
      }
      demand.push_back(found);
    }
    fill(demand);
  }

 private:
  using Features = std::array<double, 4>;
  static Features features(double x) { return {1, 1 / x, std::log1p(x), x}; }
  struct Sums {
    std::array<Features, 4> square{};
    Features target{};
  };
  std::vector<Sums> sums_;
};

// Quasar: the performances of all jobs at all (binned) shares as one matrix of low rank, completed by stochastic
// gradient descent.
class Quasar final : public Fair {
 public:
  Quasar(const Known& known, uint64_t seed) : Fair(known), random_(seed) {
    const size_t jobs = known.jobs.size();
    rows_.assign(jobs, {});
    columns_.assign(kBins, {});
    bias_.assign(jobs, 0.5);
    std::uniform_real_distribution<double> small(-0.1, 0.1);
    for (auto* side : {&rows_, &columns_})
      for (auto& vector : *side)
        for (double& value : vector) value = small(random_);
    column_bias_.assign(kBins, 0);
    sum_.assign(jobs * kBins, 0);
    count_.assign(jobs * kBins, 0);
  }
  void observe(const std::vector<Observed>& jobs) override {
    for (size_t j = 0; j < jobs.size(); ++j) {
      const size_t cell = j * kBins + bin(double(jobs[j].units));
      sum_[cell] += jobs[j].performance;
      ++count_[cell];
    }
    constexpr double kRate = 0.05, kPenalty = 0.02;
    for (int epoch = 0; epoch < 20; ++epoch)
      for (size_t cell = 0; cell < sum_.size(); ++cell) {
        if (count_[cell] == 0) continue;
        const size_t j = cell / kBins, b = cell % kBins;
        const double error = sum_[cell] / count_[cell] - predict(j, b);
        bias_[j] += kRate * error;
        column_bias_[b] += kRate * (error - kPenalty * column_bias_[b]);
        for (size_t r = 0; r < kRank; ++r) {
          const double row = rows_[j][r], column = columns_[b][r];
          rows_[j][r] += kRate * (error * column - kPenalty * row);
          columns_[b][r] += kRate * (error * row - kPenalty * column);
        }
      }
    std::vector<double> demand;
    for (size_t j = 0; j < jobs.size(); ++j) {
      size_t b = 0;
      while (b < kBins && predict(j, b) < 1) ++b;
      demand.push_back(b == kBins ? double(known_.capacity) : units_of(b));
    }
    fill(demand);
  }

 private:
  static constexpr size_t kBins = 24, kRank = 2;
  double units_of(size_t b) const { return std::pow(double(known_.capacity), double(b + 1) / kBins); }
  size_t bin(double units) const {
    const double at =
        std::log(std::max(units, 1.0)) / std::log(std::max(2.0, double(known_.capacity))) * kBins;
    return std::min(kBins - 1, size_t(std::max(0.0, std::ceil(at - 1e-9) - 1)));
  }
  double predict(size_t job, size_t b) const {
    double sum = bias_[job] + column_bias_[b];
    for (size_t r = 0; r < kRank; ++r) sum += rows_[job][r] * columns_[b][r];
    return sum;
  }
  std::mt19937_64 random_;
  std::vector<std::array<double, kRank>> rows_, columns_;
  std::vector<double> bias_, column_bias_, sum_, count_;
};

// The evolutionary algorithm of section 3.6, on what the objective was seen to be.
class Evolutionary final : public Fair {
 public:
  Evolutionary(const Known& known, uint64_t seed)
      : Fair(known), search_(units_, known.capacity, 0, seed), fair_utility_(known.jobs.size(), 0) {}
  std::vector<int64_t> decide() override {
    ++round_;
    return units_ = search_.next();
  }
  void observe(const std::vector<Observed>& jobs) override {
    double sum = 0, least = 1e300, complaint = 1e300;
    for (size_t j = 0; j < jobs.size(); ++j) {
      const double u = utility(j, jobs[j].performance);
      if (round_ <= 2) fair_utility_[j] += u / 2;
      sum += u;
      least = std::min(least, u);
      complaint = std::min(complaint, u / std::max(0.05, fair_utility_[j]));
    }
    search_.observe(units_, known_.objective == ShareObjective::kSocialWelfare ? sum / double(jobs.size())
                            : known_.objective == ShareObjective::kEgalitarianWelfare ? least
                                                                                      : complaint);
  }

 private:
  EvolutionarySearch search_;
  std::vector<double> fair_utility_;
  size_t round_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_baseline(std::string_view name, const Known& known, uint64_t seed) {
  if (name == "fair") return std::make_unique<Fair>(known);
  if (name == "greedy") return std::make_unique<Greedy>(known);
  if (name == "minerva") return std::make_unique<Minerva>(known);
  if (name == "parties") return std::make_unique<Parties>(known);
  if (name == "miad") return std::make_unique<Miad>(known);
  if (name == "ernest") return std::make_unique<Ernest>(known);
  if (name == "quasar") return std::make_unique<Quasar>(known, seed);
  if (name == "evolutionary") return std::make_unique<Evolutionary>(known, seed);
  return nullptr;
}

}  // namespace gpushare::cluster::shares
