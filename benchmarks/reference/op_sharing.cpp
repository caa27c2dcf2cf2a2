// SPDX-License-Identifier: Apache-2.0
#include "reference/op_sharing.hpp"

#include <algorithm>
#include <cmath>
#include <random>

namespace gpushare::sim {
namespace {

struct Effect {
  double excess = 0;         // of the guaranteed session's iteration time
  std::vector<double> work;  // of each opponent, alone-time done over time
};

// The effect while opponent i may use shares[i] of the time.
Effect effect_of(const OpSharingSpec& spec, const std::vector<double>& shares) {
  Effect effect;
  double among = 0;  // opponents share what they use among themselves
  for (const double share : shares) among += share;
  for (size_t i = 0; i < shares.size(); ++i) {
    const OpponentSpec& other = spec.opponents[i];
    const double speed = 1 - (1 - other.guaranteed_rate) * loss_at(spec.curve, shares[i]);
    effect.excess += 1 / speed - 1;
    effect.work.push_back(shares[i] * other.own_rate / std::max(1.0, among));
  }
  return effect;
}

// The most weighted work over time at the target: the best mixture of two points of a fine grid.
double oracle_of(const OpSharingSpec& spec, double target) {
  struct Point {
    double cost, work;
  };
  std::vector<Point> points{{0, 0}};
  constexpr int kSteps = 400;
  const size_t count = spec.opponents.size();
  // Each alone, all together, and each full beside the others at less.
  for (size_t who = 0; who <= count; ++who) {
    for (int step = 1; step <= kSteps; ++step) {
      std::vector<double> shares(count, 0);
      for (size_t i = 0; i < count; ++i)
        if (who == count || i == who) shares[i] = static_cast<double>(step) / kSteps;
      const Effect effect = effect_of(spec, shares);
      double work = 0;
      for (size_t i = 0; i < count; ++i) work += spec.opponents[i].weight * effect.work[i];
      points.push_back({effect.excess, work * (1 + effect.excess)});
    }
  }
  double best = 0;
  for (const Point& low : points) {
    if (low.cost > target) continue;
    best = std::max(best, low.work / (1 + low.cost));
    for (const Point& high : points) {
      if (high.cost <= target) continue;
      const double part = (target - low.cost) / (high.cost - low.cost);
      best = std::max(best, (low.work + part * (high.work - low.work)) / (1 + target));
    }
  }
  return best;
}

}  // namespace

const char* name_of(ContentionCurve curve) {
  switch (curve) {
    case ContentionCurve::kTurns:
      return "turns";
    case ContentionCurve::kGaps:
      return "gaps";
    case ContentionCurve::kConvex:
      return "convex";
    case ContentionCurve::kConcave:
      break;
  }
  return "concave";
}

double loss_at(ContentionCurve curve, double share) {
  constexpr double kGap = 0.3;
  switch (curve) {
    case ContentionCurve::kTurns:
      return share;
    case ContentionCurve::kGaps:
      return std::max(0.0, (share - kGap) / (1 - kGap));
    case ContentionCurve::kConvex:
      return share * share;
    case ContentionCurve::kConcave:
      break;
  }
  return std::sqrt(share);
}

OpSharingResult run_op_sharing(const OpSharingSpec& spec) {
  constexpr sched::SessionId kGuaranteedId = 1;
  sched::OpController controller(spec.options);
  controller.arrive(kGuaranteedId, sched::SessionClass::kGuaranteed);
  std::mt19937_64 random(spec.seed);
  std::normal_distribution<double> normal;
  const size_t count = spec.opponents.size();
  OpSharingResult result;
  result.throughput.assign(count, 0);
  std::vector<double> shares(count);
  std::vector<bool> present(count, false);
  std::vector<double> done(count, 0);
  result.ended_ns.assign(count, 0);
  double now = 0, alone = 0, factor = 1;
  size_t phase = 0;
  for (uint64_t i = 0; i < spec.iterations; ++i) {
    for (; phase < spec.phases.size() && spec.phases[phase].from <= i; ++phase)
      factor = spec.phases[phase].factor;
    for (size_t j = 0; j < count; ++j) {
      const bool here = spec.opponents[j].from <= i && i < spec.opponents[j].until && result.ended_ns[j] == 0;
      if (here && !present[j])
        controller.arrive(2 + j, sched::SessionClass::kOpportunistic, spec.opponents[j].weight);
      if (!here && present[j]) controller.leave(2 + j);
      present[j] = here;
    }
    controller.began(kGuaranteedId, static_cast<uint64_t>(now));
    double most = 0;
    for (size_t j = 0; j < count; ++j) {
      shares[j] = present[j] ? controller.allowance(2 + j).share : 0;
      most = std::max(most, shares[j]);
    }
    result.share.push_back(most);
    const Effect effect = effect_of(spec, shares);
    const double own = spec.iteration_ns * factor;
    const double took = own * (1 + effect.excess);
    const double seen = took * std::max(0.2, 1 + spec.jitter * normal(random));
    now += seen;
    alone += own;
    result.slowdown += took;
    for (size_t j = 0; j < count; ++j) {
      result.throughput[j] += effect.work[j] * took;
      const double work = effect.work[j] * seen, left = spec.opponents[j].work_ns - done[j];
      done[j] += work;
      if (present[j] && spec.opponents[j].work_ns > 0 && work >= left)
        result.ended_ns[j] = now - seen + seen * left / work;
      if (present[j]) controller.progressed(2 + j, static_cast<uint64_t>(effect.work[j] * seen));
    }
    controller.finished(kGuaranteedId, static_cast<uint64_t>(seen), static_cast<uint64_t>(now));
    if (i >= 500) result.worst_after = std::max(result.worst_after, result.slowdown / alone - 1);
  }
  for (size_t j = 0; j < count; ++j) {
    result.throughput[j] /= result.slowdown;
    result.sum += spec.opponents[j].weight * result.throughput[j];
  }
  result.slowdown = result.slowdown / alone - 1;
  result.end_ns = now;
  result.oracle = oracle_of(spec, spec.options.target_slowdown);
  result.estimate = controller.estimate(kGuaranteedId);
  return result;
}

}  // namespace gpushare::sim
