// performance.hpp: the performance of a job as a function of its units and its load, learned from noisy observations,
// with bounds. Used by the policies of shares/. Performance is relative to the job's objective: 1 meets it. No clock,
// no thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "cluster/model/curve.hpp"

namespace gpushare::cluster {

// 90% bounds of the mean performance, each exceeded by one in twenty. `high` is infinite where nothing is known.
struct PerformanceBounds {
  double low = 0;
  double estimate = 0;
  double high = 0;
};

class PerformanceLearner {
 public:
  virtual ~PerformanceLearner() = default;
  virtual void observe(double units, double load, double performance) = 0;
  virtual PerformanceBounds at(double units, double load) = 0;
};

enum class LearnerKind {
  // Cilantro's (section 3.6): a tree of bins over units per load with a Lipschitz constant of 10. Nothing is ever forgotten.
  kBinning,
  // Kernel ridge regression with a Matern kernel of 5/2 over units per load, which Cilantro has for many dimensions.
  kKernel,
  // The same over units and load as two variables, for jobs whose performance is no function of their ratio (batching).
  kSurface,
  // Ours: the kernel over units per load; observations lose weight with age, and when they no longer fit what was
  // learned (CUSUM of the standardised errors), those from before are dropped. Performance need not be monotone. Bounds
  // are wider where what was learned is steep, since there may be a step.
  kAdaptive,
};

// `scale_units` are the units that matter (a fair share), `load` a typical load: inputs are measured in them.
std::unique_ptr<PerformanceLearner> make_performance_learner(LearnerKind kind, double scale_units,
                                                             double load);

// For a job that reports no performance: its declaration holds.
std::unique_ptr<PerformanceLearner> make_declared_performance(PerformanceCurve curve, double slo);

}  // namespace gpushare::cluster
