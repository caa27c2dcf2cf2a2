// random.hpp: seeds that a failing test prints and GPUSHARE_TEST_SEED repeats.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>

namespace gpushare::test {

// A number of the environment, for longer runs.
inline uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

// The seed of this run: GPUSHARE_TEST_SEED if set, else a fixed one, so that CI is repeatable. Print it with INFO().
inline uint64_t seed() {
  return number_from("GPUSHARE_TEST_SEED", 20261121);
}

using Random = std::mt19937_64;

inline uint64_t uniform(Random& random, uint64_t low, uint64_t high) {
  return std::uniform_int_distribution<uint64_t>(low, high)(random);
}

}  // namespace gpushare::test
