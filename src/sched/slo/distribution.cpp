// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/distribution.hpp"

#include <algorithm>
#include <cmath>

namespace gpushare::sched::slo {
namespace {

// Edges of both, ascending, without repeats.
std::vector<double> merged_edges(std::span<const double> a, std::span<const double> b) {
  std::vector<double> edges;
  edges.reserve(a.size() + b.size());
  std::merge(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(edges));
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  return edges;
}

double power(double base, unsigned exponent) {
  double result = 1;
  for (; exponent != 0; exponent >>= 1, base *= base)
    if ((exponent & 1u) != 0) result *= base;
  return result;
}

// Walks a piecewise linear CDF at ascending points in amortised constant time.
class CdfCursor {
 public:
  explicit CdfCursor(const Distribution& of) : edges_(of.edges_ns()), values_(of.cdf_at_edges()) {}
  double at(double x) {
    while (next_ < edges_.size() && edges_[next_] <= x) ++next_;
    if (next_ == 0) return 0;
    if (next_ == edges_.size()) return 1;
    const double share = (x - edges_[next_ - 1]) / (edges_[next_] - edges_[next_ - 1]);
    return values_[next_ - 1] + share * (values_[next_] - values_[next_ - 1]);
  }

 private:
  std::span<const double> edges_;
  std::span<const double> values_;
  size_t next_ = 0;
};

}  // namespace

base::Result<Distribution> Distribution::from_bins(std::span<const double> edges_ns,
                                                   std::span<const double> weights) {
  if (weights.empty() || edges_ns.size() != weights.size() + 1)
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("a distribution of %zu weights needs %zu edges, not %zu", weights.size(),
                                     weights.size() + 1, edges_ns.size()));
  double total = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0)
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          base::format("weight %zu is %g: not a finite number >= 0", i, weights[i]));
    if (!std::isfinite(edges_ns[i]) || !std::isfinite(edges_ns[i + 1]) || edges_ns[i] < 0 ||
        edges_ns[i + 1] <= edges_ns[i])
      return base::Status(GPUSHARE_INVALID_ARGUMENT,
                          base::format("edges %zu and %zu are %g and %g ns: they must ascend from 0", i,
                                       i + 1, edges_ns[i], edges_ns[i + 1]));
    total += weights[i];
  }
  if (!(total > 0) || !std::isfinite(total))
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "the weights of a distribution add up to nothing");
  Distribution result;
  result.edges_.assign(edges_ns.begin(), edges_ns.end());
  result.cumulative_.reserve(edges_ns.size());
  double sum = 0;
  result.cumulative_.push_back(0);
  for (double weight : weights) result.cumulative_.push_back(std::min(1.0, (sum += weight) / total));
  result.cumulative_.back() = 1;
  return result;
}

Distribution Distribution::point(double ns) {
  Distribution result;
  ns = std::max(ns, 1.0);
  result.edges_ = {ns - 1, ns};
  result.cumulative_ = {0, 1};
  return result;
}

double Distribution::mean_ns() const {
  double mean = 0;
  for (size_t i = 0; i + 1 < edges_.size(); ++i) mean += probability(i) * 0.5 * (edges_[i] + edges_[i + 1]);
  return mean;
}

double Distribution::stddev_ns() const {
  const double mean = mean_ns();
  double variance = 0;
  for (size_t i = 0; i + 1 < edges_.size(); ++i) {
    const double middle = 0.5 * (edges_[i] + edges_[i + 1]) - mean;
    const double width = edges_[i + 1] - edges_[i];
    variance += probability(i) * (middle * middle + width * width / 12);
  }
  return std::sqrt(variance);
}

double Distribution::cdf(double x_ns) const {
  if (empty() || x_ns <= edges_.front()) return 0;
  if (x_ns >= edges_.back()) return 1;
  const size_t next =
      static_cast<size_t>(std::upper_bound(edges_.begin(), edges_.end(), x_ns) - edges_.begin());
  const double share = (x_ns - edges_[next - 1]) / (edges_[next] - edges_[next - 1]);
  return cumulative_[next - 1] + share * (cumulative_[next] - cumulative_[next - 1]);
}

