// op_sharing.hpp: guaranteed sessions beside opportunistic ones on virtual time, under sched::OpController. Only
// interference is a model.
//
// Measured pairs say how much two jobs slow each other when both run all the time. The effect of a job that may use
// only a share of the time was not measured. It follows from one of the curves below, and the caller names the curve
// with the result.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sched/op_controller.hpp"

namespace gpushare::sim {

// The part of the guaranteed session's speed that is lost at share x, as a part of the measured loss at share 1:
enum class ContentionCurve {
  kTurns,    // x: while the other runs the loss is the measured one, else none
  kGaps,     // 0 up to 0.3, then a line to 1: the guaranteed session leaves gaps
  kConvex,   // x^2: light use does little harm
  kConcave,  // sqrt(x): any use harms, as when caches are lost
};
const char* name_of(ContentionCurve curve);
double loss_at(ContentionCurve curve, double share);

struct OpponentSpec {
  double weight = 1;
  // Speeds relative to alone when both run all the time, in (0, 1].
  double guaranteed_rate = 1;   // of the guaranteed session beside it
  double own_rate = 1;          // of the opportunistic one
  uint64_t from = 0;            // the guaranteed session's iteration at which it comes
  uint64_t until = UINT64_MAX;  // and goes
  double work_ns = 0;           // it goes when it has done so much; 0 = it has no end
};

// From `from` on the guaranteed session's iterations take `factor` times as long alone.
struct PhaseSpec {
  uint64_t from = 0;
  double factor = 1;
};

struct OpSharingSpec {
  double iteration_ns = 100e6;  // of the guaranteed session, alone
  uint64_t iterations = 4000;
  double jitter = 0.02;  // relative standard deviation of an iteration's time
  uint64_t seed = 1;
  ContentionCurve curve = ContentionCurve::kTurns;
  std::vector<OpponentSpec> opponents;
  std::vector<PhaseSpec> phases;  // ascending
  sched::OpControllerOptions options;
};

struct OpSharingResult {
  double slowdown =
      0;  // of the guaranteed session over the whole run, learning included: time over time alone - 1, without jitter
  double worst_after = 0;        // the largest slowdown over the run up to some iteration, from the 500th on
  double end_ns = 0;             // of the guaranteed session's last iteration
  std::vector<double> ended_ns;  // when each opportunistic session had done its work; 0 = it has not
  std::vector<double> throughput;  // of each opportunistic session, normalised: work over time
  double sum = 0;                  // weighted
  double oracle = 0;               // the most that who knows the curves can give at the target, weighted
  std::vector<double> share;       // in force at each iteration, for looking at reactions
  sched::OpController::Estimate estimate;
};

// Excesses of several opportunistic sessions at once add up; so do the losses among themselves. Deterministic.
OpSharingResult run_op_sharing(const OpSharingSpec& spec);

}  // namespace gpushare::sim
