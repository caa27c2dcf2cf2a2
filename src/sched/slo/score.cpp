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
    sum_steps(single, steps);
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

// The sum of one curve for each step, moved by what the step comes after. The pieces of all of them are gone through in order of
// their starts, and each step knows which of its pieces it is in: to look the piece up by the slack would be
// decided by rounding where a piece begins, and a bin of a nanosecond may rise a thousand times as steeply as the next.
void ScoreCurve::sum_steps(const ScoreCurve& single, std::span<const CostStep> steps) {
  struct Start {
    double at_ns;
    uint32_t step, piece;
  };
  std::vector<Start> starts;
  for (uint32_t step = 0; step < steps.size(); ++step)
    for (uint32_t piece = 0; piece < single.pieces_.size(); ++piece)
      starts.push_back({single.pieces_[piece].start_ns - steps[step].after_ns, step, piece});
  std::stable_sort(starts.begin(), starts.end(),
                   [](const Start& a, const Start& b) { return a.at_ns < b.at_ns; });
  std::vector<uint32_t> in(steps.size(), UINT32_MAX);
  for (size_t i = 0; i < starts.size(); ++i) {
    in[starts[i].step] = starts[i].piece;
    if (i + 1 < starts.size() && starts[i + 1].at_ns == starts[i].at_ns) continue;
    Piece sum{starts[i].at_ns, 0, 0};
    for (size_t step = 0; step < steps.size(); ++step) {
      if (in[step] == UINT32_MAX) continue;
      const Piece& piece = single.pieces_[in[step]];
      // Rounding may put the place before the piece's start, or after its end.
      double end = kInfinity;
      if (in[step] + size_t{1} < single.pieces_.size()) end = single.pieces_[in[step] + 1].start_ns;
      const double place = std::clamp(sum.start_ns + steps[step].after_ns, piece.start_ns, end);
      sum.value += steps[step].cost * single.value_in(piece, place);
      sum.asymptote += steps[step].cost * piece.asymptote;
    }
    pieces_.push_back(sum);
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
