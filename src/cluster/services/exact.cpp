// SPDX-License-Identifier: Apache-2.0
#include "cluster/services/exact.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace gpushare::cluster::services {
namespace {

constexpr double kEps = 1e-9;
constexpr size_t kMostPlans = 512;  // a service: beyond, only heuristics see all of them
constexpr uint64_t kMostPackingSteps = 20'000;
constexpr double kUnbounded = std::numeric_limits<double>::infinity();
constexpr size_t kMostThresholds = 6;  // of dual feasible functions, a resource

// An option with its replicas on each class.
struct Plan {
  size_t option = 0;
  std::vector<uint32_t> replicas;  // a class
  double value = 0;
  std::vector<double> weights;  // a constraint
};

// Size `x` under the dual feasible function of `threshold`; 0: as it is.
double dual_feasible(double x, double threshold) {
  if (threshold <= 0) return x;
  if (x > 1 - threshold + kEps) return 1;
  return x < threshold - kEps ? 0 : x;
}

struct Constraint {
  bool memory = false;
  double threshold = 0;
  size_t of_class = 0;  // classes.size(): all together
  double capacity = 0;
};

struct Increment {
  size_t depth = 0;  // of the service in the order of branching
  double weight = 0;
  double value = 0;
};

// Upper concave envelope of (weight, value), as increments of falling density from (0, the best value of weight 0).
std::vector<std::pair<double, double>> envelope(std::vector<std::pair<double, double>> points, double* base) {
  std::sort(points.begin(), points.end());
  std::vector<std::pair<double, double>> hull;
  for (const auto& point : points) {
    if (!hull.empty() && point.second <= hull.back().second) continue;
    if (!hull.empty() && point.first <= hull.back().first + kEps) {
      hull.back().second = point.second;
      if (hull.size() == 1) continue;
      const auto top = hull.back();
      hull.pop_back();
      while (hull.size() >= 2) {
        const auto& a = hull[hull.size() - 2];
        const auto& b = hull.back();
        if ((b.second - a.second) * (top.first - b.first) > (top.second - b.second) * (b.first - a.first))
          break;
        hull.pop_back();
      }
      hull.push_back(top);
      continue;
    }
    while (hull.size() >= 2) {
      const auto& a = hull[hull.size() - 2];
      const auto& b = hull.back();
      if ((b.second - a.second) * (point.first - b.first) > (point.second - b.second) * (b.first - a.first))
        break;
      hull.pop_back();
    }
    hull.push_back(point);
  }
  *base = hull.empty() ? 0 : hull.front().second;
  std::vector<std::pair<double, double>> steps;
  for (size_t i = 1; i < hull.size(); ++i)
    steps.emplace_back(hull[i].first - hull[i - 1].first, hull[i].second - hull[i - 1].second);
  return steps;
}

class Search {
 public:
  Search(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes,
         const ExactLimits& limits)
      : services_(services), classes_(classes), limits_(limits) {}

  ExactResult run() {
    order_services();
    make_constraints();
    make_plans();
    make_increments();
    if (limits_.start != nullptr) result_ = *limits_.start;
    result_.bound = std::min(limits_.start != nullptr ? result_.bound : kUnbounded, bound(0, used_, 0));
    result_.optimal = !truncated_;
    greedy();
    descend(0, 0);
    if (result_.optimal && result_.feasible) result_.bound = std::min(result_.bound, result_.value);
    result_.bound = std::max(result_.bound, result_.value);
    if (result_.feasible && result_.value >= result_.bound - kEps * std::max(1.0, result_.bound))
      result_.optimal = true;
    return std::move(result_);
  }

 private:
  struct Load {
    double compute = 0;
    double memory = 0;
  };

  void order_services() {
    order_.resize(services_.size());
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::stable_sort(order_.begin(), order_.end(),
                     [&](size_t a, size_t b) { return services_[a].rate > services_[b].rate; });
    chosen_.assign(services_.size(), nullptr);
  }

