// SPDX-License-Identifier: Apache-2.0
#include "reference/point_kernels.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GPUSHARE_SLO_X86 1
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12's own AVX-512 header trips these (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace gpushare::reference {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// The line in `mask` with the greatest alpha, which stays ahead the longest.
inline size_t steepest(const double* alpha, unsigned mask) {
  size_t winner = static_cast<size_t>(__builtin_ctz(mask));
  for (mask &= mask - 1; mask != 0; mask &= mask - 1) {
    const size_t other = static_cast<size_t>(__builtin_ctz(mask));
    if (alpha[other] > alpha[winner]) winner = other;
  }
  return winner;
}

size_t best_of_portable(const double* alpha, const double* beta, size_t n, double w) {
  size_t best = 0;
  double value = alpha[0] * w + beta[0];
  for (size_t i = 1; i < n; ++i) {
    const double candidate = alpha[i] * w + beta[i];
    if (candidate > value) {
      value = candidate;
      best = i;
    }
  }
  return best;
}

size_t node_portable(const double* alpha, const double* beta, double w, double* until) {
  size_t winner = 0;
  double value = alpha[0] * w + beta[0];
  for (size_t i = 1; i < kNodeWidth; ++i) {
    const double candidate = alpha[i] * w + beta[i];
    if (candidate > value || (candidate == value && alpha[i] > alpha[winner])) {
      value = candidate;
      winner = i;
    }
  }
  double first = kUnbounded;
  for (size_t i = 0; i < kNodeWidth; ++i)
    if (alpha[i] > alpha[winner])
      first = std::min(first, (beta[winner] - beta[i]) / (alpha[i] - alpha[winner]));
  *until = first;
  return winner;
}

double least_portable(const double* values) {
  return *std::min_element(values, values + kNodeWidth);
}

unsigned at_most_portable(const double* values, double limit) {
  unsigned mask = 0;
  for (size_t i = 0; i < kNodeWidth; ++i) mask |= static_cast<unsigned>(values[i] <= limit) << i;
  return mask;
}

constexpr PointKernels kPortable{"portable", best_of_portable, node_portable, least_portable,
                                 at_most_portable};

#ifdef GPUSHARE_SLO_X86

__attribute__((target("avx2"))) size_t best_of_avx2(const double* alpha, const double* beta, size_t n,
                                                    double w) {
  if (n < 8) return best_of_portable(alpha, beta, n, w);
  const __m256d at = _mm256_set1_pd(w);
  __m256d best0 = _mm256_set1_pd(-kUnbounded), best1 = best0;
  __m256i where0 = _mm256_setzero_si256(), where1 = where0;
  __m256i here = _mm256_set_epi64x(3, 2, 1, 0);
  const __m256i four = _mm256_set1_epi64x(4);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256d v0 =
        _mm256_add_pd(_mm256_mul_pd(_mm256_loadu_pd(alpha + i), at), _mm256_loadu_pd(beta + i));
    const __m256d v1 =
        _mm256_add_pd(_mm256_mul_pd(_mm256_loadu_pd(alpha + i + 4), at), _mm256_loadu_pd(beta + i + 4));
    const __m256d g0 = _mm256_cmp_pd(v0, best0, _CMP_GT_OQ);
    const __m256d g1 = _mm256_cmp_pd(v1, best1, _CMP_GT_OQ);
    best0 = _mm256_blendv_pd(best0, v0, g0);
    where0 = _mm256_blendv_epi8(where0, here, _mm256_castpd_si256(g0));
    here = _mm256_add_epi64(here, four);
    best1 = _mm256_blendv_pd(best1, v1, g1);
    where1 = _mm256_blendv_epi8(where1, here, _mm256_castpd_si256(g1));
    here = _mm256_add_epi64(here, four);
  }
  alignas(32) double values[8];
  alignas(32) int64_t places[8];
  _mm256_store_pd(values, best0);
  _mm256_store_pd(values + 4, best1);
  _mm256_store_si256(reinterpret_cast<__m256i*>(places), where0);
  _mm256_store_si256(reinterpret_cast<__m256i*>(places + 4), where1);
  size_t winner = 0;
  for (size_t j = 1; j < 8; ++j)
    if (values[j] > values[winner]) winner = j;
  size_t best = static_cast<size_t>(places[winner]);
  double value = values[winner];
  for (; i < n; ++i) {
    const double candidate = alpha[i] * w + beta[i];
    if (candidate > value) {
      value = candidate;
      best = i;
    }
  }
  return best;
}

