// kernels.hpp: the inner loops of the queues and of the batch weighing, for AVX-512, AVX2 and portable,
// chosen once at run time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace gpushare::sched::slo {

inline constexpr size_t kNodeWidth = 16;

struct Kernels {
  const char* name;
  // Index of a greatest alpha[i] * w + beta[i] of n >= 1.
  size_t (*best_of)(const double* alpha, const double* beta, size_t n, double w);
  // For 16 lines at w, returns the index of the winner (among equals the one with the greatest alpha). *until
  // receives the first w' > w at which another line may overtake it, infinity if none. Absent lines are (0,
  // -infinity).
  size_t (*node)(const double* alpha, const double* beta, double w, double* until);
  // Smallest of 16.
  double (*least)(const double* values);
  // Bit i is set where values[i] <= limit, of 16.
  unsigned (*at_most)(const double* values, double limit);
  // out[i] = product over the `count` >= 1 rows of row[i]; returns the sum of weights[i] * out[i]. n is a
  // multiple of 8.
  double (*product)(const double* const* rows, size_t count, const double* weights, double* out, size_t n);
};

const Kernels& portable_kernels();
// The fastest that this processor runs.
const Kernels& kernels();

}  // namespace gpushare::sched::slo