  void make_constraints() {
    for (const bool memory : {false, true}) {
      std::vector<double> sizes;
      for (const ExactService& service : services_)
        for (const ExactOption& option : service.options) {
          if (!memory) sizes.push_back(option.compute);
          for (const double m : option.memory)
            if (memory && m <= 1) sizes.push_back(m);
        }
      std::sort(sizes.begin(), sizes.end());
      sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
      // 0.5 knows that two above a half exclude each other; other thresholds help where sizes up to a half fill the gaps.
      std::vector<double> thresholds = {0, 0.5};
      std::vector<double> small;
      for (const double x : sizes) {
        if (x > 0 && x < 0.5) small.push_back(x);
        if (x > 0.5 && x < 1) small.push_back(1 - x + 2 * kEps);  // counts x as 1
      }
      std::sort(small.begin(), small.end());
      for (size_t k = 0; k < kMostThresholds && !small.empty(); ++k) {
        const double x = small[(2 * k + 1) * small.size() / (2 * kMostThresholds)];
        if (std::find(thresholds.begin(), thresholds.end(), x) == thresholds.end()) thresholds.push_back(x);
      }
      for (const double threshold : thresholds) {
        double total = 0;
        for (size_t c = 0; c < classes_.size(); ++c) {
          const auto devices = static_cast<double>(classes_[c].devices);
          total += devices;
          if (classes_.size() > 1) constraints_.push_back({memory, threshold, c, devices});
        }
        constraints_.push_back({memory, threshold, classes_.size(), total});
      }
    }
    used_.assign(constraints_.size(), 0);
  }

  double served(const ExactService& service, const ExactOption& option,
                const std::vector<uint32_t>& replicas) const {
    double throughput = 0, slowest = std::numeric_limits<double>::infinity();
    for (size_t c = 0; c < classes_.size(); ++c) {
      if (replicas[c] == 0) continue;
      throughput += option.throughput * classes_[c].speed * replicas[c];
      slowest = std::min(slowest, classes_[c].speed);
    }
    const double most = std::min(service.rate, throughput);
    return option.served && throughput > 0 ? std::min(most, option.served(throughput, slowest)) : most;
  }

  void weigh(const ExactService& service, Plan& plan) const {
    const ExactOption& option = service.options[plan.option];
    plan.weights.resize(constraints_.size());
    for (size_t j = 0; j < constraints_.size(); ++j) {
      const Constraint& constraint = constraints_[j];
      double weight = 0;
      for (size_t c = 0; c < classes_.size(); ++c) {
        if (plan.replicas[c] == 0 || (constraint.of_class != classes_.size() && constraint.of_class != c))
          continue;
        weight += plan.replicas[c] *
                  dual_feasible(constraint.memory ? option.memory[c] : option.compute, constraint.threshold);
      }
      plan.weights[j] = weight;
    }
  }

  // All counts of replicas of one option, except counts that could drop a replica and serve as much.
  void enumerate(size_t service_index, size_t option_index, std::vector<Plan>& plans) {
    const ExactService& service = services_[service_index];
    const ExactOption& option = service.options[option_index];
    Plan plan{option_index, std::vector<uint32_t>(classes_.size(), 0), 0, {}};
    const auto next = [&] {
      for (size_t c = 0; c < classes_.size(); ++c) {
        const bool fits = option.memory[c] <= 1 + kEps && option.compute <= 1 + kEps;
        if (fits && plan.replicas[c] < classes_[c].devices &&
            served(service, option, plan.replicas) < service.rate) {
          ++plan.replicas[c];
          return true;
        }
        plan.replicas[c] = 0;
      }
      return false;
    };
    while (next()) {
      if (plans.size() >= kMostPlans) {
        truncated_ = true;
        return;
      }
      const double rate = served(service, option, plan.replicas);
      if (rate < limits_.least_ratio * service.rate - kEps) continue;
      plan.value = rate - option.penalty;
      plans.push_back(plan);
    }
  }

