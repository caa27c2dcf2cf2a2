// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/kernels.hpp"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GPUSHARE_SLO_X86 1
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12's own AVX-512 header trips these (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace gpushare::sched::slo {
namespace {

double product_portable(const double* const* rows, size_t count, const double* weights, double* out,
                        size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) {
    double product = rows[0][i];
    for (size_t r = 1; r < count; ++r) product *= rows[r][i];
    out[i] = product;
    sum += weights[i] * product;
  }
  return sum;
}

constexpr Kernels kPortable{"portable", product_portable};

#ifdef GPUSHARE_SLO_X86

// Two vectors at a time, so that a multiplication need not wait for the one before.
__attribute__((target("avx2"))) double product_avx2(const double* const* rows, size_t count,
                                                    const double* weights, double* out, size_t n) {
  __m256d sum0 = _mm256_setzero_pd(), sum1 = sum0;
  for (size_t i = 0; i < n; i += 8) {
    __m256d product0 = _mm256_loadu_pd(rows[0] + i), product1 = _mm256_loadu_pd(rows[0] + i + 4);
    for (size_t r = 1; r < count; ++r) {
      const double* const row = rows[r] + i;
      product0 = _mm256_mul_pd(product0, _mm256_loadu_pd(row));
      product1 = _mm256_mul_pd(product1, _mm256_loadu_pd(row + 4));
    }
    _mm256_storeu_pd(out + i, product0);
    _mm256_storeu_pd(out + i + 4, product1);
    sum0 = _mm256_add_pd(sum0, _mm256_mul_pd(product0, _mm256_loadu_pd(weights + i)));
    sum1 = _mm256_add_pd(sum1, _mm256_mul_pd(product1, _mm256_loadu_pd(weights + i + 4)));
  }
  alignas(32) double parts[4];
  _mm256_store_pd(parts, _mm256_add_pd(sum0, sum1));
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

constexpr Kernels kAvx2{"avx2", product_avx2};

__attribute__((target("avx512f"))) double product_avx512(const double* const* rows, size_t count,
                                                         const double* weights, double* out, size_t n) {
  __m512d sum = _mm512_setzero_pd();
  for (size_t i = 0; i < n; i += 8) {
    __m512d product = _mm512_loadu_pd(rows[0] + i);
    for (size_t r = 1; r < count; ++r) product = _mm512_mul_pd(product, _mm512_loadu_pd(rows[r] + i));
    _mm512_storeu_pd(out + i, product);
    sum = _mm512_add_pd(sum, _mm512_mul_pd(product, _mm512_loadu_pd(weights + i)));
  }
  return _mm512_reduce_add_pd(sum);
}

constexpr Kernels kAvx512{"avx512", product_avx512};

#endif

const Kernels& choose() {
#ifdef GPUSHARE_SLO_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return kAvx512;
  if (__builtin_cpu_supports("avx2")) return kAvx2;
#endif
  return kPortable;
}

}  // namespace

const Kernels& portable_kernels() {
  return kPortable;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace gpushare::sched::slo
