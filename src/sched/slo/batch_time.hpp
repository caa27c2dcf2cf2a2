// batch_time.hpp: how long a batch takes. l_B = c0 + c1 k max l_r (Orloj, 000, eq 4.3-4.4): k requests padded
// to the longest.
//
// Threads: the owner serialises calls.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gpushare::sched::slo {

// c0 and c1, and their fit from measured batches by least squares with exponential forgetting (a window of
// about `memory` batches). Until eight batches of two different k * max l were seen, the values given stay.
class BatchTimeModel {
 public:
  explicit BatchTimeModel(double c0_ns = 0, double c1 = 1, double memory = 512);

  double c0_ns() const { return c0_ns_; }
  double c1() const { return c1_; }
  // Duration of a batch of `k` whose longest request takes `longest_ns` alone.
  double duration_ns(unsigned k, double longest_ns) const { return c0_ns_ + c1_ * k * longest_ns; }
  // A finished batch. Both stay >= 0; a measurement that is not a positive number is ignored.
  // Until the k * longest_ns seen have a relative variance of least_spread c0 and c1 keep their proportion:
  // larger where longest_ns is an expectation, whose own small movements would pass for a slope.
  void observe(unsigned k, double longest_ns, double measured_ns, double least_spread = 1e-6);
  // Keeps c0 and c1 as they are from now on.
  void freeze() { frozen_ = true; }
  // Raised when c0 or c1 moved by more than a part in a thousand since it was raised last.
  uint64_t version() const { return version_; }

 private:
  double c0_ns_, c1_;
  double keep_;  // weight left to a batch when the next one comes
  double n_ = 0, x_ = 0, xx_ = 0, y_ = 0, xy_ = 0;
  uint64_t seen_ = 0;
  bool frozen_ = false;
  double published_c0_, published_c1_;
  uint64_t version_ = 1;
};

}  // namespace gpushare::sched::slo
