// evolution.hpp: dividing whole units by trying: the evolutionary algorithm that Cilantro describes (thesis 002, section
// 3.6), and the random divisions that it begins with. For baselines, and for objectives of which nothing is known but
// what was seen. Deterministic by seed; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <vector>

namespace gpushare::cluster {

// All `capacity` units cut at random places, each cut equally likely, with at least `least` for each of `parts`.
// `capacity` is at least `parts` x `least`.
std::vector<int64_t> random_division(int64_t capacity, size_t parts, int64_t least, std::mt19937_64& random);

// Between 1 and 20 times, one unit of a part that has two or more goes to another part.
void mutate_division(std::vector<int64_t>& units, std::mt19937_64& random);

// A number in [0, 1).
double random_part(std::mt19937_64& random);

class EvolutionarySearch {
 public:
  EvolutionarySearch(std::vector<int64_t> first, int64_t capacity, int64_t least, uint64_t seed)
      : first_(std::move(first)), capacity_(capacity), least_(least), random_(seed) {}
  // `first` twice, then eight random divisions. After that, one time in ten a random one, else a mutation of one that was
  // observed: the greater its mean signal, the more likely.
  std::vector<int64_t> next();
  // A round of the division that `next` gave. Only the 1,000 divisions with the greatest means are kept.
  void observe(const std::vector<int64_t>& units, double signal);

 private:
  static constexpr size_t kMostSeen = 1'000;
  struct Entry {
    double mean = 0, count = 0;
  };
  std::vector<int64_t> sampled();

  const std::vector<int64_t> first_;
  const int64_t capacity_, least_;
  std::mt19937_64 random_;
  std::map<std::vector<int64_t>, Entry> seen_;
  size_t round_ = 0;
};

}  // namespace gpushare::cluster
