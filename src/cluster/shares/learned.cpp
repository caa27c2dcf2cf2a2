// Policies that learn every job's performance with bounds: Cilantro's (section 3.4.1), and ours.
//
// Welfare is maximised at the upper ends of the bounds (optimism), by the exact solvers of cilantro.hpp. For no
// justified complaints every job has a demand that is recommended from its bounds (3.5), (3.6). Ours learns by the
// kernel that forgets, and is less optimistic: the welfare is that of the estimate and a part of the margin above it. The
// least utility is one job's, so that an error of hope costs more there than in a mean.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cluster/learn/load_forecast.hpp"
#include "cluster/shares/policy.hpp"

namespace gpushare::cluster::shares {
namespace {

constexpr double kBeta = 0.75;        // of (3.6): how much of the demand's upper bound, the rest explores
constexpr int64_t kFirstUnits = 100;  // units at which a demand is looked for at first

class Learned final : public Policy {
 public:
  Learned(const Known& known, LearnerKind kind, bool ours)
      : known_(known), ours_(ours), units_(equal_shares(known.capacity, known.jobs.size())) {
    const double fair = double(known.capacity) / double(known.jobs.size());
    for (const KnownJob& job : known.jobs) {
      learners_.push_back(job.declared ? make_declared_performance(*job.declared, job.slo)
                                       : make_performance_learner(kind, fair, job.load));
      loads_.emplace_back(job.load);
      demand_.push_back(fair);
    }
  }

  std::vector<int64_t> decide() override {
    if (!told_) return units_;
    units_ = known_.objective == ShareObjective::kNoJustifiedComplaints ? by_demand() : by_welfare();
    return units_;
  }

  void observe(const std::vector<Observed>& jobs) override {
    told_ = true;
    for (size_t j = 0; j < jobs.size(); ++j) {
      learners_[j]->observe(double(jobs[j].units), jobs[j].load, jobs[j].performance);
      loads_[j].observe(jobs[j].load);
    }
  }

  std::optional<PerformanceBounds> bounds(size_t job, double units, double load) override {
    if (known_.jobs[job].declared) return {};
    return learners_[job]->at(units, load);
  }
  std::optional<double> load_bound(size_t job) override { return loads_[job].next().high; }

 private:
  double load_of(size_t job) const {
    const LoadForecast::Forecast next = loads_[job].next();
    return ours_ ? next.mean : next.high;
  }
  // Cilantro takes performance as never falling with more units, which tightens its bounds; ours does not.
  double hoped(const PerformanceBounds& bounds) const {
    if (!ours_) return bounds.high;
    const double optimism =
        known_.objective == ShareObjective::kSocialWelfare ? kOptimismOfMean : kOptimismOfLeast;
    return bounds.estimate + optimism * (bounds.high - bounds.estimate);
  }

  // What is hoped of the job at some numbers of units, ascending.
  UtilityJob hoped_curve(size_t j, const std::vector<int64_t>& at) {
    const double load = load_of(j);
    UtilityJob job{"", load, 1, known_.jobs[j].utility, {}};
    // A value beyond the objective by little: else all that is hoped for would be equal, and nothing told from it.
    for (const int64_t units : at)
      job.curve.points.emplace_back(double(units) / load,
                                    std::min(2.0, hoped(learners_[j]->at(double(units), load))));
    if (!ours_)
      for (size_t i = job.curve.points.size() - 1; i-- > 0;)
        job.curve.points[i].second = std::min(job.curve.points[i].second, job.curve.points[i + 1].second);
    return job;
  }

