// SPDX-License-Identifier: Apache-2.0
#include "cluster/solve/evolution.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::cluster {

double random_part(std::mt19937_64& random) {
  return double(random() >> 11) * 0x1p-53;
}

std::vector<int64_t> random_division(int64_t capacity, size_t parts, int64_t least, std::mt19937_64& random) {
  const int64_t free = capacity - int64_t(parts) * least;
  std::vector<int64_t> cuts{0, free};
  for (size_t j = 1; j < parts; ++j) cuts.push_back(int64_t(random() % uint64_t(free + 1)));
  std::sort(cuts.begin(), cuts.end());
  std::vector<int64_t> units;
  for (size_t j = 0; j < parts; ++j) units.push_back(cuts[j + 1] - cuts[j] + least);
  return units;
}

void mutate_division(std::vector<int64_t>& units, std::mt19937_64& random) {
  const size_t parts = units.size();
  const uint64_t steps = 1 + random() % 20;
  for (uint64_t step = 0; step < steps && parts > 1; ++step) {
    const size_t from = random() % parts;
    const size_t to = (from + 1 + random() % (parts - 1)) % parts;
    if (units[from] < 2) continue;
    --units[from];
    ++units[to];
  }
}

std::vector<int64_t> EvolutionarySearch::next() {
  std::vector<int64_t> units = first_;
  if (round_ >= 2) {
    if (round_ < 10 || random_part(random_) < 0.1) {
      units = random_division(capacity_, first_.size(), least_, random_);
    } else {
      units = sampled();
      mutate_division(units, random_);
    }
  }
  ++round_;
  return units;
}

void EvolutionarySearch::observe(const std::vector<int64_t>& units, double signal) {
  Entry& entry = seen_[units];
  entry.mean += (signal - entry.mean) / ++entry.count;
  if (seen_.size() > kMostSeen)
    seen_.erase(std::min_element(seen_.begin(), seen_.end(),
                                 [](const auto& a, const auto& b) { return a.second.mean < b.second.mean; }));
}

std::vector<int64_t> EvolutionarySearch::sampled() {
  if (seen_.empty()) return first_;
  double mean = 0, square = 0;
  for (const auto& [units, entry] : seen_) mean += entry.mean / double(seen_.size());
  for (const auto& [units, entry] : seen_)
    square += (entry.mean - mean) * (entry.mean - mean) / double(seen_.size());
  const double deviation = std::max(1e-6, std::sqrt(square));
  double all = 0;
  for (const auto& [units, entry] : seen_) all += std::exp((entry.mean - mean) / deviation);
  double at = random_part(random_) * all;
  for (const auto& [units, entry] : seen_) {
    at -= std::exp((entry.mean - mean) / deviation);
    if (at <= 0) return units;
  }
  return seen_.rbegin()->first;
}

}  // namespace gpushare::cluster
