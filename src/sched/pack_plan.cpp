// SPDX-License-Identifier: Apache-2.0
#include "sched/pack_plan.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::sched {
namespace {

double speed(std::span<const SessionId> sessions, size_t of, const Interference& interference,
             std::vector<SessionId>& beside) {
  beside.assign(sessions.begin(), sessions.end());
  beside.erase(beside.begin() + static_cast<std::ptrdiff_t>(of));
  return interference.rate(sessions[of], beside);
}

// Adds the session if that adds enough speed.
bool join(std::vector<SessionId>& together, double& total, SessionId id, const Interference& interference) {
  together.push_back(id);
  const double with = total_speed(together, interference);
  if (with >= total * (1 + kPackLeastGain)) {
    total = with;
    return true;
  }
  together.pop_back();
  return false;
}

void join_by_gain(std::vector<SessionId>& together, double& total, std::vector<SessionId> others,
                  const Interference& interference) {
  while (!others.empty()) {
    size_t best = 0;
    double best_total = 0;
    for (size_t i = 0; i < others.size(); ++i) {
      together.push_back(others[i]);
      const double with = total_speed(together, interference);
      together.pop_back();
      if (with <= best_total) continue;
      best = i;
      best_total = with;
    }
    if (!join(together, total, others[best], interference)) return;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(best));
  }
}

}  // namespace

double total_speed(std::span<const SessionId> sessions, const Interference& interference) {
  double total = 0;
  std::vector<SessionId> beside;
  for (size_t i = 0; i < sessions.size(); ++i) total += speed(sessions, i, interference, beside);
  return total;
}

std::vector<SessionId> run_together(PackOrder order, std::span<const PackJob> heads,
                                    const Interference& interference) {
  std::vector<SessionId> together;
  if (heads.empty()) return together;
  std::vector<PackJob> others(heads.begin() + 1, heads.end());
  if (order == PackOrder::kLongest)
    std::stable_sort(others.begin(), others.end(),
                     [](const PackJob& a, const PackJob& b) { return a.left_ns > b.left_ns; });
  std::vector<SessionId> ids;
  ids.reserve(others.size());
  for (const PackJob& job : others) ids.push_back(job.id);
  together.push_back(heads.front().id);
  if (order == PackOrder::kAll) {
    together.insert(together.end(), ids.begin(), ids.end());
    return together;
  }
  double total = total_speed(together, interference);
  if (order == PackOrder::kGain) {
    join_by_gain(together, total, std::move(ids), interference);
    return together;
  }
  for (const SessionId id : ids) join(together, total, id, interference);
  return together;
}

double predicted_ns(PackOrder order, std::vector<std::vector<PackJob>> lanes,
                    const Interference& interference) {
  double passed = 0;
  std::vector<size_t> first(lanes.size());
  std::vector<PackJob> heads;
  std::vector<SessionId> beside;
  std::vector<double> speeds;
  for (;;) {
    heads.clear();
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      while (first[lane] < lanes[lane].size() && lanes[lane][first[lane]].left_ns <= 0) ++first[lane];
      if (first[lane] < lanes[lane].size()) heads.push_back(lanes[lane][first[lane]]);
    }
    if (heads.empty()) return passed;
    std::sort(heads.begin(), heads.end(), [](const PackJob& a, const PackJob& b) { return a.id < b.id; });
    const std::vector<SessionId> together = run_together(order, heads, interference);
    const auto job = [&](SessionId id) -> PackJob& {
      for (size_t lane = 0;; ++lane)
        if (first[lane] < lanes[lane].size() && lanes[lane][first[lane]].id == id)
          return lanes[lane][first[lane]];
    };
    double step = INFINITY;
    speeds.clear();
    for (size_t i = 0; i < together.size(); ++i) {
      speeds.push_back(speed(together, i, interference, beside));
      step = std::min(step, job(together[i]).left_ns / speeds.back());
    }
    passed += step;
    for (size_t i = 0; i < together.size(); ++i) {
      double& left = job(together[i]).left_ns;
      // A job within a rounding error of its end is done. Otherwise the loop would take steps of length 0.
      left = left <= step * speeds[i] * (1 + 1e-9) ? 0 : left - step * speeds[i];
    }
  }
}

PackOrder best_order(PackOrder present, const std::vector<std::vector<PackJob>>& lanes,
                     const Interference& interference) {
  PackOrder best = present;
  double least = predicted_ns(present, lanes, interference);
  for (const PackOrder order : {PackOrder::kAge, PackOrder::kLongest, PackOrder::kGain, PackOrder::kAll}) {
    if (order == present) continue;
    const double time = predicted_ns(order, lanes, interference);
    if (time >= least * (1 - 1e-9)) continue;
    best = order;
    least = time;
  }
  return best;
}

}  // namespace gpushare::sched