double Distribution::quantile_ns(double q) const {
  if (empty()) return 0;
  if (q >= 1) return edges_.back();
  if (!(q > 0)) return edges_.front();
  const size_t next =
      static_cast<size_t>(std::lower_bound(cumulative_.begin(), cumulative_.end(), q) - cumulative_.begin());
  const double rise = cumulative_[next] - cumulative_[next - 1];
  const double share = rise > 0 ? (q - cumulative_[next - 1]) / rise : 1;
  return edges_[next - 1] + share * (edges_[next] - edges_[next - 1]);
}

Distribution Distribution::affine(double offset_ns, double factor) const {
  Distribution result = *this;
  for (double& edge : result.edges_) edge = offset_ns + factor * edge;
  // A factor may be so small that neighbouring edges fall together; they must still ascend.
  for (size_t i = 1; i < result.edges_.size(); ++i)
    if (result.edges_[i] <= result.edges_[i - 1])
      result.edges_[i] = std::nextafter(result.edges_[i - 1], INFINITY);
  return result;
}

// Keeps the edges that straight lines between the others would miss the most, in parts of the duration: the worst piece is cut at
// its worst edge until there are enough bins.
Distribution Distribution::coarsened(size_t bins) const {
  bins = std::max<size_t>(bins, 1);
  if (this->bins() <= bins) return *this;
  struct Piece {
    double miss;
    size_t first, last, worst;  // edges
    double above_ns;            // of the line over the worst edge
    bool operator<(const Piece& other) const { return miss < other.miss; }
  };
  const auto piece = [this](size_t first, size_t last) {
    Piece of{0, first, last, first, 0};
    const double from = edges_[first], rise = cumulative_[last] - cumulative_[first];
    const double slope = rise > 0 ? (edges_[last] - from) / rise : 0;
    for (size_t i = first + 1; i < last; ++i) {
      // The last hundredths tell little, at the upper end less than at the lower: a maximum asks for them.
      const double weight = std::min({1.0, 20 * cumulative_[i], 120 * (1 - cumulative_[i])});
      const double above_ns = from + slope * (cumulative_[i] - cumulative_[first]) - edges_[i];
      const double missed = weight * std::abs(above_ns) / edges_[i];
      if (missed > of.miss) {
        of.miss = missed;
        of.above_ns = above_ns;
        of.worst = i;
      }
    }
    return of;
  };
  std::vector<Piece> pieces{piece(0, edges_.size() - 1)};
  for (size_t cut = 1; cut < bins && !pieces.empty(); ++cut) {
    std::pop_heap(pieces.begin(), pieces.end());
    const Piece worst = pieces.back();
    pieces.pop_back();
    if (worst.worst == worst.first) {  // the others lie on the lines
      pieces.push_back(worst);
      break;
    }
    for (const Piece& half : {piece(worst.first, worst.worst), piece(worst.worst, worst.last)}) {
      pieces.push_back(half);
      std::push_heap(pieces.begin(), pieces.end());
    }
  }
  // A line between two edges of a bent curve lies on one side of it. So that what it misses lies on both, each edge moves by
  // half of what the lines beside it miss.
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.first < b.first; });
  Distribution result;
  result.edges_.push_back(edges_.front());
  result.cumulative_.push_back(0);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const size_t edge = pieces[i].last;
    double at = edges_[edge];
    if (i + 1 < pieces.size()) {
      const double moved = at - (pieces[i].above_ns + pieces[i + 1].above_ns) / 4;
      if (moved > result.edges_.back() && moved < edges_[pieces[i + 1].last]) at = moved;
    }
    if (at <= result.edges_.back()) at = std::nextafter(result.edges_.back(), INFINITY);
    result.edges_.push_back(at);
    result.cumulative_.push_back(cumulative_[edge]);
  }
  // The last inner edge takes what is missing of the mean, as far as its neighbours let it.
  if (const size_t edge = result.bins() - 1; edge > 0) {
    const double share = (result.probability(edge - 1) + result.probability(edge)) / 2;
    const double wanted = result.edges_[edge] + (mean_ns() - result.mean_ns()) / std::max(share, 1e-12);
    const double low = result.edges_[edge - 1], high = result.edges_[edge + 1];
    result.edges_[edge] = std::clamp(wanted, low + (high - low) * 1e-3, high - (high - low) * 1e-3);
  }
  return result;
}

