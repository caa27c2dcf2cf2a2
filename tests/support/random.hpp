// random.hpp: seeds that a failing test prints and GPUSHARE_TEST_SEED repeats.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>

namespace gpushare::test {

// The seed of this run: GPUSHARE_TEST_SEED if set, else a fixed one, so that CI is repeatable. Print it with INFO().
inline uint64_t seed() {
  const char* text = std::getenv("GPUSHARE_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 20261121ull;
}

using Random = std::mt19937_64;

inline uint64_t uniform(Random& random, uint64_t low, uint64_t high) {
  return std::uniform_int_distribution<uint64_t>(low, high)(random);
}

}  // namespace gpushare::test
