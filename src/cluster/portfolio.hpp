// portfolio.hpp: how a scheduler of our own decides between rules. Each rule that it knows (its own, and those of the
// published systems) is played forward from the state that there is by the model that is believed, and the outcome of
// the least cost is taken. So by what is believed no rule would have done better; what is measured corrects the model,
// and the next decision is made with the corrected one. Used by training/portfolio.cpp, fluid_planner.cpp,
// services/portfolio.cpp and retraining.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <utility>

#include "cluster/never.hpp"

namespace gpushare::cluster {

// The best of what is offered. Candidates come one after the other; an earlier one is kept unless a later one is better
// by more than the margin, so what is offered first is what there is now.
template <class Candidate>
class Portfolio {
 public:
  // `margin`: part of a cost by which a candidate must be better than an earlier one.
  explicit Portfolio(double margin = 1e-9) : margin_(margin) {}

  // kNever as a cost: the candidate is not possible. True: it is the best so far.
  bool offer(double cost, Candidate candidate) {
    if (!(cost < kNever) || (!empty() && cost >= cost_ - margin_ * std::abs(cost_))) return false;
    cost_ = cost;
    best_ = std::move(candidate);
    return true;
  }
  bool empty() const { return !(cost_ < kNever); }
  double cost() const { return cost_; }
  // As constructed while it is empty.
  Candidate& best() { return best_; }

 private:
  const double margin_;
  double cost_ = kNever;
  Candidate best_{};
};

}  // namespace gpushare::cluster
