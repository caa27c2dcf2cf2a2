// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/score.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace gpushare::sched::slo {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

double ScoreCurve::value_in(const Piece& piece, double slack_ns) const {
  return piece.value +
         (piece.asymptote - piece.value) * -std::expm1(-delay_rate_ * (slack_ns - piece.start_ns));
}

ScoreCurve::ScoreCurve(const Distribution& batch, double mean_ns, double delay_rate,
                       std::span<const CostStep> steps)
    : delay_rate_(delay_rate) {
  if (batch.empty() || !(mean_ns > 0) || !(delay_rate > 0)) return;
  // The single-step curve of cost 1: one piece a bin, then the decay after the last.
  ScoreCurve single;
  single.delay_rate_ = delay_rate;
  double value = 0;
  for (size_t i = 0; i < batch.bins(); ++i) {
    const double width = batch.edges_ns()[i + 1] - batch.edges_ns()[i];
    const Piece piece{batch.edges_ns()[i], value, batch.probability(i) / width / (mean_ns * delay_rate)};
    single.pieces_.push_back(piece);
    value = single.value_in(piece, piece.start_ns + width);
  }
  single.pieces_.push_back({batch.max_ns(), value, 0});

  if (steps.empty() || (steps.size() == 1 && steps[0].after_ns == 0)) {
    pieces_ = std::move(single.pieces_);
    if (!steps.empty())
      for (Piece& piece : pieces_) {
        piece.value *= steps[0].cost;
        piece.asymptote *= steps[0].cost;
      }
  } else {
    std::vector<double> starts;
    for (const CostStep& step : steps)
      for (const Piece& piece : single.pieces_) starts.push_back(piece.start_ns - step.after_ns);
    std::sort(starts.begin(), starts.end());
    starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
    for (double start : starts) {
      Piece sum{start, 0, 0};
      for (const CostStep& step : steps) {
        // start + after_ns is a start of `single` itself or lies inside a piece; rounding may put it just
        // before, which moves the edge by one part in 2^52.
        const size_t in = single.piece_at(std::nextafter(start + step.after_ns, kInfinity));
        if (in == SIZE_MAX) continue;
        const Piece& piece = single.pieces_[in];
        sum.value += step.cost * single.value_in(piece, std::max(start + step.after_ns, piece.start_ns));
        sum.asymptote += step.cost * piece.asymptote;
      }
      pieces_.push_back(sum);
    }
  }
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const bool rising = pieces_[i].asymptote > pieces_[i].value;
    const double end = i + 1 < pieces_.size() ? pieces_[i + 1].start_ns : kInfinity;
    if (!runs_.empty() && runs_.back().rising == rising)
      runs_.back().end_ns = end;
    else
      runs_.push_back({pieces_[i].start_ns, end, rising, i});
  }
}

size_t ScoreCurve::piece_at(double slack_ns) const {
  const auto next = std::upper_bound(pieces_.begin(), pieces_.end(), slack_ns,
                                     [](double slack, const Piece& piece) { return slack < piece.start_ns; });
  return next == pieces_.begin() ? SIZE_MAX : static_cast<size_t>(next - pieces_.begin()) - 1;
}

double ScoreCurve::at_near(size_t near, double slack_ns) const {
  while (near + 1 < pieces_.size() && slack_ns >= pieces_[near + 1].start_ns) ++near;
  while (slack_ns < pieces_[near].start_ns)
    if (near-- == 0) return 0;
  return value_in(pieces_[near], slack_ns);
}

double ScoreCurve::at(double slack_ns) const {
  const size_t in = piece_at(slack_ns);
  return in == SIZE_MAX ? 0 : value_in(pieces_[in], slack_ns);
}

}  // namespace gpushare::sched::slo
