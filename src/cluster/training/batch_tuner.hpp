// batch_tuner.hpp: which batch sizes the jobs of a device run with, after IADeep: Bayesian optimisation of the sum of
// how much slower they make progress than alone at their first batch size, by what is measured while they run.
//
// A Gaussian process models the difference between the measurements and a prediction. The next sizes are those of the
// least lower confidence bound. Only sizes whose memory fits together are tried, and for guaranteed jobs only sizes
// that are predicted to keep their limit. Measurements of jobs with the same configurations are used again. The search
// ends when the best bound is at measured sizes, or after 17 rounds. Plain values; one thread; deterministic.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cluster/scheduler.hpp"

namespace gpushare::cluster::training {

class BatchTuner {
 public:
  static constexpr size_t kMostRounds = 17;
  static constexpr double kGuaranteedLimit =
      1.04;  // slowdown of a guaranteed job that a size may be predicted to cause

  // The sizes to run with next, one for each job, from what is known of them; those of `jobs` (at their present sizes)
  // if nothing better is left to try. `predict(jobs)` gives each one's slowdown if they ran so. Sets `ended` when there
  // is nothing left to try.
  std::vector<double> next(const std::vector<JobInfo>& jobs, uint64_t memory_bytes,
                           const std::function<std::vector<double>(const std::vector<JobInfo>&)>& predict,
                           bool* ended) const;
  // The jobs ran at their present sizes with these slowdowns.
  void measured(const std::vector<JobInfo>& jobs, const std::vector<double>& slowdowns);
  // The least measured slowdown of such a job alone, else the assumed slowdown at its best size.
  double best_alone(const JobInfo& job) const;

 private:
  struct Point {
    std::vector<double> sizes;  // of the jobs in the order of the key
    std::vector<double> logs;   // of their slowdowns; the mean of what was measured
    double count = 0;
  };
  // The same for the same configurations whatever their sizes and order; `order` gets the jobs in its order.
  static std::string key_of(const std::vector<JobInfo>& jobs, std::vector<size_t>& order);

  std::unordered_map<std::string, std::vector<Point>> known_;
};

}  // namespace gpushare::cluster::training
