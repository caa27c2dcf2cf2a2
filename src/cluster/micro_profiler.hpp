// micro_profiler.hpp: what a scheduler of retraining is told of configurations before it decides, and what finding that
// out takes: Ekya's micro-profiler (thesis 002, section 2.4.4). A few epochs on a part of the data are extrapolated by
// a learning curve. Configurations that were never worth their time are profiled no more.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "cluster/ekya.hpp"

namespace gpushare::cluster {

struct ProfilerOptions {
  // A configuration's distance is how much more accurate another one is that takes at most its time. After every
  // `drop_every` windows, of the configurations of a stream, told apart by name, this fraction is dropped (rounded up):
  // those of the greatest mean distance. A configuration that was on the Pareto front (distance 0) in any window stays.
  // 0: none is dropped. In [0, 1].
  double drop_fraction = 0;
  size_t drop_every = 2;  // > 0
};

struct ProfilerReport {
  std::vector<double> gpu_seconds;  // by window
  size_t profiled = 0;              // configurations with a profile that were profiled, over all windows
  double median_error = 0;          // of their accuracies as told, in points; 0 if there are none
};

// The document as its schedulers are told of it. `error` is called for each observation: what it is multiplied by.
// Where there is a profile, the accuracy is what the learning curve says of the last epoch; else it is the truth by one
// error. Configurations that were dropped are not offered.
RetrainingProblem profile_retraining(const RetrainingProblem& truth, const ProfilerOptions& options,
                                     const std::function<double()>& error, ProfilerReport& report);

}  // namespace gpushare::cluster