  std::vector<int64_t> by_welfare() {
    ShareProblem problem{known_.capacity, {}, units_, known_.max_step};
    for (size_t j = 0; j < known_.jobs.size(); ++j) {
      std::vector<int64_t> at(1, std::max<int64_t>(0, units_[j] - known_.max_step));
      while (at.back() < std::min(known_.capacity, units_[j] + known_.max_step)) at.push_back(at.back() + 1);
      problem.jobs.push_back(hoped_curve(j, at));
    }
    base::Result<ShareResult> divided = divide_shares(problem, known_.objective);
    std::vector<int64_t> near = divided.ok() ? with_rest(std::move(divided->units)) : units_;
    return ours_ ? near_or_far(std::move(near)) : near;
  }

  // A curve may be flat within a step and steep beyond it. So the best division without a step, in kGrains parts of the
  // capacity, is compared with the best one within a step, by the mean of kHorizon rounds on the way there.
  std::vector<int64_t> near_or_far(std::vector<int64_t> near) {
    const int64_t grain = std::max<int64_t>(1, known_.capacity / kGrains);
    ShareProblem whole{known_.capacity, {}, {}, {}}, coarse{known_.capacity / grain, {}, {}, {}};
    for (size_t j = 0; j < known_.jobs.size(); ++j) {
      std::vector<int64_t> at{units_[j], near[j]};
      for (int64_t units = 0; units <= known_.capacity; units += grain) at.push_back(units);
      std::sort(at.begin(), at.end());
      at.erase(std::unique(at.begin(), at.end()), at.end());
      whole.jobs.push_back(hoped_curve(j, at));
      coarse.jobs.push_back(whole.jobs.back());
      // A unit is a grain there: utility_at() divides by the load.
      coarse.jobs.back().load /= double(grain);
    }
    const base::Result<ShareResult> divided = divide_shares(coarse, known_.objective);
    if (!divided.ok()) return near;
    std::vector<int64_t> far;
    for (const int64_t grains : divided->units) far.push_back(grains * grain);
    far = with_rest(std::move(far));
    int64_t distance = 0;
    for (size_t j = 0; j < far.size(); ++j) distance = std::max(distance, std::abs(far[j] - units_[j]));
    if (distance <= known_.max_step || known_.max_step == 0) return near;
    const int64_t rounds = (distance + known_.max_step - 1) / known_.max_step;
    const auto worth = [&](const std::vector<int64_t>& units) {
      const ShareResult judged = judge_shares(whole, units);
      return known_.objective == ShareObjective::kSocialWelfare ? judged.welfare : judged.egalitarian;
    };
    double sum = 0;
    for (int64_t round = 1; round <= kHorizon; ++round)
      sum += worth(on_the_way(far, std::min(round, rounds), rounds));
    return sum > kFarGain * double(kHorizon) * worth(near) ? on_the_way(far, 1, rounds) : near;
  }

  // After so many of the rounds in which the shares go from what they are to `far`.
  std::vector<int64_t> on_the_way(const std::vector<int64_t>& far, int64_t round, int64_t rounds) const {
    std::vector<int64_t> units;
    for (size_t j = 0; j < far.size(); ++j)
      units.push_back(units_[j] + (far[j] - units_[j]) * round / rounds);
    int64_t sum = 0;
    for (const int64_t one : units) sum += one;
    for (size_t j = 0; sum > known_.capacity; j = (j + 1) % units.size())  // divisions that were rounded up
      if (units[j] > far[j]) --units[j], --sum;
    return units;
  }

  // Units that nobody needs by what is known stay where they were, within the step: a job that is worse off than
  // believed has them.
  std::vector<int64_t> with_rest(std::vector<int64_t> units) const {
    int64_t rest = known_.capacity;
    for (const int64_t u : units) rest -= u;
    for (size_t j = 0; j < units.size() && rest > 0; ++j) {
      const int64_t more = std::min(rest, std::max<int64_t>(0, units_[j] - units[j]));
      units[j] += more;
      rest -= more;
    }
    return units;
  }

