// sched/slo: deadline-aware serving as decisions only. Execution-time distributions, the batch-time model,
// the score of a request, queues that give the best-scored request, and batchers (ours and the published
// baselines) that form batches. Part of src/sched: no device, thread or clock; time comes in as an argument.
// May be called from executor and sim; calls base only.
//
// distribution.hpp: the distribution of a duration, and order statistics of independent durations.
//
// Orloj derives the maximum of a batch through a sum over subsets (000, eq 4.8), which is exponential in the
// batch size and cancels. Here the CDF of a maximum is the product of the CDFs, exact at every bin edge and
// linear in between; eq 4.8 remains as the oracle of the tests.
//
// Threads: values; concurrent reads are fine. Nothing blocks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/status.hpp"

namespace gpushare::sched::slo {

// A duration's distribution as a piecewise linear CDF: edges x_0 < ... < x_n with F(x_0) = 0 and F(x_n) = 1,
// uniform inside a bin. Durations are nanoseconds in double (exact up to 104 days).
class Distribution {
 public:
  Distribution() = default;  // empty: no knowledge

  // Bins [edges[i], edges[i+1]) with the given weights (any positive scale). Errors: INVALID_ARGUMENT when
  // edges do not ascend, a number is negative or not finite, sizes do not match, or all weights are zero.
  static base::Result<Distribution> from_bins(std::span<const double> edges_ns,
                                              std::span<const double> weights);
  // A constant, held as a bin of one nanosecond that ends at `ns`.
  static Distribution point(double ns);

  bool empty() const { return edges_.size() < 2; }
  size_t bins() const { return empty() ? 0 : edges_.size() - 1; }
  std::span<const double> edges_ns() const { return edges_; }
  std::span<const double> cdf_at_edges() const { return cumulative_; }
  double probability(size_t bin) const { return cumulative_[bin + 1] - cumulative_[bin]; }
  double min_ns() const { return empty() ? 0 : edges_.front(); }
  double max_ns() const { return empty() ? 0 : edges_.back(); }
  double mean_ns() const;
  double stddev_ns() const;
  // P(duration <= x). Zero below the first edge, one above the last; zero when empty.
  double cdf(double x_ns) const;
  // Smallest x with cdf(x) >= q, q clamped to [0, 1].
  double quantile_ns(double q) const;
  // The distribution of offset + factor * duration; factor > 0. Empty stays empty.
  Distribution affine(double offset_ns, double factor) const;
  // At most `bins` bins, with edges where quantiles would otherwise move the most in parts of themselves.
  Distribution coarsened(size_t bins) const;

 private:
  friend Distribution mixture(std::span<const Distribution* const> parts, std::span<const double> weights);
  friend Distribution maximum(const Distribution& one, const Distribution& others, unsigned count,
                              size_t bins);
  std::vector<double> edges_;
  std::vector<double> cumulative_;
};

// One draw from a part chosen with the given weights: F = sum w_a F_a. Empty parts and parts of weight zero
// are skipped.
Distribution mixture(std::span<const Distribution* const> parts, std::span<const double> weights);

// max of one draw from `one` and `count` independent draws from `others` (F = F_one * F_others^count), in at
// most `bins` bins, see coarsened.
Distribution maximum(const Distribution& one, const Distribution& others, unsigned count, size_t bins);

// E[max] of the same, without binning: the integral of 1 - F, by Gauss quadrature that is exact for a total
// of up to 15 draws.
double expected_maximum_ns(const Distribution& one, const Distribution& others, unsigned count);

}  // namespace gpushare::sched::slo
