// kernels.hpp: the inner loop of the weighing of batches, for AVX-512, AVX2 and portable, chosen once at run time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace gpushare::sched::slo {

struct Kernels {
  const char* name;
  // out[i] = product over the `count` >= 1 rows of row[i]; returns the sum of weights[i] * out[i]. n is a
  // multiple of 8.
  double (*product)(const double* const* rows, size_t count, const double* weights, double* out, size_t n);
};

const Kernels& portable_kernels();
// The fastest kernels that this processor runs.
const Kernels& kernels();

}  // namespace gpushare::sched::slo