__attribute__((target("avx2"))) inline double reduce_max_avx2(__m256d v) {
  __m128d half = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_max_sd(half, _mm_unpackhi_pd(half, half)));
}

__attribute__((target("avx2"))) inline double reduce_min_avx2(__m256d v) {
  __m128d half = _mm_min_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_min_sd(half, _mm_unpackhi_pd(half, half)));
}

__attribute__((target("avx2"))) size_t node_avx2(const double* alpha, const double* beta, double w,
                                                 double* until) {
  const __m256d at = _mm256_set1_pd(w);
  __m256d a[4], b[4], v[4];
  for (ptrdiff_t i = 0; i < 4; ++i) {
    a[i] = _mm256_loadu_pd(alpha + 4 * i);
    b[i] = _mm256_loadu_pd(beta + 4 * i);
    v[i] = _mm256_add_pd(_mm256_mul_pd(a[i], at), b[i]);
  }
  const double value = reduce_max_avx2(_mm256_max_pd(_mm256_max_pd(v[0], v[1]), _mm256_max_pd(v[2], v[3])));
  const __m256d top = _mm256_set1_pd(value);
  unsigned mask = 0;
  for (ptrdiff_t i = 0; i < 4; ++i)
    mask |= static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(v[i], top, _CMP_EQ_OQ))) << (4 * i);
  const size_t winner = steepest(alpha, mask);
  const __m256d winner_alpha = _mm256_set1_pd(alpha[winner]);
  const __m256d winner_beta = _mm256_set1_pd(beta[winner]);
  __m256d first = _mm256_set1_pd(kUnbounded);
  const __m256d never = first;
  for (int i = 0; i < 4; ++i) {
    const __m256d rise = _mm256_sub_pd(a[i], winner_alpha);
    const __m256d crossing = _mm256_div_pd(_mm256_sub_pd(winner_beta, b[i]), rise);
    first = _mm256_min_pd(
        _mm256_blendv_pd(never, crossing, _mm256_cmp_pd(rise, _mm256_setzero_pd(), _CMP_GT_OQ)), first);
  }
  *until = reduce_min_avx2(first);
  return winner;
}

__attribute__((target("avx2"))) double least_avx2(const double* values) {
  return reduce_min_avx2(
      _mm256_min_pd(_mm256_min_pd(_mm256_loadu_pd(values), _mm256_loadu_pd(values + 4)),
                    _mm256_min_pd(_mm256_loadu_pd(values + 8), _mm256_loadu_pd(values + 12))));
}

__attribute__((target("avx2"))) unsigned at_most_avx2(const double* values, double limit) {
  const __m256d bound = _mm256_set1_pd(limit);
  unsigned mask = 0;
  for (ptrdiff_t i = 0; i < 4; ++i)
    mask |= static_cast<unsigned>(
                _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(values + 4 * i), bound, _CMP_LE_OQ)))
            << (4 * i);
  return mask;
}

constexpr PointKernels kAvx2{"avx2", best_of_avx2, node_avx2, least_avx2, at_most_avx2};

__attribute__((target("avx512f"))) size_t best_of_avx512(const double* alpha, const double* beta, size_t n,
                                                         double w) {
  if (n < 8) return best_of_portable(alpha, beta, n, w);
  const __m512d at = _mm512_set1_pd(w);
  __m512d best0 = _mm512_set1_pd(-kUnbounded), best1 = best0;
  __m512i where0 = _mm512_setzero_si512(), where1 = where0;
  __m512i here = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i eight = _mm512_set1_epi64(8);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512d v0 =
        _mm512_add_pd(_mm512_mul_pd(_mm512_loadu_pd(alpha + i), at), _mm512_loadu_pd(beta + i));
    const __m512d v1 =
        _mm512_add_pd(_mm512_mul_pd(_mm512_loadu_pd(alpha + i + 8), at), _mm512_loadu_pd(beta + i + 8));
    const __mmask8 g0 = _mm512_cmp_pd_mask(v0, best0, _CMP_GT_OQ);
    const __mmask8 g1 = _mm512_cmp_pd_mask(v1, best1, _CMP_GT_OQ);
    best0 = _mm512_mask_mov_pd(best0, g0, v0);
    where0 = _mm512_mask_mov_epi64(where0, g0, here);
    here = _mm512_add_epi64(here, eight);
    best1 = _mm512_mask_mov_pd(best1, g1, v1);
    where1 = _mm512_mask_mov_epi64(where1, g1, here);
    here = _mm512_add_epi64(here, eight);
  }
  for (; i < n; i += 8) {
    const __mmask8 there = n - i >= 8 ? 0xff : static_cast<__mmask8>((1u << (n - i)) - 1);
    const __m512d v = _mm512_add_pd(_mm512_mul_pd(_mm512_maskz_loadu_pd(there, alpha + i), at),
                                    _mm512_maskz_loadu_pd(there, beta + i));
    const __mmask8 g = _mm512_mask_cmp_pd_mask(there, v, best0, _CMP_GT_OQ);
    best0 = _mm512_mask_mov_pd(best0, g, v);
    where0 = _mm512_mask_mov_epi64(where0, g, here);
    here = _mm512_add_epi64(here, eight);
  }
  const __mmask8 second = _mm512_cmp_pd_mask(best1, best0, _CMP_GT_OQ);
  best0 = _mm512_mask_mov_pd(best0, second, best1);
  where0 = _mm512_mask_mov_epi64(where0, second, where1);
  const __mmask8 equal = _mm512_cmp_pd_mask(best0, _mm512_set1_pd(_mm512_reduce_max_pd(best0)), _CMP_EQ_OQ);
  alignas(64) int64_t places[8];
  _mm512_store_si512(places, where0);
  return static_cast<size_t>(places[__builtin_ctz(equal)]);
}