  bool dominates(const Plan& a, const Plan& b, const ExactService& service) const {
    if (a.value < b.value) return false;
    const ExactOption& x = service.options[a.option];
    const ExactOption& y = service.options[b.option];
    for (size_t c = 0; c < classes_.size(); ++c) {
      if (a.replicas[c] > b.replicas[c]) return false;
      if (a.replicas[c] > 0 && (x.compute > y.compute || x.memory[c] > y.memory[c])) return false;
    }
    return true;
  }

  void make_plans() {
    plans_.resize(order_.size());
    for (size_t depth = 0; depth < order_.size(); ++depth) {
      const ExactService& service = services_[order_[depth]];
      std::vector<Plan> all;
      for (size_t o = 0; o < service.options.size(); ++o) {
        std::vector<Plan> of_option;
        enumerate(order_[depth], o, of_option);
        all.insert(all.end(), of_option.begin(), of_option.end());
      }
      std::stable_sort(all.begin(), all.end(),
                       [](const Plan& a, const Plan& b) { return a.value > b.value; });
      std::vector<Plan>& kept = plans_[depth];
      for (Plan& plan : all) {
        if (std::any_of(kept.begin(), kept.end(), [&](const Plan& k) { return dominates(k, plan, service); }))
          continue;
        weigh(service, plan);
        kept.push_back(std::move(plan));
      }
    }
  }

  // For bounds: what weight buys what value, a constraint. Plans that were left out are covered by the envelope of whole classes.
  void make_increments() {
    increments_.resize(constraints_.size());
    bases_.assign(constraints_.size(), std::vector<double>(order_.size(), 0));
    for (size_t j = 0; j < constraints_.size(); ++j) {
      for (size_t depth = 0; depth < order_.size(); ++depth) {
        std::vector<std::pair<double, double>> points = {{0, 0}};
        for (const Plan& plan : plans_[depth]) points.emplace_back(plan.weights[j], plan.value);
        if (truncated_) cover(services_[order_[depth]], constraints_[j], points);
        for (const auto& [weight, value] : envelope(std::move(points), &bases_[j][depth]))
          increments_[j].push_back({depth, weight, value});
      }
      std::stable_sort(
          increments_[j].begin(), increments_[j].end(),
          [](const Increment& a, const Increment& b) { return a.value * b.weight > b.value * a.weight; });
    }
  }

  // Points above every plan of the service: replicas on the fastest devices first, each counted with its least weight.
  void cover(const ExactService& service, const Constraint& constraint,
             std::vector<std::pair<double, double>>& points) const {
    std::vector<size_t> by_speed(classes_.size());
    std::iota(by_speed.begin(), by_speed.end(), size_t{0});
    std::stable_sort(by_speed.begin(), by_speed.end(),
                     [&](size_t a, size_t b) { return classes_[a].speed > classes_[b].speed; });
    for (const ExactOption& option : service.options) {
      const bool partial = constraint.of_class != classes_.size() && classes_.size() > 1;
      double least = 1e18;
      for (size_t c = 0; c < classes_.size(); ++c)
        if (option.memory[c] <= 1)
          least = std::min(least, dual_feasible(constraint.memory ? option.memory[c] : option.compute,
                                                constraint.threshold));
      if (least > 1e17) continue;
      if (partial) least = 0;  // they may all be elsewhere
      double value = 0, weight = 0;
      for (const size_t c : by_speed) {
        const double one = option.throughput * classes_[c].speed;
        const double wanted =
            std::min(static_cast<double>(classes_[c].devices), std::ceil((service.rate - value) / one));
        if (wanted <= 0) break;
        if (wanted > 1) points.emplace_back(weight + (wanted - 1) * least, value + (wanted - 1) * one);
        value += wanted * one;
        weight += wanted * least;
        points.emplace_back(weight, std::min(value, service.rate));
      }
    }
  }