Distribution mixture(std::span<const Distribution* const> parts, std::span<const double> weights) {
  std::vector<double> edges;
  double total = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i]->empty() || !(weights[i] > 0)) continue;
    total += weights[i];
    edges.insert(edges.end(), parts[i]->edges_ns().begin(), parts[i]->edges_ns().end());
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  Distribution result;
  if (edges.size() < 2) return result;
  result.cumulative_.assign(edges.size(), 0.0);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i]->empty() || !(weights[i] > 0)) continue;
    CdfCursor cursor(*parts[i]);
    for (size_t j = 0; j < edges.size(); ++j)
      result.cumulative_[j] += weights[i] / total * cursor.at(edges[j]);
  }
  for (double& value : result.cumulative_) value = std::min(value, 1.0);
  result.cumulative_.front() = 0;
  result.cumulative_.back() = 1;
  result.edges_ = std::move(edges);
  return result;
}

Distribution maximum(const Distribution& one, const Distribution& others, unsigned count, size_t bins) {
  if (count == 0 || others.empty()) return one.coarsened(bins);
  if (one.empty()) return {};
  Distribution fine;
  const double low = std::max(one.min_ns(), others.min_ns());
  CdfCursor first(one);
  CdfCursor rest(others);
  fine.edges_.push_back(low);
  fine.cumulative_.push_back(0);
  double previous = low;
  for (double edge : merged_edges(one.edges_ns(), others.edges_ns())) {
    if (edge <= low) continue;
    // F^count bends inside a bin: cut it where the product rises, so that straight lines follow it within
    // 1/100.
    const double at_edge = one.cdf(edge) * power(others.cdf(edge), count);
    const int cuts = 1 + static_cast<int>(std::min(63.0, 64 * (at_edge - fine.cumulative_.back())));
    for (int cut = 1; cut <= cuts; ++cut) {
      const double x = cut == cuts ? edge : previous + (edge - previous) * cut / cuts;
      if (x <= fine.edges_.back()) continue;
      fine.edges_.push_back(x);
      fine.cumulative_.push_back(std::max(fine.cumulative_.back(), first.at(x) * power(rest.at(x), count)));
    }
    previous = edge;
  }
  fine.cumulative_.back() = 1;
  return fine.coarsened(bins);
}

double expected_maximum_ns(const Distribution& one, const Distribution& others, unsigned count) {
  if (count == 0 || others.empty()) return one.mean_ns();
  if (one.empty()) return 0;
  // Eight-point Gauss-Legendre on [0, 1].
  constexpr double kNode[4] = {0.1834346424956498, 0.5255324099163290, 0.7966664774136267,
                               0.9602898564975363};
  constexpr double kWeight[4] = {0.3626837833783620, 0.3137066458778873, 0.2223810344533745,
                                 0.1012285362903763};
  const double low = std::max(one.min_ns(), others.min_ns());
  double mean = low;
  double previous = low;
  for (double edge : merged_edges(one.edges_ns(), others.edges_ns())) {
    if (edge <= low) continue;
    const double half = 0.5 * (edge - previous);
    const double f0 = one.cdf(previous), f1 = one.cdf(edge), g0 = others.cdf(previous), g1 = others.cdf(edge);
    double sum = 0;
    for (int i = 0; i < 4; ++i)
      for (double sign : {-1.0, 1.0}) {
        const double share = 0.5 + 0.5 * sign * kNode[i];
        sum += kWeight[i] * (1 - (f0 + share * (f1 - f0)) * power(g0 + share * (g1 - g0), count));
      }
    mean += half * sum;
    previous = edge;
  }
  return mean;
}

}  // namespace gpushare::sched::slo