__attribute__((target("avx512f"))) size_t node_avx512(const double* alpha, const double* beta, double w,
                                                      double* until) {
  const __m512d at = _mm512_set1_pd(w);
  const __m512d a0 = _mm512_loadu_pd(alpha), a1 = _mm512_loadu_pd(alpha + 8);
  const __m512d b0 = _mm512_loadu_pd(beta), b1 = _mm512_loadu_pd(beta + 8);
  const __m512d v0 = _mm512_add_pd(_mm512_mul_pd(a0, at), b0);
  const __m512d v1 = _mm512_add_pd(_mm512_mul_pd(a1, at), b1);
  const __m512d top = _mm512_set1_pd(_mm512_reduce_max_pd(_mm512_max_pd(v0, v1)));
  const unsigned mask = static_cast<unsigned>(_mm512_cmp_pd_mask(v0, top, _CMP_EQ_OQ)) |
                        static_cast<unsigned>(_mm512_cmp_pd_mask(v1, top, _CMP_EQ_OQ)) << 8;
  const size_t winner = steepest(alpha, mask);
  const __m512d winner_alpha = _mm512_set1_pd(alpha[winner]);
  const __m512d winner_beta = _mm512_set1_pd(beta[winner]);
  const __m512d r0 = _mm512_sub_pd(a0, winner_alpha), r1 = _mm512_sub_pd(a1, winner_alpha);
  const __mmask8 up0 = _mm512_cmp_pd_mask(r0, _mm512_setzero_pd(), _CMP_GT_OQ);
  const __mmask8 up1 = _mm512_cmp_pd_mask(r1, _mm512_setzero_pd(), _CMP_GT_OQ);
  if ((up0 | up1) == 0) {
    *until = kUnbounded;
    return winner;
  }
  const __m512d never = _mm512_set1_pd(kUnbounded);
  const __m512d c0 = _mm512_mask_div_pd(never, up0, _mm512_sub_pd(winner_beta, b0), r0);
  const __m512d c1 = _mm512_mask_div_pd(never, up1, _mm512_sub_pd(winner_beta, b1), r1);
  *until = _mm512_reduce_min_pd(_mm512_min_pd(c0, c1));
  return winner;
}

__attribute__((target("avx512f"))) double least_avx512(const double* values) {
  return _mm512_reduce_min_pd(_mm512_min_pd(_mm512_loadu_pd(values), _mm512_loadu_pd(values + 8)));
}

__attribute__((target("avx512f"))) unsigned at_most_avx512(const double* values, double limit) {
  const __m512d bound = _mm512_set1_pd(limit);
  return static_cast<unsigned>(_mm512_cmp_pd_mask(_mm512_loadu_pd(values), bound, _CMP_LE_OQ)) |
         static_cast<unsigned>(_mm512_cmp_pd_mask(_mm512_loadu_pd(values + 8), bound, _CMP_LE_OQ)) << 8;
}

constexpr PointKernels kAvx512{"avx512", best_of_avx512, node_avx512, least_avx512, at_most_avx512};

#endif

const PointKernels& choose() {
#ifdef GPUSHARE_SLO_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return kAvx512;
  if (__builtin_cpu_supports("avx2")) return kAvx2;
#endif
  return kPortable;
}

}  // namespace

const PointKernels& portable_point_kernels() {
  return kPortable;
}

const PointKernels& point_kernels() {
  static const PointKernels& chosen = choose();
  return chosen;
}

}  // namespace gpushare::reference
