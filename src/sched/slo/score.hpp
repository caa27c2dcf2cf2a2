// score.hpp: the worth of running a request now rather than later (Orloj, 000, eq 4.1-4.2, several
// deadlines as in C.2).
//
// For a batch duration L, deadline D, cost c and an anticipated delay Exp(b), eq 4.2 is
//   p(t) = (c / E[L]) E[ 1{L <= s} e^{-b (s - L)} ],  s = D - t the slack,
// a function of the slack alone. Between bin edges x_j it is S_j + (B_j - S_j)(1 - e^{-b (s - x_j)}) with S_j
// its value at the edge and B_j = h_j / (E[L] b): rising or falling towards B_j throughout the piece. Written
// so, no exponential of a timestamp occurs and nothing overflows, whatever b and however long the process
// lives.
//
// Threads: values; concurrent reads are fine.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "sched/slo/distribution.hpp"

namespace gpushare::sched::slo {

// One step of a cost function: missing the deadline plus `after_ns` costs `cost` more.
struct CostStep {
  double after_ns = 0;  // >= 0, relative to the request's deadline
  double cost = 1;      // > 0
};

class ScoreCurve {
 public:
  // On [start_ns, start of the next): value + (asymptote - value)(1 - e^{-b (slack - start)}). The last piece
  // has no end.
  struct Piece {
    double start_ns;
    double value;
    double asymptote;
  };
  // A longest stretch on which the score only rises, or only falls, with the slack.
  struct Run {
    double start_ns;
    double end_ns;  // infinity for the last
    bool rising;
    size_t first_piece;
  };

  ScoreCurve() = default;
  // `batch` is the distribution of the batch duration, `mean_ns` its mean (> 0), `delay_rate` b in 1/ns (>
  // 0). No steps: one of cost 1 at the deadline.
  ScoreCurve(const Distribution& batch, double mean_ns, double delay_rate,
             std::span<const CostStep> steps = {});

  // The score at this slack; 0 where even the shortest duration misses, and for an empty curve.
  double at(double slack_ns) const;
  // As at(), with the search for the piece beginning at `near`: for slacks close to a known piece.
  double at_near(size_t near, double slack_ns) const;
  // Index of the piece that holds the slack, or SIZE_MAX below the first.
  size_t piece_at(double slack_ns) const;
  double delay_rate() const { return delay_rate_; }
  std::span<const Piece> pieces() const { return pieces_; }
  std::span<const Run> runs() const { return runs_; }
  bool empty() const { return pieces_.empty(); }

 private:
  void sum_steps(const ScoreCurve& single, std::span<const CostStep> steps);
  double value_in(const Piece& piece, double slack_ns) const;
  double delay_rate_ = 0;
  std::vector<Piece> pieces_;
  std::vector<Run> runs_;
};

}  // namespace gpushare::sched::slo
