// How far a choice of claims is from the best that exhaustive search finds, over random instances.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>

#include "support/catch.hpp"

namespace gpushare::test {

class PriceDistance {
 public:
  // Prices by rank, highest rank first, of the best choice and of the one that was made. The highest rank that has to give
  // anything is where the distance counts: there the choice may cost twice the least price at most.
  template <class Prices>
  void add(const Prices& best, const Prices& got) {
    size_t first = 0;
    while (first + 1 < best.size() && best[first] == 0 && got[first] == 0) ++first;
    const double ratio = best[first] == 0 ? 1 : got[first] / best[first];
    REQUIRE(got[first] >= best[first] * (1 - 1e-9));
    REQUIRE(ratio <= 2.0 + 1e-9);
    ++instances_;
    optimal_ += got == best ? 1 : 0;
    sum_ += ratio;
    worst_ = std::max(worst_, ratio);
  }
  double mean() const { return sum_ / instances_; }
  double optimal_share() const { return static_cast<double>(optimal_) / instances_; }
  std::string text() const {
    return "instances " + std::to_string(instances_) + ", optimal " + std::to_string(optimal_) +
           ", mean ratio " + std::to_string(mean()) + ", worst " + std::to_string(worst_);
  }

 private:
  int instances_ = 0, optimal_ = 0;
  double sum_ = 0, worst_ = 1;
};

}  // namespace gpushare::test