  // Upper bound of what the services from `depth` on can add.
  double bound(size_t depth, const std::vector<double>& used, double value) {
    double best = std::numeric_limits<double>::infinity();
    for (size_t j = 0; j < constraints_.size(); ++j) {
      double room = constraints_[j].capacity - used[j];
      double sum = value;
      for (size_t d = depth; d < order_.size(); ++d) sum += bases_[j][d];
      for (const Increment& step : increments_[j]) {
        ++work_;
        if (step.depth < depth) continue;
        if (step.weight > room) {
          if (room > 0) sum += step.value * room / step.weight;
          break;
        }
        room -= step.weight;
        sum += step.value;
      }
      best = std::min(best, sum);
    }
    return best;
  }

  // Can the plans chosen so far be packed? 1 yes, 0 no, -1 not known within the limit. Yes leaves the devices in packed_.
  int pack(size_t depths) {
    packed_.assign(services_.size(), {});
    int answer = 1;
    for (size_t c = 0; c < classes_.size(); ++c) {
      struct Item {
        size_t depth;
        double compute, memory;
        uint32_t copies;
      };
      std::vector<Item> items;
      for (size_t depth = 0; depth < depths; ++depth) {
        const Plan* plan = chosen_[depth];
        if (plan == nullptr || plan->replicas[c] == 0) continue;
        const ExactOption& option = services_[order_[depth]].options[plan->option];
        items.push_back({depth, option.compute, option.memory[c], plan->replicas[c]});
      }
      std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
        return std::max(a.compute, a.memory) > std::max(b.compute, b.memory);
      });
      std::vector<Load> loads(classes_[c].devices);
      std::vector<std::vector<size_t>> where(items.size());
      uint64_t steps = 0;
      // Places copies of item i, from copy `k` on, at devices from `first` on.
      const auto place = [&](auto&& self, size_t i, uint32_t k, size_t first) -> int {
        if (i == items.size()) return 1;
        if (k == items[i].copies) return self(self, i + 1, 0, 0);
        const size_t left = items[i].copies - k;
        int failed = 0;
        for (size_t d = first; d + left <= loads.size(); ++d) {
          ++work_;
          if (++steps > kMostPackingSteps) return -1;
          Load& load = loads[d];
          if (load.compute + items[i].compute > 1 + kEps || load.memory + items[i].memory > 1 + kEps)
            continue;
          // A device with the same load as one passed over would lead to the same packings.
          bool like_passed = false;
          for (size_t e = first; e < d && !like_passed; ++e)
            like_passed = loads[e].compute == load.compute && loads[e].memory == load.memory;
          if (like_passed) continue;
          const Load before = load;
          load.compute += items[i].compute;
          load.memory += items[i].memory;
          where[i].push_back(d);
          const int inner = self(self, i, k + 1, d + 1);
          if (inner == 1) return 1;
          where[i].pop_back();
          load = before;
          if (inner < 0) return -1;
        }
        return failed;
      };
      const int packed = place(place, 0, 0, 0);
      if (packed == 0) return 0;
      if (packed < 0) answer = -1;
      if (packed == 1)
        for (size_t i = 0; i < items.size(); ++i)
          for (const size_t d : where[i]) packed_[items[i].depth].emplace_back(c, d);
    }
    return answer;
  }

  void keep(double value) {
    if (result_.feasible && value <= result_.value) return;
    result_.feasible = true;
    result_.value = value;
    result_.replicas.clear();
    for (size_t depth = 0; depth < order_.size(); ++depth)
      for (const auto& [c, d] : packed_[depth])
        result_.replicas.push_back({order_[depth], chosen_[depth]->option, d, c});
  }

  // If so, nothing is proven any more.
  bool spent() {
    if (result_.nodes <= limits_.nodes && work_ <= limits_.work) return false;
    result_.optimal = false;
    return true;
  }
  bool reached() const {
    return result_.feasible && limits_.target > 0 && result_.value >= limits_.target - kEps * limits_.target;
  }

  // A first placement: the plans of the most value for the area they take, as long as they pack.
  void greedy() {
    if (limits_.least_ratio > 0) return;
    struct Candidate {
      size_t depth;
      const Plan* plan;
      double density;
    };
    std::vector<Candidate> candidates;
    for (size_t depth = 0; depth < plans_.size(); ++depth)
      for (const Plan& plan : plans_[depth]) {
        double area = 1e-6;
        for (size_t j = 0; j < constraints_.size(); ++j)
          if (constraints_[j].threshold == 0 && constraints_[j].of_class == classes_.size())
            area = std::max(area, plan.weights[j] / constraints_[j].capacity);
        candidates.push_back({depth, &plan, plan.value / area});
      }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.density > b.density; });
    // First what is densest for each service, then more replicas of it where there is room.
    chosen_.assign(services_.size(), nullptr);
    for (int pass = 0; pass < 2; ++pass)
      for (const Candidate& candidate : candidates) {
        const Plan* before = chosen_[candidate.depth];
        if (before != nullptr && before->value >= candidate.plan->value) continue;
        if (pass == 0 && before != nullptr) continue;
        if (work_ > limits_.work / 8) break;
        chosen_[candidate.depth] = candidate.plan;
        if (pack(order_.size()) != 1) chosen_[candidate.depth] = before;
      }
    if (pack(order_.size()) == 1) {
      double value = 0;
      for (const Plan* plan : chosen_) value += plan == nullptr ? 0 : plan->value;
      keep(value);
    }
    chosen_.assign(services_.size(), nullptr);
  }

  void descend(size_t depth, double value) {
    if (reached()) return;
    ++result_.nodes;
    if (spent()) return;
    if (depth == order_.size()) {
      const int packed = pack(depth);
      if (packed < 0) result_.optimal = false;
      if (packed == 1) keep(value);
      return;
    }
    const double margin = kEps * std::max(1.0, result_.value);
    const auto hopeless = [&](double best) {
      return (result_.feasible && best <= result_.value + margin) ||
             (limits_.target > 0 && best < limits_.target - kEps * limits_.target);
    };
    const auto try_plan = [&](const Plan* plan, double gained) {
      if (hopeless(bound(depth + 1, used_, value + gained))) return;
      chosen_[depth] = plan;
      if (plan == nullptr || pack(depth + 1) != 0) descend(depth + 1, value + gained);
      chosen_[depth] = nullptr;
    };
    for (const Plan& plan : plans_[depth]) {
      bool fits = true;
      for (size_t j = 0; j < constraints_.size() && fits; ++j)
        fits = used_[j] + plan.weights[j] <= constraints_[j].capacity + kEps;
      if (!fits) continue;
      for (size_t j = 0; j < constraints_.size(); ++j) used_[j] += plan.weights[j];
      try_plan(&plan, plan.value);
      for (size_t j = 0; j < constraints_.size(); ++j) used_[j] -= plan.weights[j];
      if (reached() || spent()) return;
    }
    if (limits_.least_ratio <= 0 || services_[order_[depth]].options.empty()) try_plan(nullptr, 0);
  }

  const std::vector<ExactService>& services_;
  const std::vector<ExactClass>& classes_;
  const ExactLimits limits_;
  std::vector<size_t> order_;  // depth -> service
  std::vector<Constraint> constraints_;
  std::vector<std::vector<Plan>> plans_;  // a depth, by falling value
  std::vector<std::vector<Increment>> increments_;
  std::vector<std::vector<double>> bases_;
  std::vector<double> used_;
  std::vector<const Plan*> chosen_;
  std::vector<std::vector<std::pair<size_t, size_t>>> packed_;  // a depth: class, device
  bool truncated_ = false;
  uint64_t work_ = 0;
  ExactResult result_;
};

}  // namespace

ExactResult solve_exact(const std::vector<ExactService>& services, const std::vector<ExactClass>& classes,
                        const ExactLimits& limits) {
  return Search(services, classes, limits).run();
}

}  // namespace gpushare::cluster::services