  std::vector<int64_t> by_demand() {
    std::vector<Demand> demands;
    for (size_t j = 0; j < known_.jobs.size(); ++j) {
      const double load = load_of(j);
      const double recommended = ours_ ? expected_demand(j, load) : cautious_demand(j, load);
      demand_[j] =
          std::clamp(recommended, demand_[j] - double(known_.max_step), demand_[j] + double(known_.max_step));
      demand_[j] = std::clamp(demand_[j], 0.0, double(known_.capacity));
      demands.push_back({int64_t(std::ceil(demand_[j] - 1e-9)),
                         std::max<int64_t>(0, units_[j] - known_.max_step), units_[j] + known_.max_step});
    }
    const auto units = max_min_shares(demands, known_.capacity);
    return units ? with_rest(*units) : units_;
  }

  // The least units at which `met` holds, of those looked at: some from end to end, then all between the last two.
  template <class F>
  double least_units(size_t job, double load, F&& met) {
    const int64_t step = std::max<int64_t>(1, known_.capacity / kFirstUnits);
    int64_t at = 0;
    while (at <= known_.capacity && !met(learners_[job]->at(double(at), load), double(at))) at += step;
    if (at > known_.capacity) return double(known_.capacity);
    int64_t low = std::max<int64_t>(-1, at - step);  // not met there
    while (at - low > 1) {
      const int64_t middle = low + (at - low) / 2;
      (met(learners_[job]->at(double(middle), load), double(middle)) ? at : low) = middle;
    }
    return double(at);
  }

  // Cilantro's (3.5) and (3.6): of the upper bound of the demand, and of where the bounds are furthest on both sides of
  // the objective.
  double cautious_demand(size_t job, double load) {
    double widest = -1e300, unsure = 0;
    const double above = least_units(job, load, [&](const PerformanceBounds& got, double units) {
      const double margin = std::min(got.high - 1, 1 - got.low);
      if (margin > widest) {
        widest = margin;
        unsure = units;
      }
      return got.low >= 1;
    });
    return kBeta * above + (1 - kBeta) * unsure;
  }

  // Ours: the least units at which the objective is met by the estimate, less a part of the margin below it. A job that
  // gets less than its demand is a job that complains, one that gets more costs others: the estimate alone would be
  // wrong half of the time.
  double expected_demand(size_t job, double load) {
    return least_units(job, load, [](const PerformanceBounds& got, double) {
      return got.estimate - kCaution * (got.estimate - got.low) >= 1;
    });
  }

  static constexpr double kOptimismOfMean = 0.5, kOptimismOfLeast = 0.2, kCaution = 0.3;
  static constexpr int64_t kGrains = 48, kHorizon = 20;
  static constexpr double kFarGain =
      1.25;  // by which it must be better, since it relies on what was never tried
  const Known known_;
  const bool ours_;
  std::vector<int64_t> units_;
  std::vector<std::unique_ptr<PerformanceLearner>> learners_;
  std::vector<LoadForecast> loads_;
  std::vector<double> demand_;
  bool told_ = false;
};

}  // namespace

std::vector<int64_t> equal_shares(int64_t capacity, size_t jobs) {
  std::vector<int64_t> units(jobs, capacity / int64_t(jobs));
  for (size_t j = 0; j < size_t(capacity % int64_t(jobs)); ++j) ++units[j];
  return units;
}

std::unique_ptr<Policy> make_learned(std::string_view name, const Known& known) {
  if (name == "gpushare") return std::make_unique<Learned>(known, LearnerKind::kAdaptive, true);
  if (name == "cilantro") return std::make_unique<Learned>(known, LearnerKind::kBinning, false);
  if (name == "cilantro-kernel") return std::make_unique<Learned>(known, LearnerKind::kKernel, false);
  if (name == "cilantro-surface") return std::make_unique<Learned>(known, LearnerKind::kSurface, false);
  return nullptr;
}

std::unique_ptr<Policy> make_policy(std::string_view name, const Known& known, uint64_t seed) {
  if (auto learned = make_learned(name, known)) return learned;
  return make_baseline(name, known, seed);
}

}  // namespace gpushare::cluster::shares
