// point_kernels.hpp: the inner loops of the point queues, for AVX-512, AVX2 and portable, chosen once at run time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace gpushare::reference {

inline constexpr size_t kNodeWidth = 16;

struct PointKernels {
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
};

const PointKernels& portable_point_kernels();
// The fastest that this processor runs.
const PointKernels& point_kernels();

}  // namespace gpushare::reference
